"""The controller is killed at any moment and restarts from its journal: the groups are the same, and no token that the
journal has is generated twice.

A killed process leaves what had reached the file. The tests take the journal's bytes from disk between two callbacks of
the event loop; the next controller, with other workers, starts from exactly these. `crew` says what is real here. Not
covered: a machine that loses its page cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.engines.hashing_engine import STOP
from tests.support.fleets.virtual_fleet import SIZE, TASKS, Crew, roll
from windfall.controller.ledger.journal import Journal
from windfall.controller.ledger.journal_format import History, TokenRun, TurnGraded
from windfall.controller.rollout.stream import seed_of
from windfall.controller.workers.members import Patience
from windfall.types import Response

WAL = "000000.wal"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The journal's size on disk just before the next write, and the state of the run at that moment."""

    size: int
    callback: int
    groups: tuple[int, ...]
    """Tasks whose groups had come out."""


@cache
def first_run() -> tuple[dict[str, Response], bytes, list[Snapshot]]:
    """A run without loss: its responses, its journal, and every state that the journal had on disk."""
    left: dict[int, Snapshot] = {}
    with TemporaryDirectory() as folder:
        wal = Path(folder) / "journal" / WAL

        def look(crew: Crew) -> None:
            size = wal.stat().st_size
            left[size] = Snapshot(size=size, callback=crew.callbacks, groups=tuple(crew.groups))

        crew = roll(Path(folder), look, journal=wal.parent)
        data = wal.read_bytes()
    return crew.responses, data, list(left.values())


def restore_journal(data: bytes, folder: Path) -> tuple[Path, History]:
    """A journal folder with these bytes in it, and their history."""
    journal = folder / "journal"
    journal.mkdir(exist_ok=True)
    (journal / WAL).write_bytes(data)
    reading = Journal(journal, "settings")
    past = reading.open(0)
    reading.close()
    (journal / WAL).write_bytes(data)
    return journal, past


def positions(past: History) -> set[tuple[int, int]]:
    """(seed, position) of every token in the history."""
    out = set()
    for id, events in past.items():
        task, _, sibling = id.partition("/")
        seed = seed_of(3, int(task), int(sibling))
        for e in events:
            if isinstance(e, TokenRun):
                out |= {(seed, p) for p in range(e.position, e.position + len(e.tokens))}
    return out


def graded(past: History) -> Counter[str]:
    """Number of graded turns of each task. A missing reward is requested again, so it does not count."""
    return Counter(
        f"n/{id.partition('/')[0]}"
        for id, events in past.items()
        for e in events
        if isinstance(e, TurnGraded) and (e.reward, e.observation) != (None, None)
    )


def run_again(data: bytes, folder: Path) -> Crew:
    """Run the next controller. What the journal has is neither generated nor graded again; the groups are the same."""
    expected, _, _ = first_run()
    journal, past = restore_journal(data, folder)
    crew = roll(folder, journal=journal, check_from=1)
    assert crew.responses == expected
    assert not positions(past) & set(crew.made), "generated again although the journal has it"
    assert crew.rollout.restored_tokens == len(positions(past))
    tokens = sum(r.sampled_count for r in expected.values())
    assert sum(crew.made.values()) == len(crew.made) == tokens - len(positions(past))
    turns = {f"n/{i}": sum(r.turns for r in expected.values() if r.id.startswith(f"{i}/")) for i in TASKS}
    asked = Counter(task for task, _ in crew.env.asked)
    assert all(asked[task] <= turns[task] - graded(past)[task] for task in turns), "graded again"
    return crew


def test_journal_has_every_response_that_came_out() -> None:
    expected, data, left = first_run()
    assert len(left) > 15
    with TemporaryDirectory() as folder:
        _, past = restore_journal(data, Path(folder))
    assert len(positions(past)) == sum(r.sampled_count for r in expected.values())
    for id, response in expected.items():
        runs = [e for e in past[id] if isinstance(e, TokenRun)]
        tokens = [t for e in runs for t in e.tokens]
        assert tokens == [t for t, sampled in zip(response.tokens, response.sampled, strict=True) if sampled]
        assert runs[-1].finish == response.finish or response.finish == "length"
        assert tokens.count(STOP) <= response.turns


def test_controller_killed_after_any_write_to_the_journal(tmp_path: Path) -> None:
    _, data, left = first_run()
    for moment in left:
        run_again(data[: moment.size], tmp_path)


def test_group_that_came_out_is_on_disk_with_its_rewards(tmp_path: Path) -> None:
    """The trainer may have used it, so nothing of it is generated or graded again."""
    expected, data, left = first_run()
    with_groups = [moment for moment in left if moment.groups]
    assert with_groups
    for moment in with_groups:
        _, past = restore_journal(data[: moment.size], tmp_path)
        for index in moment.groups:
            for sibling in range(2):
                last = past[f"{index}/{sibling}"][-1]
                assert isinstance(last, TurnGraded), f"{index}/{sibling} at callback {moment.callback}"
                assert last.reward == expected[f"{index}/{sibling}"].reward


def test_tokens_are_on_disk_with_the_next_tick(tmp_path: Path) -> None:
    """If no turn ends for a long time, a killed controller loses the tokens of a moment, not of a whole response."""
    journal, found = tmp_path / "journal", []

    def look(crew: Crew) -> None:
        if crew.dispatch.ledger.counts.accepted >= 400 and not found:
            found.append((crew.dispatch.ledger.counts.accepted, (journal / WAL).read_bytes()))
            assert crew.main is not None
            crew.main.cancel()

    crew = roll(tmp_path, look, journal=journal, max_tokens=200, stop=frozenset())
    assert not crew.groups
    accepted, data = found[0]
    _, past = restore_journal(data, tmp_path)
    a_tick = Patience().tick_s / crew.step_s * len(TASKS) * SIZE
    assert accepted - len(positions(past)) <= a_tick + len(TASKS) * SIZE < 200


@pytest.mark.parametrize("less", [1, 3, 9, 40])
def test_controller_killed_in_the_middle_of_a_record(less: int, tmp_path: Path) -> None:
    _, data, left = first_run()
    for moment in left[1 :: len(left) // 6]:
        run_again(data[: moment.size - less], tmp_path)


@pytest.mark.parametrize("every", [500, 700, 1100])
def test_controller_killed_again_and_again(every: int, tmp_path: Path) -> None:
    """Every controller appends to the same journal. Workers are lost on the way, too."""
    expected, _, _ = first_run()
    data, made, controllers = b"", Counter(), 0
    while True:
        journal, past = restore_journal(data, tmp_path)
        controllers += 1
        kept: list[bytes] = []
        crew = roll(tmp_path, _kill_after(every, journal / WAL, kept), journal=journal, check_from=1)
        assert not positions(past) & set(crew.made)
        made += crew.made
        if not kept:
            break
        data = kept[0]
        assert controllers < 60, "no controller gets further than the one before"
    assert crew.responses == expected
    assert controllers >= 2
    assert set(made) == {(seed, p) for seed, p in positions(restore_journal((journal / WAL).read_bytes(), tmp_path)[1])}


def _kill_after(callbacks: int, wal: Path, kept: list[bytes]) -> Callable[[Crew], None]:
    def moment(crew: Crew) -> None:
        if crew.callbacks == callbacks // 2:
            crew.hands[0].kill(lossy=True)
        if crew.callbacks == callbacks:
            kept.append(wal.read_bytes())
            assert crew.main is not None
            crew.main.cancel()  # nothing that it does from here on counts

    return moment
