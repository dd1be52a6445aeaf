"""Limits how many groups are generated at once in asynchronous training, so that they finish before they are too old.
Pure.

An engine generates nearly as many tokens per second with half the responses, and each response then takes half as
long. If generation is the bottleneck, one batch leaves per step, so n batches that are generated at once take n steps
(Little's law). The gate of scheduling/admission.py allows staleness + 1 batches, all of which may run at once: on a
fleet with many slots, about half of them would be too old when they finish, the long ones first.

The limit is controlled as TCP controls its window, once per version:

    more than TOO_MANY of the responses were too old              the limit shrinks in proportion
    more than FEW were, and the trainer did not wait              the same: a smaller limit costs nothing
    fewer than FEW were, and the trainer had to wait for groups   the limit grows by GROW of a batch
    otherwise                                                     no change: a larger limit would only make tokens older
"""

from __future__ import annotations

TOO_MANY = 0.02
FEW = 0.01
"""Shares of the responses of a step that were dropped because they were too old."""
GROW = 0.0625
"""Share of a batch by which the limit grows."""


class OpenLimit:
    """
    >>> limit = OpenLimit(batch=16, most=32)
    >>> limit.groups
    16
    >>> limit.step(too_old=0, trained=128, waited=True)
    >>> limit.groups
    17
    >>> limit.step(too_old=32, trained=96, waited=True)
    >>> limit.groups
    13
    """

    def __init__(self, *, batch: int, most: int) -> None:
        """`batch`: groups per step. `most`: the limit is never above this number of groups."""
        self._batch, self._most, self._limit = batch, most, float(batch)

    @property
    def groups(self) -> int:
        return max(1, round(self._limit))

    def step(self, *, too_old: int, trained: int, waited: bool) -> None:
        """A version was published. `too_old`: responses dropped since the one before, `trained`: responses trained on.
        `waited`: the trainer had to wait for groups."""
        share = too_old / max(1, too_old + trained)
        if share > (TOO_MANY if waited else FEW):
            self._limit = max(1.0, self._limit * max(0.5, 1 - share))
        elif share < FEW and waited:
            self._limit = min(float(self._most), self._limit + max(1.0, GROW * self._batch))
