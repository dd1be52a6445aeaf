"""Decides what runs next: which prompts, which rows, how many decode steps. Pure: no tensors, no clock.

A sequence is WAITING (no slot, no pages) or RUNNING. A running one is first prefilled, in chunks, and then decodes: it
has a row in every burst of steps until all tokens that it may generate have been launched. The host plans ahead:
at most `_planned` tokens of a slot will be in the KV cache when all launches have run, and it has pages for all of
them. How many there will be is known when a launch is collected, because drafted tokens may be wrong.

- a burst has `burst` steps, and fewer if pages run out. While prompts wait for room in a launch, only one launch of
  `prefills_per_decode` has a decode step, and only one: a step takes as long for few responses as for many;
- with `one_batch`, prefill and decode are one forward pass: a launch has one step, a prefilled sequence decodes in the
  next launch, and nothing is in flight when a launch is planned. Otherwise the prefill comes before the burst;
- launches run in order, so the next launch may use pages that the host has freed, even if the device still writes
  discarded tokens to them;
- when there are no pages for even one step, the launches in flight are collected first, because a response may have
  ended in them; then the youngest running sequence is evicted: it returns to the head of the waiting queue. Later it is
  prefilled again, or its keys and values come back from host memory (saved_kv.py) and it decodes at once. It keeps its
  tokens, and sampling depends on (seed, position), so only the timing changes;
- pages are registered by the tokens they hold. Those of a prefill are registered when it is planned: siblings in the
  same launch may use them, because every layer writes all keys and values before it reads any. Other pages are
  registered when their sequence releases them;
- rows that share the pages of their prompt are adjacent, and form prefix groups where that pays off (cuda/splits.py).

Rules (`check()`): a running sequence holds the pages that its planned tokens need; a waiting one holds none; a slot
has one sequence; the host state has the pages of every slot.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from windfall.engine.base import Counters
from windfall.engine.pages import ROOT, Key, Pages, key_of
from windfall.types import Request

if TYPE_CHECKING:
    from windfall.engine.cuda.host_state import HostState
    from windfall.engine.cuda.splits import PrefixSharing
    from windfall.engine.saved_kv import SavedKV

NO_GROUPS = np.zeros((0, 3), np.int32)


def widest(max_rows: int, decoding: int) -> int:
    """Upper limit for the rows of a sequence in a step: drafts leave half of a launch's rows to prompts."""
    return max(1, max_rows // (2 * max(1, decoding)))


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    tokens: list[int]  # all tokens known to the host: the prompt, and the generated tokens that were collected
    generated: int = 0
    slot: int = -1  # -1: the sequence is waiting
    prefilled: int = 0  # number of leading tokens whose keys and values were launched, found in the cache, or restored
    pages: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)  # keys of full pages, computed from `tokens` when needed
    root: Key = ROOT  # what the key of the first page starts from: responses with other weights share no pages
    adapter: int = -1  # the adapter that its rows use; -1: none
    experts_sent: int = 0  # number of leading tokens whose chosen experts the caller has, in a model with experts
    finished: bool = False  # the response has ended or was canceled: further tokens from the device are discarded

    @property
    def position(self) -> int:
        """Index of the next token within the response."""
        return self.request.position + self.generated

    def key(self, n: int, size: int) -> Key:
        while len(self.keys) <= n:
            k = len(self.keys)
            parent = self.keys[-1] if k else self.root
            self.keys.append(key_of(parent, self.tokens[k * size : (k + 1) * size]))
        return self.keys[n]


