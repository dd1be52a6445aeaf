"""Which tokens run in the next step. Pure: sequences in, rows out; no tensors, no clock.

A sequence is WAITING (no pages) or RUNNING (pages, some or all of its tokens computed). Each step gives rows to the
running ones first, oldest first, then lets waiting ones in, all within one budget of rows:

- a sequence with one token left to compute decodes: one row, and the row's logits give the next token;
- a sequence with more prefills in chunks, as many rows as the budget leaves; only its last row gives a token;
- when no page is left, the youngest running sequence goes back to the head of the waiting line and computes again later
  (its tokens are kept; sampling depends on (seed, position), so nothing changes but the time).

Rules (`check()`): a running sequence holds exactly the pages its computed tokens need, plus those of its rows in
flight; a waiting one holds none; order of arrival is kept among waiting ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from windfall.engine.pages import ROOT, Key, Pages, key_of
from windfall.types import Request


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    tokens: list[int]
    made: int = 0
    computed: int = 0
    """The first `computed` tokens have their keys and values in `pages`."""
    pages: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    """Keys of the full pages that have been named so far."""

    @property
    def position(self) -> int:
        """Index within the response of the next token to make."""
        return self.request.position + self.made


@dataclass(frozen=True, slots=True)
class ScheduledRows:
    """Tokens `start` to `stop` of a sequence run in this step. `samples`: the last of them gives a new token."""

    sequence: Sequence
    start: int
    stop: int
    samples: bool


class Scheduler:
    def __init__(self, pages: Pages, *, max_running: int, max_rows: int) -> None:
        self.pages, self.max_running, self.max_rows = pages, max_running, max_rows
        self.running: dict[Sequence, None] = {}  # in order of arrival; a dict, because many leave from the middle
        self.waiting: deque[Sequence] = deque()
        self.preemptions = self.reused_tokens = 0

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """The sequence has ended: its pages are free at once."""
        if sequence in self.running:
            del self.running[sequence]
            self._drop_pages(sequence)
        else:
            self.waiting.remove(sequence)

    def plan(self) -> list[ScheduledRows]:
        """The rows of the next step. Call `done` with them when they have run."""
        rows: list[ScheduledRows] = []
        left = self.max_rows
        for sequence in list(self.running):
            if left == 0:
                break
            if sequence not in self.running:  # preempted by an older one a moment ago
                continue
            stop = min(len(sequence.tokens), sequence.computed + left)
            if self._room(sequence, stop, may_preempt=True):
                rows.append(self._rows(sequence, stop))
                left -= stop - sequence.computed
        while left > 0 and self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                break
            self.waiting.popleft()
            self.running[sequence] = None
            stop = min(len(sequence.tokens), sequence.computed + left)
            room = self._room(sequence, stop, may_preempt=False)
            assert room, "a sequence was let in without room for it"
            rows.append(self._rows(sequence, stop))
            left -= stop - sequence.computed
        return rows

    def done(self, rows: Iterable[ScheduledRows]) -> None:
        for r in rows:
            r.sequence.computed = r.stop

    def restart_all(self) -> None:
        """Every running sequence computes again from its tokens, oldest first: the weights have changed."""
        for sequence in reversed(self.running):
            self._drop_pages(sequence)
            self.waiting.appendleft(sequence)
        self.running.clear()
        self.pages.forget_all()

    def _admit(self, sequence: Sequence) -> bool:
        """Find pages that hold the sequence's first tokens already, and see whether the rest fits."""
        size, tokens = self.pages.size, sequence.tokens
        key: Key = ROOT
        for start in range(0, len(tokens) - size, size):  # the last token is always computed: its logits are wanted
            key = key_of(key, tokens[start : start + size])
            page = self.pages.find(key)
            if page is None:
                break
            sequence.pages.append(page)
            sequence.keys.append(key)
        sequence.computed = len(sequence.pages) * size
        # One page beyond its tokens, and one for every running sequence, so that admitting rarely forces a preemption.
        need = len(tokens) // size + 1 - len(sequence.pages) + (len(self.running) if self.running else 0)
        if need > self.pages.free:
            self._drop_pages(sequence)
            return False
        self.reused_tokens += sequence.computed
        return True

    def _room(self, sequence: Sequence, stop: int, *, may_preempt: bool) -> bool:
        """Give the sequence pages for its tokens up to `stop`, if need be those of younger ones. False: it was itself
        the youngest."""
        while len(sequence.pages) * self.pages.size < stop:
            page = self.pages.take()
            if page is not None:
                sequence.pages.append(page)
                continue
            if not may_preempt:
                return False
            victim, _ = self.running.popitem()
            self._drop_pages(victim)
            self.waiting.appendleft(victim)
            self.preemptions += 1
            if victim is sequence:
                return False
        return True

    def _rows(self, sequence: Sequence, stop: int) -> ScheduledRows:
        """Pages that these rows fill are named now: a sibling that is let in later in the same step may use them,
        because every layer writes the keys and values of all rows before any row reads them."""
        size = self.pages.size
        while (len(sequence.keys) + 1) * size <= stop:
            n = len(sequence.keys)
            key = key_of(sequence.keys[-1] if n else ROOT, sequence.tokens[n * size : (n + 1) * size])
            self.pages.name(sequence.pages[n], key)
            sequence.keys.append(key)
        return ScheduledRows(sequence, sequence.computed, stop, stop == len(sequence.tokens))

    def _drop_pages(self, sequence: Sequence) -> None:
        self.pages.release(sequence.pages)
        sequence.pages, sequence.keys, sequence.computed = [], [], 0

    def check(self) -> None:
        for s in self.running:
            need = -(-s.computed // self.pages.size)
            assert len(s.pages) == need, f"{s.request.id} holds {len(s.pages)} pages for {s.computed} tokens"
            assert s.computed < len(s.tokens), f"{s.request.id} has nothing to compute"
        for s in self.waiting:
            assert not s.pages and s.computed == 0, f"{s.request.id} waits and holds pages"
        self.pages.check(s.pages for s in self.running)
