"""One error type for everything a person can put right: what happened, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class WindfallError(Exception):
    """Shown without a traceback. `fix` is a sentence that says what to do."""

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        super().__init__("\n".join(p for p in (f"{where}: {what}" if where else what, fix) if p))


def nearest(word: str, known: Iterable[str]) -> str:
    """`Did you mean 'x'?`, or the list of what is known when nothing is near.

    >>> nearest("temprature", ["temperature", "top_p"])
    "Did you mean 'temperature'?"
    """
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"Did you mean '{close[0]}'?"
    return f"Known: {', '.join(names)}." if names else ""
