"""Faults drawn from a seed, their injection into a simulated run, and the invariants that must hold nevertheless."""

from __future__ import annotations


class InvariantBroken(AssertionError):
    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant
