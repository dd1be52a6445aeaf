"""Finds the stop string that ends a turn, while the turn is being generated and once more when it is complete. Pure.

A turn ends with the first token after which its text contains a stop string. This token follows from the tokens alone,
not from when they arrived: a response that is read from the journal ends at the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

TOKENS_PER_CHARACTER = 4
"""Most tokens that one character can take: a token has at least one byte of it."""


class StopStrings:
    """Looks only at new tokens, and at those before them that may hold the start of a stop string.

    >>> stops = StopStrings(["cd"], lambda ids: "".join(map(chr, ids)))
    >>> stops.end("7/0", [ord(c) for c in "abc"], 0), stops.end("7/0", [ord(c) for c in "abcdef"], 0)
    (None, 4)
    """

    def __init__(self, texts: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._texts, self._decode = tuple(texts), decode
        self._window = TOKENS_PER_CHARACTER * max(map(len, self._texts), default=0) + 8
        """Tokens that may have a part of a stop string."""
        self._seen: dict[str, int] = {}
        """By response: number of tokens that were looked at."""

    def __bool__(self) -> bool:
        return bool(self._texts)

    def end(self, id: str, tokens: Sequence[int], start: int, *, whole: bool = False) -> int | None:
        """The length of the response at which its current turn ends, or None if it goes on. `start`: position of the
        first token of the turn. `whole`: look at the whole turn again."""
        if not self._texts:
            return None
        seen = start if whole else min(max(start, self._seen.get(id, 0)), len(tokens))
        self._seen[id] = len(tokens)
        if not self._found(tokens[max(start, seen - self._window) :]):
            return None
        ends = range(seen + 1, len(tokens) + 1)
        return next((n for n in ends if self._found(tokens[max(start, n - self._window) : n])), None)

    def forget(self, id: str) -> None:
        self._seen.pop(id, None)

    def _found(self, tokens: Sequence[int]) -> bool:
        text = self._decode(tokens)
        return any(stop in text for stop in self._texts)
