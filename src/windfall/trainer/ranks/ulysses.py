"""Context parallelism (Ulysses): a context group of ranks computes one pack together, each rank some of its rows.

    rank 0   rows 0..3, all heads ─┐              ┌─ rows 0..7, heads 0..3 ─┐              ┌─ rows 0..3, all heads
                                   ├─ all-to-all ─┤        attention        ├─ all-to-all ─┤
    rank 1   rows 4..7, all heads ─┘              └─ rows 0..7, heads 4..7 ─┘              └─ rows 4..7, all heads

Everything but attention treats each row by itself, so a rank needs only its own rows: embedding, layers, head, loss.
In attention a rank has all rows, but only its share of the heads. Rules:

- every rank of a group gets the same samples, and all of them have the same number of rows: zeros follow the last
  sample, where no row of a sample attends to them;
- a key/value head that several ranks need is repeated, so the size of a group may exceed the number of those heads;
- gradients are sums over the rows, so the sum over all ranks (sharding.py) is that of the whole pack. Nothing else in
  the trainer changes;
- the loss weights of a response may depend on all of its tokens. So log-probs and entropies are exchanged, and every
  rank computes the weights of the whole pack;
- all ranks of a group make the same exchanges in the same order, in the backward pass, too. What the layers keep is
  therefore agreed on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from windfall.engine.torch.packed import Packed
from windfall.trainer.model.head import WeightsFn
from windfall.trainer.model.packs import HostRows, Pack, pack_rows
from windfall.trainer.ranks import context_check
from windfall.trainer.ranks.ranks import TrainerRanks
from windfall.training import Sample


class ContextGroup:
    """The ranks that compute a pack together: by default, this one alone."""

    def __init__(self, rank: int = 0, size: int = 1, processes: Any = None) -> None:
        """`rank`: the place of this rank in the group. `processes`: the process group of torch."""
        self.rank = rank
        self.size = size
        self.processes = processes

    @staticmethod
    def of(ranks: TrainerRanks, size: int) -> ContextGroup:
        """The group of this rank. All ranks call this together."""
        return ContextGroup(ranks.rank % size, size, ranks.subgroup(size)) if size > 1 else ContextGroup()

    def pack(self, samples: Sequence[Sample], device: torch.device) -> Pack:
        """This rank's part of a pack."""
        return pack_rows(samples, device) if self.size == 1 else PackPart(self, samples, device)

    def exchange(self, blocks: Tensor) -> Tensor:
        """Send `blocks[i]` to rank i of the group, and receive one from each."""
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=self.processes)
        return received

    def gather(self, mine: Tensor) -> Tensor:
        """The tensors of all ranks of the group, which have the same shape, stacked."""
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self.processes)
        return torch.stack(found)

    def smallest(self, numbers: list[int]) -> list[int]:
        """The smallest of all ranks, number by number."""
        found = torch.tensor(numbers)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.processes)
        return found.tolist()

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """From (own rows, all heads, size) to (all rows, own heads, size), for several tensors at once."""
        blocks = [x.unflatten(1, (self.size, -1)).transpose(0, 1) for x in tensors]  # (ranks, rows, heads, size)
        widths = [x.shape[2] * x.shape[3] for x in blocks]
        received = self.exchange(torch.cat([x.flatten(2) for x in blocks], 2)).flatten(0, 1).split(widths, 1)
        return tuple(x.unflatten(1, b.shape[2:]) for x, b in zip(received, blocks, strict=True))

    def to_rows(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The inverse of `to_heads`."""
        widths = [x.shape[1] * x.shape[2] for x in tensors]
        blocks = torch.cat([x.flatten(1) for x in tensors], 1).unflatten(0, (self.size, -1))
        received = self.exchange(blocks).split(widths, 2)
        return tuple(
            y.unflatten(2, x.shape[1:]).transpose(0, 1).flatten(1, 2) for x, y in zip(tensors, received, strict=True)
        )


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ContextGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return group.to_heads(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *ctx.group.to_rows(*grads)


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ContextGroup, x: Tensor) -> Tensor:
        ctx.group = group
        return group.to_rows(x)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *ctx.group.to_heads(*grads)


class SplitAttention:
    """`Packed` for ranks that each have some rows of the pack: tensors are (own rows, all heads, size)."""

    def __init__(self, whole: Packed, group: ContextGroup) -> None:
        self.whole = whole
        self.group = group

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        q, k, v = cast(Any, _ToHeads.apply(self.group, q, *self._repeated(k, v)))
        return cast(Tensor, _ToRows.apply(self.group, self.whole.attend(q, k, v, scale, window)))

    @torch.no_grad()
    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
        q, k, v = self.group.to_heads(q, *self._repeated(k, v))
        out, sums = self.whole.forward(q, k, v, scale, window)
        return self.group.to_rows(out)[0], sums

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        kv_heads = k.shape[1]
        grad, out, q, k, v = self.group.to_heads(grad, out, q, *self._repeated(k, v))
        dq, *others = self.group.to_rows(*self.whole.backward(grad, q, k, v, out, sums, scale, window))
        dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in others)
        return dq, dk, dv

    def _repeated(self, *tensors: Tensor) -> list[Tensor]:
        """Keys and values with as many heads as can be divided among the ranks."""
        heads = tensors[0].shape[1]
        times = math.lcm(heads, self.group.size) // heads
        return [x.repeat_interleave(times, 1) if times > 1 else x for x in tensors]


class PackPart(Pack):
    """The rows of a pack that this rank of a context group computes."""

    def __init__(self, group: ContextGroup, samples: Sequence[Sample], device: torch.device) -> None:
        whole = HostRows.of(samples)
        count = -(-len(whole.ids) // group.size)
        missing = group.size * count - len(whole.ids)
        batch = Packed.of([*whole.lengths[:-1], whole.lengths[-1] + missing], device)
        owners = whole.wanted // count
        self._group = group
        self._count = count
        """Rows of each rank."""
        self._samples = len(samples)
        self._mine = owners == group.rank
        self._each = np.bincount(owners, minlength=group.size)
        """Number of wanted rows of each rank."""
        before = np.zeros(len(owners), np.int64)
        for rank, n in enumerate(self._each):
            before[owners == rank] = np.arange(n)
        self._order = torch.from_numpy(owners * self._most + before)
        """Where the numbers of each target are among those of all ranks, padded to `_most` each."""
        # A rank without a wanted row computes one with weight zero: no kernel runs on nothing.
        wanted, targets = whole.wanted[self._mine] - group.rank * count, whole.targets[self._mine]
        nothing = np.zeros(0 if len(wanted) else 1, np.int64)
        host = HostRows(
            ids=self.part(whole.ids, 0),
            positions=self.part(whole.positions, 0),
            wanted=np.concatenate((wanted, nothing)),
            targets=np.concatenate((targets, nothing)),
            lengths=[],
        )
        rows, on_device = host.on(device, SplitAttention(batch, group), agree=group.smallest)
        # In one piece: its weights are known when those of all ranks are.
        super().__init__(rows, on_device, [len(host.wanted)])

    @property
    def _most(self) -> int:
        return max(1, int(self._each.max()))

    def part(self, rows: np.ndarray, fill: int) -> np.ndarray:
        own = rows[self._group.rank * self._count :][: self._count]
        return np.pad(own, [(0, self._count - len(own))] + [(0, 0)] * (rows.ndim - 1), constant_values=fill)

    def all(self, numbers: Tensor) -> Tensor:
        mine = numbers.new_zeros(len(numbers), self._most)
        mine[:, : numbers.shape[1]] = numbers
        found = self._group.gather(mine).transpose(0, 1).flatten(1)
        return found.index_select(1, self._order.to(found.device))

    def weights_fn(self, weights_fn: WeightsFn) -> WeightsFn:
        def mine(first: int, last: int, logp: np.ndarray, entropy: np.ndarray) -> np.ndarray:
            del first, last
            weights = weights_fn(0, self._samples, *self.all(torch.from_numpy(np.stack((logp, entropy)))).numpy())
            found = np.zeros(len(logp))
            found[: self._mine.sum()] = weights[self._mine]
            return found

        return mine


def check(size: int, ranks: int, config: Any) -> None:
    """Raise WindfallError unless packs of a model with this configuration can be split over this number of ranks."""
    config = config.get_text_config()
    context_check.check(size, ranks, config.to_dict() | {"num_attention_heads": config.num_attention_heads})
