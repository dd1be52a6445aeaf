"""A rule that does not hold."""

from __future__ import annotations


class InvariantBroken(AssertionError):
    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule
