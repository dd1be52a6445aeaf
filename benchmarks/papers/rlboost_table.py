"""RLBoost's evaluation reproduced in virtual time, beside the paper's figures (NSDI'26, arXiv 2510.19225).

    python benchmarks/papers/rlboost_table.py [--trace bamboo-p3-trace.csv] [--quick] [--only models,static,...]

The product's own controller and policies run on simulated machines (docs/sim.md). rlboost_model.py describes these
machines: published figures of H100 and Qwen3, assumed efficiencies, and one number fitted to the paper's CO-LOCATED
throughput of 8B. Nothing is fitted to the paper's results for harvesting. `rlboost` is Algorithms 1 and 2 as published,
on windfall's mechanisms (migration, pulls, pipelining); `windfall` is windfall's own policies.

Sections: models, static, ablations, lengths, sensitivity, memory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

from benchmarks.papers import rlboost
from benchmarks.support import rlboost_model as rb
from benchmarks.support.rlboost_model import MODELS, Assumptions, Model
from windfall.events import log as events
from windfall.providers import trace
from windfall.providers.trace_formats import Change
from windfall.recipe.sections import Recipe
from windfall.sim.report import figures
from windfall.sim.report.figures import Figures

PAPER = {"8B": (1.66, 1.34), "14B": (1.97, 1.49), "32B": (1.51, 1.28)}
"""Tokens per second and per dollar, relative to co-located training."""
STATIC = {1: (1.37, 1.28), 6: (2.25, 1.62)}
"""The same for 14B, by number of instances that stay."""
ARTIFACT = {0: 10, 1: 12, 2: 14, 3: 16, 4: 18}
"""Thousand tokens per second of 8B, by number of instances."""
LENGTHS = {5_000: 1.47, 14_000: 2.22}
SHARES = ("memory", "decode", "train", "alike", "kv_share", "trainer_kv")


@dataclass(kw_only=True)
class Bench:
    folder: Path
    quick: bool
    began_s: float
    runs: int = 0

    def simulate(self, recipe: Recipe, name: str, changes: Sequence[Change] | None = None) -> Figures:
        return self.simulate_equal_steps({name: recipe}, changes)[0]

    def simulate_equal_steps(
        self, recipes: Mapping[str, Recipe], changes: Sequence[Change] | None = None
    ) -> list[Figures]:
        """The figures of these variants, each with its recipe, over the steps that all of them complete."""
        done = []
        for name, recipe in recipes.items():
            w = rlboost.build(recipe, name)
            if changes is not None and name != "colocated":
                w = replace(w, changes=tuple(changes))
            done.append(figures.simulate(w, self.folder / f"{name}.jsonl"))
            self.runs += 1
            status = f"{recipe.run.name}, {name}: run {self.runs}, {time.perf_counter() - self.began_s:.0f} s"
            print(f"\r{status:<70}", end="", file=sys.stderr, flush=True)
        return figures.figures_of_equal_steps(done)

    def steps(self, more: int = 0) -> dict[str, Any]:
        return {"run": {"steps": (6 if self.quick else 10) + more}, "sim": {"skip_steps": 4}}

    def colocated(self, model: Model, a: Assumptions, **keys: Any) -> Figures:
        return self.simulate(
            with_keys(rb.recipe(model, a, **keys), run={"steps": 4}, sim={"skip_steps": 1}), "colocated"
        )

    def pool(self, model: Model, a: Assumptions, count: int, name: str, **keys: Any) -> Figures:
        recipe = with_keys(rb.recipe(model, a, **keys), **self.steps(), fleet={"workers": count})
        return self.simulate(recipe, name)

    def window(self, model: Model, a: Assumptions, changes: Sequence[Change], *names: str) -> list[Figures]:
        most = rb.useful_instances(model, a)
        recipe = with_keys(rb.recipe(model, a), sim={"seconds": rb.WINDOW_S, "skip_steps": 1})
        return self.simulate_equal_steps(dict.fromkeys(names, recipe), trace.slots(changes, most))


def with_keys(recipe: Recipe, **sections: dict[str, Any]) -> Recipe:
    return recipe.model_copy(update={k: getattr(recipe, k).model_copy(update=v) for k, v in sections.items()})


def calibrate(bench: Bench, a: Assumptions) -> Assumptions:
    """Fit `slower` so that co-located 8B is as fast as in the paper."""
    for _ in range(2):
        tok_per_s = bench.colocated(MODELS["8B"], a).tok_per_s
        a = replace(a, slower=a.slower * tok_per_s / rb.CO_LOCATED_8B)
    return a


def ratio(f: Figures, base: Figures) -> str:
    return f"{f.tok_per_s / base.tok_per_s:.2f}x {f.tok_per_usd / base.tok_per_usd - 1:+4.0%}"


def print_row(*cells: object) -> None:
    print("\r" + " " * 70 + "\r", end="", file=sys.stderr, flush=True)
    print(f"{cells[0]!s:<34}" + "".join(f"{c!s:>15}" for c in cells[1:]), flush=True)


# sections


def models(bench: Bench, a: Assumptions, market: dict[str, list[Change]]) -> None:
    print_row("\nspot windows, over co-located", "pool of", "workers", "rlboost", "windfall", "paper")
    for model in MODELS.values() if not bench.quick else [MODELS["8B"]]:
        base = bench.colocated(model, a)
        sums: dict[str, list[Figures]] = {"rlboost": [], "windfall": []}
        for letter, changes in market.items() if not bench.quick else [("C", market["C"])]:
            r, w = bench.window(model, a, changes, *sums)
            sums["rlboost"].append(r)
            sums["windfall"].append(w)
            pool = rb.useful_instances(model, a)
            print_row(f"{model.name}, segment {letter}", pool, f"{w.workers_there:.1f}", ratio(r, base), ratio(w, base))
        r, w = (mean(found) for found in sums.values())
        x, usd = PAPER[model.name]
        print_row(
            f"{model.name}, all ({base.tok_per_s:,.0f} tok/s alone)", "", "", ratio(r, base), ratio(w, base),
            f"{x:.2f}x {usd - 1:+4.0%}",
        )  # fmt: skip


def mean(found: Sequence[Figures]) -> Figures:
    """Total tokens divided by total seconds and dollars."""
    seconds, usd = sum(f.virtual_s for f in found), sum(f.usd for f in found)
    tokens = sum(f.tok_per_s * f.virtual_s for f in found)
    return replace(found[0], tok_per_s=tokens / seconds, tok_per_usd=tokens / usd)


def static(bench: Bench, a: Assumptions) -> None:
    print_row("\na constant pool", "rlboost", "windfall", "paper")
    for model in (MODELS["8B"],) if bench.quick else (MODELS["8B"], MODELS["14B"]):
        base = bench.colocated(model, a)
        for count in (4,) if bench.quick else range(1, 7):
            r, w = (bench.pool(model, a, count, name) for name in ("rlboost", "windfall"))
            paper = ""
            if model.name == "8B" and count in ARTIFACT:
                paper = f"{ARTIFACT[count] / ARTIFACT[0]:.2f}x"
            elif model.name == "14B" and count in STATIC:
                paper = f"{STATIC[count][0]:.2f}x {STATIC[count][1] - 1:+4.0%}"
            print_row(f"{model.name}, {count} instances", ratio(r, base), ratio(w, base), paper)


def ablations(bench: Bench, a: Assumptions, market: dict[str, list[Change]]) -> None:
    model, count = MODELS["14B"], rb.useful_instances(MODELS["14B"], a)
    print_row(f"\nablations, 14B, {count} instances", "rlboost", "windfall", "paper")
    rows: dict[str, Figures] = {}
    for name, other in (("rlboost", "rlboost"), ("windfall", "windfall"), ("no local time", "no-local-time")):
        rows[name] = bench.pool(model, a, count, other)
    lost = [f"{rows['no local time'].tok_per_s / rows[n].tok_per_s - 1:+.0%}" for n in ("rlboost", "windfall")]
    print_row("without local time, tok/s", *lost, "-19%")
    if not bench.quick:
        recipe = with_keys(rb.recipe(model, a), sim={"seconds": rb.WINDOW_S, "skip_steps": 1})
        gains = []
        for changes in market.values():
            held = trace.slots(changes, 2 * count)
            variants = ("rlboost", "rlboost without memory")
            with_it, without = bench.simulate_equal_steps(dict.fromkeys(variants, recipe), held)
            gains.append(with_it.tok_per_s / without.tok_per_s)
        print_row("the memory M, tok/s", f"{sum(gains) / len(gains) - 1:+.0%}", "", "+6%")
    for at_s in (100, 200):
        moved_s, again_s = preempted(bench, model, a, count, at_s)
        less = f"{1 - moved_s / again_s:.0%}" if again_s > 1 else "no loss"
        print_row(
            f"a loss at {at_s} s, {again_s:.0f} or {moved_s:.0f} s: saves", "", less, {100: "33%", 200: "76%"}[at_s]
        )


def preempted(bench: Bench, model: Model, a: Assumptions, count: int, at_s: float) -> tuple[float, float]:
    """One instance is lost at this time of a step and does not return. Returns how many seconds longer the step takes
    with migration, and without it, when the responses start again."""
    recipe = with_keys(rb.recipe(model, a), run={"steps": 6}, sim={"skip_steps": 5}, trace={"nodes": count})
    up = [Change(at_s=0.0, node=f"n{n}", up=True) for n in range(count)]
    stays = bench.simulate(recipe, "windfall", up)
    steps = [e for e in events.read(bench.folder / "windfall.jsonl") if e["name"] == "step"]
    lost = [*up, Change(at_s=steps[4]["m"] + at_s, node="n0", up=False)]
    moved, again = (bench.simulate(recipe, name, lost) for name in ("windfall", "restart"))
    return moved.step_mean_s - stays.step_mean_s, again.step_mean_s - stays.step_mean_s


def lengths(bench: Bench, a: Assumptions) -> None:
    print_row("\nlongest response, 14B", "pool of", "rlboost", "windfall", "paper")
    for most in (5_000, 14_000) if bench.quick else (5_000, 8_000, 11_000, 14_000):
        base = bench.colocated(MODELS["14B"], a, max_tokens=most)
        count = rb.useful_instances(MODELS["14B"], a, most)
        r, w = (bench.pool(MODELS["14B"], a, count, name, max_tokens=most) for name in ("rlboost", "windfall"))
        print_row(
            f"{most:,} tokens", count, ratio(r, base), ratio(w, base), f"{LENGTHS[most]}x" if most in LENGTHS else ""
        )


def sensitivity(bench: Bench, a: Assumptions) -> None:
    """Vary each assumption, repeat the fit, and print the result of 8B with a pool of 4."""
    print_row("\nassumption, 8B with 4 instances", "value", "x 0.7", "x 1.3")
    base, found = bench.colocated(MODELS["8B"], a), {}
    for name in ("rlboost", "windfall"):
        found[name] = bench.pool(MODELS["8B"], a, 4, name)
    print_row("as assumed: rlboost, windfall", "", *(ratio(f, base) for f in found.values()))
    for field in fields(Assumptions):
        if field.name == "slower":
            continue
        cells = []
        for factor in (0.7, 1.3):
            value = getattr(a, field.name) * factor
            value = (
                round(value) if field.name == "prompt_tokens" else min(value, 1.0) if field.name in SHARES else value
            )
            other = calibrate(bench, replace(a, **{field.name: value}))
            cells.append(ratio(bench.pool(MODELS["8B"], other, 4, "windfall"), bench.colocated(MODELS["8B"], other)))
        print_row(rb.DESCRIPTIONS[field.name][:33], f"{getattr(a, field.name):g}", *cells)


def memory(bench: Bench, a: Assumptions) -> None:
    """What would have to differ for the paper's gains with 14B: faster training, less KV cache while the trainer
    generates."""
    counts = (1, 3, 6)
    print_row("\n14B: training, trainer's KV", "tok/s alone", *(f"{n} instances" for n in counts))
    for train in (1.0, 2.0):
        for kv in (1.0, 0.5, 0.25):
            b = replace(a, train=train * a.train, trainer_kv=kv)
            base = bench.colocated(MODELS["14B"], b)
            found = [bench.pool(MODELS["14B"], b, n, "windfall") for n in counts]
            cells = [f"{f.tok_per_s / base.tok_per_s:.2f}x" for f in found]
            print_row(f"{train:g} x as fast, {kv:g} of the KV cache", f"{base.tok_per_s:,.0f}", *cells)
    print_row("paper", "", *(f"{STATIC[n][0]}x" if n in STATIC else "" for n in counts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--trace", type=Path, help="Spot trace file (docs/fleet-traces.md). Default: a generated trace."
    )
    parser.add_argument(
        "--quick", action="store_true", help="Run one model, one window and fewer steps: under a minute."
    )
    parser.add_argument("--only", default="", help="Sections to run, separated by commas.")
    args = parser.parse_args()
    sections = ["models", "static", "ablations", "lengths", "sensitivity", "memory"]
    chosen = [s for s in args.only.split(",") if s] or sections
    for name in chosen:
        if name not in sections:
            parser.error(f"--only: unknown section {name!r}; expected one of: {', '.join(sections)}")
    if args.quick and not args.only:
        chosen = ["models", "static"]
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(folder=Path(temporary), quick=args.quick, began_s=time.perf_counter())
        market, origin = rb.market(args.trace)
        a = calibrate(bench, Assumptions())
        print("\r" + " " * 70 + "\r", end="", file=sys.stderr)
        print(f"spot trace: {origin}")
        for letter, changes in market.items():
            s = trace.summary(changes, rb.WINDOW_S)
            print(f"  segment {letter}: {s.min_up} to {s.max_up} instances, mean {s.mean_up:.1f}, {s.losses} lost")
        print("assumed: " + "; ".join(f"{text} {getattr(a, key):g}" for key, text in rb.DESCRIPTIONS.items()))
        print(f"fitted: all times x {a.slower:.2f}, so that co-located 8B reaches {rb.CO_LOCATED_8B:,.0f} tok/s")
        print("cells: tokens per second relative to co-located, and change in tokens per dollar")
        for name, section in (
            ("models", lambda: models(bench, a, market)), ("static", lambda: static(bench, a)),
            ("ablations", lambda: ablations(bench, a, market)), ("lengths", lambda: lengths(bench, a)),
            ("sensitivity", lambda: sensitivity(bench, a)), ("memory", lambda: memory(bench, a)),
        ):  # fmt: skip
            if name in chosen:
                section()
        print(f"\n{bench.runs} runs in {time.perf_counter() - bench.began_s:.0f} s")


if __name__ == "__main__":
    main()
