"""A simulated engine's batch: who is in it, how far each is, and how long the next steps take. Pure; exact in real
tokens, whatever a simulated token stands for.

    made      real tokens of a response so far, those that others made included
    length    at which it ends
    sent      simulated tokens that the controller has been told of: one for every `granule` real ones, and the last
    ahead     by so many tokens, less than a granule, it is told of earlier: responses that began together do not all
              seem to get further at the same moments, and what a worker makes in a short time can be measured
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from windfall.link.messages import Tokens
from windfall.sim.service import Service
from windfall.types import Finish

STOP, FILLER = 0, 1
LOGPROB = -1.0
CLOSE_S = 1e-9
"""Times that differ by less are the same."""


def simulated(length: int, granule: int) -> int:
    """Tokens that stand for a response: two at least, the first says whose it is and the last may be a stop.

    >>> simulated(1, 8), simulated(16, 8), simulated(17, 8), simulated(3, 1)
    (2, 2, 3, 3)
    """
    return max(2, -(-length // granule))


@dataclass(slots=True, kw_only=True)
class Row:
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
    def __init__(self, service: Service, granule: int) -> None:
        self.service, self.granule = service, granule
        self.rows: dict[int, Row] = {}
        self.prefill = 0
        """Tokens to compute before the next step."""
        self._order: list[tuple[int, int]] | None = None
        """None: somebody came, went or got further since."""
        self._context = 0

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, row: Row, prefill: int) -> None:
        self.rows[row.handle] = row
        self._order = None
        self.prefill += prefill

    def drop(self, handles: Iterable[int]) -> list[Row]:
        self._order = None
        return [row for handle in handles if (row := self.rows.pop(handle, None)) is not None]

    def plan(self, most_s: float) -> int:
        """How many steps to make at once: one, and further, but no longer than `most_s`, while nobody ends."""
        soonest = self._sorted()[0][0]
        return max(1, min(soonest, int(self.service.steps_in(most_s, len(self.rows), self._context))))

    @property
    def longest(self) -> int:
        """Steps until everybody has ended."""
        return self._sorted()[-1][0]

    def seconds(self, steps: int) -> float:
        """So many steps from here, in which those that end take no part any more."""
        s, rows = self.service, self._sorted()
        longest, pairs = min(steps, rows[-1][0]), steps * (steps - 1) / 2
        tokens, context = steps * len(rows), steps * self._context + len(rows) * pairs
        for left, behind in rows:
            if left >= steps:
                break
            tokens -= steps - left
            context -= (steps - left) * behind + pairs - left * (left - 1) / 2
        return s.prefill_s * self.prefill + s.fixed_s * longest + s.each_s * tokens + s.context_s * context

    def _sorted(self) -> list[tuple[int, int]]:
        """(steps until it ends, tokens behind it) of every response, those that end first in front."""
        if self._order is None:
            self._order = sorted((row.length - row.made, row.prompt + row.made) for row in self.rows.values())
            self._context = sum(behind for _, behind in self._order)
        return self._order

    def done_by(self, elapsed_s: float) -> tuple[int, float]:
        """How many steps are over after so long, and when the last of them was."""
        most = self.longest
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
        if not steps:
            return
        self.prefill, self._order = 0, None
        for row in self.rows.values():
            row.made = min(row.length, row.made + steps)

    def frame(self, version: int) -> tuple[Tokens | None, list[Row]]:
        """What is new for the controller, and who has ended; these are out of the batch."""
        g = self.granule
        handles, positions, counts = [], [], []
        finished: dict[int, Finish] = {}
        tokens = array("I")
        ended = []
        for row in self.rows.values():
            over = row.made >= row.length
            whole = simulated(row.length, g)
            upto = whole if over else min(whole - 1, (row.made + row.ahead) // g)
            new = upto - row.sent
            if new <= 0:
                continue
            if over:
                finished[len(handles)] = "length" if row.cut else "stop"
                ended.append(row)
            handles.append(row.handle)
            positions.append(row.sent)
            counts.append(new)
            tokens.extend([FILLER] * new)
            if row.sent == 0:
                tokens[-new] = row.tag
            if over and not row.cut:
                tokens[-1] = STOP
            row.sent = upto
        self.drop([row.handle for row in ended])
        if not handles:
            return None, ended
        single = len(tokens) == len(handles)
        return Tokens(
            version=version, handles=tuple(handles), positions=tuple(positions),
            counts=() if single else tuple(counts), tokens=tokens.tobytes(),
            logprobs=array("f", [LOGPROB] * len(tokens)).tobytes(), finished=finished,
        ), ended  # fmt: skip
