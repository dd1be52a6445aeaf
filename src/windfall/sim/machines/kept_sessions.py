"""What a simulated engine keeps of sessions whose environment works: tokens, not pages. Pure.

With a budget, the session whose next turn is predicted last is dropped first, by the rule of engine/retention.py.
Without one, a session stays in the prefix cache until the engine has computed as many other tokens as were free: the
least recently used tokens are overwritten first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from windfall.engine.retention import least_useful


@dataclass(slots=True)
class _Session:
    tokens: int
    returns_s: float
    computed: int
    """Tokens that the engine had computed when the turn ended."""


class KeptSessions:
    def __init__(self, *, share: float, kv_tokens: int) -> None:
        """`kv_tokens`: size of the KV cache; 0: unlimited."""
        self._share, self._size = share, kv_tokens or math.inf
        self._kept: dict[str, _Session] = {}
        self._dropped: list[str] = []
        self.tokens = 0
        """Tokens of all sessions that are kept."""
        self.computed = 0
        """Tokens that the engine has computed so far, in prefill and decode."""

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, session: str, tokens: int, returns_s: float) -> None:
        self.take(session, 0)
        self._kept[session] = _Session(tokens, returns_s, self.computed)
        self.tokens += tokens

    def take(self, session: str, context: int) -> int:
        """Tokens of this session that are still there; from now on, nothing is kept for it. `context`: tokens of the
        running responses."""
        kept = self._kept.pop(session, None)
        if kept is None:
            return 0
        self.tokens -= kept.tokens
        overwritten = not self._share and self.computed - kept.computed > self._size - context
        return 0 if overwritten else kept.tokens

    def fit(self, context: int, now_s: float) -> None:
        """Drop sessions until the others fit into the budget, and beside the running responses."""
        if not self._share:
            return
        room = min(self._share * self._size, self._size - context)
        while self.tokens > room and self._kept:
            session = least_useful(((s, k.returns_s) for s, k in self._kept.items()), now_s)
            assert session is not None
            self.tokens -= self._kept.pop(session).tokens
            self._dropped.append(session)

    def clear(self) -> None:
        self._kept.clear()
        self.tokens = 0

    def take_dropped(self) -> tuple[str, ...]:
        dropped, self._dropped = tuple(self._dropped), []
        return dropped
