"""The training side of a model: samples in, log-probs out, gradients accumulated.

There are two implementations of the model's layers: those of transformers with autograd (every decoder, any device),
and windfall's own (`LlamaBody` in llama.py: dense decoders of the Llama family in half precision on a GPU). The choice
is made at the start: windfall's are used if they support the module and give the same hidden states and gradients. All
ranks make the same choice: if one of them cannot use windfall's layers, none does.
"""

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
from windfall.trainer.model.activation_memory import ALL, LEAST
from windfall.trainer.model.gradients import Gradients
from windfall.trainer.model.head import WeightsFn
from windfall.trainer.model.llama import LlamaBody, PackedRows, UnsupportedModel
from windfall.trainer.model.lora import Adapters
from windfall.trainer.model.policy import PolicyModule
from windfall.trainer.ranks.ranks import TrainerRanks
from windfall.training import Sample

KEEP = {True: LEAST, False: ALL, "auto": "auto"}
"""From a recipe's train.checkpoint_activations to what the layers keep."""


class Learner:
    def __init__(
        self,
        model: Any,
        gradients: Gradients | None = None,
        *,
        checkpoint_activations: bool | str = "auto",
        ranks: TrainerRanks | None = None,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:
        """`model`: a model of transformers, or a PolicyModule. Without `gradients` it can only score. `ranks`: those
        that the policy is split over."""
        self.ranks = ranks or TrainerRanks.alone()
        self.policy = model if isinstance(model, PolicyModule) else PolicyModule(model)
        self.policy.gradients = gradients
        self.pads = Packed.pads(self.policy.device, self.policy.dtype)
        """Whether the rows of a pack are padded, so that it costs its rows times its longest row."""
        if not self.pads:
            self.choose_layers(KEEP[checkpoint_activations], say)

    def choose_layers(self, keep: str | int, say: Callable[[str], None]) -> None:
        """Use windfall's own layers if they support the model and compute the same, on all ranks."""
        trials: tuple[Callable[[], None], ...] = (lambda: self.use_own_layers(keep=keep), lambda: compare(self.policy))
        for trial in trials:
            if why := next(filter(None, self.ranks.quick.all_gather(self._refusal(trial))), ""):
                self._fall_back(why, say)
                return

    def _refusal(self, trial: Callable[[], None]) -> str:
        """Why windfall's own layers cannot be used; "" if the trial succeeds."""
        comparing = self.policy.body is not None
        try:
            trial()
        except UnsupportedModel as e:
            return str(e)
        except Exception as e:  # fault boundary: it would fail in every step; transformers' layers are the fallback
            if comparing and self.ranks.size > 1:
                raise  # in the middle of a pass: other ranks may wait in a collective that this one never reaches
            if comparing and isinstance(self.policy, FSDPModule):
                getattr(self.policy, "reset_iter_state", lambda: None)()  # not in torch 2.11
            return f"{type(e).__name__}: {e}"
        return ""

    def _fall_back(self, why: str, say: Callable[[str], None]) -> None:
        self.policy.body = None
        if self.policy.gradients is not None:
            self.policy.gradients.zero()
        say(f"training uses the layers of transformers: {why}")

    def use_own_layers(self, *, keep: str | int = "auto") -> None:
        """Raises UnsupportedModel. `keep`: see LlamaBody."""
        policy = self.policy
        policy.body = LlamaBody(policy.model, policy.gradients, keep=keep, device=policy.device, dtype=policy.dtype)

    @property
    def has_graph(self) -> bool:
        """Whether autograd keeps the activations, unless gradient checkpointing recomputes them."""
        return self.policy.body is None

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


class BaseLearner:
    """Scores samples with the base model, by switching the adapters off. No second model is needed."""

    def __init__(self, learner: Learner, adapters: Adapters) -> None:
        self._learner = learner
        self._adapters = adapters

    def score(self, samples: Sequence[Sample], temperature: float) -> tuple[Tensor, Tensor]:
        with self._adapters.switched_off():
            return self._learner.score(samples, temperature)


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


def compare(policy: PolicyModule) -> None:
    """Compare both implementations of the layers on two short sequences, with gradients if there are any.
    UnsupportedModel if they differ."""
    model, gradients, own = policy.model, policy.gradients, policy.body
    size = model.config.vocab_size
    ids = [tuple((7 * i + 3) % size for i in range(n)) for n in (40, 25)]
    samples = [Sample(ids=x, targets=tuple(range(1, len(x))), behavior=np.zeros(0), advantage=0, limit=0) for x in ids]
    rows, _ = pack_rows(samples, policy.device)
    found: list[tuple[Tensor, ...]] = []
    for policy.body in (None, own):
        with torch.set_grad_enabled(gradients is not None):
            hidden = policy(rows)
        found.append((hidden.detach(),))
        if gradients is not None:
            gradients.zero()
            hidden.backward(torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden))
            trained = [x for x in model.base_model.layers if any(p.requires_grad for p in x.parameters())]
            matrices = [p for x in (trained[0], trained[-1]) for p in x.parameters() if p.dim() > 1]
            grads = [g.flatten() for g in map(gradients.of, matrices) if g is not None]
            found[-1] += (torch.cat(grads),)
            gradients.zero()
    for what, theirs, ours in zip(("hidden states", "gradients"), *found, strict=False):
        _check_close(what, ours, theirs)


def _check_close(what: str, ours: Tensor, theirs: Tensor) -> None:
    difference = float((ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-20))
    if not difference < 0.1:  # bfloat16 rounds by percents; a different computation is off by the size of the values
        raise UnsupportedModel(f"{what} differ by {difference:.2g}")
