"""AdamW on float32 weights. A bfloat16 model has a float32 master copy of each weight: gradients are accumulated in
float32 (gradients.py), and the model gets the rounded result. A float32 model is its own master.

In sharded training (sharding.py) the parameters are float32 masters, and every rank updates its own rows. Only the norm
of the gradient needs the other ranks: all of them clip by the same norm, or skip the update together. Every rank has
all adapters: their gradients are summed over the ranks once, and every rank makes the same update.

Where masters and moments are is decided by ranks/state_layout.py; adam/weight_state.py keeps and updates them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from windfall.recipe.sections import Train
from windfall.trainer.adam.weight_state import FIRST, SCALE, make_states, state_bytes, update
from windfall.trainer.model.gradients import Gradients
from windfall.trainer.ranks import sharded_file
from windfall.trainer.ranks.ranks import TrainerRanks
from windfall.trainer.ranks.sharding import as_shard, is_sharded, rows
from windfall.trainer.ranks.state_layout import put_away
from windfall.training import NOT_FINITE, NOTHING, Adam, Skipped
from windfall.weights.publishing.publish import RankRows


class Optimizer:
    def __init__(
        self,
        weights: Mapping[str, Tensor],
        options: Train,
        total_updates: int,
        *,
        ranks: TrainerRanks | None = None,
        dtype: torch.dtype = torch.float32,
        host_share: float = 0.0,
    ) -> None:
        """`weights`: those that are trained, by the names under which their state is saved. `dtype`: the one that a
        sharded model computes in. `host_share`: of masters and moments, how much is in host memory."""
        self.options = options
        self.total_updates = total_updates
        self.updates = 0
        self.ranks = ranks or TrainerRanks.alone()
        self.dtype = dtype
        self.gradients = Gradients(weights, together=self.ranks.distributed)
        self._model = weights
        eight_bit, all_weights = options.optimizer == "adamw_8bit", list(weights.values())
        away = put_away([state_bytes(p, eight_bit=eight_bit) for p in all_weights], host_share)
        self._states = dict(zip(weights, make_states(all_weights, away, eight_bit=eight_bit), strict=True))
        self.update_s = 0.0
        """Seconds of the last update, until the weights were ready."""
        self.moved_bytes = 0
        """Bytes that the last update copied from and to host memory."""

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
        self._wait_for_device()
        adam, began_s, self.moved_bytes = adam or self.settings(), time.monotonic(), 0
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
            found = {name: rows(p.grad) for name, p in self._model.items() if p.grad is not None and rows(p).numel()}
            self.moved_bytes = update([self._states[name] for name in found], list(found.values()), adam)
        self.zero()
        self._wait_for_device()
        self.update_s = time.monotonic() - began_s
        return norm, skipped

    def zero(self) -> None:
        """Set the accumulated gradient to zero."""
        self.gradients.zero()

    def _gradients(self) -> list[Tensor]:
        """The accumulated gradients of this rank, in a few tensors; those of adapters are summed over the ranks."""
        if not self.gradients.sharded:
            return [self.ranks.sum(each) for each in self.gradients.all()]
        return [rows(p.grad) for p in self._model.values() if p.grad is not None and rows(p).numel()]

    def _norm(self, grads: list[Tensor]) -> float:
        """The norm of the gradient over all ranks."""
        norm = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())
        if self.ranks.size == 1 or not self.gradients.sharded:
            return float(norm)
        return math.sqrt(float(self.ranks.sum(norm.double().square().to(self.ranks.device))))

    def tensors(self) -> Iterator[Tensor]:
        """What only training needs on the device: masters that the model does not compute with, Adam's moments, and
        gradients."""
        for state in self._states.values():
            yield from state.on_device
        yield from self.gradients.all()

    def state(self) -> dict[str, RankRows]:
        """Everything that a run needs to resume bit for bit, except the weights of the model itself. Every rank calls
        this, and gives its own rows of the same tensors."""
        out: dict[str, RankRows] = {"updates": RankRows(local=torch.tensor(self.updates), shape=())}
        # Weights that never had a gradient have no moments. Rank 0 knows: it has the first row of every weight.
        steps = self.ranks.broadcast({name: s.steps for name, s in self._states.items() if s.steps})
        for name, p in self._model.items():
            state = self._states[name]
            if self._rounds(p):
                out[f"master.{name}"] = as_shard(p, state.master)
            if name in steps:
                out[f"step.{name}"] = RankRows(local=torch.tensor(float(steps[name])), shape=())
                # Those of a rank without rows of this weight are empty.
                out |= {f"{key}.{name}": as_shard(p, moment) for key, moment in state.make_moments().items()}
        return out

    def restore(self, path: Path) -> None:
        """Restore the state from a file, which may have been written by another number of ranks."""
        names, numbers = sharded_file.names(path, self.ranks), {"updates": torch.tensor(0)}
        wanted: dict[str, RankRows] = {}
        for name, p in self._model.items():
            state = self._states[name]
            wanted[f"master.{name}"] = as_shard(p, state.master)
            if f"step.{name}" in names and p.numel():
                numbers[f"step.{name}"] = torch.tensor(0.0)
                if (f"{FIRST}{SCALE}.{name}" in names) != bool(state.block):
                    raise ValueError(f"it is not that of train.optimizer = {self.options.optimizer!r}")
                wanted |= {f"{key}.{name}": as_shard(p, moment) for key, moment in state.make_moments().items()}
        wanted |= {name: RankRows(local=number, shape=()) for name, number in numbers.items()}
        with torch.no_grad():
            sharded_file.read(path, wanted, self.ranks)
        self.updates = int(numbers.pop("updates"))
        for name, number in numbers.items():
            self._states[name.partition(".")[2]].steps = int(number)

    def _wait_for_device(self) -> None:
        if any(p.device.type == "cuda" for p in self._model.values()):
            torch.cuda.synchronize()

    def _rounds(self, p: Tensor) -> bool:
        """Whether the model computes with a rounded copy of this weight."""
        return self.dtype != torch.float32 if is_sharded(p) else p.dtype != torch.float32
