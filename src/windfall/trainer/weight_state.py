"""The float32 state of trained weights, on the device or in host memory, and AdamW's update of it.

    copy in     │ chunk 1 │ chunk 2 │ chunk 3 │ chunk 4 │
    AdamW                 │ 1 │     │ 2 │     │ 3 │     │ 4 │
    copy out                  │ chunk 1 │ chunk 2 │ chunk 3 │ chunk 4 │

The state of a weight is its master and Adam's two moments. If it is in host memory, that is pinned: a chunk is copied
to the device, updated and copied back, while its neighbors are on their way in the other direction. Two buffers take
turns. The arithmetic is per number, so the result is the same bit for bit wherever the state is. On a CPU the same code
copies within memory, one chunk after the other.

The state of a weight is never divided between device and host, so that a checkpoint finds every tensor whole.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from windfall.errors import WindfallError
from windfall.trainer.ranks.sharding import rows
from windfall.training import Adam

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's state of a weight, in torch's names."""
CHUNK = 1 << 25
"""Weights of one chunk. A buffer has two or three float32 numbers for each."""
ALIGNED = 64
"""Parts of a buffer begin at multiples of this, for fast kernels."""
PINNING_THREADS = 8


class HostMemory:
    """Float32 numbers in memory of the machine, all zero at first. `pinned`: a GPU reads and writes it directly."""

    def __init__(self, numbers: int, *, pinned: bool) -> None:
        self._free = torch.zeros(0)
        nbytes = 4 * numbers
        memory = mmap.mmap(-1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)  # there are fewer pages to pin
        self._free = torch.frombuffer(memory, dtype=torch.float32)
        if pinned:
            cuda: Any = torch.cuda.cudart()
            error = int(cuda.cudaHostRegister(self._free.data_ptr(), nbytes, 0))
            if error:
                raise WindfallError(
                    f"{nbytes / 1e9:.1f} GB of host memory cannot be pinned (CUDA error {error})",
                    where="train.offload",
                    fix="Give the machine or the container more memory, or use more ranks.",
                )
            # Not at exit: the process then ends with all of its memory.
            weakref.finalize(self, cuda.cudaHostUnregister, self._free.data_ptr()).atexit = False

    def take(self, shape: Sequence[int]) -> Tensor:
        """The next numbers, as a tensor of this shape."""
        taken, self._free = self._free.split([prod(shape), len(self._free) - prod(shape)])
        return taken.view(*shape)


class WeightState:
    """What training keeps of a weight, besides its gradient."""

    def __init__(self, weight: Tensor, memory: HostMemory | None = None) -> None:
        """`weight`: what the model computes with; in sharded training a rank has some of its rows. In float32 it is its
        own master. `memory`: for the state; None keeps it on the device of the weight."""
        self._whole, self._memory = weight, memory
        self.own_master = weight.dtype == torch.float32
        self.steps = 0
        """Updates so far. Before the first one there are no moments on the device."""
        self.moments: tuple[Tensor, ...] = ()
        self._master: Tensor | None = None
        mine = self.weight
        if not self.own_master:
            self._master = mine.float() if memory is None else memory.take(mine.shape).copy_(mine)
        if memory is not None:
            self.moments = tuple(memory.take(mine.shape) for _ in MOMENTS)

    @property
    def weight(self) -> Tensor:
        """The rows of this rank. An engine that shares the model may have given them other memory."""
        return rows(self._whole)

    @property
    def master(self) -> Tensor:
        return self.weight if self._master is None else self._master

    @property
    def away(self) -> bool:
        """Whether it is in host memory."""
        return self._memory is not None

    def make_moments(self) -> tuple[Tensor, ...]:
        if not self.moments:
            self.moments = tuple(torch.zeros_like(self.master) for _ in MOMENTS)
        return self.moments

    @property
    def moved(self) -> list[Tensor]:
        """What an update copies to the device and back."""
        return self._kept if self.away else []

    @property
    def on_device(self) -> list[Tensor]:
        """The tensors on the device besides the weight."""
        return [] if self.away else self._kept

    @property
    def _kept(self) -> list[Tensor]:
        return [*self.moments, *(() if self._master is None else (self._master,))]


def make_states(weights: Sequence[Tensor], away: Sequence[bool]) -> list[WeightState]:
    """The states of these weights; those that are `away` in host memory, which takes time to pin."""
    each = [2 if p.dtype == torch.float32 else 3 for p in weights]
    numbers = [rows(p).numel() * n * far for p, n, far in zip(weights, each, away, strict=True)]
    pinned = any(p.device.type == "cuda" for p in weights)
    with ThreadPoolExecutor(PINNING_THREADS) as threads:
        memories = list(threads.map(lambda n: HostMemory(n, pinned=pinned) if n else None, numbers))
    return [WeightState(p, memory) for p, memory in zip(weights, memories, strict=True)]


