"""A worker that loads new weights while its engine runs responses: a real engine on the CPU, over a link in memory.

Every token is compared with a new engine of the version in its frame's label, so a wrong label fails these tests.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from tests.support.engines.continuation import Token, check_continuation, versions, weights
from tests.support.engines.small_models import engine
from windfall.engine.engine_thread import EngineThread
from windfall.engine.torch.engine import TorchEngine
from windfall.link import messages as m
from windfall.link.memory import MemoryLink, pair
from windfall.types import Request, Sampling
from windfall.worker.worker_link import PulledWeights, Stalled, WorkerLink

WAIT_S = 60.0
DEPTH = 64


@pytest.fixture(scope="module")
def models() -> list[Any]:
    return versions("llama", 4)


class Paced(TorchEngine):
    """Needs 2 ms per step at least, so that something can happen while it runs."""

    breaks_at: int = -1
    """A swap to this version fails after it has changed some of the weights."""

    def step(self) -> list[Any]:
        time.sleep(0.002)
        return super().step()

    def swap(self, version: int, weights: Any = None, *, policy: str = "") -> None:
        if version == self.breaks_at:
            with torch.no_grad():
                next(self.model.parameters()).add_(1.0)
            raise RuntimeError("out of memory in the middle of the copy")
        super().swap(version, weights, policy=policy)


class Pulls:
    """A Pull that takes until `allow(version)`, or until it is asked to give up."""

    def __init__(self, models: list[Any]) -> None:
        self._models, self._allowed = models, {n: threading.Event() for n in range(len(models))}
        self.began: list[int] = []
        self.fails: set[int] = set()
        self.misshapen: set[int] = set()

    def allow(self, *versions: int) -> None:
        for version in versions:
            self._allowed[version].set()

    def __call__(self, load: m.Load, give_up: threading.Event) -> PulledWeights:
        self.began.append(load.version)
        end = time.monotonic() + WAIT_S
        while not self._allowed[load.version].is_set():
            assert time.monotonic() < end, "the pull was never allowed to end"
            if give_up.wait(0.001):
                raise TimeoutError("given up")
        if load.version in self.fails:
            raise ConnectionError("the server is away")
        tensors = weights(self._models[load.version])
        if load.version in self.misshapen:
            tensors["model.norm.weight"] = torch.zeros(1)
        return PulledWeights(digest=load.digest, tensors=tensors)


class Controller:
    """The other end of the link. Records everything it receives, and checks the order of tokens."""

    def __init__(self, link: MemoryLink, models: list[Any], pulls: Pulls) -> None:
        self.link, self.pulls, self._models = link, pulls, models
        self.asked: dict[int, Request] = {}
        self.made: dict[int, list[Token]] = {}
        self.finished: set[int] = set()
        self.messages: list[Any] = []
        """Everything but Stats and Tokens; a frame is recorded as its version."""
        self.stats: m.Stats | None = None

    async def read(self) -> None:
        while True:
            message: Any = await self.link.receive()
            if isinstance(message, m.Stats):
                self.stats = message
                continue
            if not isinstance(message, m.Tokens):
                self.messages.append(message)
                continue
            self.messages.append(message.version)
            tokens, logprobs = m.columns(message)
            assert not message.counts, "this engine makes one token per step"
            for n, handle in enumerate(message.handles):
                assert message.positions[n] == len(self.made[handle]), "no token is missing or repeated"
                self.made[handle].append(Token(tokens[n], logprobs[n], message.version))
            self.finished |= {message.handles[n] for n in message.finished}

    async def load(self, *versions: int) -> None:
        for version in versions:
            await self.link.send(m.Load(version=version, digest=f"d{version}"))

    async def assign(self, *handles: int, max_tokens: int = 60) -> None:
        for h in handles:
            prompt = tuple(3 + (7 * h + 5 * n) % 150 for n in range(9 + h))
            self.asked[h] = Request(id=str(h), prompt=prompt, seed=h, max_tokens=max_tokens, sampling=Sampling())
            self.made[h] = []
        work = tuple(
            m.Work(handle=h, prompt=self.asked[h].prompt, position=0, seed=h, max_tokens=max_tokens,
                   sampling=Sampling(), stop=())
            for h in handles
        )  # fmt: skip
        await self.link.send(m.Assign(work=work))

    async def until(self, holds: Callable[[], object], what: str) -> None:
        end = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < end, f"waited {WAIT_S:g} s until {what}; received {self.messages}"
            await asyncio.sleep(0.001)

    async def until_tokens(self, handle: int, count: int) -> None:
        await self.until(lambda: len(self.made[handle]) >= count, f"response {handle} has {count} tokens")

    async def until_finished(self) -> None:
        await self.until(lambda: self.finished == set(self.asked), "all responses are finished")

    def replies(self) -> list[tuple[str, int]]:
        """The answers to Loads, in order."""
        return [(type(x).__name__, x.version) for x in self.messages if isinstance(x, m.Loaded | m.LoadFailed)]

    def versions(self, handle: int) -> list[int]:
        return sorted({t.version for t in self.made[handle]})

    def check(self) -> None:
        """Every response is what new engines with the labeled weights generate, bit for bit; and tokens of a version
        follow its Loaded."""
        for handle, request in self.asked.items():
            check_continuation(
                request, self.made[handle], lambda v: engine(copy.deepcopy(self._models[v]), deterministic=True)
            )
        current = -1
        for x in self.messages:
            if isinstance(x, m.Loaded):
                current = x.version
            elif isinstance(x, int):
                assert x == current, f"tokens of version {x} while version {current} was loaded"


@asynccontextmanager
async def worker(models: list[Any], *, stalled_s: float = 1e9, breaks_at: int = -1) -> AsyncIterator[tuple[Any, Any]]:
    """A worker that has loaded version 0."""
    ours, theirs = pair("controller", "worker")
    e = Paced(copy.deepcopy(models[3]), kv_tokens=4096, max_running=16, max_rows=64, deterministic=True, version=99)
    e.breaks_at = breaks_at
    host, pulls = EngineThread(e, 16), Pulls(models)
    host.start()
    controller = Controller(ours, models, pulls)
    session = WorkerLink(theirs, host, pulls, heartbeat_s=0.02, stalled_s=stalled_s)
    reading, serving = asyncio.create_task(controller.read()), asyncio.create_task(session.serve())
    try:
        pulls.allow(0)
        await controller.load(0)
        await controller.until(lambda: controller.replies() == [("Loaded", 0)], "version 0 is loaded")
        yield controller, serving
    finally:
        pulls.allow(*range(len(models)))
        reading.cancel()
        await ours.close("over")
        await asyncio.wait([serving], timeout=WAIT_S)
        await asyncio.gather(reading, serving, return_exceptions=True)
        host.cancel(range(100))
        await asyncio.to_thread(host.close, WAIT_S)
        assert host.failed is None


def test_responses_continue_during_a_pull_and_after_the_swap(models: list[Any]) -> None:
    async def main() -> None:
        async with worker(models) as (c, _):
            await c.assign(1, 2)
            await c.until_tokens(1, 5)
            await c.load(1)
            await c.until(lambda: c.pulls.began == [0, 1], "the pull has begun")
            at = len(c.made[1])
            await c.assign(3)  # during the pull
            await c.until_tokens(3, 8)
            assert len(c.made[1]) >= at + 5, "generation went on"
            assert {t.version for t in c.made[3]} == {0}
            c.pulls.allow(1)
            await c.assign(4)  # around the swap
            await c.until(lambda: ("Loaded", 1) in c.replies(), "version 1 is loaded")
            await c.assign(5)
            await c.until_finished()
            assert [c.versions(h) for h in (1, 2, 3)] == [[0, 1]] * 3
            assert c.versions(5) == [1]
            assert c.replies() == [("Loaded", 0), ("Loaded", 1)]
            c.check()

    asyncio.run(main())


@pytest.mark.parametrize("delay_s", [0.0, 0.003, 0.01])
def test_two_loads_in_quick_succession(models: list[Any], delay_s: float) -> None:
    """The second may find the first in its pull, in its swap, or complete. In any case the last one wins."""

    async def main() -> None:
        async with worker(models) as (c, _):
            c.pulls.allow(1, 2)
            await c.assign(1, 2)
            await c.until_tokens(1, 3)
            await c.load(1)
            await asyncio.sleep(delay_s)
            await c.load(2)
            await c.until_finished()
            await c.until(lambda: ("Loaded", 2) in c.replies(), "version 2 is loaded")
            assert c.replies() in ([("Loaded", n) for n in (0, 1, 2)], [("Loaded", n) for n in (0, 2)])
            assert c.made[1][-1].version == 2
            c.check()

    asyncio.run(main())


def test_newer_load_during_a_pull(models: list[Any]) -> None:
    async def main() -> None:
        async with worker(models) as (c, _):
            c.pulls.allow(2)
            await c.assign(1)
            await c.until_tokens(1, 3)
            await c.load(1)
            await c.until(lambda: c.pulls.began == [0, 1], "the pull has begun")
            await c.load(2)
            await c.until_finished()
            assert c.replies() == [("Loaded", 0), ("Loaded", 2)], "nothing is said about the canceled one"
            assert c.versions(1) == [0, 2]
            c.check()

    asyncio.run(main())


def test_load_that_is_already_in_progress_is_not_begun_again(models: list[Any]) -> None:
    async def main() -> None:
        async with worker(models) as (c, _):
            await c.assign(1)
            await c.load(1)
            await c.until(lambda: c.pulls.began == [0, 1], "the pull has begun")
            for _ in range(5):
                await c.load(1)
            await c.until_tokens(1, 5)
            c.pulls.allow(1)
            await c.until_finished()
            assert c.pulls.began == [0, 1], "the pull was not begun again"
            assert c.replies() == [("Loaded", 0), ("Loaded", 1)]
            c.check()

    asyncio.run(main())


def test_load_of_an_abandoned_version_is_begun_again(models: list[Any]) -> None:
    """Load 1, 2, 1: the last one is not in progress any more, although its version is the first one's."""

    async def main() -> None:
        async with worker(models) as (c, _):
            await c.assign(1)
            await c.load(1)
            await c.until(lambda: c.pulls.began == [0, 1], "the pull has begun")
            await c.load(2, 1)
            c.pulls.allow(1)
            await c.until_finished()
            await c.until(lambda: len(c.replies()) > 1, "a version is loaded")
            assert c.replies() == [("Loaded", 0), ("Loaded", 1)]
            c.check()

    asyncio.run(main())


