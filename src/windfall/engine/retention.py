"""Which sessions keep their pages of the KV cache while their environment works. Pure: the caller gives the clock.

    a turn ends ──▶ keep(session, pages)   the pages stay held although no sequence runs
    next turn   ──▶ it finds the pages by their tokens, like any prefix; then forget(session)
    no room     ──▶ make_room(pages)       drops the least useful sessions

A kept page saves the prefill of one page of tokens, so all pages are worth the same; a page that is needed sooner is
worth more, because it occupies memory for a shorter time. The least useful session is therefore the one whose next turn
is predicted to come last. A session that is overdue is expected to take as long again as it is overdue. The pages of a
dropped session are not lost at once: they stay in the prefix cache until they are overwritten.

Rules:
- Kept sessions never hold more than `share` of all pages. Pages that several sessions share count once.
- Kept pages are dropped before a running sequence is evicted, and whenever nothing else can run.
- A kept page changes no token: it has the contents that prefill would write again. After a swap of the weights,
  `clear` drops all of them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from windfall.engine.pages import Pages

MAX_REPORTED = 4096
"""Number of dropped sessions that are remembered until they are reported."""


def least_useful(sessions: Iterable[tuple[str, float]], now_s: float) -> str | None:
    """The session to drop first, given when the next turn of each is predicted; None if there are none.

    >>> least_useful([("soon", 12.0), ("late", 30.0)], now_s=10.0)
    'late'
    >>> least_useful([("soon", 12.0), ("overdue by 9 s", 1.0)], now_s=10.0)
    'overdue by 9 s'
    """
    return max(sessions, key=lambda s: abs(s[1] - now_s), default=("", 0.0))[0] or None


@dataclass(slots=True)
class _Kept:
    pages: list[int]
    returns_s: float
    """When the next turn is predicted (the caller's clock, seconds)."""


class Retention:
    def __init__(self, pages: Pages, *, share: float = 0.0, clock: Callable[[], float] = lambda: 0.0) -> None:
        self._pages = pages
        self._clock = clock
        self._most = int(share * pages.capacity)
        self._kept: dict[str, _Kept] = {}
        self._holders: Counter[int] = Counter()
        """By page: number of kept sessions that hold it."""
        self._dropped: deque[str] = deque(maxlen=MAX_REPORTED)

    def __len__(self) -> int:
        """Number of sessions that keep pages."""
        return len(self._kept)

    @property
    def page_count(self) -> int:
        return len(self._holders)

    def held(self) -> list[list[int]]:
        """The pages of every kept session, for `Pages.check`."""
        return [kept.pages for kept in self._kept.values()]

    def keep(self, session: str, pages: Sequence[int], keep_s: float) -> None:
        """Keep full pages that the caller holds and gives up. The next turn is predicted to come after `keep_s`."""
        self.forget(session)
        if not pages or not self._most:
            self._pages.release(pages)
            return
        self._kept[session] = _Kept(list(pages), self._clock() + keep_s)
        self._holders.update(pages)
        self._drop_until(lambda: len(self._holders) <= self._most)

    def forget(self, session: str) -> None:
        """The session has ended, or its next turn holds the pages itself."""
        kept = self._kept.pop(session, None)
        if kept is not None:
            for page in kept.pages:
                self._holders[page] -= 1
                if not self._holders[page]:
                    del self._holders[page]
            self._pages.release(kept.pages)

    def make_room(self, need: int) -> bool:
        """Drop kept sessions until `need` pages are free. False if that is not possible."""
        if self._pages.free >= need:
            return True
        before = list(self._kept)
        enough = self._drop_until(lambda: self._pages.free >= need)
        self._dropped.extend(session for session in before if session not in self._kept)
        return enough

    def evict(self, pages: frozenset[int]) -> None:
        """Drop the sessions that hold one of these pages: another owner takes their memory."""
        for session in [name for name, kept in self._kept.items() if not pages.isdisjoint(kept.pages)]:
            self.forget(session)
            self._dropped.append(session)

    def clear(self) -> None:
        """Drop everything, because the contents are no longer valid. Nothing is reported."""
        for session in list(self._kept):
            self.forget(session)

    def take_dropped(self) -> tuple[str, ...]:
        """Sessions that lost their pages to others since the last call. Another thread may call this. Sessions that
        only exceed the budget are not reported: most of their pages are still in the prefix cache."""
        return tuple(self._dropped.popleft() for _ in range(len(self._dropped)))

    def _drop_until(self, enough: Callable[[], bool]) -> bool:
        """Drop the least useful session until there is enough room. False if there are no more."""
        while not enough():
            session = least_useful(((s, k.returns_s) for s, k in self._kept.items()), self._clock())
            if session is None:
                return False
            self.forget(session)
        return True
