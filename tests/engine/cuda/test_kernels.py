"""The kernels of the GPU engine, in three steps: the reference against transformers, sdpa and the sampler (on every
CPU); the Triton kernels against the reference, in Triton's interpreter (with TRITON_INTERPRET=1) or on a GPU in
bfloat16 and float32; and a captured graph of a whole step on a GPU.

Not covered here: speed (`benchmarks/engine/gpu_kernels.py`), models as a whole, pools above 2 GiB."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

import windfall.engine
from tests.support.engines import reference_kernels as reference
from windfall.engine.cuda import sampling
from windfall.engine.cuda.splits import pack_spans
from windfall.engine.cuda.state import DeviceState, KVPool, Spans, Texts
from windfall.engine.drafts import FAMILY, RUNS
from windfall.engine.torch import sampler
from windfall.types import Sampling

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
WHY = "needs triton, and a GPU or TRITON_INTERPRET=1"
CAN = find_spec("triton") is not None and (CUDA or os.environ.get("TRITON_INTERPRET") == "1")
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32]
# heads, kv heads, head: grouped-query ratios 1, 2, 3, 4, 8 and heads of 64, 96 (padded) and 128
SHAPES = [(4, 4, 64), (4, 2, 128), (9, 3, 64), (8, 2, 96), (8, 1, 128)]
PAGE = 16


def test_every_operation_of_the_engine_is_a_kernel() -> None:
    """Also where triton is not installed."""
    folder = Path(windfall.engine.__file__).parent / "cuda"
    named = set(re.findall(r'^    "(\w+)",$', (folder / "kernels" / "__init__.py").read_text(), re.MULTILINE))
    used = {name for file in folder.glob("*.py") for name in re.findall(r"\bops\.(\w+)\(", file.read_text())}
    assert {"add_adapters_in_place", "sample"} <= used <= named
    assert all(hasattr(reference, name) for name in used)


@pytest.fixture
def kernels() -> ModuleType:
    if not CAN:
        pytest.skip(WHY)
    from windfall.engine.cuda import kernels

    return kernels


def scene(
    lengths: list[int], *, kv_heads: int, head: int, dtype: torch.dtype = torch.float32, device: str = "cpu",
    layers: int = 2, inactive: tuple[int, ...] = (), width: int = 1, kv_dtype: torch.dtype | None = None,
) -> SimpleNamespace:  # fmt: skip
    """One slot per length, on shuffled pages of random keys and values, with room for `width` more tokens."""
    torch.manual_seed(len(lengths) * 1000 + sum(lengths))
    each = (max(lengths) + width - 1) // PAGE + 1
    pool = KVPool(layers=layers, pages=len(lengths) * each, page_size=PAGE, kv_heads=kv_heads, head=head,
                dtype=kv_dtype or dtype, device=device)  # fmt: skip
    assert pool.data is not None
    pool.data.copy_(torch.randn(pool.shape))
    state = DeviceState.new(len(lengths), each, device)
    state.table[:-1] = torch.randperm(len(lengths) * each, dtype=torch.int32).view(-1, each).to(device)
    state.length[:-1] = torch.tensor(lengths, dtype=torch.int32)
    state.left[:-1] = 5
    state.left[list(inactive)] = 0
    state.last[:-1] = torch.randint(0, 50, (len(lengths),), dtype=torch.int32)
    state.seed[:-1] = torch.randint(-(2**63), 2**63 - 1, (len(lengths),))
    state.position[:-1] = torch.randint(0, 900, (len(lengths),), dtype=torch.int32)
    return SimpleNamespace(state=state, pool=pool, device=device, dtype=dtype)


def numbers(*shape: int, like: SimpleNamespace) -> Tensor:
    return torch.randn(shape).to(like.device, like.dtype)


def rows_of(*slots: int, device: str = "cpu") -> Tensor:
    return torch.tensor(slots, dtype=torch.int32, device=device)


def history(s: SimpleNamespace, slot: int, layer: int, count: int) -> tuple[Tensor, Tensor]:
    """Keys and values (kv_heads, count, head) of a slot, found token by token."""
    table = s.state.table[slot].tolist()
    where = [(table[t // PAGE], t % PAGE) for t in range(count)]
    return tuple(torch.stack([s.pool.data[layer, i, page, :, at] for page, at in where], 1) for i in (0, 1))  # pyright: ignore


def copy(s: SimpleNamespace) -> SimpleNamespace:
    pool = KVPool(layers=s.pool.shape[0], pages=s.pool.scratch, page_size=PAGE, kv_heads=s.pool.shape[3],
                head=s.pool.shape[5], dtype=s.pool.dtype, device=s.device)  # fmt: skip
    assert pool.data is not None
    pool.data.copy_(s.pool.data)
    state = DeviceState(**{name: getattr(s.state, name).clone() for name in DeviceState.__slots__})
    return SimpleNamespace(state=state, pool=pool, device=s.device, dtype=s.dtype)


def same_state(a: DeviceState, b: DeviceState) -> None:
    for name in DeviceState.__slots__:
        assert torch.equal(getattr(a, name), getattr(b, name)), name


def close(a: Tensor, b: Tensor, *, rounded: float = 1e-2, exact: float = 2e-6) -> None:
    """Within `exact` of each other (relative to the largest) in float32, `rounded` in bfloat16."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert torch.isfinite(a).all()
    within = exact if a.dtype == torch.float32 else rounded
    worst = (a.float() - b.float()).abs().max() / b.float().abs().max()
    assert worst <= within, f"{worst:.2e} apart"


