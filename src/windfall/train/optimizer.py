"""AdamW over float32 weights. A bfloat16 model keeps a float32 master of each weight: gradients are added up there, and
the model gets the rounded result. A float32 model is its own master."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from windfall.config import Train


class Optimizer:
    def __init__(self, model: Any, options: Train, total_updates: int) -> None:
        self.options, self.total_updates, self.updates = options, total_updates, 0
        self._model = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._master: dict[str, Tensor] = {}
        for name, p in self._model.items():
            if p.dtype == torch.float32:
                self._master[name] = p
                continue
            master = p.detach().float()
            master.grad = torch.zeros_like(master)
            self._master[name] = master
            p.register_post_accumulate_grad_hook(_into(master))
        self._adam = torch.optim.AdamW(
            list(self._master.values()), lr=options.lr, betas=options.betas, weight_decay=options.weight_decay
        )

    def zero(self) -> None:
        for master in self._master.values():
            if master.grad is not None:
                master.grad.zero_()

    def rate(self) -> float:
        """The learning rate of the next update."""
        o, n = self.options, self.updates
        if n < o.warmup:
            return o.lr * (n + 1) / o.warmup
        left = (n - o.warmup) / max(1, self.total_updates - o.warmup)
        match o.schedule:
            case "constant":
                return o.lr
            case "linear":
                return o.lr * (1 - left)
            case "cosine":
                return o.lr * 0.5 * (1 + math.cos(math.pi * left))

    @torch.no_grad()
    def update(self, divisor: float) -> tuple[float, bool]:
        """Divide the accumulated gradient, clip it, step. Returns its norm, and whether it was fit to be used."""
        grads = [m.grad for m in self._master.values() if m.grad is not None]
        if divisor == 0:  # nothing to learn from: not even momentum may move the weights
            self.updates += 1
            return 0.0, True
        for g in grads:
            g.div_(divisor)
        norm = float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0
        fit = math.isfinite(norm)
        if fit:
            if norm > self.options.clip_norm:
                for g in grads:
                    g.mul_(self.options.clip_norm / norm)
            for group in self._adam.param_groups:
                group["lr"] = self.rate()
            self._adam.step()
            for name, p in self._model.items():
                if p is not self._master[name]:
                    p.copy_(self._master[name])
        self.updates += 1
        self.zero()
        return norm, fit

    def state(self) -> dict[str, Tensor]:
        """Everything that a later run needs to go on bit for bit, but for the model's own weights."""
        out: dict[str, Tensor] = {"updates": torch.tensor(self.updates)}
        for name, master in self._master.items():
            if master is not self._model[name]:
                out[f"master.{name}"] = master
            for key, value in self._adam.state.get(master, {}).items():
                out[f"{key}.{name}"] = value
        return {k: v.detach().cpu().contiguous() for k, v in out.items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.updates = int(state["updates"])
        for name, master in self._master.items():
            if f"master.{name}" in state:
                master.copy_(state[f"master.{name}"])
            if f"step.{name}" in state:
                self._adam.state[master] = {
                    "step": state[f"step.{name}"].clone(),
                    "exp_avg": state[f"exp_avg.{name}"].to(master.device, copy=True),
                    "exp_avg_sq": state[f"exp_avg_sq.{name}"].to(master.device, copy=True),
                }


def _into(master: Tensor) -> Any:
    """A hook that adds a fresh gradient to the master's and frees it."""

    def hook(p: Tensor) -> None:
        assert master.grad is not None and p.grad is not None
        master.grad.add_(p.grad)
        p.grad = None

    return hook
