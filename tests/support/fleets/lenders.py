"""A controller on loopback, and a server that lends to it: the rollout model differs from the served one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.support.engines.small_models import SHAPE, VOCABULARY
from tests.support.fleets.listening_controller import TOKEN, Site
from tests.support.servers.serving import Server, new_host, serving
from windfall.controller.ledger.episode import Episode
from windfall.engine import factory
from windfall.engine.torch.engine import TorchEngine
from windfall.link import messages as m
from windfall.link.gate import Terms
from windfall.models.attention import NAME
from windfall.serve.host import Host
from windfall.serve.lender import Lender
from windfall.types import Request, Sampling
from windfall.weights.pulling.pull import PulledWeights, WeightPuller


@cache
def rollout_model() -> Any:
    """Its keys and values take more memory per token than those of the served model."""
    torch.manual_seed(5)
    shape = {**SHAPE, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 64, "tie_word_embeddings": False}
    model: Any = Qwen3ForCausalLM(Qwen3Config(**shape)).eval()
    model.set_attn_implementation(NAME)
    return model


@cache
def rollout_spec() -> m.EngineSpec:
    spec = m.EngineSpec(
        model_config=rollout_model().config.to_json_string(use_diff=False), dtype="float32", kv_tokens=0, page_size=8,
        max_running=0, max_rows=64, deterministic=True, longest=120, wanted=8,
    )  # fmt: skip
    record = factory.self_test(spec, "cpu", rollout_model())
    return msgspec.structs.replace(spec, checked=(record,))


class Weights(WeightPuller):
    """A stand-in for weights.pulling.pull.Puller, with the weights of `rollout_model`."""

    reads = True

    def pull(self, load: m.Load, ask: Any = None, *, stop: Any = None) -> PulledWeights:
        del ask, stop
        return PulledWeights(digest=load.digest, tensors=dict(rollout_model().state_dict()))


class Lending(Server):
    lender: Lender
    said: list[str]
    site: Site
    task: asyncio.Task[None]

    @property
    def tenant(self) -> Any:
        return self.host.rollout


def new_site(folder: Path, model: str = "model-1") -> Site:
    site = Site(folder)
    site.gate.terms = {"": Terms(model=model, engine=rollout_spec(), heartbeat_s=0.1)}
    return site


def new_lender(host: Host, site: Site, name: str, said: list[str], token: Callable[[], str] | None = None) -> Lender:
    return Lender(
        host, site.url, token or (lambda: TOKEN), name=name, device="cpu", puller=lambda token: Weights(), retry_s=0.1,
        say=said.append,
    )  # fmt: skip


@asynccontextmanager
async def lending(
    folder: Path, host: Host | None = None, token: Callable[[], str] | None = None
) -> AsyncIterator[Lending]:
    """A server that lends, and a controller."""
    site = new_site(folder)
    await site.port.open()
    watching = asyncio.create_task(site.dispatch.watch())
    async with serving(host or new_host()) as server:
        s = Lending(server.host, server.api, server.url, server.http)
        s.said, s.site = [], site
        s.lender = new_lender(s.host, site, "lender", s.said, token)
        task = s.task = asyncio.create_task(s.lender.run())
        try:
            yield s
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await site.port.close()
            site.events.close()


def episode(id: str, max_tokens: int = 60) -> Episode:
    prompt = tuple(3 + (sum(map(ord, id)) * 7 + n * 13) % (VOCABULARY - 3) for n in range(20))
    seed = sum(map(ord, id))
    return Episode(id=id, prompt=prompt, seed=seed, max_tokens=max_tokens, sampling=Sampling(), stop=frozenset())


def expected(e: Episode) -> list[int]:
    engine = TorchEngine(rollout_model(), kv_tokens=512, page_size=8, deterministic=True)
    engine.add(Request(id="0", prompt=e.prompt, seed=e.seed, max_tokens=e.max_tokens, sampling=e.sampling))
    tokens: list[int] = []
    while len(engine):
        for chunk in engine.step():
            tokens += chunk.tokens
    return tokens