# The reference against transformers, sdpa and the sampler.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_norm_and_swiglu_equal_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(5, 48).to(dtype), torch.randn(5, 48).to(dtype)
    module = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    module.weight.data.copy_(torch.randn(48))
    normed, total = reference.add_rms_norm(x, residual, module.weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, module(x + residual))
    alone, total = reference.add_rms_norm(x, None, module.weight, 1e-5)
    assert total is x
    assert torch.equal(alone, module(x))
    config = SimpleNamespace(hidden_size=48, intermediate_size=64, mlp_bias=False, hidden_act="silu")
    mlp: Any = LlamaMLP(config).to(dtype)
    fused = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    assert torch.equal(F.linear(reference.swiglu(F.linear(x, fused)), mlp.down_proj.weight), mlp(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [False, True])
def test_reference_rope_and_store_equals_transformers(dtype: torch.dtype, normed: bool) -> None:
    heads, kv_heads, head = 6, 2, 16
    s = scene([3, 40, 17, 33], kv_heads=kv_heads, head=head, dtype=dtype, inactive=(3,))
    slots, positions = rows_of(0, 1, 1, 2, 3, 4, 4), rows_of(2, 31, 32, 16, 7, 0, 0)
    qkv = torch.randn(7, (heads + 2 * kv_heads) * head).to(dtype)
    cos, sin = torch.randn(2, 64, head).to(dtype)
    modules = [LlamaRMSNorm(head, eps=1e-5).to(dtype) for _ in range(2)]
    for module in modules:
        module.weight.data.copy_(torch.randn(head))
    weights = [m.weight.data for m in modules] if normed else [None, None]
    before = copy(s)
    qw, kw = weights
    q = reference.rope_and_store(qkv, slots, positions, s.state, s.pool, 1, cos, sin, qw, kw, 1e-5, heads, kv_heads)

    wide = qkv.view(7, -1, head)
    want_q, want_k, want_v = wide[:, :heads], wide[:, heads : heads + kv_heads], wide[:, heads + kv_heads :]
    if normed:
        want_q, want_k = modules[0](want_q), modules[1](want_k)
    at = positions.long()
    want_q, want_k = apply_rotary_pos_emb(want_q, want_k, cos[at], sin[at])
    assert torch.equal(q, want_q)
    for i in range(4):
        page, row = s.state.table[slots[i], positions[i] // PAGE], positions[i] % PAGE
        assert torch.equal(s.pool.data[1, 0, page, :, row], want_k[i])
        assert torch.equal(s.pool.data[1, 1, page, :, row], want_v[i])
        before.pool.data[1, :, page, :, row] = s.pool.data[1, :, page, :, row]
    before.pool.data[1, :, -1] = s.pool.data[1, :, -1]  # the scratch page, which rows 4 to 6 write
    assert torch.equal(before.pool.data, s.pool.data)


@pytest.mark.parametrize("window", [None, 1, 24])
def test_reference_attention_equals_sdpa(window: int | None) -> None:
    heads, kv_heads, head, scale = 6, 2, 16, 0.3
    s = scene([1, 45, 16, 31, 0], kv_heads=kv_heads, head=head, inactive=(3,))
    order = [2, 1, 3, 4, 0, 5]  # slot 5 is the padding slot
    q = torch.randn(6, heads, head)
    out = reference.decode_attention(q, rows_of(*order), s.state, s.pool, 1, scale, window, 1)
    for i, slot in enumerate(order):
        if slot in (3, 5):
            assert torch.isfinite(out[i]).all()
            continue
        n = int(s.state.length[slot]) + 1
        k, v = history(s, slot, 1, n)
        near = slice(0 if window is None else max(0, n - window), n)
        want = F.scaled_dot_product_attention(q[i][:, None], k[:, near], v[:, near], scale=scale, enable_gqa=True)
        torch.testing.assert_close(out[i], want.flatten())

    spans = spans_of([(1, 20, 26), (0, 0, 2), (2, 16, 1)], heads, kv_heads)
    q = torch.randn(len(spans.slot), heads, head)
    out = reference.prefill_attention(q, spans, s.state, s.pool, 0, scale, window).view(-1, heads, head)
    for slot, first, count, start in [(1, 0, 26, 20), (0, 26, 2, 0), (2, 28, 1, 16)]:
        k, v = history(s, slot, 0, start + count)
        mask = torch.ones(count, start + count, dtype=torch.bool).tril(start)
        if window is not None:
            mask &= ~torch.ones(count, start + count, dtype=torch.bool).tril(start - window)
        here = q[first : first + count].transpose(0, 1)
        want = F.scaled_dot_product_attention(here, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        torch.testing.assert_close(out[first : first + count], want.transpose(0, 1))


def spans_of(chunks: list[tuple[int, int, int]], heads: int, kv_heads: int, device: str = "cpu") -> Spans:
    """Chunks of (slot, start, count), concatenated; and three rows and some tiles that are padding."""
    slot, start, count = np.array(chunks).T
    rows, tile = int(count.sum()), 64
    each = tile // (heads // kv_heads)
    padded, tiles = rows + 3, rows // each + len(chunks)
    sizes = {"rows": padded, "tiles": tiles, "rows_each": each, "padding": int(max(slot)) + 1}
    packed = pack_spans([0] * rows, slot, count, start, **sizes)
    return Spans.of(rows_of(*packed.tolist(), device=device), padded, tiles, tile)


SAMPLINGS = [
    Sampling(), Sampling(temperature=0.0), Sampling(temperature=0.7), Sampling(temperature=1.5, top_k=5),
    Sampling(top_p=0.75), Sampling(temperature=2.0, top_k=40, top_p=0.5), Sampling(temperature=0.0, top_k=3),
]  # fmt: skip


def sampled(count: int, vocabulary: int, *, cut: bool, device: str = "cpu", width: int = 1) -> SimpleNamespace:
    """`width` rows of random logits for each of these slots, with all kinds of sampling, and for the padding slot."""
    s = scene([20 + i for i in range(count)], kv_heads=1, head=16, device=device, inactive=(1, 3))
    s.how = [SAMPLINGS[i % (len(SAMPLINGS) if cut else 3)] for i in range(count)]
    for i, how in enumerate(s.how):
        s.state.temperature[i], s.state.top_k[i], s.state.top_p[i] = how.temperature, how.top_k, how.top_p
    s.state.left[2] = 2
    s.order = [*range(count - 1, -1, -1), count, count]
    s.rows = rows_of(*s.order, device=device)
    s.slots = [(slot, ahead) for slot in s.order for ahead in range(width)]
    """Slot of every row of logits, and how many positions it is ahead."""
    s.logits = 3 * torch.randn(len(s.slots), vocabulary, device=device)
    s.tokens = torch.full((len(s.slots),), 7, dtype=torch.int32, device=device)
    s.logprobs = s.logits.new_zeros(len(s.slots))
    return s


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("cut", [False, True])
def test_reference_samples_like_the_sampler(cut: bool, width: int) -> None:
    s = sampled(30, 160, cut=cut, width=width)
    before = copy(s)
    live = [i for i, (slot, ahead) in enumerate(s.slots) if int(s.state.left[slot]) > ahead]
    assert len(live) == 27 * width + min(width, 2)
    slots, ahead = [s.slots[i][0] for i in live], torch.tensor([s.slots[i][1] for i in live])
    positions = (s.state.position[slots] + ahead).tolist()
    want, logp = sampler.sample(s.logits[live], s.state.seed[slots].tolist(), positions, [s.how[n] for n in slots])
    reference.sample(s.logits, s.rows, s.state, s.tokens, s.logprobs, cut, width)
    assert s.tokens[live].tolist() == want.tolist()
    torch.testing.assert_close(s.logprobs[live], logp, atol=1e-6, rtol=1e-6)
    assert {s.tokens[i].item() for i in range(len(s.slots)) if i not in live} == {-1}
    same_state(s.state, before.state)


def test_reference_decode_inputs_are_the_newest_tokens() -> None:
    s = scene([4, 9], kv_heads=1, head=16)
    s.state.last[:] = rows_of(11, 12, 13)
    ids, positions, expected = reference.decode_inputs(s.state, rows_of(1, 0, 2), None, 1)
    assert (ids.dtype, ids.tolist()) == (torch.int64, [12, 11, 13])
    assert (positions.dtype, positions.tolist()) == (torch.int32, [9, 4, 0])
    assert (expected.dtype, expected.tolist()) == (torch.int32, [-1, -1, -1])


def drafting(texts: list[list[int]], families: list[list[int]], device: str = "cpu", size: int = 48) -> Texts:
    rows = len(texts)
    tokens = torch.tensor([[*t, *[0] * (size - len(t))] for t in texts], dtype=torch.int32, device=device)
    padded = [[*f, *[-1] * (FAMILY - len(f))] for f in families] + [[-1] * FAMILY] * (rows - len(families))
    return Texts(
        data=tokens,  # the kernels use the parts
        length=rows_of(*map(len, texts), device=device),
        families=torch.tensor(padded, dtype=torch.int32, device=device),
        tokens=tokens,
        runs=torch.zeros(RUNS + 1, dtype=torch.int32, device=device),
    )


def following(s: SimpleNamespace, slot: int, row: int, family: int) -> None:
    """Let a slot have this text and draft from this family."""
    s.state.text_row[slot], s.state.text_family[slot], s.state.search[slot] = row, family, 1


def test_reference_drafts_what_follows_the_longest_agreement() -> None:
    s = scene([6, 9, 4], kv_heads=1, head=16)
    texts = drafting([[7, 1, 2, 3, 4, 5], [9, 9, 1, 2, 3], [1, 2, 3, 8, 8], [6, 6]], [[0, 1, 2], [3]])
    s.state.last[:] = rows_of(5, 3, 6, 0)
    following(s, 1, 1, 0)  # its text is row 1: "1 2 3" is followed by "4 5" in row 0 and by "8 8" in row 2
    following(s, 2, 3, 1)  # two tokens, which never agree with anything
    rows = rows_of(2, 1, 0, 3)
    reference.find_matches(rows, s.state, texts)
    assert s.state.match.tolist() == [0, (3 * 16 + 2) << 40 | 2 * 48 + 3, 0, 0]
    ids, positions, expected = reference.decode_inputs(s.state, rows, texts, 4)
    assert ids.view(4, 4).tolist() == [[6, 0, 0, 0], [3, 8, 8, 0], [5, 0, 0, 0], [0, 0, 0, 0]]
    assert positions.view(4, 4)[1].tolist() == [9, 10, 11, 12]
    assert expected.view(4, 4).tolist() == [[-1] * 4, [8, 8, -1, -1], [-1] * 4, [-1] * 4]
    s.state.search[1] = 0  # it follows a place already
    texts.tokens[1, 4] = 7
    reference.find_matches(rows, s.state, texts)
    assert s.state.match[1] > 0


@pytest.mark.parametrize(
    ("drawn", "left", "stop", "accepted", "match", "runs"),
    [
        ([4, 5, 6], 5, 9, [4, 5, 6], 3, {}),  # all as expected: it goes on after them
        ([4, 5, 9], 5, 8, [4, 5, 9], None, {2: 1}),  # wrong tokens count, because they were drawn
        ([4, 0, 6], 5, 9, [4, 0], None, {1: 1}),
        ([0, 5, 6], 5, 9, [0], None, {0: 1}),
        ([4, 5, 6], 2, 9, [4, 5], None, {1: 1}),  # no more tokens may be generated: two tokens, which were both right
        ([4, 5, 6], 5, 5, [4, 5], None, {1: 1}),  # a stop token
        ([4, 5, 6], 5, 6, [4, 5, 6], None, {2: 1}),
        ([4, 5, 6], 0, 9, [], 0, {}),  # inactive
    ],
)
def test_reference_accepts_tokens_up_to_the_first_unexpected_one(
    drawn: list[int], left: int, stop: int, accepted: list[int], match: int | None, runs: dict[int, int]
) -> None:
    s = scene([8, 20], kv_heads=1, head=16)
    texts = drafting([[1, 2, 3, 4, 5, 6, 7], [1, 2, 3]], [[0, 1]])
    s.state.last[0], s.state.left[0], s.state.stop[0, 2] = 3, left, stop
    following(s, 0, 1, 0)
    reference.find_matches(rows_of(0), s.state, texts)
    expected = reference.decode_inputs(s.state, rows_of(0), texts, 3)[2]
    before, place = copy(s), (3 * 16 + 4) << 40 | 3
    out = torch.full((5, 2, 2), 99, dtype=torch.int32)
    logprobs = torch.tensor([-1.0, -2.0, -3.0])
    reference.accept(rows_of(0), s.state, texts, rows_of(*drawn), logprobs, expected, out, torch.tensor([1]), 3)
    count = len(accepted)
    assert out[1:4, 0, 0].tolist() == accepted + [-1] * (3 - count)
    assert out[1:4, 1, 0].view(torch.float32).tolist() == [-1.0, -2.0, -3.0][:count] + [0.0] * (3 - count)
    assert (out[[0, 4]] == 99).all()
    assert (out[:, :, 1] == 99).all()
    if not count:
        same_state(s.state, before.state)
        return
    assert (int(s.state.last[0]), int(s.state.length[0])) == (accepted[-1], 8 + count)
    assert s.state.position[0] == before.state.position[0] + count
    assert s.state.left[0] == (0 if stop in accepted else left - count)
    assert texts.tokens[1, : texts.length[1]].tolist() == [1, 2, 3, *accepted]
    assert (int(s.state.match[0]), int(s.state.search[0])) == ((0, 1) if match is None else (place + match, 0))
    assert {n: c for n, c in enumerate(texts.runs[:-1].tolist()) if c} == runs
    assert texts.runs[-1] == min(left, 3) - 1, "tokens that were drafted"


def test_reference_counts_only_tokens_that_were_drafted() -> None:
    """One response follows a place after which one token is known, and one follows nothing. A prefill follows
    nothing, and is no run."""
    s = scene([8, 20], kv_heads=1, head=16)
    texts = drafting([[1, 2, 3, 4], [1, 2, 3], [7, 7, 8]], [[0, 1], [2]])
    following(s, 0, 1, 0)
    following(s, 1, 2, 1)
    rows, out, first = rows_of(0, 1), torch.zeros(8, 2, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    reference.find_matches(rows, s.state, texts)
    expected = reference.decode_inputs(s.state, rows, texts, 4)[2]
    reference.accept(rows, s.state, texts, rows_of(*[9] * 8), torch.zeros(8), expected, out, first, 4)
    assert (texts.runs[0].item(), texts.runs[1:-1].sum().item(), texts.runs[-1].item()) == (2, 0, 1)
    reference.accept(rows, s.state, texts, rows_of(9, 9), torch.zeros(2), None, out, first, 1)
    assert texts.runs.sum() == 3


def test_reference_searches_the_own_text_if_the_family_lacks_it() -> None:
    s = scene([8], kv_heads=1, head=16)
    texts = drafting([[5, 5], [1, 2, 3, 4, 1, 2, 3]], [[0]])
    following(s, 0, 1, 0)
    reference.find_matches(rows_of(0), s.state, texts)
    assert s.state.match[0] == (3 * 16 + 4) << 40 | 1 * 48 + 3


def test_splits_never_exceed_the_context() -> None:
    for batch in (1, 16, 512):
        for longest in (1, 200, 2048, 32768):
            splits = reference.splits_for(batch, 8, longest, 132)
            assert 1 <= splits <= max(1, longest // reference.min_split_tokens(batch * 8))


# The kernels against the reference.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [48, 576, 1000])
def test_add_rms_norm_and_swiglu(kernels: ModuleType, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    x, residual = (torch.randn(7, size).to(DEVICE, dtype) for _ in range(2))
    weight = torch.randn(size).to(DEVICE, dtype)
    for r in (None, residual):
        for ours, theirs in zip(
            kernels.add_rms_norm(x, r, weight, 1e-6), reference.add_rms_norm(x, r, weight, 1e-6), strict=True
        ):
            close(ours, theirs, rounded=2**-7)
            if dtype == torch.bfloat16:
                assert (ours != theirs).float().mean() < 1e-2  # only where the last bit of the mean square matters
    both = 3 * torch.randn(7, 2 * size).to(DEVICE, dtype)
    close(kernels.swiglu(both), reference.swiglu(both), rounded=2**-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_rope_and_store(kernels: ModuleType, shape: tuple[int, int, int], normed: bool, dtype: torch.dtype) -> None:
    heads, kv_heads, head = shape
    a = scene([3, 47, 17, 33, 15], kv_heads=kv_heads, head=head, dtype=dtype, device=DEVICE, inactive=(3,))
    a.state.length[3] = 48  # behind the end of its table
    b = copy(a)
    slots = rows_of(1, 3, 4, 1, 0, 5, 2, 5, device=DEVICE)
    positions = rows_of(46, 48, 15, 47, 0, 0, 16, 0, device=DEVICE)
    qkv = numbers(8, (heads + 2 * kv_heads) * head, like=a)
    cos, sin = numbers(64, head, like=a), numbers(64, head, like=a)
    weights = [numbers(head, like=a), numbers(head, like=a)] if normed else [None, None]
    out = []
    for s, how in ((a, kernels), (b, reference)):
        out += [
            how.rope_and_store(qkv, slots, positions, s.state, s.pool, 1, cos, sin, *weights, 1e-6, heads, kv_heads)
        ]
    close(out[0], out[1], rounded=2**-7)
    real = slice(0, a.pool.scratch)  # several rows write to the scratch page, in any order
    close(a.pool.data[:, :, real], b.pool.data[:, :, real], rounded=2**-7)
    same_state(a.state, b.state)


LENGTHS = [0, 1, 14, 15, 16, 31, 63, 64, 65, 127, 128, 200, 255, 256, 299]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("window", "splits", "width"),
    [
        (None, 1, 1),
        (None, 2, 1),
        (24, 1, 1),
        (150, 8, 1),
        (None, 8, 1),
        (None, 1, 2),
        (None, 8, 3),
        (24, 2, 4),
        (None, 2, 8),
    ],
)
def test_decode_attention(
    kernels: ModuleType, shape: tuple[int, int, int], window: int | None, splits: int, width: int, dtype: torch.dtype
) -> None:  # fmt: skip
    heads, kv_heads, head = shape
    lengths = [*(LENGTHS if CUDA else LENGTHS[::3]), 1500]
    s = scene(lengths, kv_heads=kv_heads, head=head, dtype=dtype, device=DEVICE, inactive=(1,), width=width)
    rows = rows_of(*reversed(range(len(lengths))), len(lengths), len(lengths), device=DEVICE)
    q = numbers(len(rows) * width, heads, head, like=s)
    rest = (rows, s.state, s.pool, 1, head**-0.5, window, splits, None, width)
    want = reference.decode_attention(q, *rest)
    for _ in range(2):  # twice: the counters must be zero again
        close(kernels.decode_attention(q, *rest), want)


FP8_GPU = CUDA and torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.skipif(not FP8_GPU, reason="needs a GPU that has fp8")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("window", "splits", "width"), [(None, 1, 1), (None, 8, 1), (None, 2, 3), (24, 1, 4)])
def test_attention_reads_and_writes_fp8(
    kernels: ModuleType, shape: tuple[int, int, int], window: int | None, splits: int, width: int
) -> None:
    heads, kv_heads, head = shape
    fp8 = {"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn, "device": DEVICE, "inactive": (1,)}
    a = scene([0, 5, 15, 16, 130, 291], kv_heads=kv_heads, head=head, width=width, **fp8)
    b = copy(a)
    rows = rows_of(5, 1, 4, 6, 0, 2, 3, device=DEVICE)
    positions = reference.decode_inputs(a.state, rows, None, width)[1]
    qkv = numbers(len(rows) * width, (heads + 2 * kv_heads) * head, like=a)
    cos, sin = numbers(320, head, like=a), numbers(320, head, like=a)
    rotation, how = (cos, sin, None, None, 1e-6, heads), (head**-0.5, window, splits, None, width)
    out = kernels.rope_store_and_decode(qkv, rows, positions, a.state, a.pool, 1, *rotation, *how)
    q = reference.rope_and_store(qkv, rows, positions, b.state, b.pool, 1, *rotation, kv_heads, width)
    # Over what the kernel has stored: a key that is one step of fp8 apart changes the result by more than rounding.
    close(out, reference.decode_attention(q, rows, a.state, a.pool, 1, *how), rounded=2e-2)
    real = slice(0, a.pool.scratch)
    stored = [s.pool.data[:, :, real].float() for s in (a, b)]
    assert ((stored[0] - stored[1]).abs() <= 0.13 * stored[1].abs() + 1e-2).all(), "more than one step of fp8 apart"

    spans = spans_of([(0, 0, 1), (4, 100, 30), (5, 16, 9)], heads, kv_heads, DEVICE)
    q = numbers(len(spans.slot), heads, head, like=a)
    want = reference.prefill_attention(q, spans, b.state, b.pool, 1, head**-0.5, window)
    close(kernels.prefill_attention(q, spans, b.state, b.pool, 1, head**-0.5, window)[:-3], want[:-3], rounded=4e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("window", "splits", "pairs", "width"),
    [(None, 1, 1024, 1), (40, 4, 1024, 1), (None, 1, 0, 1), (None, 2, 1024, 3), (24, 1, 1024, 4), (24, 2, 0, 2)],
)
def test_rope_store_and_decode(
    kernels: ModuleType, shape: tuple[int, int, int], normed: bool, window: int | None, splits: int, pairs: int,
    width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("windfall.engine.cuda.kernels.decode._MAX_FUSED_PAIRS", pairs)  # up to these: one launch
    heads, kv_heads, head = shape
    lengths = [0, 5, 15, 16, 130, 291, 47]
    a = scene(lengths, kv_heads=kv_heads, head=head, dtype=dtype, device=DEVICE, inactive=(1,), width=width)
    a.state.length[1] = 19 * PAGE  # behind the end of its table
    a.state.left[4] = 2
    b, before = copy(a), copy(a)
    rows = rows_of(6, 1, 5, 7, 4, 0, 2, 3, 7, device=DEVICE)
    positions = reference.decode_inputs(a.state, rows, None, width)[1]
    qkv = numbers(9 * width, (heads + 2 * kv_heads) * head, like=a)
    cos, sin = numbers(320, head, like=a), numbers(320, head, like=a)
    weights = [numbers(head, like=a), numbers(head, like=a)] if normed else [None, None]
    rest = (cos, sin, *weights, 1e-6, heads, head**-0.5, window, splits, None, width)
    out = [
        how.rope_store_and_decode(qkv, rows, positions, s.state, s.pool, 1, *rest)
        for s, how in ((a, kernels), (b, reference))
    ]
    close(out[0], out[1], rounded=2e-2)
    real = slice(0, a.pool.scratch)
    close(a.pool.data[:, :, real], b.pool.data[:, :, real], rounded=2**-7)
    changed = (a.pool.data != before.pool.data).any(-1).any(-2).any(1)  # (layers, pages, rows of a page)
    written = 5 * width + min(width, 2)  # `width` tokens of each active slot, if they may be generated, in layer 1
    assert changed[:, real].sum(dim=(1, 2)).tolist() == [0, written]
    same_state(a.state, before.state)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "chunks",
    [[(0, 0, 1), (1, 298, 1), (2, 15, 1)], [(0, 0, 13), (2, 250, 15), (1, 16, 9)], [(3, 0, 70), (0, 3, 1), (2, 90, 5)]],
)
@pytest.mark.parametrize("window", [None, 20])
def test_prefill_attention(
    kernels: ModuleType, shape: tuple[int, int, int], chunks: list[tuple[int, int, int]], window: int | None,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    heads, kv_heads, head = shape
    s = scene([299, 299, 299, 99], kv_heads=kv_heads, head=head, dtype=dtype, device=DEVICE)
    spans = spans_of(chunks, heads, kv_heads, DEVICE)
    q = numbers(len(spans.slot), heads, head, like=s)
    want = reference.prefill_attention(q, spans, s.state, s.pool, 1, head**-0.5, window)
    close(kernels.prefill_attention(q, spans, s.state, s.pool, 1, head**-0.5, window)[:-3], want[:-3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [50, 9001, 12288])
@pytest.mark.parametrize(("cut", "width"), [(False, 1), (True, 1), (False, 3), (True, 3)])
def test_sample(kernels: ModuleType, vocabulary: int, cut: bool, width: int, dtype: torch.dtype) -> None:
    a = sampled(40, vocabulary, cut=cut, device=DEVICE, width=width)
    a.logits = a.logits.to(dtype)
    a.logits[:, vocabulary // 2] = -float("inf")
    before = copy(a)
    kernels.sample(a.logits, a.rows, a.state, a.tokens, a.logprobs, cut, width)
    tokens, logprobs = a.tokens.clone(), a.logprobs.clone()
    reference.sample(a.logits, a.rows, a.state, tokens, logprobs, cut, width)
    for i in (a.tokens != tokens).nonzero().flatten().tolist():  # only at a boundary, to within rounding
        (slot, ahead), (low, high) = a.slots[i], sorted((int(a.tokens[i]), int(tokens[i])))
        p = torch.softmax(a.logits[i].double() / a.state.temperature[slot].double(), -1).cumsum(-1)
        u = sampling.uniform(a.state.seed[slot], a.state.position[slot] + ahead)
        assert low >= 0
        assert abs(p[low] - u) < 1e-6
        assert p[high - 1] - p[low] < 1e-6
    assert (a.tokens != tokens).sum() <= 1
    agree = a.tokens == tokens
    torch.testing.assert_close(a.logprobs[agree], logprobs[agree], atol=2e-5, rtol=1e-5)
    same_state(a.state, before.state)


def test_sample_of_nan_logits_is_in_the_vocabulary(kernels: ModuleType) -> None:
    for value in (float("nan"), -float("inf"), float("inf")):
        s = sampled(4, 5000, cut=False, device=DEVICE)
        s.logits[:] = value
        kernels.sample(s.logits, s.rows, s.state, s.tokens, s.logprobs, False)
        assert all(0 <= int(t) < 5000 for t, slot in zip(s.tokens, s.order, strict=True) if slot in (0, 2))


@pytest.mark.parametrize("width", [1, 2, 8])
def test_top_k_sorts_as_few_rows_with_drafts(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """The memory for sorted logits does not grow with the rows of a response."""
    from windfall.engine.cuda.kernels import sampling as kernel

    sizes: list[tuple[int, int]] = []
    monkeypatch.setattr(kernel.sampling, "sample", lambda logits, rows, *_: sizes.append((len(logits), len(rows))))
    rows = rows_of(*[0] * 80)
    kernels.sample(torch.zeros(80 * width, 4), rows, Any, torch.zeros(80 * width), torch.zeros(80 * width), True, width)
    assert sum(logits for logits, _ in sizes) == 80 * width
    assert all(logits == width * count and logits <= 32 for logits, count in sizes)


def drafted(device: str) -> tuple[SimpleNamespace, Texts]:
    """Slots with texts of few different tokens, so that there is much to follow; one slot has no text."""
    s = scene([20 + i for i in range(9)], kv_heads=1, head=16, device=device, inactive=(4,))
    random = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 1400, (12,), generator=random).tolist()  # a search reads several blocks
    texts = [torch.randint(0, 3, (n,), generator=random).tolist() for n in lengths]
    texts[3] = texts[2][:50]
    for slot in range(8):
        following(s, slot, slot, slot % 3)
    s.state.text_row[8] = -1
    s.state.left[:-1] = torch.randint(20, 40, (9,), generator=random).int().to(device)
    s.state.left[4] = 0
    s.state.left[5] = 6
    s.state.stop[6, 7] = 2
    families = [[0, 3, 6, 9, 11], [1, 4, 7, 10], [2, 8]]  # row 5 is in none
    return s, drafting(texts, families, device, size=1450)


@pytest.mark.parametrize("width", [1, 2, 3, 8])
def test_drafts(kernels: ModuleType, width: int) -> None:
    """Inputs, acceptance and search, for several steps in which most tokens are as expected."""
    (a, texts), (b, more) = drafted(DEVICE), drafted(DEVICE)
    rows = rows_of(8, 3, 0, 9, 6, 1, 4, 2, 5, 7, 9, device=DEVICE)
    random, shown = torch.Generator().manual_seed(2), 0
    for step in range(12):
        kernels.find_matches(rows, a.state, texts)
        reference.find_matches(rows, b.state, more)
        same_state(a.state, b.state)
        inputs = kernels.decode_inputs(a.state, rows, texts, width)
        want = reference.decode_inputs(b.state, rows, more, width)
        for ours, theirs in zip(inputs, want, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)
        expected = inputs[2]
        drawn = torch.randint(0, 3, (len(expected),), generator=random).int().to(DEVICE)
        right = (torch.rand(len(expected), generator=random) < 0.8).to(DEVICE) & (expected >= 0)
        drawn = torch.where(right, expected, drawn)
        logprobs = -torch.rand(len(expected), generator=random).to(DEVICE)
        out = torch.full((2, width + 2, 2, len(rows)), 99, dtype=torch.int32, device=DEVICE)
        first = torch.ones(1, dtype=torch.int64, device=DEVICE)
        guesses = None if step == 5 else expected  # as after a prefill
        kernels.accept(rows, a.state, texts, drawn, logprobs, guesses, out[0], first, width)
        reference.accept(rows, b.state, more, drawn, logprobs, guesses, out[1], first, width)
        assert torch.equal(out[0], out[1])
        same_state(a.state, b.state)
        for name in ("tokens", "length", "runs"):
            assert torch.equal(getattr(texts, name), getattr(more, name)), name
        shown += int((out[0, 2 : width + 1, 0] >= 0).sum())
    assert shown > 0 or width == 1, "no draft was accepted"


def test_accept_without_texts(kernels: ModuleType) -> None:
    a = sampled(6, 50, cut=False, device=DEVICE)
    reference.sample(a.logits, a.rows, a.state, a.tokens, a.logprobs, False)
    a.state.stop[5, 7] = a.tokens[a.order.index(5)]
    a.state.left[4] = 1
    b = copy(a)
    out = torch.zeros(2, 1, 2, len(a.rows), dtype=torch.int32, device=DEVICE)
    first = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for s, how, to in ((a, kernels, out[0]), (b, reference, out[1])):
        how.accept(a.rows, s.state, None, a.tokens, a.logprobs, None, to, first, 1)
    assert torch.equal(out[0], out[1])
    same_state(a.state, b.state)
    assert a.state.left.tolist() == [4, 0, 1, 0, 0, 0, 0]
    assert out[0, 0, 0].tolist()[-2:] == [-1, -1]


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("cut", [False, True])
def test_captured_step_is_replayed(kernels: ModuleType, cut: bool) -> None:
    """All kernels of a step in one graph, replayed after the pool was freed and allocated elsewhere."""
    heads, kv_heads, head, vocabulary = 8, 4, 64, 3000
    a = sampled(12, vocabulary, cut=cut, device=DEVICE)
    s = scene([200 + i for i in range(12)], kv_heads=kv_heads, head=head, dtype=torch.bfloat16, device=DEVICE)
    s.state = a.state
    s.state.length[:-1] = torch.arange(200, 212, dtype=torch.int32)
    table = torch.randperm(12 * 14, dtype=torch.int32).view(12, 14).to(DEVICE)
    s.state = DeviceState(
        **{**{n: getattr(a.state, n) for n in DeviceState.__slots__}, "table": torch.cat([table, table[:1]])}
    )
    qkv = numbers(14, (heads + 2 * kv_heads) * head, like=s)
    cos, sin, weight = numbers(256, head, like=s), numbers(256, head, like=s), numbers(heads * head, like=s)
    project = numbers(vocabulary, heads * head // 2, like=s)
    out_tokens = torch.zeros(1, 2, 14, dtype=torch.int32, device=DEVICE)
    out_row = torch.zeros(1, dtype=torch.int64, device=DEVICE)

    def step(on: SimpleNamespace, how: Any, tokens: Tensor, logprobs: Tensor) -> None:
        _, positions, _ = how.decode_inputs(on.state, a.rows, None, 1)
        q = how.rope_and_store(
            qkv, a.rows, positions, on.state, on.pool, 1, cos, sin, None, None, 1e-6, heads, kv_heads
        )
        out = how.decode_attention(q, a.rows, on.state, on.pool, 1, head**-0.5, None, 2)
        logits = F.linear(how.swiglu(how.add_rms_norm(out, None, weight, 1e-6)[0]), project)
        how.sample(logits, a.rows, on.state, tokens, logprobs, cut)
        how.accept(a.rows, on.state, None, tokens, logprobs, None, out_tokens, out_row, 1)

    fresh = copy(s)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(copy(s), kernels, a.tokens, a.logprobs)
        spare = copy(s)
        step(spare, kernels, a.tokens, a.logprobs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    kernels.decode_attention(numbers(14, heads, head, like=s), a.rows, s.state, s.pool, 0, 1.0, None, 2)
    with torch.cuda.graph(graph):
        step(s, kernels, a.tokens, a.logprobs)
    kept = s.pool.data.clone()
    s.pool.free()
    hold = torch.zeros_like(kept)  # so that the pool gets another address
    s.pool.allocate()
    s.pool.data.copy_(kept)
    tokens, logprobs = a.tokens.clone(), a.logprobs.clone()
    for _ in range(3):
        graph.replay()
        step(fresh, kernels, tokens, logprobs)
        assert torch.equal(tokens, a.tokens)
        assert torch.equal(logprobs, a.logprobs)
        same_state(s.state, fresh.state)
    assert hold.sum() == 0
