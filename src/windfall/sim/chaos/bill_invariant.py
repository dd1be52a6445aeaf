"""Every second of every worker is in one bill: computed again from the log's other lines, and compared.

A worker's seconds run from its process's start, or from where the last bill that a killed controller had written ends;
through the times between its links; until it is given up for the last time. In no bill are, and that is the price of a
kill: what a controller had not billed yet when it was killed of workers that the next one never saw, and the time of a
worker after it was given up, if it never comes back. Of the trainer, only where it has an engine, and so is a worker.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from windfall.cost.bill import Holder, Totals
from windfall.sim.chaos.broken import InvariantBroken
from windfall.sim.machines.fleet import Stay
from windfall.types import LOCAL

CLOSE_S = 1e-4
"""A log's dates are exact to less than a millionth of a second; there are many of them."""


def check(log: Path, *, births: Sequence[float], trainers: Sequence[float], stays: Sequence[Stay]) -> None:
    """`births`: when every life of the controller began; `trainers`: every process of the trainer."""
    events = [json.loads(line) for line in log.read_text().splitlines()]
    bills = [(e["m"], msgspec.convert(e["bill"], Totals)) for e in events if e.get("bill")]
    starts = {stay.name: stay.start_s for stay in stays}
    expected: dict[Holder, float] = {"spot": 0.0, "trainer": 0.0}
    for n, born_s in enumerate(births):
        end_s = births[n + 1] if n + 1 < len(births) else math.inf
        own = [m for m, _ in bills if born_s <= m < end_s]
        if not own:
            continue
        before_s = max((m for m, _ in bills if m < born_s), default=-math.inf)
        said = [e for e in events if born_s <= e["m"] < end_s and e["m"] <= own[-1]]
        for holder, s in _life(said, before_s, own[-1], starts, trainers).items():
            expected[holder] += s
    billed = sum((bill for _, bill in bills), Totals())
    for holder, s in expected.items():
        found = billed.holders[holder].total_s if holder in billed.holders else 0.0
        if s and abs(found - s) > CLOSE_S + 1e-7 * s:
            raise InvariantBroken("bill", f"{holder}: {found:.6f} s are billed, and {s:.6f} s went by")


def _life(
    events: list[dict[str, Any]], before_s: float, last_s: float, starts: dict[str, float], trainers: Sequence[float]
) -> dict[Holder, float]:
    """Seconds by holder of one life of a controller, up to its last bill."""
    out: dict[Holder, float] = {"spot": 0.0, "trainer": 0.0}
    since: dict[str, float] = {}
    ended: dict[str, float] = {}
    newest: dict[tuple[str, float], str] = {}
    """Of every process: it may dial again before its last link is given up."""
    for e in events:
        name = str(e.get("worker", "")).partition("#")[0]
        if e["name"] == "worker_joined":
            start_s = trainers[bisect_right(trainers, e["m"]) - 1] if name == LOCAL else starts[name]
            old = newest.get((name, start_s))
            newest[name, start_s] = e["worker"]
            if old in since:
                out["trainer" if name == LOCAL else "spot"] += e["m"] - since.pop(old)
                since[e["worker"]] = e["m"]
            else:
                since[e["worker"]] = max(start_s, before_s, ended.get(name, -math.inf))
        elif e["name"] in ("worker_lost", "worker_left") and e["worker"] in since:
            ended[name] = e["m"]
            out["trainer" if name == LOCAL else "spot"] += e["m"] - since.pop(e["worker"])
    for worker, since_s in since.items():
        out["trainer" if worker.partition("#")[0] == LOCAL else "spot"] += last_s - since_s
    return out
