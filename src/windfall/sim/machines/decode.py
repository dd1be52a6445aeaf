"""A simulated engine's batch: who is in it, how far each is, and how long the next steps take. Pure; exact in real
tokens, whatever a simulated token stands for.

    made      real tokens of a response so far, those that others made included
    length    at which it ends
    sent      simulated tokens that the controller has been told of: one for every `granule` real ones, and the last
    ahead     by so many tokens, less than a granule, it is told of earlier: responses that began together do not all
              seem to get further at the same moments, and what a worker makes in a short time can be measured

With `kv_tokens`, no more run than have room with all their tokens, each with its own prompt. The others wait in order
of arrival; when it gets too tight, the youngest goes back to the head of that line, and what it has is computed again
when it is let in: as engine/scheduler.py does. One always runs.

A step gives everybody in the batch a token, so only the number of steps is counted: who is how far follows from the
step at which it came, and those that end first stay in front until they have. A step costs nothing here; coming and
going costs the time of a look-up; a frame is made of columns.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from windfall.link.messages import Tokens
from windfall.sim.core.service import Service
from windfall.types import Finish

N = TypeVar("N", int, NDArray[np.int64])
STOP, FILLER = 0, 1
LOGPROB = array("f", [-1.0]).tobytes()
MARKS = 1 << 20
CLOSE_S = 1e-9
"""Times that differ by less are the same."""
HANDLE, MADE, SENT, END, LAST, TAG = range(6)
"""Columns. `made` (with `ahead`) and `end` are counted in steps since the engine's start; `last`: `sent` at the end."""


