# pyright: reportMissingImports=false, reportIndexIssue=false
"""Drafted tokens on the device: the inputs of a decode step, which sampled tokens count, and what to draft next.

    decode_inputs ──▶ (model) ──▶ sample ──▶ accept ──▶ find_matches ──▶ decode_inputs ...

A response follows a place in a text of its family (texts.py): a token before which the text agrees with the response's
own. What comes next there is expected next here. A step computes `width` rows of every response: its newest token, and
the first `width - 1` expected tokens. Row w samples the token at position + w, as if the rows before it were right. The
tokens up to and including the first that was not expected are those that would have been sampled one by one, and only
they count. So drafts change how many tokens a step gives. They change a token only where rounding does, as in another
batch: with more rows, kernels sum in another order.

`match` of a slot: (length of the agreement * 16 + known tokens after it, at most 15) << 40 | index into the tokens of
all texts; 0: it follows no place. A place is followed as long as it is right. Then the texts are searched for the
longest agreement (LEAST to MOST tokens), and among equals for one after which many tokens are known. `runs` counts for
how many tokens places were followed, with any width: from it the host knows what every width would give. A run that the
end of a response cuts is counted, too. The last entry counts the tokens that were drafted and verified.

Rules:
- nothing depends on the order of programs: `accept` reads what `decode_inputs` expected, not the texts, to which other
  programs add tokens meanwhile; `find_matches` takes the maximum;
- an inactive slot never changes, whatever rows refer to it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from windfall.engine.cuda.host_state import STOPS
from windfall.engine.cuda.kernels import launch
from windfall.engine.cuda.state import DeviceState, Texts
from windfall.engine.drafts import FAMILY, LEAST, MOST, RUNS

_SHIFT = tl.constexpr(40)
_INDEX = tl.constexpr((1 << 40) - 1)
_BLOCK = 1024


@triton.jit(do_not_specialize=["count", "width"], do_not_specialize_on_alignment=["ROWS", "LAST", "LENGTH", "MATCH"])
def _decode_inputs(
    ROWS, LAST, LENGTH, MATCH, TEXTS, TEXT_LENGTH, IDS, POSITIONS, EXPECTED, count, width, text_size,
    DRAFTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = i < count
    ahead = i % width
    slot = tl.load(ROWS + i // width, mask=real, other=0)
    token = tl.load(LAST + slot, mask=real, other=0)
    if DRAFTS:
        place = tl.load(MATCH + slot, mask=real, other=0)
        followed = real & (place > 0)
        at = place & _INDEX
        row = at // text_size
        known = tl.load(TEXT_LENGTH + row, mask=followed, other=0)
        left = known - (at - row * text_size)
        tl.store(EXPECTED + i, tl.load(TEXTS + at + ahead, mask=followed & (ahead < left), other=-1), mask=real)
        drafted = tl.load(TEXTS + at + ahead - 1, mask=followed & (ahead > 0) & (ahead - 1 < left), other=0)
        token = tl.where(ahead > 0, drafted, token)
    tl.store(IDS + i, token.to(tl.int64), mask=real)
    tl.store(POSITIONS + i, tl.load(LENGTH + slot, mask=real, other=0) + ahead, mask=real)


def decode_inputs(state: DeviceState, rows: Tensor, texts: Texts | None, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The input tokens (B * width) int64 and positions int32 of a decode step, and the expected samples int32."""
    assert texts is not None or width == 1, "there are no texts to draft from"
    count = rows.numel() * width
    ids = torch.empty(count, dtype=torch.int64, device=rows.device)
    positions, expected = torch.empty((2, count), dtype=torch.int32, device=rows.device)
    tokens, lengths, size = (rows, rows, 1) if texts is None else (texts.tokens, texts.length, texts.tokens.shape[1])
    _decode_inputs[(triton.cdiv(count, 256),)](
        rows, state.last, state.length, state.match, tokens, lengths, ids, positions, expected, count, width, size,
        DRAFTS=texts is not None, BLOCK=256, num_warps=4, **launch.options(),
    )  # fmt: skip
    return ids, positions, expected


