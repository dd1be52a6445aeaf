"""The state of trained weights, on the device or in host memory, and AdamW's update of it.

    copy in     │ chunk 1 │ chunk 2 │ chunk 3 │ chunk 4 │
    AdamW                 │ 1 │     │ 2 │     │ 3 │     │ 4 │
    copy out                  │ chunk 1 │ chunk 2 │ chunk 3 │ chunk 4 │

The state of a weight is its master in float32 and Adam's two moments, in float32 or 8 bits (eight_bit.py). If it is in
host memory, that is pinned: a chunk is copied to the device, updated and copied back, while its neighbors are on their
way in the other direction. Two buffers take turns. The arithmetic is per number, and that of 8 bits per block, so the
result is the same bit for bit wherever the state is. On a CPU the same code copies within memory, one chunk after the
other. Moments of 8 bits are updated in chunks on the device, too: no more than a chunk is in float32 at a time.

The state of a weight is never divided between device and host, so that a checkpoint finds every tensor whole.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from windfall.errors import WindfallError
from windfall.trainer.adam import eight_bit
from windfall.trainer.ranks.sharding import rows
from windfall.training import Adam

FIRST, SECOND = "exp_avg", "exp_avg_sq"
"""Adam's moments of a weight, in torch's names."""
SCALE = "_scale"
"""What the name of a moment's scales ends with, if it has 8 bits."""
MASTER = "master"
CHUNK = 1 << 24
"""Weights of one chunk. A buffer has at most three float32 numbers for each."""
ALIGNED = 256
"""Tensors in a buffer begin at multiples of this many bytes, because kernels are faster then."""
PINNING_THREADS = 8


class StateBuffer:
    """Memory from which tensors are taken, one after the other."""

    def __init__(self, data: Tensor) -> None:
        self._free = data

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next bytes, as a tensor of this shape."""
        nbytes = prod(shape) * dtype.itemsize
        taken, self._free = self._free.split([_aligned(nbytes), len(self._free) - _aligned(nbytes)])
        return taken[:nbytes].view(dtype).view(*shape)


class HostMemory(StateBuffer):
    """Memory of the machine, all zero at first. `pinned`: a GPU reads and writes it directly."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        memory = mmap.mmap(-1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)  # there are fewer pages to pin
        super().__init__(torch.frombuffer(memory, dtype=torch.uint8))
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


class WeightState:
    """What training keeps of a weight, besides its gradient."""

    def __init__(self, weight: Tensor, memory: StateBuffer | None = None, *, eight_bit: bool = False) -> None:
        """`weight`: what the model computes with; in sharded training a rank has some of its rows. In float32 it is its
        own master. `memory`: for the state; None keeps it on the device of the weight. `eight_bit`: keep the moments in
        8 bits, if its rows can be cut into blocks."""
        self._whole, self._memory = weight, memory
        self.layout = _layout(weight, eight_bit)
        self.block = _block(weight) if eight_bit else 0
        """Numbers that share a scale; 0: the moments are in float32."""
        self.steps = 0
        """Updates so far. Before the first one there are no moments on the device."""
        self.moments: dict[str, Tensor] = {}
        """By the names under which they are saved: their numbers, or codes and scales."""
        self._master: Tensor | None = None
        if MASTER in self.layout:
            self._master = self._new(MASTER).copy_(self.weight)
        if memory is not None:
            self.make_moments()

    def _new(self, name: str) -> Tensor:
        """The tensor of this name, zero at first."""
        if self._memory is not None:
            return self._memory.take(*self.layout[name])
        shape, dtype = self.layout[name]
        return torch.zeros(shape, dtype=dtype, device=self.weight.device)

    @property
    def weight(self) -> Tensor:
        """The rows of this rank. An engine that shares the model may have given them other memory."""
        return rows(self._whole)

    @property
    def master(self) -> Tensor:
        return self.weight if self._master is None else self._master

    @property
    def own_master(self) -> bool:
        return self._master is None

    @property
    def away(self) -> bool:
        """Whether it is in host memory."""
        return self._memory is not None

    def make_moments(self) -> dict[str, Tensor]:
        if not self.moments:
            self.moments = {name: self._new(name) for name in self.layout if name != MASTER}
        return self.moments

    @property
    def kept(self) -> dict[str, Tensor]:
        """All tensors besides the weight."""
        return self.moments | ({} if self._master is None else {MASTER: self._master})

    @property
    def on_device(self) -> list[Tensor]:
        """Those on the device."""
        return [] if self.away else list(self.kept.values())

    @property
    def moved_bytes(self) -> int:
        """What an update copies to the device and back."""
        return sum(2 * t.nbytes for t in self.kept.values()) if self.away else 0


def _block(weight: Tensor) -> int:
    return eight_bit.block_size(weight.shape)


