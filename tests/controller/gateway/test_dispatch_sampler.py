"""A gateway over the ledger and real workers: what is trained is what the engines sampled, also if a worker is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines.small_models import engine as new_engine
from tests.support.fleets.agent_controller import Made, Recording
from tests.support.fleets.samplers import EOS, TOKENIZER, close, openai_client, run, serving
from windfall.controller.gateway.dispatch_sampler import DispatchSampler
from windfall.controller.gateway.session import TokenLimits
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.workers.versions import Offer
from windfall.events.log import EventLog
from windfall.models import attention
from windfall.models.load import load
from windfall.run.commands.in_process import in_process_worker, weights_already_loaded
from windfall.types import Response, Sampling

pytest.importorskip("openai", reason="the gateway is tested with OpenAI's client")


@asynccontextmanager
async def workers(folder: Path, model: Any, made: Made) -> Any:
    events = EventLog(folder / "events.jsonl")
    dispatch = Dispatch(events=events, vocabulary=99)
    dispatch.set_offer(Offer(version=0, digest="d0"))
    watching = asyncio.create_task(dispatch.watch())
    engines = {name: Recording(new_engine(model, deterministic=True), made, Counter()) for name in ("first", "second")}
    contexts = [in_process_worker(dispatch, engines[n], 8, name=n, pull=weights_already_loaded) for n in engines]
    try:
        for context in contexts:
            await context.__aenter__()
        yield dispatch
    finally:
        for context in contexts:
            await context.__aexit__(None, None, None)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        events.close()


async def talk(gateway: Any, sampler: DispatchSampler, url: str, n: int) -> list[Response]:
    """Three turns, then an edited history; all in one session."""
    id = f"{n}/0"
    sampler.open(id, seed=100 + n, sampling=lambda policy: Sampling())
    session = gateway.open(id, {"": TokenLimits(200)})
    api = openai_client(url, session)
    messages: list[Any] = [{"role": "user", "content": f"{n}+4="}]
    for _ in range(3):
        answer = await api.chat.completions.create(model="any", messages=messages, max_tokens=12)
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
    await api.chat.completions.create(model="any", messages=messages[-1:], max_tokens=20, stop=["7", "+"])
    segments = await close(gateway, session)
    response = sampler.close(id, 1.0)
    responses = list(response.segments)
    assert response.id == id
    assert [r.prompt for r in responses] == [s.prompt for s in segments]
    assert [list(r.tokens) for r in responses] == [s.tokens for s in segments]
    assert all(0 < sum(r.sampled) <= len(r.tokens) for r in responses)
    return responses


def talks(folder: Path, *, lose: bool) -> list[Response]:
    torch.set_num_threads(1)
    model = load("tiny", dtype="float32", device="cpu")
    model.set_attn_implementation(attention.NAME)
    made: Made = {}
    out: list[Response] = []

    async def main() -> None:
        async with workers(folder, model, made) as dispatch:
            sampler = DispatchSampler(dispatch, model="tiny", stop={"": frozenset([EOS])})
            async with serving(sampler, context=512) as (gateway, url):
                talking = asyncio.gather(*(talk(gateway, sampler, url, n) for n in range(4)))
                if lose:
                    while dispatch.ledger.counts.accepted < 10 or not dispatch.ledger.running("first"):
                        await asyncio.sleep(0.001)
                    dispatch._lose("first", "the test takes it away")
                out.extend(r for responses in await talking for r in responses)
            dispatch.ledger.check()
            assert dispatch.ledger.counts.moved > 0 or not lose
            assert not dispatch.ledger.entries
            assert dispatch.ledger.lost_tokens() == 0

    run(main, asyncio.run)
    seeds = {f"{n}/0": 100 + n for n in range(4)}
    for r in out:
        if r.id in seeds:
            for position, (token, sampled) in enumerate(zip(r.tokens, r.sampled, strict=True)):
                if sampled:
                    assert made[seeds[r.id], position][0] == token
    return out


def test_trained_tokens_are_what_the_engines_sampled(tmp_path: Path) -> None:
    for name in ("calm", "lossy"):
        (tmp_path / name).mkdir()
    calm = talks(tmp_path / "calm", lose=False)
    assert [r.id for r in calm] == [f"{n}/0{part}" for n in range(4) for part in ("", "+1")]
    assert {r.reward for r in calm} == {1.0}
    for r in calm[1::2]:
        text = TOKENIZER.decode(r.tokens)
        assert sum(text.count(stop) for stop in "7+") <= 1, "the turn ends with the first stop string"
    lossy = talks(tmp_path / "lossy", lose=True)
    assert [(r.prompt, r.tokens, r.sampled) for r in lossy] == [(r.prompt, r.tokens, r.sampled) for r in calm]
