"""The controller's proxy of the trainer: a process behind a link. It answers requests in the order in which they were
made. A caller that is canceled while it waits changes nothing for the others: its request is performed.

It implements the verbs of verbs.Policy that the trainer performs. Samples are sent in messages of about FRAME_BYTES.

If the trainer is lost or fails, the pending requests raise TrainerLost. The next trainer that dials in replaces it,
with its own step and weights. The run ends only if the trainer reports an error that a person must fix.

The proxy of a slot (docs/policies.md#slots) also has `load_adapter`, `save_adapter` and `score`:

    await trainer.load_adapter(AdapterSpec(rank=8, alpha=16.0, seed=1), id=...)      a new adapter
    await trainer.load_adapter(path="models/a/3", optimizer=True, id=...)       an adapter from a folder
    await trainer.forward_backward(samples, Loss(name="cross_entropy"), id=...)      with a given loss, as of any policy
    await trainer.optim_step(adam=Adam(lr=1e-4), id=...)
    await trainer.save_adapter("models/a/4", optimizer=True, id=...)
    await trainer.publish(id=..., version=7)                                         only a slot to sample from

A verb that a slot cannot perform as it was given raises training.VerbRefused, and the slot is as it was before that
message. After TrainerLost, and in a new controller, slots are empty: wait with `connected` and load again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

import numpy as np

from windfall.algorithms.given import Loss
from windfall.controller.directory import updates
from windfall.controller.directory.directory import Directory
from windfall.controller.rollout.weight_routes import WeightRoutes
from windfall.errors import WindfallError
from windfall.link import messages as m
from windfall.link.base import FrameTooLarge, Link, LinkClosed
from windfall.training import (
    Adam,
    AdapterSpec,
    CheckpointState,
    Gradient,
    LoadedAdapter,
    NewVersion,
    Report,
    Sample,
    Scores,
    TrainerFailed,
    TrainerLost,
    VerbRefused,
    check_given,
)

FRAME_BYTES = 16 << 20
"""Approximate size of one message with samples."""


class RemoteTrainer:
    def __init__(self, routes: WeightRoutes, policy: str = "") -> None:
        """`routes`: is told what the trainer has uploaded, and says which files workers may still read. `policy`: the
        one that the trainer trains."""
        self.hello: m.TrainerHello | None = None
        self.weights: m.PublishedFiles | None = None
        """The newest files of the trainer that is connected, or was last."""
        self._routes, self._policy = routes, policy
        self._link: Link | None = None
        self._current: Link | None = None
        """Link of the trainer whose step and weights the run uses. No request goes to any other trainer."""
        self._present = asyncio.Event()
        self._waiting: deque[asyncio.Future[object]] = deque()
        """For the answers to the requests that were sent over the link, in order."""
        self._sending = asyncio.Lock()
        self._telling: set[asyncio.Task[None]] = set()
        routes.upload_again[policy] = self._upload_again

    @property
    def _directory(self) -> Directory | None:
        """None for a slot that workers do not hold."""
        return self._routes.directories.get(self._policy)

    async def attend(self, link: Link, hello: m.TrainerHello) -> None:
        """Serve the link of one trainer until it ends."""
        if self._link is not None:  # the old trainer may be frozen; that would be why the new one was started
            await self._link.close("another trainer has taken over")
        self._link, self.hello, self._waiting = link, hello, deque()
        self.weights = hello.weights
        waiting, closed = self._waiting, LinkClosed("this process ends")
        self._present.set()
        directory = self._directory
        if directory is not None and (wrong := directory.wrong):  # the trainer before may not have heard of them
            self._upload_again(wrong)
        try:
            while True:
                message = await link.receive()
                if isinstance(message, m.Uploaded):
                    self._routes.uploaded(message, self._policy)
                elif waiting:
                    _answer(waiting.popleft(), message)
        except LinkClosed as e:
            closed = e
        finally:
            for each in waiting:
                _answer(each, closed)
            waiting.clear()
            if self._link is link:
                self._forget()

    def _upload_again(self, files: tuple[str, ...]) -> None:
        """Without a trainer, the next one is told when it connects."""

        async def tell(link: Link) -> None:
            with contextlib.suppress(LinkClosed):
                await link.send(m.UploadAgain(files=files))

        if self._link is not None:
            task = asyncio.create_task(tell(self._link))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    def _forget(self) -> None:
        self._link, self.hello = None, None
        self._present.clear()

    async def connected(self, timeout_s: float) -> m.TrainerHello:
        """Wait for a trainer, and use it from now on."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.hello is None:
                    await self._present.wait()
        except TimeoutError:
            raise WindfallError(f"waited {timeout_s:g} s for the trainer to start", fix="See trainer.log.") from None
        self._current = self._link
        return self.hello

    async def forward(self, samples: Sequence[Sample], loss: Loss | None = None, *, id: str) -> list[Sample]:
        """The samples with the log-probs of the present policy as `old`: for steps of several updates, or with the loss
        that will be given."""
        _check(samples, loss)
        out: list[np.ndarray] = []
        for n, part in enumerate(message_parts(samples)):
            out += (await self._ask(m.Forward(id=f"{id}.{n}", samples=part, loss=loss), m.LogProbs)).old
        return [replace(s, old=old) for s, old in zip(samples, out, strict=True)]

    async def forward_backward(self, samples: Sequence[Sample], loss: Loss | None = None, *, id: str) -> Gradient:
        """Add the gradient of these samples."""
        _check(samples, loss)
        requests = [
            m.ForwardBackward(id=f"{id}.{n}", samples=part, loss=loss) for n, part in enumerate(message_parts(samples))
        ]
        added = [await self._ask(request, m.GradientAdded) for request in requests]
        s, logprobs = sum(each.s for each in added), tuple(chain.from_iterable(each.logprobs for each in added))
        if loss is None:
            return Gradient(s=s)
        value = sum(loss.value(each.tokens(logp)) for each, logp in zip(samples, logprobs, strict=True))
        return Gradient(s=s, loss=value, logprobs=logprobs)

    async def optim_step(self, state: CheckpointState | None = None, adam: Adam | None = None, *, id: str) -> Report:
        """Make one optimizer update. With `state`, it completes the step `state.step`, which can be published then."""
        order = m.OptimStep(id=id, adam=adam)
        if state is not None:
            order = m.OptimStep(id=id, adam=adam, **asdict(state))
        reply = await self._ask(order, m.Optimized)
        return Report(**reply.report)  # pyright: ignore[reportArgumentType]

    async def publish(self, *, id: str, version: int = 0) -> NewVersion:
        """Publish the weights of the completed step as its version. `version`: for a slot, which has no steps: a number
        above all that its adapters had in this run. An adapter that was published before with a number may be published
        with it again by the next trainer: workers that have it keep it."""
        directory = self._directory
        order = m.Publish(id=id, version=version)
        if directory is not None:
            order = m.Publish(id=id, version=version, keep=tuple(sorted(directory.needed())), pack=directory.pack())
        return self._published(await self._ask(order, m.PublishedVersion))

    async def save(self, *, id: str) -> str:
        """Write a checkpoint of the published version. Returns its path."""
        return (await self._ask(m.Save(id=id), m.Saved)).path

    async def load(self, path: str, *, id: str) -> NewVersion:
        """Continue from this checkpoint, and publish its weights."""
        return self._published(await self._ask(m.LoadCheckpoint(id=id, path=path), m.PublishedVersion))

    async def load_adapter(
        self, spec: AdapterSpec | None = None, path: str = "", *, optimizer: bool = False, id: str
    ) -> LoadedAdapter:
        """Fill the slot, whatever it has now. Without `path`: with a new adapter, whose B is zero. With it: with the
        adapter of this folder; then a `spec` is only compared with it. `optimizer`: also read the state of the
        optimizer from the folder; otherwise Adam starts anew. Gradients of the adapter before are dropped."""
        order = m.LoadAdapter(id=id, path=path, optimizer=optimizer)
        if spec is not None:
            order = m.LoadAdapter(id=id, path=path, optimizer=optimizer, **asdict(spec))
        reply = await self._ask(order, m.AdapterLoaded)
        loaded = AdapterSpec(
            rank=reply.rank, alpha=reply.alpha, seed=spec.seed if spec is not None else 0, targets=reply.targets
        )
        return LoadedAdapter(spec=loaded, parameters=reply.parameters)

    async def save_adapter(self, path: str, *, optimizer: bool = False, id: str) -> str:
        """Write the adapter of the slot into this folder, in PEFT format: completely or not at all. A folder that is
        there already must have the same contents. Returns the path."""
        return (await self._ask(m.SaveAdapter(id=id, path=path, optimizer=optimizer), m.Saved)).path

    async def score(self, sequences: Sequence[Sequence[int]], top_k: int = 0, *, id: str) -> list[Scores]:
        """What the adapter of the slot, or a frozen policy beside slots, predicts at a temperature of 1."""
        order = m.Score(id=id, sequences=tuple(map(tuple, sequences)), top_k=top_k)
        return [
            Scores(
                logprobs=each.logprobs,
                top_ids=each.top_ids.reshape(len(each.logprobs), top_k),
                top_logprobs=each.top_logprobs.reshape(len(each.logprobs), top_k),
            )
            for each in (await self._ask(order, m.Scored)).sequences
        ]

    def _published(self, reply: m.PublishedVersion) -> NewVersion:
        self.weights = reply.weights
        files = reply.weights.files if reply.weights is not None else ()
        update_bytes = min((f.nbytes for f in files if updates.result(f) == reply.digest), default=0)
        return NewVersion(version=reply.version, digest=reply.digest, update_bytes=update_bytes)

    async def _ask(self, message: object, expected: type[Any]) -> Any:
        answered: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        # Shielded: nobody could tell which answer is whose if half a request was sent.
        link = await asyncio.shield(asyncio.create_task(self._send(message, answered)))
        # No timeout here: a request may take any time. The link's heartbeat detects a dead or frozen process, and
        # ends the link.
        reply = await answered
        if isinstance(reply, m.RefusedVerb):
            raise VerbRefused(reply.what, where=reply.where, fix=reply.fix)
        if isinstance(reply, m.Failed):
            if reply.final:
                raise WindfallError(reply.error, where="trainer")
            if self._link is link:  # its process is ending: the run must wait for the next one
                self._forget()
            raise TrainerFailed(f"the trainer failed: {reply.error}")
        if isinstance(reply, LinkClosed):
            raise TrainerLost(str(reply)) from reply
        if not isinstance(reply, expected):
            raise TrainerLost(f"the trainer answered a {type(message).__name__} with a {type(reply).__name__}")
        return reply

    async def _send(self, message: object, answered: asyncio.Future[object]) -> Link:
        """Send a request, one after the other. Returns the link that it was sent over."""
        async with self._sending:
            link, waiting = self._link, self._waiting
            if link is None:
                raise TrainerLost("no trainer is connected")
            if link is not self._current:  # a trainer has dialed in without the accumulated gradient of this step
                raise TrainerLost("another trainer has replaced it")
            waiting.append(answered)
            try:
                await link.send(message)
            except FrameTooLarge as e:  # the next trainer could not receive it either
                waiting.remove(answered)
                what = f"the message to the trainer is too large: {e}"
                raise WindfallError(what, fix="Lower rollout.max_tokens.") from e
            except LinkClosed as e:
                raise TrainerLost(str(e)) from e
            return link


