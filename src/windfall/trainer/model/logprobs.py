"""The training side of a model: samples in, log-probs out, gradients accumulated.

There are two implementations of the model's layers: those of transformers with autograd (every decoder, any device),
and windfall's own (`LlamaBody` in llama.py: dense decoders of the Llama family in half precision on a GPU). windfall's
are used if they support the module; the self-test (selftest.py) compares them with those of transformers.

A `PolicyModule` is body and head in one module, which can be the root of FSDP2. Nothing in it depends on whether the
weights are sharded. FSDP2 gathers the weights of a module before its forward and its backward pass, so they are read
from the module in every pass and never kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from windfall.engine.torch.packed import Packed
from windfall.models import experts
from windfall.models.experts import ExpertReplay
from windfall.trainer.model import layers
from windfall.trainer.model.activation_memory import ALL, LEAST
from windfall.trainer.model.gradients import Gradients, accept_float32
from windfall.trainer.model.head import Head, WeightsFn
from windfall.trainer.model.llama import LlamaBody, UnsupportedModel
from windfall.trainer.model.lora import Adapters
from windfall.trainer.model.packs import Pack, PackedRows, pack_rows
from windfall.training import Sample

KEEP = {True: LEAST, False: ALL, "auto": "auto"}
"""From a recipe's train.checkpoint_activations to what the layers keep."""


