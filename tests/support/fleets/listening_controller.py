"""A controller that listens on loopback (port, gate, dispatch), and workers that connect to it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.engines.hashing_engine import Hashing, said
from tests.support.fleets.response_owner import FunctionOwner
from windfall.controller.ledger.episode import Episode
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.workers.members import Patience, WorkerState
from windfall.controller.workers.versions import Offer
from windfall.errors import WindfallError
from windfall.events.log import EventLog, read
from windfall.link import messages as m
from windfall.link.base import Link
from windfall.link.gate import Gate, Terms
from windfall.link.socket import Port, Route
from windfall.types import Chunk, Lease, Sampling
from windfall.weights.pulling.pull import PulledWeights, WeightPuller
from windfall.worker.controller_client import ControllerClient

TOKEN = "a token of these tests"
WAIT_S = 60.0
SPEC = m.EngineSpec(
    model_config="{}", dtype="float32", kv_tokens=0, page_size=16, max_running=0, max_rows=64, deterministic=False,
    longest=100, wanted=8,
)  # fmt: skip


class Slow(Hashing):
    """Each step takes 2 ms, so that something can happen between two. `weights` are those that were swapped in last."""

    def __init__(self) -> None:
        super().__init__(Counter())
        self.weights: Any = None
        self.raises = False

    def step(self) -> list[Chunk]:
        time.sleep(0.002)
        if self.raises:
            raise RuntimeError("device lost")
        return super().step()

    def swap(self, version: int, weights: Any = None, *, policy: str = "") -> None:
        super().swap(version, weights)
        self.weights = self.weights if weights is None else weights.get("w")


class Pulling(WeightPuller):
    """A stand-in for weights.pulling.pull.Puller: weights that it holds are not fetched again."""

    reads = True

    def __init__(self) -> None:
        self.bytes_received = 0
        self.loads: list[m.Load] = []
        self._held = ""

    def pull(self, load: m.Load, ask: Any = None, *, stop: Any = None) -> PulledWeights:
        del ask, stop
        self.loads.append(load)
        received = 100 * (self._held != load.digest)
        self.bytes_received += received
        self._held = load.digest
        return PulledWeights(digest=load.digest, tensors={"w": load.digest}, bytes=received)


class Site:
    """A controller without a run."""

    def __init__(self, folder: Path) -> None:
        self.events = EventLog(folder / "events.jsonl")
        patience = Patience(suspect_s=2.0, gone_s=5.0, tick_s=0.05)
        self.dispatch = Dispatch(events=self.events, patience=patience)
        self.gate = Gate("run", TOKEN, log=self.events.instant, max_workers=8)
        self.gate.terms = {"": Terms(model="model-1", engine=SPEC, heartbeat_s=0.1)}
        self.hellos: list[m.Hello] = []
        self.offer(0)
        self.ended: set[str] = set()
        self.listener = FunctionOwner(turn_ended=self.ended.add, rejected=lambda id, why: None)
        routes = {"/worker": Route(receives=m.FromWorker, max_frame_bytes=m.MAX_FRAME_BYTES, handler=self._accept)}
        self.port = Port("127.0.0.1", 0, routes, None)

    def offer(self, version: int) -> None:
        """Publish a version and offer it. Workers are asked again and again for one that was not published."""
        file = m.FileRef(digest=f"d{version}", nbytes=100)
        holders = (m.HolderFiles(location="http://_:99", holds=(m.Holding(file=file),)),)
        files = m.PublishedFiles(version=version, digest=file.digest, files=(file,), holders=holders)
        self.dispatch.set_offer(Offer(version=version, digest=file.digest), files)

    async def _accept(self, link: Link) -> None:
        await self.gate.worker(link, self._attend)

    async def _attend(self, link: Link, hello: m.Hello, base: str) -> None:
        self.hellos.append(hello)
        await self.dispatch.attend(link, hello, base)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port.port}"

    def state(self, id: str) -> WorkerState | None:
        member = self.dispatch.members.all.get(id)
        return member.state if member else None

    def named(self, name: str) -> list[dict[str, Any]]:
        return [e for e in read(self.events.path) if e["name"] == name]

    async def until(self, holds: Callable[[], object], what: str) -> None:
        end = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < end, f"waited {WAIT_S:g} s until {what}"
            self.dispatch.ledger.check()
            await asyncio.sleep(0.002)


class Worker:
    def __init__(self, url: str, *, name: str = "w", token: str = TOKEN, clouds: Any = (), **options: Any) -> None:
        self.engine, self.puller = Slow(), Pulling()
        self.builds: list[m.EngineSpec] = []
        self.said: list[str] = []
        self.build_error: WindfallError | None = None
        self.may_build = threading.Event()
        self.may_build.set()
        self.client = ControllerClient(
            url, token, name=name, build=self._build, puller=self.puller, say=self.said.append,
            **{"patience_s": 30.0, "lease": Lease(), **options},
        )  # fmt: skip
        self.running = asyncio.create_task(self.client.run(clouds))

    def _build(self, spec: m.EngineSpec) -> tuple[Any, int]:
        self.builds.append(spec)
        assert self.may_build.wait(WAIT_S)
        if self.build_error:
            raise self.build_error
        return self.engine, 4

    async def ends(self) -> int:
        async with asyncio.timeout(WAIT_S):
            return await self.running

    async def close(self) -> None:
        self.may_build.set()
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        if self.client._host is not None:
            self.engine._running.clear()
            await asyncio.to_thread(self.client._host.close, WAIT_S)


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[tuple[Site, Callable[..., Worker]]]:
    """A listening controller, and a function that starts a worker which connects to it."""
    s, workers = Site(folder), []
    await s.port.open()
    watching = asyncio.create_task(s.dispatch.watch())

    def start(url: str = "", **options: Any) -> Worker:
        workers.append(Worker(url or s.url, **options))
        return workers[-1]

    try:
        yield s, start
    finally:
        for w in workers:
            await w.close()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await s.port.close()
        s.events.close()


def episode(id: str, max_tokens: int = 60) -> Episode:
    return Episode(
        id=id, prompt=(1, 2), seed=sum(map(ord, id)), max_tokens=max_tokens, sampling=Sampling(), stop=frozenset()
    )


def expected(e: Episode) -> list[int]:
    context = list(e.prompt)
    for _ in range(e.max_tokens):
        context.append(said(e.seed, context)[0])
    return context[2:]
