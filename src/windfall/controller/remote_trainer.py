"""The controller's proxy of the trainer: a process behind a link. There is one request at a time.

It implements the verbs of verbs.Policy that the trainer performs. Samples are sent in messages of about FRAME_BYTES.

If the trainer is lost or fails, the pending request raises TrainerLost. The next trainer that dials in replaces it,
with its own step and weights. The run ends only if the trainer reports an error that a person must fix.
"""

from __future__ import annotations

import asyncio
import contextlib
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
    CheckpointState,
    Gradient,
    NewVersion,
    Report,
    Sample,
    TrainerLost,
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
        self._replies: asyncio.Queue[object] = asyncio.Queue()
        self._telling: set[asyncio.Task[None]] = set()
        routes.upload_again[policy] = self._upload_again

    @property
    def _directory(self) -> Directory:
        return self._routes.directories[self._policy]

    async def attend(self, link: Link, hello: m.TrainerHello) -> None:
        """Serve the link of one trainer until it ends."""
        if self._link is not None:  # the old trainer may be frozen; that would be why the new one was started
            await self._link.close("another trainer has taken over")
        self._link, self.hello, self._replies = link, hello, asyncio.Queue()
        self.weights = hello.weights
        replies = self._replies
        self._present.set()
        if wrong := self._directory.wrong:  # the trainer before may not have heard of them
            self._upload_again(wrong)
        try:
            while True:
                message = await link.receive()
                if isinstance(message, m.Uploaded):
                    self._routes.uploaded(message, self._policy)
                else:
                    replies.put_nowait(message)
        except LinkClosed as e:
            replies.put_nowait(e)
        finally:
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

    async def publish(self, *, id: str) -> NewVersion:
        """Publish the weights of the completed step as its version."""
        directory = self._directory
        order = m.Publish(id=id, keep=tuple(sorted(directory.needed())), pack=directory.pack())
        return self._published(await self._ask(order, m.PublishedVersion))

    async def save(self, *, id: str) -> str:
        """Write a checkpoint of the published version. Returns its path."""
        return (await self._ask(m.Save(id=id), m.Saved)).path

    async def load(self, path: str, *, id: str) -> NewVersion:
        """Continue from this checkpoint, and publish its weights."""
        return self._published(await self._ask(m.LoadCheckpoint(id=id, path=path), m.PublishedVersion))

    def _published(self, reply: m.PublishedVersion) -> NewVersion:
        self.weights = reply.weights
        files = reply.weights.files if reply.weights is not None else ()
        update_bytes = min((f.nbytes for f in files if updates.result(f) == reply.digest), default=0)
        return NewVersion(version=reply.version, digest=reply.digest, update_bytes=update_bytes)

    async def _ask(self, message: object, expected: type[Any]) -> Any:
        link, replies = self._link, self._replies
        if link is None:
            raise TrainerLost("no trainer is connected")
        if link is not self._current:  # a trainer has dialed in without the accumulated gradient of this step
            raise TrainerLost("another trainer has replaced it")
        try:
            await link.send(message)
        except FrameTooLarge as e:  # the next trainer could not receive it either
            raise WindfallError(f"the message to the trainer is too large: {e}", fix="Lower rollout.max_tokens.") from e
        except LinkClosed as e:
            raise TrainerLost(str(e)) from e
        # No timeout here: a request may take any time. The link's heartbeat detects a dead or frozen process, and
        # ends the link.
        reply = await replies.get()
        if isinstance(reply, m.Failed):
            if reply.final:
                raise WindfallError(reply.error, where="trainer")
            if self._link is link:  # its process is ending: the run must wait for the next one
                self._forget()
            raise TrainerLost(f"the trainer failed: {reply.error}")
        if isinstance(reply, LinkClosed):
            raise TrainerLost(str(reply)) from reply
        if not isinstance(reply, expected):
            raise TrainerLost(f"the trainer answered a {type(message).__name__} with a {type(reply).__name__}")
        return reply


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
        wire += sum(extra.nbytes for extra in (sample.lag, sample.advantages) if extra is not None)
        wire += sum(4 * len(name) + 10 for name, _ in sample.engines)
        if part and size + wire > FRAME_BYTES:
            yield tuple(part)
            part, size = [], 0
        part.append(sample)
        size += wire
    yield tuple(part)
