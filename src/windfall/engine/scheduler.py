"""Decides which tokens run in the next step. Pure: sequences in, rows out; no tensors, no clock.

A sequence is WAITING (no pages) or RUNNING (it has pages, and some or all of its tokens are computed). Each step first
gives rows to the running sequences, oldest first, then admits waiting ones, all within one budget of rows:

- a sequence with one token left to compute decodes: it gets one row, whose logits give the next token;
- a sequence with more tokens left is prefilled in chunks as large as the budget allows; only its last row samples;
- the pages of a session whose environment works are kept within a budget (retention.py), and dropped if a running
  sequence needs them;
- when no page is free, the youngest running sequence is preempted: it returns to the head of the waiting queue and is
  prefilled again later. It keeps its tokens, and sampling depends on (seed, position), so only the timing changes.

Rules (`check()`): a running sequence holds exactly the pages that its computed tokens need, plus those of its rows in
flight; a waiting one holds none; waiting sequences stay in order of arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from windfall.engine.pages import ROOT, Key, Pages, key_of
from windfall.engine.retention import Retention
from windfall.types import Request


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    tokens: list[int]
    generated: int = 0
    computed: int = 0  # the first `computed` tokens have their keys and values in `pages`
    pages: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)  # keys of the full pages that are registered so far

    @property
    def position(self) -> int:
        """Index of the next token within the response."""
        return self.request.position + self.generated


@dataclass(frozen=True, slots=True)
class ScheduledRows:
    """Tokens `start` to `stop` of a sequence run in this step. `samples`: the last one's logits give a new token."""

    sequence: Sequence
    start: int
    stop: int
    samples: bool


class Scheduler:
    def __init__(self, pages: Pages, *, max_running: int, max_rows: int, retention: Retention | None = None) -> None:
        self.pages, self.max_running, self.max_rows = pages, max_running, max_rows
        self.retention = retention if retention is not None else Retention(pages)
        self.running: dict[Sequence, None] = {}  # in order of arrival; a dict, because sequences finish in any order
        self.waiting: deque[Sequence] = deque()
        self.preemptions = self.reused_tokens = self.lookups = self.hits = 0

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence, *, finished: bool = False) -> None:
        """Remove a finished or canceled sequence. Its pages are free at once, unless it is a finished turn that asks to
        keep them."""
        request = sequence.request
        if sequence in self.running:
            del self.running[sequence]
            if finished and request.session and request.keep_s > 0:
                full = len(sequence.keys)
                kept, sequence.pages = sequence.pages[:full], sequence.pages[full:]
                self.retention.keep(request.session, kept, request.keep_s)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)

    def plan(self, most: int | None = None, *, prefill: bool = True) -> list[ScheduledRows]:
        """The rows of the next step, at most `most`, without `prefill` only of sequences that decode. Call `complete`
        with them when they have run."""
        rows: list[ScheduledRows] = []
        left = self.max_rows if most is None else min(most, self.max_rows)
        for sequence in list(self.running):
            decodes = len(sequence.tokens) - sequence.computed == 1
            if sequence in self.running and (prefill or decodes):  # or an older sequence has just preempted it
                left -= self._add_rows(sequence, left, rows, may_preempt=True)
        room = self.max_running if prefill else 0
        while left > 0 and self.waiting and len(self.running) < room and self._admit(self.waiting[0]):
            sequence = self.waiting.popleft()
            self.running[sequence] = None
            count = self._add_rows(sequence, left, rows, may_preempt=False)
            assert count, "a sequence was admitted without room for it"
            left -= count
        return rows

    def complete(self, rows: Iterable[ScheduledRows]) -> None:
        for r in rows:
            r.sequence.computed = r.stop

    def restart_all(self) -> None:
        """Send every running sequence back to the waiting queue, oldest first, because the weights have changed."""
        for sequence in reversed(self.running):
            self._release(sequence)
            self.waiting.appendleft(sequence)
        self.running.clear()
        self.retention.clear()
        self.pages.clear_cache()

    def _admit(self, sequence: Sequence) -> bool:
        """Admit the sequence if its tokens fit. Its first tokens may be in the prefix cache already."""
        size, tokens = self.pages.size, sequence.tokens
        key: Key = ROOT
        for start in range(0, len(tokens) - size, size):  # the last token is always computed: its logits are needed
            key = key_of(key, tokens[start : start + size])
            page = self.pages.find(key)
            if page is None:
                break
            sequence.pages.append(page)
            sequence.keys.append(key)
        sequence.computed = len(sequence.pages) * size
        # Keep one page beyond its tokens and one per running sequence free, so that admission rarely causes preemption.
        need = len(tokens) // size + 1 - len(sequence.pages) + len(self.running)
        if need > self.pages.free and not self._clear_for(sequence, need):
            self._release(sequence)
            return False
        self.reused_tokens += sequence.computed
        self.lookups += 1
        self.hits += sequence.computed > 0
        self.retention.forget(sequence.request.session)
        return True

    def _clear_for(self, sequence: Sequence, need: int) -> bool:
        """Drop kept pages for a waiting sequence, but only if nothing runs: otherwise room comes without that."""
        if self.running:
            return False
        session = sequence.request.session
        if not self.retention.make_room(need, spare=session):
            self.retention.forget(session)  # of no use here: the sequence holds those that it has found
        return need <= self.pages.free

    def _allocate(self, sequence: Sequence, stop: int, *, may_preempt: bool) -> bool:
        """Allocate pages for the sequence's tokens up to `stop`, if necessary by preempting younger sequences. Returns
        False if it must not preempt, or if the sequence itself was the youngest and was preempted."""
        while len(sequence.pages) * self.pages.size < stop:
            page = self.pages.allocate()
            if page is not None:
                sequence.pages.append(page)
                continue
            if self.retention.make_room(1):
                continue
            if not may_preempt:
                return False
            victim, _ = self.running.popitem()
            self._release(victim)
            self.waiting.appendleft(victim)
            self.preemptions += 1
            if victim is sequence:
                return False
        return True

    def _add_rows(self, sequence: Sequence, most: int, rows: list[ScheduledRows], *, may_preempt: bool) -> int:
        """Add at most `most` rows and return their number; 0 if there are no pages. Pages that they fill are registered
        now: a sibling admitted later in the same step may use them, because every layer writes the keys and values of
        all rows before any row reads them."""
        size, stop = self.pages.size, min(len(sequence.tokens), sequence.computed + most)
        if not most or not self._allocate(sequence, stop, may_preempt=may_preempt):
            return 0
        while (len(sequence.keys) + 1) * size <= stop:
            n = len(sequence.keys)
            key = key_of(sequence.keys[-1] if n else ROOT, sequence.tokens[n * size : (n + 1) * size])
            self.pages.register(sequence.pages[n], key)
            sequence.keys.append(key)
        rows.append(ScheduledRows(sequence, sequence.computed, stop, stop == len(sequence.tokens)))
        return stop - sequence.computed

    def _release(self, sequence: Sequence) -> None:
        self.pages.release(sequence.pages)
        sequence.pages, sequence.keys, sequence.computed = [], [], 0

    def check(self) -> None:
        for s in self.running:
            need = -(-s.computed // self.pages.size)
            assert len(s.pages) == need, f"{s.request.id} holds {len(s.pages)} pages for {s.computed} tokens"
            assert s.computed < len(s.tokens), f"{s.request.id} has nothing to compute"
        for s in self.waiting:
            assert not s.pages and s.computed == 0, f"{s.request.id} is waiting but holds pages"
        self.pages.check([*(s.pages for s in self.running), *self.retention.held()])
