"""Failures that repeat: each cause is told when it comes first, and again when it has come 10, 100, 1,000 times."""

from __future__ import annotations

from dataclasses import dataclass

MOST_CAUSES = 100
"""Beyond these, all others count as one."""


@dataclass(kw_only=True, slots=True)
class Cause:
    error: str
    """As it was said first."""
    traceback: str
    count: int = 0


class Repeats:
    """
    >>> repeats = Repeats()
    >>> [repeats.hear("ValueError", f"task {n} raised ValueError", "") for n in range(12)]
    [1, None, None, None, None, None, None, None, None, 10, None, None]
    """

    def __init__(self) -> None:
        self._causes: dict[str, Cause] = {}

    def hear(self, cause: str, error: str, traceback: str) -> int | None:
        """How often it has come, if that is worth telling."""
        if cause not in self._causes and len(self._causes) >= MOST_CAUSES:
            cause = "others"
        found = self._causes.setdefault(cause, Cause(error=error, traceback=traceback))
        found.count += 1
        power = 1
        while power < found.count:
            power *= 10
        return found.count if power == found.count else None

    @property
    def worst(self) -> Cause | None:
        """The cause that has come most often."""
        return max(self._causes.values(), key=lambda c: c.count, default=None)
