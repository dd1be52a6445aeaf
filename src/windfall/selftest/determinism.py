"""Whether a response can be the same to the last bit whatever runs beside it: what `run.deterministic` promises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from windfall.engine.torch.packed import Packed
from windfall.selftest.compare import ROOMY, Make, drain
from windfall.selftest.small_model import Small
from windfall.types import Request


def same(small: Small, make: Make, *, longest: int) -> bool:
    """Whether a response has the same log-probs, to the last bit, alone and among others."""
    ids = tuple(range(3, 15))
    one = Request(id="one", prompt=ids, seed=1, max_tokens=max(1, min(24, longest - len(ids))))
    others = [replace(one, id=f"other {n}", prompt=ids[n:], seed=n) for n in (2, 3, 4)]
    alone, among = (drain(make(small.model, **ROOMY), asked)["one"] for asked in ([one], [*others, one]))
    return alone == among


class _Products(TorchDispatchMode):
    """Names and shapes of every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.seen.append((str(func), [tuple(x.shape) for x in args if isinstance(x, torch.Tensor)]))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def depend_on_neighbors(small: Small) -> str | None:
    """Why rows of one step cannot be independent of each other to the last bit; None if they can: shapes of all
    operations are the same whatever the tokens are, so no row's sums depend on where other rows are sent."""
    found = []
    for step in (1, 7):
        ids = torch.tensor([[3 + step * n % (small.vocabulary - 3) for n in range(16)]], device=small.device)
        batch = Packed.of([1] * 16, small.device)
        with _Products() as products:
            small.model(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False, batch=batch)
        found.append(products.seen)
    if found[0] != found[1] or any("grouped_mm" in name for name, _ in found[0]):
        return "rows are sent to experts, so the shape of a matrix product depends on a row's neighbors"
    return None
