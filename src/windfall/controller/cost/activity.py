"""What every worker did and when, for the timeline of a run. Pure: `Accounts` reports final intervals, `drain` returns
the changes since the last call.

Rules: a change is kept only if the interval before it lasted at least MIN_S, so a worker has at most 1 / MIN_S changes
per second. A worker without a change since the last `drain` is left out. An interval is reported once it is final, so
that time that turns out to be lost is shown as lost.

>>> activity = Activity()
>>> activity.record("n1", "booting", 0.0, 4.0)
>>> activity.record("n1", "generating", 4.0, 9.0)
>>> activity.moved("n1", "n2", 9.5)
>>> activity.gone("n1", 9.0)
>>> activity.drain(10.0)
{'rows': {'n1': [[10.0, 'booting'], [6.0, 'generating'], [1.0, '']]}, 'moves': [['n1', 'n2', 1, 0.5]]}
>>> activity.drain(20.0)
{}
"""

from __future__ import annotations

from typing import Any

MIN_S = 0.5
"""Shorter intervals are shown as a part of the next one."""
MAX_MOVES = 256
"""Upper limit for the pairs of workers whose moves one `drain` lists. The rest is one pair without names."""


class Activity:
    def __init__(self) -> None:
        self._changes: dict[str, list[list[Any]]] = {}
        """By worker: [seconds, bucket] of every change since the last drain."""
        self._now: dict[str, tuple[str, float, float]] = {}
        """By worker: the current bucket, its start and its end so far (seconds)."""
        self._moves: dict[tuple[str, str], list[float]] = {}
        """By (from, to): how many responses moved, and when the first one did (seconds)."""

    def record(self, worker: str, bucket: str, start_s: float, end_s: float) -> None:
        """The worker spent this time in this bucket. Intervals of a worker come in order."""
        now = self._now.get(worker)
        if now is not None and now[0] == bucket:
            self._now[worker] = (bucket, now[1], end_s)
            return
        changes = self._changes.setdefault(worker, [])
        if now is not None and changes and now[2] - now[1] < MIN_S:
            start_s = now[1]
            changes.pop()
            if changes and changes[-1][1] == bucket:  # the short interval was an interruption of this bucket
                start_s = changes.pop()[0]
        changes.append([start_s, bucket])
        self._now[worker] = (bucket, start_s, end_s)

    def gone(self, worker: str, now_s: float) -> None:
        self._now.pop(worker, None)
        self._changes.setdefault(worker, []).append([now_s, ""])

    def moved(self, source: str, target: str, now_s: float) -> None:
        """A response that was begun on `source` continues on `target`."""
        pair = (source, target)
        if pair not in self._moves and len(self._moves) >= MAX_MOVES:
            pair = ("", "")
        self._moves.setdefault(pair, [0, now_s])[0] += 1

    def drain(self, now_s: float) -> dict[str, Any]:
        """The changes since the last call, with the number of seconds ago; empty if there are none."""
        changes, self._changes = self._changes, {}
        moves, self._moves = self._moves, {}
        out: dict[str, Any] = {}
        if changes:
            out["rows"] = {w: [[round(now_s - s, 2), bucket] for s, bucket in c] for w, c in changes.items()}
        if moves:
            out["moves"] = [[a, b, n, round(now_s - s, 2)] for (a, b), (n, s) in moves.items()]
        return out
