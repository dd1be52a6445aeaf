"""Several adapters of one base in one batch, beside one merged model, on a GPU: tokens/s. Random bf16 weights.

    python benchmarks/engine/adapters.py                        0.6B and 8B, 1, 4 and 16 adapters of rank 16
    python benchmarks/engine/adapters.py --vllm FOLDER          also vLLM's own adapters, as a windfall engine
    python benchmarks/engine/adapters.py --quick --model 8b     one model, fewer cases
    python benchmarks/engine/adapters.py --model tiny --device cpu        check that the benchmark itself works

First the kernels are compared with plain torch on the shapes of the model (check), and each projection with adapters is
timed in captured graphs beside the same without (kernels). Then requests of all policies in turn run through the
engine's interface:

- decode: ms per step;  rollout: tokens/s, all requests at once, temperature 1, no stop tokens;
- share: of the speed of the same engine with one merged model.

Each engine has a process of its own, one after the other; support/gpu_job.py has the shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found
sys.path.append(str(Path(__file__).parents[2] / "src"))  # the last place to look: nothing of vLLM's is hidden

from benchmarks.engine.gpu import run
from benchmarks.support.gpu_job import SHAPES, Job, Work, alike
from benchmarks.support.gpu_measure import Figure, best_s, timed_s
from benchmarks.support.gpu_windfall import Windfall

CLOSE = 0.03
"""Largest accepted difference of the kernels from plain torch, relative to the largest value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    model: str
    device: str
    adapters: int  # 0: one merged model
    rank: int
    vllm: bool = False
    kernels: bool = False  # check and time the kernels only
    quick: bool = False  # fewer cases

    @property
    def name(self) -> str:
        return f"{self.adapters} adapters" if self.adapters else "merged"

    @property
    def tiny(self) -> bool:
        return self.model == "tiny"


class Policies(Windfall):
    """Gives requests to the policies in turn."""

    def __init__(self, engine: Any, policies: int) -> None:
        super().__init__(engine)
        self._policies = policies

    def _add(self, work: Work) -> dict[str, int]:
        from windfall.types import Request

        number, made = next(self._run), {}
        for n, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
            made[id := f"{number}/{n}"] = 0
            policy = f"p{n % self._policies}" if self._policies else ""
            self._engine.add(Request(id=id, prompt=tuple(prompt), seed=n, max_tokens=length, policy=policy))
        return made


def spec_of(case: Case) -> Any:
    from windfall.link.messages import EngineSpec

    return EngineSpec(
        model_config=json.dumps(SHAPES[case.model]), dtype="bfloat16" if case.device == "cuda" else "float32",
        kv_tokens=4096 if case.tiny else 0, page_size=16, max_running=1024, max_rows=8192, deterministic=False,
        longest=256 if case.tiny else 512, wanted=1024, speculation="off", adapters=case.adapters,
        adapter_rank=case.rank if case.adapters else 0,
    )  # fmt: skip


def random_adapter(shapes: dict[str, Any], rank: int, device: str) -> dict[str, Any]:
    import re

    import torch

    out: dict[str, Any] = {}
    for name, shape in shapes.items():
        if len(shape) == 2 and re.search(r"\.\d+\.", name):
            layer = name.removesuffix(".weight")
            out[f"{layer}.lora_A.weight"] = torch.randn(rank, shape[1], device=device) / shape[1] ** 0.5
            out[f"{layer}.lora_B.weight"] = torch.randn(shape[0], rank, device=device) * 0.02
    return out


def hold(engine: Any, case: Case, shapes: dict[str, Any], device: str) -> None:
    import torch

    from windfall.weights.merged import MergedWeights

    base = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    for n in range(case.adapters):
        adapter = random_adapter(shapes, case.rank, device)
        engine.swap(0, MergedWeights(base, adapter, 1.0, base_is_loaded=True), policy=f"p{n}")


def windfall_engine(case: Case) -> Any:
    import torch

    from windfall.engine import factory

    spec = spec_of(case)
    model = factory.build_model(spec, case.device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1)
    engine, _ = factory.build_engine(spec, case.device, model=model, share=0.8)
    hold(engine, case, {name: t.shape for name, t in model.state_dict().items()}, case.device)
    return engine


def vllm_engine(case: Case) -> Any:
    from windfall.engine.vllm import factory as vllm_factory

    engine = vllm_factory.build(spec_of(case), case.device, share=0.8)[0]
    hold(engine, case, engine.shapes.shapes, "cpu")
    return engine


