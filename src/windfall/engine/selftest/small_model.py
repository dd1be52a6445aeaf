"""The small random model that represents a large one: one copy with windfall's attention, one with transformers' own.

The random weights make every missing operation visible: norms and biases differ from one and zero, attention scores
differ by a few units, and logits are large enough to show a final cap or scale.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from windfall.engine.selftest import shrink
from windfall.errors import WindfallError
from windfall.models import attention

MAX_PARAMETERS = 80_000_000  # upper limit for the small model: the test should take seconds and little memory
MAX_FORWARD_S = 5.0  # upper limit for the seconds of one forward pass of the small model: the test runs about fifty
LOGIT_STD = 4.0  # standard deviation of the logits


class SmallModel:
    """`model` has windfall's attention; `reference` has the same weights and plain attention."""

    def __init__(self, config: Any, reference: Any, device: str) -> None:
        self.config = config
        self.reference = reference.to(device).eval()
        self.model = _build(config, attention.NAME).to(device).eval()
        self.model.load_state_dict(reference.state_dict())
        _same_buffers(self.model, reference)
        self.device = device
        self.vocabulary: int = self.model.get_input_embeddings().num_embeddings

    def logits(self, ids: Iterable[int]) -> Tensor:
        """The logits of the reference for one sequence."""
        return self.reference(input_ids=torch.tensor([list(ids)], device=self.device), use_cache=False).logits[0]


def build_small_model(config: Any, names: Iterable[str] | None, *, longest: int, device: str, seed: int) -> SmallModel:
    """`names`: names of the full model's weights, if known. Raises WindfallError if no small model can be built."""
    wanted, why = list(names or _weight_names(config)), ""
    for fields in shrink.small_configs(config, longest=longest):
        try:
            candidate = type(config).from_dict(fields)
            with torch.device("meta"):
                blank = _build(candidate, "eager")
            if sum(p.numel() for p in blank.parameters()) > MAX_PARAMETERS:
                why = why or "the small model is still too large"
                continue
            if not shrink.same_weight_kinds(wanted, blank.state_dict()):
                why = why or "the small model has different kinds of weights"
                continue
            reference = _build(candidate, "eager")
            _randomize(reference, seed)
            break
        except WindfallError:
            raise
        except Exception as e:  # fault boundary: model code of any kind; another size may work
            why = why or f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"
    else:
        raise WindfallError(f"no small model of this architecture could be built for the self-test: {why}")
    try:
        return SmallModel(candidate, reference, device)
    except Exception as e:  # fault boundary: model code of any kind
        raise WindfallError(f"the model cannot be built with windfall's attention: {type(e).__name__}: {e}") from e


def _weight_names(config: Any) -> Iterable[str]:
    with torch.device("meta"):
        return _build(config, "eager").state_dict()


def _build(config: Any, how: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32, attn_implementation=how)


@torch.no_grad()
def _randomize(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=generator)
        if p.dim() < 2:
            p.add_(0.3 * noise)
        else:
            p.copy_(1.3 * noise / float(p.shape[-1] * p.shape[-2]) ** 0.25)
    model.eval()
    ids = torch.randint(3, model.get_input_embeddings().num_embeddings, (1, 48), generator=generator)
    scale = _logits_scale(model)
    for _ in range(3):  # with a cap, logits grow less than the scale
        began_s = time.monotonic()
        std = float(model(input_ids=ids, use_cache=False).logits.float().std())
        if time.monotonic() - began_s > MAX_FORWARD_S:
            slow = f"{time.monotonic() - began_s:.0f} s for {ids.shape[1]} tokens of a small model of this architecture"
            raise WindfallError(f"transformers needs {slow} on this machine, so the self-test would take too long")
        if not 0 < std < float("inf"):
            raise ValueError(f"the logits of random weights have a standard deviation of {std}")
        scale.mul_(min(max(LOGIT_STD / std, 0.1), 10.0))
    if model.dtype != torch.float32:
        raise ValueError(f"its weights are {model.dtype}")


def _logits_scale(model: Any) -> Tensor:
    """A weight that scales all logits. If input and output share their embedding, this is the weight of the last norm,
    and the embedding is scaled down: otherwise the last token would be the most likely next one, whatever the layers
    compute."""
    shared, out = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if shared is not out:
        return out
    shared.mul_(0.1)
    inner = [(n, p) for n, p in model.base_model.named_parameters() if p.dim() == 1 and not re.search(r"\.\d+\.", n)]
    norms = [p for n, p in inner if n.endswith("weight") and p.numel() == out.shape[1]]
    return norms[-1] if norms else out


def _same_buffers(model: Any, reference: Any) -> None:
    """Copy the buffers that are not in the state dict: they are random or computed when a module is built."""
    theirs = dict(reference.named_buffers())
    for name, mine in model.named_buffers():
        if name in theirs and theirs[name].shape == mine.shape:
            mine.copy_(theirs[name])
