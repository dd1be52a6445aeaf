"""Which responses are followed while nothing is drafted. Pure: no clock.

What drafts would give is known only if responses are followed (engine/drafts.py), and to find the place that a response
follows takes time of the host. So only some responses are watched: searches take at most SHARE of the time of all
steps, whatever the model is. A response is watched for WINDOW tokens, and only if there is credit for all of them.

    >>> watch = Watch()
    >>> watch.observe(step_s=0.1, spent_s=0.0)  # what a search costs is not known
    >>> watch.may_add
    True
    >>> watch.add("a")
    >>> watch.observe(step_s=0.1, spent_s=0.0001)  # 0.9 ms of credit, and 31 + 32 searches take 6.3 ms
    >>> watch.may_add
    False
"""

from __future__ import annotations

SHARE = 0.005
WINDOW = 32
SAVED_STEPS = 256
"""Steps whose credit can be saved: what is watched at once then costs more for a while, and not for long."""
SMOOTHING = 0.1


class Watch:
    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        """Responses to watch in the next step, and for how many more tokens."""
        self.added = 0
        """Number of responses that were watched since the start."""
        self._credit_s = 0.0
        self._search_s = 0.0  # 0: not known

    @property
    def may_add(self) -> bool:
        """Whether another response can be watched."""
        return self._credit_s >= self._search_s * (sum(self.ids.values()) + WINDOW)

    def add(self, id: str) -> None:
        self.ids.setdefault(id, WINDOW)
        self.added += 1

    def end(self, id: str) -> None:
        """The response has ended."""
        self.ids.pop(id, None)

    def observe(self, *, step_s: float, spent_s: float) -> None:
        """A step without drafts has run, and `spent_s` of its time was for those that were watched."""
        if self.ids:
            each_s = spent_s / len(self.ids)
            self._search_s += (SMOOTHING if self._search_s else 1.0) * (each_s - self._search_s)
            self.ids = {id: left - 1 for id, left in self.ids.items() if left > 1}
        self._credit_s = min(self._credit_s + SHARE * step_s, SAVED_STEPS * SHARE * step_s) - spent_s
