"""Whole rollouts of the GPU engine: tokens per second, prefill included, and where the time of a decode step goes.

    python benchmarks/rollout_gpu.py [--shape 0.6b|8b] [--profile]

Random bfloat16 weights in the shapes of Qwen3, temperature 1. "n x in/out": n requests at once. The group workload is
64 prompts of 512 tokens with 8 siblings each, of uneven lengths up to 2048, mean about 600. On an H200 vLLM 0.23.0 made
21.7k tokens/s for 64 x 128/256 and 40.6k for 256 x 128/256 at the 0.6B shape.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from windfall.engine.gpu.engine import GraphEngine
from windfall.engine.gpu.graphs import batch_for
from windfall.types import Request

SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
           "tie_word_embeddings": False},
}  # fmt: skip


def model_of(shape: str) -> Any:
    config = Qwen3Config(
        vocab_size=151_936, num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960, **SHAPES[shape]
    )
    with torch.device("cuda"):
        torch.manual_seed(0)
        return Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def requests(count: int, prompt: int, lengths: Sequence[int], siblings: int = 1) -> list[Request]:
    rng = np.random.default_rng(count)
    prompts = [tuple(rng.integers(10, 150_000, prompt).tolist()) for _ in range(-(-count // siblings))]
    return [Request(id=str(n), prompt=prompts[n // siblings], seed=n, max_tokens=int(lengths[n])) for n in range(count)]


def group_workload() -> list[Request]:
    lengths = np.clip(np.random.default_rng(1).lognormal(6.22, 0.75, 512).astype(int), 8, 2048)
    return requests(512, 512, lengths.tolist(), siblings=8)


def rollout(engine: GraphEngine, asked: list[Request]) -> tuple[float, int, float]:
    """(seconds, tokens, seconds in which the host did not wait)."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for r in asked:
        engine.add(r)
    made, waited = 0, [0.0]
    LANDINGS.clear()
    landed = _timed_landing(waited)
    try:
        while len(engine):
            made += sum(len(c.tokens) for c in engine.step())
    finally:
        landed()
    took = time.perf_counter() - started
    return took, made, took - waited[0]


LANDINGS: list[tuple[float, int, int, int]] = []
"""Of the last rollout: when a launch came out, its rows, its steps and its prefills."""


def where_time_went() -> None:
    """By size of batch: steps, milliseconds of each, seconds in all."""
    spent: dict[int, list[float]] = {}
    for (before, *_), (now, rows, steps, parts) in pairwise(LANDINGS):
        at = spent.setdefault(0 if parts else batch_for(rows), [0, 0.0])
        at[0] += steps
        at[1] += now - before
    for batch, (steps, seconds) in sorted(spent.items()):
        what = f"batch {batch:4d}" if batch else "with prefill"
        print(f"    {what:12s} {steps:6.0f} steps  {1e3 * seconds / max(1, steps):7.2f} ms/step  {seconds:7.3f} s")


def _timed_landing(waited: list[float]) -> Any:
    from windfall.engine.gpu.device import Flight

    plain = Flight.landed

    def timed(self: Flight) -> Any:
        before = time.perf_counter()
        self.event.synchronize()
        now = time.perf_counter()
        waited[0] += now - before
        LANDINGS.append((now, len(self.work.rows), self.work.steps, len(self.work.parts)))
        return plain(self)

    Flight.landed = timed
    return lambda: setattr(Flight, "landed", plain)


def timed_captures() -> list[float]:
    """Grows by the seconds of every graph that is captured from now on."""
    from windfall.engine.gpu.graphs import Graphs

    seconds: list[float] = []
    plain = Graphs.prepare

    def timed(self: Graphs, kind: Any) -> None:
        had, before = len(self), time.perf_counter()
        plain(self, kind)
        if len(self) > had:
            seconds.append(time.perf_counter() - before)

    Graphs.prepare = timed
    return seconds


def nap(engine: GraphEngine) -> tuple[float, float]:
    times = []
    for do in (engine.sleep, engine.wake):
        torch.cuda.synchronize()
        before = time.perf_counter()
        do()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - before)
    return times[0], times[1]


def profile(engine: GraphEngine) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    for r in requests(256, 128, [256] * 256):
        engine.add(r)
    while len(engine._plan.waiting) or engine._plan._prefilling:
        engine.step()
    for _ in range(8):
        engine.step()
    torch.cuda.synchronize()
    before = engine.counters.steps
    with watch(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        started = time.perf_counter()
        for _ in range(4):
            engine.step()
        torch.cuda.synchronize()
        took = time.perf_counter() - started
    steps = engine.counters.steps - before
    print(f"\n{steps} steps at batch 256, {1e3 * took / steps:.2f} ms each (profiled); kernels by time per step:")
    rows = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)
    for e in rows[:16]:
        if e.self_device_time_total:
            print(f"  {e.self_device_time_total / steps:8.1f} us  {e.count / steps:6.1f} x  {e.key[:90]}")
    while len(engine):
        engine.step()


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--shape", choices=list(SHAPES), default="0.6b")
    options.add_argument("--profile", action="store_true")
    options.add_argument("--rows", type=int, default=8192, help="of a launch: the engine's max_rows")
    options.add_argument("--where", action="store_true", help="by size of batch")
    options.add_argument("--repeat", type=int, default=2)
    options.add_argument("--most", type=int, default=1024, help="requests of a workload")
    options.add_argument("--only", default="", help="workloads whose name has this in it")
    o = options.parse_args()
    model = model_of(o.shape)
    kv_tokens = 900_000 if o.shape == "0.6b" else 400_000
    engine = GraphEngine(model, kv_tokens=kv_tokens, max_running=1024, max_rows=o.rows, longest=2560)
    work = {
        "64 x 128/256": requests(64, 128, [256] * 64),
        "256 x 128/256": requests(256, 128, [256] * 256),
        "1024 x 128/256": requests(1024, 128, [256] * 1024),
        "64 groups of 8": group_workload(),
    }
    captured = timed_captures()
    print(f"{'workload':16s} {'tokens':>8s} {'s':>7s} {'tokens/s':>9s} {'host us/token':>14s}   the first time")
    for name, asked in work.items():
        if o.only not in name or len(asked) > o.most:
            continue
        captured.clear()
        first, _, _ = rollout(engine, asked)
        graphs = f"{len(captured)} graphs captured in {sum(captured):.2f} s, the slowest {max(captured, default=0):.2f}"
        took, made, busy = min(rollout(engine, asked) for _ in range(o.repeat))
        speed = f"{made / took:9.0f} {1e6 * busy / made:14.2f}"
        print(f"{name:16s} {made:8d} {took:7.3f} {speed}   {first:.2f} s; {graphs}", flush=True)
        if o.where:
            where_time_went()
    slept, woke = nap(engine)
    gigabytes = engine._device.pool.nbytes / 1e9
    print(f"the pool of {gigabytes:.0f} GB: given up in {slept:.3f} s, taken back in {woke:.3f} s")
    if o.profile:
        profile(engine)


if __name__ == "__main__":
    main()
