"""A group of a stream that is not complete yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from windfall.types import Response, Task


@dataclass(slots=True)
class OpenGroup:
    index: int
    task: Task
    size: int
    responses: dict[int, Response] = field(default_factory=dict)
    """Finished responses, by sibling number."""
    dropped: int = 0
    """Responses that are too old."""

    @property
    def complete(self) -> bool:
        return len(self.responses) + self.dropped == self.size
