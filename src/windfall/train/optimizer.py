"""AdamW on float32 weights. A bfloat16 model has a float32 master copy of each weight: gradients are accumulated in
float32 (gradients.py), and the model gets the rounded result. A float32 model is its own master."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from windfall.config import Train
from windfall.train.base import NOT_FINITE, NOTHING, Skipped
from windfall.train.gradients import Gradients


class Optimizer:
    def __init__(self, model: Any, options: Train, total_updates: int) -> None:
        self.options, self.total_updates, self.updates = options, total_updates, 0
        self.gradients = Gradients(model)
        self._model = self.gradients.weights
        self._master: dict[str, Tensor] = {}
        for name, p in self._model.items():
            self._master[name] = p
            if p.dtype != torch.float32:
                self._master[name] = p.detach().float()
                self._master[name].grad = self.gradients.of(p)
        self._fused = bool(self._master) and all(m.device.type == "cuda" for m in self._master.values())
        self._adam = torch.optim.AdamW(
            list(self._master.values()), lr=options.lr, betas=options.betas, weight_decay=options.weight_decay,
            fused=self._fused or None,
        )  # fmt: skip

    def rate(self) -> float:
        """The learning rate of the next update."""
        o, n = self.options, self.updates
        if n < o.warmup:
            return o.lr * (n + 1) / o.warmup
        progress = (n - o.warmup) / max(1, self.total_updates - o.warmup)
        match o.schedule:
            case "constant":
                return o.lr
            case "linear":
                return o.lr * (1 - progress)
            case "cosine":
                return o.lr * 0.5 * (1 + math.cos(math.pi * progress))

    @torch.no_grad()
    def update(self, divisor: float) -> tuple[float, Skipped]:
        """Divide the accumulated gradient, clip it, and take a step. Returns the norm of the divided gradient before
        clipping, and the reason if there was no step. Sets the gradient to zero.

        Without a step, the weights, the moments and Adam's own step count do not change: neither momentum nor weight
        decay may move the weights if the gradient carries no information. The learning rate schedule still counts the
        update."""
        rate = self.rate()
        self.updates += 1
        grads = self.gradients.all()
        norm = float(torch.nn.utils.get_total_norm(grads)) / abs(divisor) if grads and divisor else 0.0
        skipped: Skipped = "" if norm > 0 else NOTHING
        if not math.isfinite(norm):
            skipped = NOT_FINITE
        if not skipped:
            clip = self.options.clip_norm / norm if norm > self.options.clip_norm else 1.0
            torch._foreach_mul_(grads, clip / divisor)  # pyright: ignore[reportPrivateImportUsage]
            for group in self._adam.param_groups:
                group["lr"] = rate
            self._adam.step()
            rounded = [n for n, p in self._model.items() if p is not self._master[n]]
            if rounded:
                new, old = [self._master[n] for n in rounded], [self._model[n] for n in rounded]
                torch._foreach_copy_(old, new)  # pyright: ignore[reportPrivateImportUsage]
        self.gradients.zero()
        return norm, skipped

    def state(self) -> dict[str, Tensor]:
        """Everything that a run needs to resume bit for bit, except the weights of the model itself."""
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
                    "step": state[f"step.{name}"].to(master.device if self._fused else "cpu", copy=True),
                    "exp_avg": state[f"exp_avg.{name}"].to(master.device, copy=True),
                    "exp_avg_sq": state[f"exp_avg_sq.{name}"].to(master.device, copy=True),
                }
