"""Responses in which several roles speak: one conversation for each, rewards for each, and the same response whenever
the controller is killed and whichever workers are lost. One policy with labels stands for several policies here."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from tests.support.engines.scripted_engine import Asks, Scripted, rolling, run
from tests.support.fleets.virtual_fleet import Crew, roll
from windfall.controller.ledger.episode import segment_seed
from windfall.controller.ledger.journal import Journal
from windfall.controller.ledger.journal_format import History, TokenRun, TurnGraded
from windfall.controller.rollout.stream import Stream, seed_of
from windfall.events import log
from windfall.types import Feedback, Request, Response, Sampling, Task, Turn

WAL = "000000.wal"
A, B = ":a", ":b"


class RolePlay:
    """Two roles take one to three turns each, in an order that follows from what they say; some grades are slow, and
    some fail once."""

    def __init__(self) -> None:
        self.asked: Counter[tuple[str, tuple[str, ...]]] = Counter()

    def task(self, index: int) -> Task:
        return Task(id=f"n/{index}", prompt=f"{index}=", answer=index, role=A if index % 2 else "")

    async def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        texts = tuple(f"{turn.role} {turn.text}" for turn in turns)
        self.asked[task.id, texts] += 1
        bits = xxhash.xxh3_64_intdigest("/".join(texts).encode())
        await asyncio.sleep(0.11 * (bits % 3))
        if bits % 7 == 0 and self.asked[task.id, texts] == 1:
            raise ConnectionError("the grader is away")
        if len(turns) < 2 + bits % 4:
            return Feedback(observation=f"<{len(turns)}>", role=(A, B, "")[bits // 4 % 3])
        return Feedback(reward=-1.0, rewards={A: float(len(texts)), B: float(bits % 10)})


@cache
def first_run() -> tuple[dict[str, Response], bytes, list[int]]:
    """The responses of an undisturbed run, its journal, and every size that the journal had on disk."""
    sizes: dict[int, None] = {}
    with TemporaryDirectory() as folder:
        wal = Path(folder) / "journal" / WAL
        crew = roll(
            Path(folder), lambda crew: sizes.setdefault(wal.stat().st_size), journal=wal.parent, make_env=RolePlay
        )
        data = wal.read_bytes()
    spoken = [[segment.role for segment in r.segments] for r in crew.responses.values()]
    assert {len(roles) for roles in spoken} >= {1, 2}
    assert any(r.turns > len(r.segments) for r in crew.responses.values()), "a role spoke more than once"
    assert max(crew.made.values()) == 1
    return crew.responses, data, list(sizes)


def positions(past: History) -> set[tuple[int, int]]:
    """(seed, position) of every token in the history."""
    out = set[tuple[int, int]]()
    for id, events in past.items():
        task, _, rest = id.partition("/")
        sibling, _, segment = rest.partition("+")
        seed = segment_seed(seed_of(3, int(task), int(sibling)), int(segment or 0))
        runs = [event for event in events if isinstance(event, TokenRun)]
        out |= {(seed, run.position + n) for run in runs for n in range(len(run.tokens))}
    return out


@pytest.mark.slow
def test_controller_killed_after_any_write_of_a_turn(tmp_path: Path) -> None:
    expected, data, sizes = first_run()
    for size in sizes:
        journal = tmp_path / "journal"
        journal.mkdir(exist_ok=True)
        (journal / WAL).write_bytes(data[:size])
        reading = Journal(journal, "settings")
        past = reading.open(0)
        reading.close()
        (journal / WAL).write_bytes(data[:size])
        crew = roll(tmp_path, journal=journal, make_env=RolePlay)
        assert crew.responses == expected
        assert not positions(past) & set(crew.made), "generated again although the journal has it"
        assert crew.rollout.restored_tokens == len(positions(past))
        assert not crew.rollout.history
        graded = sum(isinstance(event, TurnGraded) for events in past.values() for event in events)
        turns = sum(r.turns for r in expected.values())
        assert len(crew.env.asked) == turns - graded, "a turn is graded once"


def test_workers_lost_between_turns(tmp_path: Path) -> None:
    expected, _, _ = first_run()

    def kill(crew: Crew) -> None:
        if crew.callbacks % 150 == 0 and crew.callbacks < 1500:
            crew.hands[-1].kill(lossy=True)
            crew.hire(f"w{crew.callbacks}")

    crew = roll(tmp_path, kill, make_env=RolePlay)
    assert crew.responses == expected
    assert len(crew.hands) > 4


def say(request: Request) -> str:
    """Each conversation repeats its context, so that a test sees what a role was shown."""
    return f"[{''.join(map(chr, request.prompt))}]"[:40]


def test_conversations_rewards_and_turns_are_by_role(tmp_path: Path) -> None:
    async def judge(task: Task, turns: Sequence[Turn]) -> Feedback:
        if len(turns) == 3:
            return Feedback(rewards={A: 1.0, B: 0.5})
        return Feedback(observation=f"{len(turns)}?", role=(B, A)[len(turns) - 1])

    class Named(Asks):
        def task(self, index: int) -> Task:
            return Task(id="t", prompt="p", role=A)

    env = Named(judge)
    (group,), rollout = run(Scripted(say), env, tmp_path, tasks=[0])
    (response,) = group.responses
    assert [t.role for t in env.heard[-1][1]] == [A, B, A]
    assert [t.text for t in env.heard[-1][1]][:2] == ["[p]", "[1?]"], "B does not see what A was asked"
    assert [(s.id, s.role) for s in response.segments] == [("0/0", A), ("0/0+1", B)]
    (a, b) = group.of("").responses
    assert [(r.role, r.reward, r.turns) for r in (a, b)] == [(A, 1.0, 2), (B, 0.5, 1)]
    assert a.sampled.count(False) == len("2?")
    assert (rollout.failures.missing, rollout.sampled_tokens) == (0, response.sampled_count)


def missing_events(folder: Path) -> list[Any]:
    return [event for event in log.read(folder / "events.jsonl") if event["name"] == "reward_missing"]


def feedback_of(tmp_path: Path, *answers: Feedback, **options: Any) -> tuple[Response, Any]:
    async def judge(task: Task, turns: Sequence[Turn]) -> Feedback:
        return answers[len(turns) - 1]

    (group,), rollout = run(Scripted(say), Asks(judge), tmp_path, tasks=[0], **options)
    return group.responses[0], rollout


def test_role_without_a_reward_is_missing_and_counted(tmp_path: Path) -> None:
    response, rollout = feedback_of(tmp_path, Feedback(observation="?", role=B), Feedback(rewards={B: 1.0}))
    first, second = response.of("")
    assert (first.reward, second.reward, rollout.failures.missing) == (None, 1.0, 1)
    (event,) = missing_events(tmp_path)
    assert "the role '' spoke and has no reward" in event["error"]


def test_role_that_no_policy_has_makes_the_reward_missing(tmp_path: Path) -> None:
    response, rollout = feedback_of(tmp_path, Feedback(observation="?", role="verifier"))
    assert (response.reward, len(response.segments), rollout.failures.missing) == (None, 1, 1)
    (event,) = missing_events(tmp_path)
    assert "no policy speaks in the role 'verifier'" in event["error"]


def test_first_observation_counts_toward_the_limit_of_its_conversation(tmp_path: Path) -> None:
    response, _ = feedback_of(
        tmp_path, Feedback(observation="12345", role=B), Feedback(rewards={B: 1.0}, reward=0.0), max_tokens=8
    )
    _, second = response.of("")
    assert (len(second.prompt), len(second.tokens), second.finish) == (5, 3, "length")


@pytest.mark.parametrize(("given", "reward"), [(Feedback(observation="123456789", role=B, reward=0.25), 0.25)])
def test_role_without_room_ends_the_response(tmp_path: Path, given: Feedback, reward: float) -> None:
    response, rollout = feedback_of(tmp_path, given, max_tokens=8)
    assert (response.reward, [s.role for s in response.segments], rollout.failures.missing) == (reward, [""], 0)


def test_unknown_role_of_a_task_is_skipped(tmp_path: Path) -> None:
    class Wrong(Asks):
        def task(self, index: int) -> Task:
            return Task(id="t", prompt="p", role="solver" if index == 0 else "")

    async def judge(task: Task, turns: Sequence[Turn]) -> Feedback:
        return Feedback(reward=1.0)

    groups, rollout = run(Scripted(say), Wrong(judge), tmp_path, tasks=[0, 1])
    assert ([g.index for g in groups], rollout.failures.skipped) == ([1], 1)


def test_response_is_too_old_only_if_it_is_for_every_policy() -> None:
    stream: Any = SimpleNamespace(_oldest={"solver": 3, "verifier": 1})
    too_old = lambda **versions: Stream._is_too_old(stream, versions)  # noqa: E731
    assert [too_old(solver=2), too_old(solver=2, verifier=1), too_old(solver=2, verifier=0)] == [True, False, True]
    assert [too_old(), too_old(reference=0), too_old(solver=2, reference=0)] == [False, False, True]


def test_tasks_not_begun_are_by_policy(tmp_path: Path) -> None:
    async def judge(task: Task, turns: Sequence[Turn]) -> Feedback:
        return Feedback(reward=1.0)

    async def main() -> None:
        async with rolling(Scripted(say), Asks(judge), tmp_path) as rollout:
            stream = rollout.stream(size=1, sampling=lambda policy: Sampling(), on_group=print, on_skipped=print)
            stream.open([0])
            assert (stream.not_begun(), stream.not_begun("verifier")) == ([0], [0])
            stream._live["0/0"][0].current.tokens.append(65)
            assert (stream.not_begun(), stream.not_begun("verifier")) == ([], [0])
            stream._withdraw(["0/0"])

    asyncio.run(main())
