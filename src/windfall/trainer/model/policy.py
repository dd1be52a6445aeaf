"""The model as it is trained: body and head in one module, which can be the root of FSDP2.

    policy = PolicyModule(model)
    policy(rows, targets, temperature=1.0)                        log-probs and entropies
    policy(rows, targets, sizes, 1.0, weights_fn).backward()      adds the gradient to every trained weight

Nothing here depends on whether the weights are sharded. FSDP2 gathers the weights of a module before its forward and
its backward pass, so they are read from the module in every pass and never kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from windfall.trainer.model.gradients import Gradients, accept_float32
from windfall.trainer.model.head import Head, WeightsFn
from windfall.trainer.model.llama import LlamaBody, PackedRows


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
