"""Decides how many workers each source should run. Pure: fleet.json and the time in, numbers out.

- Advice is about one kind of worker, and the fleet may have workers of that kind that this run did not start. Several
  sources can have workers of one kind: the shortage or surplus is computed once and split over them. A new worker goes
  to the source with the fewest; the first to go are workers that were asked for and have not joined.
- Advice is followed when two steps in a row agree: a worker takes a while to start, and one unusual step is no reason
  to stop one. These are steps of the policy whose trainer waits least: workers beyond what keeps that trainer busy
  would only wait. After a change, the same source is left alone for the cool-down.
- The number stays between the limits of its source. The sources together cost no more than the price ceiling. A price
  that is not known is not guessed: under a ceiling such a source does not grow. If prices rise above the ceiling, the
  most expensive source shrinks at once, without advice or cool-down.
- If the trainer's own engine does not generate, one worker stays whatever advice and ceiling say: without it the run
  would stand still and the trainer would cost money for nothing. A source may go to 0 only while another source has a
  worker that is ready: one that was only asked for may never come.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from windfall.types import is_local


@dataclass(kw_only=True, slots=True)
class ScaledSource:
    """A source of workers, and the number of workers that it was asked for."""

    count: int
    min_count: int = 0
    max_count: int = 0
    """0: the number is fixed. The workers still count against the price ceiling."""
    usd_per_h: float | None = None
    """Price of one worker; None: not known yet."""
    least_usd_per_h: float = 0.0
    """Price to count at least, such as that of an on-demand machine if no spot machine is available."""
    changed_s: float = -math.inf
    """When the number was last changed."""


class Autoscaler:
    def __init__(
        self, sources: Mapping[str, ScaledSource], *, cooldown_s: float = 0.0, max_usd_per_h: float = 0.0,
        keep_one: bool = False,
    ) -> None:  # fmt: skip
        """`max_usd_per_h`: price ceiling for all sources together; 0: none. `keep_one`: never stop the last worker."""
        self.sources = dict(sources)
        self._cooldown_s, self._max_usd_per_h, self._keep_one = cooldown_s, max_usd_per_h, keep_one
        self._lease: dict[str, str] = {}
        """Kind of the workers of each source, as advice names it. It is remembered when all of them are gone."""
        self._advice: dict[str, _AdviceFollower] = {}
        """By kind of worker."""
        self._ready: dict[str, int] = {}
        """Number of workers of each source that are ready, in the newest snapshot."""

    def update(
        self, snapshot: dict[str, Any] | None, own: Mapping[str, Collection[str]], now_s: float
    ) -> dict[str, int]:
        """The sources whose number of workers changes, and their new numbers. `own`: names of the workers of each
        source."""
        if snapshot is None:
            self._advice.clear()
            return {}
        rows = [w for w in snapshot.get("workers", []) if w["state"] != "gone" and not is_local(w["worker"])]
        joined: dict[str, int] = {}
        for name, source in self.sources.items():
            own_rows = [w for w in rows if _name(w) in own.get(name, ())]
            joined[name] = len(own_rows)
            self._ready[name] = sum(w["state"] == "ready" for w in own_rows)
            if own_rows:
                self._lease[name] = own_rows[0]["lease"]
                known = [price for row in own_rows if (price := _price(row)) is not None]
                if known:
                    source.usd_per_h = max(*known, source.least_usd_per_h)
        before = {name: source.count for name, source in self.sources.items()}
        for lease in dict.fromkeys(self._lease.values()):
            scaled = [n for n, s in self.sources.items() if s.max_count and self._lease.get(n) == lease]
            others = sum(w["lease"] == lease for w in rows) - sum(joined[n] for n in scaled)
            advised = self._advice.setdefault(lease, _AdviceFollower(lease)).wanted(snapshot, others)
            if advised is not None:
                self._split(advised, scaled, joined, now_s)
        self._respect_ceiling()
        changes = {name: s.count for name, s in self.sources.items() if s.count != before[name]}
        for name in changes:
            self.sources[name].changed_s = now_s
            if follower := self._advice.get(self._lease.get(name, "")):
                follower.previous = None
        return changes

    def _split(self, wanted: int, names: list[str], joined: Mapping[str, int], now_s: float) -> None:
        """Change the numbers of these sources until they have `wanted` workers together, as far as that is allowed."""
        free = [n for n in names if now_s - self.sources[n].changed_s >= self._cooldown_s]
        while missing := wanted - sum(self.sources[n].count for n in names):
            step = 1 if missing > 0 else -1
            possible = [n for n in free if self._may_change(n, step)]
            if not possible:
                return
            if step > 0:
                name = min(possible, key=lambda n: self.sources[n].count)
            else:
                name = max(possible, key=lambda n: (self.sources[n].count - joined[n], self.sources[n].count))
            self.sources[name].count += step

    def _may_change(self, name: str, step: int) -> bool:
        """Whether limits, ceiling and the last worker of the run allow one worker more (1) or less (-1)."""
        source = self.sources[name]
        if step < 0:
            return source.count > source.min_count and not (source.count == 1 and self._is_needed(name))
        if source.count >= source.max_count:
            return False
        if not self._max_usd_per_h:
            return True
        # A sum of prices is not exact: 0.1 + 0.2 must fit into 0.3.
        return source.usd_per_h is not None and (
            source.usd_per_h == 0 or self._cost() + source.usd_per_h <= self._max_usd_per_h + 1e-9
        )

    def _is_needed(self, name: str) -> bool:
        """Whether the run would stand still without the workers of this source."""
        others = (n for n, s in self.sources.items() if n != name and s.count)
        return self._keep_one and not any(self._ready.get(n) for n in others)

    def _respect_ceiling(self) -> None:
        priced = [(n, s) for n, s in self.sources.items() if s.max_count and s.usd_per_h]
        for name, source in sorted(priced, key=lambda item: -(item[1].usd_per_h or 0.0)):
            while self._max_usd_per_h and self._cost() > self._max_usd_per_h + 1e-9 and self._may_change(name, -1):
                source.count -= 1

    def _cost(self) -> float:
        return sum(s.count * (s.usd_per_h or 0.0) for s in self.sources.values())


class _AdviceFollower:
    """The number of workers of one kind that advice asks for, once two steps agree on it."""

    def __init__(self, lease: str) -> None:
        self._lease = lease
        self.previous: tuple[int, int] | None = None
        """The last step with advice to change, and the number of workers it asked for."""

    def wanted(self, snapshot: dict[str, Any], others: int) -> int | None:
        """How many workers the sources should have together. None: no advice to change, or only one step has given it.
        `others`: workers of this kind whose number cannot be chosen."""
        advice = next((a for a in snapshot.get("advice", []) if a["lease"] == self._lease), None)
        if advice is None or advice["count"] == advice["now"]:
            self.previous = None
            return None
        wanted = max(0, advice["count"] - others)
        before = self.previous
        if before is None or before[0] != snapshot["advised"]:
            self.previous = (snapshot["advised"], wanted)
        return wanted if before is not None and before[0] != snapshot["advised"] and before[1] == wanted else None


def _price(row: dict[str, Any]) -> float | None:
    price = row.get("price_usd_per_h", 0.0)
    return price if price > 0 or row.get("kind") == "borrowed" else None


def _name(row: dict[str, Any]) -> str:
    """The name of a worker, without the number of its reconnection."""
    return row["worker"].partition("#")[0]