def _layout(weight: Tensor, coded: bool) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of the state of a weight, for the rows of this rank."""
    mine, block = tuple(rows(weight).shape), _block(weight) if coded else 0
    out = {FIRST: (mine, torch.float32), SECOND: (mine, torch.float32)}
    if block:
        scales = ((mine[0], prod(mine[1:]) // block), torch.float32)
        out = {FIRST: (mine, eight_bit.SIGNED), SECOND: (mine, eight_bit.UNSIGNED)}
        out |= {FIRST + SCALE: scales, SECOND + SCALE: scales}
    return out if weight.dtype == torch.float32 else out | {MASTER: (mine, torch.float32)}


def state_bytes(weight: Tensor, *, eight_bit: bool = False) -> int:
    """Bytes of a buffer that the state of a weight needs."""
    return sum(_aligned(prod(shape) * dtype.itemsize) for shape, dtype in _layout(weight, eight_bit).values())


def make_states(weights: Sequence[Tensor], away: Sequence[bool], *, eight_bit: bool = False) -> list[WeightState]:
    """The states of these weights; those that are `away` in host memory, which takes time to pin."""
    nbytes = [state_bytes(p, eight_bit=eight_bit) * far for p, far in zip(weights, away, strict=True)]
    pinned = any(p.device.type == "cuda" for p in weights)
    with ThreadPoolExecutor(PINNING_THREADS) as threads:
        memories = list(threads.map(lambda n: HostMemory(n, pinned=pinned) if n else None, nbytes))
    return [WeightState(p, memory, eight_bit=eight_bit) for p, memory in zip(weights, memories, strict=True)]


class _Piece(NamedTuple):
    """Numbers `start` to `stop` of a weight."""

    state: WeightState
    grad: Tensor
    start: int
    stop: int

    def of(self, t: Tensor) -> Tensor:
        """Its part of a tensor with one number for each of the weight, or for each block."""
        each = self.state.weight.numel() // t.numel()
        return t.reshape(-1)[self.start // each : self.stop // each]

    def kept(self) -> dict[str, Tensor]:
        return {name: self.of(t) for name, t in self.state.kept.items()}


def update(states: Sequence[WeightState], grads: Sequence[Tensor], adam: Adam) -> int:
    """One step of AdamW. Returns the bytes that were copied from and to host memory; the copies have ended."""
    here, coded, away = [], [], []
    for state, grad in zip(states, grads, strict=True):
        state.steps += 1
        state.make_moments()
        (away if state.away else coded if state.block else here).append((state, grad))
    if here:
        _step(adam, [(s.master, grad, s.moments[FIRST], s.moments[SECOND], s.steps) for s, grad in here])
        rounded = [s for s, _ in here if not s.own_master]
        if rounded:
            torch._foreach_copy_([s.weight for s in rounded], [s.master for s in rounded])  # pyright: ignore[reportPrivateImportUsage]
    for chunk in _chunks(coded):
        _step_pieces([(piece, piece.kept()) for piece in chunk], adam)
    if away:
        _step_in_host_memory(list(_chunks(away)), away[0][0].weight.device, adam)
    return sum(state.moved_bytes for state, _ in away)


def _step_in_host_memory(chunks: Sequence[Sequence[_Piece]], device: torch.device, adam: Adam) -> None:
    cuda: Any = torch.cuda if device.type == "cuda" else torch.cpu
    computing, copying_in, copying_out = cuda.current_stream(), cuda.Stream(), cuda.Stream()
    needed = max(sum(_aligned(t.nbytes) for piece in chunk for t in piece.kept().values()) for chunk in chunks)
    buffers = [torch.empty(needed, dtype=torch.uint8, device=device) for _ in range(2)]
    copied: list[Any] = [None, None]
    """When the last chunk of each buffer was copied back."""
    copying_in.wait_stream(computing)  # the buffers may be memory that earlier work still uses
    for number, chunk in enumerate(chunks):
        which = number % 2
        free = StateBuffer(buffers[which])
        pairs = [(t, free.take(t.shape, t.dtype)) for piece in chunk for t in piece.kept().values()]
        with cuda.stream(copying_in):
            if copied[which] is not None:
                copying_in.wait_event(copied[which])
            for there, here in pairs:
                here.copy_(there, non_blocking=True)
        computing.wait_stream(copying_in)
        parts = iter(here for _, here in pairs)
        _step_pieces([(piece, {name: next(parts) for name in piece.state.kept}) for piece in chunk], adam)
        copying_out.wait_stream(computing)
        with cuda.stream(copying_out):
            for there, here in pairs:
                there.copy_(here, non_blocking=True)
            copied[which] = copying_out.record_event()
    cuda.synchronize()


def _chunks(states: Sequence[tuple[WeightState, Tensor]]) -> Iterator[list[_Piece]]:
    """Pieces of at most CHUNK numbers together. They begin and end with a block."""
    chunk: list[_Piece] = []
    left = CHUNK
    for state, grad in states:
        start, whole = 0, state.weight.numel()
        while start < whole:
            count = min(whole - start, left - left % (state.block or 1))
            if not count:
                if chunk:
                    yield chunk
                chunk, left = [], max(CHUNK, state.block)
                continue
            chunk.append(_Piece(state, grad, start, start + count))
            start, left = start + count, left - count
    if chunk:
        yield chunk


def _step_pieces(chunk: Sequence[tuple[_Piece, Mapping[str, Tensor]]], adam: Adam) -> None:
    """Update pieces of weights. With each: its part of the state, on the device."""
    arguments = []
    for piece, kept in chunk:
        weight, (first, second) = piece.of(piece.state.weight), (kept[FIRST], kept[SECOND])
        if piece.state.block:
            first, second = (eight_bit.decode(kept[name], kept[name + SCALE]) for name in (FIRST, SECOND))
        arguments.append((kept.get(MASTER, weight), piece.of(piece.grad), first, second, piece.state.steps))
    _step(adam, arguments)
    for (piece, kept), (master, _, first, second, _) in zip(chunk, arguments, strict=True):
        if MASTER in kept:
            piece.of(piece.state.weight).copy_(master)
        if piece.state.block:
            for name, numbers in ((FIRST, first), (SECOND, second)):
                eight_bit.encode(numbers, kept[name], kept[name + SCALE], piece.state.steps)


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


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED
