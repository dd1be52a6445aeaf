"""What every device did, for the timelines of the page. Pure.

The page shows one of WINDOWS_S. Each window is divided into BUCKETS, and a bucket holds the part of its time that each
job generated or trained. So turns of a fraction of a second can be seen in the last minute, and their shares in the
last week, while memory depends only on the number of devices and jobs.

Rule: every change of a bucket gets a number, which grows. A viewer that has all changes up to a number asks for the
later ones only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WINDOWS_S = (60.0, 600.0, 3600.0, 21600.0, 86400.0, 604800.0)
BUCKETS = 300
CLOCK_S = 60.0
"""Turns that end later than this after now are not valid: clocks of machines differ by less."""
KINDS = ("rollout", "train")


@dataclass(slots=True)
class _Bucket:
    changed: int = 0
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    """By job and kind."""


class DeviceHistory:
    def __init__(self) -> None:
        self.changed = 0
        """The number of the newest change."""
        self._rows: dict[float, dict[str, dict[int, _Bucket]]] = {window: {} for window in WINDOWS_S}
        """By window, device, and the number of the bucket since the Unix epoch."""

    def add(self, turn: Mapping[str, Any], now_s: float) -> None:
        """A turn that has ended, as the turn server logs it. One that is not valid is left out."""
        device, job, kind = turn.get("device"), turn.get("job"), turn.get("kind")
        start_s, end_s = turn.get("start_s"), turn.get("end_s")
        if not (isinstance(device, str) and isinstance(job, str) and kind in KINDS):
            return
        if not (isinstance(start_s, (int, float)) and isinstance(end_s, (int, float))):
            return
        if not start_s < end_s <= now_s + CLOCK_S:
            return
        self.changed += 1
        for window_s, rows in self._rows.items():
            width_s = window_s / BUCKETS
            first, last = int(start_s / width_s), int(end_s / width_s)
            oldest = int(now_s / width_s) - BUCKETS
            row = rows.setdefault(device, {})
            for number in range(max(first, oldest), last + 1):
                bucket = row.setdefault(number, _Bucket())
                part_s = min(end_s, (number + 1) * width_s) - max(start_s, number * width_s)
                bucket.seconds[job, kind] = bucket.seconds.get((job, kind), 0.0) + max(0.0, part_s)
                bucket.changed = self.changed
            if len(row) > 2 * BUCKETS:
                rows[device] = {number: bucket for number, bucket in row.items() if number >= oldest}

    def changes(self, window_s: float, since: int, now_s: float) -> dict[str, dict[int, list[list[Any]]]]:
        """By device, the buckets of this window that changed after the change `since`: [job, kind, share of the time].

        >>> history = DeviceHistory()
        >>> history.add({"device": "gpu0", "job": "a", "kind": "train", "start_s": 1000.1, "end_s": 1000.3}, 1001.0)
        >>> history.changes(60.0, 0, 1001.0)
        {'gpu0': {5000: [['a', 'train', 0.5]], 5001: [['a', 'train', 0.5]]}}
        >>> history.changes(60.0, history.changed, 1001.0)
        {}
        """
        width_s = window_s / BUCKETS
        oldest = int(now_s / width_s) - BUCKETS
        found = dict[str, dict[int, list[list[Any]]]]()
        for device, row in self._rows[window_s].items():
            new = {
                number: [[*key, round(s / width_s, 3)] for key, s in sorted(bucket.seconds.items())]
                for number, bucket in row.items()
                if bucket.changed > since and number >= oldest
            }
            if new:
                found[device] = new
        return found