def test_load_of_an_older_or_the_held_version(models: list[Any]) -> None:
    """Evaluation needs a fixed version, which may be older than the one that the worker holds."""

    async def main() -> None:
        async with worker(models) as (c, _):
            c.pulls.allow(1, 2)
            await c.assign(1, 2, max_tokens=90)
            wanted = [("Loaded", 0)]
            for version in (2, 1, 1, 2, 0):
                at = len(c.made[1])
                await c.load(version)
                wanted.append(("Loaded", version))
                await c.until(lambda: c.replies() == wanted, f"version {version} is loaded")
                await c.until_tokens(1, at + 6)
            await c.until_finished()
            assert c.replies() == wanted, "one Loaded per completed load"
            assert c.versions(1) == [0, 1, 2]
            c.check()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["pull", "refused"])
def test_responses_go_on_under_the_old_version_if_a_load_fails(models: list[Any], how: str) -> None:
    async def main() -> None:
        async with worker(models) as (c, _):
            (c.pulls.fails if how == "pull" else c.pulls.misshapen).add(1)
            c.pulls.allow(1, 2)
            await c.assign(1, 2)
            await c.until_tokens(1, 3)
            await c.load(1)
            await c.until(lambda: ("LoadFailed", 1) in c.replies(), "the load has failed")
            at = len(c.made[1])
            await c.assign(3)
            await c.until_tokens(1, at + 5)
            assert c.versions(1) == [0]
            await c.load(2)
            await c.until_finished()
            assert c.replies() == [("Loaded", 0), ("LoadFailed", 1), ("Loaded", 2)]
            assert c.versions(1) == [0, 2]
            c.check()

    asyncio.run(main())


