"""Decides which evicted sequences keep their keys and values in host memory, and plans the copies. Pure.

    eviction:  pages ──▶ chunks of host memory        admission:  the chunks ──▶ other pages

An evicted sequence is prefilled again, or its keys and values are copied to host memory and back: whichever is expected
to take less time. The speed of a prefill is learned from the launches, that of a copy from the copies. The first copy
is a try, and another one is tried after a few evictions without: one slow copy does not rule out all others.

Rules (`check()`):
- copies run on the stream of the launches, in the order in which they were planned and before the next launch. So pages
  and chunks can be used again as soon as they are free here;
- a chunk is free, or has the pages of one waiting sequence;
- all chunks together take at most MAX_SHARE of the host memory that would be free without them;
- new weights make every copy invalid (`clear`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from windfall.step_time import LearnedStepTime

if TYPE_CHECKING:
    from windfall.engine.scheduler import Launch
    from windfall.engine.scheduler import Sequence as SequenceState

CHUNK_BYTES = 16 << 20
"""Upper limit for the bytes of a chunk, unless a page is larger. A larger copy would hardly be faster, and the device
needs this much memory to gather the pages."""
MAX_SHARE = 0.1
"""Several workers of one machine may need as much, and the trainer the rest."""
NEWEST = 0.25
"""Weight of the newest copy in the measured speed."""
FADE = 0.95
"""Factor for the expected time of a copy after an eviction without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageCopy:
    """A copy of pages to places `first`, `first + 1`, ... of a chunk (`save`), or back from there."""

    save: bool
    chunk: int
    first: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Saved:
    tokens: int
    chunks: list[int]


class SavedKV:
    def __init__(self, *, page_size: int, page_bytes: int, max_rows: int, free_bytes: Callable[[], int]) -> None:
        """`max_rows`: of a launch. `free_bytes`: tells how much host memory this process can still allocate."""
        self._size = page_size
        self._page_bytes = page_bytes
        self._max_rows = max_rows
        self._free_bytes = free_bytes
        self.chunk_pages = max(1, CHUNK_BYTES // page_bytes)
        self._saved: dict[SequenceState, _Saved] = {}
        self._free: list[int] = []
        self._chunks = 0
        self._copies: list[PageCopy] = []
        self._step_time = LearnedStepTime()  # of the prefill alone
        self._decode_s = 0.0  # seconds of the newest decode step that was measured
        self._byte_s = 0.0  # seconds to copy a byte; 0: nothing was copied yet

    def evict(self, sequence: SequenceState, tokens: int, shared: int) -> None:
        """A running sequence is about to lose its pages, with the keys and values of its first `tokens` tokens. Others
        hold the first `shared` pages, too: these are expected to be found again, in the prefix cache."""
        pages = -(-tokens // self._size)
        copied = (2 * pages - shared) * self._page_bytes
        if not self.is_cheaper(copied, self._prefill_s(shared * self._size, tokens)):
            self._byte_s *= FADE
            return
        chunks = self._allocate(-(-pages // self.chunk_pages))
        if chunks:
            self._saved[sequence] = _Saved(tokens, chunks)
            self._plan(True, chunks, sequence.pages, 0, pages)

    def restore(self, sequence: SequenceState, found: int) -> int:
        """A waiting sequence got its pages; the first `found` were in the prefix cache. Returns the number of its first
        tokens whose keys and values will be in the pages; 0: it was not saved."""
        saved = self._saved.get(sequence)
        if saved is None:
            return 0
        self._plan(False, saved.chunks, sequence.pages, found, -(-saved.tokens // self._size))
        self.drop(sequence)
        return saved.tokens

    def drop(self, sequence: SequenceState) -> None:
        """Forget a sequence, if it was saved."""
        saved = self._saved.pop(sequence, None)
        self._free += saved.chunks if saved is not None else []

    def clear(self) -> None:
        """Forget all sequences."""
        for sequence in list(self._saved):
            self.drop(sequence)

    def release(self) -> None:
        """Forget all sequences and chunks, because the host memory is freed."""
        self._saved.clear()
        self._free, self._chunks = [], 0

    def take_copies(self) -> list[PageCopy]:
        """The copies to run before the next launch, in this order."""
        out, self._copies = self._copies, []
        return out

    def is_cheaper(self, copied_bytes: int, prefill_s: float) -> bool:
        """Whether these copies are expected to take less time than this prefill."""
        return copied_bytes * self._byte_s < prefill_s

    def observe_copy(self, copied_bytes: int, seconds: float) -> None:
        byte_s = seconds / copied_bytes
        self._byte_s += (byte_s - self._byte_s) * (NEWEST if self._byte_s else 1.0)

    def observe_launch(self, work: Launch, device_s: float) -> None:
        if work.prefill:
            rows, context = sum(p.stop - p.start for p in work.prefill), sum(p.stop for p in work.prefill)
            self._step_time.observe(device_s - work.steps * self._decode_s, rows, context, prefill=True)
        else:
            self._decode_s = device_s / work.steps

    def _prefill_s(self, start: int, stop: int) -> float:
        """Expected time to prefill tokens `start` to `stop` of a sequence; 0 if nothing is known."""
        ends = ((n, min(n + self._max_rows, stop)) for n in range(start, stop, self._max_rows))
        return sum(self._step_time.predict_s(end - begin, end, prefill=True) for begin, end in ends)

    def _allocate(self, count: int) -> list[int]:
        """Chunks, or none if there is not enough room."""
        chunk_bytes = self.chunk_pages * self._page_bytes
        more, held = max(0, count - len(self._free)), self._chunks
        if more and (held + more) * chunk_bytes > MAX_SHARE * (self._free_bytes() + held * chunk_bytes):
            return []
        self._free += range(held, held + more)
        self._chunks += more
        return [self._free.pop() for _ in range(count)]

    def _plan(self, save: bool, chunks: Sequence[int], pages: Sequence[int], start: int, stop: int) -> None:
        """Copy pages `start` to `stop` of a sequence, of which every chunk has `chunk_pages`."""
        for n, chunk in enumerate(chunks):
            begin = n * self.chunk_pages
            first, last = max(start, begin), min(stop, begin + self.chunk_pages)
            if first < last:
                self._copies.append(PageCopy(save=save, chunk=chunk, first=first - begin, pages=pages[first:last]))

    def check(self, waiting: Sequence[SequenceState]) -> None:
        """Raise AssertionError unless the rules above hold."""
        assert self._saved.keys() <= set(waiting), "a sequence that does not wait is saved"
        used = [chunk for saved in self._saved.values() for chunk in saved.chunks]
        assert sorted(used + self._free) == list(range(self._chunks)), "a chunk is lost, or free and used"
