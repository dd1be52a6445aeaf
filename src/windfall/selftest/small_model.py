"""The small random model that stands for a large one: one copy behind windfall's attention, one as transformers has it.

Weights are drawn so that nothing a model does can be left out unnoticed: norms and biases are away from one and zero,
attention scores differ by a few units, and logits are large enough for a final cap or scale to show.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from windfall.engine.torch import attention
from windfall.errors import WindfallError
from windfall.selftest import shrink

MOST_NUMBERS = 80_000_000
"""Weights of the small model: its test is to take seconds, and no memory to speak of."""
SLOW_S = 5.0
"""For one forward pass of the small model: the test makes some fifty."""
SPREAD = 4.0
"""Standard deviation of the logits."""


class Small:
    """`model` is what windfall runs; `reference` has the same weights and plain attention."""

    def __init__(self, config: Any, reference: Any, device: str) -> None:
        self.config, self.reference = config, reference.to(device).eval()
        self.model = _build(config, attention.NAME).to(device).eval()
        self.model.load_state_dict(reference.state_dict())
        _same_buffers(self.model, reference)
        self.device = device
        self.vocabulary: int = self.model.get_input_embeddings().num_embeddings

    def logits(self, ids: Iterable[int]) -> Tensor:
        """By the reference, of one sequence alone."""
        return self.reference(input_ids=torch.tensor([list(ids)], device=self.device), use_cache=False).logits[0]


def small(config: Any, names: Iterable[str] | None, *, longest: int, device: str, seed: int) -> Small:
    """`names`: of the full model's weights, if they are known. Raises WindfallError if no small model can be made."""
    wanted, why = list(names or _names(config)), ""
    for fields in shrink.shrunk(config, longest=longest):
        try:
            candidate = type(config).from_dict(fields)
            with torch.device("meta"):
                blank = _build(candidate, "eager")
            if sum(p.numel() for p in blank.parameters()) > MOST_NUMBERS:
                why = why or "it stays too large"
                continue
            if not shrink.same_parts(wanted, blank.state_dict()):
                why = why or "a smaller one has other parts"
                continue
            reference = _build(candidate, "eager")
            _draw(reference, seed)
            break
        except WindfallError:
            raise
        except Exception as e:  # fault boundary: model code of any kind; another size may do, and else it is refused
            why = why or f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"
    else:
        raise WindfallError(f"no small model of this architecture could be made to test windfall with: {why}")
    try:
        return Small(candidate, reference, device)
    except Exception as e:  # fault boundary: model code of any kind
        raise WindfallError(f"it cannot be built with windfall's attention: {type(e).__name__}: {e}") from e


def _names(config: Any) -> Iterable[str]:
    with torch.device("meta"):
        return _build(config, "eager").state_dict()


def _build(config: Any, how: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32, attn_implementation=how)


@torch.no_grad()
def _draw(model: Any, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=draw)
        if p.dim() < 2:
            p.add_(0.3 * noise)
        else:
            p.copy_(1.3 * noise / float(p.shape[-1] * p.shape[-2]) ** 0.25)
    model.eval()
    ids = torch.randint(3, model.get_input_embeddings().num_embeddings, (1, 48), generator=draw)
    knob = _logits_scale(model)
    for _ in range(3):  # a cap makes them grow less than they are asked to
        began_s = time.monotonic()
        spread = float(model(input_ids=ids, use_cache=False).logits.float().std())
        if time.monotonic() - began_s > SLOW_S:
            raise WindfallError(
                f"transformers takes {time.monotonic() - began_s:.0f} s for {ids.shape[1]} tokens of a small model of "
                "this architecture here, so windfall cannot be tested with it"
            )
        if not 0 < spread < float("inf"):
            raise ValueError(f"the logits of random weights have a spread of {spread}")
        knob.mul_(min(max(SPREAD / spread, 0.1), 10.0))
    if not re.match(r"torch\.float32", str(model.dtype)):
        raise ValueError(f"its weights are {model.dtype}")


def _logits_scale(model: Any) -> Tensor:
    """A weight that scales all logits. Where input and output share their embedding it is that of the last norm, and
    the embedding becomes small: else a token's likeliest successor would be itself, whatever the layers compute."""
    shared, out = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if shared is not out:
        return out
    shared.mul_(0.1)
    inner = [(n, p) for n, p in model.base_model.named_parameters() if p.dim() == 1 and not re.search(r"\.\d+\.", n)]
    norms = [p for n, p in inner if n.endswith("weight") and p.numel() == out.shape[1]]
    return norms[-1] if norms else out


def _same_buffers(model: Any, reference: Any) -> None:
    """Those that no state dict has: they are drawn or computed when a module is made."""
    theirs = dict(reference.named_buffers())
    for name, mine in model.named_buffers():
        if name in theirs and theirs[name].shape == mine.shape:
            mine.copy_(theirs[name])
