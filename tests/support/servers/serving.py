"""A server with the tiny model in this process, and plain HTTP requests to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import aiohttp
import msgspec

from windfall.controller.gateway.server import HEAD_S, IDLE_S
from windfall.engine import factory
from windfall.models import load
from windfall.models import tokenizer as tokenizers
from windfall.models.chat import Chat
from windfall.models.load import TINY
from windfall.serve import build
from windfall.serve.api import ServeApi, ServeLimits
from windfall.serve.call_sampler import ServedModel
from windfall.serve.host import Host
from windfall.serve.slo import Objectives

TOKENIZER = tokenizers.load(TINY)
EOS = TOKENIZER.eos_token_id
PATIENT = Objectives(ttft_s=60.0, tpot_s=20.0)
"""Objectives that every machine meets, so that its speed does not matter."""
TEMPLATE = (
    "{% for tool in tools or [] %}[tool] {{ tool.function.name }}<eos>{% endfor %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content or '' }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@cache
def tiny() -> Any:
    return load.load("tiny", dtype="float32", device="cpu")


@cache
def spec(kv_tokens: int, context: int = 256) -> Any:
    found = build.serving_spec(tiny(), "float32", context=context, max_running=16, kv_tokens=kv_tokens)
    return msgspec.structs.replace(found, checked=(self_test_record(),))


@cache
def self_test_record() -> str:
    """The self-test of the tiny model takes a second: once is enough."""
    found = build.serving_spec(tiny(), "float32", context=256, max_running=16, kv_tokens=0)
    return factory.self_test(found, "cpu", tiny())


def new_host(kv_tokens: int = 4096, objectives: Objectives | None = None) -> Host:
    return build.build_host(spec(kv_tokens), tiny(), "cpu", objectives or PATIENT)


@dataclass
class Server:
    host: Host
    api: ServeApi
    url: str
    http: aiohttp.ClientSession

    async def post(self, path: str, body: Any, **more: Any) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json=body, **more) as answer:
            return answer.status, await answer.json(content_type=None)

    async def get(self, path: str) -> tuple[int, str]:
        async with self.http.get(self.url + path) as answer:
            return answer.status, await answer.text()

    async def complete(self, prompt: Any = "3+4=", **more: Any) -> dict[str, Any]:
        status, body = await self.post("/v1/completions", {"model": "tiny", "prompt": prompt, **more})
        assert status == 200, body
        return body

    async def stream(self, path: str, body: Any) -> list[Any]:
        """The events of a streamed answer; the last is "[DONE]"."""
        async with self.http.post(self.url + path, json={**body, "stream": True}) as answer:
            assert answer.status == 200, await answer.text()
            text = await answer.text()
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    async def metric(self, name: str) -> float:
        _, text = await self.get("/metrics")
        found = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(f"windfall_{name} ")]
        assert len(found) == 1, f"{name} is in the metrics {len(found)} times"
        return float(found[0])


@asynccontextmanager
async def serving(
    host: Host | None = None, *, idle_s: float = IDLE_S, head_s: float = HEAD_S, **limits: Any
) -> AsyncIterator[Server]:
    host = host or new_host()
    stop = frozenset([EOS])
    served = ServedModel(model="tiny", context=256, vocabulary=tiny().get_input_embeddings().num_embeddings)
    chat = Chat(TOKENIZER, stop, template=TEMPLATE)
    api = ServeApi(host, TOKENIZER, chat, stop, served=served, limits=ServeLimits(**limits))
    host.start()
    port = await api.listen("127.0.0.1", 0, "", idle_s=idle_s, head_s=head_s)
    try:
        async with aiohttp.ClientSession() as http:
            yield Server(host, api, f"http://127.0.0.1:{port}", http)
    finally:
        await api.stop_listening()
        await asyncio.to_thread(host.close)


async def until(holds: Callable[[], object], what: str, timeout_s: float = 120.0) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    while not holds():
        assert loop.time() < end, f"waited {timeout_s:g} s until {what}"
        await asyncio.sleep(0.005)


def run(main: Callable[[], Any]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(main(), 240)

    asyncio.run(limited())
