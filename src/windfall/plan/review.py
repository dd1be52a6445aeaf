"""What was planned beside what a run measured, part by part. Reads a run's recipe and event log; the rest is pure.

The plan is the section [sim] of the run's recipe, as `windfall plan --write` puts it there. Parts that the log does not
contain are left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from windfall import config
from windfall.config import Recipe
from windfall.errors import WindfallError
from windfall.events.log import Event, read
from windfall.sim.calibrate import event_log
from windfall.sim.core.scenario import service
from windfall.types import LOCAL


class Part(NamedTuple):
    name: str
    planned: float
    measured: float
    unit: str

    @property
    def error(self) -> float:
        """Planned relative to measured."""
        return self.planned / self.measured - 1

    def __str__(self) -> str:
        return f"{self.name:44} {self.planned:12.4g} {self.measured:12.4g} {self.unit:6} {self.error:+8.1%}"


HEADER = f"{'part':44} {'planned':>12} {'measured':>12} {'unit':6} {'error':>8}"


def review(run: Path) -> list[Part]:
    recipe = config.load(run / "recipe.toml")
    if not recipe.sim.trainer or not recipe.sim.worker:
        fix = "Only runs of a recipe from `windfall plan --write` can be checked."
        raise WindfallError("this run was not planned: its recipe has no [sim] section", where=str(run), fix=fix)
    events = read(run / "events.jsonl")
    if not event_log.steps_of(events):
        raise WindfallError("no step of this run is complete yet", where=str(run), fix="Wait for the first step.")
    return parts(recipe, events)


def parts(recipe: Recipe, events: Sequence[Event]) -> list[Part]:
    """Pure: the parts of a run with this recipe and log."""
    steps = event_log.steps_of(events)
    steps = steps[1:] or steps  # the first step includes start-up
    trainer, worker = service(recipe.sim.trainer, "sim.trainer"), service(recipe.sim.worker, "sim.worker")
    lengths = [n for e in steps for row in e.get("lengths", ()) for n in row if n]
    mean = statistics.mean(lengths) if lengths else recipe.sim.median_tokens
    out: list[Part] = []
    if lengths:
        out.append(Part("median response", recipe.sim.median_tokens, statistics.median(lengths), "tokens"))
    trained = event_log.training(events, [e["step"] for e in steps])
    if trained is not None:
        out.append(Part("training, per million tokens", trainer.train_s * 1e6, trained.train_s * 1e6, "s"))
        if trainer.update_s and trained.update_s:
            out.append(Part("optimizer and publishing", trainer.update_s, trained.update_s, "s"))
    for kind, points in event_log.speeds(steps).items():
        planned = trainer if kind == LOCAL else worker
        busiest = max(points, key=lambda p: p.weight)
        context = busiest.batch * (recipe.sim.prompt_tokens + mean / 2)
        step_s = planned.step_s(busiest.batch, 0, context)
        out.append(Part(f"engine step, {kind}, batch {busiest.batch:.0f}", step_s * 1e3, busiest.step_s * 1e3, "ms"))
    pulled = [e for e in events if e["name"] == "worker_ready" and e.get("bytes") and e.get("s", 0) > 0]
    if pulled:
        took_s = statistics.median(e["s"] for e in pulled)
        planned_s = recipe.sim.weights_bytes / min(recipe.sim.egress_bytes_per_s, recipe.sim.ingress_bytes_per_s)
        out.append(Part("pull of new weights, one worker", planned_s, took_s, "s"))
    return out
