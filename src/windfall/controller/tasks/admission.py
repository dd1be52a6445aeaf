"""Decides how many tasks may be open and which finished groups are trained on. No clock, no I/O.

    admit ──▶ OPEN ── finish() ──▶ READY ── take() ──▶ TAKEN ── publish() ──▶ trained on
               │                     └──── too old ──▶ dropped
               ├── dismiss(): the environment cannot produce it
               ├── drop(): every response is too old, or the prompt is skipped
               └── finish(informative=False): nothing can be learned from it (dynamic sampling)

There is one Admission for each policy that is trained. `TaskGate` (task_gate.py) has them admit tasks together.

In step s + 1, the trainer is at version s. The staleness of a response in that step is s minus the oldest version among
its tokens. With the bound eta (`rollout.staleness`) and B groups per batch (`rollout.groups`):

- The gate (AReaL, arXiv 2505.24298): at most (eta + 1) * B groups are open, ready or taken. A group that starts at
  version s is therefore normally trained on at version s + eta or before. With eta = 0, a batch is opened only once the
  version that generates it is published: this is synchronous training. If the trainer stays busy with fewer groups,
  fewer are opened, so that responses are fresher (`Lead`).
- A response without a sampled token, such as that of an agent that made no call, is never too old.
- The check at use: a response is never trained on if it is older than the bound, or newer than the trainer (after the
  trainer fell back to a checkpoint). The gate alone is not enough, because later groups overtake a long response.
- Of the ready groups the oldest is taken first. A group may overtake older groups that are still open only if enough
  places for those remain in the batches that are trained before they become too old; otherwise the trainer waits for
  them. Without this rule, short groups overtake long ones until those are too old, and training prefers short
  responses. With it, nothing is dropped as long as responses start at the version at which their task was admitted, or
  later. A group ages only once it has begun: tasks that wait in the queue while versions are published (with a large
  bound, most of those that a run opens at its start) do not hold the trainer back (`not_begun`). With `in_order`,
  groups are taken in the order of their tasks.
- A task that is dismissed or replaced frees its place at once. At most `max_draws` * B tasks are drawn for one batch;
  after that the step continues with the groups that it has.
- No more tasks are admitted than the steps that are left can use.
- A step that is trained again after a restart (`planned`) gets the same groups as the first time, in the same order.

The gate cannot deadlock: a version is published only after a batch was taken, so while the trainer waits, nothing that
is open becomes too old. Whatever is dropped frees its place for a task that starts at the current version.

The lead. With B groups per batch, the bound allows `staleness` * B groups beyond the batch of the current step. If
generation is faster than training and all of them are open or ready, nearly every response is trained on at the bound:
a group that is opened behind n others is n / B versions old when it is its turn. So only as many are opened ahead as
the trainer needs to stay busy. Two measurements of every step say how many these are:

- `spare`: finished groups that the trainer did not need yet, at the moment of the step at which they were fewest. With
  n groups fewer opened ahead, n fewer would have been finished then. So the step needed a lead of `lead - spare`.
- `short`: groups that the trainer lacked while it waited. The step needed a lead of `lead + short`.

- The lead grows at once to the need of a step that waited. It shrinks to the largest need of the last WINDOW steps, by
  at most a quarter of a batch per step. The groups of a step may have been opened with an earlier, larger lead; `lead`
  above is the largest of those.
- The need of a step that waited is forgotten slowly, by 1 / FORGET of a batch per step. A wait for a share w of a step
  raises the lead by w batches or more, and it takes w * FORGET steps until that is forgotten. So the waits that this
  rule causes cost at most about 1 / FORGET of the time. A need above the bound counts as the bound: a larger lead could
  not have prevented the rest of the wait, for example while no worker was there.
- A step that waits although the lead is at its limit says that generation is the bottleneck. The lead stays there until
  FEWEST steps did not wait.
- A wait for responses that are about to become too old says nothing about the lead: other groups are ready.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from windfall.types import Group, Response

WINDOW = 8
"""Number of steps whose needs the lead covers."""
FEWEST = 3
"""Number of steps that must have been measured before the lead shrinks."""
FORGET = 128
"""Steps after which a need of one batch that caused a wait is forgotten."""
WAITED_SHARE = 0.005
"""Waits below this share of a step's training time are ignored: the trainer waits for messages, not for groups."""


