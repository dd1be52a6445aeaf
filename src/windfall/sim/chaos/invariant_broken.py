"""The error that a broken invariant raises."""

from __future__ import annotations


class InvariantBroken(AssertionError):
    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant
