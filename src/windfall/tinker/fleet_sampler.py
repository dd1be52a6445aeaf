"""Samples from a policy of the fleet. Each response is an episode of the ledger, on whatever workers there are.

Rule: seeds and ids follow from the call, so a call that is performed again, after a restart of the server, samples the
same tokens (bit for bit in deterministic mode).
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager

import xxhash

from windfall.controller.ledger.episode import Episode
from windfall.controller.own_responses import OwnResponses
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.rollout.stop_strings import StopStrings
from windfall.tinker.accounts.bill import PREFILLED
from windfall.tinker.accounts.fairness import OpenResponses
from windfall.tinker.calls import SampleCall, SampledSequence


class FleetSampler:
    def __init__(
        self, dispatch: Dispatch, *, stop: frozenset[int], decode: Callable[[Sequence[int]], str], context: int
    ) -> None:
        """`stop`: token ids that end every response. `decode`: ids to text, special tokens included. `context`: most
        tokens of prompt and response together."""
        self._stop, self._decode, self._context = stop, decode, context
        self._responses = OwnResponses(dispatch)
        self.open = OpenResponses(lambda: sum(member.open_slots for member in dispatch.members.here()))
        self._counted: dict[str, tuple[str, Episode, int]] = {}
        """Responses that are sampled, by id: the account, and how many tokens were counted."""
        self._work = defaultdict[str, float](float)
        """What workers have done for each account since `take_work`."""

    async def sample(
        self, id: str, account: str, call: SampleCall, place: Callable[[], AbstractAsyncContextManager[str]]
    ) -> tuple[SampledSequence, ...]:
        """The responses to a call. `place`: each of them is sampled within this context, from the policy that it
        yields. Canceled: no worker goes on with them."""
        seed = id if call.seed is None else f"seed/{call.seed}"
        room = self._context - len(call.prompt)
        max_tokens = room if call.max_tokens is None else call.max_tokens
        stop = (self._stop if call.eos else frozenset()) | frozenset(call.stop_ids)
        episodes = [
            Episode(
                id=f"{id}/{n}", prompt=call.prompt, seed=xxhash.xxh3_64_intdigest(f"{seed}/{n}".encode()),
                max_tokens=max_tokens, sampling=call.sampling, stop=stop,
            )
            for n in range(call.n)
        ]  # fmt: skip

        @contextlib.asynccontextmanager
        async def turn(episode: Episode) -> AsyncIterator[None]:
            async with place() as episode.role:
                self._work[account] += PREFILLED * len(call.prompt) * (episode is episodes[0])
                self._counted[episode.id] = account, episode, 0
                try:
                    yield
                finally:
                    self._count(episode.id)
                    del self._counted[episode.id]

        await self._responses.generate(id, episodes, StopStrings(call.stop_texts, self._decode), turn)
        return tuple(
            SampledSequence(tokens=tuple(e.tokens), logprobs=tuple(e.logprobs), stopped=e.finish != "length")
            for e in episodes
        )

    def take_work(self) -> dict[str, float]:
        """What workers have done for each account since the last call, in sampled tokens. A prefilled token counts
        PREFILLED, and a prompt is prefilled once for all responses to it. If no token came, each response that is
        waited for counts 1."""
        for id in self._counted:
            self._count(id)
        work, self._work = self._work, defaultdict[str, float](float)
        if not work:
            for account, _, _ in self._counted.values():
                work[account] += 1
        return work

    def _count(self, id: str) -> None:
        account, episode, counted = self._counted[id]
        if (tokens := len(episode.tokens) - counted) > 0:  # a stop text cuts some off
            self._work[account] += tokens
            self._counted[id] = account, episode, counted + tokens
