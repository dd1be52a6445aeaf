"""How a step unfolds, as a function of how much of it is made: which part can be trained on, and how fast it is. Pure.

Rates alone say when a step would end if work could be split as finely as one likes. It cannot: groups become whole
late, so that little can be trained on while much is made, and the last responses are made by batches too small to be
fast, however many workers there are. Both repeat from step to step at the same share of tokens made, for any fleet:

    made, whole    of the step's tokens, the share that is made, and the share in groups that are whole
    open, behind   responses that are still being made, and the tokens behind them, both as shares
    slow           how much longer tokens take than the profiles of those who make them say, for so many responses with
                   so many tokens behind them

each at PARTS points, evenly spread over made + whole: half of all groups may become whole with the last few tokens.
Learned of every step, with these the end of a step can be computed for any T_seed and any fleet, from its start or from
wherever it stands. Training takes groups in the order in which they come, so it ends when the last has come and what
was left by then is trained: end = max over groups of (when it came + training of it and all after it).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from windfall.scheduling.fleet_speed import FleetSpeed, StepRates

PARTS = 32
TRIES = 24
LEAST, MOST = 0.25, 8.0
"""Of `slow`: more or less is a mistake in the rates."""


class Mark(NamedTuple):
    """Where a step stands at one moment, from its start."""

    at_s: float
    made: float
    """Tokens so far."""
    whole: float
    """Of these, in groups that are whole."""
    open: float
    """Responses that are not finished."""
    behind: float = 0.0
    """Tokens behind these, prompts included."""


START = Mark(0.0, 0.0, 0.0, 0.0)


class StepPart(NamedTuple):
    """A part of what is left of a step."""

    tokens: float
    """To be made, times how much slower they come than profiles say."""
    whole: float
    """Tokens in groups that become whole with it."""
    rates: tuple[float, float, float]
    """Tokens per second of local, of the others, and of both together."""


@dataclass(slots=True)
class StepModel:
    made: list[float] = field(default_factory=lambda: [(n + 1) / PARTS for n in range(PARTS)])
    whole: list[float] = field(default_factory=lambda: [(n + 1) / PARTS for n in range(PARTS)])
    open: list[float] = field(default_factory=lambda: [1.0] * PARTS)
    behind: list[float] = field(default_factory=lambda: [0.0] * PARTS)
    slow: list[float] = field(default_factory=lambda: [1.0] * PARTS)
    steps: int = 0

    def learn(
        self, marks: Sequence[Mark], there: Sequence[tuple[float, FleetSpeed]], responses: float, weight: float
    ) -> None:
        """`marks` in order, the last when all was made; `there`: who made tokens, each from a time on, in order."""
        total = marks[-1].made if marks else 0.0
        if total <= 0:
            return
        weight = weight if self.steps else 1.0
        self.steps += 1
        before = START._replace(open=responses)
        for n, mark in enumerate(_spread([before, *marks], total)):
            slow, open, behind = self.slow[n], (before.open + mark.open) / 2, (before.behind + mark.behind) / 2
            if mark.made > before.made:
                expected = _expected(there, before.at_s, mark.at_s, open, behind)
                slow = min(MOST, max(LEAST, expected / (mark.made - before.made)))
            new = (mark.made / total, mark.whole / total, open / responses, behind / total, slow)
            for known, value in zip((self.made, self.whole, self.open, self.behind, self.slow), new, strict=True):
                known[n] += weight * (value - known[n])
            before = mark

    def total(self, rates: StepRates, start: Mark) -> float:
        """How many tokens this step comes to. Responses tell: when so few are left open, so much is usually made. The
        more of them are finished, the more that counts beside what steps before came to."""
        open = start.open / rates.responses
        if not self.steps or not start.made or open >= 1:
            return rates.tokens
        before = (1.0, 0.0)  # open, made
        for n in range(PARTS):
            point = (self.open[n], (self.made[n] + (self.made[n - 1] if n else 0.0)) / 2)
            if point[0] <= open:
                break
            before = point
        else:
            point = (0.0, 1.0)
        share = (before[0] - open) / (before[0] - point[0]) if before[0] > point[0] else 1.0
        usual = before[1] + min(1.0, share) * (point[1] - before[1])
        return max(start.made, open * rates.tokens + (1 - open) * start.made / max(1e-9, usual))

    def left(self, rates: StepRates, start: Mark) -> list[StepPart]:
        """What is still to be made. If fewer or more groups are whole by now than usual, the rest catches up evenly."""
        total = self.total(rates, start)
        made, out = min(1.0, start.made / total), list[StepPart]()
        before, usual, share = 0.0, 0.0, 1.0
        both = rates.local + rates.others
        for n in range(PARTS):
            if made > self.made[n] and n < PARTS - 1:
                before, usual = self.made[n], self.whole[n]
                continue
            if not out:
                passed = max(0.0, made - before) / max(1e-9, self.made[n] - before)
                usual += min(1.0, passed) * (self.whole[n] - usual)
                share = (1 - min(1.0, start.whole / total)) / max(1e-9, 1 - usual)
                before = max(before, made)
            tokens = max(0.0, self.made[n] - before) * total * self.slow[n]
            open, behind = max(1.0, self.open[n] * rates.responses), self.behind[n] * total
            speeds = [crowd.tok_per_s(open, behind) for crowd in (rates.local, rates.others, both)]
            out.append(StepPart(tokens, (self.whole[n] - usual) * share * total, (speeds[0], speeds[1], speeds[2])))
            before, usual = self.made[n], self.whole[n]
        return out

    def end_s(self, rates: StepRates, seed_s: float, start: Mark = START) -> float:
        """When all would be trained."""
        return self._end_s(self.left(rates, start), rates, seed_s, start)

    def _end_s(self, left: Sequence[StepPart], rates: StepRates, seed_s: float, start: Mark) -> float:
        at_s, free_s = start.at_s, seed_s + start.whole / rates.train
        for part in left:
            begun_s = at_s
            for from_s, at_s, share in _stretches(begun_s, part, rates.pull_s, seed_s):
                if not self.steps:  # nothing learned: as if work split at will, and groups came evenly
                    free_s = max(max(free_s, from_s) + share * part.whole / rates.train, at_s)
            if self.steps:
                free_s = max(max(free_s, (begun_s + at_s) / 2) + part.whole / rates.train, at_s)
        return free_s

    def best(self, rates: StepRates, start: Mark = START) -> float:
        """The T_seed with which the step ends soonest; of equal ones the shortest."""
        left = self.left(rates, start)
        low, high, found = start.at_s, self.made_s(rates, start), start.at_s
        for _ in range(2):
            width = (high - low) / TRIES
            tries = (low + n * width for n in range(TRIES + 1))
            found = min(tries, key=lambda s: round(self._end_s(left, rates, s, start), 6))
            low, high = max(start.at_s, found - width), found + width
        return found

    def made_s(self, rates: StepRates, start: Mark = START) -> float:
        """When all would be made, with local until the end."""
        at_s = start.at_s
        for part in self.left(rates, start):
            at_s = max((end_s for _, end_s, _ in _stretches(at_s, part, rates.pull_s, math.inf)), default=at_s)
        return at_s


def _stretches(at_s: float, part: StepPart, pull_s: float, seed_s: float) -> Iterator[tuple[float, float, float]]:
    """When each share of a part that is begun at `at_s` is made, as (start, end, share), each at a constant rate: by
    local until `seed_s`, by the others from `pull_s` on."""
    tokens, (local, others, both) = part.tokens, part.rates
    while tokens > 0:
        here, there = at_s < seed_s, at_s >= pull_s
        rate = (both if here else others) if there else local if here else 0.0
        until_s = min(seed_s if here else math.inf, math.inf if there else pull_s)
        done = tokens if math.isinf(until_s) else min(tokens, rate * (until_s - at_s))
        end_s = until_s if done < tokens else at_s + tokens / rate if rate > 0 else math.inf
        yield at_s, end_s, done / part.tokens
        tokens, at_s = tokens - done, end_s


def _expected(
    there: Sequence[tuple[float, FleetSpeed]], start_s: float, end_s: float, open: float, behind: float
) -> float:
    """Tokens that should have been made in this time, by the profiles of those who were there."""
    tokens = 0.0
    for n, (since_s, crowd) in enumerate(there):
        until_s = there[n + 1][0] if n + 1 < len(there) else math.inf
        if since_s < end_s and until_s > start_s:
            tokens += crowd.tok_per_s(open, behind) * (min(until_s, end_s) - max(since_s, start_s))
    return tokens


def _spread(marks: Sequence[Mark], total: float) -> list[Mark]:
    """PARTS points between marks, even in made + whole, the last at the end."""
    out: list[Mark] = []
    for a, b in pairwise(marks):
        start, end = (a.made + a.whole) / total, (b.made + b.whole) / total
        while len(out) < PARTS - 1 and (wanted := 2 * (len(out) + 1) / PARTS) <= end:
            share = (wanted - start) / (end - start) if end > start else 1.0
            out.append(Mark(*(x + share * (y - x) for x, y in zip(a, b, strict=True))))
    return out + [marks[-1]] * (PARTS - len(out))
