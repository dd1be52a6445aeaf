"""Every kernel of the GPU engine at the shapes of Qwen3-0.6B and Qwen3-8B: microseconds inside a captured graph, and
the achieved share of the memory bandwidth.

    python benchmarks/engine/gpu_kernels.py [--bandwidth-tb-per-s 4.3] [--only groups]

Calls alternate between layers or buffers that together are much larger than the L2, so that no data is cached that
would not be cached in a real step. A share above 1 means that the data of the kernel still fits into the L2 at that
batch.

Groups: groups of eight siblings with a prompt of 512 tokens and uneven contexts, read in prefix groups or by every row
alone. The share counts the same bytes for both: every prompt once per group, plus each row's own context."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from windfall.engine.cuda import kernels
from windfall.engine.cuda.splits import PrefixSharing, pack_spans, prefill_tile
from windfall.engine.cuda.state import DeviceState, KVPool, PrefixGroups, Spans

Call = Callable[[], object]
PAGE, VOCABULARY, FRESH_BYTES = 16, 151_936, 400_000_000
BATCHES = (1, 16, 64, 256, 512)
SIBLINGS, PROMPT, GROUP_BATCHES = 8, 512, (64, 128, 256, 512)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int


SHAPES = (
    Shape(name="Qwen3-0.6B", hidden=1024, inner=3072, heads=16, kv_heads=8, head=128),
    Shape(name="Qwen3-8B", hidden=4096, inner=12288, heads=32, kv_heads=8, head=128),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    name: str
    batch: int
    calls: list[Call]
    nbytes: int
    """Bytes that one call must read or write."""
    flops: int = 0


def time_us(calls: list[Call], replays: int = 5) -> float:
    """Microseconds per call, in a graph of all calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / replays / len(calls)


