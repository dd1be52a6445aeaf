"""A small recipe for the simulator's tests: a trainer, a few workers of a trace, short responses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleets.restarts import RestartingSimulation
from windfall.controller.assembly import Rules
from windfall.events import log as events
from windfall.recipe.file import parse_recipe
from windfall.recipe.sections import Recipe
from windfall.sim.core import run, scenario

SMALL: dict[str, Any] = {
    "run": {"steps": 4},
    "rollout": {"groups": 16, "group_size": 4, "max_tokens": 350},
    "train": {"micro_tokens": 800},
    "eval": {"tasks": 0},
    "checkpoint": {"every": 1000},
    "fleet": {"heartbeat_s": 0.3, "suspect_s": 1.0, "gone_s": 2.5, "trainer_price_usd_per_h": 80.0},
    "trace": {"nodes": 3, "mean_up_s": 10.0, "mean_down_s": 4.0, "price_usd_per_h": 5.0},
    "sim": {
        "granule": 1, "boot_s": 0.5, "weights_bytes": 1e8, "egress_bytes_per_s": 1e9, "ingress_bytes_per_s": 1e9,
        "prompt_tokens": 16, "median_tokens": 75.0, "skip_steps": 0,
        "trainer": {"fixed_s": 0.006, "each_s": 0.00012, "prefill_s": 4e-6, "train_s": 0.000185},
        "worker": {"fixed_s": 0.008, "each_s": 0.0006, "prefill_s": 2e-5},
    },
}  # fmt: skip


def small(**sections: dict[str, Any]) -> Recipe:
    """The small recipe with changed keys: small(trace={"nodes": 0})."""
    keys_by_section = copy.deepcopy(SMALL)
    for section, keys in sections.items():
        keys_by_section.setdefault(section, {}).update(keys)
    return parse_recipe(keys_by_section, where="small")


@pytest.fixture
def recipe() -> Callable[..., Recipe]:
    return small


@pytest.fixture
def simulated(tmp_path: Path) -> Callable[..., tuple[run.Simulation, list[events.Event]]]:
    """Simulates the small recipe with changed keys. `disturb` is called with the simulation at the start."""

    def simulate(
        disturb: Callable[[Any], None] | None = None, rules: Rules | None = None,
        make: type[run.Simulation] = run.Simulation, **sections: dict[str, Any],
    ) -> tuple[run.Simulation, list[events.Event]]:  # fmt: skip
        log = tmp_path / "events.jsonl"
        built = replace(scenario.build(small(**sections)), rules=rules or Rules())
        done = run.simulate(built, log, disturb=disturb, make=make)
        done.dispatch.ledger.check()
        assert done.dispatch.ledger.lost_tokens() == 0
        return done, events.read(log)

    return simulate


@pytest.fixture
def restarting(simulated: Callable[..., Any]) -> Callable[..., Any]:
    """The same with a trainer and a controller that can be killed and restart."""
    return partial(simulated, make=RestartingSimulation)
