"""`windfall bench engine`: compares the engine with transformers' generate, in this process on this machine."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from windfall import devices
from windfall.errors import WindfallError
from windfall.models import load
from windfall.types import Request

Requests = list[Request]
PROMPT_TOKENS = 24
"""Tokens in every prompt."""


def engine(name: str, *, requests: int, max_tokens: int, threads: int) -> None:
    device, dtype = devices.resolve("auto", "auto", threads)
    model = load.load(name, dtype=dtype, device=device)
    context = getattr(model.config, "max_position_embeddings", None)
    if context and PROMPT_TOKENS + max_tokens > context:
        lengths = f"prompts of {PROMPT_TOKENS} tokens and responses of {max_tokens}"
        what = f"{lengths} exceed the model's context of {context}"
        raise WindfallError(what, where="--max-tokens", fix=f"Give at most {context - PROMPT_TOKENS}.")
    out = Console(highlight=False)
    table = Table(title=f"{name}, {dtype} on {device}, {requests} requests: useful tokens/s")
    for column in ("lengths", "engine", "deterministic", "transformers generate", "engine / generate", "different"):
        table.add_column(column, justify="right")
    rng = random.Random(0)
    with out.status("measuring") as status:
        for kind in ("equal", "uneven"):
            work = _work(model.config.vocab_size, requests, max_tokens, kind, rng)
            status.update(f"{kind} lengths: engine")
            fast, tokens = _engine(model, work, max_tokens, deterministic=False)
            status.update(f"{kind} lengths: engine, deterministic")
            exact, exact_tokens = _engine(model, work, max_tokens, deterministic=True)
            status.update(f"{kind} lengths: transformers generate")
            plain = _generate(model, work)
            different = sum(tokens[r.id] != exact_tokens[r.id] for r in work)
            figures = [f"{x:,.1f}" for x in (fast, exact, plain)]
            table.add_row(kind, *figures, f"{fast / plain:.2f}x", f"{different} of {requests}")
    out.print(table)
    out.print("different: responses whose tokens differ between the two modes, because rounding breaks a near tie")


def _work(vocabulary: int, requests: int, max_tokens: int, kind: str, rng: random.Random) -> Requests:
    prompts = [tuple(rng.randrange(3, vocabulary) for _ in range(PROMPT_TOKENS)) for _ in range(-(-requests // 8))]
    uneven = [min(max_tokens, 4 + int(rng.expovariate(3 / max_tokens))) for _ in range(requests)]
    return [
        Request(id=str(i), prompt=prompts[i // 8], seed=i, max_tokens=max_tokens // 2 if kind == "equal" else uneven[i])
        for i in range(requests)
    ]


def _engine(model: Any, work: Requests, max_tokens: int, *, deterministic: bool) -> tuple[float, dict[str, list[int]]]:
    from windfall.engine.torch.engine import TorchEngine
    from windfall.models.attention import NAME

    model.set_attn_implementation(NAME)
    best, tokens = 0.0, {}
    for _ in range(2):  # the first run is a warm-up
        e = TorchEngine(model, kv_tokens=len(work) * (PROMPT_TOKENS + max_tokens) + 64, deterministic=deterministic)
        tokens = {r.id: [] for r in work}
        started = time.perf_counter()
        for r in work:
            e.add(r)
        while len(e):
            for chunk in e.step():
                tokens[chunk.id] += chunk.tokens
        best = _useful(work) / (time.perf_counter() - started)
    return best, tokens


def _generate(model: Any, work: Sequence[Request]) -> float:
    """Tokens per second of one batch that runs until its longest response is done, as in a plain training loop."""
    import torch

    model.set_attn_implementation("sdpa")
    ids = torch.tensor([r.prompt for r in work], device=model.device)
    longest = max(r.max_tokens for r in work)
    options = {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}
    seconds = 0.0
    for tokens in (4, longest):  # the first run is a warm-up
        started = time.perf_counter()
        model.generate(
            ids, max_new_tokens=tokens, min_new_tokens=tokens, attention_mask=torch.ones_like(ids), **options
        )
        seconds = time.perf_counter() - started
    return _useful(work) / seconds


def _useful(work: Sequence[Request]) -> int:
    """Tokens that were asked for; what a batch generates beyond them is not useful."""
    return sum(r.max_tokens for r in work)
