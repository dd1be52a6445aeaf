"""Speculative decoding of a simulated engine: tokens per step as a function of the siblings whose text is known. Pure.

A response has `verify_rows` rows in a step, its newest token and the drafted ones, and accepts as many tokens as
`[sim] acceptance` says for its number of references, between the given points along straight lines. References are the
siblings that have more tokens than the response: all that have ended, and half of those that are being generated. All
responses of a batch advance at the mean rate of the batch. The KV cache is read once per step whatever the number of
rows, so a token takes

    (fixed_s + each_s * verify_rows * responses + context_s * context) / tokens per step

An engine speculates only while this is less than without (engine/draft_length.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from windfall.step_time import StepTime


@dataclass(slots=True)
class GroupProgress:
    """How many responses of a group have begun, and how many of those have ended."""

    begun: int = 0
    ended: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftAcceptance:
    points: Sequence[tuple[float, float]]
    """(references, tokens per step), by the number of references."""
    verify_rows: int
    groups: dict[int, GroupProgress] = field(default_factory=dict)

    def tokens_per_step(self, group: int) -> float:
        """Tokens that a running response of this group gets from a step.

        >>> seer = DraftAcceptance(points=[(0, 1.70), (1, 2.04), (5, 2.32), (15, 2.53)], verify_rows=4)
        >>> seer.groups[7] = GroupProgress(begun=8, ended=3)
        >>> seer.tokens_per_step(7)  # 3 siblings that have ended, and 2 of the 4 others: 5
        2.32
        """
        known = self.groups.get(group, GroupProgress(begun=1))
        references = known.ended + max(0, known.begun - known.ended - 1) / 2
        return float(np.interp(references, [x for x, _ in self.points], [y for _, y in self.points]))

    def service(self, plain: StepTime, groups: Sequence[int], context: int) -> StepTime:
        """The times of a token, for a batch of responses of these groups."""
        if not groups:
            return plain
        found = {group: self.tokens_per_step(group) for group in set(groups)}
        rate = sum(found[group] for group in groups) / len(groups)
        wide = replace(plain, each_s=plain.each_s * self.verify_rows, over_batch=plain.over_batch / self.verify_rows,
                       over_s=plain.over_s * self.verify_rows).slower(1 / rate)  # fmt: skip
        both = [replace(wide, prefill_s=plain.prefill_s, train_s=plain.train_s, update_s=plain.update_s), plain]
        return min(both, key=lambda s: s.step_s(len(groups), context))
