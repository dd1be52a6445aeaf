"""Adam's moments with one byte for each number.

A row of a weight is cut into blocks. A block has a float32 scale, its largest magnitude, and each number a code:

    number = scale * (code / levels) ** 4       first moment: code from -127 to 127 (the sign is that of the number)
                                                second moment: code from 0 to 255, and 0 only for the number zero

- The fourth power spends codes where numbers are small: a number of a 100th of the scale is kept to 6 % (255 levels).
- Rounding is random, with the expected value of the number itself. A moment may change by less than the distance of two
  codes in an update: rounded to the nearest one, it would never move. A hash decides, of the bits of the number, its
  place in the block and the number of the update, so that a resumed run and any number of ranks round in the same way.
- A second moment above zero never becomes zero, because the update divides by its root.
- Only square roots and products are used, which every device rounds in the same way.

Blocks never cross rows, so that they do not depend on how many ranks a weight is split over.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

LARGEST_BLOCK, SMALLEST_BLOCK = 256, 32
SIGNED, UNSIGNED = torch.int8, torch.uint8
LEVELS = {SIGNED: 127, UNSIGNED: 255}
_HASH, _HASH_AGAIN, _PLACE, _BITS = -1_640_531_535, -2_048_144_777, 40_503, 24
"""Primes of xxHash; a factor for places; high bits of the hash that are used."""
_SMALLEST_SCALE = 1e-38


def block_size(shape: Sequence[int]) -> int:
    """Numbers in a block of a weight of this shape: the largest divisor of a row that is not too large. 0: it has none,
    such as a vector, and keeps its moments in float32.

    >>> block_size((4096, 11_008)), block_size((10, 576)), block_size((4096,)), block_size((7, 521))
    (256, 192, 0, 0)
    """
    row = prod(shape[1:])
    return max((n for n in range(SMALLEST_BLOCK, LARGEST_BLOCK + 1) if row % n == 0), default=0)


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """The numbers in float32. `codes` and `scales` are flat."""
    x = codes.float().div_(LEVELS[codes.dtype])
    power = x.square().square_()
    if codes.dtype == SIGNED:
        power.copysign_(x)
    return power.view(len(scales), -1).mul_(scales[:, None]).view(-1)


def encode(numbers: Tensor, codes: Tensor, scales: Tensor, step: int) -> None:
    """Write the codes and scales of flat float32 numbers. `step`: number of the update."""
    blocks, levels = numbers.view(len(scales), -1), LEVELS[codes.dtype]
    share = blocks.abs()
    torch.amax(share, 1, out=scales)
    share.div_(scales.clamp_min(_SMALLEST_SCALE)[:, None])
    code = share.sqrt().sqrt_().mul_(levels).floor_()
    low = (code / levels).square_().square_()
    gap = ((code + 1) / levels).square_().square_().sub_(low)
    code += share.sub_(low).div_(gap) > _draws(blocks, step)
    code.clamp_max_(levels)
    if codes.dtype == SIGNED:
        code.copysign_(blocks)
    else:
        code.clamp_min_(blocks > 0)
    codes.copy_(code.view(-1))


def _draws(blocks: Tensor, step: int) -> Tensor:
    """For each number one from 0 to 1."""
    places = torch.arange(blocks.shape[1], dtype=torch.int32, device=blocks.device) * _PLACE + step
    mixed = (blocks.view(torch.int32) + places).mul_(_HASH)
    mixed = mixed.bitwise_xor_(mixed >> 15).mul_(_HASH_AGAIN)
    return (mixed >> (32 - _BITS)).bitwise_and_((1 << _BITS) - 1) / float(1 << _BITS)
