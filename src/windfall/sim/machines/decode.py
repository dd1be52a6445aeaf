"""The batch of a simulated engine: which responses are in it, their progress, and how long the next steps take. Pure.
It counts real tokens exactly, for any granule.

    generated  real tokens of a response so far, including those that other workers generated
    length     real tokens at which it ends
    sent       simulated tokens reported to the controller: one per `granule` real tokens, and one at the end
    base       simulated tokens of earlier turns and observations; all of the above counts from there
    early      real tokens, less than a granule, by which its reports are early. Without this, responses that started
               together would all report at the same moments, and short intervals could not be measured.

With `kv_tokens`, a response runs only if all its tokens fit in the KV cache; prompts are not shared. The others wait in
order of arrival. When the cache is full, the youngest response returns to the head of the queue, and its tokens are
prefilled again when it is admitted, as in engine/scheduler.py. At least one response always runs.

A step adds a token to every response in the batch, so only the number of steps is counted. The progress of a response
follows from the step at which it was admitted, and rows are sorted by the step at which they end. So a step takes no
computation here, adding or removing a row takes one look-up, and a frame is built from columns.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from windfall.link.messages import Tokens
from windfall.sim.machines.acceptance import DraftAcceptance
from windfall.step_time import StepTime
from windfall.types import Finish

STOP, FILLER = 0, 1
OBSERVED = (1 << 32) - 2
"""The token that all observations consist of."""
LOGPROB = array("f", [-1.0]).tobytes()
CLOSE_S = 1e-9
"""Times that differ by less than this are treated as equal."""
HANDLE, GENERATED, SENT, END, LAST, ID_TOKEN, BASE = range(7)
"""Columns. GENERATED (including `early`) and END count steps since the engine started. LAST is the final `sent`."""


def simulated(length: int, granule: int) -> int:
    """Simulated tokens of a response. At least two: the first identifies the response, the last may be a stop token.

    >>> simulated(1, 8), simulated(16, 8), simulated(17, 8), simulated(3, 1)
    (2, 2, 3, 3)
    """
    return max(2, -(-length // granule))


@dataclass(slots=True, kw_only=True)
class DecodeRow:
    """A response as it is handed to an engine. `generated` is updated when the row is removed."""

    handle: int
    seed: int
    id_token: int
    """The first token, which identifies the response."""
    prompt: int
    """Real tokens of the prompt."""
    generated: int
    length: int
    cut: bool
    """It ends at the length limit, not with a stop token."""
    sent: int
    early: int = 0
    base: int = 0
    last: int = 0
    """Simulated tokens of the whole turn; 0: as many as follow from its length."""
    group: int = 0
    policy: str = ""


class Decode:
    def __init__(
        self, service: StepTime, granule: int, *, kv_tokens: int = 0, acceptance: DraftAcceptance | None = None
    ) -> None:
        """`kv_tokens`: size of the KV cache in real tokens; 0: unlimited. `acceptance`: of drafts; None: none are
        computed."""
        self.service = service
        """Times of the next tokens."""
        self._plain, self._acceptance = service, acceptance
        self.granule = granule
        self.kv_tokens = kv_tokens
        self.rows: dict[int, DecodeRow] = {}
        """Running and waiting responses by handle."""
        self.waiting: deque[tuple[DecodeRow, int]] = deque()
        """Waiting responses, each with the tokens to prefill when it is admitted."""
        self.preemptions = 0
        self.prefill = 0
        """Tokens to prefill before the next step."""
        self._steps = 0
        self._admitted: dict[int, int] = {}
        """Step at which each running response was admitted, by handle."""
        self._ends: list[tuple[int, int, int]] = []
        """(step at which it ends, its context minus the step count, handle) of each running response, sorted."""
        self._context_base = 0
        """Sum of the second entries of `_ends`."""
        self._columns = np.empty((7, 0), dtype=np.int64)
        self._new_rows: list[DecodeRow] = []
        """Rows that are not in the columns yet."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def context(self) -> int:
        """Context tokens of all running responses together."""
        return self._context_base + len(self._ends) * self._steps

    def prefill_again(self, policy: str) -> None:
        """New weights of this policy: before the next step, the context of its running responses is prefilled."""
        rows = (self.rows[handle] for handle in self._admitted)
        more = sum(self._end(row)[1] + self._steps for row in rows if row.policy == policy)
        self.prefill = min(self.context, self.prefill + more)

    def add(self, row: DecodeRow, prefill: int) -> None:
        assert row.handle not in self.rows, f"handle {row.handle} is already in the batch"
        self.rows[row.handle] = row
        if self.kv_tokens:
            self.waiting.append((row, prefill))
            self._fit_cache()
        else:
            self._admit(row, prefill)

    def _admit(self, row: DecodeRow, prefill: int) -> None:
        self._admitted[row.handle] = self._steps
        end = self._end(row)
        insort(self._ends, end)
        self._context_base += end[1]
        self._new_rows.append(row)
        self.prefill += prefill

    def _fit_cache(self) -> None:
        """Preempt or admit responses, so that every running response has room for its next token."""
        while len(self._ends) > 1 and self.context + len(self._ends) > self.kv_tokens:
            self._fill_columns()
            row = self.rows[int(self._columns[HANDLE, -1])]
            row.sent, self._columns = int(self._columns[SENT, -1]), self._columns[:, :-1]
            self._stop(row)
            self.waiting.appendleft((row, row.prompt + row.generated))
            self.preemptions += 1
        while self.waiting:
            row, prefill = self.waiting[0]
            if self._ends and self.context + row.prompt + row.generated + len(self._ends) + 1 > self.kv_tokens:
                return
            self.waiting.popleft()
            self._admit(row, prefill)

    def _end(self, row: DecodeRow) -> tuple[int, int, int]:
        admitted = self._admitted[row.handle]
        return admitted + row.length - row.generated, row.prompt + row.generated - admitted, row.handle

    def speculate(self) -> None:
        """Choose, between two steps, how the next tokens are computed."""
        if self._acceptance is not None:
            groups = [self.rows[handle].group for handle in self._admitted]
            self.service = self._acceptance.service(self._plain, groups, self.context)

    def drop(self, handles: Iterable[int]) -> list[DecodeRow]:
        dropped = [self.rows.pop(handle) for handle in handles if handle in self.rows]
        if dropped:
            self._fill_columns()
            left = ~np.isin(self._columns[HANDLE], [row.handle for row in dropped])
            self._columns = self._columns[:, left]
        for row in dropped:
            if row.handle in self._admitted:
                self._stop(row)
        if self.kv_tokens and dropped:
            self.waiting = deque(w for w in self.waiting if w[0].handle in self.rows)
            self._fit_cache()
        return dropped

    def _stop(self, row: DecodeRow) -> None:
        """Remove the row from the running ones and update its progress."""
        end = self._end(row)
        del self._ends[bisect_left(self._ends, end)]
        self._context_base -= end[1]
        row.generated = min(row.length, row.generated + self._steps - self._admitted.pop(row.handle))

    def plan(self, most_s: float) -> int:
        """Number of steps to take at once: at least one, more while no response ends and `most_s` is not exceeded."""
        soonest = self._ends[0][0] - self._steps
        return max(1, min(soonest, self.horizon, int(self.service.steps_in(most_s, len(self._ends), self.context))))

    @property
    def horizon(self) -> int:
        """Steps until all responses have ended, or until one may have to be preempted or admitted."""
        most = self._ends[-1][0] - self._steps
        if self.kv_tokens:
            if len(self._ends) > 1:
                most = min(most, (self.kv_tokens - self.context) // len(self._ends))
            if self.waiting:
                most = min(most, self._ends[0][0] - self._steps)
        return most

    def seconds(self, steps: int) -> float:
        """Seconds of the next `steps` steps. A response that ends takes no part in later steps."""
        s, rows, now = self.service, self._ends, self._steps
        longest, pairs = min(steps, rows[-1][0] - now), steps * (steps - 1) / 2
        tokens, context = steps * len(rows), steps * self.context + len(rows) * pairs
        extra = max(0, len(rows) - int(s.over_batch))  # those that end last never count as extra ones
        over = steps * extra
        for n, (end, base, _) in enumerate(rows):
            left = end - now
            if left >= steps:
                break
            tokens -= steps - left
            over -= (steps - left) * (n < extra)
            context -= (steps - left) * (base + now) + pairs - left * (left - 1) / 2
        batch_s = s.each_s * tokens + s.over_s * over + s.context_s * context
        return s.prefill_s * self.prefill + s.fixed_s * longest + batch_s

    def done_by(self, elapsed_s: float) -> tuple[int, float]:
        """Number of steps completed after `elapsed_s`, up to the horizon, and when the last of them ended."""
        most, prefill_s = self.horizon, self.service.prefill_s * self.prefill
        guess, s = 1, self.seconds(1)
        for _ in range(4):  # converges fast, because step times change little
            new = min(most, max(1, guess + int((elapsed_s - s) / max(1e-12, s - prefill_s) * guess)))
            if new == guess:
                break
            guess, s = new, self.seconds(new)
        while guess < most and (more := self.seconds(guess + 1)) <= elapsed_s + CLOSE_S:
            guess, s = guess + 1, more
        while s > elapsed_s + CLOSE_S:
            guess -= 1
            s = self.seconds(guess) if guess else 0.0
        return guess, s

    def advance(self, steps: int) -> None:
        if steps:
            self.prefill = 0
            self._steps += steps

    def _fill_columns(self) -> None:
        if self._new_rows:
            more = [
                (r.handle, r.generated + r.early - (admitted := self._admitted[r.handle]), r.sent,
                 admitted + r.length - r.generated, r.last or simulated(r.length, self.granule), r.id_token, r.base)
                for r in self._new_rows
            ]  # fmt: skip
            self._columns = np.concatenate([self._columns, np.array(more, dtype=np.int64).T], axis=1)
            self._new_rows.clear()

    def frame(self, versions: Mapping[str, int]) -> tuple[Tokens | None, list[DecodeRow]]:
        """The tokens that are new for the controller, and the responses that ended and left the batch. `versions`: of
        the weights, by policy."""
        self._fill_columns()
        c, now = self._columns, self._steps
        upto, over = np.minimum((c[GENERATED] + now) // self.granule, c[LAST] - 1), None
        if self._ends and self._ends[0][0] <= now:
            over = c[END] <= now
            upto = np.where(over, c[LAST], upto)
        new = upto - c[SENT]
        rows = np.flatnonzero(new > 0)
        if not len(rows):
            if self.kv_tokens:
                self._fit_cache()
            return None, []
        counts, sent = new[rows], c[SENT][rows] + c[BASE][rows]
        ends = counts.cumsum()
        tokens = np.full(int(ends[-1]), FILLER, dtype=np.uint32)
        if not sent.all():
            begin = sent == 0
            tokens[(ends - counts)[begin]] = c[ID_TOKEN][rows][begin]
        handles = c[HANDLE][rows].tolist()
        policies = dict.fromkeys(self.rows[handle].policy for handle in handles) if any(versions) else ()
        finished: dict[int, Finish] = {}
        ended: list[DecodeRow] = []
        if over is not None:
            for n in np.flatnonzero(over[rows]).tolist():
                row = self.rows[handles[n]]
                finished[n] = "length" if row.cut else "stop"
                if not row.cut:
                    tokens[ends[n] - 1] = STOP
                ended.append(row)
                self._stop(self.rows.pop(row.handle))
            self._columns, upto = c[:, ~over], upto[~over]
        self._columns[SENT] = np.maximum(self._columns[SENT], upto)
        if self.kv_tokens:
            self._fit_cache()
        return Tokens(
            version=0 if policies else versions.get("", -1), versions={p: versions[p] for p in policies},
            handles=tuple(handles), positions=tuple(sent.tolist()),
            counts=() if len(tokens) == len(handles) else tuple(counts.tolist()), tokens=tokens.tobytes(),
            logprobs=LOGPROB * len(tokens), finished=finished,
        ), ended  # fmt: skip
