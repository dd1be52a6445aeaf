"""Cuts the answer of one call into the chunks of a stream, as OpenAI streams it, and sends them.

    first()         chunks before the first token
    grown(count)    chunks for the first `count` tokens, whenever there are more of them
    last()          chunks at the end of the turn
    usage(counts)   the chunk at the end of the stream, if the client wants it

Rules: text that may be the start of a stop string, or that ends in the middle of a character, is held back. Only new
tokens are decoded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from windfall.controller.gateway import protocol
from windfall.controller.gateway.protocol import UNFINISHED, CallOptions
from windfall.controller.gateway.session import CallInFlight

MAX_HELD = 8
"""Largest number of tokens that are held back for a character to be completed. A character has at most four bytes."""

Chunk = dict[str, Any]


class GrowingText:
    """Decodes tokens as they come. The tokens before the new ones are decoded with them, because a tokenizer may write
    the first token of a text differently.

    >>> text = GrowingText(lambda ids: bytes(ids).decode(errors="replace"))
    >>> text.grow(b"a\\xc3", 2), text.grow(b"a\\xc3\\xa9b", 4)
    ('a', 'éb')
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._before = self.read = 0
        """The tokens between these positions are decoded with the new ones. `read`: number of tokens whose text was
        returned."""

    def grow(self, tokens: Sequence[int], count: int) -> str:
        """The text of the first `count` tokens that is new, without a character at its end that is not complete."""
        end, text = count, self._decode(tokens[self._before : count])
        while end > self.read and text.endswith(UNFINISHED) and count - end < MAX_HELD:
            end -= 1
            text = self._decode(tokens[self._before : end])
        if end <= self.read:
            return ""
        if text.endswith(UNFINISHED):  # these bytes are not a character
            end, text = count, self._decode(tokens[self._before : count])
        known = self._decode(tokens[self._before : self.read])
        self._before, self.read = self.read, end
        return text[len(known) :]


class TextChunks:
    def __init__(
        self,
        flight: CallInFlight,
        options: CallOptions,
        *,
        chat: bool,
        model: str,
        index: int,
    ) -> None:
        """`index`: number of the choice that this call is in its answer."""
        self._flight = flight
        self._options = options
        self._chat = chat
        self._index = index
        self._model = model
        self._created = int(time.time())
        self._hold = max((len(s) - 1 for s in options.stop), default=0)
        """Characters that may be the start of a stop string."""
        self._growing, self._held = GrowingText(flight.voice.decode), ""
        self._sent_text = self._sent_tokens = self._offset = 0

    def first(self) -> list[Chunk]:
        if not self._chat:
            return []
        chunk = self._chunk({"role": "assistant", "content": ""}, 0)
        if self._options.return_token_ids:
            chunk["prompt_token_ids"] = list(self._flight.prompt)
        return [chunk]

    def grown(self, count: int) -> list[Chunk]:
        before = self._growing.read
        text = self._held + self._growing.grow(self._flight.tokens, count)
        count = self._growing.read
        if count == before:
            return []
        certain = max(0, len(text) - self._hold)
        self._held = text[certain:]
        return self._text(text[:certain], count)

    def last(self) -> list[Chunk]:
        flight, message = self._flight, self._flight.message or {}
        content = (message.get("content") or "") if self._chat else flight.text
        chunks = self._text(content[self._sent_text :], len(flight.tokens))
        count = len(flight.tokens)
        if calls := message.get("tool_calls"):
            chunks.append(self._chunk({"tool_calls": [{"index": n, **call} for n, call in enumerate(calls)]}, count))
        reason = protocol.finish_reason(flight.finish, flight.message)
        chunks.append(self._chunk({} if self._chat else "", count, reason))
        return chunks

    def usage(self, counts: dict[str, int]) -> list[Chunk]:
        """The chunk after the last one of all choices, if the client wants it."""
        return [{**self._envelope(), "choices": [], "usage": counts}] if self._options.include_usage else []

    def _text(self, new: str, count: int) -> list[Chunk]:
        """A chunk with new text, and with the tokens up to `count` if the client wants them."""
        tokens = self._flight.tokens[self._sent_tokens : count]
        logprobs = self._flight.logprobs[self._sent_tokens : count]
        wants_tokens = self._options.logprobs or self._options.return_token_ids
        if not new and not (tokens and wants_tokens):
            return []
        chunk = self._chunk({"content": new} if self._chat else new, count)
        choice = chunk["choices"][0]
        if self._options.logprobs:
            texts = self._flight.voice.token_texts(tokens)
            build = protocol.chat_logprobs if self._chat else partial(protocol.text_logprobs, start=self._offset)
            choice["logprobs"] = build(texts, logprobs)
            self._offset += sum(map(len, texts))
        if self._options.return_token_ids:
            choice["token_ids"] = tokens
            if not self._chat and self._sent_tokens == 0:
                choice["prompt_token_ids"] = list(self._flight.prompt)
        self._sent_text, self._sent_tokens = self._sent_text + len(new), count
        return [chunk]

    def _chunk(self, delta: Any, count: int, finish: str | None = None) -> Chunk:
        """`count`: number of tokens of the choice up to this chunk."""
        choice = {"index": self._index, "delta" if self._chat else "text": delta, "logprobs": None}
        chunk = {**self._envelope(), "choices": [{**choice, "finish_reason": finish}]}
        if self._options.usage_in_chunks:
            chunk["usage"] = protocol.usage(len(self._flight.prompt), count)
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def _envelope(self) -> Chunk:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**protocol.envelope(kind, self._flight.id, self._model), "created": self._created}


class EventStream:
    """An answer that is sent as server-sent events. Several tasks may send to it; each list of events stays
    together."""

    def __init__(self, request: web.Request, write_s: float | None) -> None:
        """`write_s`: time limit for a client to take one list of events (seconds). None: no limit."""
        self._request, self._write_s = request, write_s
        self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        self._sending = asyncio.Lock()

    @property
    def begun(self) -> bool:
        """The client has got status 200."""
        return self._response.prepared

    async def send(self, events: Sequence[dict[str, Any]]) -> None:
        """Send events. The stream begins with the first call, even if it sends none. Raises TimeoutError if the client
        does not take them."""
        async with self._sending, asyncio.timeout(self._write_s):
            if not self.begun:
                await self._response.prepare(self._request)
            if events:
                await self._response.write(b"".join(b"data: %b\n\n" % msgspec.json.encode(e) for e in events))

    async def end(self, last: bytes = b"") -> web.StreamResponse:
        async with asyncio.timeout(self._write_s):
            if last:
                await self._response.write(last)
            await self._response.write_eof()
        return self._response
