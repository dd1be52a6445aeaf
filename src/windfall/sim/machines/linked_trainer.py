"""A simulated trainer, with its end of a link: trainer/service.py in virtual time. It counts real tokens.

One machine trains and, as the worker `local`, generates, but never both at once: a decode step or training order that
has started is completed first. Each policy has a trainer of its own. Those of one base are on one machine, train in
turn, and have one server of weights (`SimBase`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from windfall.link import messages as m
from windfall.sim.core.link import SimLink
from windfall.sim.core.token_schedule import TokenSchedule
from windfall.sim.machines.turn import FREE, SimTurn
from windfall.sim.machines.weight_store import MAX_DELTAS, WeightStore
from windfall.sim.machines.worker import SimWorker
from windfall.step_time import StepTime
from windfall.training import CheckpointState, Report, Sample

ENGINE = m.EngineSpec(
    model_config="{}", dtype="", kv_tokens=0, page_size=0, max_running=0, max_rows=0, deterministic=True, longest=0,
    wanted=0,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class SimWeights:
    state: CheckpointState
    digest: str


@dataclass(kw_only=True, slots=True)
class SimBase:
    """The machine that trains all policies on one base."""

    name: str = ""
    stores: Sequence[WeightStore] = ()
    """Its own, and the bucket's if there is one."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it computes."""
    file: m.FileRef | None = None
    """The base, if policies on it are adapters or not trained."""
    trainers: list[LinkedTrainer] = field(default_factory=list)
    """One for each policy."""

    def serve(self) -> None:
        """Serve what the policies have published."""
        for store in self.stores:
            store.hold(dict.fromkeys(file for trainer in self.trainers for file in trainer.files))


