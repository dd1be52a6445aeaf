# pyright: reportMissingImports=false, reportIndexIssue=false
"""Sampling on the device: like `windfall.engine.torch.sampler`, from logits and (seed, position).

There are two kernels. The first reads all logits once and stores the maximum and the sum of every block of the
vocabulary. The second finds the block in which the cumulative sum passes the target, and the token within that block.

Rules:
- the same logits, shape, seed and position give the same token: nothing depends on the order in which programs run;
- blocks are summed in float64 and values within a block in float32, so a token differs from the sampler's only where
  the target is within rounding of a token's boundary;
- whatever the logits are, the token is in the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from windfall.engine.cuda import sampling
from windfall.engine.cuda.kernels import launch
from windfall.engine.cuda.state import DeviceState

_BLOCK, _WARPS = 4096, 4
_TRUNCATED_ROWS = 32  # rows sorted at a time when top-k or top-p is used: it bounds the memory of that slower path


@triton.jit
def _inverse_temperature(TEMPERATURE, slot):
    """Factor by which differences of logits are multiplied before exp2."""
    temperature = tl.load(TEMPERATURE + slot)
    return 1.4426950408889634 / tl.where(temperature == 0.0, 1.0, temperature)


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["ROWS", "LEFT", "TEMPERATURE"])
def _block_sums(LOGITS, ROWS, LEFT, TEMPERATURE, MAXIMA, SUMS, size, stride, blocks, width,
            BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    if PDL:
        gdc_wait()
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(ROWS + row // width)
    if tl.load(LEFT + slot) > row % width:
        i = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(LOGITS + row * stride + i, mask=i < size, other=-float("inf")).to(tl.float32)
        m = tl.maximum(tl.max(x, 0), -1e30)  # all logits of a block may be -inf
        tl.store(MAXIMA + row * blocks + block, m)
        tl.store(SUMS + row * blocks + block, tl.sum(tl.exp2((x - m) * _inverse_temperature(TEMPERATURE, slot)), 0))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """One number in [0, 1) as float64."""
    golden: tl.constexpr = 0x9E3779B97F4A7C15
    bits = _mix(_mix(seed.to(tl.uint64, bitcast=True) + golden) + (position + 1).to(tl.uint64) * golden)
    return (bits >> 12).to(tl.float64) * 2.220446049250313e-16


@triton.jit(
    do_not_specialize=["width"],
    do_not_specialize_on_alignment=[
        "ROWS", "LEFT", "POSITION", "SEED", "TEMPERATURE", "TOKENS", "LOGPROBS",
    ]
)  # fmt: skip
def _choose_token(
    LOGITS, ROWS, LEFT, POSITION, SEED, TEMPERATURE, MAXIMA, SUMS, TOKENS, LOGPROBS, size, stride, blocks, width,
    BLOCK: tl.constexpr, BLOCKS_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot, ahead = tl.load(ROWS + row // width), row % width
    if tl.load(LEFT + slot) <= ahead:
        tl.store(TOKENS + row, -1)
        tl.store(LOGPROBS + row, 0.0)
        return
    position = tl.load(POSITION + slot) + ahead
    b = tl.arange(0, BLOCKS_P)
    maxima = tl.load(MAXIMA + row * blocks + b, mask=b < blocks, other=-1e30)
    sums = tl.load(SUMS + row * blocks + b, mask=b < blocks, other=0.0)
    m = tl.max(maxima, 0)
    inverse = _inverse_temperature(TEMPERATURE, slot)
    sums = sums.to(tl.float64) * tl.exp2((maxima - m) * inverse).to(tl.float64)
    before = tl.cumsum(sums, 0) - sums
    total = tl.sum(sums, 0)
    goal = _uniform(tl.load(SEED + slot), position) * total
    greedy = tl.load(TEMPERATURE + slot) == 0.0
    # The last nonempty block that begins at or before the goal; for greedy, the first block with the maximum.
    drawn = tl.max(tl.where((before <= goal) & (sums > 0), b, 0), 0)
    block = tl.where(greedy, tl.min(tl.where(maxima == m, b, BLOCKS_P), 0), drawn)
    block = tl.minimum(block, blocks - 1)

    i = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(LOGITS + row * stride + i, mask=i < size, other=-float("inf")).to(tl.float32)
    p = tl.exp2((x - m) * inverse)
    rest = (goal - tl.sum(tl.where(b == block, before, 0.0), 0)).to(tl.float32)
    passed = (tl.cumsum(p, 0) > rest) & (p > 0)
    found = tl.min(tl.where(passed, i, size), 0)
    # Rounding may leave the sum of the block below the goal: then take its last token with a nonzero probability.
    found = tl.where(found < size, found, tl.max(tl.where(p > 0, i, 0), 0))
    token = tl.where(greedy, tl.min(tl.where(x == m, i, size), 0), found)
    token = tl.minimum(token, size - 1)
    chosen = tl.sum(tl.where(i == token, x, 0.0), 0)
    tl.store(TOKENS + row, token)
    tl.store(LOGPROBS + row, (chosen - m) * inverse * 0.6931471805599453 - tl.log(total.to(tl.float32)))


def sample(
    logits: Tensor, rows: Tensor, state: DeviceState, tokens_out: Tensor, logprobs_out: Tensor, truncate: bool,
    width: int = 1,
) -> None:  # fmt: skip
    """See engine/cuda/sampling.py."""
    count, size = logits.shape
    if truncate:
        each = _TRUNCATED_ROWS // width
        for i in range(0, len(rows), each):
            some, part = slice(i, i + each), slice(i * width, (i + each) * width)
            sampling.sample(logits[part], rows[some], state, tokens_out[part], logprobs_out[part], True, width)
        return
    blocks = triton.cdiv(size, _BLOCK)
    maxima, sums = torch.empty((2, count, blocks), dtype=torch.float32, device=logits.device)
    stride = logits.stride(0)
    _block_sums[(blocks, count)](
        logits, rows, state.left, state.temperature, maxima, sums, size, stride, blocks, width, BLOCK=_BLOCK,
        num_warps=_WARPS, **launch.options(),
    )  # fmt: skip
    _choose_token[(count,)](
        logits, rows, state.left, state.position, state.seed, state.temperature, maxima, sums, tokens_out,
        logprobs_out, size, stride, blocks, width, BLOCK=_BLOCK, BLOCKS_P=triton.next_power_of_2(blocks),
        num_warps=8, **launch.options(),
    )  # fmt: skip
