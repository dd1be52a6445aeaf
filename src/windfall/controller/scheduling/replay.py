"""Decides which groups a policy is trained on again. No clock, no I/O.

    step ── its fresh groups, if rewards differ ──▶ Replay ── not too old ──▶ batches of the next steps

A step has `rollout.groups` groups. With `rollout.replay` above 0, this share of them was trained on before by the same
policy, and only the others are generated. A replayed group is not generated again: its tokens keep the log-probs with
which they were sampled, so importance weights correct for their age as they do in asynchronous training.

- The groups that were trained on last are replayed, as fresh groups are added and older ones make room. Until there
  are enough of them, in the first steps, batches are smaller.
- A response is replayed only while it is at most `rollout.replay_age` versions old. `rollout.staleness` limits fresh
  responses, as without replay.
- Groups without information, whose rewards are all equal, are not replayed.
- The state is the list of these tasks. It is part of a checkpoint, and the journal keeps their tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from windfall.controller.scheduling.admission import is_usable
from windfall.types import Group


class Replay:
    """
    >>> from windfall.types import Task
    >>> replay = Replay(groups=2, age=8)
    >>> replay.add(Group(index=n, task=Task(id="", prompt="")) for n in range(5))
    >>> replay.tasks
    (3, 4)
    """

    def __init__(self, *, groups: int, age: int) -> None:
        """`groups`: most groups that a step replays. `age`: the bound on the staleness of their responses."""
        self._groups: deque[Group] = deque(maxlen=groups)
        self._age = age

    @property
    def tasks(self) -> tuple[int, ...]:
        """The tasks whose groups may be replayed, in the order in which they were trained on."""
        return tuple(group.index for group in self._groups)

    def take(self, version: int) -> list[Group]:
        """The groups to replay in the step of a trainer at this version. Those that are too old are forgotten."""
        usable = [g for g in self._groups if all(is_usable(r, version, self._age) for r in g.responses)]
        self.restore(usable)
        return usable

    def add(self, groups: Iterable[Group]) -> None:
        """A step is trained on these fresh groups."""
        self._groups.extend(groups)

    def restore(self, groups: Iterable[Group]) -> None:
        self._groups.clear()
        self._groups.extend(groups)
