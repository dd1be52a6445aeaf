"""Acts on advice: how many of our own workers there should be. Pure: fleet.json in, a number out.

Advice is about a kind of worker; others of that kind may be here that are not ours. It is followed when two steps in a
row say the same, because a worker takes a while to start, and one odd step is no reason to send one away.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from windfall.types import LOCAL


class Following:
    def __init__(self, count: int, most: int) -> None:
        """`count`: how many there are to begin with."""
        self.count, self._most = count, most
        self._lease: str | None = None
        self._heard: tuple[int, int] | None = None
        """The step, and what it said."""

    def look(self, said: dict[str, Any] | None, ours: Collection[str]) -> int | None:
        """How many there should be, when that is new. `ours`: names of the workers that we keep."""
        rows = [w for w in (said or {}).get("workers", []) if w["state"] != "gone" and _name(w) != LOCAL]
        mine = [w for w in rows if _name(w) in ours]
        if mine:
            self._lease = mine[0]["lease"]
        advice = next((a for a in (said or {}).get("advice", []) if a["lease"] == self._lease), None)
        if said is None or advice is None or advice["count"] == advice["now"]:
            self._heard = None
            return None
        strangers = sum(w["lease"] == self._lease for w in rows) - len(mine)
        wanted = min(self._most, max(0, advice["count"] - strangers))
        before, self._heard = self._heard, (said["step"], wanted)
        if before is None or before[0] == said["step"] or before[1] != wanted or wanted == self.count:
            return None
        self.count, self._heard = wanted, None
        return wanted


def _name(row: dict[str, Any]) -> str:
    """Who it is, however often it has come back."""
    return row["worker"].partition("#")[0]
