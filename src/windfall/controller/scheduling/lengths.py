"""Predicts how long responses become: from their finished siblings, their own progress, and earlier epochs of the task.
Pure: no clock, no I/O.

The logarithms of lengths are modeled as a common mean, a part that siblings share and a part of their own. The share of
the variance that siblings have in common is the within-group correlation (`alike`); it is learned from complete groups.
k finished siblings with mean m then pull the expectation of a response from the mean of the run towards m by
k * alike / (1 + (k - 1) * alike). Responses to the same task in earlier epochs count as siblings of which each counts
EPOCH_WEIGHT.

Example: responses have about 100 tokens, but two siblings of this one have 400. So it is expected to be long, and
longer once it has 600 tokens:

    >>> lengths = LengthPredictor()
    >>> for group in range(20):
    ...     for sibling in range(4):
    ...         lengths.finished(str(group), group, 60 + 20 * (group % 5) + 2 * sibling)
    ...     lengths.complete(str(group))
    >>> lengths.expected("20", 20) < 110
    True
    >>> lengths.finished("20", 20, 400); lengths.finished("20", 20, 400)
    >>> lengths.expected("20", 20) > 250, lengths.expected("20", 20, generated=600) > 600
    (True, True)

For the order of the queue, Seer's rule is used instead (`order_length`): a group counts as long, with the limit, until
one of its responses has ended; from then on as long as the longest that has. A response is never expected to end before
what it has, and what a response of one turn has is all that is known of it: lengths of responses with several turns
include what their environment said.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

MAX_TASKS = 1 << 16
"""Number of tasks whose lengths are remembered over epochs: those that were last seen."""
EPOCH_WEIGHT = 0.5
"""Weight of a response of an earlier epoch, in siblings: the policy has changed since."""
MAX_EPOCH_COUNT = 16.0
"""Upper limit for the responses of earlier epochs that count, so that the newest epochs matter."""
FORGET = 0.995
"""Weight of earlier groups when another one is complete: about the last 200 count."""
ERROR_FORGET = 0.998
"""The same for the error of predictions, by response."""
PRIOR_ALIKE = 0.5
"""Assumed within-group correlation, which counts as much as PRIOR_GROUPS groups."""
PRIOR_GROUPS = 4.0
MIN_SIGMA = 0.05
"""Lower limit for the standard deviation of log lengths."""


@dataclass(slots=True)
class _Mean:
    """A weighted mean of log lengths."""

    count: float = 0.0
    log: float = 0.0
    longest: int = 0

    def add(self, log: float, weight: float = 1.0) -> None:
        self.count += weight
        self.log += (log - self.log) * weight / self.count


@dataclass(slots=True)
class _OpenGroup:
    task: Hashable
    logs: list[float] = field(default_factory=list)
    """Log lengths of the responses that have ended."""
    longest: int = 0
    estimate: tuple[float, float] | None = None
    """What `estimate` found since the last response ended."""


class LengthPredictor:
    def __init__(self) -> None:
        self._groups: dict[str, _OpenGroup] = {}
        """Groups of which a response has ended, or is to be predicted."""
        self._tasks: OrderedDict[Hashable, _Mean] = OrderedDict()
        """Earlier epochs, by task."""
        self._count = self._sum = self._squares = 0.0
        """Number, sum and sum of squares of the log lengths of the run, with forgetting."""
        self._groups_seen = self._within = self._freedom = self._between = 0.0
        """Complete groups; sums of squares within groups, with their degrees of freedom, and of their common part."""
        self._errors = self._error = self._plain_error = 0.0
        """Predicted responses, and the sums of their errors, with forgetting: with siblings, and by the run alone."""

    def finished(self, group: str, task: Hashable, tokens: int) -> None:
        """A response of this group has ended with this number of tokens."""
        log = math.log(max(1, tokens))
        known = self._groups.setdefault(group, _OpenGroup(task))
        if self._count and (known.logs or task in self._tasks):
            mean, _ = self.estimate(group, task)
            self._errors = ERROR_FORGET * self._errors + 1
            self._error = ERROR_FORGET * self._error + abs(log - mean)
            self._plain_error = ERROR_FORGET * self._plain_error + abs(log - self._mean)
        known.logs.append(log)
        known.estimate = None
        known.longest = max(known.longest, tokens)
        self._count += 1
        self._sum += log
        self._squares += log * log

    def complete(self, group: str) -> None:
        """The group is complete, or given up. Learns from it, and forgets all but the lengths of its task."""
        known = self._groups.pop(group, None)
        if known is None:
            return
        logs, count = known.logs, len(known.logs)
        if not count:
            return
        mean = sum(logs) / count
        self._remember(known.task, mean, count, known.longest)
        self._count, self._sum, self._squares = (FORGET * x for x in (self._count, self._sum, self._squares))
        if count < 2:
            return
        within = sum((log - mean) ** 2 for log in logs)
        self._groups_seen = FORGET * self._groups_seen + 1
        self._within = FORGET * self._within + within
        self._freedom = FORGET * self._freedom + count - 1
        # The variance of a group's mean is that of the common part, and the variance within by its size.
        self._between = FORGET * self._between + (mean - self._mean) ** 2 - within / (count - 1) / count

    def _remember(self, task: Hashable, mean: float, count: int, longest: int) -> None:
        past = self._tasks.pop(task, None) or _Mean()
        past.count = min(past.count, MAX_EPOCH_COUNT - min(count, MAX_EPOCH_COUNT))
        past.add(mean, count)
        past.longest = longest
        self._tasks[task] = past
        if len(self._tasks) > MAX_TASKS:
            self._tasks.popitem(last=False)

    @property
    def known(self) -> bool:
        """Whether any response has ended yet."""
        return self._count > 0

    @property
    def _mean(self) -> float:
        return self._sum / self._count if self._count else 0.0

    @property
    def _variance(self) -> float:
        return max(MIN_SIGMA**2, self._squares / self._count - self._mean**2) if self._count else 1.0

    @property
    def alike(self) -> float:
        """Correlation of the log lengths of siblings, between 0 and 1."""
        measured, n = PRIOR_ALIKE, self._groups_seen
        if n and self._freedom:
            common, own = max(0.0, self._between / n), self._within / self._freedom
            measured = common / (common + own) if common + own > 0 else 1.0
        return (n * measured + PRIOR_GROUPS * PRIOR_ALIKE) / (n + PRIOR_GROUPS)

    @property
    def error(self) -> float:
        """Recent mean of |log(actual / predicted)| of responses with a finished sibling or an earlier epoch."""
        return self._error / self._errors if self._errors else 0.0

    @property
    def error_without(self) -> float:
        """The error that the mean of the run alone would have had for the same responses."""
        return self._plain_error / self._errors if self._errors else 0.0

    def estimate(self, group: str, task: Hashable) -> tuple[float, float]:
        """Mean and standard deviation of the log length of a response, whatever it has so far."""
        known = self._groups.get(group)
        if known is None:
            known = self._groups[group] = _OpenGroup(task)
        if known.estimate is None:
            known.estimate = self._from_siblings(known)
        return known.estimate

    def _from_siblings(self, group: _OpenGroup) -> tuple[float, float]:
        siblings, past = _Mean(), self._tasks.get(group.task)
        if past is not None:
            siblings.add(past.log, EPOCH_WEIGHT * past.count)
        if group.logs:
            siblings.add(sum(group.logs) / len(group.logs), len(group.logs))
        alike, k = self.alike, siblings.count
        pull = k * alike / (1 + (k - 1) * alike) if k else 0.0
        variance = self._variance * (1 - alike * pull)
        return self._mean + pull * (siblings.log - self._mean), math.sqrt(max(MIN_SIGMA**2, variance))

    def expected(self, group: str, task: Hashable, generated: int = 0) -> float:
        """Expected length of a response that has `generated` tokens and has not ended; 0: nothing is known yet."""
        if not self.known:
            return 0.0
        mean, sigma = self.estimate(group, task)
        whole = math.exp(mean + sigma * sigma / 2)
        if generated < 1:
            return whole
        # The mean of a log-normal above `generated`. Far in its tail, the ratio is 0 / 0: a response then goes on for
        # as long again as sigma allows.
        z = (math.log(generated) - mean) / sigma
        above = _upper(z)
        if above < 1e-9:
            return generated * (1 + sigma / max(z, 1.0))
        return max(float(generated), whole * _upper(z - sigma) / above)

    def order_length(self, group: str, task: Hashable, limit: float) -> float:
        """Length by which a response that has not begun is ordered: that of the longest sibling that has ended, or of
        the longest response of the last epoch; the limit while there is neither."""
        open_group = self._groups.get(group)
        if open_group is not None and open_group.longest:
            return min(limit, open_group.longest)
        past = self._tasks.get(task)
        return min(limit, past.longest) if past is not None else limit

    def describe(self) -> dict[str, Any]:
        """For the event of a step; empty until a response could be predicted."""
        if not self._errors:
            return {}
        return {"alike": self.alike, "error": self.error, "error_without": self.error_without}


def _upper(z: float) -> float:
    """Probability that a standard normal is above z."""
    return math.erfc(z / math.sqrt(2)) / 2
