"""A simulated trainer, at its end of a link: what train/agent.py is, waiting in virtual time. Real tokens are counted.

    start ──▶ dial ──▶ [ Prepare | Accumulate | Update | Save ]* ──▶ dial again      when the link ends
      ▲                                                   │
      └── down_s ── kill, or a link that ends between two updates of a step: the next process has the last checkpoint

One machine trains and, as the worker `local`, generates: never both at once, and a step or a piece of training that has
begun is ended first. Killed, `local` goes with it. Work that is under way when the link ends is ended, and its answer
lost: an update counts, and what was accumulated for the next one is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from typing import Any

from windfall.link import messages as m
from windfall.sim.core.link import SimLink
from windfall.sim.core.service import Service
from windfall.sim.core.token_schedule import TokenSchedule
from windfall.sim.machines.worker import SimWorker
from windfall.train.base import Report
from windfall.train.checkpoint import CheckpointState

AGAIN_S = 0.2
"""Until it dials again."""
ENGINE = m.EngineSpec(
    model_config="{}", dtype="", kv_tokens=0, page_size=0, max_running=0, max_rows=0, deterministic=True, longest=0,
    wanted=0,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class SimWeights:
    """What a checkpoint has, or a trainer. The same step trained by another process is other weights."""

    state: CheckpointState
    digest: str


class LinkedTrainer:
    def __init__(
        self, service: Service, book: TokenSchedule, *, save_s: float = 0.0, down_s: float = 0.0, micro_tokens: int = 0,
        facts: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._service, self._book, self._save_s, self._down_s = service, book, save_s, down_s
        self._micro_tokens, self._facts = micro_tokens, facts or {}
        self.local: Callable[[], SimWorker | None] = lambda: None
        """The worker on the same machine, if there is one."""
        self.attend: Callable[[Any, m.TrainerHello], Coroutine[Any, Any, None]] | None = None
        """Where it dials."""
        self.started: Callable[[float], None] = lambda started_s: None
        self.ended: Callable[[], None] = lambda: None
        """Told when its process has begun, since when it is paid for; and when it has ended."""
        self.trained: Callable[[int, list[m.SampleMessage]], None] = lambda step, samples: None
        """Told of every completed step, and all that it was trained on."""
        self.trained_tokens = self.lives = 0
        """Real tokens; processes so far."""
        self.saved = self.weights = SimWeights(state=CheckpointState(step=0, next_task=0), digest="v0")
        self.published: set[str] = set()
        """Digests that can be pulled: those of this process."""
        self._began_s = 0.0
        self._wire: SimLink | None = None
        self._process: asyncio.Task[None] | None = None
        self._attending: asyncio.Task[None] | None = None
        self._samples: list[m.SampleMessage] = []
        self._part = self._updates = 0
        """Of `samples`, those before this have been in an update; updates since the last whole step."""

    # its process

    def start(self, began_s: float = 0.0) -> None:
        """It is up: with the weights of the last checkpoint."""
        self.lives += 1
        self.weights, self._began_s, self.published = self.saved, began_s, {self.saved.digest}
        self._drop()
        self.started(began_s)
        self._process = asyncio.get_running_loop().create_task(self._run(), name="trainer")

    def kill(self, why: str = "killed") -> None:
        """Another process is up after `down_s`."""
        if self._process is not None:
            self._process.cancel()
            self._die(why)

    def _die(self, why: str) -> None:
        loop = asyncio.get_running_loop()
        self._process = None
        self.published = set()
        self.cut(why)
        self.ended()
        loop.call_later(self._down_s, self.start, loop.time())

    def cut(self, why: str) -> None:
        """Its link ends."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.cut(why)
            self._orders.put_nowait(None)

    async def _run(self) -> None:
        while True:
            self._dial()
            await self._serve()
            if self._updates:
                self._die("its weights are of no version")
                return
            self._drop()
            await asyncio.sleep(AGAIN_S)

    def _dial(self) -> None:
        loop = asyncio.get_running_loop()
        self._orders: asyncio.Queue[object] = asyncio.Queue()
        wire = self._wire = SimLink("trainer", self._orders.put_nowait, lambda why: self._sent_away(wire, why), 0.0)
        w = self.weights
        hello = m.TrainerHello(
            protocol=m.PROTOCOL, nonce=b"", proof=b"", step=w.state.step, next_task=w.state.next_task,
            micro_tokens=self._micro_tokens, model="", engine=ENGINE, version=w.state.step, digest=w.digest, url="",
            facts={"pid": self.lives, "age_s": loop.time() - self._began_s, **self._facts},
        )  # fmt: skip
        assert self.attend is not None, "nobody to dial"
        self._attending = loop.create_task(self.attend(wire, hello), name="attend trainer")

    def _sent_away(self, wire: SimLink, why: str) -> None:
        if wire is self._wire:
            self.cut(why)

    async def _serve(self) -> None:
        wire, orders = self._wire, self._orders
        while (order := await orders.get()) is not None:
            reply = await self._obey(order)
            if wire is not None:
                wire.say(reply)  # nothing, if it has ended meanwhile

    # what it is asked

    async def _obey(self, order: object) -> object:
        began_s = asyncio.get_running_loop().time()
        match order:
            case m.Prepare():
                await self._work(self._service.training_s(self._real(order.samples)) / 3)  # a forward pass
                return m.Prepared(old=tuple(s.behaviour for s in order.samples))
            case m.Accumulate():
                self._samples += order.samples
                tokens = self._real(order.samples)
                self.trained_tokens += tokens
                await self._work(self._service.training_s(tokens))
                return m.Done(s=asyncio.get_running_loop().time() - began_s)
            case m.Update():
                return await self._update(order, began_s)
            case m.Save():
                await self._work(self._save_s)
                self.saved = self.weights
                return m.Saved(path="nowhere")
        raise AssertionError(f"a {type(order).__name__} was not expected")

    async def _update(self, order: m.Update, began_s: float) -> m.Updated:
        self._updates += 1
        await self._work(self._service.update_s)
        part, self._part = self._samples[self._part :], len(self._samples)
        report = Report(
            tokens=sum(len(s.targets) for s in part), responses=len(part), grad_norm=0.0, lr=0.0, entropy=0.0,
            engine_gap=0.0, engine_gap_max=0.0, clipped=0.0, kl=0.0, skipped="",
        )  # fmt: skip
        if order.step is not None and order.next_task is not None:
            digest = f"v{order.step}" if self.lives < 2 else f"v{order.step} of process {self.lives}"
            self.weights = SimWeights(state=CheckpointState(step=order.step, next_task=order.next_task), digest=digest)
            self.published.add(digest)
            self.trained(order.step, self._samples)
            self._drop()
        w = self.weights
        took_s = asyncio.get_running_loop().time() - began_s
        return m.Updated(report=asdict(report), version=w.state.step, digest=w.digest, s=took_s)

    def _drop(self) -> None:
        self._samples, self._part, self._updates = [], 0, 0

    async def _work(self, seconds: float) -> None:
        if seconds <= 0:
            return
        local = self.local()
        if local is not None:
            await local.make_room()
        try:
            await asyncio.sleep(seconds)
        finally:
            if local is not None:
                local.training_over()

    def _real(self, samples: tuple[m.SampleMessage, ...]) -> int:
        """By every response's first token, which says whose it is."""
        return sum(self._book.length(s.ids[s.targets[0]]) for s in samples)
