"""Counts repeated failures: each cause is reported at its first occurrence, and again at the 10th, 100th, 1,000th."""

from __future__ import annotations

from dataclasses import dataclass

MAX_CAUSES = 100
"""Number of causes that are counted separately. All further causes are counted together."""


@dataclass(kw_only=True, slots=True)
class Cause:
    error: str
    """The message of the first occurrence."""
    traceback: str
    count: int = 0


class Repeats:
    """Occurrences of each cause.

    >>> repeats = Repeats()
    >>> [repeats.record("ValueError", f"task {n} raised ValueError", "") for n in range(12)]
    [1, None, None, None, None, None, None, None, None, 10, None, None]
    """

    def __init__(self) -> None:
        self._causes: dict[str, Cause] = {}

    def record(self, cause: str, error: str, traceback: str) -> int | None:
        """Count a failure. Returns the number of occurrences of its cause if they should be reported now."""
        if cause not in self._causes and len(self._causes) >= MAX_CAUSES:
            cause = "others"
        entry = self._causes.setdefault(cause, Cause(error=error, traceback=traceback))
        entry.count += 1
        power = 1
        while power < entry.count:
            power *= 10
        return entry.count if power == entry.count else None

    @property
    def worst(self) -> Cause | None:
        """The most frequent cause."""
        return max(self._causes.values(), key=lambda c: c.count, default=None)
