"""The Env seam: a task in, a reward out.

An environment keeps no state between calls: `task(i)` is always the same task, and `feedback` sees the whole episode so
far. So a run resumes from a number, an episode can move to another process, and a call that failed can be tried again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from windfall.types import Feedback, Task, Turn

HELD_OUT = 1 << 40
"""Task numbers from here on are for evaluation only."""


@runtime_checkable
class Env(Protocol):
    def task(self, index: int) -> Task:
        """Task number `index` (0, 1, 2, ... without end): the same number gives the same task, in any process."""
        ...

    async def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        """Judge the episode: an observation asks for one more turn, otherwise the reward ends it.

        May be slow, and may raise: it is then tried again, and at last counted as missing, never as zero.
        """
        ...
