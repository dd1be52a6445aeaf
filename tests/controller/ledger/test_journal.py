"""Reading returns exactly what was accepted, wherever and however often the writer was killed.

Not covered: a machine that crashes (what the operating system had not written by then is lost; the checkpoint remains).
"""

from __future__ import annotations

import errno
import io
import os
import random
import signal
import subprocess
import sys
import tracemalloc
from array import array
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from windfall.controller.ledger import journal_format
from windfall.controller.ledger.episode import Episode
from windfall.controller.ledger.journal import Journal
from windfall.controller.ledger.journal_format import History, TokenRun, TurnGraded, read_records
from windfall.controller.ledger.ledger import Ledger
from windfall.controller.rollout.stream import OpenGroup, Rollout
from windfall.errors import WindfallError
from windfall.link.messages import Tokens
from windfall.recipe.sections import Recipe
from windfall.recipe.sections import RolloutSection as Options
from windfall.types import Sampling, Task

Row = tuple[int, int, list[int]]


def frame(*rows: Row, version: int = 1, finished: Any = None) -> Tokens:
    """Rows of (handle, position, tokens); the log-prob of token t is -t / 8."""
    flat = [t for _, _, tokens in rows for t in tokens]
    counts = () if len(flat) == len(rows) else tuple(len(tokens) for _, _, tokens in rows)
    return Tokens(
        version=version, handles=tuple(r[0] for r in rows), positions=tuple(r[1] for r in rows), counts=counts,
        tokens=array("I", flat).tobytes(), logprobs=array("f", [-t / 8 for t in flat]).tobytes(),
        finished=finished or {},
    )  # fmt: skip


def plain(past: History) -> dict[str, list[Any]]:
    """For comparison: (position, tokens, version, finish) of a run, (reward, observation, error) of a grade."""
    for items in past.values():
        for e in items:
            assert isinstance(e, TurnGraded) or e.logprobs.tolist() == [-t / 8 for t in e.tokens]
    return {
        id: [
            (e.position, e.tokens.tolist(), e.version, e.finish) if isinstance(e, TokenRun)
            else (e.reward, e.observation, e.error)
            for e in items
        ]
        for id, items in past.items()
    }  # fmt: skip


def read(folder: Path, settings: str = "s", step: int = 0) -> dict[str, list[Any]]:
    """Read a copy: opening a journal also writes to it."""
    copy = folder.with_name(f"{folder.name}-copy")
    copy.mkdir(exist_ok=True)
    for path in copy.iterdir():
        path.unlink()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    journal = Journal(copy, settings)
    past = plain(journal.open(step))
    journal.close()
    return past


def story(journal: Journal) -> None:
    """Write two responses: one has two turns, one moves to another version."""
    journal.write_assigned({1: "1/0", 2: "1/1"})
    journal.write_tokens(frame((1, 0, [5]), (2, 0, [6])))
    journal.write_tokens(frame((1, 1, [7, 8]), (2, 1, [9, 3]), finished={1: "stop"}))
    journal.write_grade(TurnGraded(id="1/1", observation="go on"))
    journal.write_assigned({3: "1/0", 4: "1/1"})
    journal.write_tokens(frame((3, 3, [4]), version=2, finished={0: "length"}))
    journal.write_tokens(frame((4, 5, [2, 3]), version=2, finished={0: "stop"}))
    journal.write_grade(TurnGraded(id="1/0", reward=0.5))
    journal.write_grade(TurnGraded(id="1/1", error="timed out"))


STORY = {
    "1/0": [(0, [5, 7, 8], 1, None), (3, [4], 2, "length"), (0.5, None, "")],
    "1/1": [(0, [6, 9, 3], 1, "stop"), (None, "go on", ""), (5, [2, 3], 2, "stop"), (None, None, "timed out")],
}


def written(folder: Path) -> Path:
    journal = Journal(folder, "s")
    assert journal.open(0) == {}
    story(journal)
    journal.close()
    return folder / "000000.wal"


def test_round_trip(tmp_path: Path) -> None:
    written(tmp_path / "j")
    assert read(tmp_path / "j") == STORY


