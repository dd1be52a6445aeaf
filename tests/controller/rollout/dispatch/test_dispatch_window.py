"""The trainer has moved on while all workers still hold an older version: no work is lost, nothing is generated that
may not be, nothing hangs. A test sends the workers' messages."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.support.fleets.response_owner import FunctionOwner
from windfall.controller.ledger.episode import Episode
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.workers.members import WorkerState
from windfall.controller.workers.versions import Offer, PolicyVersions
from windfall.events.log import EventLog
from windfall.link import messages as m
from windfall.link.memory import MemoryLink, pair
from windfall.sim.core import loop as loops
from windfall.types import Finish, Sampling

MAX_TOKENS = 9


class Worker:
    def __init__(self, link: MemoryLink) -> None:
        self.link, self.version = link, -1
        self.loads: list[int] = []
        """Versions that it was asked to load and has not loaded yet."""
        self.work: dict[int, int] = {}
        """Position at which each of its responses goes on, by handle."""
        self.cancelled: list[int] = []

    async def receive(self) -> None:
        """Take in what is sent, until canceled."""
        while True:
            match message := await self.link.receive():
                case m.Load():
                    self.loads.append(message.version)
                case m.Assign():
                    self.work |= {w.handle: w.position for w in message.work}
                case m.Cancel():
                    self.cancelled += message.handles
                    self.work = {h: p for h, p in self.work.items() if h not in message.handles}
                case _:
                    pass

    async def load(self) -> None:
        self.version = self.loads[-1]
        self.loads.clear()
        digest = f"v{self.version}"
        await self.link.send(m.Loaded(version=self.version, digest=digest, slots=2, s=0.0, pulled_bytes=0))

    async def generate(self, count: int, *, finish: Finish | None = None) -> None:
        """Send `count` tokens of every response that it has."""
        handles = sorted(self.work)
        n = count * len(handles)
        finished = dict.fromkeys(range(len(handles)), finish) if finish else {}
        frame = m.Tokens(
            version=self.version, handles=tuple(handles), positions=tuple(self.work[h] for h in handles),
            counts=(count,) * len(handles), tokens=array("I", [7] * n).tobytes(),
            logprobs=array("f", [-1.0] * n).tobytes(), finished=finished,
        )  # fmt: skip
        await self.link.send(frame)
        self.work = {} if finish else {h: p + count for h, p in self.work.items()}


class Run:
    def __init__(self, dispatch: Dispatch) -> None:
        self.dispatch, self.workers, self.ended = dispatch, list[Worker](), list[str]()
        self.attending: list[asyncio.Task[None]] = []

    def publish(self, version: int) -> None:
        self.dispatch.set_offer(Offer(version=version, digest=f"v{version}"))

    def open(self, *ids: str) -> None:
        listener = FunctionOwner(turn_ended=self.ended.append, rejected=lambda id, why: pytest.fail(f"{id}: {why}"))
        for id in ids:
            stop, prompt = frozenset({0}), (5, 6)
            episode = Episode(id=id, prompt=prompt, seed=1, max_tokens=MAX_TOKENS, sampling=Sampling(), stop=stop)
            self.dispatch.open(episode, listener)

    def join(self, name: str) -> None:
        ours, theirs = pair("controller", name)
        hello = m.Hello(protocol=m.PROTOCOL, nonce=b"", proof=b"", name=name)
        self.attending.append(asyncio.create_task(self.dispatch.attend(ours, hello)))
        self.workers.append(Worker(theirs))
        self.attending.append(asyncio.create_task(self.workers[-1].receive()))

    async def settle(self) -> None:
        """Let everything happen that does not wait for time to pass."""
        for _ in range(100):
            await asyncio.sleep(0)
        self.dispatch.ledger.check()
        self.dispatch.members.check()

    def versions(self, id: str) -> list[tuple[int, int]]:
        """(version, tokens) of an open response whose turn has ended."""
        return self.dispatch.ledger.entries[id].episode.version_runs


@asynccontextmanager
async def started(folder: Path, on_new_weights: Literal["interrupt", "finish"]) -> AsyncIterator[Run]:
    """Two workers with two slots each hold version 3 and run four responses, of which two tokens have arrived. Two more
    responses are queued. The bound is 1."""
    events = EventLog(folder / "events.jsonl")
    run = Run(Dispatch(events=events, versions=[PolicyVersions(staleness=1)], on_new_weights=on_new_weights))
    run.publish(3)
    for name in ("a", "b"):
        run.join(name)
    await run.settle()
    for worker in run.workers:
        await worker.load()
    run.open("0/0", "0/1", "1/0", "1/1", "2/0", "2/1")
    await run.settle()
    for worker in run.workers:
        await worker.generate(2)
    watching: list[asyncio.Task[Any]] = [asyncio.create_task(run.dispatch.watch())]
    try:
        yield run
    finally:
        for task in [*watching, *run.attending]:
            task.cancel()
        await asyncio.gather(*watching, *run.attending, return_exceptions=True)
        events.close()


@pytest.mark.parametrize("on_new_weights", ["interrupt", "finish"])
def test_workers_one_version_behind_finish_their_work_and_get_none(
    tmp_path: Path, on_new_weights: Literal["interrupt", "finish"]
) -> None:
    """Version 3 is still in the window: what runs goes on, and new work waits for a worker with version 4."""

    async def main() -> None:
        async with started(tmp_path, on_new_weights) as run:
            a, b = run.workers
            await run.settle()
            run.publish(4)
            await run.settle()
            assert [w.loads for w in run.workers] == [[4] if on_new_weights == "interrupt" else []] * 2
            await a.generate(MAX_TOKENS - 2, finish="length")
            await run.settle()
            assert len(run.ended) == 2, "tokens of version 3 are accepted"
            assert all(run.versions(id) == [(3, MAX_TOKENS)] for id in run.ended)
            assert a.work == {}, "a response that starts now must start on version 4"
            assert a.loads == [4], "an idle worker loads the new version, whatever on_new_weights says"
            assert list(run.dispatch.ledger.queues[""]) == ["2/0", "2/1"]
            assert (a.cancelled, b.cancelled) == ([], [])
            await a.load()
            await run.settle()
            assert len(a.work) == 2, "the queued work goes where version 4 is"
            await a.generate(MAX_TOKENS, finish="length")
            await b.generate(MAX_TOKENS - 2, finish="length")
            await run.settle()
            assert len(run.ended) == 6
            assert run.versions("2/0") == [(4, MAX_TOKENS)]

    loops.run(lambda _: main())


@pytest.mark.parametrize("on_new_weights", ["interrupt", "finish"])
def test_work_of_workers_that_fell_out_of_the_window_goes_on_where_it_was(
    tmp_path: Path, on_new_weights: Literal["interrupt", "finish"]
) -> None:
    """Two versions were published before any worker loaded one: version 3 may not generate any more."""

    async def main() -> None:
        async with started(tmp_path, on_new_weights) as run:
            a, b = run.workers
            await run.settle()
            run.publish(4)
            run.publish(5)
            held = [dict(w.work) for w in run.workers]
            for worker in run.workers:
                await worker.generate(2)  # on its way when it is asked to stop
            await run.settle()
            assert [sorted(w.cancelled) for w in run.workers] == [sorted(h) for h in held]
            assert all(w.loads == [5] for w in run.workers), "also with `finish`: they have nothing to finish"
            assert run.dispatch.ledger.counts.late == 8, "what was on its way is not accepted"
            assert run.ended == []
            assert len(run.dispatch.ledger.queues[""]) == 6, "all work waits"
            assert run.dispatch.ledger.lost_tokens() == 0
            await b.load()
            await run.settle()
            assert a.work == {}
            assert list(b.work.values()) == [2, 2], "responses that have begun come first, and keep their tokens"
            await a.load()
            for _ in range(3):
                await run.settle()
                for worker in run.workers:
                    if worker.work:
                        await _to_the_end(worker)
            await run.settle()
            assert sorted(run.ended) == ["0/0", "0/1", "1/0", "1/1", "2/0", "2/1"], "nothing hangs"
            assert run.versions("0/0") == [(3, 2), (5, MAX_TOKENS - 2)]
            assert run.versions("2/0") == [(5, MAX_TOKENS)]

    loops.run(lambda _: main())


async def _to_the_end(worker: Worker) -> None:
    """Finish the worker's responses, which are all at the same position or are finished in groups of equal position."""
    work = worker.work
    for position in sorted(set(work.values())):
        worker.work = {h: p for h, p in work.items() if p == position}
        await worker.generate(MAX_TOKENS - position, finish="length")


