"""Tests whether a response has the same bits whatever else is in its batch, as `run.deterministic` promises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from windfall.engine.selftest.compare import ROOMY, EngineFactory, drain
from windfall.engine.selftest.small_model import SmallModel
from windfall.engine.torch.packed import Packed
from windfall.types import Request


def batch_invariant(small: SmallModel, make: EngineFactory, *, longest: int) -> bool:
    """Whether a response has the same log-probs, bit for bit, alone and in a batch with others."""
    ids = tuple(range(3, 15))
    one = Request(id="one", prompt=ids, seed=1, max_tokens=max(1, min(24, longest - len(ids))))
    others = [replace(one, id=f"other {n}", prompt=ids[n:], seed=n) for n in (2, 3, 4)]
    alone, batched = (drain(make(small.model, **ROOMY), requests)["one"] for requests in ([one], [*others, one]))
    return alone == batched


class _OperationRecorder(TorchDispatchMode):
    """Records the name and the input shapes of every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.seen.append((str(func), [tuple(x.shape) for x in args if isinstance(x, torch.Tensor)]))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def neighbor_dependence(small: SmallModel) -> str | None:
    """Why the bits of a row depend on the other rows of a step; None if they do not. They do not if every operation has
    the same shapes whichever tokens the step contains: then no row's sums depend on the experts that other rows are
    routed to."""
    operations = []
    for step in (1, 7):
        ids = torch.tensor([[3 + step * n % (small.vocabulary - 3) for n in range(16)]], device=small.device)
        batch = Packed.of([1] * 16, small.device)
        with _OperationRecorder() as recorder:
            small.model(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False, batch=batch)
        operations.append(recorder.seen)
    if operations[0] != operations[1] or any("grouped_mm" in name for name, _ in operations[0]):
        return (
            "the shapes of its operations depend on the tokens (as in a mixture of experts), so a row's bits depend on "
            "its neighbors"
        )
    return None
