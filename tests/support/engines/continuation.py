"""Several versions of one small model, and the oracle for responses whose tokens come from several of them.

From the first token of a version on, a response must continue as in a new engine with the weights of that version that
is given the prompt and all earlier tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.support.engines.small_models import build, drain, logprobs, tokens
from windfall import devices
from windfall.models import attention
from windfall.types import Chunk, Request


def versions(name: str, count: int) -> list[Any]:
    """`count` models that differ in their weights, with windfall's attention."""
    torch.set_num_threads(1)
    devices.choose_matmul_library()
    model = build(name)
    model.set_attn_implementation(attention.NAME)
    out = [model]
    for _ in range(count - 1):
        out.append(copy.deepcopy(out[-1]))
        change(out[-1], seed=len(out))
    return out


@torch.no_grad()
def change(model: Any, seed: int) -> None:
    """Change all weights, as an update does."""
    noise = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.add_(0.05 * torch.randn(p.shape, generator=noise))


def weights(model: Any) -> dict[str, torch.Tensor]:
    """A copy of the weights, as a pull returns them."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@dataclass(frozen=True, slots=True)
class Token:
    token: int
    logprob: float
    version: int


def of_chunks(chunks: Iterable[Chunk]) -> list[Token]:
    return [Token(t, x, c.version) for c in chunks for t, x in zip(c.tokens, c.logprobs, strict=True)]


def check_continuation(
    request: Request, made: Sequence[Token], engine_of: Callable[[int], Any], *, tolerance: float = 0.0
) -> None:
    """Compare every part of one version with a new engine of that version, `engine_of(version)`."""
    ids = tuple(t.token for t in made)
    starts = [n for n in range(len(made)) if n == 0 or made[n].version != made[n - 1].version]
    for start, end in pairwise([*starts, len(made)]):
        rest = replace(
            request, prompt=request.prompt + ids[:start], position=request.position + start,
            max_tokens=end - start,
        )  # fmt: skip
        chunks = drain(engine_of(made[start].version), [rest])[request.id]
        assert list(ids[start:end]) == tokens(chunks), f"tokens {start} to {end} of {request.id}"
        said = [t.logprob for t in made[start:end]]
        if tolerance:
            assert said == pytest.approx(logprobs(chunks), abs=tolerance)
        else:
            assert said == logprobs(chunks), f"log-probs {start} to {end} of {request.id}"