def measure(case: Case) -> None:
    job = Job(model=case.model, device=case.device)
    peer = Policies(vllm_engine(case) if case.vllm else windfall_engine(case), case.adapters)
    for batch in (4,) if case.tiny else (16, 256) if case.quick else (16, 64, 256):
        prompt, short, long = (24, 4, 20) if case.tiny else (192, 16, 144)
        works = [alike(job, batch, prompt, length, batch) for length in (short, long)]
        for work in reversed(works):
            timed_s(peer, work)
        short_s, long_s = (min(timed_s(peer, work) for _ in range(2)) for work in works)
        step_ms = 1e3 * (long_s - short_s) / (long - short)
        Figure(what="decode", case=f"batch {batch}", value=step_ms, unit="ms").emit()
    for count in (8,) if case.tiny else (256,) if case.quick else (64, 256, 1024):
        prompt, length = (16, 24) if case.tiny else (128, 256)
        works = [alike(job, count, prompt, length, 1000 * count + seed) for seed in range(3)]
        rate = works[0].tokens / best_s(peer, works)
        Figure(what="rollout", case=f"{count} x {prompt} in, {length} out", value=rate, unit="tok/s").emit()


def kernels(case: Case) -> None:
    """Compare the kernels with plain torch for every projection of the model, and time them."""
    import torch
    from torch.nn import functional as F

    from windfall.engine.cuda import kernels as ops
    from windfall.engine.cuda.adapters import ProjectionAdapters, padded_rank
    from windfall.engine.cuda.state import DeviceState

    c, rank, how = SHAPES[case.model], padded_rank(case.rank), {"device": "cuda", "dtype": torch.bfloat16}
    hidden, wide, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    heads, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    shapes = {"qkv": (hidden, (heads, kv, kv)), "out": (heads, (hidden,)), "gate_up": (hidden, (wide, wide))}
    shapes["down"] = (wide, (hidden,))
    total = {"projections": 0.0, "adapters": 0.0}
    for name, (inputs, outputs) in shapes.items():
        total_outputs, parts = sum(outputs), len(outputs)
        adapters = ProjectionAdapters(
            weight=torch.randn(total_outputs + case.adapters * parts * rank, inputs, **how) / inputs**0.5, bias=None,
            b=torch.randn(case.adapters, total_outputs, rank, **how) / rank**0.5,
            scale=torch.rand(case.adapters, device="cuda") + 0.5, outputs=outputs,
        )  # fmt: skip
        weight = adapters.weight[:total_outputs].clone()
        for rows in (16, 256, 2048):
            state = DeviceState.new(rows, 1, "cuda")
            slots = torch.arange(rows, dtype=torch.int32, device="cuda")
            numbers = torch.arange(rows, device="cuda") * 7 % (case.adapters + 1) - 1
            state.adapter[:rows] = numbers.int()
            x = torch.randn(rows, inputs, **how)
            y = F.linear(x, adapters.weight)
            expected, hidden = y[:, :total_outputs].float(), y[:, total_outputs:].unflatten(1, (-1, parts, rank))
            for n in range(case.adapters):
                own = numbers == n
                h, b = (hidden[own, n].float() * adapters.scale[n]).bfloat16().float(), adapters.b[n].float()
                added = [h[:, part] @ m.T for part, m in enumerate(b.split(outputs))]
                expected[own] += torch.cat(added, 1)
            if name == "gate_up":
                gate, up = expected.bfloat16().chunk(2, 1)
                expected = (F.silu(gate) * up).float()
            groups = ops.group_rows(slots, state, case.adapters)
            add = ops.add_adapters_swiglu if name == "gate_up" else ops.add_adapters
            off = float((add(y, adapters, groups).float() - expected).abs().max() / expected.abs().max())
            if not off < CLOSE:
                raise RuntimeError(f"{name}, {rows} rows: the kernels differ from plain torch by {off:.3f}")
            if rows == 256:
                plain = (
                    (lambda x=x, w=weight: ops.swiglu(F.linear(x, w)))
                    if name == "gate_up"
                    else (lambda x=x, w=weight: F.linear(x, w))
                )
                plain_us = captured_us(plain)
                own_us = captured_us(lambda x=x, a=adapters, g=groups, add=add: add(F.linear(x, a.weight), a, g))
                total["projections"] += plain_us
                total["adapters"] += own_us - plain_us
                share = own_us / plain_us
                Figure(what="kernels", case=f"{name}, 256 rows", value=own_us, unit="us", share=share).emit()
    per_step = {what: us * c["num_hidden_layers"] / 1e3 for what, us in total.items()}
    note = f"projections {per_step['projections']:.2f} ms, {3 * c['num_hidden_layers'] + 1} launches more"
    Figure(what="kernels", case="all layers, 256 rows", value=per_step["adapters"], unit="ms", note=note).emit()
    print("check: the kernels agree with plain torch", flush=True)


