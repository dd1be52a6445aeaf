"""Samples the calls of a request on the host's serving engine: one call for every choice of its answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from windfall.controller.gateway.session import Progress, SampledTurn, TurnRequest
from windfall.errors import WindfallError
from windfall.models.chat import Chat, Message, normalize
from windfall.serve.host import Host
from windfall.serve.request_fields import ServeFields, choice_seed
from windfall.types import Chunk, Finish, Request


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    model: str
    """Name of the model in the API."""
    context: int
    """Largest number of tokens of prompt and answer together."""
    vocabulary: int


class RequestChat(Chat):
    """The chat template for one request: its prompt is rendered once, for all choices. Tools that the template would
    leave out are refused."""

    def __init__(self, chat: Chat, variables: Mapping[str, Any]) -> None:
        """`variables`: those of the template that the request sets."""
        self.__dict__.update(vars(chat))
        self._more = {**self._more, **variables}
        self._ids: tuple[int, ...] | None = None

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> tuple[int, ...]:
        if self._ids is None:
            ids = super().prompt(messages, tools)
            normal = [normalize(message) for message in messages]
            if tools and self._render(normal, tools) == self._render(normal, None):
                what = "the chat template of this model has no tools, so the model would not see them"
                raise WindfallError(what, where="tools", fix="Send no tools, or describe them in a message.")
            self._ids = ids
        return self._ids


Arrived = asyncio.Queue[Chunk | WindfallError]


class Inbox:
    """From the host's thread to the event loop. A step has a chunk for every request: the loop is woken once for all
    of them, because waking it costs the host's thread as much as a kernel launch."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Arrived, Chunk | WindfallError]] = deque()
        self._woken = False

    def put(self, loop: asyncio.AbstractEventLoop, to: Arrived, what: Chunk | WindfallError) -> None:
        self._waiting.append((to, what))
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # first: what is put from now on wakes the loop again
        while self._waiting:
            to, what = self._waiting.popleft()
            to.put_nowait(what)


class CallSampler:
    def __init__(
        self,
        host: Host,
        served: ServedModel,
        stop: frozenset[int],
        fields: ServeFields,
        inbox: Inbox,
        *,
        number: int = 0,
        arrival_s: float | None = None,
    ) -> None:
        """`number`: number of the choice among those of its prompt. It decides the seed. `arrival_s`: when the body of
        the request had arrived, by the host's clock."""
        self.model = served.model
        self._vocabulary = served.vocabulary
        self._host = host
        self._stop = stop
        self._fields = fields
        self._inbox = inbox
        self._number = number
        self._arrival_s = arrival_s

    def vocabulary(self, policy: str) -> int:
        return self._vocabulary

    def retract(self, request: TurnRequest) -> None:
        """Nothing is kept of a call that was canceled: `sample` has canceled its request."""

    async def sample(self, request: TurnRequest, progress: Progress) -> SampledTurn:
        fields = self._fields
        arrived = Arrived()
        listen = partial(self._inbox.put, asyncio.get_running_loop(), arrived)
        asked = Request(
            id=request.session,
            prompt=request.prompt,
            seed=choice_seed(fields.seed, self._number),
            max_tokens=request.max_tokens,
            sampling=fields.sampling,
            stop=frozenset() if fields.ignore_eos else self._stop,
        )
        self._host.submit(asked, listen, arrival_s=self._arrival_s)
        finish: Finish | None = None
        tokens, logprobs, known = list[int](), list[float](), 0
        try:
            while finish is None:
                what = await arrived.get()
                if isinstance(what, WindfallError):
                    raise what
                tokens += what.tokens
                logprobs += what.logprobs
                finish = what.finish
                if finish is None and not arrived.empty():
                    continue  # report several tokens at once
                kept = progress(tokens[known:], logprobs[known:])
                known = len(tokens)
                if kept is not None:  # a stop string was found
                    del tokens[kept:], logprobs[kept:]
                    if finish is None:
                        self._host.cancel(asked.id, "stop")
                    finish = "stop"
        finally:
            self._host.cancel(asked.id)  # no effect on a request that has ended
        return SampledTurn(tokens=tuple(tokens), logprobs=tuple(logprobs), finish=finish)
