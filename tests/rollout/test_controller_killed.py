"""The controller is killed at any moment and begins anew from its journal: the same groups, and no token of it twice.

What a killed process leaves is what had reached the file: the journal's bytes are taken as they lie on disk between
two callbacks of the event loop, and the next life, with other workers, starts from just those. `crew` says what is
real here. Not covered: a machine that dies with its page cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from crew import SIZE, TASKS, Crew, roll
from hashing import STOP

from windfall.ledger.journal import Journal
from windfall.ledger.journal_format import TurnGraded
from windfall.ledger.journal_reader import History, TokenRun
from windfall.rollout.groups import seed_of
from windfall.scheduling.members import Patience
from windfall.types import Response

WAL = "000000.wal"


@dataclass(frozen=True, kw_only=True)
class Left:
    """What lay on disk at the last moment before the next write, and what there was then."""

    size: int
    callback: int
    groups: tuple[int, ...]
    """That had come out."""


@cache
def first_life() -> tuple[dict[str, Response], bytes, list[Left]]:
    """A life without loss: its responses, its journal, and every state in which that journal was on disk."""
    left: dict[int, Left] = {}
    with TemporaryDirectory() as folder:
        wal = Path(folder) / "journal" / WAL

        def look(crew: Crew) -> None:
            size = wal.stat().st_size
            left[size] = Left(size=size, callback=crew.callbacks, groups=tuple(crew.groups))

        crew = roll(Path(folder), look, journal=wal.parent)
        data = wal.read_bytes()
    return crew.responses, data, list(left.values())


def begin_with(data: bytes, folder: Path) -> tuple[Path, History]:
    """A journal's folder with these bytes in it, and what they say."""
    journal = folder / "journal"
    journal.mkdir(exist_ok=True)
    (journal / WAL).write_bytes(data)
    reading = Journal(journal, "settings")
    past = reading.open(0)
    reading.close()
    (journal / WAL).write_bytes(data)
    return journal, past


def positions(past: History) -> set[tuple[int, int]]:
    """(seed, position) of every token that the journal knows."""
    out = set()
    for id, events in past.items():
        task, _, sibling = id.partition("/")
        seed = seed_of(3, int(task), int(sibling))
        for e in events:
            if isinstance(e, TokenRun):
                out |= {(seed, p) for p in range(e.position, e.position + len(e.tokens))}
    return out


def judged(past: History) -> Counter[str]:
    """How many turns of each task have a verdict. A reward that was missing is asked for again."""
    return Counter(
        f"n/{id.partition('/')[0]}"
        for id, events in past.items()
        for e in events
        if isinstance(e, TurnGraded) and (e.reward, e.observation) != (None, None)
    )


def live_again(data: bytes, folder: Path) -> Crew:
    """The next life. What the journal has is neither made nor judged again; what comes out is the same."""
    expected, _, _ = first_life()
    journal, past = begin_with(data, folder)
    crew = roll(folder, journal=journal, check_from=1)
    assert crew.responses == expected
    assert not positions(past) & set(crew.made), "made again, though the journal has it"
    assert crew.rollout.restored_tokens == len(positions(past))
    tokens = sum(r.sampled_count for r in expected.values())
    assert sum(crew.made.values()) == len(crew.made) == tokens - len(positions(past))
    turns = {f"n/{i}": sum(r.turns for r in expected.values() if r.id.startswith(f"{i}/")) for i in TASKS}
    asked = Counter(task for task, _ in crew.env.asked)
    assert all(asked[task] <= turns[task] - judged(past)[task] for task in turns), "judged again"
    return crew


def test_the_journal_says_what_came_out() -> None:
    expected, data, left = first_life()
    assert len(left) > 15
    with TemporaryDirectory() as folder:
        _, past = begin_with(data, Path(folder))
    assert len(positions(past)) == sum(r.sampled_count for r in expected.values())
    for id, response in expected.items():
        stretches = [e for e in past[id] if isinstance(e, TokenRun)]
        said = [t for e in stretches for t in e.tokens]
        assert said == [t for t, made in zip(response.tokens, response.sampled, strict=True) if made]
        assert stretches[-1].finish == response.finish or response.finish == "length"
        assert said.count(STOP) <= response.turns


def test_killed_whenever_the_journal_has_grown(tmp_path: Path) -> None:
    _, data, left = first_life()
    for moment in left:
        live_again(data[: moment.size], tmp_path)


def test_group_that_came_out_is_on_disk_with_its_rewards(tmp_path: Path) -> None:
    """Somebody may have trained on it: nothing of it is made or judged again."""
    expected, data, left = first_life()
    with_groups = [moment for moment in left if moment.groups]
    assert with_groups
    for moment in with_groups:
        _, past = begin_with(data[: moment.size], tmp_path)
        for index in moment.groups:
            for sibling in range(2):
                last = past[f"{index}/{sibling}"][-1]
                assert isinstance(last, TurnGraded), f"{index}/{sibling} at callback {moment.callback}"
                assert last.reward == expected[f"{index}/{sibling}"].reward


def test_tokens_are_on_disk_with_the_next_tick(tmp_path: Path) -> None:
    """Where no turn ends for long, a controller that is killed loses a moment's tokens, not a response's."""
    journal, found = tmp_path / "journal", []

    def look(crew: Crew) -> None:
        if crew.dispatch.ledger.counts.accepted >= 400 and not found:
            found.append((crew.dispatch.ledger.counts.accepted, (journal / WAL).read_bytes()))
            assert crew.main is not None
            crew.main.cancel()

    crew = roll(tmp_path, look, journal=journal, max_tokens=200, stop=frozenset())
    assert not crew.groups
    accepted, data = found[0]
    _, past = begin_with(data, tmp_path)
    a_tick = Patience().tick_s / crew.step_s * len(TASKS) * SIZE
    assert accepted - len(positions(past)) <= a_tick + len(TASKS) * SIZE < 200


@pytest.mark.parametrize("less", [1, 3, 9, 40])
def test_killed_in_the_middle_of_a_record(less: int, tmp_path: Path) -> None:
    _, data, left = first_life()
    for moment in left[1 :: len(left) // 6]:
        live_again(data[: moment.size - less], tmp_path)


@pytest.mark.parametrize("every", [500, 700, 1100])
def test_many_lives(every: int, tmp_path: Path) -> None:
    """Killed again and again; each life adds to the same journal. Workers are lost on the way, too."""
    expected, _, _ = first_life()
    data, made, lives = b"", Counter(), 0
    while True:
        journal, past = begin_with(data, tmp_path)
        lives += 1
        kept: list[bytes] = []
        crew = roll(tmp_path, _kill_after(every, journal / WAL, kept), journal=journal, check_from=1)
        assert not positions(past) & set(crew.made)
        made += crew.made
        if not kept:
            break
        data = kept[0]
        assert lives < 60, "no life gets any further than the one before"
    assert crew.responses == expected
    assert lives >= 2
    assert set(made) == {(seed, p) for seed, p in positions(begin_with((journal / WAL).read_bytes(), tmp_path)[1])}


def _kill_after(callbacks: int, wal: Path, kept: list[bytes]) -> Callable[[Crew], None]:
    def moment(crew: Crew) -> None:
        if crew.callbacks == callbacks // 2:
            crew.hands[0].kill(lossy=True)
        if crew.callbacks == callbacks:
            kept.append(wal.read_bytes())
            assert crew.main is not None
            crew.main.cancel()  # nothing of what it does from here on counts

    return moment
