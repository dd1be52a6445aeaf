"""Engine and trainer beside transformers' own forward and backward pass, on one small model. Returns what differs by
how much; decides nothing."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from windfall.engine.torch.packed import Packed
from windfall.errors import WindfallError
from windfall.selftest.small_model import Small
from windfall.train.gradients import Gradients
from windfall.train.logprobs import Learner
from windfall.train.sample import Sample
from windfall.types import Request, Sampling

Make = Callable[..., Any]
"""(model, kv_tokens, page_size, max_running, max_rows) to an engine."""
TEMPERATURE = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class Apart:
    """How far from transformers."""

    by: float
    what: str
    """Where it was that far, in words."""


def engine_apart(small: Small, make: Make, *, longest: int, most: float = math.inf) -> Apart:
    """Log-probs of sampled tokens, in nats, the largest difference of all: prompts in pieces, decoding beyond any
    window, siblings on shared pages, a response alone, one that is cut and resumed, and one that is preempted. Beyond
    `most` it looks no further."""
    worst = Apart(by=0.0, what="nothing")
    for apart in _scenes(small, make, longest):
        worst = max(worst, apart, key=lambda a: a.by)
        if worst.by > most:
            break
    return worst


def _scenes(small: Small, make: Make, longest: int) -> Iterator[Apart]:
    rng = np.random.default_rng(1)

    def prompt(n: int) -> tuple[int, ...]:
        return tuple(int(t) for t in rng.integers(3, small.vocabulary, n))

    def ask(id: str, ids: tuple[int, ...], made: int) -> Request:
        made = max(1, min(made, longest - len(ids)))
        return Request(id=id, prompt=ids, seed=len(id) + made, max_tokens=made, sampling=Sampling(temperature=1.0))

    twice = prompt(34)
    pair, one = [ask("sibling 1", twice, 8), ask("sibling 2", twice, 5)], ask("from one token", prompt(1), 6)
    together = drain(make(small.model, **ROOMY), [*pair, one])
    yield from (_beside(small, f"{r.id}, among others", r, together[r.id]) for r in (*pair, one))
    long = ask("long", prompt(4), 36)
    alone = drain(make(small.model, **ROOMY), [long])["long"]
    yield _beside(small, "long, alone", long, alone)
    cut = tuple(alone[0][:19])
    rest = replace(long, prompt=long.prompt + cut, position=len(cut), max_tokens=long.max_tokens - len(cut))
    if rest.max_tokens > 0:
        resumed = drain(make(small.model, **ROOMY), [one, rest])["long"]
        yield _beside(small, "long, cut and resumed among others", rest, resumed)
    tight = [replace(ask(f"preempted {i}", prompt(6), 30), seed=i) for i in range(3)]
    crowded = drain(make(small.model, **TIGHT), tight)
    yield from (_beside(small, r.id, r, crowded[r.id]) for r in tight)


ROOMY = {"kv_tokens": 512, "page_size": 16, "max_running": 8, "max_rows": 24}
TIGHT = {"kv_tokens": 80, "page_size": 16, "max_running": 8, "max_rows": 64}


def drain(engine: Any, asked: Sequence[Request]) -> dict[str, tuple[list[int], list[float]]]:
    out: dict[str, tuple[list[int], list[float]]] = {r.id: ([], []) for r in asked}
    for r in asked:
        engine.add(r)
    for _ in range(10_000):
        if not len(engine):
            return out
        for chunk in engine.step():
            out[chunk.id][0].extend(chunk.tokens)
            out[chunk.id][1].extend(chunk.logprobs)
    raise WindfallError("the engine did not come to an end within 10,000 steps")


@torch.no_grad()
def _beside(small: Small, what: str, request: Request, made: tuple[list[int], list[float]]) -> Apart:
    tokens, said = made
    if len(tokens) != request.max_tokens or not all(0 <= t < small.vocabulary for t in tokens):
        raise WindfallError(f"{what}: the engine made tokens {tokens[:8]}..., {len(tokens)} of {request.max_tokens}")
    logits = small.logits((*request.prompt, *tokens))[len(request.prompt) - 1 : -1].float()
    theirs = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    return _worst(what, (torch.tensor(said) - theirs.cpu()).abs())


def _worst(what: str, apart: Any) -> Apart:
    by = float(apart.max()) if apart.numel() else 0.0
    return Apart(by=by if by == by else float("inf"), what=what)


def trainer_apart(small: Small) -> tuple[Apart, Apart]:
    """Log-probs in nats; and gradients, each weight's by itself, as a share of its own size."""
    rng = np.random.default_rng(2)
    samples = [_sample(rng, small.vocabulary, n, first) for n, first in ((41, 7), (25, 1), (6, 3))]
    weights = [rng.normal(size=len(s.targets)) for s in samples]
    with contextlib.suppress(ValueError, AttributeError):  # it has none: then nothing asks whether it is in training
        small.model.gradient_checkpointing_enable({"use_reentrant": False})
    gradients = Gradients(small.model)
    learner = Learner(small.model, gradients, say=lambda line: None)
    ours, _ = learner.score(samples, TEMPERATURE)
    small.reference.zero_grad()
    loss, theirs = torch.zeros((), device=small.device), []
    for s, w in zip(samples, weights, strict=True):
        at = torch.tensor(s.targets, device=small.device)
        logp = torch.log_softmax(small.logits(s.ids)[at - 1].float() / TEMPERATURE, -1)
        logp = logp.gather(-1, torch.tensor(s.ids, device=small.device)[at][:, None])[:, 0]
        theirs.append(logp.detach())
        loss = loss - (torch.tensor(w, device=small.device).float() * logp).sum()
    loss.backward()
    gradients.zero()
    learner.learn(samples, TEMPERATURE, lambda a, b, logp, entropy: np.concatenate(weights[a:b]))
    return _worst("log-probs", (ours - torch.cat(theirs)).abs()), _gradients_apart(small)


