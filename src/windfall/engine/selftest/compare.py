"""Measures how much the engine differs from transformers on a small model. judge.py sets the limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from windfall.engine.selftest.small_model import SmallModel
from windfall.engine.torch.packed import Packed
from windfall.errors import WindfallError
from windfall.types import Request, Sampling

EngineFactory = Callable[..., Any]  # builds an engine from (model, kv_tokens, page_size, max_running, max_rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The largest difference from transformers in one comparison."""

    size: float
    where: str  # the request or the weight that has this difference


def engine_difference(small: SmallModel, make: EngineFactory, *, longest: int, limit: float = math.inf) -> Difference:
    """The largest difference in the log-probs of sampled tokens, in nats, or the first one above `limit`. It covers
    chunked prefill, decoding beyond any window, siblings on shared pages, a lone response, resuming, and preemption."""
    largest = Difference(size=0.0, where="nothing")
    for difference in _engine_differences(small, make, longest):
        largest = max(largest, difference, key=lambda d: d.size)
        if largest.size > limit:
            break
    return largest


def _engine_differences(small: SmallModel, make: EngineFactory, longest: int) -> Iterator[Difference]:
    rng = np.random.default_rng(1)

    def prompt(n: int) -> tuple[int, ...]:
        return tuple(int(t) for t in rng.integers(3, small.vocabulary, n))

    def ask(id: str, ids: tuple[int, ...], tokens: int) -> Request:
        tokens = max(1, min(tokens, longest - len(ids)))
        return Request(id=id, prompt=ids, seed=len(id) + tokens, max_tokens=tokens, sampling=Sampling(temperature=1.0))

    twice = prompt(34)
    pair, one = [ask("sibling 1", twice, 8), ask("sibling 2", twice, 5)], ask("from one token", prompt(1), 6)
    together = drain(make(small.model, **ROOMY), [*pair, one])
    yield from (_against_reference(small, f"{r.id}, among others", r, together[r.id]) for r in (*pair, one))
    long = ask("long", prompt(4), 36)
    alone = drain(make(small.model, **ROOMY), [long])["long"]
    yield _against_reference(small, "long, alone", long, alone)
    cut = tuple(alone[0][:19])
    rest = replace(long, prompt=long.prompt + cut, position=len(cut), max_tokens=long.max_tokens - len(cut))
    if rest.max_tokens > 0:
        resumed = drain(make(small.model, **ROOMY), [one, rest])["long"]
        yield _against_reference(small, "long, cut and resumed among others", rest, resumed)
    tight = [replace(ask(f"preempted {i}", prompt(6), 30), seed=i) for i in range(3)]
    crowded = drain(make(small.model, **TIGHT), tight)
    yield from (_against_reference(small, r.id, r, crowded[r.id]) for r in tight)


ROOMY = {"kv_tokens": 512, "page_size": 16, "max_running": 8, "max_rows": 24}
TIGHT = {"kv_tokens": 80, "page_size": 16, "max_running": 8, "max_rows": 64}


def drain(engine: Any, requests: Sequence[Request]) -> dict[str, tuple[list[int], list[float]]]:
    """Run all requests to their end. Returns tokens and log-probs by request id."""
    out: dict[str, tuple[list[int], list[float]]] = {r.id: ([], []) for r in requests}
    for r in requests:
        engine.add(r)
    for _ in range(10_000):
        if not len(engine):
            return out
        for chunk in engine.step():
            out[chunk.id][0].extend(chunk.tokens)
            out[chunk.id][1].extend(chunk.logprobs)
    raise WindfallError("the engine did not finish within 10,000 steps")


@torch.no_grad()
def _against_reference(
    small: SmallModel, where: str, request: Request, generated: tuple[list[int], list[float]]
) -> Difference:
    tokens, logprobs = generated
    if len(tokens) != request.max_tokens or not all(0 <= t < small.vocabulary for t in tokens):
        counts = f"{len(tokens)} of {request.max_tokens}"
        raise WindfallError(f"{where}: the engine generated tokens {tokens[:8]}..., {counts}")
    logits = small.logits((*request.prompt, *tokens))[len(request.prompt) - 1 : -1].float()
    theirs = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    return largest(where, (torch.tensor(logprobs) - theirs.cpu()).abs())


def largest(where: str, differences: Any) -> Difference:
    """The largest of these differences; infinite if one is not a number."""
    size = float(differences.max()) if differences.numel() else 0.0
    return Difference(size=size if size == size else float("inf"), where=where)


@torch.no_grad()
def weights_difference(model: Any) -> float:
    """Mean difference of log-probs, in nats, between windfall's attention and plain attention, over a few tokens."""
    count = model.get_input_embeddings().num_embeddings
    ids = torch.tensor([[(7 * i + 3) % count for i in range(12)]], device=model.device)
    at = torch.arange(ids.shape[1], device=model.device)[None]
    logprobs, own = [], model.config._attn_implementation
    for attention, more in ((own, {"batch": Packed.of([ids.shape[1]], model.device)}), ("eager", {})):
        model.set_attn_implementation(attention)
        try:
            logits = model(input_ids=ids, position_ids=at, use_cache=False, **more).logits[0, :-1].float()
        finally:
            model.set_attn_implementation(own)
        logprobs.append(torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None]))
    return float((logprobs[0] - logprobs[1]).abs().mean())
