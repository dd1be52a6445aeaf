"""The processes of the trainer, one per rank, as one process: they start together, and when one ends all of them end.

When a rank is lost, the others cannot go on, because its part of the weights is gone. They notice it at their next
exchange; those that have not ended after FOLLOW_S are killed. The exit status of the group is that of the rank that
failed, not of those that ended because of it.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from windfall.processes.process import Handle
from windfall.trainer.ranks.rank_place import RANK_LOST

FOLLOW_S = 3.0
"""Seconds that the other ranks get to end on their own, so that their logs and the controller say why."""


class RankGroup(Handle):
    """Its pid is that of rank 0, which talks to the controller."""

    def __init__(self, ranks: Sequence[Handle]) -> None:
        super().__init__(name=ranks[0].name, pid=ranks[0].pid, send=self._send_all)
        self.ranks = ranks
        self.cause = ranks[0].name
        """The rank because of which the group ended."""
        self._watching = asyncio.create_task(self._watch(), name="watching the trainer's ranks")

    def _send_all(self, number: int) -> None:
        for rank in self.ranks:
            rank.signal(number)

    async def _watch(self) -> None:
        waits = {asyncio.ensure_future(rank.wait()): rank for rank in self.ranks}
        done, rest = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        ended = [(waits[task].name, task.result()) for task in waits if task in done]
        if rest:
            more, _ = await asyncio.wait(rest, timeout=FOLLOW_S)
            ended += [(waits[task].name, task.result()) for task in waits if task in more]
        self._send_all(signal.SIGKILL)
        await asyncio.gather(*waits)
        self.cause, code = cause(ended)
        self.ended(code)


def cause(ended: Sequence[tuple[str, int]]) -> tuple[str, int]:
    """The rank because of which a group ended, and the exit status of the group. `ended`: ranks with their exit
    statuses, in the order in which they ended.

    >>> cause([("rank-2", -9), ("trainer", 1), ("rank-1", 5)]), cause([("trainer", 5), ("rank-1", 1)])
    (('rank-2', -9), ('rank-1', 1))
    >>> cause([("rank-1", 5), ("trainer", 5)]), cause([("trainer", 0), ("rank-1", 5)])
    (('rank-1', 1), ('trainer', 0))
    """
    return next(((name, code) for name, code in ended if code != RANK_LOST), (ended[0][0], 1))
