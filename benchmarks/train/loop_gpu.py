"""The whole loop on one GPU: SmolLM2-135M learns sums with four worker processes that share the GPU with the trainer,
once undisturbed and once with two of the four killed at random throughout.

    python benchmarks/train/loop_gpu.py                       two runs, one after the other, a few minutes (first: make
    smollm2) python benchmarks/train/loop_gpu.py --steps 20 --out FOLDER

All processes are windfall's own. Each of the five costs a fifth of the price of the GPU ($3.29 per hour, an H200 on
spot; cost/prices.py has the table). A killed worker is not billed until another one replaces it.

    windfall page FOLDER/left-alone FOLDER/two-of-four-killed --out both.html    shows both
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from windfall.controller.cost.bill import Totals
from windfall.events import log as events
from windfall.recipe.file import load_recipe
from windfall.run.start import new_folder, train

RECIPE = Path(__file__).parents[2] / "recipes" / "smollm2-chain-sum.toml"
SHARE_USD_PER_H = 3.29 / 5
ALIKE = (
    "run.device=cuda", "fleet.worker_memory=0.05", f"fleet.price_usd_per_h={SHARE_USD_PER_H}",
    f"fleet.trainer_price_usd_per_h={SHARE_USD_PER_H}", f"trace.price_usd_per_h={SHARE_USD_PER_H}", "fleet.kind=spot",
)  # fmt: skip
WAYS = {
    "left alone": ("fleet.workers=4",),
    "two of four killed": ("fleet.workers=2", "trace.nodes=2", "trace.mean_up_s=15", "trace.mean_down_s=4"),
}


def run(folder: Path, name: str, *changes: str) -> list[dict[str, Any]]:
    recipe = load_recipe(RECIPE, [f"run.folder={folder}", f"run.name={name.replace(' ', '-')}", *ALIKE, *changes])
    place = new_folder(recipe)
    train(recipe, place)
    return events.read(place / "events.jsonl")


def line(name: str, log: list[dict[str, Any]]) -> str:
    steps = [e for e in log if e["kind"] == "scalar" and e["name"] == "step"]
    evals = [e for e in log if e["kind"] == "scalar" and e["name"] == "eval"]
    seconds, made = sum(e["s"] for e in steps), sum(e["made"] for e in steps)
    bill = sum((msgspec.convert(e["bill"], Totals) for e in log if e.get("bill")), Totals())
    usd = bill.usd_per_million(sum(e["trained"] for e in steps))
    back_s = statistics.median(ages) if (ages := came_back_s(log)) else 0.0
    rewards = " ".join(f"{e['step']}:{e['reward']:.3f}" for e in evals)
    return (
        f"{name:20}{len(steps):>6}{seconds:>8.0f} s{made:>11,}{made / seconds:>9,.0f}{usd or 0.0:>9.3f}"
        f"{sum(e['name'] == 'worker_lost' for e in log):>8}{back_s:>8.1f}{sum(e['moved'] for e in steps):>8,}"
        f"{sum(e['lost_tokens'] for e in steps):>6}{sum(e['repeated'] + e['late'] for e in steps):>7}  {rewards}"
    )


def came_back_s(log: list[dict[str, Any]]) -> list[float]:
    """Seconds from process start to READY of every worker that joined after the first loss."""
    lost = next((n for n, e in enumerate(log) if e["name"] == "worker_lost"), len(log))
    return [e["age_s"] for e in log[lost:] if e["name"] == "worker_ready" and "age_s" in e]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as place:
        for name, how in WAYS.items():
            changes = (f"run.steps={options.steps}", f"eval.every={max(1, options.steps // 4)}", *how, *options.set)
            lines.append(line(name, run(options.out or Path(place), name, *changes)))
    heads = (
        ("steps", 6),
        ("", 10),
        ("tokens", 11),
        ("tok/s", 9),
        ("$ per M", 9),
        ("killed", 8),
        ("back s", 8),
        ("moved", 8),
        ("lost", 6),
    )
    print(
        f"\n{'':20}"
        + "".join(f"{h:>{w}}" for h, w in (*heads, ("twice", 7)))
        + "  reward on 256 held-out tasks, by step"
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