def copies(nbytes: int) -> int:
    """Number of buffers of that size that together are much larger than the L2."""
    return max(4, min(256, -(-FRESH_BYTES // nbytes)))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def scene(s: Shape, batch: int, context: int, layers: int) -> tuple[DeviceState, KVPool, Tensor]:
    """`batch` responses of `context` tokens, on pages in random order."""
    each = context // PAGE + 1
    pool = KVPool(layers=layers, pages=batch * each, page_size=PAGE, kv_heads=s.kv_heads, head=s.head,
                dtype=torch.bfloat16, device="cuda")  # fmt: skip
    assert pool.data is not None
    pool.data.normal_()
    state = DeviceState.new(batch, each, "cuda")
    state.table[:-1] = torch.randperm(batch * each, device="cuda").view(batch, each)
    state.length[:-1] = context - 1
    state.left[:-1] = 1_000_000
    return state, pool, torch.arange(batch, dtype=torch.int32, device="cuda")


def decode(s: Shape, batch: int, context: int) -> Case:
    nbytes = batch * (2 * context * s.kv_heads + 2 * s.heads) * s.head * 2
    layers = copies(nbytes)
    state, pool, rows = scene(s, batch, context, layers)
    q = random(batch, s.heads, s.head)
    splits = kernels.splits_for(batch, s.kv_heads, context, torch.cuda.get_device_properties(0).multi_processor_count)
    calls: list[Call] = [
        lambda i=i: kernels.decode_attention(q, rows, state, pool, i, s.head**-0.5, None, splits) for i in range(layers)
    ]
    return Case(name=f"decode, {context} tokens", batch=batch, calls=calls, nbytes=nbytes)


def uneven(s: Shape, batch: int) -> Case:
    """Typical lengths of responses: about 600 tokens on average, some much longer."""
    state, pool, rows = scene(s, batch, 2048, 8)
    torch.manual_seed(batch)
    state.length[:-1] = torch.empty(batch).exponential_(1 / 600).clamp(64, 2040).cuda().int()
    q = random(batch, s.heads, s.head)
    splits = kernels.splits_for(batch, s.kv_heads, 2048, torch.cuda.get_device_properties(0).multi_processor_count)
    calls: list[Call] = [
        lambda i=i: kernels.decode_attention(q, rows, state, pool, i, s.head**-0.5, None, splits) for i in range(8)
    ]
    nbytes = int(state.length.sum()) * 2 * s.kv_heads * s.head * 2
    return Case(name="decode, uneven", batch=batch, calls=calls, nbytes=nbytes)


def prefix_groups_of(s: Shape, table: Tensor) -> PrefixGroups:
    """The prefix groups that the engine would find, without a minimum saving."""
    batch, sharing = len(table), replace(PrefixSharing.for_heads(s.heads, s.kv_heads), min_saved_tokens=0)
    prefix_id, pages = np.arange(batch) // SIBLINGS, np.full(batch, PROMPT // PAGE)
    found = sharing.find_groups(prefix_id, pages, table[:, : PROMPT // PAGE].cpu().numpy(), PAGE)
    first, count, tokens = torch.tensor(found.T, device="cuda").contiguous()
    cores = torch.cuda.get_device_properties(0).multi_processor_count
    return PrefixGroups(
        first=first, count=count, tokens=tokens, shared_tokens=torch.full_like(table[:, 0], PROMPT),
        splits=kernels.splits_for(len(found), s.kv_heads, PROMPT, cores),
    )  # fmt: skip


def groups(s: Shape, batch: int, *, together: bool, most: int = 2048) -> Case:
    """`rope_store_and_decode` of siblings with about 500 generated tokens on average, some with many more."""
    state, pool, rows = scene(s, batch, PROMPT + most, 8)
    torch.manual_seed(batch)
    own = torch.empty(batch).exponential_(1 / 500).clamp(16, most - 8).int()
    state.length[:-1] = (PROMPT + own - 1).cuda()
    leader = torch.arange(batch, device="cuda") // SIBLINGS * SIBLINGS
    state.table[:-1, : PROMPT // PAGE] = state.table[leader, : PROMPT // PAGE]
    prefix_groups = prefix_groups_of(s, state.table[:-1]) if together else None
    qkv, positions = random(batch, (s.heads + 2 * s.kv_heads) * s.head), state.length[:batch]
    cos, sin, w = random(4096, s.head), random(4096, s.head), random(s.head)
    longest = most if together else 2 * most  # rounded up, as the engine does
    splits = kernels.splits_for(batch, s.kv_heads, longest, torch.cuda.get_device_properties(0).multi_processor_count)
    calls: list[Call] = [
        lambda i=i: kernels.rope_store_and_decode(
            qkv,
            rows,
            positions,
            state,
            pool,
            i,
            cos,
            sin,
            w,
            w,
            1e-6,
            s.heads,
            s.head**-0.5,
            None,
            splits,
            prefix_groups,
        )
        for i in range(8)
    ]
    nbytes = (batch // SIBLINGS * PROMPT + int(own.sum())) * 2 * s.kv_heads * s.head * 2
    return Case(name="groups, families" if together else "groups, alone", batch=batch, calls=calls, nbytes=nbytes)


def rope_store_and_decode(s: Shape, batch: int, context: int) -> Case:
    """`rope_store_and_decode`: `rope_and_store` and `decode_attention` in one launch."""
    nbytes = batch * (2 * context * s.kv_heads + 2 * s.heads + 2 * s.kv_heads) * s.head * 2
    layers = copies(nbytes)
    state, pool, rows = scene(s, batch, context, layers)
    qkv, positions = random(batch, (s.heads + 2 * s.kv_heads) * s.head), state.length[:batch]
    cos, sin, w = random(4096, s.head), random(4096, s.head), random(s.head)
    splits = kernels.splits_for(batch, s.kv_heads, context, torch.cuda.get_device_properties(0).multi_processor_count)
    calls: list[Call] = [
        lambda i=i: kernels.rope_store_and_decode(
            qkv, rows, positions, state, pool, i, cos, sin, w, w, 1e-6, s.heads, s.head**-0.5, None, splits
        )
        for i in range(layers)
    ]
    return Case(name=f"rope+decode, {context}", batch=batch, calls=calls, nbytes=nbytes)


def rope_and_store(s: Shape, batch: int) -> Case:
    nbytes = batch * 2 * (s.heads + 2 * s.kv_heads) * s.head * 2
    layers = min(64, copies(nbytes))
    state, pool, rows = scene(s, batch, 128, layers)
    qkv = random(layers, batch, (s.heads + 2 * s.kv_heads) * s.head)
    cos, sin, w = random(4096, s.head), random(4096, s.head), random(s.head)
    calls: list[Call] = [
        lambda i=i: kernels.rope_and_store(
            qkv[i], rows, state.length[:batch], state, pool, i, cos, sin, w, w, 1e-6, s.heads, s.kv_heads
        )
        for i in range(layers)
    ]
    return Case(name="rope+store", batch=batch, calls=calls, nbytes=nbytes)


def norm(s: Shape, batch: int) -> Case:
    nbytes = 4 * batch * s.hidden * 2
    x, y, w = random(copies(nbytes), batch, s.hidden), random(copies(nbytes), batch, s.hidden), random(s.hidden)
    calls: list[Call] = [lambda i=i: kernels.add_rms_norm(x[i], y[i], w, 1e-6) for i in range(len(x))]
    return Case(name="norm", batch=batch, calls=calls, nbytes=nbytes)


def swiglu(s: Shape, batch: int) -> Case:
    nbytes = 3 * batch * s.inner * 2
    x = random(copies(nbytes), batch, 2 * s.inner)
    return Case(
        name="swiglu", batch=batch, calls=[lambda i=i: kernels.swiglu(x[i]) for i in range(len(x))], nbytes=nbytes
    )


def sample(s: Shape, batch: int) -> Case:
    nbytes = batch * (VOCABULARY + 4096) * 2
    logits = random(min(32, copies(nbytes)), batch, VOCABULARY)
    state, _, rows = scene(s, batch, 16, 1)
    tokens, logprobs = torch.empty_like(rows), torch.empty(batch, device="cuda")
    calls: list[Call] = [
        lambda i=i: kernels.sample(logits[i], rows, state, tokens, logprobs, False) for i in range(len(logits))
    ]
    return Case(name="sample", batch=batch, calls=calls, nbytes=nbytes)


def decode_inputs(s: Shape, batch: int) -> Case:
    state, _, rows = scene(s, batch, 16, 1)
    return Case(
        name="inputs", batch=batch, calls=[lambda: kernels.decode_inputs(state, rows, None, 1)] * 20, nbytes=20 * batch
    )


def prefill(s: Shape, prompts: int, count: int, start: int) -> Case:
    """`prompts` chunks of `count` tokens, each after `start` tokens that are in the pool already."""
    end, total = start + count, prompts * count
    nbytes = prompts * 2 * end * s.kv_heads * s.head * 2 + 2 * total * s.heads * s.head * 2
    state, pool, _ = scene(s, prompts, end, 4)
    each, tile = np.ones(prompts, np.int32), prefill_tile(count, 2)
    rows_each = tile // (s.heads // s.kv_heads)
    size = {"rows": total, "tiles": prompts * -(-count // rows_each)}
    chunks = (np.arange(prompts, dtype=np.int32), each * count, each * start)
    packed = pack_spans([0] * total, *chunks, **size, rows_each=rows_each, padding=prompts)
    spans = Spans.of(torch.from_numpy(packed).cuda(), total, size["tiles"], tile)
    q = random(total, s.heads, s.head)
    calls: list[Call] = [
        lambda i=i: kernels.prefill_attention(q, spans, state, pool, i, s.head**-0.5, None) for i in range(4)
    ]
    flops = 4 * prompts * s.heads * s.head * count * (start + (count + 1) // 2)
    return Case(name=f"prefill, {count} after {start}", batch=prompts, calls=calls, nbytes=nbytes, flops=flops)


def rows_of(s: Shape) -> Iterator[Callable[[int], Case]]:
    yield lambda b: decode_inputs(s, b)
    yield lambda b: norm(s, b)
    yield lambda b: rope_and_store(s, b)
    for context in (256, 1024, 2048):
        yield lambda b, c=context: decode(s, b, c)
    yield lambda b: uneven(s, b)
    yield lambda b: rope_store_and_decode(s, b, 256)
    yield lambda b: swiglu(s, b)
    yield lambda b: sample(s, b)


def table(rows: Iterable[Callable[[int], Case]], batches: Sequence[int], bandwidth: float) -> None:
    print(f"{'batch':20}" + "".join(f"{b:>14}" for b in batches))
    for row in rows:
        name, cells = "", []
        for batch in batches:
            case = row(batch)  # one at a time: each holds gigabytes
            us = time_us(case.calls)
            name = case.name
            cells += [f"{us:8.1f} {case.nbytes / us / 1e6 / bandwidth:5.2f}"]
            del case
        print(f"{name:20}" + "".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth-tb-per-s", type=float, default=4.3)
    parser.add_argument("--only", choices=["groups"])
    asked = parser.parse_args()
    bandwidth = asked.bandwidth_tb_per_s
    for s in SHAPES:
        print(f"\n{s.name}: us per call, share of {bandwidth} TB/s")
        together = [lambda b, s=s, t=t: groups(s, b, together=t) for t in (False, True)]
        table(together, GROUP_BATCHES, bandwidth)
        if asked.only:
            continue
        table(rows_of(s), BATCHES, bandwidth)
        for prompts, count, start in ((64, 128, 0), (16, 512, 0), (4, 2048, 0), (1, 8192, 0), (256, 12, 500)):
            case = prefill(s, prompts, count, start)
            us = time_us(case.calls)
            print(f"{case.name + f', {prompts} chunks':32} {us:8.1f} us, {case.flops / us / 1e6:5.0f} TFLOP/s,"
                  f" {case.nbytes / us / 1e6 / bandwidth:4.2f} of the bandwidth", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