def simulated(length: int, granule: int) -> int:
    """Tokens that stand for a response: two at least, the first says whose it is and the last may be a stop.

    >>> simulated(1, 8), simulated(16, 8), simulated(17, 8), simulated(3, 1)
    (2, 2, 3, 3)
    """
    return max(2, -(-length // granule))


def marked(tag: N, position: N) -> N:
    """A token that says whose it is, and where it stands: neither a filler nor a stop. Of numbers, or of arrays.

    >>> marked(7, 3) == marked(7, 3) != marked(7, 4)
    True
    """
    return FILLER + 1 + (tag + 7919 * position) % MARKS


@dataclass(slots=True, kw_only=True)
class DecodeRow:
    """A response as it comes to an engine; when it goes, `made` says how far it got."""

    handle: int
    seed: int
    tag: int
    """The response's first token: it says whose this is."""
    prompt: int
    made: int
    length: int
    cut: bool
    """It ends by the limit, not by itself."""
    sent: int
    ahead: int = 0


class Decode:
    def __init__(self, service: Service, granule: int, *, kv_tokens: int = 0, marks: bool = False) -> None:
        """`kv_tokens`: of all responses that run together; 0: as many as there are. `marks`: tokens are told from one
        another, at some cost."""
        self.service, self.granule, self._kv_tokens, self._marks = service, granule, kv_tokens, marks
        self.rows: dict[int, DecodeRow] = {}
        """Those that run, and those that wait."""
        self.waiting: deque[tuple[DecodeRow, int]] = deque()
        """With the tokens to compute when it is let in."""
        self.preemptions = 0
        self.prefill = 0
        """Tokens to compute before the next step."""
        self._steps = 0
        self._came: dict[int, int] = {}
        """Handle to the step at which it came."""
        self._ends: list[tuple[int, int, int]] = []
        """(step at which it ends, tokens behind it less steps, handle), those that end first in front."""
        self._behind = 0
        """Sum of the second."""
        self._columns = np.empty((6, 0), dtype=np.int64)
        self._fresh: list[DecodeRow] = []
        """Not in the columns yet."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def context(self) -> int:
        """Tokens that all who run have behind them."""
        return self._behind + len(self._ends) * self._steps

    def add(self, row: DecodeRow, prefill: int) -> None:
        assert row.handle not in self.rows, f"{row.handle} is here already"
        self.rows[row.handle] = row
        if self._kv_tokens:
            self.waiting.append((row, prefill))
            self._make_room()
        else:
            self._let_in(row, prefill)

    def _let_in(self, row: DecodeRow, prefill: int) -> None:
        self._came[row.handle] = self._steps
        end = self._end(row)
        insort(self._ends, end)
        self._behind += end[1]
        self._fresh.append(row)
        self.prefill += prefill

    def _make_room(self) -> None:
        """Who runs has room for its next token, too."""
        while len(self._ends) > 1 and self.context + len(self._ends) > self._kv_tokens:
            self._fill()
            row = self.rows[int(self._columns[HANDLE, -1])]
            row.sent, self._columns = int(self._columns[SENT, -1]), self._columns[:, :-1]
            self._stop(row)
            self.waiting.appendleft((row, row.prompt + row.made))
            self.preemptions += 1
        while self.waiting:
            row, prefill = self.waiting[0]
            if self._ends and self.context + row.prompt + row.made + len(self._ends) + 1 > self._kv_tokens:
                return
            self.waiting.popleft()
            self._let_in(row, prefill)

    def _end(self, row: DecodeRow) -> tuple[int, int, int]:
        came = self._came[row.handle]
        return came + row.length - row.made, row.prompt + row.made - came, row.handle

    def drop(self, handles: Iterable[int]) -> list[DecodeRow]:
        gone = [self.rows.pop(handle) for handle in handles if handle in self.rows]
        if gone:
            self._fill()
            left = ~np.isin(self._columns[HANDLE], [row.handle for row in gone])
            self._columns = self._columns[:, left]
        for row in gone:
            if row.handle in self._came:
                self._stop(row)
        if self._kv_tokens and gone:
            self.waiting = deque(w for w in self.waiting if w[0].handle in self.rows)
            self._make_room()
        return gone

    def _stop(self, row: DecodeRow) -> None:
        """It runs no more."""
        end = self._end(row)
        del self._ends[bisect_left(self._ends, end)]
        self._behind -= end[1]
        row.made = min(row.length, row.made + self._steps - self._came.pop(row.handle))

    def plan(self, most_s: float) -> int:
        """How many steps to make at once: one, and further, but no longer than `most_s`, while nobody ends."""
        soonest = self._ends[0][0] - self._steps
        return max(1, min(soonest, self.horizon, int(self.service.steps_in(most_s, len(self._ends), self.context))))

    @property
    def horizon(self) -> int:
        """Steps until everybody has ended, or until somebody may have to wait or to be let in."""
        most = self._ends[-1][0] - self._steps
        if self._kv_tokens:
            if len(self._ends) > 1:
                most = min(most, (self._kv_tokens - self.context) // len(self._ends))
            if self.waiting:
                most = min(most, self._ends[0][0] - self._steps)
        return most

    def seconds(self, steps: int) -> float:
        """So many steps from here, in which those that end take no part any more."""
        s, rows, now = self.service, self._ends, self._steps
        longest, pairs = min(steps, rows[-1][0] - now), steps * (steps - 1) / 2
        tokens, context = steps * len(rows), steps * self.context + len(rows) * pairs
        for end, behind, _ in rows:
            left = end - now
            if left >= steps:
                break
            tokens -= steps - left
            context -= (steps - left) * (behind + now) + pairs - left * (left - 1) / 2
        plain_s = s.prefill_s * self.prefill + s.fixed_s * longest + s.each_s * tokens + s.context_s * context
        if not s.over_s:
            return plain_s
        # Rows that end last are those below `over_batch`, whenever that is.
        return plain_s + s.over_s * sum(min(steps, end - now) for end, _, _ in rows[: -int(s.over_batch) or None])

    def done_by(self, elapsed_s: float) -> tuple[int, float]:
        """How many steps are over after so long, up to the horizon, and when the last of them was."""
        most = self.horizon
        guess, s = 1, self.seconds(1)
        for _ in range(4):  # the time of a step changes little from one to the next
            new = min(most, max(1, guess + int((elapsed_s - s) / max(1e-12, s - self._prefill_s) * guess)))
            if new == guess:
                break
            guess, s = new, self.seconds(new)
        while guess < most and (more := self.seconds(guess + 1)) <= elapsed_s + CLOSE_S:
            guess, s = guess + 1, more
        while s > elapsed_s + CLOSE_S:
            guess -= 1
            s = self.seconds(guess) if guess else 0.0
        return guess, s

    @property
    def _prefill_s(self) -> float:
        return self.service.prefill_s * self.prefill

    def advance(self, steps: int) -> None:
        if steps:
            self.prefill = 0
            self._steps += steps

    def _fill(self) -> None:
        if self._fresh:
            more = [
                (r.handle, r.made + r.ahead - (came := self._came[r.handle]), r.sent, came + r.length - r.made,
                 simulated(r.length, self.granule), r.tag)
                for r in self._fresh
            ]  # fmt: skip
            self._columns = np.concatenate([self._columns, np.array(more, dtype=np.int64).T], axis=1)
            self._fresh.clear()

    def frame(self, version: int) -> tuple[Tokens | None, list[DecodeRow]]:
        """What is new for the controller, and who has ended; these are out of the batch."""
        self._fill()
        c, now = self._columns, self._steps
        upto, over = np.minimum((c[MADE] + now) // self.granule, c[LAST] - 1), None
        if self._ends and self._ends[0][0] <= now:
            over = c[END] <= now
            upto = np.where(over, c[LAST], upto)
        new = upto - c[SENT]
        told = np.flatnonzero(new > 0)
        if not len(told):
            if self._kv_tokens:
                self._make_room()
            return None, []
        counts, sent = new[told], c[SENT][told]
        ends = counts.cumsum()
        tokens = np.full(int(ends[-1]), FILLER, dtype=np.uint32)
        if self._marks:
            positions = np.arange(len(tokens)) + np.repeat(sent - (ends - counts), counts)
            tokens[:] = marked(np.repeat(c[TAG][told], counts), positions)
        if not sent.all():
            begin = sent == 0
            tokens[(ends - counts)[begin]] = c[TAG][told][begin]
        handles = c[HANDLE][told].tolist()
        finished: dict[int, Finish] = {}
        ended: list[DecodeRow] = []
        if over is not None:
            for n in np.flatnonzero(over[told]).tolist():
                row = self.rows[handles[n]]
                finished[n] = "length" if row.cut else "stop"
                if not row.cut:
                    tokens[ends[n] - 1] = STOP
                ended.append(row)
                self._stop(self.rows.pop(row.handle))
            self._columns, upto = c[:, ~over], upto[~over]
        self._columns[SENT] = np.maximum(self._columns[SENT], upto)
        if self._kv_tokens:
            self._make_room()
        return Tokens(
            version=version, handles=tuple(handles), positions=tuple(sent.tolist()),
            counts=() if len(tokens) == len(handles) else tuple(counts.tolist()), tokens=tokens.tobytes(),
            logprobs=LOGPROB * len(tokens), finished=finished,
        ), ended  # fmt: skip
