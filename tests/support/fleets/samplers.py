"""Samplers for the gateway's tests: texts that are written in advance, and the tiny model on a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import xxhash

from tests.support import quiet_loop
from windfall.controller.gateway.server import Gateway
from windfall.controller.gateway.session import GatewaySession, Progress, SampledTurn, TurnRequest
from windfall.controller.gateway.voice import Voice
from windfall.models import tokenizer
from windfall.models.chat import Chat
from windfall.models.history import Segment
from windfall.models.load import TINY
from windfall.types import Request

TOKENIZER = tokenizer.load(TINY)
EOS = TOKENIZER.eos_token_id
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<eos>{% endif %}{% for m in messages %}[{{ m.role }}] {{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


class Scripted:
    """Answers every call with the next text, token by token."""

    model = "scripted"

    def __init__(self, *texts: str, step_s: float = 0.0) -> None:
        self.texts, self.requests, self.step_s = list(texts), list[TurnRequest](), step_s
        self.turns: list[SampledTurn] = []
        self.retracted: list[int] = []
        """Segments."""

    async def sample(self, request: TurnRequest, progress: Progress) -> SampledTurn:
        self.requests.append(request)
        ids = [*TOKENIZER.encode(self.texts.pop(0), add_special_tokens=False), EOS][: request.max_tokens]
        logprobs = [-0.5 - n / 64 for n in range(len(ids))]
        for count in range(1, len(ids) + 1):
            await asyncio.sleep(self.step_s)
            end = progress(ids[count - 1 : count], logprobs[count - 1 : count])
            if end is not None:
                ids = ids[:end]
                break
        finish = "length" if ids[-1] != EOS and len(ids) == request.max_tokens else "stop"
        turn = SampledTurn(tokens=tuple(ids), logprobs=tuple(logprobs[: len(ids)]), finish=finish)
        self.turns.append(turn)
        return turn

    def vocabulary(self, policy: str) -> int:
        return 99

    def retract(self, request: TurnRequest) -> None:
        self.retracted.append(request.segment)


class OnEngine:
    """Samples with an engine, one step at a time. The seed of a turn follows from its session, segment and turn."""

    model = "tiny"

    def __init__(self, engine: Any) -> None:
        self.engine, self.waiting = engine, dict[str, tuple[list[Any], asyncio.Event]]()
        self.turns: dict[tuple[str, int, int], tuple[tuple[int, ...], SampledTurn]] = {}

    async def sample(self, request: TurnRequest, progress: Progress) -> SampledTurn:
        number = sum(key[:2] == (request.session, request.segment) for key in self.turns)
        id = f"{request.session}/{request.segment}/{number}"
        chunks, _ = self.waiting[id] = [], asyncio.Event()
        seed = xxhash.xxh3_64_intdigest(id.encode())
        limits = {"max_tokens": request.max_tokens, "stop": frozenset([EOS])}
        self.engine.add(Request(id=id, prompt=request.prompt, seed=seed, **limits))
        seen = 0
        while not chunks or chunks[-1].finish is None:
            await asyncio.sleep(0)
            for chunk in self.engine.step():
                self.waiting[chunk.id][0].append(chunk)
            new, seen = chunks[seen:], len(chunks)
            progress([t for c in new for t in c.tokens], [p for c in new for p in c.logprobs])
        turn = SampledTurn(
            tokens=tuple(t for c in chunks for t in c.tokens), logprobs=tuple(p for c in chunks for p in c.logprobs),
            finish=chunks[-1].finish,
        )  # fmt: skip
        self.turns[request.session, request.segment, number] = (request.prompt, turn)
        return turn

    def vocabulary(self, policy: str) -> int:
        return 99

    def retract(self, request: TurnRequest) -> None: ...


def voice(context: int) -> Voice:
    stop = frozenset([EOS])
    return Voice(TOKENIZER, Chat(TOKENIZER, stop, template=TEMPLATE), stop, context)


@asynccontextmanager
async def serving(sampler: Any, *policies: str, context: int = 4096) -> Any:
    """A gateway on a port, and its address."""
    gateway = Gateway(sampler, {policy: voice(context) for policy in policies or ("",)})
    port = await gateway.listen("127.0.0.1", 0, "")
    try:
        yield gateway, f"http://127.0.0.1:{port}/v1"
    finally:
        await gateway.stop_listening()


async def close(gateway: Gateway, session: GatewaySession) -> list[Segment]:
    """Close a session. Returns its segments that were answered."""
    await gateway.close(session)
    return [segment for segment in session.history.segments if segment.tokens]


def openai_client(url: str, session: GatewaySession, **more: Any) -> Any:
    """OpenAI's client, which `run` closes. One that is not closed closes itself when it is collected as garbage: in the
    event loop of whatever test runs then, where it logs an error."""
    import openai

    _CLIENTS.append(openai.AsyncOpenAI(base_url=url, api_key=session.key, **{"max_retries": 0, **more}))
    return _CLIENTS[-1]


_CLIENTS: list[Any] = []


def run(main: Callable[[], Any], run_loop: Callable[[Any], object] = quiet_loop.run) -> None:
    """`run_loop`: asyncio.run if engines have threads of their own."""

    async def limited() -> None:
        try:
            await asyncio.wait_for(main(), 120)
        finally:
            while _CLIENTS:
                await _CLIENTS.pop().close()

    run_loop(limited())
