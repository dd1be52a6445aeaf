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
  step (`StepModel`), and the local time is the one with which the step would end soonest. W, L and A are the averages
  of recent steps. R is the sum of the known speeds of the present workers, so a change of the fleet takes
  effect in the step in which it is seen. Even with a very fast fleet nothing can be trained on before the first groups
  are complete; until then local generates, too.
- `OnlyWithoutWorkers` lets local generate only when there is no other worker.

The model of a step. Groups become complete late, so little is trainable when much is generated; and the last responses
are generated in batches too small to be fast, no matter how many workers there are. Both effects occur in every step at
the same share of generated tokens, whatever the fleet. They are described by:

    generated     share of the step's tokens that is generated
    trainable     share of the step's tokens that is in complete groups
    unfinished    share of the responses that are not finished
    context       tokens in the context of the unfinished responses, as a share of the step's tokens
    slowdown      measured time per token / the time that the workers' profiles predict for these responses and context

Each is stored at PARTS points, spread evenly over generated + trainable, because half of all groups may become complete
with the last few tokens. With them the end of a step can be computed for any local time and any fleet, from its start
or from any point within it. Training takes groups in the order in which they become complete, so it ends when the last
group is complete and everything left by then is trained:

    end = max over groups of (when the group is complete + training time of it and of all groups after it)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol

from windfall.step_time import StepTime

PARTS = 32
"""Points at which the model stores its values."""
SEARCH_POINTS = 24
"""Number of local times that are compared in each of two rounds."""
MIN_SLOWDOWN, MAX_SLOWDOWN = 0.25, 8.0
"""Slowdowns outside this range are clipped: they are errors in the rates."""


@dataclass(frozen=True, slots=True)
class FleetSpeed:
    """Workers that share responses so that their engine steps are equally long.

    >>> one = FleetSpeed.of(StepTime(fixed_s=0.01, each_s=0.0001), slots=256)
    >>> round(one.tok_per_s(100)), round((one + one).tok_per_s(200)), one.tok_per_s(1000) == one.tok_per_s(256)
    (5000, 10000, True)
    >>> reads = FleetSpeed.of(StepTime(fixed_s=0.01, each_s=0.0001, context_s=1e-7, usual_context=500), slots=256)
    >>> round(reads.tok_per_s(100, 100 * 500)), round(reads.tok_per_s(100, 100 * 1500))
    (5000, 3333)
    """

    workers: tuple[tuple[StepTime, int], ...] = ()
    """Each profile, with the number of workers that have it."""
    slots: float = math.inf
    """Responses that all workers together can run at once."""

    @classmethod
    def of(cls, profile: StepTime, slots: float = math.inf, count: int = 1) -> FleetSpeed:
        return cls(((profile, count),), slots * count)

    @classmethod
    def constant(cls, tok_per_s: float) -> FleetSpeed:
        """The same speed for any number of responses."""
        return cls.of(StepTime(fixed_s=0.0, each_s=1 / tok_per_s)) if tok_per_s > 0 else cls()

    def __add__(self, other: FleetSpeed) -> FleetSpeed:
        if not (self.workers and other.workers):
            return self if self.workers else other
        counts = dict(self.workers)
        for profile, count in other.workers:
            counts[profile] = counts.get(profile, 0) + count
        return FleetSpeed(tuple(counts.items()), self.slots + other.slots)

    def tok_per_s(self, responses: float, context: float = 0.0) -> float:
        """Tokens per second for this number of responses. `context`: total tokens in their contexts; 0: the usual
        context.

        n responses get n * slope / (n + bend); a worker adds 1 / each_s to the slope, fixed_s / each_s to the bend."""
        running = min(responses, self.slots)
        if running <= 0:
            return 0.0
        slope = bend = 0.0
        for profile, count in self.workers:
            each_s = profile.each_s
            if context and profile.context_s:
                each_s = max(each_s / 64, each_s + profile.context_s * (context / running - profile.usual_context))
            slope += count / each_s
            bend += count * profile.fixed_s / each_s
        return running * slope / (running + bend)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRates:
    """How many tokens and responses a step has, how fast they are generated, and how fast they are trained on."""

    tokens: float
    responses: float
    local: FleetSpeed
    others: FleetSpeed
    train_tok_per_s: float
    pull_s: float = 0.0
    """Seconds until the other workers have loaded the new weights and begin to generate."""


class Progress(NamedTuple):
    """How far a step has come at one moment."""

    at_s: float
    """Seconds from the start of the step."""
    generated: float
    trainable: float
    """Tokens in complete groups."""
    unfinished: float
    """Responses that are not finished."""
    context: float = 0.0
    """Tokens in the context of the unfinished responses, prompts included."""


START = Progress(0.0, 0.0, 0.0, 0.0)


