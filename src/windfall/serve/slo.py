"""Decides how many rollout rows may run beside the serving requests of this moment (dual-SLO admission). Pure.

    slack of a waiting request    arrival + TTFT - now - time to prefill it and all prompts before it
    slack of a running request    last token + TPOT - now - time of one decode step

    credit of a running request   max_slowdown * (time since its first token - time lent) - time lent

Launches in flight count with their predicted time: those of both tenants against the slack, those of the rollout
against the credit.

The first two keep the objectives. The third keeps the time per token close to that of serving alone, however far the
objective is: of a request's time, the rollout gets at most the share `max_slowdown` of what serving itself took.

The rollout may run the largest number of rows whose predicted time fits into the smallest slack (ROSE names no rule).
Rules:
- if any slack is not positive, the rollout runs nothing: serving is late already, and every row would make it later;
- without serving requests the rollout's launches in flight take at most `idle_s`, because a request may arrive just
  after their start. A step that takes longer by itself comes when none is in flight;
- before any rollout step was measured the rollout gets `FIRST_ROWS` if serving is idle, and otherwise one row, provided
  that the slack is at least half of `idle_s`;
- a rollout step prefills at most `CHUNK` rows, so its time changes little from step to step. If a step with a prefill
  takes too long, there is one without. But decode steps would spend all credit before there is enough for a prefill: if
  it is due (`prefill_due`), they wait until there is;
- credit grows with time, so it is not spent on a step of few rows, which costs almost as much as one of many. A step
  with a prefill must have a row for half of the running responses, and either half of the prefill's rows, or enough of
  them to take as long as the fixed part of the step; a step without, a row for half of all responses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from windfall.defaults import TPOT_S, TTFT_S
from windfall.step_time import LearnedStepTime

CHUNK = 512
FIRST_ROWS = 16
LEAST_ROWS = 2048
"""A step may always have at least this many rows, however long it takes."""
MAX_PREFILLS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Objectives:
    """What serving promises: seconds to the first token, and seconds per token after it."""

    ttft_s: float = TTFT_S
    tpot_s: float = TPOT_S
    reserve: float = 0.1
    """Share of each objective that is not lent: the machine and the event loop take time too."""
    max_slowdown: float = math.inf
    """Upper limit for the time per token that lending adds, as a share of the time that serving alone takes."""

    @property
    def lent_share(self) -> float:
        """Time that the rollout may get of a request's time, as a share of what serving itself takes of it. It is lower
        than the limit by twice the reserve: serving finds the device's caches cold after every step of the rollout."""
        return self.max_slowdown * (1.0 - 2 * self.reserve)

    @property
    def idle_s(self) -> float:
        """Longest rollout step while no request is there."""
        return min(self.tpot_s, self.ttft_s / 2) * (1.0 - self.reserve)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingLoad:
    """The serving requests of this moment. Times are of one clock, in seconds."""

    waiting: tuple[tuple[float, int], ...] = ()
    """(arrival, prompt tokens that are not computed yet) of every request without a token, in the order in which they
    are prefilled."""
    last_tokens_s: tuple[float, ...] = ()
    """When each running request got its last token."""
    lent_s: tuple[tuple[float, float], ...] = ()
    """(seconds since the first token, seconds of these that the rollout had) of every running request, and of every
    one whose first token is being computed."""
    context: int = 0
    """Tokens of all running requests."""
    max_rows: int = LEAST_ROWS
    """Rows of the largest serving step: a longer prompt takes several steps."""
    serving_ahead_s: float = 0.0
    rollout_ahead_s: float = 0.0
    """Predicted time of each tenant's launches that are in flight."""


def credit_s(load: ServingLoad, objectives: Objectives) -> float:
    """How long the rollout may run before it slows a request down by more than `max_slowdown`; infinite without
    running requests or without such a limit."""
    if math.isinf(objectives.max_slowdown) or not load.lent_s:
        return math.inf
    share = objectives.lent_share
    return min(share * (elapsed_s - lent_s) - lent_s for elapsed_s, lent_s in load.lent_s) - load.rollout_ahead_s


def slack_s(load: ServingLoad, objectives: Objectives, serving: LearnedStepTime, now_s: float) -> float:
    """The smallest slack or credit; infinite without requests."""
    return min(credit_s(load, objectives), objective_slack_s(load, objectives, serving, now_s))


