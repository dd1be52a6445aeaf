"""AdamW on float32 weights. A bfloat16 model has a float32 master copy of each weight: gradients are accumulated in
float32 (gradients.py), and the model gets the rounded result. A float32 model is its own master.

In sharded training (sharding.py) the parameters are float32 masters, and every rank updates its own rows. Only the norm
of the gradient needs the other ranks: all of them clip by the same norm, or skip the update together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from windfall.recipe.sections import Train
from windfall.trainer.model.gradients import Gradients
from windfall.trainer.ranks import sharded_file
from windfall.trainer.ranks.ranks import TrainerRanks
from windfall.trainer.ranks.sharding import as_shard, is_sharded, rows
from windfall.training import NOT_FINITE, NOTHING, Adam, Skipped
from windfall.weights.publish import RankRows

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's state of a weight, in torch's names."""


class Optimizer:
    def __init__(
        self,
        weights: Mapping[str, Tensor],
        options: Train,
        total_updates: int,
        *,
        ranks: TrainerRanks | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`weights`: those that are trained, by the names under which their state is saved. `dtype`: the one that a
        sharded model computes in."""
        self.options = options
        self.total_updates = total_updates
        self.updates = 0
        self.ranks = ranks or TrainerRanks.alone()
        self.dtype = dtype
        self.gradients = Gradients(weights)
        self._model = weights
        self._master: dict[str, Tensor] = {}
        """The tensors that AdamW updates, with their gradients: in sharded training the rows of this rank."""
        for name, p in self._model.items():
            self._master[name] = rows(p) if is_sharded(p) else p
            if p.dtype != torch.float32:
                self._master[name] = p.detach().float()
                self._master[name].grad = self.gradients.of(p)
        held = [m for m in self._master.values() if m.numel()]
        self._fused = bool(held) and all(m.device.type == "cuda" for m in held)
        self._adam = torch.optim.AdamW(
            held, lr=options.lr, betas=options.betas, weight_decay=options.weight_decay, fused=self._fused or None
        )

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

    def settings(self) -> Adam:
        """The recipe's settings of the next update."""
        o = self.options
        return Adam(lr=self.rate(), betas=o.betas, weight_decay=o.weight_decay, clip_norm=o.clip_norm)

    @torch.no_grad()
    def update(self, divisor: float, adam: Adam | None = None) -> tuple[float, Skipped]:
        """Divide the accumulated gradient, clip it, and take a step. Returns the norm of the divided gradient before
        clipping, and the reason if there was no step. Sets the gradient to zero.

        Without a step, the weights, the moments and Adam's own step count do not change: neither momentum nor weight
        decay may move the weights if the gradient carries no information. The learning rate schedule still counts the
        update."""
        adam = adam or self.settings()
        self.updates += 1
        grads = self._gradients()
        norm = self._norm(grads) / abs(divisor) if divisor else 0.0
        skipped: Skipped = "" if norm > 0 else NOTHING
        if not math.isfinite(norm):
            skipped = NOT_FINITE
        if not skipped:
            clip = adam.clip_norm / norm if 0 < adam.clip_norm < norm else 1.0
            if grads:
                torch._foreach_mul_(grads, clip / divisor)  # pyright: ignore[reportPrivateImportUsage]
            for group in self._adam.param_groups:
                group.update(lr=adam.lr, betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay)
            self._adam.step()
            rounded = [n for n, p in self._model.items() if p.dtype != torch.float32]
            if rounded:
                new, old = [self._master[n] for n in rounded], [self._model[n] for n in rounded]
                torch._foreach_copy_(old, new)  # pyright: ignore[reportPrivateImportUsage]
        self.zero()
        return norm, skipped

    def zero(self) -> None:
        """Set the accumulated gradient to zero."""
        self.gradients.zero()

    def _gradients(self) -> list[Tensor]:
        """The accumulated gradients of this rank, in a few tensors."""
        if not any(map(is_sharded, self._model.values())):
            return self.gradients.all()
        for name, p in self._model.items():
            self._master[name].grad = rows(p.grad) if p.grad is not None else None
        return [m.grad for m in self._master.values() if m.grad is not None and m.numel()]

    def _norm(self, grads: list[Tensor]) -> float:
        """The norm of the gradient over all ranks."""
        norm = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())
        if self.ranks.size == 1:
            return float(norm)
        return math.sqrt(float(self.ranks.sum(norm.double().square().to(self.ranks.device))))

    def tensors(self) -> Iterator[Tensor]:
        """What only training needs: masters that the model does not compute with, gradients, and Adam's moments."""
        yield from (master for name, master in self._master.items() if master is not self._model[name])
        yield from self.gradients.all()
        yield from (state[key] for state in self._adam.state.values() for key in MOMENTS)

    def state(self) -> dict[str, RankRows]:
        """Everything that a run needs to resume bit for bit, except the weights of the model itself. Every rank calls
        this, and gives its own rows of the same tensors."""
        out: dict[str, RankRows] = {"updates": RankRows(local=torch.tensor(self.updates), shape=())}
        # Weights that never had a gradient have no moments. Rank 0 knows: it has the first row of every weight.
        steps = {n: s["step"].detach().cpu() for n, m in self._master.items() if (s := self._adam.state.get(m))}
        steps = self.ranks.broadcast(steps)
        for name, p in self._model.items():
            master = self._master[name]
            if self._rounds(p):
                out[f"master.{name}"] = as_shard(p, master)
            if name in steps:
                out[f"step.{name}"] = RankRows(local=steps[name], shape=())
                moments = self._adam.state.get(master, {})
                for key in MOMENTS:  # a rank without rows of this weight has no moments, and writes nothing
                    out[f"{key}.{name}"] = as_shard(p, moments.get(key, master))
        return out

    def restore(self, path: Path) -> None:
        """Restore the state from a file, which may have been written by another number of ranks."""
        names, updates = sharded_file.names(path, self.ranks), torch.tensor(0)
        wanted: dict[str, RankRows] = {"updates": RankRows(local=updates, shape=())}
        for name, p in self._model.items():
            master = self._master[name]
            wanted[f"master.{name}"] = as_shard(p, master)
            if f"step.{name}" in names and master.numel():
                step = torch.tensor(0.0, device=master.device if self._fused else "cpu")
                moments = {key: torch.empty_like(master) for key in MOMENTS}
                self._adam.state[master] = {"step": step, **moments}
                wanted[f"step.{name}"] = RankRows(local=step, shape=())
                wanted |= {f"{key}.{name}": as_shard(p, m) for key, m in moments.items()}
        with torch.no_grad():
            sharded_file.read(path, wanted, self.ranks)
        self.updates = int(updates)

    def _rounds(self, p: Tensor) -> bool:
        """Whether the model computes with a rounded copy of this weight."""
        return self.dtype != torch.float32 if is_sharded(p) else p.dtype != torch.float32
