"""How long the trainer's own engine rolls out at the start of a step, before it trains: `T_seed`. Pure.

    step:   [ local generates: seed_s ][ local trains, on groups as they come .............. update ]
            [ others pull ][ others generate ............................... ][ others wait ]

Too short, and the trainer waits for groups; too long, and the others have nothing left while it still trains. With no
other worker it must be unbounded: then the step is plain generating and training in turn.

Two policies with one interface:

- `RLBoostSeeding` is RLBoost's Algorithm 1: move T_seed by the imbalance of the last step over eta, remember what worked for
  each fleet size, and bound how many instances are worth having.
- `Predict` computes it. Of W tokens a step, local makes L a second, the fleet R once it has pulled (after P seconds),
  and training takes in A a second. If work could be split at will, generation and training would end together at

      T = (W (1 - R / A) + R P) / (L + R)

  It cannot: how groups become whole, and how the last responses slow down, is learned of every step (course.py), and T
  is that with which the step would end soonest. W, L and A are those measured last; R is the sum of what today's
  workers are known to make, each with its own speed, so a change of the fleet is answered in the very step it is seen.
  However fast the fleet is, nothing can be trained on before the first groups are whole: until then local generates,
  too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from windfall.scheduling.fleet_speed import FleetSpeed, StepRates
from windfall.scheduling.step_model import START, Mark, StepModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Others:
    """The fleet without local, as the next step finds it."""

    workers: int
    tok_per_s: float
    """What they make together by what is known of each; 0 if nothing is known yet."""
    pull_s: float = 0.0
    """Until they have the new weights."""
    crowd: FleetSpeed | None = None
    """What they make of so many responses; None: the same of any number."""
    local: FleetSpeed | None = None
    """And local; None: what it made in the last step."""
    responses: int = 1
    """Of the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a step was like, in seconds and tokens."""

    tokens: int
    seed_s: float
    """How long local generated."""
    local_tokens: int
    train_s: float
    """How long training worked, the update included."""
    train_wait_s: float
    """How long the trainer had stopped generating and waited for groups."""
    remote_wait_s: float
    """From the last token of another worker to the end of the step."""
    remote_s: float
    """From the start of the step to that last token."""
    workers: float
    """Others, on average over the step."""
    responses: int = 1
    course: tuple[Mark, ...] = ()
    """When how much was made, and could be trained on."""
    there: tuple[tuple[float, FleetSpeed], ...] = ()
    """Who made tokens, each from a time on; empty: somebody was there of whom nothing is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedPlan:
    seed_s: float
    """Infinite: until all is generated."""
    most_workers: float
    """More than so many others would wait for training."""
    why: str
    hold: bool = False
    """Not before there is something to train on: until then the trainer could only wait."""


class Offload(Protocol):
    def plan(self, last: Measured | None, others: Others) -> SeedPlan:
        """For the step that begins now; `last` is the one that ended, None at the start."""
        ...

    def again(self, others: Others, now: Mark) -> SeedPlan | None:
        """Local still generates, and the step stands at `now`. None: it stays as it was planned."""
        ...


SAME = 1e-3
"""A mean number of workers that is off by less is a matter of rounding."""
ALONE = SeedPlan(seed_s=math.inf, most_workers=math.inf, why="no other worker: generate, then train")


@dataclass(slots=True)
class RLBoostSeeding:
    """RLBoost's Algorithm 1."""

    first_s: float = 150.0
    eta: float = 3.0
    seed_s: float = field(init=False)
    memory: dict[int, float] = field(default_factory=dict)
    most_workers: float = math.inf
    remembers: bool = True

    def __post_init__(self) -> None:
        self.seed_s = self.first_s

    def plan(self, last: Measured | None, others: Others) -> SeedPlan:
        if last is not None and last.workers > 0 and math.isfinite(last.seed_s):
            self.seed_s = max(0.0, self.seed_s + (last.train_wait_s - last.remote_wait_s) / self.eta)
            if last.train_s > 0:
                self.most_workers = (last.remote_s * last.workers + self.seed_s) / last.train_s
            if abs(last.workers - others.workers) < SAME and self.remembers:
                self.memory[others.workers] = self.seed_s
        if others.workers == 0:
            return ALONE
        self.seed_s = self.memory.get(others.workers, self.seed_s)
        why = f"by the imbalance of steps before, {others.workers} workers"
        return SeedPlan(seed_s=self.seed_s, most_workers=self.most_workers, why=why)

    def again(self, others: Others, now: Mark) -> SeedPlan | None:
        """As published: once a step."""
        return None


@dataclass(slots=True)
class Predict:
    """The model above. Knows no constant of any model or machine."""

    forget: float = 0.5
    """Weight of the newest step."""
    tokens: float = 0.0
    local: float = 0.0
    train: float = 0.0
    course: StepModel = field(default_factory=StepModel)

    def plan(self, last: Measured | None, others: Others) -> SeedPlan:
        if last is not None:
            self._learn(last)
        return self.again(others, START)

    def again(self, others: Others, now: Mark) -> SeedPlan:
        if others.workers == 0:
            return ALONE
        if not (self.tokens and self.local and self.train and others.tok_per_s > 0):
            # Nothing to go by: generate everywhere, and measure. Nothing is lost but the overlap of one step.
            return SeedPlan(seed_s=math.inf, most_workers=math.inf, why="measuring: every rate is still unknown")
        rates = self._rates(self.tokens, others)
        seed_s = self.course.best(rates, now)
        w, low, a, r = self.tokens, self.local, self.train, others.tok_per_s
        why = f"{w:,.0f} tokens at {low:,.0f} here and {r:,.0f} tok/s elsewhere, trained at {a:,.0f}"
        return SeedPlan(seed_s=seed_s, most_workers=a / (r / others.workers), why=why, hold=True)

    def _rates(self, tokens: float, others: Others) -> StepRates:
        return StepRates(
            tokens=tokens, responses=others.responses, train=self.train, pull_s=others.pull_s,
            local=others.local or FleetSpeed.steady(self.local), others=others.crowd or FleetSpeed.steady(others.tok_per_s),
        )  # fmt: skip

    def _learn(self, last: Measured) -> None:
        self.tokens = self._mix(self.tokens, last.tokens)
        if last.seed_s > 0 and last.local_tokens:
            self.local = self._mix(self.local, last.local_tokens / last.seed_s)
        if last.train_s > 0:
            self.train = self._mix(self.train, last.tokens / last.train_s)
        if last.course and last.there:
            self.course.learn(last.course, last.there, last.responses, self.forget)

    def _mix(self, old: float, new: float) -> float:
        return new if old == 0 else (1 - self.forget) * old + self.forget * new


class Never:
    """No seeding: local generates only when nobody else is there."""

    def plan(self, last: Measured | None, others: Others) -> SeedPlan:
        del last
        return SeedPlan(seed_s=0.0, most_workers=math.inf, why="no seeding") if others.workers else ALONE

    def again(self, others: Others, now: Mark) -> SeedPlan | None:
        return None


def make(name: str, *, first_s: float = 150.0) -> Offload:
    """
    >>> make("predict").plan(None, Others(workers=0, tok_per_s=0)).seed_s
    inf
    """
    if name.startswith("feedback"):
        return RLBoostSeeding(first_s=first_s, remembers=name == "feedback")
    return Never() if name == "never" else Predict()
