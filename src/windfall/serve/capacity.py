"""How many responses a lender can take now, by its memory and its slack. Pure: the caller gives the time.

    by memory    the responses that run, and as many more as fit beside them, each with GROWTH times the tokens that the
                 running ones have on average, but at least the share FIRST of the longest possible response
    by compute   rows that a rollout step may have beside the requests of this moment, averaged over about `ROWS_S`

The lower of the two counts, and never more than the engine's own number of slots. The other figures of the report are
averages over about `RECENT_S`: how much memory serving held, and the share of the time that went to the run.
"""

from __future__ import annotations

import math

from windfall.link.messages import Capacity
from windfall.serve.memory_policy import MemoryState

GROWTH, FIRST = 2.0, 0.25
ROWS_S = 1.0
RECENT_S = 60.0


class CapacityMeter:
    def __init__(self, now_s: float, *, slots: int, response_tokens: int) -> None:
        """`response_tokens`: tokens of the longest possible response, prompt included."""
        assert slots >= 1
        self._slots, self._response_tokens = slots, max(1, response_tokens)
        self._rows = float(slots)
        self.use = self.lent = 0.0
        self._began_s = self._observed_s = now_s
        self._stepped_s = 0.0

    def stepped(self, seconds: float) -> None:
        """A rollout step took this long."""
        self._stepped_s += seconds

    def observe(self, now_s: float, *, rows: int, use: float) -> None:
        """`rows`: rows that a rollout step might have now. `use`: share of the memory that serving holds."""
        passed_s = now_s - self._observed_s
        if passed_s <= 0.0:
            return
        first = self._observed_s == self._began_s
        self._observed_s = now_s
        # Until a minute has passed, the averages are over the time that has.
        weight = 1.0 if first else 1.0 - math.exp(-passed_s / min(RECENT_S, now_s - self._began_s))
        self.use += (use - self.use) * weight
        self.lent += (min(1.0, self._stepped_s / passed_s) - self.lent) * weight
        self._stepped_s = 0.0
        self._rows += (min(rows, self._slots) - self._rows) * (1.0 - math.exp(-passed_s / ROWS_S))

    def slots(self, budget_tokens: int, *, running: int = 0, held_tokens: int = 0) -> int:
        """Responses that can run now, if the rollout may hold this many tokens. `running` responses hold some."""
        each = held_tokens / running if running else 0.0
        if held_tokens > budget_tokens:
            by_memory = int(budget_tokens / each) if running else 0
        else:
            more = min(self._response_tokens, max(GROWTH * each, FIRST * self._response_tokens, 1.0))
            by_memory = running + int((budget_tokens - held_tokens) / more)
        return max(0, min(self._slots, by_memory, round(self._rows)))

    def report(self, *, slots: int, state: MemoryState, slack_s: float) -> Capacity:
        """`slots`: as above."""
        return Capacity(
            slots=slots, state=state.value, use=round(float(self.use), 4), lent=round(float(self.lent), 4),
            slack_s=float(slack_s) if math.isfinite(slack_s) else None,  # numpy has floats of its own
        )  # fmt: skip
