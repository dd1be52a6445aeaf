"""One link of a worker: it carries out orders, sends generated tokens, and ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.engines.hashing_engine import Hashing
from windfall.engine.engine_thread import EngineThread
from windfall.errors import WindfallError
from windfall.link import messages as m
from windfall.link.base import LinkClosed
from windfall.link.memory import MemoryLink, pair
from windfall.trainer.own_engine.trainer_engine import TrainerEngine, TrainerTurn
from windfall.types import Request, Sampling
from windfall.worker.worker_link import MAX_QUEUED_FRAMES, PulledWeights, Stalled, WorkerLink

WAIT_S = 10.0


class Small(Hashing):
    """Refuses long requests, and weights named bad."""

    def __init__(self) -> None:
        super().__init__(Counter())
        self.swaps: list[tuple[int, Any]] = []

    def add(self, request: Request) -> None:
        if request.max_tokens > 10_000:
            raise WindfallError("does not fit")
        super().add(request)

    def swap(self, version: int, weights: Any = None, *, policy: str = "") -> None:
        self.swaps.append((version, weights))
        if weights == {"bad": 1}:
            raise WindfallError("it does not fit the model")
        super().swap(version, weights)


class Pulls:
    """A Pull with a given result or error per version."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.loads: list[m.Load] = []
        self.given_up: list[int] = []
        self.holds: set[int] = set()
        """Versions whose pull returns only after it is asked to give up."""
        self.ends = threading.Event()
        """Unless it is set, they do not return then, either."""
        self.ends.set()
        self.fails: dict[int, str] = {}
        self.tensors: Any = {"good": 1}
        self._alone = threading.Lock()

    def __call__(self, load: m.Load, give_up: threading.Event) -> PulledWeights:
        assert self._alone.acquire(blocking=False), "two pulls at once"
        try:
            self.asked.append(load.version)
            self.loads.append(load)
            if load.version in self.holds:
                assert give_up.wait(WAIT_S)
                assert self.ends.wait(WAIT_S)
                self.given_up.append(load.version)
                raise TimeoutError("given up")
            if load.version in self.fails:
                raise ConnectionError(self.fails.pop(load.version))
            return PulledWeights(digest=load.digest, tensors=self.tensors, bytes=load.version * 10)
        finally:
            self._alone.release()


class Rig:
    """The controller's side of the link."""

    def __init__(self, link: MemoryLink, session: WorkerLink, engine: Small, pulls: Pulls) -> None:
        self.link, self.session, self.engine, self.pulls = link, session, engine, pulls
        self.beats = 0

    async def send(self, *messages: object) -> None:
        for message in messages:
            await self.link.send(message)

    async def next(self) -> Any:
        """The next message that is not a heartbeat."""
        async with asyncio.timeout(WAIT_S):
            while isinstance(message := await self.link.receive(), m.Stats):
                self.beats += 1
            return message

    async def until(self, holds: Callable[[], object], what: str) -> None:
        end = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < end, f"waited {WAIT_S:g} s until {what}"
            await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(depth: int = 256, heartbeat_s: float = 5.0) -> AsyncIterator[tuple[Rig, asyncio.Task[str]]]:
    ours, theirs = pair("controller", "worker", depth)
    engine, pulls = Small(), Pulls()
    host = EngineThread(engine, 4)
    host.start()
    session = WorkerLink(theirs, host, pulls, heartbeat_s=heartbeat_s)
    serve = asyncio.create_task(session.serve())
    try:
        yield Rig(ours, session, engine, pulls), serve
    finally:
        await ours.close("over")
        await asyncio.wait([serve], timeout=WAIT_S)
        assert serve.done(), "the session did not end with its link"
        host.cancel(range(100))
        await asyncio.to_thread(host.close, WAIT_S)
        assert not host._thread.is_alive(), "the engine's thread is stuck"
        assert host.failed is None


def load(version: int) -> m.Load:
    return m.Load(version=version, digest=f"d{version}")


def route(name: str) -> m.ReadRoute:
    ref = m.SourceRef(id=name, kind="peer", location=f"http://{name}:1")
    return m.ReadRoute(sources=(ref,), parts=(m.RoutePart(start=0, stop=9, source=0),))


def test_a_route_that_comes_before_the_pull_of_its_load_is_used() -> None:
    """The pull of a load waits until the one before it has ended."""

    async def main() -> None:
        async with serving() as (rig, _):
            rig.pulls.holds.add(1)
            rig.pulls.ends.clear()
            file = m.FileRef(digest="d2", nbytes=9)
            await rig.send(load(1), m.Routed(file="d2", route=route("too early")))
            await rig.until(lambda: rig.pulls.asked, "the first pull has begun")
            wanted = m.Load(version=2, digest="d2", files=(m.FileRoute(file=file, route=route("gone")),))
            await rig.send(wanted, m.Routed(file="d2", route=route("b")), m.Routed(file="other", route=route("c")))
            await rig.until(lambda: len(rig.session._routed) == 2, "both routes have arrived")
            rig.pulls.ends.set()
            assert isinstance(await rig.next(), m.Loaded)
            assert [each.route for each in rig.pulls.loads[1].files] == [route("b")]
            rig.pulls.fails[2] = "once more"
            await rig.send(wanted)
            assert isinstance(await rig.next(), m.LoadFailed)
            assert [each.route for each in rig.pulls.loads[2].files] == [route("gone")]

    asyncio.run(main())


def assign(*handles: int, max_tokens: int = 3) -> m.Assign:
    return m.Assign(
        work=tuple(
            m.Work(
                handle=h, prompt=(5, h), position=0, seed=h, max_tokens=max_tokens, sampling=Sampling(), stop=()
            )
            for h in handles
        )
    )  # fmt: skip


def test_heartbeats_are_sent_from_the_start() -> None:
    async def main() -> None:
        async with serving(heartbeat_s=0.01) as (rig, _):
            beats = [await rig.link.receive() for _ in range(5)]
            assert all(isinstance(b, m.Stats) and b.running == 0 for b in beats)

    asyncio.run(main())


def test_session_loads_then_generates() -> None:
    async def main() -> None:
        async with serving() as (rig, _):
            await rig.send(load(3))
            loaded = await rig.next()
            assert (loaded.version, loaded.digest, loaded.slots, loaded.pulled_bytes) == (3, "d3", 4, 30)
            assert rig.session.held == {"": (3, "d3")}
            assert rig.engine.swaps == [(3, {"good": 1})]
            await rig.send(assign(1, 2))
            got: dict[int, int] = {1: 0, 2: 0}
            while min(got.values()) < 3:
                frame = await rig.next()
                assert frame.version == 3
                for handle, position in zip(frame.handles, frame.positions, strict=True):
                    assert position == got[handle]
                    got[handle] += 1

    asyncio.run(main())


def test_newer_load_cancels_the_older_pull() -> None:
    async def main() -> None:
        async with serving() as (rig, _):
            rig.pulls.holds |= {1, 2}
            await rig.send(load(1))
            await rig.until(lambda: rig.pulls.asked == [1], "the first pull is under way")
            await rig.send(load(2), load(3))
            loaded = await rig.next()
            assert (type(loaded), loaded.version) == (m.Loaded, 3), "nothing is said of those that were given up"
            assert rig.pulls.given_up[0] == 1
            assert rig.pulls.asked[-1] == 3
            assert [v for v, _ in rig.engine.swaps] == [3]
            assert rig.session.held == {"": (3, "d3")}

    asyncio.run(main())


def test_failed_pull_is_reported_and_can_be_retried() -> None:
    async def main() -> None:
        async with serving() as (rig, _):
            rig.pulls.fails[1] = "the server is away"
            await rig.send(load(1))
            failed = await rig.next()
            assert (failed.version, failed.why) == (1, "ConnectionError: the server is away")
            assert rig.session.held == {}
            await rig.send(load(1))
            assert isinstance(await rig.next(), m.Loaded)
            assert rig.session.held == {"": (1, "d1")}

    asyncio.run(main())


def test_weights_of_another_model_are_reported() -> None:
    """The engine has refused them, so it still holds the old version."""

    async def main() -> None:
        async with serving() as (rig, _):
            await rig.send(load(1))
            await rig.next()
            rig.pulls.tensors = {"bad": 1}
            await rig.send(load(2))
            failed = await rig.next()
            assert isinstance(failed, m.LoadFailed)
            assert "does not fit" in failed.why
            assert rig.session.held == {"": (1, "d1")}
            rig.pulls.tensors = {"good": 1}
            await rig.send(load(2))
            assert (await rig.next()).version == 2

    asyncio.run(main())


def test_weights_already_held_are_kept_when_the_session_ends() -> None:
    async def main() -> None:
        async with serving() as (rig, _):
            rig.session.held = {"": (1, "d1")}
            rig.pulls.tensors = None
            await rig.send(load(2))
            assert (await rig.next()).version == 2
            assert rig.engine.swaps == [(2, None)]
            rig.pulls.fails[3] = "away"
            await rig.send(load(3))
            assert isinstance(await rig.next(), m.LoadFailed)
            assert rig.session.held == {"": (2, "d2")}

    asyncio.run(main())


def test_pause_cancel_and_release() -> None:
    async def main() -> None:
        async with serving() as (rig, _):
            await rig.send(assign(1, 2, 3, max_tokens=9000))
            await rig.next()
            await rig.send(m.Pause())
            await rig.send(m.Release(handles=(1,)))
            while not isinstance(message := await rig.next(), m.Released):
                assert isinstance(message, m.Tokens)
            assert message.handles == (1,)
            await rig.send(m.Cancel(handles=(2,)), m.Resume())
            frame = await rig.next()
            assert frame.handles == (3,), "released and cancelled ones are not heard of any more"

    asyncio.run(main())


def test_work_that_does_not_fit_is_rejected() -> None:
    async def main() -> None:
        async with serving() as (rig, _):
            await rig.send(assign(7, max_tokens=20_000))
            rejected = await rig.next()
            assert (type(rejected), rejected.handle) == (m.Rejected, 7)

    asyncio.run(main())


def test_drain_sends_everything_then_left() -> None:
    async def main() -> None:
        async with serving() as (rig, serve):
            await rig.send(assign(1, max_tokens=9000))
            await rig.next()
            await rig.send(m.Drain(why="sold"))
            at = 1
            while isinstance(message := await rig.next(), m.Tokens):
                assert message.positions == (at,)
                at += 1
            assert message == m.Left(why="sold")
            assert await serve == "sold"
            assert sum(rig.engine.made.values()) == at, "all that was made was sent"
            assert len(rig.engine) == 0
            await rig.link.close()
            with pytest.raises(LinkClosed):
                await rig.next()

    asyncio.run(main())


def test_drain_does_not_wait_for_a_pull() -> None:
    async def main() -> None:
        async with serving() as (rig, serve):
            rig.pulls.holds.add(1)
            await rig.send(load(1))
            await rig.until(lambda: rig.pulls.asked, "the pull is under way")
            await rig.send(m.Drain(why="sold"))
            assert isinstance(await rig.next(), m.Left)
            assert await serve == "sold"
            await rig.until(lambda: rig.pulls.given_up, "the pull was given up")

    asyncio.run(main())


def test_engine_waits_while_frames_are_not_read_and_nothing_is_lost() -> None:
    async def main() -> None:
        async with serving(depth=2) as (rig, _):
            await rig.send(assign(1, max_tokens=3 * MAX_QUEUED_FRAMES))
            made = lambda: sum(rig.engine.made.values())  # noqa: E731
            await rig.until(lambda: made() >= MAX_QUEUED_FRAMES, "many frames wait")
            stopped_at = -1
            while made() != stopped_at:
                stopped_at = made()
                await asyncio.sleep(0.15)
            assert stopped_at <= MAX_QUEUED_FRAMES + 4, (
                "frames on the link, queued frames, and the frame that the engine holds"
            )
            await asyncio.sleep(0.1)
            assert made() == stopped_at
            frames = []
            while not frames or not frames[-1].finished:
                frames.append(await rig.next())
            assert [f.positions for f in frames] == [(i,) for i in range(3 * MAX_QUEUED_FRAMES)]

    asyncio.run(main())


def test_waiting_engine_continues_when_the_link_ends() -> None:
    async def main() -> None:
        async with serving(depth=1) as (rig, serve):
            await rig.send(assign(1, max_tokens=9000))
            await rig.until(lambda: sum(rig.engine.made.values()) > MAX_QUEUED_FRAMES, "the engine waits")
            await rig.link.close("pulled out")
            with pytest.raises(LinkClosed, match="pulled out"):
                await serve
            await rig.until(lambda: len(rig.engine) == 0, "the engine has forgotten it all")

    asyncio.run(main())


@pytest.mark.parametrize("message", [m.Challenge(protocol=1, run="r", nonce=b""), m.Left(why="?")])
def test_unexpected_message_ends_the_session(message: object) -> None:
    async def main() -> None:
        async with serving() as (rig, serve):
            await rig.send(message)
            with pytest.raises(LinkClosed, match="unexpected message"):
                await serve

    asyncio.run(main())


class Stuck(Small):
    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def step(self) -> list[Any]:
        self.free.wait(WAIT_S)
        return super().step()


