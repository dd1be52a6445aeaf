"""Decides which tasks are open, for all policies together. No clock, no I/O.

    open() ──▶ tasks that every policy which needs them has admitted ──▶ stream ── finish() ──▶ each policy's part

The policies of a run are trained on the same tasks, each on the tokens that it sampled itself, at its own pace. Each
has an Admission (admission.py) with its own batch, bound and version. They meet only here:

- A new task is opened when every policy that has steps left has room for it. So no policy is swamped by another; the
  one that trains slowest decides how fast tasks are opened, and the others are up to their bound ahead of it.
- A task is opened when every policy that needs it has admitted it. A policy whose trainer fell back to a checkpoint is
  behind: it admits the tasks that it must train on again, in their order, while later tasks wait for it. With staleness
  0, its tokens of every task are therefore of the same version as without the loss.
- What is ready or taken belongs to one policy, and no other policy changes it.

This cannot deadlock. Every policy admits tasks in ascending order. Take the smallest task that waits: the policy that
it waits for has admitted all smaller ones that it needs, and none of them waits. So these will finish, and then the
policy has room for the task, or a complete batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from windfall.controller.tasks.admission import Admission
from windfall.types import Group


class TaskGate:
    """
    >>> fast, slow = Admission(batch=2, steps=9, staleness=1), Admission(batch=2, steps=9)
    >>> gate = TaskGate({"fast": fast, "slow": slow})
    >>> gate.open()  # `fast` has room for four tasks, but `slow` has not
    [0, 1]
    """

    def __init__(self, admissions: Mapping[str, Admission]) -> None:
        """`admissions`: those of the policies that are trained."""
        self.admissions = dict(admissions)
        self._waiting: set[int] = set()
        """Tasks that some policies have admitted, and others will."""

    @property
    def next_task(self) -> int:
        """The first task that no policy has admitted yet."""
        return max(a.next_task for a in self.admissions.values())

    def open(self) -> list[int]:
        """The tasks to open now."""
        active = [a for a in self.admissions.values() if not a.done]
        for a in active:
            self._waiting.update(a.admit_again())
        end = max(self.next_task, min((a.next_task + a.capacity for a in active), default=0))
        for a in active:
            self._waiting.update(a.admit_new(min(a.capacity, end - a.next_task)))
        if not self._waiting:
            return []
        later = [a.will_admit() for a in active]
        tasks = sorted(task for task in self._waiting if not any(admits(task) for admits in later))
        self._waiting.difference_update(tasks)
        return tasks

    def finish(self, group: Group, informative: Callable[[str, Group], bool]) -> dict[str, Group]:
        """A task is complete: give every policy that has it open its own part of the group. Returns the parts, also
        those without a response. `informative`: whether a policy can learn from its part."""
        parts = {name: group.of(name) for name in self.holders(group.index)}
        for name, part in parts.items():
            if part.responses:
                self.admissions[name].finish(part, informative=informative(name, part))
            else:
                self.admissions[name].drop(part.index)
        return parts

    def dismiss(self, index: int) -> None:
        """The environment cannot produce this task."""
        for name in self.holders(index):
            self.admissions[name].dismiss(index)

    def skip(self, index: int) -> None:
        """No policy wants the prompt of this task. The place is free for another one."""
        for name in self.holders(index):
            self.admissions[name].drop(index)

    def reopen(self) -> None:
        """The stream was stopped: what it had open must be opened again."""
        self._waiting.clear()
        for a in self.admissions.values():
            a.reopen()

    def needed(self, index: int) -> bool:
        """Whether some policy has the task open, or will."""
        return any(a.is_open(index) or a.will_admit()(index) for a in self.admissions.values())

    def waiting(self) -> Iterable[int]:
        """Tasks that wait until all policies that need them have admitted them."""
        return self._waiting

    def holders(self, index: int) -> list[str]:
        """The policies that have this task open."""
        return [name for name, a in self.admissions.items() if a.is_open(index)]

    def check(self) -> None:
        """Raise AssertionError if a rule above is broken."""
        for a in self.admissions.values():
            a.check()
        assert all(self.holders(task) for task in self._waiting), "a task waits that no policy has admitted"
