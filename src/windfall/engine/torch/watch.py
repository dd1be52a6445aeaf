"""Which responses are followed while nothing is drafted. Pure: no clock.

What drafts would give is known only if responses are followed (engine/drafts.py), and to find the place that a response
follows takes time of the host. So only some responses are watched: searches take at most SHARE of the time of all
steps, whatever the model is. A response is watched for WINDOW tokens, and only if there is credit for all of them.

    >>> watch = Watch()
    >>> watch.observe(["a", "b"], step_s=0.1, spent_s=0.0)  # what a search costs is not known: one is watched
    >>> list(watch.ids)
    ['a']
    >>> watch.observe(["a", "b"], step_s=0.1, spent_s=0.0001)  # 1.9 ms of credit, and 31 + 32 searches take 6.3 ms
    >>> list(watch.ids)
    ['a']
"""

from __future__ import annotations

from collections.abc import Sequence

SHARE = 0.01
WINDOW = 32
SAVED_STEPS = 256
"""Steps whose credit can be saved: what is watched at once then costs more for a while, and not for long."""
SMOOTHING = 0.1


class Watch:
    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        """Responses to watch in the next step, and for how many more tokens."""
        self._credit_s = 0.0
        self._search_s: float | None = None
        self._next = 0

    def observe(self, running: Sequence[str], *, step_s: float, spent_s: float) -> None:
        """A step without drafts has run, and `spent_s` of its time was for those that were watched."""
        if self.ids:
            each_s, known_s = spent_s / len(self.ids), self._search_s
            self._search_s = each_s if known_s is None else known_s + SMOOTHING * (each_s - known_s)
        self._credit_s = min(self._credit_s + SHARE * step_s, SAVED_STEPS * SHARE * step_s) - spent_s
        alive = set(running)
        self.ids = {id: left - 1 for id, left in self.ids.items() if left > 1 and id in alive}
        need_s = (self._search_s or 0.0) * (sum(self.ids.values()) + WINDOW)
        if running and self._credit_s >= need_s:
            self.ids.setdefault(running[self._next % len(running)], WINDOW)
            self._next += 1
