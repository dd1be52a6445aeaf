"""How many tokens to draft: as many as give the most tokens per second, by what was measured. Pure: no clock, no torch.

A response follows a place in another text as long as that is right: a run (drafts.py). Runs are counted while nothing
is drafted, too, so what drafts would give is known before any is computed. A run of n right guesses and the wrong one
after them are n + 1 tokens. With `width` rows of each response in a step, they take ceil((n + 1) / width) steps:

    >>> lengths = DraftLength((1, 2, 4))
    >>> lengths.observe_runs(np.array([6, 0, 0, 2]))
    >>> [round(lengths.tokens_per_step(width), 2) for width in (1, 2, 4)]
    [1.0, 1.4, 1.75]

What a wider step costs is measured: a width whose gain would be large if it cost nothing more is tried for one launch.
The time that it added to a step (`extra`) depends on the batch, and hardly on the contexts, which are read once
whatever the width is. So when a launch has another width than the one before, the difference of their times is that of
the widths; otherwise, contexts have grown. It grows with the batch: what was measured for a larger batch is an upper
limit for a smaller one, which then needs no trial.

Rules:
- a width above 1 is used only if it promises at least MIN_GAIN more tokens per second than width 1;
- a width is tried only if it would gain MIN_TRIAL_GAIN at the cost of the next smaller width that was tried, and not
  again for RETRY launches: a trial that fails costs about as much as a few steps. Then its cost is measured anew;
- width 1 is measured again and again, so that a gain is never just noise or an old measurement: after 2, 4, 8, ...
  launches of a width that was tried, later after PROBE launches;
- a launch counts only if it is measured (`launched`): one with a prefill is not, and neither is one that got another
  width. A width is tried, and width 1 measured again, only in a launch that is measured after one of the same batch:
  otherwise the cost would be paid, and not known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

WIDTHS = (1, 2, 4, 8)
"""Rows that a response may have in a step: its newest token, and tokens that were drafted."""
MIN_GAIN = 1.02
MIN_TRIAL_GAIN = 1.06
RETRY = 1000
PROBE = 64
MEMORY = 4000
"""Tokens of runs that count, roughly: earlier ones have less and less weight."""
MIN_TOKENS = 100
"""Tokens of runs that must have been counted before anything is drafted."""
SMOOTHING = 0.1
"""Weight of a new measurement of the time of a step, if there are several."""


class DraftLength:
    def __init__(self, widths: Sequence[int]) -> None:
        """`widths`: rows that a response may have in a step, in ascending order; the first is 1."""
        self._widths = tuple(widths)
        self._counted = np.zeros(0, np.int64)
        self._runs = np.zeros(0)
        self._tokens = 0.0  # of these runs
        self._tokens_per_step: dict[int, float] = {}  # by width: computed from them when needed
        self._step_s: dict[int, float] = {}  # by batch: time of a step of width 1
        self._extra_s: dict[tuple[int, int], float] = {}  # by batch and width: what it adds
        self._measured: dict[tuple[int, int], int] = {}  # by batch and width: how often that was measured
        self._used: dict[tuple[int, int], int] = {}  # by batch and width: the number of its last launch
        self._observed = (0, 0)  # batch and width of the last launch that was measured
        self._launches = 0
        self._last_batch = 0  # of the last launch that is or will be measured

    def observe_runs(self, counted: np.ndarray) -> None:
        """How often runs had 0, 1, 2, ... right guesses since the start. The last entry has all longer ones, too. The
        numbers may wrap around."""
        if not len(self._runs):
            self._counted, self._runs = np.zeros_like(counted), np.zeros(len(counted))
        new = counted - self._counted
        if not new.any():
            return
        self._counted = counted.copy()
        self._runs = self._runs * max(0.0, 1 - _tokens(new) / MEMORY) + new
        self._tokens = _tokens(self._runs)
        self._tokens_per_step = {}

    def observe_step(self, batch: int, width: int, step_s: float) -> float:
        """How long a step took. Returns how long it would have taken without drafts: as before, and never longer."""
        key = batch, width
        before, self._observed = self._observed, key
        changed = before[0] == batch and before[1] != width
        base, extra = self._step_s.get(batch), self._extra_s.get(key)
        if width > 1 and changed and base is not None:
            measured = self._measured[key] = 1 if extra is None else self._measured[key] + 1
            new, known = max(0.0, step_s - base), extra or 0.0
            self._extra_s[key] = known + max(SMOOTHING, 1 / measured) * (new - known)
        elif width == 1:
            self._step_s[batch] = step_s if base is None or changed else base + SMOOTHING * (step_s - base)
        elif base is not None and extra is not None:
            self._step_s[batch] = base + SMOOTHING * (step_s - extra - base)
        return step_s if width == 1 or base is None else min(base, step_s)

    def tokens_per_step(self, width: int) -> float:
        """Tokens that a response would get from a step."""
        if width not in self._tokens_per_step:
            length = np.arange(1, len(self._runs) + 1)
            steps = float((self._runs * -(-length // width)).sum())
            self._tokens_per_step[width] = self._tokens / steps if steps else 1.0
        return self._tokens_per_step[width]

    def choose(self, batch: int, widest: int, *, measured: bool = True) -> int:
        """The width of the next launch, at most `widest`. `measured`: whether its time will be measured."""
        may_try = measured and self._last_batch == batch
        width = self._best(batch, widest, may_try)
        if may_try and self._age(batch, 1) > min(PROBE, 2 ** self._measured.get((batch, width), 1)):
            return 1
        return width

    def launched(self, batch: int, width: int) -> None:
        """A launch has this width, and `observe_step` will tell its time."""
        self._launches += 1
        if self._age(batch, width) >= RETRY:
            self._extra_s.pop((batch, width), None)
        self._used[batch, width] = self._launches
        self._last_batch = batch

    def _best(self, batch: int, widest: int, may_try: bool) -> int:
        base = self._step_s.get(batch)
        if base is None or self._tokens < MIN_TOKENS:
            return 1
        best, best_rate, smaller_extra = 1, MIN_GAIN, 0.0
        for width in self._widths[1:]:
            if width > widest:
                break
            tokens, due = self.tokens_per_step(width), self._age(batch, width) >= RETRY
            measured = [b for b, w in self._extra_s if w == width and b >= batch + due]  # due: its own is too old
            most = self._extra_s[min(measured), width] if measured else math.inf
            if tokens * base / (base + most) > best_rate:
                best, best_rate = width, tokens * base / (base + most)
            elif batch not in measured and tokens * base / (base + smaller_extra) > max(MIN_TRIAL_GAIN, best_rate):
                return width if due and may_try else best  # not due: its trial was launched, but not measured yet
            if batch in measured:
                smaller_extra = most
        return best

    def _age(self, batch: int, width: int) -> int:
        """Launches since this width was used."""
        return self._launches - self._used.get((batch, width), -RETRY)


def _tokens(runs: np.ndarray) -> float:
    """Tokens of all runs together: a run of n right guesses ends with one more token."""
    return float((runs * np.arange(1, len(runs) + 1)).sum())
