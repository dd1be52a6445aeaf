"""A pack on the device: samples concatenated into rows, one row per token. Makes one copy to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from windfall.engine.torch.packed import Packed
from windfall.trainer.model.head import WeightsFn
from windfall.training import Sample


class PackAttention(Protocol):
    """`Packed` (engine/torch/packed.py), or another one that computes the same."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor: ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRows:
    ids: Tensor
    positions: Tensor
    wanted: Tensor
    """Indices of the rows whose hidden states are needed."""
    batch: PackAttention
    agree: Callable[[list[int]], list[int]] | None = None
    """If other ranks compute parts of the same pack: the smallest numbers of all of them, for every layer. All ranks
    must then make the same exchanges, so what a layer keeps cannot depend on the memory of one rank."""


class Pack:
    """The rows of a pack that this rank computes: all of them."""

    def __init__(self, rows: PackedRows, targets: Tensor, sizes: Sequence[int]) -> None:
        self.rows = rows
        self.targets = targets
        """The tokens that the wanted rows predict."""
        self.sizes = sizes
        """Numbers of wanted rows that are processed together: those of each sample."""

    def part(self, rows: np.ndarray, fill: int) -> np.ndarray:
        """From the rows of the whole pack to those of this rank, which may have rows of `fill` after the last one."""
        return rows

    def all(self, numbers: Tensor) -> Tensor:
        """From numbers (n, wanted rows) of this rank to those of the whole pack, in the order of its targets."""
        return numbers

    def weights_fn(self, weights_fn: WeightsFn) -> WeightsFn:
        """From the loss weights of the whole pack to those of this rank's rows."""
        return weights_fn


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRows:
    """A pack in the memory of the host."""

    ids: np.ndarray
    positions: np.ndarray
    wanted: np.ndarray
    targets: np.ndarray
    lengths: list[int]

    @staticmethod
    def of(samples: Sequence[Sample]) -> HostRows:
        lengths = [len(s.ids) for s in samples]
        starts = [0, *accumulate(lengths)]
        total, count = starts[-1], sum(len(s.targets) for s in samples)
        ids = np.fromiter(chain.from_iterable(s.ids for s in samples), np.int64, total)
        at = np.fromiter(chain.from_iterable(s.targets for s in samples), np.int64, count)
        at += np.repeat(starts[:-1], [len(s.targets) for s in samples])
        targets = ids[at]
        if any(s.labels is not None for s in samples):
            given = [np.take(s.ids, s.targets) if s.labels is None else s.labels for s in samples]
            targets = np.concatenate(given).astype(np.int64)
        positions = np.arange(total) - np.repeat(starts[:-1], lengths)
        return HostRows(ids=ids, positions=positions, wanted=at - 1, targets=targets, lengths=lengths)

    def on(self, device: torch.device, batch: PackAttention, **more: Any) -> tuple[PackedRows, Tensor]:
        """The rows on the device, and the tokens that they predict."""
        columns = (self.ids, self.positions, self.wanted, self.targets)
        on_device = torch.from_numpy(np.concatenate(columns))
        if device.type == "cuda":
            on_device = on_device.pin_memory().to(device, non_blocking=True)
        ids, positions, wanted, targets = on_device.split([len(x) for x in columns])
        return PackedRows(ids=ids, positions=positions, wanted=wanted, batch=batch, **more), targets


def pack_rows(samples: Sequence[Sample], device: torch.device) -> Pack:
    """A whole pack."""
    host = HostRows.of(samples)
    return Pack(*host.on(device, Packed.of(host.lengths, device)), [len(s.targets) for s in samples])