@dataclass(slots=True)
class Dropped:
    """Responses that were dropped because they exceeded the bound, and the tokens that had been sampled for them."""

    responses: int = 0
    tokens: int = 0

    def add(self, tokens: int) -> None:
        self.responses += 1
        self.tokens += tokens


def staleness(response: Response, version: int) -> int:
    """How many versions the oldest token of a response lags behind; 0 if it has no sampled token."""
    oldest = response.oldest_version
    return 0 if oldest is None else version - oldest


def is_usable(response: Response, version: int, bound: int) -> bool:
    """Whether a trainer at this version may train on a response."""
    newest = response.newest_version
    return staleness(response, version) <= bound and (newest is None or newest <= version)


def _oldest(group: Group, version: int) -> int:
    """The oldest version of a group. One without sampled tokens belongs to the current version."""
    return min((v for r in group.responses if (v := r.oldest_version) is not None), default=version)


class Lead:
    """
    >>> lead = Lead(batch=8, staleness=2)
    >>> lead.groups  # all that the bound allows
    16
    >>> for spare in (6, 6, 6, 6, 6): lead.end_step(spare=spare, missing=0, wait_s=0.0, train_s=4.0)
    >>> lead.groups  # 6 finished groups were always left over
    10
    >>> lead.end_step(spare=0, missing=1, wait_s=1.5, train_s=4.0)
    >>> lead.groups  # 3 more would have been trained on during the wait
    13
    """

    def __init__(self, *, batch: int, staleness: int) -> None:
        """`batch`: groups per step."""
        self._batch, self._limit = batch, batch * staleness
        self.groups = self._limit
        """Number of groups that may be open or ready beyond one batch."""
        self._leads: deque[int] = deque([self.groups], maxlen=staleness + 1)
        """The leads with which the groups of the current step may have been opened."""
        self._needs: deque[int] = deque(maxlen=WINDOW)
        """The leads that the last steps needed."""
        self._waited = 0.0
        """The need of the steps that waited, less what is forgotten."""

    def end_step(self, *, spare: int, missing: int, wait_s: float, train_s: float) -> None:
        """Decide the lead of the next step. In the last one, the trainer trained for `train_s` seconds. It waited for
        `wait_s` seconds because too few groups were finished; up to `missing` were lacking."""
        if wait_s <= WAITED_SHARE * train_s:
            self._waited -= self._batch / FORGET
            self._needs.append(max(self._leads) - spare)
        elif self.groups >= self._limit:
            self._needs.clear()
        else:
            short = max(missing, math.ceil(self._batch * wait_s / max(train_s, 1e-9)))  # it trains on these in `wait_s`
            self._waited = min(self._limit, max(self._waited, self.groups + short))
        self.groups = min(self._limit, max(math.ceil(self._waited), self._shrunk()))
        self._leads.append(self.groups)

    def _shrunk(self) -> int:
        if len(self._needs) < FEWEST:
            return self.groups
        return min(self.groups, max(0, *self._needs, self.groups - max(1, self._batch // 4)))


class Admission:
    def __init__(
        self, *, batch: int, steps: int, staleness: int = 0, max_draws: int = 1, in_order: bool = False
    ) -> None:
        """`batch`: groups per step. `steps`: steps of the whole run."""
        self.batch, self.steps, self.staleness = batch, steps, staleness
        self._max_draws, self._in_order = max_draws, in_order
        self.version = self.next_task = 0
        """Steps completed, and the index of the first task that was never admitted."""
        self.lead = Lead(batch=batch, staleness=staleness)
        """How many groups may be open or ready beyond one batch."""
        self.dropped = Dropped()
        self.too_new = 0
        """Responses that were dropped as too old, and as newer than the trainer, since the last publish()."""
        self._again: deque[int] = deque()
        """Tasks to admit before new ones, because they were open when the run was interrupted."""
        self._open: dict[int, int] = {}
        """Open tasks. No token of a task is older than this version: at first the one at which it was admitted, or that
        of its oldest token in the journal, then the newest version at which it had not begun."""
        self._ready: dict[int, Group] = {}
        self._ready_version: dict[int, int] = {}
        """The oldest version of each ready group, as it was when the group was finished."""
        self._oldest: list[tuple[int, int]] = []
        """Heap of (oldest version, task) of the ready groups."""
        self._held: Counter[int] = Counter()
        """Number of open and ready groups by their oldest version (for an open group, its version in `_open`)."""
        self._order: deque[int] = deque()
        """Used only with `in_order`: admitted tasks that were not taken yet. Those that are neither open nor ready are
        skipped."""
        self.taken: list[int] = []
        """Tasks in the batch of the current step, in the order in which they are trained on."""
        self._replaced = 0
        """Tasks of this step that were dismissed or replaced."""
        self._planned: dict[int, deque[int]] = {}
        """By step that is trained again: the tasks that it took the first time and has not taken again yet."""
        self._restored: dict[int, int] = {}
        """By task with tokens in the journal: the oldest version among them."""
        self._planned_tasks: set[int] = set()
        """All tasks that restore() put into `_planned`, including those taken again since."""

    def restore(
        self, *, version: int, next_task: int, open_tasks: Iterable[int] = (),
        planned: Mapping[int, Sequence[int]] | None = None, oldest: Mapping[int, int] | None = None,
    ) -> None:  # fmt: skip
        """Continue after step `version`. `open_tasks` were admitted and not trained on. `planned`: the tasks of each
        later step that was trained before. If a step has no plan, the plans of later steps are ignored, because part of
        the journal was lost. `oldest`: by task, the oldest version among its tokens in the journal."""
        self._planned = {}
        while planned and (step := version + 1 + len(self._planned)) in planned:
            self._planned[step] = deque(planned[step])
        self._planned_tasks = set(chain.from_iterable(self._planned.values()))
        used = max((task + 1 for tasks in self._planned.values() for task in tasks), default=next_task)
        self.version, self.next_task = version, max(next_task, used)
        self._again = deque(sorted({*open_tasks, *range(next_task, self.next_task)}))
        self._open, self._ready, self._oldest, self._order, self.taken = {}, {}, [], deque(), []
        self._held.clear()
        self._ready_version.clear()
        self._restored = dict(oldest or {})
        self._replaced, self.dropped, self.too_new = 0, Dropped(), 0
        self.lead = Lead(batch=self.batch, staleness=self.staleness)

    @property
    def capacity(self) -> int:
        """Number of new tasks that may be admitted now."""
        held = len(self._again) + len(self._open) + len(self._ready) + len(self.taken)
        gate = min(self.batch + self.lead.groups, (self.steps - self.version) * self.batch)
        draws = (self._max_draws + self.staleness) * self.batch - self._replaced
        return max(0, min(gate, draws) - held)

    @property
    def ready(self) -> int:
        """Number of finished groups that were not taken yet."""
        return len(self._ready)

    @property
    def closed(self) -> bool:
        """The gate admits nothing more, although more steps follow: generation is far enough ahead."""
        return self.capacity == 0 and self.version + self.staleness + 1 < self.steps

    @property
    def open_tasks(self) -> tuple[int, ...]:
        """Tasks that were admitted and have been neither taken nor given up."""
        return tuple(sorted({*self._again, *self._open, *self._ready}))

    @property
    def done(self) -> bool:
        """All steps are made."""
        return self.version >= self.steps

    def will_admit(self) -> Callable[[int], bool]:
        """Whether a task is admitted later, as of now."""
        if self.done:
            return lambda index: False
        again, next_task = frozenset(self._again), self.next_task
        return lambda index: index >= next_task or index in again

    def is_open(self, index: int) -> bool:
        return index in self._open

    def admit_again(self) -> list[int]:
        """Admit tasks that were open when the run was interrupted, and return them."""
        count = len(self._again)
        if self.staleness == 0 and not self._planned:  # the bound may have been above 0 before the run was resumed
            count = max(0, min(count, self.batch - len(self._open) - len(self._ready) - len(self.taken)))
        return self._admit([self._again.popleft() for _ in range(count)])

    def admit_new(self, count: int) -> list[int]:
        """Admit the next tasks, and return them. `count` must not exceed the capacity."""
        first, self.next_task = self.next_task, self.next_task + count
        return self._admit([*range(first, self.next_task)])

    def _admit(self, tasks: list[int]) -> list[int]:
        versions = {task: min(self.version, self._restored.pop(task, self.version)) for task in tasks}
        self._open |= versions
        self._held.update(versions.values())
        if self._in_order:  # a task that is reopened keeps its first place, and its second one is skipped
            self._order.extend(tasks)
        return tasks

    def reopen(self) -> None:
        """Generation was interrupted: admit the open tasks again, before others."""
        self._restored |= self._open
        self._held.subtract(self._open.values())
        self._again = deque(sorted({*self._again, *self._open}))
        self._open = {}

    def dismiss(self, index: int) -> None:
        """The environment cannot produce this task."""
        self.drop(index)
        self._replaced += 1

    def drop(self, index: int) -> None:
        """Every response of this open task is too old, or the prompt is skipped."""
        self._held[self._open.pop(index)] -= 1

    def not_begun(self, tasks: Iterable[int]) -> None:
        """These tasks have no token yet, and their first one will be of the current version or a newer one. Those that
        are not open are ignored."""
        for index in self._open.keys() & set(tasks):
            self._held[self._open[index]] -= 1
            self._open[index] = self.version
            self._held[self.version] += 1

    def finish(self, group: Group, *, informative: bool = True) -> None:
        """A group is complete. One that is not informative is replaced by another task, unless it is planned."""
        self.drop(group.index)
        if not informative and group.index not in self._planned_tasks:
            self._replaced += 1
            return
        self._ready[group.index] = group
        oldest = self._ready_version[group.index] = _oldest(group, self.version)
        heapq.heappush(self._oldest, (oldest, group.index))
        self._held[oldest] += 1

    @property
    def complete(self) -> bool:
        """The batch of the current step has all the groups that it can get."""
        planned = self._plan()
        if planned is not None:
            return not planned
        return len(self.taken) >= self.batch or not (self._open or self._ready or self._again or self.capacity)

    def _plan(self) -> deque[int] | None:
        """Tasks that this step took when it was trained the first time and has not taken again yet; None if it has no
        plan and chooses its own."""
        planned = self._planned.get(self.version + 1)
        while planned and not self.is_held(planned[0]):
            planned.popleft()  # it is no longer available, for example because the journal was damaged
        if planned is not None and not planned and not self.taken:
            return None  # nothing is left of the plan
        return planned

    def is_held(self, index: int) -> bool:
        """Whether the task is open or ready, or will be admitted again."""
        return index in self._open or index in self._ready or index in self._again

    def take(self) -> Group | None:
        """The next group to train on, without responses that cannot be used; None if there is none at the moment."""
        while not self.complete and (index := self._next()) is not None:
            group = self._ready.pop(index)
            self._held[self._ready_version.pop(index)] -= 1
            if fresh := tuple(r for r in group.responses if self._check_use(r)):
                self.taken.append(index)
                return replace(group, responses=fresh)
        return None

    def _check_use(self, response: Response) -> bool:
        """Whether the response may be trained on now. Counts it otherwise."""
        if is_usable(response, self.version, self.staleness):
            return True
        if staleness(response, self.version) > self.staleness:
            self.dropped.add(response.sampled_count)
        else:
            self.too_new += 1
        return False

    def _next(self) -> int | None:
        """The ready task to take next."""
        planned = self._plan()
        if planned is not None:
            return planned.popleft() if planned[0] in self._ready else None
        if self._in_order:
            while self._order and not self.is_held(self._order[0]):
                self._order.popleft()
            return self._order.popleft() if self._order and self._order[0] in self._ready else None
        while self._oldest:
            oldest, index = self._oldest[0]
            if index in self._ready and self._must_wait(oldest):
                return None
            heapq.heappop(self._oldest)
            if index in self._ready:
                return index
        return None

    def _must_wait(self, oldest: int) -> bool:
        """Whether a ready group with this oldest version would take the place of an older group that would then become
        too old before it can be trained on."""
        older = 0
        for version in sorted(v for v in self._held if self.oldest_version <= v < oldest):
            older += self._held[version]
            batches = version - self.oldest_version + 1  # until groups of this version are too old
            if older > batches * self.batch - len(self.taken) - 1:
                return True
        return False

    def publish(self) -> None:
        """The step is trained: the next version exists."""
        self._planned.pop(self.version + 1, None)
        self.version += 1
        self._held = +self._held  # remove the versions that no group has any more
        self.taken, self._replaced, self.dropped, self.too_new = [], 0, Dropped(), 0

    @property
    def oldest_version(self) -> int:
        """The oldest version whose tokens may still be trained on."""
        return self.version - self.staleness

    def check(self) -> None:
        """Raise AssertionError if a rule above is broken."""
        states = [set(self._open), set(self._ready), set(self.taken), set(self._again)]
        assert sum(map(len, states)) == len(set().union(*states)), "a task is in two states"
        assert all(index < self.next_task for index in set().union(*states)), "a task was never admitted"
        assert len(self.taken) <= self.batch or self.version + 1 in self._planned, "the batch is too large"
