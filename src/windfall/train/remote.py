"""The trainer as the controller sees it: a process behind a link. One thing is asked of it at a time.

Samples travel in messages of about FRAME_BYTES, however many there are; the trainer adds them up.

A trainer that goes away, or fails, raises TrainerLost from whatever is being waited for; the next one to dial in takes
its place, with the step and the weights it has. The run ends only if it says that a person has to put something right.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from windfall.errors import WindfallError
from windfall.link import messages as m
from windfall.link.base import FrameTooLarge, Link, LinkClosed
from windfall.train.base import Report, TrainerLost
from windfall.train.checkpoint import CheckpointState
from windfall.train.sample import Sample

FRAME_BYTES = 16 << 20


class RemoteTrainer:
    def __init__(self) -> None:
        self.hello: m.TrainerHello | None = None
        self._link: Link | None = None
        self._asked: Link | None = None
        """Whose step and weights the run goes on from: nothing is asked of another."""
        self._here = asyncio.Event()
        self._replies: asyncio.Queue[object] = asyncio.Queue()

    async def attend(self, link: Link, hello: m.TrainerHello) -> None:
        """The life of one trainer's link."""
        if self._link is not None:  # the old one may be frozen: the newcomer was started because it is
            await self._link.close("another trainer has taken over")
        self._link, self.hello, self._replies = link, hello, asyncio.Queue()
        replies = self._replies
        self._here.set()
        try:
            while True:
                replies.put_nowait(await link.receive())
        except LinkClosed as e:
            replies.put_nowait(e)
        finally:
            if self._link is link:
                self._link, self.hello = None, None
                self._here.clear()

    async def connected(self, timeout_s: float) -> m.TrainerHello:
        try:
            async with asyncio.timeout(timeout_s):
                while self.hello is None:
                    await self._here.wait()
        except TimeoutError:
            raise WindfallError(f"waited {timeout_s:g} s for the trainer to start", fix="See trainer.log.") from None
        self._asked = self._link
        return self.hello

    async def prepare(self, samples: Sequence[Sample]) -> list[Sample]:
        """Fix the log-probs of the policy that the step started from, for steps of several updates."""
        out: list[bytes] = []
        for part in parts(samples):
            out += (await self._ask(m.Prepare(samples=part), m.Prepared)).old
        return [replace(s, old=np.frombuffer(old)) for s, old in zip(samples, out, strict=True)]

    async def accumulate(self, samples: Sequence[Sample]) -> float:
        """Returns how long the trainer worked on it."""
        return sum([(await self._ask(m.Accumulate(samples=part), m.Done)).s for part in parts(samples)])

    async def update(self, state: CheckpointState | None) -> tuple[Report, m.Updated]:
        """One optimizer update; with `state`, the step's last: the result is published as version `state.step`."""
        step, task = (state.step, state.next_task) if state else (None, None)
        reply = await self._ask(m.Update(step=step, next_task=task), m.Updated)
        return Report(**reply.report), reply  # pyright: ignore[reportArgumentType]

    async def save(self) -> str:
        return (await self._ask(m.Save(), m.Saved)).path

    async def _ask(self, message: object, expected: type[Any]) -> Any:
        link, replies = self._link, self._replies
        if link is None:
            raise TrainerLost("no trainer is connected")
        if link is not self._asked:  # it has come back, or another has: not with what was accumulated, nor this step
            raise TrainerLost("another trainer has taken its place")
        try:
            await link.send(message)
        except FrameTooLarge as e:  # the next trainer could not be told either
            raise WindfallError(f"the trainer cannot be sent this: {e}", fix="Lower rollout.max_tokens.") from e
        except LinkClosed as e:
            raise TrainerLost(str(e)) from e
        # No timeout of its own: a step may take as long as it takes. That the process is alive and not frozen is
        # what the link's heartbeat says; it ends the link otherwise.
        reply = await replies.get()
        if isinstance(reply, m.Failed):
            if reply.final:
                raise WindfallError(reply.error, where="trainer")
            raise TrainerLost(f"it failed: {reply.error}")
        if isinstance(reply, LinkClosed):
            raise TrainerLost(str(reply)) from reply
        if not isinstance(reply, expected):
            raise TrainerLost(f"it answered a {type(message).__name__} with a {type(reply).__name__}")
        return reply


def parts(samples: Sequence[Sample]) -> Iterator[tuple[m.SampleMessage, ...]]:
    """What to send at a time. The same samples are always cut the same way: how they are summed must not change."""
    part: list[m.SampleMessage] = []
    size = 0
    for sample in samples:
        # On the wire a number takes up to 5 bytes, a log-prob 8, and a sample has a few fields more.
        wire = 5 * (len(sample.ids) + len(sample.targets)) + 16 * len(sample.targets) + 64
        if part and size + wire > FRAME_BYTES:
            yield tuple(part)
            part, size = [], 0
        part.append(pack(sample))
        size += wire
    yield tuple(part)


def pack(sample: Sample) -> m.SampleMessage:
    s = sample
    return m.SampleMessage(
        ids=s.ids, targets=s.targets, behaviour=np.asarray(s.behaviour, np.float64).tobytes(), advantage=s.advantage,
        limit=s.limit, old=None if s.old is None else np.asarray(s.old, np.float64).tobytes(),
    )  # fmt: skip


def unpack(sample: m.SampleMessage) -> Sample:
    """
    >>> s = Sample(ids=(1, 2), targets=(1,), behaviour=np.array([-0.1]), advantage=0.5, limit=9)
    >>> unpack(pack(s)).behaviour.tolist()
    [-0.1]
    """
    s = sample
    return Sample(
        ids=s.ids, targets=s.targets, behaviour=np.frombuffer(s.behaviour), advantage=s.advantage, limit=s.limit,
        old=None if s.old is None else np.frombuffer(s.old),
    )  # fmt: skip
