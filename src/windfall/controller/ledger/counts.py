"""What the ledger counts over a run, and what it accepted of one frame. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class LedgerCounts:
    """What the ledger counted over a run, in tokens unless the name says otherwise."""

    accepted: int = 0
    closed: int = 0
    withdrawn: int = 0
    repeated: int = 0
    """Tokens that had been accepted before: a frame arrived twice."""
    late: int = 0
    """Tokens that arrived from a worker after their response was reassigned or given up."""
    unwanted: int = 0
    """Tokens of canceled responses."""
    gaps: int = 0
    """Frames, not tokens, that did not continue at the next position. The response is requeued from its last token."""
    stale: int = 0
    """Tokens of a version that is not allowed for the response."""
    moved: int = 0
    """Responses that lost their worker and continued elsewhere."""
    discarded: int = 0
    """Tokens that were accepted, then discarded: with their lost worker, if there is no migration, or because their
    turn was cut short."""
    prefilled_again: int = 0
    """Tokens, prompts included, that had to be prefilled again because a response moved."""


@dataclass(slots=True)
class Acceptance:
    """What the ledger accepted of one frame."""

    tokens: int = 0
    """Number of accepted tokens."""
    ended_turns: list[str] = field(default_factory=list)
    """Ids of the responses whose turn ended."""
    dropped: list[int] = field(default_factory=list)
    """Handles that the worker should cancel: their responses continue elsewhere."""
    complete: bool = True
    """Every token of the frame was accepted."""
    rows: list[int] = field(default_factory=list)
    """If not `complete`: the rows of the frame that were accepted."""