def test_worker_that_skips_a_version_while_it_runs_keeps_its_work(tmp_path: Path) -> None:
    """With `interrupt`, a worker swaps to version 4 just before 5 is published: its responses stay where they are."""

    async def main() -> None:
        async with started(tmp_path, "interrupt") as run:
            a, _ = run.workers
            await run.settle()
            run.publish(4)
            await run.settle()
            await a.load()
            await a.generate(1)
            await run.settle()
            run.publish(5)
            await run.settle()
            assert a.cancelled == []
            assert a.loads == [5]
            await a.generate(MAX_TOKENS - 3, finish="length")
            await run.settle()
            assert len(run.ended) == 2
            assert all(run.versions(id) == [(3, 2), (4, MAX_TOKENS - 2)] for id in run.ended)
            assert a.work == {}, "version 4 gets no new work"

    loops.run(lambda _: main())


def test_worker_that_was_paused_while_it_loaded_stays_paused(tmp_path: Path) -> None:
    """The trainer's engine is paused when its new weights arrive. Its time is not that of an idle worker."""

    async def main() -> None:
        async with started(tmp_path, "interrupt") as run:
            a, _ = run.workers
            await run.settle()
            run.publish(4)
            await run.settle()
            assert a.loads == [4]
            run.dispatch.pause("a")
            await a.load()
            await run.settle()
            paused, now = run.dispatch.members.all["a"], asyncio.get_running_loop().time()
            assert (paused.state, paused.first.version) == (WorkerState.PAUSED, 4)
            before, after = (run.dispatch.accounts.of("a", s).seconds for s in (now, now + 5.0))
            assert {k: round(s - before.get(k, 0.0), 6) for k, s in after.items() if s > before.get(k, 0.0)} == {
                "paused": 5.0
            }

    loops.run(lambda _: main())


def test_prefilling_again_is_counted_at_the_measured_speed(tmp_path: Path) -> None:
    """Eight tokens at 10 tokens per second: in the contexts of two responses, first with new weights, then moved."""

    async def main() -> None:
        async with started(tmp_path, "interrupt") as run:
            a, b = run.workers
            await run.settle()
            run.dispatch.placement.speeds.prefilled("a", 10, 1.0)
            run.publish(4)
            await run.settle()
            await a.load()
            await run.settle()
            assert _prefilled_again_s(run, "a") == pytest.approx(0.8)
            await asyncio.sleep(1.0)
            await b.link.close("killed")
            await run.settle()
            await a.generate(MAX_TOKENS - 2, finish="length")
            await run.settle()
            assert list(a.work.values()) == [2, 2]
            assert _prefilled_again_s(run, "a") == pytest.approx(1.6)

    loops.run(lambda _: main())


def _prefilled_again_s(run: Run, worker: str) -> float:
    """Until five seconds from now."""
    return run.dispatch.accounts.of(worker, asyncio.get_running_loop().time() + 5.0).seconds["prefill_again"]
