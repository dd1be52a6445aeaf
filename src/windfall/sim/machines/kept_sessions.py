"""What a simulated engine has in its cache of sessions whose environment works: tokens, not pages. Pure.

Within the budget, sessions are kept by the rule of engine/retention.py. What does not fit into the budget stays in the
prefix cache until the engine has computed as many other tokens as were free: the least recently used tokens are
overwritten first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from windfall.engine.retention import least_useful


@dataclass(slots=True)
class _Session:
    tokens: int
    returns_s: float
    released: int | None = None
    """Tokens that the engine had computed when the session was no longer kept; None: it is kept."""


class KeptSessions:
    def __init__(self, *, share: float, kv_tokens: int) -> None:
        """`kv_tokens`: size of the KV cache; 0: unlimited."""
        self._size = kv_tokens or math.inf
        self._budget = share * self._size if share else 0.0
        self._sessions: dict[str, _Session] = {}
        self._kept: dict[str, _Session] = {}
        self._dropped: list[str] = []
        self.tokens = 0
        """Tokens of all sessions that are kept."""
        self.computed = 0
        """Tokens that the engine has computed so far, in prefill and decode."""

    def __len__(self) -> int:
        """Number of sessions that are kept."""
        return len(self._kept)

    def keep(self, session: str, tokens: int, returns_s: float, context: int, now_s: float) -> None:
        """`context`: tokens of the running responses."""
        self.forget(session)
        self._sessions[session] = self._kept[session] = _Session(tokens, returns_s)
        self.tokens += tokens
        while self.tokens > self._budget:
            self._release(now_s)
        self.fit(context, now_s)

    def take(self, session: str, context: int) -> int:
        """Tokens of this session that are in the cache; from now on, nothing is kept for it."""
        found = self._sessions.get(session)
        free = self._size - context - self.tokens
        self.forget(session)
        if found is None or (found.released is not None and self.computed - found.released > free):
            return 0
        return found.tokens

    def forget(self, session: str) -> None:
        self._sessions.pop(session, None)
        if (kept := self._kept.pop(session, None)) is not None:
            self.tokens -= kept.tokens

    def fit(self, context: int, now_s: float) -> None:
        """Drop sessions that have no room beside the running responses."""
        while self._kept and self.tokens > self._size - context:
            session = self._release(now_s)
            del self._sessions[session]
            self._dropped.append(session)

    def _release(self, now_s: float) -> str:
        session = least_useful(((s, k.returns_s) for s, k in self._kept.items()), now_s)
        assert session is not None, "nothing is kept"
        kept = self._kept.pop(session)
        kept.released = self.computed
        self.tokens -= kept.tokens
        return session

    def clear(self) -> None:
        self._sessions.clear()
        self._kept.clear()
        self.tokens = 0

    def take_dropped(self) -> tuple[str, ...]:
        dropped, self._dropped = tuple(self._dropped), []
        return dropped
