"""A worker with several policies: loads one after the other, versions in frames, and what it keeps when it switches."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.engines.hashing_engine import Hashing
from windfall.engine.engine_thread import EngineThread
from windfall.link import messages as m
from windfall.link.memory import MemoryLink, pair
from windfall.types import Capabilities, Chunk, Lease, Request, Sampling
from windfall.weights.pulling.pull import PulledWeights, WeightPuller
from windfall.worker.controller_client import ControllerClient
from windfall.worker.worker_link import WorkerLink

WAIT_S = 10.0


class Adapters(Hashing):
    """An engine whose responses have the version of their policy."""

    capabilities = Capabilities(name="adapters", adapters=4)

    def __init__(self) -> None:
        super().__init__(Counter())
        self.versions: dict[str, int] = {}

    def swap(self, version: int, weights: Any = None, *, policy: str = "") -> None:
        self.versions[policy] = version

    def _next(self, request: Request, context: list[int]) -> Chunk:
        return replace(super()._next(request, context), version=self.versions[request.policy])


class Pulls:
    """A Pull that a test holds up by version."""

    def __init__(self) -> None:
        self.began: list[tuple[str, int]] = []
        self.given_up: list[tuple[str, int]] = []
        self.holds: dict[int, threading.Event] = {}
        self._alone = threading.Lock()

    def __call__(self, load: m.Load, give_up: threading.Event) -> PulledWeights:
        assert self._alone.acquire(blocking=False), "two pulls at once"
        try:
            self.began.append((load.policy, load.version))
            while (hold := self.holds.get(load.version)) is not None and not hold.wait(0.005):
                if give_up.is_set():
                    self.given_up.append((load.policy, load.version))
                    raise TimeoutError("given up")
            return PulledWeights(digest=load.digest, tensors={})
        finally:
            self._alone.release()


class Rig:
    def __init__(self, link: MemoryLink, session: WorkerLink, engine: Adapters, pulls: Pulls) -> None:
        self.link, self.session, self.engine, self.pulls = link, session, engine, pulls
        self.beats: list[m.Stats] = []

    async def next(self) -> Any:
        """The next message that is not a heartbeat."""
        async with asyncio.timeout(WAIT_S):
            while isinstance(message := await self.link.receive(), m.Stats):
                self.beats.append(message)
            return message

    async def load(self, policy: str, version: int) -> None:
        await self.link.send(m.Load(version=version, digest=f"{policy}{version}", policy=policy))

    async def loaded(self) -> tuple[str, int]:
        message = await self.next()
        assert isinstance(message, m.Loaded), message
        return message.policy, message.version

    async def began(self, *pulls: tuple[str, int]) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.pulls.began != list(pulls):
                await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(engine: Adapters | None = None) -> AsyncIterator[Rig]:
    ours, theirs = pair("controller", "worker")
    engine, pulls = Adapters() if engine is None else engine, Pulls()
    host = EngineThread(engine, 4)
    host.start()
    session = WorkerLink(theirs, host, pulls, heartbeat_s=0.01)
    serve = asyncio.create_task(session.serve())
    try:
        yield Rig(ours, session, engine, pulls)
    finally:
        for hold in pulls.holds.values():
            hold.set()
        await ours.close("over")
        await asyncio.gather(asyncio.wait_for(serve, WAIT_S), return_exceptions=True)
        host.cancel(range(100))
        await asyncio.to_thread(host.close, WAIT_S)
        assert host.failed is None


def test_loads_of_two_policies_follow_each_other() -> None:
    async def main() -> None:
        async with serving() as rig:
            hold = rig.pulls.holds[1] = threading.Event()
            await rig.load("a", 1)
            await rig.began(("a", 1))
            await rig.load("b", 2)
            await rig.load("b", 3)  # in place of the one that waits
            await asyncio.sleep(0.03)
            assert rig.pulls.began == [("a", 1)], "the other policy waits"
            assert rig.pulls.given_up == []
            hold.set()
            assert [await rig.loaded(), await rig.loaded()] == [("a", 1), ("b", 3)]
            assert rig.session.held == {"a": (1, "a1"), "b": (3, "b3")}
            assert {beat.policy for beat in rig.beats if beat.loading == "pull"} >= {"a"}

    asyncio.run(main())


def test_a_newer_version_stops_the_load_of_its_own_policy_only() -> None:
    async def main() -> None:
        async with serving() as rig:
            rig.pulls.holds[1] = threading.Event()
            await rig.load("a", 1)
            await rig.began(("a", 1))
            await rig.load("b", 5)
            await rig.load("a", 2)
            assert sorted([await rig.loaded(), await rig.loaded()]) == [("a", 2), ("b", 5)]
            assert rig.pulls.given_up == [("a", 1)]
            await rig.load("a", 2)
            assert await rig.loaded() == ("a", 2), "a load that is complete can be asked for again"

    asyncio.run(main())


def test_frames_say_the_version_of_each_policy() -> None:
    async def main() -> None:
        async with serving() as rig:
            await rig.load("a", 1)
            await rig.load("b", 7)
            assert {await rig.loaded(), await rig.loaded()} == {("a", 1), ("b", 7)}
            work = tuple(
                m.Work(handle=n, prompt=b"\5\0\0\0", position=0, seed=n, max_tokens=3, sampling=Sampling(), stop=(),
                       policy=policy)
                for n, policy in enumerate("ab")
            )  # fmt: skip
            await rig.link.send(m.Assign(work=work))
            for _ in range(3):
                frame = await rig.next()
                assert isinstance(frame, m.Tokens)
                assert frame.by_policy == {"a": 1, "b": 7}

    asyncio.run(main())


def test_an_engine_without_slots_keeps_the_policy_that_it_has() -> None:
    async def main() -> None:
        engine = Adapters()
        engine.capabilities = Capabilities(name="plain")
        async with serving(engine) as rig:
            await rig.load("a", 1)
            assert await rig.loaded() == ("a", 1)
            await rig.load("b", 1)
            failed = await rig.next()
            assert isinstance(failed, m.LoadFailed)
            assert failed.policy == "b"
            assert "holds one policy" in failed.why
            assert rig.engine.versions == {"a": 1}
            await rig.load("a", 2)
            assert await rig.loaded() == ("a", 2)

    asyncio.run(main())


class Buffer(WeightPuller):
    """Takes the place of a Puller."""

    reads, made = True, 0

    def __init__(self) -> None:
        self.bytes_received, self.closed = 0, False
        self.rerouted: list[str] = []
        self.pulled: list[str] = []

    def beside(self) -> Buffer:
        return Buffer()

    def pull(self, load: m.Load, ask: Any = None, *, stop: threading.Event | None = None) -> PulledWeights:
        self.pulled.append(load.digest)
        return PulledWeights(digest=load.digest, tensors=None, bytes=0)

    def close(self) -> None:
        self.closed = True

    def reroute(self, routed: m.Routed) -> None:
        self.rerouted.append(routed.file)


@pytest.fixture
def client() -> Any:
    puller: Any = Buffer()
    return ControllerClient("http://x", "token", name="w", lease=Lease(), puller=puller, build=lambda spec: (None, 0))


def test_a_worker_that_switches_uses_its_buffers_again(client: Any) -> None:
    first = client.puller
    client._set_policies(("solver",))
    assert client._pullers == {"solver": first}
    first.bytes_received, client._held = 100, {"solver": (3, "d")}
    client._set_policies(("judge",))
    assert client._pullers == {"judge": first}, "the next version overwrites the buffer"
    assert client._held == {}, "the engine will hold another policy"
    client._set_policies(("a", "b"))
    a, b = client._pullers["a"], client._pullers["b"]
    assert a is first
    assert b is not first
    b.bytes_received = 10
    client._set_policies(("a",))
    assert b.closed
    assert not a.closed
    assert client._pulled_bytes() == 110, "the count of a process never falls"


def test_routes_go_to_the_puller_of_their_policy(client: Any) -> None:
    client._set_policies(("a", "b"))
    client._dialer = SimpleNamespace(url="http://x")
    for policy in ("b", "unknown"):
        client._reroute(m.Routed(file="f", route=m.ReadRoute(sources=(), parts=()), policy=policy))
    assert [puller.rerouted for puller in client._pullers.values()] == [[], ["f"]]


def test_a_load_of_a_policy_that_came_later_gets_a_puller_of_its_own(client: Any) -> None:
    client._set_policies(("a",))
    first = client._pullers["a"]
    client._pull(m.Load(version=1, digest="d", files=(), policy="late"), threading.Event())
    assert list(client._pullers) == ["a", "late"]
    assert (first.pulled, client._pullers["late"].pulled) == ([], ["d"])
