"""Samples from a policy of the fleet. Each response is an episode of the ledger, on whatever workers there are.

Rule: seeds and ids follow from the call, so a call that is performed again, after a restart of the server, samples the
same tokens (bit for bit in deterministic mode).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import xxhash

from windfall.controller.ledger.episode import Episode
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.rollout.stop_strings import StopStrings
from windfall.errors import WindfallError
from windfall.tinker.calls import SampleCall, SampledSequence

LOOK_S = 0.02
"""Seconds between looks for stop texts."""


class FleetSampler:
    """It owns its responses (dispatch.ResponseOwner)."""

    def __init__(
        self, dispatch: Dispatch, *, stop: frozenset[int], decode: Callable[[Sequence[int]], str], context: int
    ) -> None:
        """`stop`: token ids that end every response. `decode`: ids to text, special tokens included. `context`: most
        tokens of prompt and response together."""
        self._dispatch, self._stop, self._decode, self._context = dispatch, stop, decode, context
        self._waiting: dict[str, asyncio.Future[None]] = {}
        """By id of a response that is being generated."""

    def check(self, call: SampleCall) -> str:
        """Why the call cannot be performed; "" if it can."""
        room = self._context - len(call.prompt)
        if room < 1:
            return f"the prompt has {len(call.prompt)} tokens, but prompt and response have at most {self._context}"
        if call.max_tokens is not None and call.max_tokens > room:
            have = f"prompt and max_tokens are {len(call.prompt)} + {call.max_tokens} tokens"
            return f"{have}, but together they have at most {self._context}"
        return ""

    async def sample(self, policy: str, id: str, call: SampleCall) -> tuple[SampledSequence, ...]:
        """The responses to the call. Cancelled: no worker goes on with them."""
        seed = id if call.seed is None else f"seed/{call.seed}"
        room = self._context - len(call.prompt)
        episodes = [
            Episode(
                id=f"{id}/{n}",
                prompt=call.prompt,
                seed=xxhash.xxh3_64_intdigest(f"{seed}/{n}".encode()),
                max_tokens=room if call.max_tokens is None else call.max_tokens,
                sampling=call.sampling,
                stop=(self._stop if call.eos else frozenset()) | frozenset(call.stop_ids),
                role=policy,
            )
            for n in range(call.n)
        ]
        loop = asyncio.get_running_loop()
        try:
            for episode in episodes:
                self._waiting[episode.id] = loop.create_future()
                self._dispatch.open(episode, self)
            await self._ended(episodes, StopStrings(call.stop_texts, self._decode))
            for episode in episodes:
                self._dispatch.close(episode.id)
        except BaseException:  # raised again: no worker may go on with responses that are not wanted any more
            self._dispatch.withdraw([e.id for e in episodes if e.id in self._dispatch.ledger.entries])
            raise
        finally:
            for episode in episodes:
                self._waiting.pop(episode.id, None)
            self._dispatch.group_done(id, call.n)
        return tuple(
            SampledSequence(
                tokens=tuple(episode.tokens), logprobs=tuple(episode.logprobs), stopped=episode.finish != "length"
            )
            for episode in episodes
        )

    async def _ended(self, episodes: Sequence[Episode], stops: StopStrings) -> None:
        left = [(episode, self._waiting[episode.id]) for episode in episodes]
        ends = [end for _, end in left]
        while stops and left:
            await asyncio.wait([end for _, end in left], timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            for episode, end in left:
                if (length := stops.end(episode.id, episode.tokens, 0, whole=end.done())) is not None:
                    self._dispatch.cut(episode.id, length)
                    if not end.done():
                        end.set_result(None)
            left = [(episode, end) for episode, end in left if not end.done()]
        await asyncio.gather(*ends)

    def turn_ended(self, id: str) -> None:
        if id in self._waiting and not self._waiting[id].done():
            self._waiting[id].set_result(None)

    def rejected(self, id: str, why: str) -> None:
        if id in self._waiting and not self._waiting[id].done():
            self._waiting[id].set_exception(WindfallError(why, where=f"response {id}"))
