"""The bill invariant: every second of every worker is in exactly one bill. The seconds are computed again from the
other lines of the log and compared with the bills.

A worker's seconds start when its process starts, or where the last bill of a killed controller ends. They include the
time between its links and end when the controller gives it up for the last time.

Two kinds of time are not billed. If a controller is killed and the next one never sees a worker, it is that worker's
time since the last bill. If a worker is given up and never comes back, it is its time after that. The trainer is
checked only if it has an engine and is therefore a worker; with several policies, each is billed for no more than the
time of the run.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from tests.chaos import InvariantBroken
from windfall.controller.cost.bill import Holder, Totals
from windfall.sim.machines.fleet import Stay
from windfall.types import LOCAL

TOLERANCE_USD = 1e-6
TOLERANCE_S = 1e-4
"""Times in a log are exact to less than a microsecond, but many of them are summed."""


def check(
    log: Path, controller_starts: Sequence[float], trainer_starts: Sequence[float], stays: Sequence[Stay]
) -> None:
    """`controller_starts` and `trainer_starts`: when each process started (loop time, seconds)."""
    events = [json.loads(line) for line in log.read_text().splitlines()]
    bills = [(e["m"], msgspec.convert(e["bill"], Totals)) for e in events if e.get("bill")]
    starts = {stay.name: stay.start_s for stay in stays}
    expected: dict[Holder, float] = {"spot": 0.0, "trainer": 0.0, "borrowed": 0.0}
    for start_s, end_s in pairwise([*controller_starts, math.inf]):
        last_s = max((m for m, _ in bills if start_s <= m < end_s), default=None)
        if last_s is None:
            continue
        before_s = max((m for m, _ in bills if m < start_s), default=-math.inf)
        own_events = [e for e in events if start_s <= e["m"] <= last_s]
        for holder, s in _seconds_of_controller(own_events, before_s, last_s, starts, trainer_starts):
            expected[holder] += s
    billed = sum((bill for _, bill in bills), Totals())
    last_s = max((m for m, _ in bills), default=0.0)
    for base, trainer_s in ((base, account.total_s) for base, account in billed.trainers.items()):
        if trainer_s > last_s + TOLERANCE_S:
            raise InvariantBroken("bill", f"the trainer of {base!r} is billed for {trainer_s:.6f} s of {last_s:.6f} s")
    for holder, s in expected.items():
        billed_s = billed.holders[holder].total_s if holder in billed.holders else 0.0
        if s and abs(billed_s - s) > TOLERANCE_S + 1e-7 * s:
            raise InvariantBroken("bill", f"{holder}: {billed_s:.6f} s are billed, but {s:.6f} s elapsed")


def check_policies(bill: dict[str, Any], bases: Mapping[str, Sequence[str]]) -> None:
    """The dollars of the policies add up to the bill, every token is of one policy, and every second of a trainer is of
    one base."""
    if "" in bases:
        return
    totals = msgspec.convert(bill, Totals)
    if unknown := totals.trainers.keys() - bases.keys():
        raise InvariantBroken("bill", f"trainers are billed for {sorted(unknown)}, which are no bases")
    usd = totals.usd_of(bases, {})
    if abs(sum(usd.values()) - totals.all.total_usd) > TOLERANCE_USD:
        raise InvariantBroken("bill", f"the policies pay {usd}, but the bill is ${totals.all.total_usd:.6f}")
    for holder, account in totals.holders.items():
        if sum(account.tokens_of.values()) != account.tokens:
            raise InvariantBroken("bill", f"{holder}: {account.tokens} tokens, but by policy {account.tokens_of}")
    trainer_s = totals.holders["trainer"].total_s if "trainer" in totals.holders else 0.0
    by_base = {base: account.total_s for base, account in totals.trainers.items()}
    if abs(sum(by_base.values()) - trainer_s) > TOLERANCE_S:
        raise InvariantBroken("bill", f"trainers are billed for {trainer_s:.6f} s, but by base for {by_base}")


def _seconds_of_controller(
    events: list[dict[str, Any]],
    before_s: float,
    last_s: float,
    starts: dict[str, float],
    trainer_starts: Sequence[float],
) -> Iterator[tuple[Holder, float]]:
    """Seconds that one controller process has to bill, up to its last bill."""
    since: dict[str, float] = {}
    ended: dict[str, float] = {}
    newest: dict[tuple[str, float], str] = {}
    """The newest worker id of every process. A process may dial again before its previous link is given up."""
    holders: dict[str, Holder] = {LOCAL: "trainer"}
    """By name of the worker."""
    for e in events:
        name = str(e.get("worker", "")).partition("#")[0]
        if e["name"] == "worker_joined":
            holders.setdefault(name, e["lease"])
            start_s = _trainer_start(trainer_starts, e["m"]) if name == LOCAL else starts[name]
            old = newest.get((name, start_s))
            newest[name, start_s] = e["worker"]
            if old in since:
                yield holders[name], e["m"] - since.pop(old)
                since[e["worker"]] = e["m"]
            else:
                since[e["worker"]] = max(start_s, before_s, ended.get(name, -math.inf))
        elif e["name"] in ("worker_lost", "worker_left") and e["worker"] in since:
            ended[name] = e["m"]
            yield holders[name], e["m"] - since.pop(e["worker"])
    for worker, since_s in since.items():
        yield holders[worker.partition("#")[0]], last_s - since_s


def _trainer_start(trainer_starts: Sequence[float], joined_s: float) -> float:
    """When the trainer process started whose worker joined at `joined_s`.

    When a trainer is killed, its next process starts at that moment, but its worker joins only after it has booted. So
    a worker that joins at the time of a start belongs to the killed process. Only the first process joins at its start.

    >>> [_trainer_start([0.0, 15.0], joined_s) for joined_s in (0.0, 15.0, 15.5)]
    [0.0, 0.0, 15.0]
    """
    return trainer_starts[bisect_left(trainer_starts, joined_s, lo=1) - 1]