def captured_us(call: Callable[[], Any], times: int = 50) -> float:
    """Microseconds of a call in a captured graph of many."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    graph.replay()
    events[0].record()
    graph.replay()
    events[1].record()
    torch.cuda.synchronize()
    return 1e3 * events[0].elapsed_time(events[1]) / times


Rows = dict[tuple[str, str, str], dict[tuple[str, int], Figure]]
"""By model, kind of measurement and case; then by engine and number of adapters."""


def table(rows: Rows) -> str:
    """One row per measurement, one column per engine and number of adapters.

    >>> f = Figure(what="decode", case="batch 16", value=2.0, unit="ms")
    >>> slower = Figure(what="decode", case="batch 16", value=2.5, unit="ms")
    >>> print(table({("8b", "decode", "batch 16"): {("windfall", 0): f, ("windfall", 4): slower}}))
    model   what     case                       windfall merged       windfall 4
    8b      decode   batch 16                           2.00 ms   2.50 ms (0.80)
    """
    columns = list(dict.fromkeys(c for by in rows.values() for c in by))
    heads = "".join(f"{engine + ' ' + (str(n) if n else 'merged'):>17}" for engine, n in columns)
    lines = [f"{'model':<8}{'what':<9}{'case':<25}{heads}"]
    for (model, what, case), by in rows.items():
        lines.append(f"{model:<8}{what:<9}{case:<25}" + "".join(f"{_cell(by, c):>17}" for c in columns))
    return "\n".join(lines)


def _cell(by: dict[tuple[str, int], Figure], column: tuple[str, int]) -> str:
    f, merged = by.get(column), by.get((column[0], 0))
    if f is None:
        return "-"
    value = f"{f.value:.2f} ms" if f.unit == "ms" else f"{f.value:,.0f}/s"
    if merged is None or not column[1]:
        return value
    return f"{value} ({merged.value / f.value if f.unit == 'ms' else f.value / merged.value:.2f})"


def one(case: Case, env: dict[str, str], timeout_s: float) -> list[Figure]:
    found: list[Figure] = []
    for line in run(Path(__file__), ["--one", json.dumps(asdict(case))], env, timeout_s):
        f = Figure.parse(line)
        if f is None:
            if line.startswith("check"):  # the rest is what libraries say
                print(f"  {line}", flush=True)
            continue
        found.append(f)
        share = f" ({f.share:.2f} times as long as without adapters)" if f.share else ""
        engine = "vLLM" if case.vllm else "windfall"
        said = f"{f.value:,.2f} {f.unit}{share} {f.note}".rstrip()
        print(f"  {case.model:<6}{engine:<10}{case.name:<12}{f.what:<9}{f.case:<26}{said}", flush=True)
    return found


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="0.6b,8b", help=f"comma-separated, from {', '.join(SHAPES)}")
    p.add_argument("--adapters", default="1,4,16", help="comma-separated numbers of adapters")
    p.add_argument("--rank", type=int, default=16)
    p.add_argument("--quick", action="store_true", help="fewer cases")
    p.add_argument("--device", default="cuda")
    p.add_argument("--vllm", type=Path, help="folder where vLLM is installed")
    p.add_argument("--timeout-s", type=float, default=300, help="timeout of each process in seconds")
    p.add_argument("--one", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.one:
        case = Case(**json.loads(args.one))
        kernels(case) if case.kernels else measure(case)
        return
    counts, rows, failed = [int(n) for n in args.adapters.split(",")], Rows(), False
    path = os.environ.get("PYTHONPATH", "")
    for model in args.model.split(","):
        how: dict[str, Any] = {"model": model, "device": args.device, "rank": args.rank, "quick": args.quick}
        cases = [Case(adapters=max(counts), kernels=True, **how)] if args.device == "cuda" else []
        cases += [Case(adapters=n, **how) for n in (0, *counts)]
        cases += [Case(adapters=n, vllm=True, **how) for n in (0, *counts)] if args.vllm else []
        for case in cases:
            env = {"PYTHONPATH": f"{args.vllm}{os.pathsep}{path}".rstrip(os.pathsep)} if case.vllm else {}
            try:
                figures = one(case, env, args.timeout_s)
            except RuntimeError as e:
                failed = True
                print(f"  {case}: {e}", flush=True)
                continue
            for f in figures if not case.kernels else ():
                rows.setdefault((model, f.what, f.case), {})["vLLM" if case.vllm else "windfall", case.adapters] = f
    print(f"\n{table(rows)}" + ("\nsome processes failed: see above" if failed else ""), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
