"""Where the time of a decode step goes on one CPU thread: products, attention, sampling, other operations, Python.

    python benchmarks/engine/step_cpu.py                      SmolLM2-135M with 4, 8 and 32 responses
    python benchmarks/engine/step_cpu.py --model tiny

Each response has a prompt of 40 tokens. torch's profiler gives the time of every operation without those that it calls.
What is left of the step is Python and the profiler itself (about 5 %). The machine must be idle otherwise.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from windfall.engine.torch.engine import TorchEngine
from windfall.models import load
from windfall.types import Request

PROMPT = 40
WARM, STEPS = 5, 10
PARTS = {
    "products": ("mkl::_mkl_linear", "aten::mm", "aten::addmm"),
    "copies of pages": ("aten::index_select", "aten::index_copy_"),
    "attention": ("aten::_scaled_dot_product_flash_attention_for_cpu",),
}


def measure(model: torch.nn.Module, batch: int) -> dict[str, float]:
    """Milliseconds of a step, by part."""
    engine = TorchEngine(model, kv_tokens=2 * batch * (PROMPT + WARM + STEPS), max_running=batch)
    for n in range(batch):
        prompt = tuple(3 + (7 * i + 13 * (n // 8)) % 90 for i in range(PROMPT))
        engine.add(Request(id=str(n), prompt=prompt, seed=n, max_tokens=WARM + STEPS + 1))
    for _ in range(WARM):
        engine.step()
    sample = engine._runner._sample

    def recorded(*args: object) -> object:
        with record_function("sampling"):
            return sample(*args)  # pyright: ignore[reportArgumentType]

    engine._runner._sample = recorded  # pyright: ignore[reportAttributeAccessIssue]
    with profile(activities=[ProfilerActivity.CPU]) as p:
        began_s = time.perf_counter()
        for _ in range(STEPS):
            engine.step()
        step_ms = (time.perf_counter() - began_s) / STEPS * 1e3
    rows = {row.key: row for row in p.key_averages()}
    out = {part: sum(rows[k].self_cpu_time_total for k in keys if k in rows) for part, keys in PARTS.items()}
    out["sampling"] = rows["sampling"].cpu_time_total
    operations = sum(row.self_cpu_time_total for key, row in rows.items() if key.startswith(("aten::", "mkl")))
    inside = sum(e.self_cpu_time_total for e in p.events() or () if _in_sampling(e))
    out["other operations"] = operations - inside - sum(out[part] for part in PARTS)
    out = {part: us / STEPS / 1e3 for part, us in out.items()}
    return out | {"Python": step_ms - sum(out.values()), "all": step_ms}


def _in_sampling(event: object) -> bool:
    parent = getattr(event, "cpu_parent", None)
    return parent is not None and (parent.name == "sampling" or _in_sampling(parent))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="smollm2-135m")
    p.add_argument("--batches", default="4,8,32")
    args = p.parse_args()
    torch.set_num_threads(1)
    model = load.load(args.model, dtype="float32", device="cpu")
    for batch in map(int, args.batches.split(",")):
        parts = measure(model, batch)
        shown = ", ".join(f"{part} {ms / parts['all']:.0%}" for part, ms in parts.items() if part != "all")
        print(f"{batch:3} responses, {parts['all']:.1f} ms per step: {shown}", flush=True)


if __name__ == "__main__":
    main()