def _gradients_apart(small: Small) -> Apart:
    ours = dict(small.model.named_parameters())
    both = [
        (name, torch.zeros_like(p) if p.grad is None else p.grad, ours[name].grad)
        for name, p in small.reference.named_parameters()
    ]
    whole = float(torch.stack([theirs.float().norm() for _, theirs, _ in both]).norm())
    found = []
    for name, theirs, mine in both:
        mine = torch.zeros_like(theirs) if mine is None else mine
        size = max(float(theirs.norm()), 1e-4 * whole)  # below that it is rounding
        found.append(_worst(name, (mine - theirs).norm()[None] / size))
    return max(found, key=lambda a: a.by)


def _sample(rng: Any, vocabulary: int, length: int, first: int) -> Sample:
    ids = tuple(int(t) for t in rng.integers(3, vocabulary, length))
    return Sample(ids=ids, targets=tuple(range(first, length)), behaviour=np.zeros(0), advantage=0.0, limit=0)


@torch.no_grad()
def weights_apart(model: Any) -> float:
    """Mean difference in nats between windfall's attention and plain attention, over a few tokens."""
    count = model.get_input_embeddings().num_embeddings
    ids = torch.tensor([[(7 * i + 3) % count for i in range(12)]], device=model.device)
    at = torch.arange(ids.shape[1], device=model.device)[None]
    found, before = [], model.config._attn_implementation
    for how, more in ((before, {"batch": Packed.of([ids.shape[1]], model.device)}), ("eager", {})):
        model.set_attn_implementation(how)
        try:
            logits = model(input_ids=ids, position_ids=at, use_cache=False, **more).logits[0, :-1].float()
        finally:
            model.set_attn_implementation(before)
        found.append(torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None]))
    return float((found[0] - found[1]).abs().mean())
