"""Prefix groups: which rows form one (compared with brute force), what is uploaded, and attention with prefix groups
compared with the reference, in Triton's interpreter (TRITON_INTERPRET=1) or on a GPU.

Where a group reads a shared prefix, the page tables of its other rows point to a page of NaN. So a row that reads a
shared page itself is detected. Not covered: speed (`benchmarks/engine/gpu_kernels.py`), and random runs of an engine
(test_schedule.py)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.engines import reference_kernels as reference
from tests.support.engines.small_models import build, drain, logprobs, tokens
from windfall.engine.cuda.engine import GraphEngine
from windfall.engine.cuda.host_state import HostState
from windfall.engine.cuda.splits import TILE, PrefixSharing
from windfall.engine.cuda.state import DeviceState, KVPool, PrefixGroups
from windfall.types import Request

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
CAN = find_spec("triton") is not None and (CUDA or os.environ.get("TRITON_INTERPRET") == "1")
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32]
PAGE = 16


@pytest.fixture
def kernels() -> ModuleType:
    if not CAN:
        pytest.skip("needs triton, and a GPU or TRITON_INTERPRET=1")
    from windfall.engine.cuda import kernels

    return kernels


# Which rows form a prefix group.


@settings(max_examples=200, deadline=None)
@given(data=st.data(), rows=st.integers(0, 5), least=st.integers(0, 3), worth=st.sampled_from([0, 1, 100]))
def test_prefix_groups_equal_brute_force(data: st.DataObject, rows: int, least: int, worth: int) -> None:
    count = data.draw(st.integers(1, 14))
    prefix_id = np.array(data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
    table = np.array(data.draw(st.lists(st.lists(st.sampled_from([1, 1, 1, 2]), min_size=4, max_size=4), min_size=count,
                                        max_size=count)))  # fmt: skip
    pages = np.array(data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count)))
    want, first = [], 0
    while first < count:
        end = first + 1
        while end < count and prefix_id[end] == prefix_id[first] and end - first < max(rows, 1):
            end += 1
        same = 0
        while same < pages[first:end].min() and len(set(table[first:end, same].tolist())) == 1:
            same += 1
        if end - first >= 2 and same * PAGE >= max(least * PAGE, 1):
            want.append([first, end - first, same * PAGE])
        first = end
    if sum((n - 1) * tokens for _, n, tokens in want) < worth:
        want = []
    sharing = PrefixSharing(max_rows=rows, min_tokens=least * PAGE, min_saved_tokens=worth)
    assert sharing.find_groups(prefix_id, pages, table, PAGE).tolist() == want


def test_prefix_groups_are_uploaded_once() -> None:
    host_state = HostState(slots=20, pages_each=4, batch=24)
    buffer = host_state.data.copy()

    def send(prefix_groups: list[list[int]]) -> tuple[int, dict[str, list[int]]]:
        host_state.set_prefix_groups(np.array(prefix_groups, np.int32).reshape(-1, 3), 24, 4)
        indices, values = host_state.take_changes()
        buffer[indices] = values
        names = ("shared_tokens", "group_first", "group_count", "group_tokens")
        return len(indices), {
            n: buffer[host_state.offsets[n] : host_state.offsets[n] + host_state.sizes[n]].tolist() for n in names
        }

    sent, there = send([[2, 3, 32], [9, 2, 16]])
    assert there["shared_tokens"] == [0, 0, 32, 32, 32, 0, 0, 0, 0, 16, 16, *[0] * 13]
    assert [there[f"group_{n}"][:4] for n in ("first", "count", "tokens")] == [
        [2, 9, 0, 0],
        [3, 2, 0, 0],
        [32, 16, 0, 0],
    ]
    assert sent == 24 + 3 * 4
    assert send([[2, 3, 32], [9, 2, 16]]) == (0, there)
    assert send([[2, 3, 32]])[1]["shared_tokens"] == [0, 0, 32, 32, 32, *[0] * 19]
    assert send([])[1] == {n: [0] * 24 for n in there}


# Attention with prefix groups.


@dataclass
class Scene:
    """Groups of (rows, shared tokens). Each row has its own slot and the number of own tokens given by `own`; the last
    rows are padding. Slots and pages are in random order."""

    groups: list[tuple[int, int]]
    heads: int
    kv_heads: int
    head: int
    dtype: torch.dtype = torch.float32
    inactive: tuple[int, ...] = ()
    splits: int = 1
    width: int = 1
    own: tuple[int, ...] = (1, 2, 15, 16, 17, 31, 64, 65, 130, 299)
    state: DeviceState = field(init=False)
    plain: DeviceState = field(init=False)
    """The same, before the page tables were overwritten where a group reads for its rows."""

    def __post_init__(self) -> None:
        torch.manual_seed(sum(a * 7 + b for a, b in self.groups))
        shared = torch.tensor([b for a, b in self.groups for _ in range(a)])
        prefix_id = np.repeat(np.arange(len(self.groups)), [a for a, _ in self.groups])
        count = len(shared)
        length = shared + torch.tensor([self.own[i % len(self.own)] for i in range(count)]) - 1
        each = (int(length.max()) + self.width - 1) // PAGE + 2
        self.pool = KVPool(layers=2, pages=count * each, page_size=PAGE, kv_heads=self.kv_heads, head=self.head,
                         dtype=self.dtype, device=DEVICE)  # fmt: skip
        assert self.pool.data is not None
        self.pool.data.copy_(torch.randn(self.pool.shape))
        nan = count * each - 1
        table = torch.randperm(nan)[: count * (each - 1)].view(count, each - 1).int()
        table = torch.cat([table, torch.full((count, 1), nan)], 1)  # one page after the last page of every row
        for n in range(len(prefix_id)):
            leader = int(np.flatnonzero(prefix_id == prefix_id[n])[0])
            table[n, : shared[n] // PAGE] = table[leader, : shared[n] // PAGE]
        self.pool.data[:, :, nan] = float("nan")
        slots = torch.randperm(count)
        self.rows = torch.cat([slots, torch.full((2,), count)]).int().to(DEVICE)
        self.plain = DeviceState.new(count, each, DEVICE)
        self.plain.table[slots] = table.int().to(DEVICE)
        self.plain.length[slots] = length.int().to(DEVICE)
        self.plain.left[:-1] = 5
        self.plain.left[slots[list(self.inactive)]] = 0
        sharing = PrefixSharing(max_rows=TILE // (self.heads // self.kv_heads), min_tokens=1, min_saved_tokens=1)
        found = sharing.find_groups(prefix_id, shared.numpy() // PAGE, table.numpy(), PAGE)
        self.prefix_groups = self.as_tensors(found, 2 * len(found) + 1)
        spoiled = self.plain.table.clone()
        for first, n, reach in found.tolist():
            spoiled[slots[first + 1 : first + n], : reach // PAGE] = nan
        self.state = DeviceState(**{**{n: getattr(self.plain, n) for n in DeviceState.__slots__}, "table": spoiled})

    def as_tensors(self, found: np.ndarray, room: int) -> PrefixGroups:
        host_state = HostState(slots=1, pages_each=1, batch=max(room, len(self.rows)))
        host_state.set_prefix_groups(found, len(self.rows), room)
        names = {
            "first": "group_first",
            "count": "group_count",
            "tokens": "group_tokens",
            "shared_tokens": "shared_tokens",
        }
        sizes = dict.fromkeys(names, room) | {"shared_tokens": len(self.rows)}
        at = {
            k: torch.tensor(host_state.data[host_state.offsets[n] :][: sizes[k]], device=DEVICE)
            for k, n in names.items()
        }
        return PrefixGroups(**at, splits=self.splits)

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(DEVICE, self.dtype)


def close(a: Tensor, b: Tensor, *, rounded: float = 1e-2, exact: float = 2e-6) -> None:
    """Within `exact` of each other (relative to the largest) in float32, `rounded` in bfloat16."""
    assert a.shape == b.shape
    assert torch.isfinite(a).all()
    worst = (a.float() - b.float()).abs().max() / b.float().abs().max()
    assert worst <= (exact if a.dtype == torch.float32 else rounded), f"{worst:.2e} apart"


GROUPS = {
    "eight": [(8, 512)],
    "mixed": [(1, 0), (2, 16), (3, 48), (1, 96), (8, 144), (5, 0), (4, 600)],
    "larger": [(21, 272), (9, 32)],
    "few": [(7, 592), (2, 1104)],
}
SHAPES = [(4, 4, 64), (4, 2, 128), (9, 3, 64), (8, 2, 96), (5, 1, 64), (7, 1, 96), (8, 1, 128)]


def test_reference_reads_the_prefix_of_the_first_row() -> None:
    s = Scene(GROUPS["mixed"], 4, 2, 32, inactive=(1, 4))
    assert not torch.equal(s.state.table, s.plain.table)
    q = s.numbers(len(s.rows), 4, 32)
    alone = reference.decode_attention(q, s.rows, s.plain, s.pool, 1, 0.2, None, 1)
    assert torch.isfinite(alone).all()
    assert torch.equal(reference.decode_attention(q, s.rows, s.state, s.pool, 1, 0.2, None, 1, s.prefix_groups), alone)
    assert not torch.isfinite(reference.decode_attention(q, s.rows, s.state, s.pool, 1, 0.2, None, 1)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("groups", "splits", "prefix_splits", "width"),
    [
        ("eight", 1, 1, 1), ("eight", 8, 2, 1), ("mixed", 1, 1, 1), ("mixed", 2, 4, 1), ("larger", 2, 1, 1),
        ("few", 8, 8, 1), ("mixed", 1, 1, 2), ("larger", 2, 4, 3), ("few", 8, 2, 4), ("eight", 1, 1, 8),
    ],
)  # fmt: skip
def test_decode_attention_with_prefix_groups(
    kernels: ModuleType, groups: str, splits: int, prefix_splits: int, width: int, shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:  # fmt: skip
    s = Scene(GROUPS[groups], *shape, dtype=dtype, inactive=(0, 4), splits=prefix_splits, width=width)
    assert int(s.prefix_groups.shared_tokens.count_nonzero()) or shape[0] // shape[1] > TILE // 2
    q, how = s.numbers(len(s.rows) * width, shape[0], shape[2]), (shape[2] ** -0.5, None, splits)
    want = reference.decode_attention(q, s.rows, s.plain, s.pool, 1, *how, None, width)
    made = [kernels.decode_attention(q, s.rows, s.state, s.pool, 1, *how, s.prefix_groups, width) for _ in range(2)]
    close(made[0], want)
    assert torch.equal(made[0], made[1]), "the result must not vary"
    assert not made[0].unflatten(0, (-1, width))[[0, 4, -2, -1]].any(), "inactive rows and padding rows"


@pytest.mark.parametrize("splits", [1, 4])
def test_split_contexts_merge_the_shared_prefix_once(kernels: ModuleType, splits: int) -> None:
    s = Scene([(3, 272), (2, 528)], 4, 2, 64, splits=4, own=(900, 1, 300))
    q = s.numbers(len(s.rows), 4, 64)
    want = reference.decode_attention(q, s.rows, s.plain, s.pool, 0, 0.125, None, 1)
    close(kernels.decode_attention(q, s.rows, s.state, s.pool, 0, 0.125, None, splits, s.prefix_groups), want)


def test_windowed_layers_ignore_prefix_groups(kernels: ModuleType) -> None:
    s = Scene(GROUPS["mixed"], 4, 2, 64)
    q = s.numbers(len(s.rows), 4, 64)
    want = reference.decode_attention(q, s.rows, s.plain, s.pool, 0, 0.125, 100, 1)
    for how in (kernels, reference):
        close(how.decode_attention(q, s.rows, s.plain, s.pool, 0, 0.125, 100, 2, s.prefix_groups), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", [(4, 4, 64), (4, 2, 128), (9, 3, 96)])
@pytest.mark.parametrize(
    ("pairs", "splits", "prefix_splits", "width"), [(1024, 1, 1, 1), (1024, 4, 2, 1), (0, 1, 1, 1), (1024, 4, 2, 3)]
)
def test_rope_store_and_decode_with_prefix_groups(
    kernels: ModuleType, shape: tuple[int, int, int], normed: bool, pairs: int, splits: int, prefix_splits: int,
    width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("windfall.engine.cuda.kernels.decode._MAX_FUSED_PAIRS", pairs)  # up to this number: one launch
    heads, kv_heads, head = shape
    s = Scene(
        [(1, 0), (5, 80), (2, 304), (1, 32)], *shape, dtype=dtype, inactive=(1, 7), splits=prefix_splits, width=width
    )
    positions = reference.decode_inputs(s.plain, s.rows, None, width)[1]
    qkv = s.numbers(len(s.rows) * width, (heads + 2 * kv_heads) * head)
    cos, sin, *both = s.numbers(640, head), s.numbers(640, head), s.numbers(head), s.numbers(head)
    weights = both if normed else [None, None]
    assert s.pool.data is not None
    before, pools, out = s.pool.data.clone(), [], []
    for how, state, prefix_groups in ((kernels, s.state, s.prefix_groups), (reference, s.plain, None)):
        s.pool.data.copy_(before)
        more: tuple[Any, ...] = (cos, sin, *weights, 1e-6, heads, head**-0.5, None, splits, prefix_groups, width)
        out.append(how.rope_store_and_decode(qkv, s.rows, positions, state, s.pool, 1, *more))
        pools.append(s.pool.data[:, :, : s.pool.scratch].nan_to_num())
    close(out[0], out[1], rounded=2e-2)
    close(pools[0], pools[1], rounded=2**-7)


@pytest.mark.parametrize("max_running", [16, 4])
def test_engine_generates_the_same_with_and_without_prefix_groups(kernels: ModuleType, max_running: int) -> None:
    """From requests to kernels: siblings of two prompts, some started elsewhere, and a single response."""
    model = build("qwen3").to(DEVICE)
    prompts = [tuple(range(3, 40)), tuple(range(60, 93)), (5, 6, 7)]
    asked = [Request(id=str(n), prompt=prompts[n % 2], seed=n, max_tokens=3 + n) for n in range(5)]
    asked += [Request(id="m", prompt=(*prompts[0], 9), position=1, seed=8, max_tokens=4)]
    asked += [Request(id="a", prompt=prompts[2], seed=9, max_tokens=4)]
    said = []
    plain = kernels if CUDA else reference  # a graph cannot capture the reference, which waits for the device
    for ops, rows in ((kernels, 8), (plain, 0)):
        e = GraphEngine(model, kv_tokens=1024, max_running=max_running, burst=2, ops=ops,
                        sharing=PrefixSharing(max_rows=rows, min_tokens=16, min_saved_tokens=1))  # fmt: skip
        made = drain(e, asked)
        said.append({id: (tokens(chunks), logprobs(chunks)) for id, chunks in made.items()})
    for id, (said_tokens, sure) in said[0].items():
        assert said_tokens == said[1][id][0]
        assert sure == pytest.approx(said[1][id][1], abs=2e-3 if CUDA else 1e-4)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_captured_step_works_with_any_prefix_groups(kernels: ModuleType) -> None:
    """Groups are data: the same graph also works with other groups, and with none."""
    s = Scene(GROUPS["mixed"], 4, 2, 128, dtype=torch.bfloat16, splits=2)
    q = s.numbers(len(s.rows), 4, 128)
    want = reference.decode_attention(q, s.rows, s.plain, s.pool, 1, 0.1, None, 1)
    names = ("first", "count", "tokens", "shared_tokens")
    given = PrefixGroups(**{n: torch.zeros_like(getattr(s.prefix_groups, n)) for n in names}, splits=2)
    kernels.decode_attention(q, s.rows, s.plain, s.pool, 1, 0.1, None, 2, given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.decode_attention(q, s.rows, s.plain, s.pool, 1, 0.1, None, 2, given)
    for found in (
        s.prefix_groups,
        s.as_tensors(np.array([[7, 2, 16]], np.int32), s.prefix_groups.first.numel()),
        given,
    ):
        for n in names:
            getattr(given, n).copy_(getattr(found, n) if found is not given else torch.zeros_like(getattr(given, n)))
        graph.replay()
        close(out, want)