def test_stuck_engine_ends_the_session() -> None:
    async def main() -> None:
        ours, theirs = pair("controller", "worker")
        engine = Stuck()
        host = EngineThread(engine, slots=4)
        host.start()
        session = WorkerLink(theirs, host, Pulls(), heartbeat_s=0.05, stalled_s=0.3)
        serving = asyncio.create_task(session.serve())
        await ours.send(assign(1))
        with pytest.raises(Stalled, match="no engine step for 0 s, with 1 responses running"):
            await asyncio.wait_for(serving, WAIT_S)
        engine.free.set()
        await asyncio.to_thread(host.close)

    asyncio.run(main())


def test_swap_that_hangs_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier version retried it twelve times as a failed load, while the machine was paid and sent heartbeats."""
    monkeypatch.setattr("windfall.worker.worker_link.SWAP_S", 0.2)

    class Hangs(Small):
        free = threading.Event()

        def swap(self, version: int, weights: Any = None, *, policy: str = "") -> None:
            assert self.free.wait(WAIT_S)

    async def main() -> None:
        ours, theirs = pair("controller", "worker")
        engine = Hangs()
        host = EngineThread(engine, slots=4)
        host.start()
        serving = asyncio.create_task(WorkerLink(theirs, host, Pulls(), heartbeat_s=0.05).serve())
        await ours.send(load(1))
        with pytest.raises(Stalled, match=r"waited 0\.2 s for the engine to load version 1"):
            await asyncio.wait_for(serving, WAIT_S)
        engine.free.set()
        await asyncio.to_thread(host.close)

    asyncio.run(main())


def test_swap_that_waits_for_the_trainer_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windfall.worker.worker_link.SWAP_S", 0.1)

    async def main() -> None:
        ours, theirs = pair("controller", "worker")
        lock = TrainerTurn()
        host = EngineThread(TrainerEngine(Small(), lock), slots=4)
        host.start()
        pulls = Pulls()
        pulls.tensors = None
        serving = asyncio.create_task(WorkerLink(theirs, host, pulls, heartbeat_s=5.0).serve())
        with lock:  # the trainer saves a checkpoint
            await ours.send(load(1))
            await asyncio.sleep(0.5)
            assert not serving.done()
        async with asyncio.timeout(WAIT_S):
            while not isinstance(await ours.receive(), m.Loaded):
                pass
        await ours.close("over")
        await asyncio.wait([serving])
        await asyncio.to_thread(host.close)

    asyncio.run(main())


def test_pull_without_a_byte_or_an_error_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windfall.worker.worker_link.PULL_S", 0.4)
    free, pulled = threading.Event(), [0]

    def pull(load: m.Load, give_up: threading.Event) -> PulledWeights:
        del load, give_up
        assert free.wait(WAIT_S)
        raise ConnectionError("too late")

    async def main() -> None:
        ours, theirs = pair("controller", "worker")
        host = EngineThread(Small(), slots=4)
        host.start()
        session = WorkerLink(theirs, host, pull, heartbeat_s=0.05, pulled_bytes=lambda: pulled[0])
        serving = asyncio.create_task(session.serve())
        await ours.send(load(1))
        heard: list[m.Stats] = []
        for _ in range(16):  # as long as bytes come it may take any time
            pulled[0] += 10
            message = await asyncio.wait_for(ours.receive(), WAIT_S)
            assert isinstance(message, m.Stats)
            heard.append(message)
        assert heard[-1].loading == "pull"
        assert heard[-1].pulled_bytes > heard[1].pulled_bytes > 0, "the controller sees that bytes move"
        free_later = asyncio.get_running_loop().call_later(5.0, free.set)
        with pytest.raises(Stalled, match="the pull of the weights hangs: no byte and no error"):
            await asyncio.wait_for(serving, WAIT_S)
        free_later.cancel()
        free.set()
        await asyncio.to_thread(host.close)

    asyncio.run(main())


def test_longest_response_is_reported_with_the_weights() -> None:
    async def main() -> None:
        async with serving() as (rig, _):
            rig.engine.limit = 77  # pyright: ignore[reportAttributeAccessIssue]
            await rig.send(load(1))
            assert (await rig.next()).longest == 77

    asyncio.run(main())


def test_stuck_engine_does_not_prevent_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windfall.worker.worker_link.LEAVE_S", 0.2)

    async def main() -> None:
        ours, theirs = pair("controller", "worker")
        engine = Stuck()
        host = EngineThread(engine, slots=4)
        host.start()
        serving = asyncio.create_task(WorkerLink(theirs, host, Pulls(), heartbeat_s=0.05).serve())
        await ours.send(assign(1))
        await asyncio.sleep(0.1)
        await ours.send(m.Drain(why="enough"))
        assert await asyncio.wait_for(serving, WAIT_S / 2) == "enough"
        engine.free.set()
        await asyncio.to_thread(host.close)

    asyncio.run(main())
