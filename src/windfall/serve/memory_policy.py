"""How much memory the rollout may hold beside serving: the states NORMAL, PRESSURE and FROZEN of ROSE. Pure.

    NORMAL ── serving has used the watermark's share of its headroom ──▶ PRESSURE: the budget is halved, once
    PRESSURE ── the rollout holds no more than the budget ──▶ FROZEN: the budget does not grow
    FROZEN ── a new step of the run ──▶ NORMAL: the budget is computed again

All amounts are blocks. Rules:
- a new budget leaves the headroom to serving, beside what serving holds;
- within a step the budget only falls. It falls below the half only if serving takes a block that the rollout holds;
- a budget of zero is computed again when there has been room for `THAW_S`: a rollout without any block makes no
  progress, and if no other worker does, no step of the run ends;
- the policy never limits serving: only the rollout has a budget.
"""

from __future__ import annotations

import math
from enum import StrEnum


class MemoryState(StrEnum):
    NORMAL = "normal"
    PRESSURE = "pressure"
    FROZEN = "frozen"


THAW_S = 10.0


class MemoryPolicy:
    def __init__(self, blocks: int, *, headroom: float = 0.2, watermark: float = 0.5) -> None:
        """`headroom`: share of all blocks that is kept free for serving. `watermark`: share of the headroom whose use
        by serving means pressure."""
        assert blocks >= 1
        assert 0.0 <= headroom <= 1.0
        assert 0.0 < watermark <= 1.0
        self._blocks = blocks
        self._headroom = math.ceil(blocks * headroom)
        self._watermark = watermark
        self.state, self.budget = MemoryState.NORMAL, 0
        self.halvings = 0
        """Number of times that serving caused pressure."""
        self._without_room_s: float | None = None
        """When the budget was last positive, or without room for it."""

    def begin_step(self, serving: int) -> None:
        """A step of the run begins, and serving holds this many blocks: compute the budget from scratch."""
        self.state = MemoryState.NORMAL
        self.budget = max(0, self._blocks - self._headroom - serving)

    def has_room(self, serving: int) -> bool:
        """Whether a new budget would be positive if serving held this many blocks."""
        return self._blocks - self._headroom - serving > 0

    def thaw(self, serving: int, now_s: float) -> bool:
        """Compute a budget of zero again if there has been room for it long enough. Returns whether that was done."""
        if self.budget or self._without_room_s is None or not self.has_room(serving):
            self._without_room_s = now_s
        elif now_s > self._without_room_s + THAW_S:
            self.begin_step(serving)
            return True
        return False

    def observe(self, serving: int, rollout: int) -> int:
        """The blocks that each tenant holds now. Returns how many the rollout must give back at once."""
        if self.state is MemoryState.NORMAL and self.budget and self._left(serving) < self._needed:
            self.state = MemoryState.PRESSURE
            self.budget //= 2
            self.halvings += 1
        if self.state is MemoryState.PRESSURE and rollout <= self.budget:
            self.state = MemoryState.FROZEN
        return max(0, rollout - self.budget)

    def taken(self, rollout: int) -> None:
        """Serving took a block that the rollout held, which holds this many now: it does not get it back in this
        step."""
        self.budget = min(self.budget, rollout)
        if self.state is MemoryState.NORMAL:
            self.halvings += 1
        self.state = MemoryState.FROZEN

    def _left(self, serving: int) -> int:
        """Blocks that serving can still get before it needs one of the rollout's budget."""
        return self._blocks - self.budget - serving

    @property
    def _needed(self) -> float:
        return self._headroom * (1.0 - self._watermark)