def test_records_from_before_policies_had_names_are_read(tmp_path: Path) -> None:
    frame_before = [11, 3, [1], [0], [], b"\0\0\0\0", b"\0\0\0\0", {}]
    before = [
        [1, "s"], [2, {1: "7/0"}], [3, frame_before], [4, "7/0", 1.0, None, "", []], [5, 3, [7]], [6, "7/0", -1, b""],
    ]  # fmt: skip
    path = tmp_path / "000000.wal"
    path.write_bytes(b"".join(journal_format.encode_record(msgspec.msgpack.encode(record)) for record in before))
    records: list[Any] = [record for _, record in read_records(path)]
    started, assigned, accepted, graded, trained, prompted = records
    assert (started.next_task, assigned.policies, accepted.frame.versions) == (-1, {}, {})
    assert accepted.frame.by_policy == {"": 3}
    assert (graded.role, graded.rewards, trained.policy, prompted.role) == ("", (), "", "")


def test_flushed_records_outlive_kill_9(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from windfall.controller.ledger.journal import Journal\n"
        "from windfall.controller.ledger.journal_format import TurnGraded\n"
        "j = Journal(Path(sys.argv[1]), 's'); j.open(0); j.write_grade(TurnGraded(id='1/0', reward=1.0)); j.flush()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "j")], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert read(tmp_path / "j") == {"1/0": [(1.0, None, "")]}


def prefixes(path: Path) -> list[tuple[int, dict[str, list[Any]]]]:
    """(offset after an intact record, history up to there)."""
    whole, out = path.read_bytes(), []
    for end in [0, *(end for end, _ in read_records(path))]:
        folder = path.parent.with_name("prefix")
        folder.mkdir(exist_ok=True)
        (folder / path.name).write_bytes(whole[:end])
        out.append((end, read(folder)))
    return out


def test_writer_killed_at_any_byte(tmp_path: Path) -> None:
    """Wherever the file is cut off, the records before are there, and writing continues after it is opened again."""
    path = written(tmp_path / "j")
    whole, known = path.read_bytes(), prefixes(path)
    assert known[-1] == (len(whole), STORY)
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        good, past = max((k for k in known if k[0] <= cut), key=lambda k: k[0])
        journal = Journal(tmp_path / "j", "s")
        assert plain(journal.open(0)) == past
        journal.write_assigned({1: "new"})
        journal.write_tokens(frame((1, 0, [1])))
        journal.close()
        assert path.read_bytes()[:good] == whole[:good]
        assert read(tmp_path / "j") == past | {"new": [(0, [1], 1, None)]}


def test_changed_byte_is_found(tmp_path: Path) -> None:
    """Wherever it is, nothing from that record on is used, and nothing before it is lost."""
    path = written(tmp_path / "j")
    whole, known = path.read_bytes(), prefixes(path)
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        _, past = max((k for k in known if k[0] <= at), key=lambda k: k[0])
        assert read(tmp_path / "j") == past


@pytest.mark.parametrize("tail", [b"\0" * 4096, b"\xff" * 4096, b"\x08\0\0\0" + b"\0" * 4])
def test_tail_without_a_record_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    path = written(tmp_path / "j")
    with path.open("ab") as file:
        file.write(tail)
    assert read(tmp_path / "j") == STORY


def test_record_with_an_impossible_length_is_not_read(tmp_path: Path) -> None:
    path = written(tmp_path / "j")
    with path.open("ab") as file:
        file.write(b"\xff\xff\xff\x7f" + b"\0" * 4)
        file.truncate(4 << 30)  # a sparse file that is long enough for this length
    tracemalloc.start()
    try:
        assert len(list(read_records(path))) == 10
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_rotate_removes_what_the_checkpoint_covers(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", "s")
    journal.open(0)
    story(journal)
    journal.rotate(10, {}, {}, next_task=2, lowest=2)
    assert [p.name for p in (tmp_path / "j").iterdir()] == ["000010.wal"]
    journal.write_assigned({9: "2/0"})
    journal.write_tokens(frame((9, 0, [1])))
    journal.rotate(10, {}, {}, next_task=3, lowest=2)  # the same checkpoint again, as at a stop: nothing is lost
    journal.close()
    assert read(tmp_path / "j", step=10) == {"2/0": [(0, [1], 1, None)]}


def test_kill_between_checkpoint_and_rotate(tmp_path: Path) -> None:
    """The file of the previous checkpoint is still there, and is continued."""
    journal = Journal(tmp_path / "j", "s")
    journal.open(0)
    journal.write_assigned({1: "1/0"})
    journal.write_tokens(frame((1, 0, [1, 2])))
    again = Journal(tmp_path / "j", "s")
    journal.close()
    again.open(10)
    again.write_assigned({1: "1/0"})
    again.write_tokens(frame((1, 2, [3])))
    again.close()
    assert [p.name for p in (tmp_path / "j").iterdir()] == ["000000.wal"]
    assert read(tmp_path / "j", step=10) == {"1/0": [(0, [1, 2, 3], 1, None)]}


def test_kill_in_the_middle_of_rotate(tmp_path: Path) -> None:
    """The old file is still there beside the new one. It is not needed, unless the new checkpoint is lost."""
    journal = Journal(tmp_path / "j", "s")
    journal.open(0)
    journal.write_assigned({1: "1/0", 2: "2/0"})
    journal.write_tokens(frame((1, 0, [1]), (2, 0, [2])))
    journal.close()
    old = (tmp_path / "j" / "000000.wal").read_bytes()
    journal.open(0)
    journal.rotate(10, {}, {}, next_task=3, lowest=3)
    journal.write_assigned({1: "3/0"})
    journal.write_tokens(frame((1, 0, [3])))
    journal.close()
    (tmp_path / "j" / "000000.wal").write_bytes(old)
    assert set(journal.read(10, 3).history) == {"3/0"}
    assert set(read(tmp_path / "j", step=0)) == {"1/0", "2/0", "3/0"}


def test_order_is_kept_when_the_trainer_falls_back(tmp_path: Path) -> None:
    """The controller died at step 25 (its trainer survived), then the trainer (back at checkpoint 20), then both."""
    for life, step in enumerate([20, 25, 20, 20, 25]):
        journal = Journal(tmp_path / "j", "s")
        past = plain(journal.open(step))
        assert past == ({"26/0": [(0, list(range(life)), 1, None)]} if life else {})
        journal.write_assigned({1: "26/0"})
        journal.write_tokens(frame((1, life, [life])))
        journal.close()
    assert read(tmp_path / "j", step=20) == {"26/0": [(0, [0, 1, 2, 3, 4], 1, None)]}


def test_responses_of_other_settings_are_ignored(tmp_path: Path) -> None:
    written(tmp_path / "j")
    assert read(tmp_path / "j", "other") == {}
    other = Journal(tmp_path / "j", "other")
    assert other.open(0) == {}
    other.write_assigned({1: "1/0"})
    other.write_tokens(frame((1, 0, [4])))
    other.close()
    assert read(tmp_path / "j", "other") == {"1/0": [(0, [4], 1, None)]}
    assert read(tmp_path / "j") == STORY, "with the earlier settings they are there again"


def test_several_controller_processes_write_to_one_file(tmp_path: Path) -> None:
    """Handles start from 1 in each process and have the meaning which that process wrote."""
    for life in range(3):
        journal = Journal(tmp_path / "j", "s")
        journal.open(0)
        journal.write_assigned({1: f"{life}/0", 2: "9/0"})
        journal.write_tokens(frame((1, 0, [life]), (2, life, [7])))
        journal.close()
    assert read(tmp_path / "j") == {
        "0/0": [(0, [0], 1, None)], "1/0": [(0, [1], 1, None)], "2/0": [(0, [2], 1, None)],
        "9/0": [(0, [7, 7, 7], 1, None)],
    }  # fmt: skip


def test_only_accepted_rows_are_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", "s")
    journal.open(0)
    journal.write_assigned({1: "1/0", 2: "1/1", 3: "1/2"})
    journal.write_tokens(frame((1, 0, [1, 2]), (2, 0, [3]), (3, 0, [4, 5]), finished={0: "stop", 2: "length"}), [0, 2])
    journal.write_tokens(frame((1, 9, [1]), (2, 0, [6]), (3, 9, [4])), [1])
    journal.write_tokens(frame((2, 0, [6, 7, 8])), [0])  # overlaps: its first token is known
    journal.close()
    assert read(tmp_path / "j") == {
        "1/0": [(0, [1, 2], 1, "stop")], "1/1": [(0, [6, 7, 8], 1, None)], "1/2": [(0, [4, 5], 1, "length")],
    }  # fmt: skip


def test_long_journal_needs_little_memory(tmp_path: Path) -> None:
    """One token per frame and response, as engines generate them: runs are merged while they are read."""
    journal, steps, handles = Journal(tmp_path / "j", "s"), 2000, range(1, 33)
    journal.open(0)
    journal.write_assigned({h: f"1/{h}" for h in handles})
    for position in range(steps):
        journal.write_tokens(frame(*((h, position, [h]) for h in handles)))
    journal.close()
    again = Journal(tmp_path / "j", "s")
    tracemalloc.start()
    try:
        past = again.open(0)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    again.close()
    assert [len(items) for items in past.values()] == [1] * len(handles)
    need = steps * len(handles) * 8
    assert held < 2 * need
    assert peak < 2 * need + (1 << 20), "it must not hold the file in memory"


def test_writing_to_a_closed_journal_raises(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not open"):
        Journal(tmp_path / "j", "s").write_grade(TurnGraded(id="1/0", reward=1.0))


def restore(past: History, ids: list[str]) -> dict[str, Episode]:
    """Restore episodes as a stream does."""
    opened: dict[str, Episode] = {}
    dispatch: Any = SimpleNamespace(open=lambda e, listener: opened.update({e.id: e}))
    unused: Any = None
    env: Any = SimpleNamespace(name="unused")
    text: Any = SimpleNamespace(decode=unused, stop=frozenset())
    rollout = Rollout(dispatch, env, {"": text}, Recipe(rollout=Options(max_tokens=1000)), seed=0, events=unused)
    rollout.history = past
    stream = rollout.stream(size=1, sampling=lambda policy: Sampling(), on_group=unused, on_skipped=unused)
    for id in ids:
        stream._open_response(id, OpenGroup(index=1, task=Task(id="t", prompt=""), size=len(ids)), (1,))
    return opened


@pytest.mark.parametrize("seed", range(5))
def test_ledger_and_journal_agree_over_many_lives(tmp_path: Path, seed: int) -> None:
    """Random frames, overlapping, behind gaps, of wrong versions; the controller dies now and then, its file torn."""
    rng, ids = random.Random(seed), [f"1/{n}" for n in range(4)]
    journal = Journal(tmp_path, "s")
    for _ in range(12):
        path = tmp_path / "000000.wal"
        if path.exists() and rng.random() < 0.5:
            path.write_bytes(path.read_bytes() + rng.randbytes(rng.randint(1, 20)))
        ledger, before = Ledger(), restore(journal.open(0), ids)
        for one in before.values():
            ledger.open(one)
        for _ in range(25):
            _something(rng, ledger, journal)
            ledger.check()
        journal.close()
        now = {id: e.episode for id, e in ledger.entries.items()}
        for e in ledger.entries.values():  # the version of a running response is recorded when its assignment ends
            e.episode.record(len(e.episode.tokens) - e.recorded, e.version, "", "")
        back = restore(journal.open(0), ids)
        for id in ids:
            assert (back[id].tokens, back[id].logprobs, back[id].version_runs) == (
                now[id].tokens,
                now[id].logprobs,
                now[id].version_runs,
            )
    assert all(len(e.tokens) > 30 for e in now.values())
    journal.close()


def _something(rng: random.Random, ledger: Ledger, journal: Journal) -> None:
    if ledger.queues[""]:
        entry = ledger.assign(ledger.queues[""].popleft(), rng.choice("ab"), rng.choice([1, 2]))
        journal.write_assigned({entry.handle: entry.episode.id})
        return
    worker = rng.choice("ab")
    if rng.random() < 0.1:
        ledger.release(worker)
        return
    held = ledger.held(worker)
    rows: list[Row] = []
    for entry in held:
        have = len(entry.episode.tokens)
        position = max(0, have + rng.choice([0, 0, 0, 0, 0, -1, -3, 2]))
        rows.append((entry.handle, position, [rng.randrange(100) for _ in range(rng.randint(1, 4))]))
    if not rows:
        return
    sent = frame(*rows, (999, 0, [1]), version=held[0].version if rng.random() < 0.9 else 7)
    accepted = ledger.accept(worker, sent)
    if accepted.tokens:
        journal.write_tokens(sent, None if accepted.complete else accepted.rows)


def test_tokens_after_a_gap_are_generated_again(tmp_path: Path) -> None:
    """If a file is damaged and a later one continues, only the tokens before the gap are used."""
    journal = Journal(tmp_path / "j", "s")
    journal.open(0)
    journal.write_assigned({1: "1/0"})
    journal.write_tokens(frame((1, 0, [1, 2])))
    journal.write_tokens(frame((1, 5, [6, 7])))
    journal.close()
    again = Journal(tmp_path / "j", "s")
    assert restore(again.open(0), ["1/0"])["1/0"].tokens.tolist() == [1, 2]
    again.close()


def test_folder_is_created_and_files_are_named_by_step(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a" / "b", "s")
    journal.open(7)
    journal.flush()
    assert os.listdir(tmp_path / "a" / "b") == ["000007.wal"]
    journal.close()
    journal.flush()  # harmless


def test_fall_back_keeps_responses_of_later_steps(tmp_path: Path) -> None:
    """The controller was restarted at step 15, the trainer is back at checkpoint 10, which is already saved."""
    for step, id in ((10, "40/0"), (15, "60/0")):
        journal = Journal(tmp_path / "j", "s")
        journal.open(step)
        journal.write_assigned({1: id})
        journal.write_tokens(frame((1, 0, [1])))
        journal.close()
    journal = Journal(tmp_path / "j", "s")
    assert set(journal.open(10)) == {"40/0", "60/0"}
    journal.rotate(20, {}, {}, next_task=80, lowest=80)
    assert [p.name for p in (tmp_path / "j").iterdir()] == ["000020.wal"]
    journal.close()


def test_every_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "j")
    read_files: list[Path] = []
    monkeypatch.setattr(
        journal_format, "read_records", lambda path, real=read_records: read_files.append(path) or real(path)
    )
    journal = Journal(tmp_path / "j", "s")
    found = journal.read(0)
    assert plain(journal.open(0, found)) == STORY
    journal.close()
    assert read_files == [tmp_path / "j" / "000000.wal"]


def test_rows_become_runs_in_the_order_they_were_written(tmp_path: Path) -> None:
    """Responses alternate, move, change version and are graded."""
    rng, journal = random.Random(3), Journal(tmp_path / "j", "s")
    journal.open(0)
    have = dict.fromkeys([f"1/{n}" for n in range(7)], 0)
    expected: dict[str, list[Any]] = {id: [] for id in have}
    for handle in range(1, 400, 7):
        names = {handle + n: id for n, id in enumerate(have)}
        journal.write_assigned(names)
        version = rng.choice([1, 2])
        rows, finished = [], {}
        for n, (h, id) in enumerate(names.items()):
            tokens = [rng.randrange(99) for _ in range(rng.randint(1, 3))]
            rows.append((h, have[id], tokens))
            if rng.random() < 0.2:
                finished[n] = "stop"
            have[id] += len(tokens)
            expected[id].append((tokens, version, finished.get(n)))
        journal.write_tokens(frame(*rows, version=version, finished=finished))
        for n in finished:
            for _ in range(rng.randint(0, 2)):
                journal.write_grade(TurnGraded(id=list(have)[n], reward=0.5))
                expected[list(have)[n]].append("graded")
    journal.close()
    result = read(tmp_path / "j")
    for id, items in expected.items():
        flat = [t for s in items if s != "graded" for t in s[0]]
        assert [t for s in result[id] if len(s) == 4 for t in s[1]] == flat
        kinds = "".join("j" if s == "graded" else "." if s[2] else "" for s in items)
        assert "".join("j" if len(s) == 3 else "." if s[3] else "" for s in result[id]) == kinds
        assert all(a[0] + len(a[1]) == b[0] for a, b in pairwise([s for s in result[id] if len(s) == 4]))


class FullDisk(io.BytesIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_full_disk_fails_every_later_write_and_keeps_what_was_flushed(tmp_path: Path) -> None:
    journal, results = Journal(tmp_path / "j", "s"), []
    journal.failed = results.append
    journal.open(0)
    journal.write_grade(TurnGraded(id="1/0", reward=1.0))
    journal.flush()
    file, journal._file = journal._file, FullDisk()
    assert file is not None
    file.close()
    journal.write_grade(TurnGraded(id="1/1", reward=1.0))
    with pytest.raises(WindfallError, match="No space left on device") as caught:
        journal.flush()
    assert caught.value.where == str(tmp_path / "j" / "000000.wal")
    journal._file = io.BytesIO()  # there is room again, but a record is missing
    for again in (
        journal.flush,
        lambda: journal.write_grade(TurnGraded(id="1/2", reward=1.0)),
        lambda: journal.rotate(1, {}, {}, next_task=0, lowest=0),
    ):
        with pytest.raises(WindfallError):
            again()
    assert results == [caught.value]
    journal.close()
    assert read(tmp_path / "j") == {"1/0": [(1.0, None, "")]}


def with_experts(sent: Tokens, *parts: bytes) -> Tokens:
    """The frame with experts of two bytes for each token, which end with the one before the last new token."""
    return msgspec.structs.replace(sent, experts=b"".join(parts), expert_counts=tuple(len(part) // 2 for part in parts))


def test_experts_are_read_back(tmp_path: Path) -> None:
    """With a prompt, a response that moved to another worker, a frame of which one row was accepted, and a cut turn."""
    journal, ledger = Journal(tmp_path / "j", "s"), Ledger()
    journal.open(0)
    new = [Episode(id, prompt=(5, 6), seed=1, max_tokens=9, sampling=Sampling(), stop=frozenset()) for id in "ab"]
    for e in new:
        ledger.open(e)

    def assign(id: str, worker: str) -> None:
        ledger.queues[""].remove(id)
        journal.write_assigned({ledger.assign(id, worker, 1).handle: id})

    def accept(worker: str, sent: Tokens) -> None:
        accepted = ledger.accept(worker, sent)
        journal.write_tokens(sent, None if accepted.complete else accepted.rows)

    assign("a", "x")
    assign("b", "x")
    accept("x", with_experts(frame((1, 0, [7]), (2, 0, [8])), b"aabb", b"AABB"))
    accept("x", with_experts(frame((1, 1, [7, 8]), (2, 1, [9])), b"ccdd", b"CC"))
    ledger.requeue(ledger.entries["a"])
    assign("a", "y")
    accept("y", with_experts(frame((3, 3, [1])), b"ee"))
    accept("x", with_experts(frame((1, 3, [1]), (2, 2, [2])), b"??", b"DD"))
    ledger.cut("b", 2)
    journal.write_cut("b", 2)
    journal.close()
    history = Journal(tmp_path / "j", "s").open(0)
    runs = {id: [run for run in past if isinstance(run, TokenRun)] for id, past in history.items()}
    read_back = {id: b"".join(bytes(run.experts.data) for run in past if run.experts) for id, past in runs.items()}
    assert read_back == {"a": b"aabbccddee", "b": b"AABBCCDD"}
    assert [run.experts and run.experts.start for run in runs["a"]] == [-2]
    assert [bytes(e.experts.data) for e in new if e.experts] == [b"aabbccddee", b"AABBCC"]