class StepPart(NamedTuple):
    """One part of the remaining work of a step."""

    tokens: float
    """Tokens to be generated, multiplied by the slowdown."""
    trainable: float
    """Tokens in groups that become complete in this part."""
    rates: tuple[float, float, float]
    """Tokens per second of local, of the others, and of both together."""


def _even() -> list[float]:
    return [(n + 1) / PARTS for n in range(PARTS)]


@dataclass(slots=True)
class StepModel:
    """The module docstring explains the lists; each has PARTS values."""

    generated: list[float] = field(default_factory=_even)
    trainable: list[float] = field(default_factory=_even)
    unfinished: list[float] = field(default_factory=lambda: [1.0] * PARTS)
    context: list[float] = field(default_factory=lambda: [0.0] * PARTS)
    slowdown: list[float] = field(default_factory=lambda: [1.0] * PARTS)
    steps: int = 0

    def learn(
        self, progress: Sequence[Progress], speeds: Sequence[tuple[float, FleetSpeed]], responses: float, weight: float
    ) -> None:
        """Learns from one step. `progress`: in order of time, until everything is generated. `speeds`: (seconds from
        the start, speed of all workers from then on), in order. `weight`: weight of this step in every average."""
        total = progress[-1].generated if progress else 0.0
        if total <= 0:
            return
        weight = weight if self.steps else 1.0
        self.steps += 1
        before = START._replace(unfinished=responses)
        for n, point in enumerate(_resample([before, *progress], total)):
            slowdown = self.slowdown[n]
            unfinished = (before.unfinished + point.unfinished) / 2
            context = (before.context + point.context) / 2
            if point.generated > before.generated:
                expected = _expected_tokens(speeds, before.at_s, point.at_s, unfinished, context)
                slowdown = min(MAX_SLOWDOWN, max(MIN_SLOWDOWN, expected / (point.generated - before.generated)))
            for values, new in (
                (self.generated, point.generated / total), (self.trainable, point.trainable / total),
                (self.unfinished, unfinished / responses), (self.context, context / total), (self.slowdown, slowdown),
            ):  # fmt: skip
                values[n] += weight * (new - values[n])
            before = point

    def expected_tokens(self, rates: StepRates, start: Progress) -> float:
        """The number of tokens that this step will have, as a weighted mean of two estimates: that of earlier steps,
        and the tokens generated so far / the share that is usually generated when this share of the responses is
        unfinished. The more responses are finished, the more the second estimate counts."""
        unfinished = start.unfinished / rates.responses
        if not self.steps or not start.generated or unfinished >= 1:
            return rates.tokens
        before = (1.0, 0.0)  # shares of unfinished responses and of generated tokens
        for n in range(PARTS):
            point = (self.unfinished[n], (self.generated[n] + (self.generated[n - 1] if n else 0.0)) / 2)
            if point[0] <= unfinished:
                break
            before = point
        else:
            point = (0.0, 1.0)
        share = (before[0] - unfinished) / (before[0] - point[0]) if before[0] > point[0] else 1.0
        usual = before[1] + min(1.0, share) * (point[1] - before[1])
        return max(start.generated, unfinished * rates.tokens + (1 - unfinished) * start.generated / max(1e-9, usual))

    def remaining(self, rates: StepRates, start: Progress) -> list[StepPart]:
        """The work that is left. If more or fewer groups are complete at `start` than usual, the difference is spread
        evenly over the remaining parts."""
        total = self.expected_tokens(rates, start)
        generated, parts = min(1.0, start.generated / total), list[StepPart]()
        before, trainable, scale = 0.0, 0.0, 1.0
        both = rates.local + rates.others
        for n in range(PARTS):
            if generated > self.generated[n] and n < PARTS - 1:
                before, trainable = self.generated[n], self.trainable[n]
                continue
            if not parts:
                passed = max(0.0, generated - before) / max(1e-9, self.generated[n] - before)
                trainable += min(1.0, passed) * (self.trainable[n] - trainable)
                scale = (1 - min(1.0, start.trainable / total)) / max(1e-9, 1 - trainable)
                before = max(before, generated)
            tokens = max(0.0, self.generated[n] - before) * total * self.slowdown[n]
            unfinished, context = max(1.0, self.unfinished[n] * rates.responses), self.context[n] * total
            local, others, all_ = (speed.tok_per_s(unfinished, context) for speed in (rates.local, rates.others, both))
            parts.append(StepPart(tokens, (self.trainable[n] - trainable) * scale * total, (local, others, all_)))
            before, trainable = self.generated[n], self.trainable[n]
        return parts

    def end_s(
        self, rates: StepRates, local_s: float, start: Progress = START, parts: Sequence[StepPart] | None = None
    ) -> float:
        """Seconds from the start of the step until everything is trained. `parts`: result of `remaining`, if known."""
        at_s, trained_s = start.at_s, local_s + start.trainable / rates.train_tok_per_s
        for part in self.remaining(rates, start) if parts is None else parts:
            begun_s = at_s
            for from_s, at_s, share in _intervals(begun_s, part, rates.pull_s, local_s):
                if not self.steps:  # nothing learned yet: assume that groups become complete evenly
                    trained_s = max(max(trained_s, from_s) + share * part.trainable / rates.train_tok_per_s, at_s)
            if self.steps:
                trained_s = max(max(trained_s, (begun_s + at_s) / 2) + part.trainable / rates.train_tok_per_s, at_s)
        return trained_s

    def best_local_s(self, rates: StepRates, start: Progress = START) -> float:
        """The local time with which the step ends soonest; the shortest of several equal ones."""
        parts = self.remaining(rates, start)
        low, high, best = start.at_s, self.generated_s(rates, start), start.at_s
        for _ in range(2):
            width = (high - low) / SEARCH_POINTS
            candidates = (low + n * width for n in range(SEARCH_POINTS + 1))
            best = min(candidates, key=lambda s: round(self.end_s(rates, s, start, parts), 6))
            low, high = max(start.at_s, best - width), best + width
        return best

    def generated_s(self, rates: StepRates, start: Progress = START) -> float:
        """Seconds from the start of the step until everything is generated, if local generates to the end."""
        at_s = start.at_s
        for part in self.remaining(rates, start):
            at_s = max((end_s for _, end_s, _ in _intervals(at_s, part, rates.pull_s, math.inf)), default=at_s)
        return at_s