def _answer(waiting: asyncio.Future[object], reply: object) -> None:
    """Unless the caller was canceled."""
    if not waiting.done():
        waiting.set_result(reply)


def _check(samples: Sequence[Sample], loss: Loss | None) -> None:
    """A sample that the given loss is not defined for must not reach the trainer, whose process would end."""
    for n, sample in enumerate(samples if loss is not None else ()):
        assert loss is not None
        check_given(sample, loss, f"sample {n}")


def message_parts(samples: Sequence[Sample]) -> Iterator[tuple[Sample, ...]]:
    """The samples of each message, always split in the same way, so that the order of summation does not change."""
    part: list[Sample] = []
    size = 0
    for sample in samples:
        # On the wire an integer takes up to 5 bytes, a log-prob 8 and a lag 2; a sample has a few more fields.
        wire = 5 * (len(sample.ids) + len(sample.targets)) + 16 * len(sample.targets) + 160
        wire += sum(extra.nbytes for extra in (sample.lag, sample.advantages, sample.labels) if extra is not None)
        wire += len(sample.experts) + sum(4 * len(name) + 10 for name, _ in sample.engines)
        if part and size + wire > FRAME_BYTES:
            yield tuple(part)
            part, size = [], 0
        part.append(sample)
        size += wire
    yield tuple(part)
