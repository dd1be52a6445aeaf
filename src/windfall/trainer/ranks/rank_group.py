"""The processes of the trainer, one per rank, as one process: they start together, and when one ends all of them end.

When a rank is lost, the others cannot go on, because its part of the weights is gone. They notice it at their next
exchange; those that have not ended after FOLLOW_S are killed. The exit status of the group is that of the rank that
failed, not of those that ended because of it.

On several machines, each has a group of its own ranks, and the group of the supervisor has one more member for each of
the other machines (machines.py).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from windfall.devices import Place
from windfall.errors import WindfallError
from windfall.processes.process import Handle
from windfall.recipe.sections import Recipe

FOLLOW_S = 3.0
"""Seconds that the other ranks get to end on their own, so that their logs and the controller say why."""
RANK_LOST = 5
"""Exit status of a rank that ended because another one was lost."""


def rank_places(recipe: Recipe, gpus: Sequence[Place]) -> list[Place]:
    """Where each rank of the trainer computes. `gpus`: the GPUs of this machine that the run may use."""
    wanted = recipe.train.ranks
    if not gpus:
        return [Place()] * (1 if wanted == "auto" else wanted)
    if wanted == "auto":
        return list(gpus)
    if wanted > len(gpus):
        what = f"{wanted} ranks need as many GPUs, but this machine has {len(gpus)}"
        raise WindfallError(what, where="train.ranks", fix="Lower it, or set it to 'auto'.")
    return list(gpus[:wanted])


def log_name(rank: int) -> str:
    """The log of a rank, in the run's folder."""
    return f"rank-{rank}.log" if rank else "trainer.log"


class RankGroup(Handle):
    """Its pid is that of its first rank. On the machine of the supervisor, this is rank 0, which talks to the
    controller."""

    def __init__(self, ranks: Sequence[Handle], *, followed: int = 1) -> None:
        """`followed`: the exit status if every rank ended because of another one."""
        self._followed = followed
        super().__init__(name="trainer", pid=ranks[0].pid, send=self._send_all)
        self.ranks = ranks
        self.cause = ranks[0].name
        """The member because of which the group ended."""
        self._watching = asyncio.create_task(self._watch(), name="watching the trainer's ranks")

    def _send_all(self, number: int) -> None:
        for rank in self.ranks:
            if not rank.running:
                continue
            if number == signal.SIGKILL:
                rank.kill()
            else:
                rank._send(number)

    async def _watch(self) -> None:
        waits = {asyncio.ensure_future(rank.wait()): rank for rank in self.ranks}
        done, rest = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        ended = [(waits[task].name, task.result()) for task in waits if task in done]
        if rest:
            more, _ = await asyncio.wait(rest, timeout=FOLLOW_S)
            ended += [(waits[task].name, task.result()) for task in waits if task in more]
        self._send_all(signal.SIGKILL)
        await asyncio.gather(*waits)
        self.cause, code = cause(ended, self._followed)
        self.ended(code)


def cause(ended: Sequence[tuple[str, int]], followed: int = 1) -> tuple[str, int]:
    """The member because of which a group ended, and the exit status of the group. `ended`: members with their exit
    statuses, in the order in which they ended. `followed`: the status if all of them ended because of a rank that is
    not among them.

    >>> cause([("rank-2", -9), ("trainer", 1), ("rank-1", 5)]), cause([("trainer", 5), ("rank-1", 1)])
    (('rank-2', -9), ('rank-1', 1))
    >>> cause([("rank-1", 5), ("trainer", 5)]), cause([("trainer", 0), ("rank-1", 5)])
    (('rank-1', 1), ('trainer', 0))
    """
    return next(((name, code) for name, code in ended if code != RANK_LOST), (ended[0][0], followed))