def _intervals(at_s: float, part: StepPart, pull_s: float, local_s: float) -> Iterator[tuple[float, float, float]]:
    """(start, end, share of the part) of each interval with a constant rate, for a part that begins at `at_s`. Local
    generates until `local_s`; the others generate from `pull_s` on."""
    tokens, (local, others, both) = part.tokens, part.rates
    while tokens > 0:
        generates, pulled = at_s < local_s, at_s >= pull_s
        rate = (both if generates else others) if pulled else local if generates else 0.0
        until_s = min(local_s if generates else math.inf, math.inf if pulled else pull_s)
        done = tokens if math.isinf(until_s) else min(tokens, rate * (until_s - at_s))
        end_s = until_s if done < tokens else at_s + tokens / rate if rate > 0 else math.inf
        yield at_s, end_s, done / part.tokens
        tokens, at_s = tokens - done, end_s


def _expected_tokens(
    speeds: Sequence[tuple[float, FleetSpeed]], start_s: float, end_s: float, responses: float, context: float
) -> float:
    """Tokens that the workers should have generated from `start_s` to `end_s`, by their profiles."""
    tokens = 0.0
    for n, (since_s, speed) in enumerate(speeds):
        until_s = speeds[n + 1][0] if n + 1 < len(speeds) else math.inf
        if since_s < end_s and until_s > start_s:
            tokens += speed.tok_per_s(responses, context) * (min(until_s, end_s) - max(since_s, start_s))
    return tokens


def _resample(progress: Sequence[Progress], total: float) -> list[Progress]:
    """PARTS points, interpolated, evenly spread over generated + trainable; the last is the end."""
    out: list[Progress] = []
    for a, b in pairwise(progress):
        start, end = (a.generated + a.trainable) / total, (b.generated + b.trainable) / total
        while len(out) < PARTS - 1 and (wanted := 2 * (len(out) + 1) / PARTS) <= end:
            share = (wanted - start) / (end - start) if end > start else 1.0
            out.append(Progress(*(x + share * (y - x) for x, y in zip(a, b, strict=True))))
    return out + [progress[-1]] * (PARTS - len(out))


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


GENERATE_ALL = LocalPlan(local_s=math.inf, why="no other worker: generate, then train")


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
            return LocalPlan(local_s=math.inf, why="measuring: not every rate is known yet")
        rates = StepRates(
            tokens=self.tokens, responses=fleet.responses, train_tok_per_s=self.train_tok_per_s, pull_s=fleet.pull_s,
            local=fleet.local_speed or FleetSpeed.constant(self.local_tok_per_s),
            others=fleet.speed or FleetSpeed.constant(fleet.tok_per_s),
        )  # fmt: skip
        why = (
            f"{self.tokens:,.0f} tokens at {self.local_tok_per_s:,.0f} here and {fleet.tok_per_s:,.0f} tok/s elsewhere"
            f", trained at {self.train_tok_per_s:,.0f}"
        )
        return LocalPlan(local_s=self.model.best_local_s(rates, now), why=why, hold=True)

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
        return LocalPlan(local_s=0.0, why="other workers generate") if fleet.workers else GENERATE_ALL
