"""Turns advice into a number of workers for this machine. Pure: fleet.json in, a number out.

Advice is about one kind of worker, and the fleet may have workers of that kind that this run did not start. Advice is
followed when two steps in a row agree: a worker takes a while to start, and one unusual step is no reason to stop one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from windfall.types import LOCAL


class Autoscaler:
    def __init__(self, count: int, limit: int) -> None:
        """`count`: number of workers at the start; `limit`: upper limit for it."""
        self.count, self._limit = count, limit
        self._lease: str | None = None
        """Kind of our workers, as advice names it. It is remembered when all of them are gone."""
        self._previous: tuple[int, int] | None = None
        """The last step with advice to change, and the number of workers it asked for."""

    def update(self, snapshot: dict[str, Any] | None, own: Collection[str]) -> int | None:
        """The new number of workers, or None if it stays the same. `own`: names of workers that this run started."""
        rows = [w for w in (snapshot or {}).get("workers", []) if w["state"] != "gone" and _name(w) != LOCAL]
        own_rows = [w for w in rows if _name(w) in own]
        if own_rows:
            self._lease = own_rows[0]["lease"]
        advice = next((a for a in (snapshot or {}).get("advice", []) if a["lease"] == self._lease), None)
        if snapshot is None or advice is None or advice["count"] == advice["now"]:
            self._previous = None
            return None
        others = sum(w["lease"] == self._lease for w in rows) - len(own_rows)
        wanted = min(self._limit, max(0, advice["count"] - others))
        before, self._previous = self._previous, (snapshot["step"], wanted)
        if before is None or before[0] == snapshot["step"] or before[1] != wanted or wanted == self.count:
            return None
        self.count, self._previous = wanted, None
        return wanted


def _name(row: dict[str, Any]) -> str:
    """The name of a worker, without the number of its reconnection."""
    return row["worker"].partition("#")[0]
