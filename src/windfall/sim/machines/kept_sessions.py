"""What a simulated engine has in its cache of sessions whose environment works: tokens, not pages. Pure.

    kept       within the budget; the tokens of the least useful session are given up first (engine/retention.py)
    released   all other tokens of responses that do not run; the least recently used ones are overwritten first

Running responses, kept and released tokens share the KV cache. Prompts that siblings share count for each of them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from itertools import count

from windfall.engine.retention import least_useful


@dataclass(slots=True)
class _Kept:
    tokens: int
    returns_s: float


class KeptSessions:
    def __init__(self, *, share: float, kv_tokens: int) -> None:
        """`kv_tokens`: size of the KV cache; 0: unlimited."""
        self.limit(kv_tokens, share=share)
        self._kept: dict[str, _Kept] = {}
        self._released: OrderedDict[str, int] = OrderedDict()
        """Tokens by session, least recently used first. Ended sessions are under names that are never asked for."""
        self._released_tokens = 0
        self._nameless = count()
        self._dropped: list[str] = []
        self.tokens = 0
        """Tokens of all sessions that are kept."""

    def limit(self, kv_tokens: int, *, share: float) -> None:
        self._size = kv_tokens or math.inf
        self._budget = share * self._size if share else 0.0

    def __len__(self) -> int:
        """Number of sessions that are kept."""
        return len(self._kept)

    def keep(self, session: str, tokens: int, returns_s: float, now_s: float) -> None:
        self.forget(session)
        self._kept[session] = _Kept(tokens, returns_s)
        self.tokens += tokens
        while self.tokens > self._budget:
            self._give_up(math.ceil(self.tokens - self._budget), now_s)

    def take(self, session: str) -> int:
        """Tokens of this session that are in the cache; from now on, a running response has them."""
        kept, released = self._kept.pop(session, None), self._released.pop(session, 0)
        self._released_tokens -= released
        self.tokens -= kept.tokens if kept else 0
        return (kept.tokens if kept else 0) + released

    def forget(self, session: str) -> None:
        """The session has ended."""
        if tokens := self.take(session):
            self.release(tokens)

    def release(self, tokens: int) -> None:
        """A response has ended, and its tokens stay until they are overwritten."""
        if self._size < math.inf:
            self._add_released(f"\0{next(self._nameless)}", tokens)

    def fit(self, context: int, now_s: float) -> None:
        """Overwrite what has no room beside the running responses, which have `context` tokens."""
        while self._released and self._released_tokens > self._size - context - self.tokens:
            session, tokens = self._released.popitem(last=False)
            self._released_tokens -= tokens
            left = min(tokens, int(self._size - context - self.tokens - self._released_tokens))
            if left > 0:
                self._released[session] = left
                self._released.move_to_end(session, last=False)
                self._released_tokens += left
        while self._kept and self.tokens > self._size - context:
            session = self._give_up(math.ceil(self.tokens - max(0.0, self._size - context)), now_s, overwritten=True)
            if session not in self._kept:
                self._dropped.append(session)

    def _give_up(self, excess: int, now_s: float, *, overwritten: bool = False) -> str:
        """Drop `excess` tokens of the least useful session, or all it has if they are fewer. Returns the session."""
        session = least_useful(((s, k.returns_s) for s, k in self._kept.items()), now_s)
        assert session is not None, "nothing is kept"
        kept = self._kept[session]
        tokens = min(excess, kept.tokens)
        kept.tokens -= tokens
        self.tokens -= tokens
        if not kept.tokens:
            del self._kept[session]
        if not overwritten:
            self._add_released(session, tokens)
        return session

    def _add_released(self, session: str, tokens: int) -> None:
        self._released[session] = self._released.pop(session, 0) + tokens
        self._released_tokens += tokens

    def clear(self) -> None:
        self._kept.clear()
        self._released.clear()
        self.tokens = self._released_tokens = 0

    def take_dropped(self) -> tuple[str, ...]:
        dropped, self._dropped = tuple(self._dropped), []
        return dropped
