"""What the GPU runs next: whose prompts, whose tokens, how many steps of them. Pure: no tensors, no clock.

A sequence WAITS (no slot, no pages) or RUNS. A running one first has its tokens prefilled, in chunks, and then decodes:
it has a row in every burst of steps until all tokens that it may make were asked for. The host asks ahead: `planned`
tokens of a slot will be in the pool when everything asked for has run, and its pages are there for all of them.

- a burst has `burst` steps; one while prompts are waiting for room in the next launch, and fewer where pages run out;
- launches run in the order in which they were asked for, so pages that are free here may be used in the next one, even
  while the device still writes what nobody wants any more;
- when not even one step has pages, what is in flight comes out first, because a response may have ended in it; then the
  youngest running sequence goes back to the head of the waiting line and computes again later;
- pages are named by the tokens they hold: those of a prefill when it is asked for (siblings in the same launch may use
  them: every layer writes all keys and values before it reads any), others when their sequence lets go of them;
- rows that share the pages of their prompt stand side by side, and are families if that is worth it (`splits.py`).

Rules (`check()`): a running sequence holds exactly the pages its planned tokens need; a waiting one holds none; a slot
has one sequence; the words that are to be on the device say which pages it holds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from windfall.engine.cuda.host_state import Words
from windfall.engine.cuda.splits import Sharing
from windfall.engine.pages import ROOT, Key, Pages, key_of
from windfall.types import Request


@dataclass(slots=True, eq=False)
class DeviceSequence:
    request: Request
    tokens: list[int]
    """All that the host knows of: the prompt, and what was made and has come out."""
    made: int = 0
    slot: int = -1
    """-1: it waits."""
    prefilled: int = 0
    """Tokens at the beginning whose keys and values were asked for, or found."""
    pages: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    """Names of full pages of `tokens`, as far as they were needed. They depend on tokens alone."""
    over: bool = False
    """It has ended, or was cancelled: what still comes out of the device is nobody's."""

    def key(self, n: int, size: int) -> Key:
        while len(self.keys) <= n:
            k = len(self.keys)
            parent = self.keys[-1] if k else ROOT
            self.keys.append(key_of(parent, self.tokens[k * size : (k + 1) * size]))
        return self.keys[n]


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """Tokens `start` to `stop` of a sequence are prefilled. `samples`: the last of them gives a new token."""

    sequence: DeviceSequence
    start: int
    stop: int
    samples: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One launch: the parts in one flat batch, then `steps` steps with a row for each of `rows`."""

    parts: list[PrefillPart]
    rows: list[DeviceSequence]
    """Siblings side by side."""
    slots: np.ndarray
    """Of the rows."""
    steps: int
    longest: int
    """The most tokens that one of the rows may come to read by itself: what its family reads is not counted."""
    families: np.ndarray
    """(F, 3): first row, rows, shared tokens of each family."""


class BatchPlanner:
    def __init__(self, pages: Pages, words: Words, *, max_rows: int, burst: int, sharing: Sharing) -> None:
        self.pages, self.words, self.max_rows, self.burst, self.sharing = pages, words, max_rows, burst, sharing
        self.running: dict[DeviceSequence, None] = {}  # in order of arrival
        self.waiting: deque[DeviceSequence] = deque()
        self.preemptions = self.reused_tokens = 0
        self._prefilling: dict[DeviceSequence, None] = {}
        slots = words.slots
        self._free = list(range(slots - 1, -1, -1))
        self._by_slot: list[DeviceSequence | None] = [None] * slots
        self._decoding = np.zeros(slots, bool)
        self._planned, self._most, self._held = (np.zeros(slots, np.int64) for _ in range(3))
        # Full pages of the prompt that siblings may share, and the last of these: siblings have the same.
        self._common, self._kin = np.zeros(slots, np.int64), np.zeros(slots, np.int64)

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    def add(self, sequence: DeviceSequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: DeviceSequence) -> None:
        """It has ended: slot and pages are free at once."""
        sequence.over = True
        if sequence.slot < 0:
            self.waiting.remove(sequence)
        else:
            del self.running[sequence]
            self._let_go(sequence)

    def next(self, *, in_flight: bool) -> Launch | None:
        """What to launch. None: nothing, before something that is in flight has come out."""
        parts, crowded = self._prefill()
        slots, steps = self._burst(1 if crowded else self.burst, may_preempt=not in_flight and not parts)
        if not parts and not steps:
            return None
        rows = [s for n in slots.tolist() if (s := self._by_slot[n])]
        families = self._families(slots)
        alone = self._most[slots]
        for first, count, tokens in families.tolist():
            alone[first : first + count] -= tokens
        longest = int(alone.max()) if steps else 0
        return Launch(parts=parts, rows=rows, slots=slots, steps=steps, longest=longest, families=families)

    def restart_all(self) -> None:
        """Every running sequence computes again from its tokens, oldest first: what the pages hold is of no more use.
        Only while nothing is in flight."""
        for sequence in reversed(list(self.running)):
            self._let_go(sequence, name=False)
            self.waiting.appendleft(sequence)
        self.running.clear()
        self.pages.forget_all()

    def _prefill(self) -> tuple[list[PrefillPart], bool]:
        """Parts within the budget of rows, and whether there are more for the next launch: then that must come soon."""
        left = self.max_rows - int((self._decoding & (self._planned < self._most)).sum())
        parts: list[PrefillPart] = []
        for sequence in list(self._prefilling):
            if left > 0:
                left -= self._part(sequence, left, parts)
        while left > 0 and self.waiting and self._free and self._admit(self.waiting[0]):
            left -= self._part(self.waiting.popleft(), left, parts)
        return parts, left <= 0 and bool(self._prefilling or (self.waiting and self._free))

    def _part(self, s: DeviceSequence, most: int, parts: list[PrefillPart]) -> int:
        start, stop, size = s.prefilled, min(len(s.tokens), s.prefilled + most), self.pages.size
        parts.append(PrefillPart(s, start, stop, stop == len(s.tokens)))
        for n in range(start // size, stop // size):
            self.pages.name(s.pages[n], s.key(n, size))
        s.prefilled = stop
        if stop == len(s.tokens):
            del self._prefilling[s]
            self._decoding[s.slot] = True
        return stop - start

    def _admit(self, s: DeviceSequence) -> bool:
        """Find pages that hold its first tokens already, and see whether the rest fits, and a burst after it."""
        size, have = self.pages.size, len(s.tokens)
        found: list[int] = []
        for n in range((have - 1) // size):  # the last token is always computed: its logits are wanted
            page = self.pages.find(s.key(n, size))
            if page is None:
                break
            found.append(page)
        left = s.request.max_tokens - s.made
        most = have + left - 1  # the last token that is made needs no place
        ahead = -(-min(have + self.burst, most) // size)
        if ahead - len(found) + len(self.running) * -(-self.burst // size) > self.pages.free:
            self.pages.release(found)
            return False
        more = [p for _ in range(len(found), -(-have // size)) if (p := self.pages.take()) is not None]
        s.pages, s.prefilled, s.slot = found + more, len(found) * size, self._free.pop()
        self.reused_tokens += s.prefilled
        self.running[s] = self._prefilling[s] = None
        self._by_slot[s.slot] = s
        self._planned[s.slot], self._most[s.slot], self._held[s.slot] = have, most, len(s.pages)
        # Of a response that was begun elsewhere, the prompt holds what was said of it: `position` tokens.
        shared = max(len(s.request.prompt) - s.request.position - 1, 0) // size
        self._common[s.slot] = shared
        self._kin[s.slot] = s.pages[shared - 1] if shared else self.pages.count + s.slot
        self.words.begin(s.slot, s.request, length=have - 1, left=left, position=s.request.position + s.made)
        self.words.pages(s.slot, 0, s.pages)
        return True

    def _burst(self, most: int, *, may_preempt: bool) -> tuple[np.ndarray, int]:
        """Slots and steps, with the pages for them. No steps: there are no pages, or there is nobody."""
        while True:
            slots = np.flatnonzero(self._decoding & (self._planned < self._most))
            if not len(slots):
                return slots, 0
            planned, end, held = self._planned[slots], self._most[slots], self._held[slots]
            steps = min(most, int((end - planned).max()))
            while steps:
                after = np.minimum(planned + steps, end)
                more = -(-after // self.pages.size) - held
                if more.sum() <= self.pages.free:
                    self._planned[slots] = after
                    self._take(slots[more > 0].tolist(), more[more > 0].tolist())
                    return slots[np.argsort(self._kin[slots], kind="stable")], steps
                steps //= 2
            if not may_preempt:
                return slots[:0], 0
            victim = next(reversed(self.running))
            del self.running[victim]
            self._let_go(victim)
            self.waiting.appendleft(victim)
            self.preemptions += 1

    def _families(self, slots: np.ndarray) -> np.ndarray:
        common = self._common[slots]
        table = self.words.tables(slots, int(common.max(initial=0)))
        return self.sharing.families(self._kin[slots], common, table, self.pages.size)

    def _take(self, slots: list[int], more: list[int]) -> None:
        for slot, count in zip(slots, more, strict=True):
            s = self._by_slot[slot]
            assert s is not None
            first = len(s.pages)
            s.pages += [p for _ in range(count) if (p := self.pages.take()) is not None]
            self._held[slot] = len(s.pages)
            self.words.pages(slot, first, s.pages[first:])

    def _let_go(self, s: DeviceSequence, *, name: bool = True) -> None:
        """Slot and pages. What is known to be in them can be found again; the newest token is in none yet."""
        if name:
            known = min(s.prefilled, len(s.tokens)) if s in self._prefilling else len(s.tokens) - 1
            for n in range(known // self.pages.size):
                self.pages.name(s.pages[n], s.key(n, self.pages.size))
        self.pages.release(s.pages)
        self._prefilling.pop(s, None)
        self._by_slot[s.slot], self._decoding[s.slot] = None, False
        self._free.append(s.slot)
        s.slot, s.pages, s.prefilled = -1, [], 0

    def check(self) -> None:
        size = self.pages.size
        table = self.words.data[self.words.at["table"] :]
        for s in self.running:
            assert self._by_slot[s.slot] is s, f"{s.request.id} is not in its slot"
            assert len(s.pages) == self._held[s.slot] == -(-self._planned[s.slot] // size), f"{s.request.id}: pages"
            assert len(s.tokens) - 1 <= self._planned[s.slot] <= self._most[s.slot], f"{s.request.id}: planned"
            assert (s in self._prefilling) == (not self._decoding[s.slot]), f"{s.request.id} neither prefills nor runs"
            first = s.slot * self.words.pages_each
            assert table[first : first + len(s.pages)].tolist() == s.pages, f"{s.request.id}: the table"
        for s in self.waiting:
            assert s.slot == -1 and not s.pages, f"{s.request.id} waits and holds pages"
        held = [n for n, s in enumerate(self._by_slot) if s]
        assert len(held) == len(self.running) and sorted(held + self._free) == list(range(self.words.slots)), "slots"
        assert self._prefilling.keys() <= self.running.keys(), "somebody prefills and does not run"
        self.pages.check(s.pages for s in self.running)
