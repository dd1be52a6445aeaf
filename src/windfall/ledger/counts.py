"""What the ledger counts over a run, and what it says of one frame."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """Tokens, unless the name says otherwise."""

    accepted: int = 0
    closed: int = 0
    withdrawn: int = 0
    repeated: int = 0
    """Had been accepted before: a frame came twice."""
    late: int = 0
    """Came from a worker after its response had been given to another, or after it was given up."""
    unwanted: int = 0
    """Of responses that were cancelled."""
    gaps: int = 0
    """Frames, not tokens: what came before was missing. The response goes on elsewhere from its last token."""
    stale: int = 0
    """Of another version than the response was given out with."""
    moved: int = 0
    """Responses that lost their worker and went on elsewhere."""
    discarded: int = 0
    """Accepted, and thrown away with a lost worker: only where migration is switched off."""
    prefilled_again: int = 0
    """Tokens, prompts included, that a move made a worker compute again."""


@dataclass(slots=True)
class Taken:
    accepted: int = 0
    turns: list[str] = field(default_factory=list)
    """Responses whose turn ended."""
    dropped: list[int] = field(default_factory=list)
    """Handles that the worker should forget: their responses go on elsewhere."""
    whole: bool = True
    """Every token of the frame was accepted."""
    rows: list[int] = field(default_factory=list)
    """If not `whole`: the rows of the frame that were."""
