"""Reads from the event log of a run how long its parts took, for the formulas of step_time.py. Pure.

A log contains the time of an engine step at several batch sizes for every kind of worker (`speeds`), spans of training
with the optimizer's part, pulls, checkpoints and rewards. It does not separate the cost of prefill and of long contexts
from the rest of a step: the step times include both. It does not record other load on the machines.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from windfall.events.log import Event
from windfall.step_time import StepPoint, StepTime, fit
from windfall.types import LOCAL, is_local

FLAT = 1e-4
"""Minimum time that a response adds to a step, as a share of the fixed time."""
UNLIMITED_PER_S = 1e18
"""Bytes per second that stand for no limit."""
SHARED_PULLS = 1.5
"""A pull with more than this many concurrent pulls on average, itself included, shared the bandwidth."""


class TrainingTimes(NamedTuple):
    """Times of training, averaged over the measured steps."""

    train_s: float
    """Seconds per trained token."""
    update_s: float
    """Seconds per step for optimizer updates and publishing."""


def steps_of(events: Sequence[Event]) -> list[Event]:
    return [e for e in events if (e["kind"], e["name"]) == ("scalar", "step")]


def speeds(steps: Iterable[Event]) -> dict[str, list[StepPoint]]:
    """Step times by batch size for each kind of worker, averaged over these steps.

    >>> rows = [{"speeds": {"local": [[4.0, 0.1, 2], [40.0, 0.3, 1]]}}, {"speeds": {"local": [[4.0, 0.2, 2]]}}]
    >>> speeds(rows)["local"][0]
    StepPoint(batch=4.0, step_s=0.15000000000000002, weight=4.0)
    """
    sums: dict[str, dict[int, list[float]]] = {}
    for event in steps:
        for kind, rows in (event.get("speeds") or {}).items():
            for batch, step_s, windows in rows:
                size = round(batch * batch).bit_length()  # half-octaves, as in controller/scheduling/worker_speed.py
                row = sums.setdefault(kind, {}).setdefault(size, [0.0, 0.0, 0.0])
                for n, x in enumerate((batch * windows, step_s * windows, windows)):
                    row[n] += x
    return {
        kind: sorted(StepPoint(b / w, s / w, float(w)) for b, s, w in sizes.values() if w)
        for kind, sizes in sums.items()
    }


def fit_line(points: Sequence[StepPoint]) -> StepTime:
    return fit(points, FLAT)


def training(events: Sequence[Event], numbers: Iterable[int]) -> TrainingTimes | None:
    """Times of training of the steps with these numbers. None: they trained on nothing."""
    wanted = set(numbers)
    trained = {e["step"]: e["trained"] for e in steps_of(events) if e["step"] in wanted and e.get("trained")}
    spans = [e for e in events if (e["kind"], e["name"]) == ("span", "train") and e["step"] in trained]
    tokens = sum(trained[e["step"]] for e in spans)
    if not tokens:
        return None
    update_s = statistics.mean(e.get("update_s", 0.0) for e in spans)
    # The time that the controller waited: transferring samples is part of training on them.
    whole_s = sum(e["s"] + e.get("asked_s", e.get("early_s", 0.0)) - e.get("update_s", 0.0) for e in spans)
    return TrainingTimes(train_s=whole_s / tokens, update_s=update_s)


class Pulls(NamedTuple):
    """Size and bandwidth of weight pulls."""

    size_bytes: float
    egress_per_s: float
    """Bandwidth of the trainer, shared by concurrent pulls."""
    ingress_per_s: float


def pulls(events: Sequence[Event]) -> Pulls:
    """Estimate the bandwidths from pulls of workers whose engine was already built. Concurrent pulls measure the
    trainer's egress, and single pulls measure a worker's ingress. A bandwidth without measurements is unlimited.

    >>> one = [{"name": "worker_ready", "worker": "a", "t": t, "s": 2.0, "bytes": 100} for t in (1.0, 12.0)]
    >>> pulls(one).ingress_per_s
    50.0
    """
    seen, spans = set[str](), list[tuple[float, float, float]]()
    for e in events:
        if e["name"] == "worker_ready" and not is_local(e["worker"]):
            if e["worker"] in seen and e["bytes"] and e["s"] > 0:
                spans.append((e["t"] - e["s"], e["t"], float(e["bytes"])))
            seen.add(e["worker"])
    if not spans:
        return Pulls(size_bytes=1.0, egress_per_s=UNLIMITED_PER_S, ingress_per_s=UNLIMITED_PER_S)
    shared, alone = [], []
    for a, b, size in spans:
        concurrent = sum(max(0.0, min(b, d) - max(a, c)) for c, d, _ in spans) / (b - a)
        if concurrent > SHARED_PULLS:
            shared.append(concurrent * size / (b - a))
        else:
            alone.append(size / (b - a))
    return Pulls(
        size_bytes=statistics.median(size for *_, size in spans),
        egress_per_s=statistics.median(shared) if shared else UNLIMITED_PER_S,
        ingress_per_s=statistics.median(alone) if alone else UNLIMITED_PER_S,
    )


def services(steps: Sequence[Event], trained: TrainingTimes | None) -> dict[str, StepTime]:
    """Step times of every kind of worker in these steps."""
    out = {}
    for kind, points in speeds(steps).items():
        out[kind] = fit_line(points)
        if kind == LOCAL and trained is not None:
            out[kind] = replace(out[kind], **trained._asdict())
    return out


def session_keys(steps: Iterable[Event], granule: int = 1) -> dict[str, float]:
    """Estimate the keys of [sim] for responses with several turns. Empty: they have one. `granule`: real
    tokens that a token of the log stands for.

    >>> row = [4, math.log(2.0), math.log(2.0) ** 2]
    >>> rows = {"env_s": row, "observation_tokens": row, "turn_tokens": row}
    >>> session_keys([{"sessions": {"ended": 2, "turns": 6, **rows}}])
    {'turns': 3.0, 'env_s': 2.0, 'env_sigma': 0.0, 'observation_tokens': 2.0, 'observation_sigma': 0.0, \
'median_tokens': 2.0, 'sigma': 0.0}
    """
    rows = [e["sessions"] for e in steps if e.get("sessions")]
    ended = sum(r["ended"] for r in rows)
    if not ended:
        return {}
    keys = {"turns": round(max(1.0, sum(r["turns"] for r in rows) / ended), 2)}
    names = {"env_s": ("env_s", "env_sigma"), "observation_tokens": ("observation_tokens", "observation_sigma"),
             "turn_tokens": ("median_tokens", "sigma")}  # fmt: skip
    for name, (median, sigma) in names.items():
        count = max(1, sum(r[name][0] for r in rows))
        mean, squares = (sum(r[name][0] * r[name][n] for r in rows) / count for n in (1, 2))
        scale = 1 if name == "env_s" else granule
        keys |= {median: round(scale * math.exp(mean), 3), sigma: round(math.sqrt(max(0.0, squares - mean * mean)), 3)}
    return keys


def length_keys(steps: Iterable[Event]) -> dict[str, float]:
    """Estimate the keys of [sim] for response lengths: log-normal, and correlated within a group. Truncated responses
    count with their truncated length. Empty: the log has too few lengths.

    >>> length_keys([{"lengths": [[10, 10], [1000, 1000]]}])
    {'median_tokens': 100.0, 'sigma': 2.303, 'alike': 1.0}
    """
    groups = [[math.log(n) for n in row if n] for e in steps for row in e.get("lengths", ()) if any(row)]
    every = [x for row in groups for x in row]
    if len(groups) < 2 or len(every) == len(groups):
        return {}
    size, middle = len(every) / len(groups), statistics.mean(every)
    means = [statistics.mean(row) for row in groups]
    between = size * sum((m - middle) ** 2 for m in means) / (len(groups) - 1)
    within = sum((x - m) ** 2 for row, m in zip(groups, means, strict=True) for x in row) / (len(every) - len(groups))
    spread = between + (size - 1) * within
    alike = min(1.0, max(0.0, (between - within) / spread)) if spread else 0.0
    median = round(math.exp(statistics.median(every)), 1)
    return {"median_tokens": median, "sigma": round(statistics.pstdev(every), 3), "alike": round(alike, 3)}