def test_mixed_weights_generate_nothing_until_the_next_load(models: list[Any]) -> None:
    async def main() -> None:
        async with worker(models, breaks_at=1) as (c, _):
            c.pulls.allow(1, 2)
            await c.assign(1, 2)
            await c.until_tokens(1, 3)
            await c.load(1)
            await c.until(lambda: ("LoadFailed", 1) in c.replies(), "the load has failed")
            at = len(c.made[1])
            await c.assign(3)
            await c.link.send(m.Release(handles=(2,)))
            await c.until(lambda: any(isinstance(x, m.Released) for x in c.messages), "orders still take effect")
            await asyncio.sleep(0.05)
            assert (len(c.made[1]), len(c.made[3])) == (at, 0)
            del c.asked[2]
            await c.load(2)
            await c.until_finished()
            assert (c.versions(1), c.versions(3)) == ([0, 2], [2])
            c.check()

    asyncio.run(main())


def test_worker_with_mixed_weights_ends_if_no_load_follows(models: list[Any]) -> None:
    async def main() -> None:
        async with worker(models, breaks_at=1, stalled_s=0.5) as (c, serving):
            c.pulls.allow(1)
            await c.assign(1)
            await c.until_tokens(1, 3)
            await c.load(1)
            with pytest.raises(Stalled, match="no engine step"):
                await asyncio.wait_for(serving, WAIT_S)

    asyncio.run(main())
