"""Where the trainer keeps its state: bytes on the GPU and in host memory, and bytes that an update moves. Pure.

Bytes per trained parameter, in a model that computes in half precision:

                                  one rank     several ranks: each has an Nth
    weight                        2            - (gathered from the masters)
    sum of the gradients          4            4
    master                        4  *         4
    Adam's two moments            8  *         8  *

What is marked * may be in host memory, in whole or in part: an update then copies it to the GPU, chunk by chunk, and
back (trainer/weight_state.py). A float32 model is its own master. Frozen weights are stored once, in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

GRADIENT_BYTES = MASTER_BYTES = 4
MOMENT_BYTES = 8
"""Of both moments together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLayout:
    """Bytes are those of one rank.

    >>> alone = StateLayout(trained=1000)
    >>> alone.gpu_bytes, alone.host_bytes, alone.moved_bytes
    (18000.0, 0.0, 0.0)
    >>> half = replace(alone, host_share=0.5)
    >>> half.gpu_bytes, half.host_bytes, half.moved_bytes
    (12000.0, 6000.0, 12000.0)
    >>> replace(half, ranks=2).gpu_bytes, StateLayout(trained=16, frozen=1000).gpu_bytes
    (6000.0, 2288.0)
    """

    trained: int
    """Parameters that are trained."""
    frozen: int = 0
    value_bytes: int = 2
    """Of a number in the compute dtype."""
    ranks: int = 1
    host_share: float = 0.0
    """How much of what may be in host memory is there."""

    @property
    def own_masters(self) -> bool:
        """Whether the weights are their own masters: parameters split over ranks are in float32."""
        return self.ranks > 1 or self.value_bytes == MASTER_BYTES

    @property
    def movable(self) -> float:
        """Bytes that may be in host memory."""
        return self.trained * (MOMENT_BYTES + MASTER_BYTES * (not self.own_masters)) / self.ranks

    @property
    def gpu_bytes(self) -> float:
        fixed = GRADIENT_BYTES + (MASTER_BYTES if self.own_masters else self.value_bytes)
        return (self.trained * fixed + self.frozen * self.value_bytes) / self.ranks + self.movable - self.host_bytes

    @property
    def host_bytes(self) -> float:
        return self.movable * self.host_share

    @property
    def moved_bytes(self) -> float:
        """By an update, in both directions together."""
        return 2 * self.host_bytes

    def fitted(self, gpu_bytes: float) -> StateLayout:
        """With as little in host memory as fits into this many bytes of the GPU; maybe that does not suffice.

        >>> layout = StateLayout(trained=1000)
        >>> [layout.fitted(room).host_share for room in (18_000, 15_000, 6000, 5000)]
        [0.0, 0.25, 1.0, 1.0]
        """
        over = replace(self, host_share=0.0).gpu_bytes - gpu_bytes
        return replace(self, host_share=min(1.0, max(0.0, over / self.movable if self.movable else 0.0)))


def put_away(sizes: Sequence[int], share: float) -> list[bool]:
    """Which of the weights of these sizes have their state in host memory: together at least this share, and little
    more. Large ones are first, because their copies are fast.

    >>> put_away([10, 1, 40, 3, 40], 0.45)
    [False, True, True, True, False]
    >>> put_away([10, 1], 0.0), put_away([10, 1], 1.0)
    ([False, False], [True, True])
    """
    left, out = share * sum(sizes), [False] * len(sizes)
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    for i in order:
        if 0 < sizes[i] <= left:
            out[i], left = True, left - sizes[i]
    for i in reversed(order):  # the smallest that covers the rest
        if left > 0 and not out[i] and sizes[i] >= left:
            out[i], left = True, 0.0
    return out