class LinkedTrainer:
    def __init__(
        self,
        service: StepTime,
        token_schedule: TokenSchedule,
        base: SimBase | None = None,
        *,
        policy: str = "",
        frozen: bool = False,
        weights_bytes: float = 0.0,
        delta_bytes: float = 0.0,
        save_s: float = 0.0,
        micro_tokens: int = 0,
        facts: dict[str, Any] | None = None,
    ) -> None:
        """`frozen`: the policy only answers, with the weights of the base. `weights_bytes`: of one version."""
        self.policy, self.base = policy, base or SimBase()
        self.original: LinkedTrainer | None = None
        """The trainer whose weights this one copies."""
        self._service = service
        self._token_schedule = token_schedule
        self._weights_bytes, self._delta_bytes = round(weights_bytes), round(delta_bytes)
        self._named = f"{policy} " if policy else ""
        self.files: list[m.FileRef] = []
        """Files that can be read."""
        self._save_s = save_s
        self._micro_tokens = micro_tokens
        self._facts = facts or {}
        self.local: Callable[[], SimWorker | None] = lambda: None
        """Returns the worker on the same machine, if there is one."""
        self.attend: Callable[[Any, m.TrainerHello], Coroutine[Any, Any, None]] | None = None
        self.on_start: Callable[[float], None] = lambda started_s: None
        """Called when its process starts, with the time from which it is paid for."""
        self.turn: SimTurn = FREE
        """The turn of its device."""
        self._granted: asyncio.Future[None] | None = None
        self.trained_tokens = 0
        """Real tokens trained on so far."""
        self.starts = 0
        digest = self.base.file.digest if frozen and self.base.file is not None else f"{self._named}v0"
        self.weights = SimWeights(state=CheckpointState(step=0, next_task=0), digest=digest)
        self.base.trainers.append(self)
        self._began_s = 0.0
        self._link: SimLink | None = None
        self._process: asyncio.Task[None] | None = None
        self._attending: asyncio.Task[None] | None = None
        self._drop_samples()

    def start(self, began_s: float = 0.0) -> None:
        self.starts += 1
        self._began_s = began_s
        self.files = []
        self._serve_files()
        self.on_start(began_s)
        self._process = asyncio.get_running_loop().create_task(self._run(), name=f"trainer {self.policy}".strip())

    def cut(self, why: str) -> None:
        """Close the link."""
        link, self._link = self._link, None
        if link is not None:
            link.cut(why)
            self._orders.put_nowait(None)

    def stop(self) -> None:
        """The run has ended: its process ends."""
        self.cut("the run has ended")
        if self._process is not None:
            self._process.cancel()

    async def _run(self) -> None:
        self._dial()
        await self._serve()

    def _dial(self) -> None:
        loop = asyncio.get_running_loop()
        self._orders: asyncio.Queue[object] = asyncio.Queue()
        link = self._link = SimLink("trainer", self._orders.put_nowait, lambda why: self._link_closed(link, why), 0.0)
        w = self.weights
        hello = m.TrainerHello(
            protocol=m.PROTOCOL, nonce=b"", proof=b"", **asdict(w.state), micro_tokens=self._micro_tokens, model="",
            engine=ENGINE, version=w.state.step, digest=w.digest, weights=self._published_files(),
            facts={"pid": self.starts, "age_s": loop.time() - self._began_s, **self._facts}, policy=self.policy,
        )  # fmt: skip
        assert self.attend is not None, "attend is not set"
        self._attending = loop.create_task(self.attend(link, hello), name="attend trainer")

    def _link_closed(self, link: SimLink, why: str) -> None:
        if link is self._link:
            self.cut(why)

    async def _serve(self) -> None:
        link, orders = self._link, self._orders
        while (order := await orders.get()) is not None:
            if isinstance(order, m.UploadAgain):  # uploads take no time
                replies = [m.Uploaded(file=file, bytes=0, s=0.0) for file in order.files]
            else:
                replies = [await self._execute(order)]
            for reply in replies:
                if link is not None:
                    link.send_to_controller(reply)  # does nothing if the link has closed meanwhile

    # orders

    async def _execute(self, order: object) -> object:
        began_s = asyncio.get_running_loop().time()
        match order:
            case m.Forward():
                await self._work(self._service.train_s * self._real_tokens(order.samples) / 3)  # a forward pass
                return m.LogProbs(old=tuple(s.behavior for s in order.samples))
            case m.ForwardBackward():
                self._samples += order.samples
                tokens = self._real_tokens(order.samples)
                self.trained_tokens += tokens
                await self._work(self._service.train_s * tokens)
                logprobs = tuple(s.behavior for s in order.samples) if order.loss is not None else ()
                return m.GradientAdded(s=asyncio.get_running_loop().time() - began_s, logprobs=logprobs)
            case m.OptimStep():
                return await self._update(order)
            case m.Publish():
                return self._publish()
            case m.Save():
                await self._work(self._save_s)
                return m.Saved(path="nowhere")
        raise AssertionError(f"unexpected message {type(order).__name__}")

    async def _update(self, order: m.OptimStep) -> m.Optimized:
        await self._work(self._service.update_s)
        part, self._updated_samples = self._samples[self._updated_samples :], len(self._samples)
        if order.step is not None:
            self._completed = CheckpointState.of(order)
        return m.Optimized(report=asdict(Report(tokens=sum(len(s.targets) for s in part), responses=len(part))))

    def _publish(self) -> m.PublishedVersion:
        state = self._completed if self.original is None else self.original.weights.state
        assert state is not None, "no step is complete"
        digest = f"{self._named}v{state.step}" + (f" of process {self.starts}" if self.starts > 1 else "")
        before, self.weights = self.weights.digest, SimWeights(state=state, digest=digest)
        self._drop_samples()
        self._serve_files(before)
        return m.PublishedVersion(version=state.step, digest=digest, weights=self._published_files())

    def _serve_files(self, before: str = "") -> None:
        """Serve the new copy, the one before it, and deltas of together at most half a copy."""
        base = [] if self.base.file is None else [self.base.file]
        copies, deltas = [f for f in self.files if not f.after and f not in base], [f for f in self.files if f.after]
        before_it = base[0].digest if base else ""
        if self.weights.digest != before_it:
            copies.append(m.FileRef(digest=self.weights.digest, nbytes=self._weights_bytes, before=before_it))
        if before and self._delta_bytes:
            name = f"{before} to {self.weights.digest}"
            delta = m.FileRef(digest=name, nbytes=self._delta_bytes, before=before, after=self.weights.digest)
            most = min(MAX_DELTAS, max(1, self._weights_bytes // (2 * self._delta_bytes)))
            deltas = [*deltas, delta][-most:]
        self.files = [*base, *copies[-2:], *deltas]
        self.base.serve()

    def _published_files(self) -> m.PublishedFiles:
        holds, stores = tuple(m.Holding(file=file) for file in self.files), self.base.stores
        return m.PublishedFiles(
            version=self.weights.state.step, digest=self.weights.digest, files=tuple(self.files),
            holders=tuple(m.HolderFiles(location=store.location, holds=holds) for store in stores),
            bucket=stores[-1].location if len(stores) > 1 else "",
        )  # fmt: skip

    def _drop_samples(self) -> None:
        self._samples: list[Sample] = []
        self._updated_samples = 0
        """Number of samples that were part of an update."""
        self._completed: CheckpointState | None = None
        """The state after a step that is not published yet."""

    async def _work(self, seconds: float) -> None:
        if seconds <= 0:
            return
        async with self.base.turn:
            local = self.local()
            if local is not None:
                await local.pause_for_training()
            try:
                await self._take_turn()
                await asyncio.sleep(seconds)
            finally:
                self.turn.give()
                if local is not None:
                    local.resume_after_training()

    async def _take_turn(self) -> None:
        if not self.turn.take():
            self._granted = asyncio.get_running_loop().create_future()
            await self._granted

    def turn_granted(self) -> None:
        if self._granted is not None and not self._granted.done():
            self._granted.set_result(None)

    def turn_wanted(self) -> None:
        """A piece of training is not interrupted."""

    def _real_tokens(self, samples: tuple[Sample, ...]) -> int:
        """Real tokens of these samples. The first token of a response identifies it."""
        return sum(self._token_schedule.length(s.ids[s.targets[0]]) for s in samples)
