"""Several policies on one fleet: two adapters of one base, and a base of its own. A test sends the messages of
workers."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleets import directory_rules
from tests.support.fleets.response_owner import FunctionOwner
from windfall.controller.ledger.episode import Episode
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.workers.holding import LOOK_S, LOOKS
from windfall.controller.workers.members import WorkerState
from windfall.controller.workers.versions import Offer, PolicyVersions
from windfall.events import log
from windfall.events.log import EventLog
from windfall.link import messages as m
from windfall.link.base import LinkClosed
from windfall.link.memory import MemoryLink, pair
from windfall.sim.core import loop as loops
from windfall.types import Capabilities, Finish, Sampling

MAX_TOKENS = 9
SLOTS = 2
BASES = {"solver": ("solver", "verifier"), "judge": ("judge",)}


class Worker:
    def __init__(self, link: MemoryLink, *, adapters: int = 4) -> None:
        self.link, self.engine = link, Capabilities(name="scripted", adapters=adapters)
        self.loads: list[m.Load] = []
        """Loads that it has not carried out yet, the last one of each policy."""
        self.held: dict[str, tuple[int, str]] = {}
        self.work: dict[int, tuple[str, int]] = {}
        """Policy and next position of its responses, by handle."""
        self.drained: list[m.Drain] = []

    async def receive(self) -> None:
        while True:
            match message := await self.link.receive():
                case m.Load():
                    self.loads = [each for each in self.loads if each.policy != message.policy] + [message]
                case m.Assign():
                    assert all(w.policy in self.held for w in message.work), "work of a policy that it does not hold"
                    self.work |= {w.handle: (w.policy, w.position) for w in message.work}
                case m.Cancel() | m.Release():
                    self.work = {h: w for h, w in self.work.items() if h not in message.handles}
                case m.Drain():
                    self.drained.append(message)
                case _:
                    pass

    async def load(self, *policies: str) -> None:
        """Carry out the loads of these policies, or all."""
        now = [each for each in self.loads if not policies or each.policy in policies]
        self.loads = [each for each in self.loads if each not in now]
        for each in now:
            self.held[each.policy] = (each.version, each.digest)
            await self.link.send(
                m.Loaded(version=each.version, digest=each.digest, slots=SLOTS, s=0.0, pulled_bytes=0,
                         engine=self.engine, policy=each.policy)
            )  # fmt: skip

    async def generate(self, count: int, *, finish: Finish | None = None, versions: Any = None) -> None:
        """Send one frame with `count` tokens of every response that it has."""
        handles = sorted(self.work)
        n, held = count * len(handles), {self.work[h][0]: self.held[self.work[h][0]][0] for h in handles}
        frame = m.Tokens(
            version=0, handles=tuple(handles), positions=tuple(self.work[h][1] for h in handles),
            counts=(count,) * len(handles), tokens=array("I", [7] * n).tobytes(),
            logprobs=array("f", [-1.0] * n).tobytes(),
            finished=dict.fromkeys(range(len(handles)), finish) if finish else {},
            versions=held if versions is None else versions,
        )  # fmt: skip
        await self.link.send(frame)
        self.work = {} if finish else {h: (policy, at + count) for h, (policy, at) in self.work.items()}


class Run:
    def __init__(self, dispatch: Dispatch) -> None:
        self.dispatch, self.workers, self.ended = dispatch, dict[str, Worker](), list[str]()
        self.tasks: list[asyncio.Task[None]] = []

    def publish(self, policy: str, version: int) -> None:
        self.dispatch.set_offer(Offer(version=version, digest=f"{policy}{version}"), policy=policy)

    def open(self, policy: str, *ids: str) -> None:
        owner: Any = FunctionOwner(turn_ended=self.ended.append, rejected=lambda id, why: pytest.fail(f"{id}: {why}"))
        for id in ids:
            episode = Episode(
                id=id, prompt=(5, 6), seed=1, max_tokens=MAX_TOKENS, sampling=Sampling(), stop=frozenset({0}),
                role=policy,
            )  # fmt: skip
            self.dispatch.open(episode, owner)

    async def join(self, name: str, *, base: str | None = None, **options: Any) -> Worker:
        held, adapters = options.pop("held", {}), options.pop("adapters", 4)
        ours, theirs = pair("controller", name)
        hello = m.Hello(protocol=m.PROTOCOL, nonce=b"", proof=b"", name=name, held=held, **options)
        self.tasks.append(asyncio.create_task(self.dispatch.attend(ours, hello, base)))
        worker = self.workers[name] = Worker(theirs, adapters=adapters)
        worker.held |= held
        self.tasks.append(asyncio.create_task(worker.receive()))
        await self.settle()
        return worker

    async def settle(self) -> None:
        """Let everything happen that does not wait for time to pass."""
        for _ in range(100):
            await asyncio.sleep(0)
        self.check()

    def check(self) -> None:
        ledger, members = self.dispatch.ledger, self.dispatch.members
        ledger.check()
        members.check()
        for directory in self.dispatch.weights.directories.values():
            directory_rules.check(directory)
        for member in members.here():
            assert all(entry.policy in member.held for entry in ledger.held(member.id)), "work of another base"
            assert {self.dispatch.versions[policy].base for policy in member.held} == {member.base}

    def runs(self, id: str) -> list[tuple[int, int]]:
        return self.dispatch.ledger.entries[id].episode.version_runs


def play(
    folder: Path, scene: Callable[[Run], Coroutine[Any, Any, None]], *, staleness: int = 1,
    published: Iterable[str] = ("solver", "verifier", "judge"),
) -> list[dict[str, Any]]:  # fmt: skip
    """Returns the events."""

    @asynccontextmanager
    async def started() -> AsyncIterator[Run]:
        events = EventLog(folder / "events.jsonl")
        policies = [PolicyVersions(name, base, staleness) for base, names in BASES.items() for name in names]
        run = Run(Dispatch(events=events, versions=policies))
        for policy in published:
            run.publish(policy, 1)
        run.tasks.append(asyncio.create_task(run.dispatch.watch()))
        try:
            yield run
        finally:
            for task in run.tasks:
                task.cancel()
            await asyncio.gather(*run.tasks, return_exceptions=True)
            events.close()

    async def main() -> None:
        async with started() as run:
            await scene(run)

    loops.run(lambda _: main())
    return list(log.read(folder / "events.jsonl"))


def test_a_worker_holds_both_adapters_and_generates_both_in_one_batch(tmp_path: Path) -> None:
    async def scene(run: Run) -> None:
        a = await run.join("a", base="solver")
        assert [each.policy for each in a.loads] == ["solver", "verifier"], "both at once"
        run.open("solver", "0/0")
        run.open("verifier", "0/0+1")
        await a.load("solver")
        await run.settle()
        assert run.dispatch.members.all["a"].state is WorkerState.READY, "one policy is enough"
        assert [policy for policy, _ in a.work.values()] == ["solver"]
        await a.load("verifier")
        await run.settle()
        assert sorted(policy for policy, _ in a.work.values()) == ["solver", "verifier"]
        await a.generate(2)
        run.publish("verifier", 2)
        await run.settle()
        assert [(each.policy, each.version) for each in a.loads] == [("verifier", 2)]
        await a.generate(1)
        await a.load()
        await a.generate(MAX_TOKENS - 3, finish="length")
        await run.settle()
        assert sorted(run.ended) == ["0/0", "0/0+1"]
        assert run.runs("0/0") == [(1, MAX_TOKENS)], "a swap of the other adapter does not touch it"
        assert run.runs("0/0+1") == [(1, 3), (2, MAX_TOKENS - 3)]

    events = play(tmp_path, scene)
    ready = [(event["policy"], event["version"]) for event in events if event["name"] == "worker_ready"]
    assert ready == [("solver", 1), ("verifier", 1), ("verifier", 2)]


def test_each_policy_has_its_own_bound(tmp_path: Path) -> None:
    """`solver` publishes two versions: its responses are taken back, and those of `verifier` go on."""

    async def scene(run: Run) -> None:
        a = await run.join("a", base="solver")
        await a.load()
        run.open("solver", "0/0")
        run.open("verifier", "0/0+1")
        await run.settle()
        await a.generate(2)
        await run.settle()
        run.publish("solver", 2)
        run.publish("solver", 3)
        await run.settle()
        assert [policy for policy, _ in a.work.values()] == ["verifier"]
        assert list(run.dispatch.ledger.queues["solver"]) == ["0/0"]
        member = run.dispatch.members.all["a"]
        assert member.state is WorkerState.READY, "it has work of the other policy"
        run.open("verifier", "1/0+1")
        await run.settle()
        assert sorted(policy for policy, _ in a.work.values()) == ["verifier"] * 2, "and gets more"
        await a.generate(MAX_TOKENS - 2)
        await a.load()
        await run.settle()
        assert run.dispatch.ledger.entries["0/0"].episode.tokens.tolist() == [7, 7], "it keeps its tokens"

    play(tmp_path, scene)


def test_a_frame_must_name_the_versions_of_its_policies(tmp_path: Path) -> None:
    async def scene(run: Run) -> None:
        a = await run.join("a", base="solver")
        await a.load()
        run.open("solver", "0/0")
        run.open("verifier", "0/0+1")
        await run.settle()
        await a.generate(1, versions={"solver": 1})
        await run.settle()
        assert "without its version" in run.dispatch.members.all["a"].why
        assert run.dispatch.ledger.counts.accepted == 0
        assert run.dispatch.ledger.queued == 2

    play(tmp_path, scene)


@pytest.mark.parametrize(
    "lie",
    [
        m.Tokens(
            version=0, handles=(), positions=(), counts=(), tokens=b"", logprobs=b"", finished={}, versions={"judge": 1}
        ),
        m.Loaded(version=1, digest="judge1", slots=SLOTS, s=0.0, pulled_bytes=0, policy="../judge"),
        m.AskRoute(file="f", policy="judge"),
        m.LoadFailed(version=1, why="no source", policy="judge"),
        m.Stats(running=0, made=0, steps=0, idle_s=0.0, policy="nobody"),
    ],
)
def test_a_worker_knows_its_own_policies_only(tmp_path: Path, lie: Any) -> None:
    """What it says of others is malformed, or has no effect."""

    async def scene(run: Run) -> None:
        a = await run.join("a", base="solver", held={"judge": (1, "judge1"), "\0": (1, "d")})
        assert set(run.dispatch.members.all["a"].held) == {"solver", "verifier"}
        await a.load()
        run.open("solver", "0/0")
        await run.settle()
        await a.link.send(lie)
        await run.settle()
        member = run.dispatch.members.all["a"]
        if isinstance(lie, m.LoadFailed | m.Stats):
            assert (member.state, len(a.work)) == (WorkerState.READY, 1)
            assert not any(held.failed for held in member.held.values())
        else:
            assert "which it was not asked for" in member.why
            assert list(run.dispatch.ledger.queues["solver"]) == ["0/0"]
        assert set(member.frame_versions) <= {"solver", "verifier"}

    play(tmp_path, scene)


def test_a_load_that_fails_stops_its_policy_only(tmp_path: Path) -> None:
    async def scene(run: Run) -> None:
        a = await run.join("a", base="solver")
        await a.load("solver")
        await a.link.send(m.LoadFailed(version=1, why="no source", policy="verifier"))
        a.loads.clear()
        run.open("solver", "0/0")
        run.open("verifier", "0/0+1")
        await run.settle()
        assert [policy for policy, _ in a.work.values()] == ["solver"]
        await asyncio.sleep(1.0)
        assert [(each.policy, each.version) for each in a.loads] == [("verifier", 1)], "it is asked again"
        held = run.dispatch.members.all["a"].held
        assert (held["solver"].failed, held["verifier"].failed) == (0, 1)
        await a.load()
        await run.settle()
        assert len(a.work) == 2

    play(tmp_path, scene)


def test_an_engine_without_slots_for_adapters_holds_the_policy_that_it_loaded_first(tmp_path: Path) -> None:
    async def scene(run: Run) -> None:
        run.open("verifier", "0/0+1", "1/0+1")
        run.open("solver", "0/0")
        a = await run.join("a", base="solver", adapters=0)
        await a.load(a.loads[0].policy)
        await run.settle()
        assert run.dispatch.members.all["a"].held.keys() == {"verifier"}, "the one with most queued responses"
        assert [policy for policy, _ in a.work.values()] == ["verifier"] * 2
        await a.link.send(m.LoadFailed(version=1, why="this engine holds one policy", policy="solver"))
        await run.settle()
        assert run.dispatch.members.all["a"].state is WorkerState.READY

    play(tmp_path, scene)


def test_workers_join_where_they_are_needed_and_keep_what_they_have(tmp_path: Path) -> None:
    async def scene(run: Run) -> None:
        await run.join("a")
        await run.join("b")
        bases = [w.base for w in run.dispatch.members.here()]
        assert sorted(bases) == ["judge", "solver"], "a base without a worker comes first"
        run.open("judge", *(f"{n}/0" for n in range(9)))
        await run.join("c")
        assert run.dispatch.members.all["c"].base == "judge"
        await run.join("d", held={"verifier": (1, "verifier1")})
        assert run.dispatch.members.all["d"].base == "solver", "it has that base already"

    play(tmp_path, scene)


def test_no_worker_gets_responses_of_another_base(tmp_path: Path) -> None:
    async def scene(run: Run) -> None:
        a, b = await run.join("a", base="solver"), await run.join("b", base="judge")
        for worker in (a, b):
            await worker.load()
        run.open("judge", "0/0", "1/0", "2/0")
        run.open("solver", "3/0")
        await run.settle()
        assert [policy for policy, _ in a.work.values()] == ["solver"]
        assert [policy for policy, _ in b.work.values()] == ["judge"] * 2
        assert not run.dispatch.has_free_slots("judge")
        assert run.dispatch.has_free_slots("solver")
        await b.link.close("lost")
        await run.settle()
        assert len(run.dispatch.ledger.queues["judge"]) == 3, "nothing is lost, and nobody else gets it"

    play(tmp_path, scene)


@pytest.mark.parametrize("lost", [False, True])
def test_a_worker_switches_to_the_base_that_needs_it(tmp_path: Path, lost: bool) -> None:
    """It is drained, and joins again with the other base; or is never heard of again."""

    async def scene(run: Run) -> None:
        a, b = await run.join("a", base="solver"), await run.join("b", base="solver")
        for worker in (a, b):
            await worker.load()
        run.open("solver", "0/0")
        run.open("judge", "1/0", "2/0")
        await run.settle()
        idle = b if a.work else a
        name, busy = ("b", a) if idle is b else ("a", b)
        await busy.generate(2)
        beats = asyncio.create_task(_beats(run))
        await asyncio.sleep(LOOKS * LOOK_S + 1.0)
        assert [each.again for each in idle.drained] == [True], "the one with least work"
        assert not busy.drained
        await idle.link.send(m.Left(why="drained"))
        await run.settle()
        if not lost:
            hello = m.Hello(protocol=m.PROTOCOL, nonce=b"", proof=b"", name=name, held=idle.held)
            assert run.dispatch.choose_base(hello) == "judge"
            assert run.dispatch.choose_base(hello) == "judge", "until it has joined"
            again = await run.join(name, base="judge")
            assert [each.policy for each in again.loads] == ["judge"]
            await again.load()
            await run.settle()
            assert [policy for policy, _ in again.work.values()] == ["judge"] * 2
            await again.generate(MAX_TOKENS, finish="length")
        await busy.generate(MAX_TOKENS - 2, finish="length")
        await run.settle()
        assert sorted(run.ended) == (["0/0"] if lost else ["0/0", "1/0", "2/0"])
        assert run.dispatch.ledger.lost_tokens() == 0
        if lost:
            assert run.dispatch.ledger.queued == 2
        beats.cancel()

    events = play(tmp_path, scene)
    switched = [event for event in events if event["name"] == "worker_switched"]
    assert [(event["source"], event["target"]) for event in switched] == [("solver", "judge")]


async def _beats(run: Run) -> None:
    while True:
        for worker in run.workers.values():
            try:
                await worker.link.send(m.Stats(running=len(worker.work), made=0, steps=0, idle_s=0.0))
            except LinkClosed:
                continue
        await asyncio.sleep(1.0)


def test_a_policy_whose_trainer_comes_later_is_loaded_when_it_has_work(tmp_path: Path) -> None:
    async def scene(run: Run) -> None:
        a = await run.join("a", base="solver")
        assert [each.policy for each in a.loads] == ["solver"]
        await a.load()
        run.publish("verifier", 5)
        await run.settle()
        assert a.loads == []
        run.open("verifier", "0/0+1")
        await run.settle()
        assert [(each.policy, each.version) for each in a.loads] == [("verifier", 5)]
        assert run.dispatch.members.all["a"].state is WorkerState.READY
        await a.load()
        await run.settle()
        assert [policy for policy, _ in a.work.values()] == ["verifier"]

    play(tmp_path, scene, staleness=0, published=["solver"])


def publish_adapter(run: Run, policy: str, port: int) -> None:
    base, adapter = m.FileRef(digest="base", nbytes=100), m.FileRef(digest=f"{policy}1", nbytes=10, before="base")
    holds = (m.Holding(file=base), m.Holding(file=adapter))
    files = m.PublishedFiles(
        version=1, digest=adapter.digest, files=(base, adapter),
        holders=(m.HolderFiles(location=f"http://_:{port}", holds=holds),),
    )  # fmt: skip
    run.dispatch.set_offer(Offer(version=1, digest=adapter.digest), files, policy=policy)


def test_the_base_of_two_adapters_is_read_once(tmp_path: Path) -> None:
    async def scene(run: Run) -> None:
        publish_adapter(run, "solver", 98)
        a = await run.join("a", base="solver")
        assert [each.file.digest for each in a.loads[0].files] == ["base", "solver1"]
        await a.load()
        await run.settle()
        publish_adapter(run, "verifier", 99)
        await run.settle()
        assert [each.policy for each in a.loads] == ["verifier"]
        assert [each.file.digest for each in a.loads[0].files] == ["verifier1"], "it has the base"
        b = await run.join("b", base="solver")
        assert [len(each.files) for each in b.loads] == [2, 2], "a new worker may begin with either"

    play(tmp_path, scene, published=())