class PolicyModule(torch.nn.Module):
    def __init__(self, model: Any, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> None:
        """`dtype` and `device` are those of the passes, if they differ from those in which weights are stored."""
        super().__init__()
        self.model = model
        self.dtype = dtype or model.dtype
        self.device = device or model.device
        self.head = Head(model, self.device)
        self.gradients: Gradients | None = None
        """Where the gradients of the weights go. None: this policy only scores."""
        self.body: LlamaBody | None = None
        """windfall's own layers; None: those of transformers."""
        self.replay = ExpertReplay(model)
        self._is_first = True
        self._recomputing = [x for x in model.modules() if hasattr(x, "gradient_checkpointing")]

    def forward(
        self,
        rows: PackedRows,
        targets: Tensor | None = None,
        sizes: Sequence[int] = (),
        temperature: float = 1.0,
        weights_fn: WeightsFn | None = None,
    ) -> Tensor:
        """Without `weights_fn`: log-probs and entropies (2, n), without a graph. With it: the negative sum of weight *
        log-prob, whose `backward()` adds its gradient to every trained weight. Without `targets`: hidden states."""
        learning = torch.is_grad_enabled() and (targets is None or weights_fn is not None)
        self.set_training(learning and self.body is None)
        with torch.set_grad_enabled(learning):
            if learning and self._is_first and self.gradients is not None and self.gradients.sharded:
                accept_float32(self.parameters())  # FSDP2 keeps these tensors, and frees and fills only their memory
                self._is_first = False
            hidden = self.transformers_body(rows) if self.body is None else self.body(rows)
            if targets is None:
                return hidden
            if weights_fn is None:
                return self.head.score(hidden, targets, temperature)[:2]
            assert self.gradients is not None
            return self.head.loss(hidden, targets, sizes, temperature, weights_fn, self.gradients)

    def set_training(self, training: bool) -> None:
        """Set the training mode of the submodules that recompute activations during the backward pass: they do so only
        in training mode. No other submodule is ever in training mode, which might enable dropout."""
        for module in self._recomputing:
            module.training = training and module.gradient_checkpointing

    def transformers_body(self, rows: PackedRows) -> Tensor:
        """Hidden states of the wanted rows."""
        return (
            self.model.base_model(
                input_ids=rows.ids[None], position_ids=rows.positions[None], use_cache=False, batch=rows.batch
            )
            .last_hidden_state[0]
            .index_select(0, rows.wanted)
        )


class Learner:
    def __init__(
        self,
        model: Any,
        gradients: Gradients | None = None,
        *,
        checkpoint_activations: bool | str = "auto",
        pack: Callable[[Sequence[Sample], torch.device], Pack] = pack_rows,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:
        """`model`: a model of transformers, or a PolicyModule. Without `gradients` it can only score.
        `pack`: makes what this rank computes of a pack; a part of it, if other ranks compute the rest."""
        self.policy = model if isinstance(model, PolicyModule) else PolicyModule(model)
        self.policy.gradients = gradients
        self._pack = pack
        self.pads = Packed.pads(self.policy.device, self.policy.dtype)
        """Whether the rows of a pack are padded, so that it costs its rows times its longest row."""
        if self.policy.body is None and not self.pads and layers.has_kernels(self.policy.device):
            try:
                self.use_own_layers(keep=KEEP[checkpoint_activations])
            except UnsupportedModel as e:
                say(f"training uses the layers of transformers: {e}")

    def use_own_layers(self, *, keep: str | int = "auto") -> None:
        """Raises UnsupportedModel. `keep`: see LlamaBody."""
        policy = self.policy
        policy.body = LlamaBody(policy.model, policy.gradients, keep=keep, device=policy.device, dtype=policy.dtype)

    @property
    def has_graph(self) -> bool:
        """Whether autograd keeps the activations, unless gradient checkpointing recomputes them."""
        return self.policy.body is None

    @torch.no_grad()
    def score(self, samples: Sequence[Sample], temperature: float, *, replay: bool = True) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of all targets, sample after sample, in float32. `replay`: tokens are computed by the
        experts that the samples name, if they name some."""
        pack = self._pack(samples, self.policy.device)
        with self._replaying(samples if replay else (), pack):
            found = pack.all(self.policy(pack.rows, pack.targets, temperature=temperature))
        if isinstance(self.policy, FSDPModule):  # FSDP2 leaves this to the backward pass
            self.policy.reshard()
        return found[0], found[1]

    @property
    def replays(self) -> bool:
        """Whether the experts that samples name compute their tokens."""
        return bool(self.policy.replay.layers)

    def loads(self, samples: Sequence[Sample]) -> np.ndarray | int:
        """How many tokens each expert computes, as (layers, experts); 0 if nothing was recorded."""
        found, layers = pack_experts(samples, self.policy.replay), self.policy.replay.layers
        return (
            0 if found is None else experts.loads(experts.on_device(found, self.policy.device), experts.largest(layers))
        )

    def _replaying(self, samples: Sequence[Sample], pack: Pack) -> AbstractContextManager[None]:
        found = pack_experts(samples, self.policy.replay)
        own = None if found is None else pack.part(found, np.iinfo(found.dtype).max)
        return self.policy.replay.replaying(None if own is None else experts.on_device(own, self.policy.device))

    @torch.no_grad()
    def top(self, samples: Sequence[Sample], count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs of all targets at a temperature of 1, sample after sample, in float32; and for each the `count`
        most likely tokens with their log-probs."""
        pack = pack_rows(samples, self.policy.device)
        return self.policy.head.top(self.policy(pack.rows), pack.targets, count)

    def learn(self, samples: Sequence[Sample], temperature: float, weights_fn: WeightsFn) -> None:
        """Add the gradient of the negative sum of weight * log-prob."""
        pack = self._pack(samples, self.policy.device)
        with self._replaying(samples, pack):
            loss = self.policy(pack.rows, pack.targets, pack.sizes, temperature, pack.weights_fn(weights_fn))
            if loss.requires_grad:
                loss.backward()
        self.policy.set_training(False)


class BaseLearner:
    """Scores samples with the base model, by switching the adapters off. No second model is needed. The adapters that
    were in use are in use again afterwards."""

    def __init__(self, learner: Learner, adapters: Adapters) -> None:
        self._learner = learner
        self._adapters = adapters

    def score(self, samples: Sequence[Sample], temperature: float) -> tuple[Tensor, Tensor]:
        with self._adapters.switched_off():
            return self._learner.score(samples, temperature)


def pack_experts(samples: Sequence[Sample], replay: ExpertReplay) -> np.ndarray | None:
    """The experts of these samples, as `numbers` has them: (rows, layers, chosen). None is known for the last row of
    each sample."""
    if not any(s.experts for s in samples) or not replay.layers:
        return None
    known = {n: experts.numbers(s.experts, len(s.ids) - 1, replay.layers) for n, s in enumerate(samples) if s.experts}
    first = next(iter(known.values()))
    packed = np.full((sum(len(s.ids) for s in samples), *first.shape[1:]), np.iinfo(first.dtype).max, first.dtype)
    start = 0
    for n, s in enumerate(samples):
        if n in known:
            packed[start : start + len(s.ids) - 1] = known[n]
        start += len(s.ids)
    return packed
