"""Simulated runs of asynchronous training, for idle_generation.py and autoscaling.py: recipes, and what a run trained.

harvest   recipes/sim-harvest.toml, with granules of 8 tokens. Engines gain little from large batches; four to five
          workers keep the trainer busy.
spot      recipes/sim-spot64.toml, with an eighth of its trainer, groups and machines. Engines gain much from large
          batches; about eight workers keep the trainer busy.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from windfall.controller.assembly import Rules
from windfall.controller.cost.bill import Totals
from windfall.events.log import Event, read
from windfall.recipe.file import load_recipe
from windfall.sim.core import run
from windfall.sim.core.scenario import build

RECIPES = Path(__file__).parents[2] / "recipes"
MODELS: dict[str, tuple[Path, list[str]]] = {
    "harvest": (RECIPES / "sim-harvest.toml", ["sim.granule=8"]),
    "spot": (
        RECIPES / "sim-spot64.toml",
        [
            "rollout.groups=128", "train.micro_tokens=50000", "fleet.trainer_price_usd_per_h=41.9", "sim.seconds=0",
            "sim.trainer_slots=128", "sim.trainer.each_s=0.00024", "sim.trainer.prefill_s=0.00004",
            "sim.trainer.train_s=0.000032", "sim.egress_bytes_per_s=12.5e9",
        ],
    ),
}  # fmt: skip
STEADY = ["trace.mean_up_s=1e7", "trace.mean_down_s=1"]
"""Keys with which no machine of a trace is lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a simulated run trained on in the steps after the first few, and what it cost."""

    tok_per_s: float
    """Trained tokens per second."""
    tok_per_usd: float
    """Trained tokens per dollar."""
    too_old: float
    """Tokens of responses that were too old, as a share of these and the trained tokens."""
    wait: float
    """Share of the time in which the trainer waited for groups."""
    workers: float
    """Mean number of workers other than the trainer's engine at the end of a step."""


def simulate(model: str, sets: list[str], rules: Rules | None = None) -> tuple[list[Event], int]:
    """Simulate a model with these keys of the recipe. Returns the step events and the tokens of a granule."""
    path, base = MODELS[model]
    scenario = replace(build(load_recipe(path, [*base, *sets])), rules=rules or Rules())
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        run.simulate(scenario, log)
        steps = [e for e in read(log) if (e["kind"], e["name"]) == ("scalar", "step")]
    return steps, scenario.granule


def trained(steps: list[Event], granule: int) -> Trained:
    seconds = steps[-1]["t"] - (steps[0]["t"] - steps[0]["s"])
    usd = sum((msgspec.convert(e["bill"], Totals) for e in steps), Totals()).all.total_usd
    tokens, too_old = (granule * _sum(steps, key) for key in ("trained", "too_old_tokens"))
    return Trained(
        tok_per_s=tokens / seconds, tok_per_usd=tokens / usd, too_old=too_old / max(1, tokens + too_old),
        wait=_sum(steps, "train_wait_s") / seconds, workers=_sum(steps, "workers") / len(steps) - 1,
    )  # fmt: skip


def _sum(steps: list[Event], key: str) -> Any:
    return sum(e[key] for e in steps)
