"""The local time: how long the trainer's own engine generates at the start of a step before the machine trains. Pure.

    step:   [ local generates: local_s ][ local trains on groups as they become complete ..... update ]
            [ others pull ][ others generate ............................... ][ others wait ]

"Local" is the trainer's own engine. If it generates too briefly, the trainer waits for groups. If it generates for too
long, the other workers have nothing left to do while the trainer still trains. Without other workers the local time
must be unbounded: the step then generates everything and trains afterward.

There are two policies with the same interface (benchmarks/papers has RLBoost's):

- `PredictedLocalTime` computes it. A step has W tokens; local generates L tokens per second; the fleet generates R
  tokens per second once it has pulled the weights (after P seconds); training consumes A tokens per second. If work
  could be split freely, generation and training would end together with

      local time = (W (1 - R / A) + R P) / (L + R)

  Work cannot be split freely. How groups become complete, and how the last responses slow down, is learned from every
  step (scheduling/step_model.py), and the local time is the one with which the step would end soonest. W, L and A are
  the averages of recent steps. R is the sum of the known speeds of the present workers, so a change of the fleet takes
  effect in the step in which it is seen. Even with a very fast fleet nothing can be trained on before the first groups
  are complete; until then local generates, too.
- `OnlyWithoutWorkers` lets local generate only when there is no other worker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from windfall.controller.scheduling.step_model import START, FleetSpeed, Progress, StepModel, StepRates


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteFleet:
    """The workers other than local that are available for a step."""

    workers: int
    tok_per_s: float
    """Tokens per second of all these workers together, from their profiles; 0 if nothing is known yet."""
    pull_s: float = 0.0
    """Seconds until they have loaded the new weights."""
    speed: FleetSpeed | None = None
    """Their speed by number of responses; None: `tok_per_s` for any number."""
    local_speed: FleetSpeed | None = None
    """The speed of local; None: its rate in the last steps."""
    responses: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMeasurement:
    """Measurements of one step, in seconds and tokens."""

    tokens: int
    local_s: float
    """Seconds for which local generated."""
    local_tokens: int
    train_s: float
    """Seconds of training, including the update and excluding waits."""
    train_wait_s: float
    """Seconds for which the trainer waited for groups after it had stopped generating."""
    remote_wait_s: float
    """Seconds from the last token of another worker to the end of the step."""
    remote_s: float
    """Seconds from the start of the step to the last token of another worker."""
    workers: float
    """Mean number of other workers during the step."""
    responses: int = 1
    progress: tuple[Progress, ...] = ()
    """How many tokens were generated, and how many were trainable, over time."""
    speeds: tuple[tuple[float, FleetSpeed], ...] = ()
    """(seconds from the start of the step, speed of all workers from then on); empty if a worker's speed is unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalPlan:
    local_s: float
    """The local time in seconds; infinite: until everything is generated."""
    most_workers: float
    """With more workers than this, some would wait for training."""
    why: str
    hold: bool = False
    """Keep generating after `local_s` until something is trainable: before that the trainer could only wait."""


class LocalTimePolicy(Protocol):
    def plan(self, last: StepMeasurement | None, fleet: RemoteFleet) -> LocalPlan:
        """Plans the step that begins now. `last`: the previous step; None at the start of a run."""
        ...

    def replan(self, fleet: RemoteFleet, now: Progress) -> LocalPlan | None:
        """Plans again while local still generates. `now`: the progress of the step. None, the default: no new plan."""
        return None


GENERATE_ALL = LocalPlan(local_s=math.inf, most_workers=math.inf, why="no other worker: generate, then train")


@dataclass(slots=True)
class PredictedLocalTime:
    """The model in the module docstring. It has no constants that are specific to a language model or machine."""

    newest: float = 0.5
    """Weight of the newest step in every average."""
    tokens: float = 0.0
    """W: tokens per step."""
    local_tok_per_s: float = 0.0
    """L: tokens per second of local."""
    train_tok_per_s: float = 0.0
    """A: tokens per second of training."""
    model: StepModel = field(default_factory=StepModel)

    def plan(self, last: StepMeasurement | None, fleet: RemoteFleet) -> LocalPlan:
        if last is not None:
            self._learn(last)
        return self.replan(fleet, START)

    def replan(self, fleet: RemoteFleet, now: Progress) -> LocalPlan:
        if fleet.workers == 0:
            return GENERATE_ALL
        if not (self.tokens and self.local_tok_per_s and self.train_tok_per_s and fleet.tok_per_s > 0):
            # Generate everywhere and measure. This costs only the overlap of one step.
            return LocalPlan(local_s=math.inf, most_workers=math.inf, why="measuring: not every rate is known yet")
        rates = StepRates(
            tokens=self.tokens, responses=fleet.responses, train_tok_per_s=self.train_tok_per_s, pull_s=fleet.pull_s,
            local=fleet.local_speed or FleetSpeed.constant(self.local_tok_per_s),
            others=fleet.speed or FleetSpeed.constant(fleet.tok_per_s),
        )  # fmt: skip
        why = (
            f"{self.tokens:,.0f} tokens at {self.local_tok_per_s:,.0f} here and {fleet.tok_per_s:,.0f} tok/s elsewhere"
            f", trained at {self.train_tok_per_s:,.0f}"
        )
        most_workers = self.train_tok_per_s / (fleet.tok_per_s / fleet.workers)
        return LocalPlan(local_s=self.model.best_local_s(rates, now), most_workers=most_workers, why=why, hold=True)

    def _learn(self, last: StepMeasurement) -> None:
        self.tokens = self._average(self.tokens, last.tokens)
        if last.local_s > 0 and last.local_tokens:
            self.local_tok_per_s = self._average(self.local_tok_per_s, last.local_tokens / last.local_s)
        if last.train_s > 0:
            self.train_tok_per_s = self._average(self.train_tok_per_s, last.tokens / last.train_s)
        if last.progress and last.speeds:
            self.model.learn(last.progress, last.speeds, last.responses, self.newest)

    def _average(self, old: float, new: float) -> float:
        return new if old == 0 else (1 - self.newest) * old + self.newest * new


class OnlyWithoutWorkers(LocalTimePolicy):
    """Local generates only when there is no other worker."""

    def plan(self, last: StepMeasurement | None, fleet: RemoteFleet) -> LocalPlan:
        del last
        return (
            LocalPlan(local_s=0.0, most_workers=math.inf, why="other workers generate")
            if fleet.workers
            else GENERATE_ALL
        )