@dataclass(frozen=True, slots=True)
class ScheduledRows:
    """Tokens `start` to `stop` of a sequence run in a launch. `samples`: the logits of the last known token give a new
    one, and those of every drafted token the one after it."""

    sequence: Sequence
    start: int
    stop: int
    samples: bool
    drafts: tuple[int, ...] = ()  # the last tokens, which are expected but not known

    @property
    def tokens(self) -> list[int]:
        return [*self.sequence.tokens[self.start : self.stop], *self.drafts]

    @property
    def sampling(self) -> range:
        """Indices of the tokens whose logits give a token."""
        return range(self.stop - 1 - len(self.drafts), self.stop) if self.samples else range(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One launch: a prefill of all chunks in one flat batch, then `steps` decode steps."""

    prefill: list[ScheduledRows]
    rows: list[Sequence]  # The decoding sequences. Siblings are adjacent.
    slots: np.ndarray  # the slots of `rows`
    steps: int
    width: int  # rows of every sequence in a step: its newest token, and drafted tokens
    longest: int  # upper limit for the tokens that a row reads by itself, without the shared prefix of its group
    prefix_groups: np.ndarray  # (G, 3): first row, number of rows and shared tokens of each group
    shape: tuple[int, int, bool]  # rows of a step, prefill included; tokens that they attend to; whether it prefills


class Scheduler:
    def __init__(
        self,
        pages: Pages,
        *,
        slots: int,
        max_rows: int,
        burst: int = 1,
        one_batch: bool = False,
        host_state: HostState | None = None,
        sharing: PrefixSharing | None = None,
    ) -> None:
        """`slots`: sequences that run at once, at most `max_rows`. `host_state`: gets the pages and parameters of every
        slot. `sharing`: which rows form prefix groups; None: none do."""
        self.pages = pages
        self.host_state = host_state
        self.sharing = sharing
        self.slots = slots
        self.max_rows = max_rows
        self.burst = burst
        self._one_batch = one_batch
        self.saved: SavedKV | None = None
        """The evicted sequences that are in host memory; None: none are."""
        self.single_step_with_prefill = False
        """A launch with a prefill has one decode step: its tokens come sooner, and its time is that of one step."""
        self.prefills_per_decode = 8
        self._prefills_alone = 0
        self.running: dict[Sequence, None] = {}  # in order of arrival; a dict, because sequences finish in any order
        self.waiting: deque[Sequence] = deque()
        self.counters = Counters()
        self._roots: dict[str, Key] = {}  # by policy, if its weights were swapped alone
        self._restarts = 0
        self._prefilling: dict[Sequence, None] = {}
        self._free = list(range(slots - 1, -1, -1))
        self._by_slot: list[Sequence | None] = [None] * slots
        self._decoding = np.zeros(slots, bool)
        self._planned = np.zeros(slots, np.int64)
        self._end = np.zeros(slots, np.int64)
        self._page_count = np.zeros(slots, np.int64)
        # Number of full pages of the prompt, and the last of these pages. Siblings have the same values.
        self._prompt_pages = np.zeros(slots, np.int64)
        self._prefix_id = np.zeros(slots, np.int64)

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    def add(self, sequence: Sequence) -> None:
        sequence.root = self._roots.get(sequence.request.policy, ROOT)
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished or canceled sequence. Its slot and pages are free at once."""
        sequence.finished = True
        if sequence.slot < 0:
            self.waiting.remove(sequence)
            if self.saved is not None:
                self.saved.drop(sequence)
        else:
            del self.running[sequence]
            self._release(sequence)

    def next(
        self,
        *,
        in_flight: bool = False,
        most_rows: int | None = None,
        most_steps: int | None = None,
        may_prefill: bool = True,
        width: int = 1,
    ) -> Launch | None:
        """The next launch; None if a launch in flight must be collected first, or if there is no work. `most_rows`:
        upper limit for the rows of a step and of the prefill together; if fewer than decode, the oldest do. `width`:
        rows of every sequence in a step; only one if the pages for more are missing."""
        room = self.max_rows if most_rows is None else min(most_rows, self.max_rows)
        prefill: list[ScheduledRows] = []
        if self._one_batch:
            slots, steps, width = self._plan_burst(1, width, may_evict=True, most_rows=most_rows)
            if may_prefill:
                prefill, _ = self._plan_prefill(room - len(slots) * width)
        else:
            crowded = False
            if may_prefill:
                prefill, crowded = self._plan_prefill(room - self.decoding * width)
            steps = self.burst if most_steps is None else min(self.burst, most_steps)
            if crowded or (prefill and self.single_step_with_prefill):
                steps = 1
            alone = crowded and bool(prefill) and self._prefills_alone + 1 < self.prefills_per_decode
            self._prefills_alone = self._prefills_alone + 1 if alone else 0
            may_evict = not in_flight and not prefill
            if alone:
                slots, steps = np.zeros(0, np.int64), 0
            else:
                slots, steps, width = self._plan_burst(steps, width, may_evict=may_evict, most_rows=most_rows)
        if not prefill and not steps:
            return None
        rows = [s for n in slots.tolist() if (s := self._by_slot[n])]
        prefix_groups = self._prefix_groups(slots)
        own = self._end[slots]
        for first, count, tokens in prefix_groups.tolist():
            own[first : first + count] -= tokens
        longest = int(own.max()) if steps else 0
        count = len(slots) * width + sum(p.stop - p.start for p in prefill)
        context = int(self._planned[slots].sum()) + sum(p.stop for p in prefill)
        return Launch(
            prefill=prefill,
            rows=rows,
            slots=slots,
            steps=steps,
            width=width,
            longest=longest,
            prefix_groups=prefix_groups,
            shape=(count, context, bool(prefill)),
        )

    def collected(self, launch: Launch, counts: np.ndarray) -> None:
        """The launch has run and has given this number of tokens to each of its rows: fewer than planned if drafts were
        wrong. Responses that have ended meanwhile have no slot any more."""
        running = np.array([s.slot == slot for s, slot in zip(launch.rows, launch.slots.tolist(), strict=True)], bool)
        self._planned[launch.slots[running]] -= launch.steps * launch.width - counts[running]

    def restart_all(self) -> None:
        """Send every running sequence back to the waiting queue, oldest first, because its pages are no longer valid.
        Call this only while nothing is in flight."""
        for sequence in reversed(list(self.running)):
            self._release(sequence, register=False)
            self.waiting.appendleft(sequence)
        self.running.clear()
        self.pages.clear_cache()
        if self.saved is not None:
            self.saved.clear()

    def restart(self, policy: str) -> None:
        """As `restart_all` for the sequences of one policy, whose weights are no longer the same. Others go on. The
        prefix cache keeps its pages: those of the old weights are never found again, and are evicted in time."""
        self._restarts += 1
        root = self._roots[policy] = key_of(ROOT, [self._restarts])
        for sequence in reversed([s for s in self.running if s.request.policy == policy]):
            self._release(sequence, register=False)
            del self.running[sequence]
            self.waiting.appendleft(sequence)
        for sequence in self.waiting:
            if sequence.request.policy == policy:
                sequence.root, sequence.keys = root, []
                if self.saved is not None:
                    self.saved.drop(sequence)

    @property
    def prefilling(self) -> int:
        """Running sequences that are being prefilled."""
        return len(self._prefilling)

    @property
    def can_prefill(self) -> bool:
        """Whether the next launch should prefill. Otherwise it may do so, too, if pages of a cached prefix help."""
        if self._prefilling or not (self.waiting and self._free):
            return bool(self._prefilling)
        have = len(self.waiting[0].tokens) + self.burst
        return -(-have // self.pages.size) + self._burst_pages <= self.pages.free

    @property
    def _burst_pages(self) -> int:
        """Pages for a burst of every running sequence: kept free, so that admission rarely causes an eviction."""
        return len(self.running) * -(-self.burst // self.pages.size)

    @property
    def decoding(self) -> int:
        """Running sequences that may generate more tokens than were launched."""
        return int((self._decoding & (self._planned < self._end)).sum())

    @property
    def widest(self) -> int:
        return widest(self.max_rows, self.decoding)

    @property
    def prefill_rows(self) -> int:
        """Rows that are still to be prefilled."""
        return sum(len(s.tokens) - s.prefilled for s in [*self._prefilling, *self.waiting])

    def _plan_prefill(self, left: int) -> tuple[list[ScheduledRows], bool]:
        """Chunks of at most `left` rows, and whether more are waiting: then the next launch should come soon."""
        prefill: list[ScheduledRows] = []
        for sequence in list(self._prefilling):
            if left > 0:
                left -= self._add_chunk(sequence, left, prefill)
        while left > 0 and self.waiting and self._free and self._admit(self.waiting[0]):
            s = self.waiting.popleft()
            left -= self._add_chunk(s, left, prefill) if s in self._prefilling else 1
        return prefill, left <= 0 and bool(self._prefilling or (self.waiting and self._free))

    def _add_chunk(self, s: Sequence, most: int, prefill: list[ScheduledRows]) -> int:
        start, stop, size = s.prefilled, min(len(s.tokens), s.prefilled + most), self.pages.size
        prefill.append(ScheduledRows(s, start, stop, stop == len(s.tokens)))
        for n in range(start // size, stop // size):
            self.pages.register(s.pages[n], s.key(n, size))
        s.prefilled = stop
        if stop == len(s.tokens):
            del self._prefilling[s]
            self._decoding[s.slot] = True
        return stop - start

    def _admit(self, s: Sequence) -> bool:
        """Admit the sequence if its tokens and one burst fit. Its first tokens may be in the prefix cache or in host
        memory: if only the newest token is missing, it decodes at once."""
        size, have = self.pages.size, len(s.tokens)
        cached: list[int] = []
        for n in range((have - 1) // size):  # the last token is always computed, because its logits are needed
            page = self.pages.find(s.key(n, size))
            if page is None:
                break
            cached.append(page)
        left = s.request.max_tokens - s.generated
        end = have + left - 1  # the last generated token needs no KV
        ahead = -(-min(have + self.burst, end) // size)
        if ahead - len(cached) + self._burst_pages > self.pages.free:
            self.pages.release(cached)
            return False
        s.pages = cached + self._allocate(-(-have // size) - len(cached))
        found = len(cached) * size
        saved = 0 if self.saved is None else self.saved.restore(s, len(cached))
        s.prefilled = max(found, saved)
        for n in range(len(cached), s.prefilled // size):
            self.pages.register(s.pages[n], s.key(n, size))
        s.slot = self._free.pop()
        self.counters.reused_tokens += found
        self.counters.kv_restored += s.prefilled - found
        self.counters.lookups += 1
        self.counters.hits += found > 0
        self.running[s] = None
        if saved == have - 1 > 0:
            self._decoding[s.slot] = True
        else:
            self._prefilling[s] = None
        self._by_slot[s.slot] = s
        self._planned[s.slot] = have - int(self._decoding[s.slot])
        self._end[s.slot] = end
        self._page_count[s.slot] = len(s.pages)
        # If a response was started elsewhere, its prompt includes the `position` tokens generated there.
        shared = max(len(s.request.prompt) - s.request.position - 1, 0) // size
        self._prompt_pages[s.slot] = shared
        self._prefix_id[s.slot] = s.pages[shared - 1] if shared else self.pages.count + s.slot
        if self.host_state is not None:
            self.host_state.assign(s.slot, s.request, s.tokens, left=left, position=s.position, adapter=s.adapter)
            self.host_state.set_pages(s.slot, 0, s.pages)
        return True

    def _allocate(self, count: int) -> list[int]:
        """Pages, after a check that there are enough."""
        return [p for _ in range(count) if (p := self.pages.allocate()) is not None]

    def _plan_burst(
        self, most: int, width: int, *, may_evict: bool, most_rows: int | None
    ) -> tuple[np.ndarray, int, int]:
        """Slots, number of steps and rows of every slot, after allocating the pages for them. 0 steps: there are no
        pages or no rows. Nothing is evicted for the sake of drafts."""
        while True:
            slots = np.flatnonzero(self._decoding & (self._planned < self._end))
            if not len(slots):
                return slots, 0, width
            if most_rows is not None and len(slots) * width > most_rows:
                width = 1
                able = set(slots.tolist())
                slots = np.array([s.slot for s in self.running if s.slot in able][:most_rows], np.int64)
            planned, end, held = self._planned[slots], self._end[slots], self._page_count[slots]
            steps = min(most, -(-int((end - planned).max()) // width))
            while steps:
                after = planned + steps * width
                more = np.maximum(-(-np.minimum(after, end) // self.pages.size) - held, 0)
                if int(more.sum()) <= self.pages.free:
                    self._planned[slots] = after
                    self._extend(slots[more > 0].tolist(), more[more > 0].tolist())
                    return slots[np.argsort(self._prefix_id[slots], kind="stable")], steps, width
                steps //= 2
            if width > 1:
                width = 1
                continue
            if not may_evict:
                return slots[:0], 0, width
            self._evict(next(reversed(self.running)))

    def _evict(self, s: Sequence) -> None:
        if self.saved is not None:
            shared = sum(1 for _ in takewhile(self.pages.is_shared, s.pages))
            self.saved.evict(s, self._computed(s), shared)
        del self.running[s]
        self._release(s)
        self.waiting.appendleft(s)
        self.counters.evictions += 1

    def _computed(self, s: Sequence) -> int:
        """Number of known tokens of a running sequence whose keys and values are in its pages, or will be when all
        launches have run. The newest token is in no page yet."""
        return min(s.prefilled, len(s.tokens)) if s in self._prefilling else len(s.tokens) - 1

    def _prefix_groups(self, slots: np.ndarray) -> np.ndarray:
        if self.sharing is None or self.host_state is None:
            return NO_GROUPS
        prompt_pages = self._prompt_pages[slots]
        table = self.host_state.page_tables(slots, int(prompt_pages.max(initial=0)))
        return self.sharing.find_groups(self._prefix_id[slots], prompt_pages, table, self.pages.size)

    def _extend(self, slots: list[int], more: list[int]) -> None:
        for slot, count in zip(slots, more, strict=True):
            s = self._by_slot[slot]
            assert s is not None
            new = self._allocate(count)
            if self.host_state is not None:
                self.host_state.set_pages(slot, len(s.pages), new)
            s.pages += new
            self._page_count[slot] = len(s.pages)

    def _release(self, s: Sequence, *, register: bool = True) -> None:
        """Free slot and pages. `register`: leave full pages in the prefix cache."""
        if register:
            for n in range(self._computed(s) // self.pages.size):
                self.pages.register(s.pages[n], s.key(n, self.pages.size))
        self.pages.release(s.pages)
        self._prefilling.pop(s, None)
        self._by_slot[s.slot] = None
        self._decoding[s.slot] = False
        self._free.append(s.slot)
        s.slot = -1
        s.pages = []
        s.prefilled = 0

    def check(self) -> None:
        size = self.pages.size
        for s in self.running:
            assert self._by_slot[s.slot] is s, f"{s.request.id} is not in its slot"
            planned = self._planned[s.slot]
            pages = -(-min(planned, self._end[s.slot]) // size)
            assert len(s.pages) == self._page_count[s.slot] >= pages, f"{s.request.id} has a wrong number of pages"
            assert len(s.tokens) - 1 <= planned, f"{s.request.id}: wrong plan"
            assert (s in self._prefilling) == (not self._decoding[s.slot]), f"{s.request.id} must prefill or decode"
            if self.host_state is not None:
                table = self.host_state.page_tables(np.array([s.slot]), len(s.pages))[0]
                assert table.tolist() == s.pages, f"{s.request.id}: page table differs"
        for s in self.waiting:
            assert s.slot == -1 and not s.pages, f"{s.request.id} is waiting but holds pages"
        used = [n for n, s in enumerate(self._by_slot) if s]
        assert len(used) == len(self.running), "slots and running sequences disagree"
        assert sorted(used + self._free) == list(range(self.slots)), "a slot is lost, or free and used"
        assert self._prefilling.keys() <= self.running.keys(), "a sequence prefills but is not running"
        self.pages.check([s.pages for s in self.running])
        if self.saved is not None:
            self.saved.check(self.waiting)