@triton.jit(
    do_not_specialize=["batch"],
    do_not_specialize_on_alignment=[
        "ROWS", "TOKENS", "LOGPROBS", "EXPECTED", "OUT", "OUT_ROW", "LAST", "LENGTH", "LEFT", "POSITION", "STOP",
        "TEXT_ROW", "MATCH", "RUN", "SEARCH",
    ],
)  # fmt: skip
def _accept(
    ROWS, TOKENS, LOGPROBS, EXPECTED, OUT, OUT_ROW, LAST, LENGTH, LEFT, POSITION, STOP, TEXT_ROW, MATCH, RUN, SEARCH,
    TEXTS, TEXT_LENGTH, RUNS, batch, text_size,
    WIDTH: tl.constexpr, WIDTH_P: tl.constexpr, STOPS: tl.constexpr, DRAFTS: tl.constexpr, FOLLOWED: tl.constexpr,
    LONGEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    row = tl.program_id(0)
    slot = tl.load(ROWS + row)
    left = tl.load(LEFT + slot)
    w = tl.arange(0, WIDTH_P)
    out = OUT + (tl.load(OUT_ROW) + w) * (2 * batch) + row
    if left <= 0:
        tl.store(out, tl.full([WIDTH_P], -1, tl.int32), mask=w < WIDTH)
        tl.store(out + batch, tl.zeros([WIDTH_P], tl.int32), mask=w < WIDTH)
        return
    tokens = tl.load(TOKENS + row * WIDTH + w, mask=w < WIDTH, other=-1)
    logprobs = tl.load(LOGPROBS + row * WIDTH + w, mask=w < WIDTH, other=0)
    right = tl.zeros([], tl.int32)  # number of tokens that were as expected, before the first that was not
    if FOLLOWED:
        expected = tl.load(EXPECTED + row * WIDTH + w, mask=w < WIDTH, other=-1)
        wrong = (tokens != expected) | (expected < 0) | (w >= left)
        right = tl.min(tl.where(wrong, w, WIDTH), 0)
    count = tl.minimum(tl.minimum(right + 1, WIDTH), left)
    stop = tl.load(STOP + slot.to(tl.int64) * STOPS + tl.arange(0, STOPS))
    stops = tl.sum((tokens[:, None] == stop[None, :]).to(tl.int32), 1) > 0
    first_stop = tl.min(tl.where(stops & (w < count), w, WIDTH_P), 0)
    stopped = first_stop < WIDTH_P
    count = tl.where(stopped, first_stop + 1, count)
    accepted = w < count
    tl.store(out, tl.where(accepted, tokens, -1), mask=w < WIDTH)
    tl.store(out + batch, tl.where(accepted, logprobs, 0), mask=w < WIDTH)
    tl.store(LAST + slot, tl.sum(tl.where(w == count - 1, tokens, 0), 0))
    tl.store(LENGTH + slot, tl.load(LENGTH + slot) + count)
    tl.store(POSITION + slot, tl.load(POSITION + slot) + count)
    tl.store(LEFT + slot, tl.where(stopped, 0, left - count))
    if DRAFTS:
        text = tl.load(TEXT_ROW + slot)
        if text >= 0:
            known = tl.load(TEXT_LENGTH + text)
            at = known + w
            # A text never fills its row, so that no place is behind the end of its row.
            tl.store(TEXTS + text.to(tl.int64) * text_size + at, tokens, mask=accepted & (at < text_size - 1))
            tl.store(TEXT_LENGTH + text, tl.minimum(known + count, text_size - 1))
            run = tl.load(RUN + slot) + count
            goes_on = (right == WIDTH) & (first_stop == WIDTH_P) & (count < left)
            if goes_on:
                if run >= LONGEST:  # it goes on, but counts as one that has ended
                    tl.atomic_add(RUNS + LONGEST, 1)
                    run = 0
                tl.store(RUN + slot, run)
                tl.store(MATCH + slot, tl.load(MATCH + slot) + WIDTH)
                tl.store(SEARCH + slot, 0)
            else:
                if FOLLOWED:
                    tl.atomic_add(RUNS + tl.minimum(run - 1, LONGEST), 1)
                tl.store(RUN + slot, 0)
                tl.store(MATCH + slot, tl.zeros([], tl.int64))
                tl.store(SEARCH + slot, 1)
            if FOLLOWED and WIDTH > 1:
                drafted = (expected >= 0) & (w + 1 < tl.minimum(left, WIDTH))
                tl.atomic_add(RUNS + LONGEST + 1, tl.sum(drafted.to(tl.int32), 0))


def accept(
    rows: Tensor, state: DeviceState, texts: Texts | None, tokens: Tensor, logprobs: Tensor, expected: Tensor | None,
    out: Tensor, out_row: Tensor, width: int,
) -> None:  # fmt: skip
    """Write the accepted tokens and log-probs of every row's slot to `width` rows of `out` (rows, 2, batch), beginning
    at `out_row`, and -1 for the others; update the slots and their texts. `expected` is None after a prefill."""
    text, length, runs, size = (
        (rows, rows, rows, 1) if texts is None else (texts.tokens, texts.length, texts.runs, texts.tokens.shape[1])
    )
    _accept[(rows.numel(),)](
        rows, tokens, logprobs.view(torch.int32), rows if expected is None else expected, out, out_row, state.last,
        state.length, state.left, state.position, state.stop, state.text_row, state.match, state.run, state.search,
        text, length, runs, out.shape[-1], size, WIDTH=width, WIDTH_P=triton.next_power_of_2(width), STOPS=STOPS,
        DRAFTS=texts is not None, FOLLOWED=expected is not None, LONGEST=RUNS - 1, num_warps=1, **launch.options(),
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["ROWS", "LEFT", "TEXT_ROW", "TEXT_FAMILY", "SEARCH", "MATCH"])
def _find_matches(
    ROWS, LEFT, TEXT_ROW, TEXT_FAMILY, SEARCH, MATCH, TEXTS, TEXT_LENGTH, FAMILIES, text_size,
    FAMILY: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program searches one text of the family for the longest agreement with the end of the slot's own text. The
    last one searches that own text, which may not be among those of a large family."""
    if PDL:
        gdc_wait()
    slot = tl.load(ROWS + tl.program_id(0))
    if tl.load(LEFT + slot) <= 0:
        return
    own = tl.load(TEXT_ROW + slot)
    if own < 0:
        return
    if tl.load(SEARCH + slot) == 0:
        return
    n = tl.program_id(1)
    row = tl.load(FAMILIES + tl.load(TEXT_FAMILY + slot) * FAMILY + n, mask=n < FAMILY, other=-1)
    row = tl.where(n == FAMILY, own, tl.where(row == own, -1, row))
    if row < 0:
        return
    text = TEXTS + row.to(tl.int64) * text_size
    known, end = tl.load(TEXT_LENGTH + row), tl.load(TEXT_LENGTH + own)
    mine = TEXTS + own.to(tl.int64) * text_size + end - 1
    newest, before = tl.load(mine), tl.load(mine - 1, mask=end > 1, other=-1)
    best = tl.zeros([], tl.int64)
    for start in range(LEAST, known, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < known
        same = inside & (tl.load(text + at - 1, mask=inside, other=-1) == newest)
        same = same & (tl.load(text + at - 2, mask=same, other=-2) == before)
        length = 2 * same.to(tl.int32)
        if tl.max(length, 0) > 0:
            for j in range(2, MOST):
                mark = tl.load(mine - j, mask=end > j, other=-1)
                same = same & (tl.load(text + at - 1 - j, mask=same & (at > j), other=-2) == mark)
                length += same.to(tl.int32)
            rank = length.to(tl.int64) * 16 + tl.minimum(known - at, 15)
            place = (rank << _SHIFT) | (row.to(tl.int64) * text_size + at)
            best = tl.maximum(best, tl.max(tl.where(length >= LEAST, place, 0), 0))
    if best > 0:
        tl.atomic_max(MATCH + slot, best)


def find_matches(rows: Tensor, state: DeviceState, texts: Texts) -> None:
    """Let every row's slot that follows no place follow the one with the longest agreement, if there is one."""
    _find_matches[(rows.numel(), FAMILY + 1)](
        rows, state.left, state.text_row, state.text_family, state.search, state.match, texts.tokens, texts.length,
        texts.families, texts.tokens.shape[1], FAMILY=FAMILY, LEAST=LEAST, MOST=MOST, BLOCK=_BLOCK, num_warps=4,
        **launch.options(),
    )  # fmt: skip