class _Piece(NamedTuple):
    """Numbers `start` to `stop` of a weight, and where they are in a buffer."""

    state: WeightState
    grad: Tensor
    start: int
    stop: int
    at: int

    def of(self, t: Tensor) -> Tensor:
        return t.reshape(-1)[self.start : self.stop]

    def buffer(self, row: Tensor) -> Tensor:
        return row[self.at : self.at + self.stop - self.start]


def update(states: Sequence[WeightState], grads: Sequence[Tensor], adam: Adam) -> int:
    """One step of AdamW. Returns the bytes that were copied from and to host memory; the copies have ended."""
    here, away = [], []
    for state, grad in zip(states, grads, strict=True):
        state.steps += 1
        (away if state.away else here).append((state, grad))
    if here:
        _step(adam, [(s.master, grad, *s.make_moments(), s.steps) for s, grad in here])
        rounded = [s for s, _ in here if not s.own_master]
        if rounded:
            torch._foreach_copy_([s.weight for s in rounded], [s.master for s in rounded])  # pyright: ignore[reportPrivateImportUsage]
    if away:
        _step_in_chunks(away, adam)
    return sum(2 * t.nbytes for state, _ in away for t in state.moved)


def _step_in_chunks(states: Sequence[tuple[WeightState, Tensor]], adam: Adam) -> None:
    device = states[0][0].weight.device
    cuda: Any = torch.cuda if device.type == "cuda" else torch.cpu
    computing, copying_in, copying_out = cuda.current_stream(), cuda.Stream(), cuda.Stream()
    rows, length = max(len(s.moved) for s, _ in states), min(CHUNK, sum(_aligned(s.weight.numel()) for s, _ in states))
    buffers = [torch.empty(rows, length, device=device) for _ in range(2)]
    copied: list[Any] = [None, None]
    """When the last chunk of each buffer was copied back."""
    copying_in.wait_stream(computing)  # the buffers may be memory that earlier work still uses
    for number, pieces in enumerate(_chunks(states, length)):
        which = number % 2
        with cuda.stream(copying_in):
            if copied[which] is not None:
                copying_in.wait_event(copied[which])
            _copy(pieces, buffers[which], to_host=False)
        computing.wait_stream(copying_in)
        _step(adam, [_arguments(piece, buffers[which]) for piece in pieces])
        for piece in pieces:
            if not piece.state.own_master:
                piece.of(piece.state.weight).copy_(piece.buffer(buffers[which][2]))
        copying_out.wait_stream(computing)
        with cuda.stream(copying_out):
            _copy(pieces, buffers[which], to_host=True)
            copied[which] = copying_out.record_event()
    cuda.synchronize()


def _chunks(states: Sequence[tuple[WeightState, Tensor]], length: int) -> Iterator[list[_Piece]]:
    chunk: list[_Piece] = []
    at = 0
    for state, grad in states:
        start, whole = 0, state.weight.numel()
        while start < whole:
            if at >= length:
                yield chunk
                chunk, at = [], 0
            stop = min(whole, start + length - at)
            chunk.append(_Piece(state, grad, start, stop, at))
            at, start = at + _aligned(stop - start), stop
    yield chunk


def _copy(pieces: Sequence[_Piece], buffer: Tensor, *, to_host: bool) -> None:
    for piece in pieces:
        for row, tensor in zip(buffer, piece.state.moved, strict=False):
            there, here = piece.of(tensor), piece.buffer(row)
            (there if to_host else here).copy_(here if to_host else there, non_blocking=True)


def _arguments(piece: _Piece, buffer: Tensor) -> tuple[Any, ...]:
    first, second, *master = (piece.buffer(row) for row in buffer)
    own = piece.state.own_master
    return piece.of(piece.state.weight) if own else master[0], piece.of(piece.grad), first, second, piece.state.steps


def _step(adam: Adam, rows: Sequence[tuple[Any, ...]]) -> None:
    """AdamW on rows of (master, gradient, first moment, second moment, number of this update)."""
    masters, grads, first, second, steps = map(list, zip(*rows, strict=True))
    fused = all(t.device.type == "cuda" for t in masters)
    before = torch.tensor(steps, dtype=torch.float32) - 1.0  # the function counts them
    counts = list((before.to(masters[0].device, non_blocking=True) if fused else before).unbind())
    adamw(
        masters, grads, first, second, [], counts, fused=fused or None, amsgrad=False, beta1=adam.betas[0],
        beta2=adam.betas[1], lr=adam.lr, weight_decay=adam.weight_decay, eps=adam.eps, maximize=False,
    )  # fmt: skip


def _aligned(numbers: int) -> int:
    return -(-numbers // ALIGNED) * ALIGNED