def objective_slack_s(load: ServingLoad, objectives: Objectives, serving: LearnedStepTime, now_s: float) -> float:
    """The smallest slack; infinite without requests."""
    keep = 1.0 - objectives.reserve
    tightest = math.inf
    rows = 0
    for arrival_s, tokens in load.waiting:
        rows += tokens
        steps = max(1, -(-rows // load.max_rows))
        # Every step of the prefill also decodes the running requests.
        prefill_s = steps * serving.upper_s(rows / steps + len(load.last_tokens_s), rows / steps + load.context, True)
        tightest = min(tightest, arrival_s + objectives.ttft_s * keep - now_s - prefill_s)
    if load.last_tokens_s:
        prefill = min(rows, load.max_rows)
        decode_s = serving.upper_s(len(load.last_tokens_s) + prefill, load.context + prefill, prefill > 0)
        tightest = min(tightest, min(load.last_tokens_s) + objectives.tpot_s * keep - now_s - decode_s)
    return tightest - load.serving_ahead_s - load.rollout_ahead_s


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutLoad:
    running: int
    """Responses that decode or are being prefilled."""
    waiting: int
    context: int
    """Tokens of all running responses."""
    prefilling: int = 0
    """Number of running responses that are being prefilled."""
    prefill: int = 0
    """Rows that are still to be prefilled, those of waiting responses included."""
    prefill_due: bool = False
    """Whether these rows have waited long enough that decode steps must leave the time to them."""


def rows_allowed(
    slack: float, objectives: Objectives, rollout: LearnedStepTime, load: RolloutLoad, *, growing: bool = False,
    ahead_s: float = 0.0,
) -> int:  # fmt: skip
    """How many rows the next rollout step may have; 0: it must wait. If they are no more than the responses that
    decode, there is no time for a prefill. `growing`: the slack is credit. `ahead_s`: predicted time of the rollout's
    launches in flight, which the slack of a request contains already."""
    if slack <= 0.0 or not load.running + load.waiting:
        return 0
    idle = math.isinf(slack)
    if not rollout.known:
        return FIRST_ROWS if idle else int(slack >= objectives.idle_s / 2)
    each, most_s = load.context / max(1, load.running), min(slack, objectives.idle_s - (ahead_s if idle else 0.0))
    decoding = load.running - load.prefilling
    if load.prefill:
        rows = rollout.most_rows(most_s, context_per_row=each, prefill=True)
        needed = decoding + 1.0
        if growing:
            half = min(min(load.prefill, CHUNK) / 2, rollout.worthwhile_rows(context_per_row=each, prefill=True))
            needed = max(needed, load.running / 2 + half)
        if rows >= needed:
            return min(rows, load.running + CHUNK)
        if load.prefill_due or not decoding:
            if growing or (idle and ahead_s > 0.0):
                return 0
            if idle:
                worthwhile = rollout.worthwhile_rows(context_per_row=each, prefill=True)
                return decoding + max(1, int(min(load.prefill, CHUNK, worthwhile)))
    rows = min(decoding, rollout.most_rows(most_s, context_per_row=each))
    if rows == 0 and idle and ahead_s <= 0.0:
        return 1  # a single row takes longer than `idle_s`; without requests the rollout still makes progress
    return 0 if growing and 2 * rows < load.running + load.waiting else rows


def prefill_allowed(objectives: Objectives, serving: LearnedStepTime, context: int, max_rows: int) -> tuple[int, int]:
    """How many rows a step of serving may have, prefill included, and how many launches may prefill before the next
    decode step, while prompts wait: as many as take a quarter of the time per token. Many rows are faster than few, and
    a decode step for half of the requests takes almost as long as one for all of them. `context`: tokens of all running
    requests.

    >>> time = LearnedStepTime()
    >>> for rows in (500, 1000, 1500, 2000):
    ...     time.observe(0.005 + rows * 5e-6, rows, 0, True)
    >>> [prefill_allowed(Objectives(tpot_s=s), time, 0, 8192) for s in (0.02, 0.1, 0.8)]
    [(2048, 1), (3499, 1), (8192, 3)]
    """
    most_s = objectives.tpot_s / 4
    rows = max(min(max_rows, serving.most_rows(most_s, prefill=True)), min(max_rows, LEAST_ROWS))
    prefill_s = serving.upper_s(rows, context + rows, True)
    return rows, max(1, min(MAX_PREFILLS, int(most_s / prefill_s))) if prefill_s else 1


def steps_allowed(slack: float, launch_s: float, time: LearnedStepTime, rows: int, context: int, burst: int) -> int:
    """How many decode steps of this shape may be launched at once: at least 1, and no more than fit into the slack and
    into `launch_s`."""
    step_s = time.upper_s(rows, context)
    if step_s <= 0.0:
        return 1
    return max(1, min(burst, int(min(slack, launch_s) / step_s)))
