"""Samples from a policy of the fleet. Each response is an episode of the ledger, on whatever workers there are.

Rule: seeds and ids follow from the call, so a call that is performed again, after a restart of the server, samples the
same tokens (bit for bit in deterministic mode).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import xxhash

from windfall.controller.ledger.episode import Episode
from windfall.controller.own_responses import OwnResponses
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.rollout.stop_strings import StopStrings
from windfall.tinker.calls import SampleCall, SampledSequence


class FleetSampler:
    def __init__(
        self, dispatch: Dispatch, *, stop: frozenset[int], decode: Callable[[Sequence[int]], str], context: int,
        vocabulary: int,
    ) -> None:  # fmt: skip
        """`stop`: token ids that end every response. `decode`: ids to text, special tokens included. `context`: most
        tokens of prompt and response together. `vocabulary`: token ids are below it."""
        self._stop, self._decode = stop, decode
        self._context, self._vocabulary = context, vocabulary
        self._responses = OwnResponses(dispatch)

    def check(self, call: SampleCall) -> str:
        """Why the call cannot be performed; "" if it can."""
        wrong = next((id for id in (*call.prompt, *call.stop_ids) if not 0 <= id < self._vocabulary), None)
        if wrong is not None:
            return f"token {wrong} is not one of the model's {self._vocabulary}"
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
        await self._responses.generate(id, episodes, StopStrings(call.stop_texts, self._decode))
        return tuple(
            SampledSequence(
                tokens=tuple(episode.tokens), logprobs=tuple(episode.logprobs), stopped=episode.finish != "length"
            )
            for episode in episodes
        )
