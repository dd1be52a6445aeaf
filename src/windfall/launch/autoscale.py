"""Decides how many workers each source should run. Pure: fleet.json and the time in, numbers out.

- Advice is about one kind of worker, and the fleet may have workers of that kind that this run did not start.
- Advice is followed when two steps in a row agree: a worker takes a while to start, and one unusual step is no reason
  to stop one. After a change, the same source is left alone for the cool-down.
- The number stays between the limits of its source. The sources together cost no more than the price ceiling. A price
  that is not known is not guessed: under a ceiling such a source does not grow. If prices rise above the ceiling, the
  most expensive source shrinks at once, without advice or cool-down.
- If the trainer's own engine does not generate, one worker stays whatever advice and ceiling say: without it the run
  would stand still and the trainer would cost money for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from windfall.types import LOCAL


@dataclass(kw_only=True, slots=True)
class ScaledSource:
    """A source of workers, and the number of workers that it was asked for."""

    count: int
    min_count: int = 0
    max_count: int = 0
    """0: the number is fixed. The workers still count against the price ceiling."""
    usd_per_h: float | None = None
    """Price of one worker; None: not known yet."""
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
        self._advice = {name: _AdviceFollower() for name in sources}

    def update(
        self, snapshot: dict[str, Any] | None, own: Mapping[str, Collection[str]], now_s: float
    ) -> dict[str, int]:
        """The sources whose number of workers changes, and their new numbers. `own`: names of the workers of each
        source."""
        if snapshot is None:
            for follower in self._advice.values():
                follower.previous = None
            return {}
        rows = [w for w in snapshot.get("workers", []) if w["state"] != "gone" and _name(w) != LOCAL]
        changes: dict[str, int] = {}
        for name, source in self.sources.items():
            own_rows = [w for w in rows if _name(w) in own.get(name, ())]
            if own_rows and (price := _price(own_rows[0])) is not None:
                source.usd_per_h = price
            advised = self._advice[name].wanted(snapshot, rows, own_rows)
            if not source.max_count or advised is None or now_s - source.changed_s < self._cooldown_s:
                continue
            wanted = self._allowed(source, min(source.max_count, max(source.min_count, advised)))
            if wanted != source.count:
                changes[name] = wanted
                self._set(name, wanted, now_s)
        return {**changes, **self._respect_ceiling(now_s)}

    def _set(self, name: str, count: int, now_s: float) -> None:
        source = self.sources[name]
        source.count, source.changed_s = count, now_s
        self._advice[name].previous = None

    def _allowed(self, source: ScaledSource, wanted: int) -> int:
        """`wanted`, reduced to what the ceiling allows and raised to what the run needs."""
        if self._max_usd_per_h and wanted > source.count:
            if source.usd_per_h is None:
                wanted = source.count
            elif source.usd_per_h > 0:
                room = self._max_usd_per_h - self._cost() + source.count * source.usd_per_h
                # A sum of prices is not exact: 0.1 + 0.2 must fit into 0.3.
                wanted = max(source.count, min(wanted, math.floor(room / source.usd_per_h + 1e-9)))
        others = sum(s.count for s in self.sources.values()) - source.count
        return max(wanted, 1) if self._keep_one and not others and source.count else wanted

    def _respect_ceiling(self, now_s: float) -> dict[str, int]:
        """Shrink the most expensive sources while the workers cost more than the ceiling."""
        changes: dict[str, int] = {}
        priced = [(n, s) for n, s in self.sources.items() if s.max_count and s.usd_per_h]
        for name, source in sorted(priced, key=lambda item: -(item[1].usd_per_h or 0.0)):
            over = self._cost() - self._max_usd_per_h
            if not self._max_usd_per_h or over <= 1e-9:
                break
            surplus = math.ceil(over / (source.usd_per_h or math.inf) - 1e-9)
            wanted = self._allowed(source, max(source.min_count, source.count - surplus, 0))
            if wanted < source.count:
                changes[name] = wanted
                self._set(name, wanted, now_s)
        return changes

    def _cost(self) -> float:
        """Known cost of all workers that were asked for, in $ per hour."""
        return sum(s.count * (s.usd_per_h or 0.0) for s in self.sources.values())


class _AdviceFollower:
    """The number of workers that advice asks one source for, once two steps agree on it."""

    def __init__(self) -> None:
        self._lease: str | None = None
        """Kind of the source's workers, as advice names it. It is remembered when all of them are gone."""
        self.previous: tuple[int, int] | None = None
        """The last step with advice to change, and the number of workers it asked for."""

    def wanted(
        self, snapshot: dict[str, Any], rows: list[dict[str, Any]], own_rows: list[dict[str, Any]]
    ) -> int | None:
        """None: no advice to change, or only one step has given it."""
        if own_rows:
            self._lease = own_rows[0]["lease"]
        advice = next((a for a in snapshot.get("advice", []) if a["lease"] == self._lease), None)
        if advice is None or advice["count"] == advice["now"]:
            self.previous = None
            return None
        others = sum(w["lease"] == self._lease for w in rows) - len(own_rows)
        wanted = max(0, advice["count"] - others)
        before = self.previous
        if before is None or before[0] != snapshot["step"]:
            self.previous = (snapshot["step"], wanted)
        return wanted if before is not None and before[0] != snapshot["step"] and before[1] == wanted else None


def _price(row: dict[str, Any]) -> float | None:
    """The price of a worker in fleet.json; None if it is not known."""
    price = row.get("price_usd_per_h", 0.0)
    return price if price > 0 or row.get("kind") == "borrowed" else None


def _name(row: dict[str, Any]) -> str:
    """The name of a worker, without the number of its reconnection."""
    return row["worker"].partition("#")[0]
