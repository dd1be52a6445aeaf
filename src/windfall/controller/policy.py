"""A policy on a fleet of workers: the verbs of verbs.Policy for a loop of your own.

    sample       ──▶ dispatch: each response is an episode of the ledger, on whatever workers there are
    other verbs  ──▶ the trainer, behind its link
    publish      ──▶ the trainer, then workers are offered the new version

Rule: the id of a call of `sample` is the beginning of the ids of its responses, and their seeds follow from them. A
call that is made again with its id, while it runs or after it, gets the same responses, until the next `publish`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import xxhash

from windfall.controller.ledger.episode import Episode
from windfall.controller.remote_trainer import RemoteTrainer
from windfall.controller.rollout.assignment import Offer
from windfall.controller.rollout.dispatch import Dispatch
from windfall.errors import WindfallError
from windfall.training import CheckpointState, NewVersion, Report, Sample
from windfall.types import Response, Sampling


class FleetPolicy:
    environment = "a loop of its own"
    """It owns its responses (dispatch.ResponseOwner), and answers their turns itself."""

    def __init__(
        self,
        dispatch: Dispatch,
        trainer: RemoteTrainer,
        *,
        stop: frozenset[int],
        sampling: Sampling,
        seed: int = 0,
    ) -> None:
        """`stop`: token ids that end a response. `sampling`: what `sample` uses unless it is told otherwise."""
        self._dispatch = dispatch
        self._trainer = trainer
        self._stop = stop
        self._sampling = sampling
        self._seed = seed
        self._calls: dict[str, asyncio.Task[list[Response]]] = {}
        """Calls of `sample` since the last `publish`, by id."""
        self._waiting: dict[str, asyncio.Future[None]] = {}
        """By id of a response that is being generated."""

    async def sample(
        self, prompt: Sequence[int], n: int, *, id: str, max_tokens: int, sampling: Sampling | None = None
    ) -> list[Response]:
        """Generate `n` responses. They have no reward: that is for the loop to say."""
        if id not in self._calls:
            work = self._sample(tuple(prompt), n, id, max_tokens, sampling or self._sampling)
            self._calls[id] = asyncio.create_task(work, name=f"sample {id}")
        return await asyncio.shield(self._calls[id])

    async def _sample(
        self, prompt: tuple[int, ...], n: int, id: str, max_tokens: int, sampling: Sampling
    ) -> list[Response]:
        episodes = [
            Episode(
                id=f"{id}/{i}",
                prompt=prompt,
                seed=xxhash.xxh3_64_intdigest(f"{self._seed}/{id}/{i}".encode()),
                max_tokens=max_tokens,
                sampling=sampling,
                stop=self._stop,
            )
            for i in range(n)
        ]
        loop = asyncio.get_running_loop()
        try:
            for episode in episodes:
                self._waiting[episode.id] = loop.create_future()
                self._dispatch.open(episode, self)
            await asyncio.gather(*(self._waiting[episode.id] for episode in episodes))
        except BaseException:  # raised again: no worker may go on with responses that are not wanted any more
            self._dispatch.withdraw([e.id for e in episodes if e.id in self._dispatch.ledger.entries])
            raise
        finally:
            for episode in episodes:
                self._waiting.pop(episode.id, None)
            self._dispatch.placement.done_with(id, n)
        for episode in episodes:
            self._dispatch.close(episode.id)
        return [episode.close(None) for episode in episodes]

    def turn_ended(self, id: str) -> None:
        self._wake(id, None)

    def rejected(self, id: str, why: str) -> None:
        self._wake(id, WindfallError(why, where=f"response {id}"))

    def version_gone(self, id: str) -> None:
        self._wake(id, WindfallError("no worker holds its version any more", where=f"response {id}"))

    def fail(self, error: BaseException | None) -> None:
        """The only worker has failed: end all calls of `sample` with its error."""
        for id in list(self._waiting):
            self._wake(id, error or WindfallError("the worker of this process has ended"))

    def _wake(self, id: str, error: BaseException | None) -> None:
        future = self._waiting.get(id)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    async def forward(self, samples: Sequence[Sample], *, id: str) -> list[Sample]:
        return await self._trainer.forward(samples, id=id)

    async def forward_backward(self, samples: Sequence[Sample], *, id: str) -> float:
        return await self._trainer.forward_backward(samples, id=id)

    async def optim_step(self, state: CheckpointState | None = None, *, id: str) -> Report:
        return await self._trainer.optim_step(state, id=id)

    async def publish(self, *, id: str) -> NewVersion:
        return self._offer(await self._trainer.publish(id=id))

    async def save(self, *, id: str) -> str:
        return await self._trainer.save(id=id)

    async def load(self, path: str, *, id: str) -> NewVersion:
        return self._offer(await self._trainer.load(path, id=id))

    def _offer(self, published: NewVersion) -> NewVersion:
        self._calls = {id: call for id, call in self._calls.items() if not call.done()}
        hello = self._trainer.hello
        url = "" if hello is None else hello.url
        self._dispatch.set_offer(Offer(version=published.version, digest=published.digest, url=url))
        return published
