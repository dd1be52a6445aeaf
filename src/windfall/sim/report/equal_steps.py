"""Figures of several simulated runs over the same steps, so that they can be compared.

Within `sim.seconds` a faster policy completes more steps, and steps differ: if the last one is slow, the policy that
completes it looks slower. So figures cover only the steps that every run has completed. In each of these steps, all
runs generate the same responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from windfall.events.log import Sink, read
from windfall.sim.core import run
from windfall.sim.core.scenario import Scenario
from windfall.sim.machines.fleet import Stay
from windfall.sim.report.figures import Figures, completed_steps, figures


class SimulatedRun(NamedTuple):
    scenario: Scenario
    log: Path
    stays: Sequence[Stay]
    completed: int
    """Number of completed steps, those that figures skip included."""


def simulate(scenario: Scenario, log: Path, sink: Sink | None = None) -> SimulatedRun:
    """Simulate a scenario. An error if it completes no step after those that figures skip."""
    done = run.simulate(scenario, log, sink=sink)
    return SimulatedRun(scenario, log, done.stays, len(completed_steps(read(log), scenario)))


def figures_of_equal_steps(runs: Sequence[SimulatedRun]) -> list[Figures]:
    """The figures of each run, over the steps that all of them have completed."""
    last = min(r.completed for r in runs)
    return [figures(r.log, r.scenario, r.stays, last=last) for r in runs]
