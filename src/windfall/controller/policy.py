"""A policy on a fleet of workers: the verbs of verbs.Policy for a loop of your own.

    sample           each response is an episode of the ledger, on whatever workers there are
    publish, load    workers are offered the new version
    other verbs      as remote_trainer.RemoteTrainer: the trainer performs them, behind its link

Rule: the id of a call of `sample` is the beginning of the ids of its responses, and their seeds follow from them. A
call that is made again with its id, while it runs or after it, gets the same responses, until the next `publish`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import xxhash

from windfall.controller.ledger.episode import Episode
from windfall.controller.own_responses import OwnResponses
from windfall.controller.remote_trainer import RemoteTrainer
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.workers.versions import Offer
from windfall.errors import WindfallError
from windfall.training import NewVersion
from windfall.types import Response, Sampling


class FleetPolicy(RemoteTrainer):
    def __init__(
        self, dispatch: Dispatch, *, stop: frozenset[int], sampling: Sampling, seed: int = 0, policy: str = ""
    ) -> None:
        """`stop`: token ids that end a response. `sampling`: what `sample` uses unless it is told otherwise. `policy`:
        one of the policies of `dispatch`."""
        super().__init__(dispatch.weights, policy)
        self._dispatch = dispatch
        self._stop = stop
        self._sampling = sampling
        self._seed = seed
        self._calls: dict[str, asyncio.Task[list[Response]]] = {}
        """Calls of `sample` since the last `publish`, by id."""
        self._responses = OwnResponses(dispatch)

    async def sample(
        self, prompt: Sequence[int], n: int, *, id: str, max_tokens: int, sampling: Sampling | None = None
    ) -> list[Response]:
        """Generate `n` responses. They have no reward: that is for the loop to say."""
        if id not in self._calls:
            work = self._sample(tuple(prompt), n, id, max_tokens, sampling or self._sampling)
            self._calls[id] = asyncio.create_task(work, name=f"sample {id}")
        try:
            return await asyncio.shield(self._calls[id])
        except Exception:  # raised again: a call that failed was not performed, and may be made again
            self._calls.pop(id, None)
            raise

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
                role=self._policy,
            )
            for i in range(n)
        ]
        await self._responses.generate(id, episodes)
        return [episode.close(None) for episode in episodes]

    def fail(self, error: BaseException | None) -> None:
        """The only worker has failed: end all calls of `sample` with its error."""
        self._responses.fail(error or WindfallError("the worker of this process has ended"))

    async def publish(self, *, id: str) -> NewVersion:
        return self._offer(await super().publish(id=id))

    async def load(self, path: str, *, id: str) -> NewVersion:
        return self._offer(await super().load(path, id=id))

    def _offer(self, published: NewVersion) -> NewVersion:
        self._calls = {id: call for id, call in self._calls.items() if not call.done()}
        offer = Offer(version=published.version, digest=published.digest)
        self._dispatch.set_offer(offer, self.weights, policy=self._policy)
        return published
