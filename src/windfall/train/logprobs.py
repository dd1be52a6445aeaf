"""The training side of a model: samples in, log-probs out, gradients accumulated."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from windfall.engine.torch.packed import Packed
from windfall.train.gradients import Gradients
from windfall.train.head import WeightsFn
from windfall.train.llama import PackedRows
from windfall.train.policy import Policy
from windfall.train.sample import Sample


class Learner:
    def __init__(
        self, model: Any, gradients: Gradients | None = None, *, checkpoint_activations: bool | str = "auto",
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:  # fmt: skip
        """`model`: a model of transformers, or a Policy. Without `gradients` it can only score."""
        del checkpoint_activations, say
        self.policy = model if isinstance(model, Policy) else Policy(model)
        self.policy.gradients = gradients
        self.always_backward = gradients is not None and gradients.sharded
        """Whether the backward pass runs even if every weight is zero: all ranks must make the same passes."""
        self.pads = Packed.pads(self.policy.device, self.policy.dtype)
        """Whether the rows of a pack are padded, so that it costs its rows times its longest row."""

    @property
    def has_graph(self) -> bool:
        """Whether autograd keeps the activations, unless gradient checkpointing recomputes them."""
        return True

    @torch.no_grad()
    def score(self, samples: Sequence[Sample], temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of all targets, sample after sample, in float32."""
        rows, targets = pack_rows(samples, self.policy.device)
        numbers = self.policy(rows, targets, temperature=temperature)
        if isinstance(self.policy, FSDPModule):  # FSDP2 leaves this to the backward pass
            self.policy.reshard()
        return numbers[0], numbers[1]

    def learn(self, samples: Sequence[Sample], temperature: float, weights_fn: WeightsFn) -> None:
        """Add the gradient of the negative sum of weight * log-prob."""
        rows, targets = pack_rows(samples, self.policy.device)
        loss = self.policy(rows, targets, [len(s.targets) for s in samples], temperature, weights_fn)
        if loss.requires_grad:
            loss.backward()
        self.policy.set_training(False)


def pack_rows(samples: Sequence[Sample], device: torch.device) -> tuple[PackedRows, Tensor]:
    """Samples concatenated on the device, and the tokens that their rows predict. Makes one copy to the device."""
    lengths = [len(s.ids) for s in samples]
    starts = [0, *accumulate(lengths)]
    total, wanted = starts[-1], sum(len(s.targets) for s in samples)
    packed = np.empty(2 * total + wanted, np.int64)
    packed[:total] = np.fromiter(chain.from_iterable(s.ids for s in samples), np.int64, total)
    packed[total : 2 * total] = np.arange(total) - np.repeat(starts[:-1], lengths)
    packed[2 * total :] = np.fromiter(chain.from_iterable(s.targets for s in samples), np.int64, wanted)
    packed[2 * total :] += np.repeat(starts[:-1], [len(s.targets) for s in samples]) - 1
    on_device = torch.from_numpy(packed)
    if device.type == "cuda":
        on_device = on_device.pin_memory().to(device, non_blocking=True)
    ids, positions, rows = on_device.split((total, total, wanted))
    return PackedRows(ids=ids, positions=positions, wanted=rows, batch=Packed.of(lengths, device)), ids[rows + 1]
