"""Whatever order tasks are admitted, finished, dropped and taken in, the bound holds, nothing is lost, nothing waits
forever.

A `World` drives the admission as the controller does and keeps its own account of every task. Responses may be of any
version up to the current one, so also older than the bound allows.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.fleets.admitting import admit
from windfall.controller.tasks.admission import Admission, staleness
from windfall.types import Group, Response, Task

Choose = Callable[[Sequence[Any]], Any]
ACTIONS = ["finish", "finish", "finish", "finish", "take", "take", "publish", "publish", "dismiss", "drop", "restart"]


def response(index: int, sibling: int, versions: Iterable[int]) -> Response:
    versions = tuple(versions)
    n = len(versions)
    return Response(
        id=f"{index}/{sibling}", prompt=(1,), tokens=(7,) * n, logprobs=(-1.0,) * n,
        sampled=tuple(v >= 0 for v in versions), versions=versions, finish="stop", reward=1.0,
    )  # fmt: skip


def group(index: int, *oldest: int) -> Group:
    """A group with one response for each of these oldest versions."""
    task = Task(id=str(index), prompt="")
    responses = tuple(response(index, n, [v, -1, v]) for n, v in enumerate(oldest))
    return Group(index=index, task=task, responses=responses)


@dataclass(frozen=True)
class Saved:
    """What a checkpoint has."""

    version: int
    next_task: int
    open_tasks: tuple[int, ...]


class World:
    """A run. `choose` picks an item of a list, by hypothesis or at random."""

    def __init__(self, choose: Choose, **options: Any) -> None:
        self.choose, self.options = choose, options
        self.admission = Admission(**options)
        self.fates: dict[int, str] = {}
        """By task: open, ready, taken, replaced, dismissed, dropped or trained."""
        self.taken: list[tuple[int, tuple[str, ...]]] = []
        """The batch of the current step: tasks and their responses."""
        self.batches: dict[int, list[tuple[int, tuple[str, ...]]]] = {}
        """By step: the batch that it was trained on."""
        self.trained_once: dict[int, list[tuple[int, tuple[str, ...]]]] = {}
        """By step: its batch, also if the run fell back behind it."""
        self.groups: dict[int, Group] = {}
        """Groups that were finished: the journal has them."""
        self.dropped = 0
        self.checkpoints = [Saved(0, 0, ())]
        self.admit()

    # What the run does.

    def step(self) -> None:
        getattr(self, self.choose(ACTIONS))()
        self.check()

    def admit(self) -> list[int]:
        a = self.admission
        capacity, again = a.capacity, len(a._again)
        if a.staleness == 0 and not a._planned:  # the bound may have been above 0 before the run was resumed
            again = max(0, min(again, a.batch - len(a._open) - len(a._ready) - len(a.taken)))
        tasks = admit(a)
        assert len(tasks) == capacity + again
        assert a.capacity == 0
        for task in tasks:
            assert self.fates.get(task) != "trained", f"{task} is trained and is opened again"
            self.fates[task] = "open"
        return tasks

    def _of(self, fate: str) -> list[int]:
        return sorted(task for task, f in self.fates.items() if f == fate)

    def _running(self) -> list[int]:
        """Open tasks, without those that wait to be opened again after a restart."""
        return [task for task in self._of("open") if task in self.admission._open]

    def finish(self, informative: bool | None = None) -> None:
        if tasks := self._running():
            self._finish(self.choose(tasks), informative)
            self.admit()

    def _finish(self, index: int, informative: bool | None = None) -> None:
        version = self.admission.version
        if index not in self.groups:
            self.groups[index] = group(index, *(self.choose(range(version + 1)) for _ in range(self.choose([1, 2, 3]))))
        planned = any(index in tasks for tasks in self.admission._planned.values())
        informative = self.choose([True, True, False]) if informative is None else informative
        self.admission.finish(self.groups[index], informative=informative)
        self.fates[index] = "ready" if informative or planned else "replaced"

    def dismiss(self) -> None:
        if tasks := [t for t in self._running() if t not in self.groups]:
            self.admission.dismiss(task := self.choose(tasks))
            self.fates[task] = "dismissed"
            self.admit()

    def drop(self) -> None:
        """Every response of the task became too old before it was finished."""
        if tasks := [t for t in self._running() if t not in self.groups]:
            self.admission.drop(task := self.choose(tasks))
            self.fates[task] = "dropped"
            self.admit()

    def take(self) -> bool:
        a = self.admission
        ready, dropped = set(self._of("ready")), a.dropped.responses
        got = a.take()
        left = {*a._ready}
        for task in ready - left - ({got.index} if got else set()):
            assert all(staleness(r, a.version) > a.staleness for r in self.groups[task].responses)
            self.dropped += len(self.groups[task].responses)
            self.fates[task] = "dropped"
        if got is not None:
            assert got.index in ready
            self.fates[got.index] = "taken"
            self.taken.append((got.index, tuple(r.id for r in got.responses)))
            assert got.responses
            assert all(0 <= staleness(r, a.version) <= a.staleness for r in got.responses), "the bound is exceeded"
            self.dropped += len(self.groups[got.index].responses) - len(got.responses)
        assert a.dropped.responses - dropped <= len(ready) * 3
        self.admit()
        return got is not None

    def publish(self) -> None:
        while self.take():
            pass
        a = self.admission
        if not a.complete or a.version == a.steps:
            return
        step = a.version + 1
        if step in self.trained_once:
            assert self.taken == self.trained_once[step], f"step {step} was trained with another batch before"
        self.batches[step] = self.taken
        if self.taken:  # the controller ends a run before it trains on an empty batch, so there is no empty plan
            self.trained_once[step] = self.taken
        if self.choose([True, False, False]):
            self.checkpoints.append(Saved(step, a.next_task, a.open_tasks))
        for _ in range(self.choose([0, 0, 1, 2])):  # generation goes on during the update
            getattr(self, self.choose(["finish", "drop", "dismiss"]))()
        # Whatever was measured in the step, the lead that follows from it must break no rule.
        missing = self.choose([0, 0, 0, 1, a.batch])
        spare = self.choose([0, a.ready, a.ready, 4 * a.batch])
        a.lead.end_step(spare=spare, missing=missing, wait_s=float(missing), train_s=1.0)
        a.publish()
        for task, _ in self.taken:
            self.fates[task] = "trained"
        self.taken = []
        self.admit()

    def restart(self) -> None:
        """Fall back to the last checkpoint, or to one before it."""
        saved = self.choose([*self.checkpoints[-2:], self.checkpoints[-1]])
        self.checkpoints = [c for c in self.checkpoints if c.version <= saved.version]
        self.batches = {step: batch for step, batch in self.batches.items() if step <= saved.version}
        trained = {task for batch in self.batches.values() for task, _ in batch}
        self.admission = Admission(**self.options)
        gap = next(step for step in range(saved.version + 1, self.admission.steps + 2) if step not in self.trained_once)
        self.trained_once = {step: batch for step, batch in self.trained_once.items() if step < gap}
        planned = {step: [task for task, _ in batch] for step, batch in self.trained_once.items()}
        self.admission.restore(
            version=saved.version, next_task=saved.next_task, open_tasks=saved.open_tasks, planned=planned
        )
        self.taken = []
        next_task = self.admission.next_task
        self.fates = {t: "trained" if t in trained else f for t, f in self.fates.items() if t < next_task}
        for task in self.admission.open_tasks:
            assert task not in trained
            self.fates[task] = "open"
        self.admit()

    # What always holds.

    def check(self) -> None:
        a = self.admission
        a.check()
        assert set(self.fates) == set(range(a.next_task)), "every task below next_task was admitted"
        assert set(a.open_tasks) == {*self._of("open"), *self._of("ready")}, "a task is lost"
        assert a.taken == [task for task, _ in self.taken]
        used = [id for batch in [*self.batches.values(), self.taken] for _, ids in batch for id in ids]
        assert len(used) == len(set(used)), "a response is trained on twice"

    def run_to_end(self) -> None:
        """From here on every task finishes with the current version: the run must end."""
        a = self.admission
        for _ in range(20 * (a.next_task + a.steps * a.batch * (a.staleness + 2))):
            if self.admission.version == a.steps:
                return
            for task in self._running():
                self.groups.setdefault(task, group(task, self.admission.version))
                self._finish(task, informative=True)
            self.publish()
            self.check()
        pytest.fail(f"the gate is deadlocked: {vars(self.admission)}")


@st.composite
def worlds(draw: st.DrawFn, **fixed: Any) -> World:
    options = {
        "batch": draw(st.integers(1, 4)), "steps": draw(st.integers(1, 8)), "staleness": draw(st.integers(0, 4)),
        "max_draws": draw(st.integers(1, 3)), "in_order": draw(st.booleans()),
    }  # fmt: skip
    return World(lambda items: draw(st.sampled_from(items)), **{**options, **fixed})


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_bound_holds_and_nothing_is_lost_or_taken_twice(data: st.DataObject) -> None:
    world = data.draw(worlds())
    world.choose = lambda items: data.draw(st.sampled_from(items))
    for _ in range(data.draw(st.integers(1, 40))):
        world.step()
    world.run_to_end()


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_long_random_runs(staleness: int, seed: int) -> None:
    world = World(random.Random(seed).choice, batch=5, steps=40, staleness=staleness, max_draws=2)
    for _ in range(1500):
        world.step()
    world.run_to_end()
    assert world.dropped > 5


def rounds(batch: int, max_draws: int, skipped: set[int], dull: set[int], first: int) -> tuple[list[int], int]:
    """Drawing in rounds: every round draws what the batch lacks after the round before. Returns the batch and the next
    task."""
    kept, drawn = list[int](), 0
    while len(kept) < batch and drawn < max_draws * batch:
        count = min(batch - len(kept), max_draws * batch - drawn)
        kept += [t for t in range(first + drawn, first + drawn + count) if t not in skipped | dull]
        drawn += count
    return kept, first + drawn


@given(
    batch=st.integers(1, 5), max_draws=st.integers(1, 3), in_order=st.booleans(), data=st.data(),
    dull=st.sets(st.integers(0, 40)), skipped=st.sets(st.integers(0, 40), max_size=8),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_staleness_0_trains_on_the_same_tasks_as_drawing_in_rounds(
    batch: int, max_draws: int, in_order: bool, data: st.DataObject, dull: set[int], skipped: set[int]
) -> None:
    a, first = Admission(batch=batch, steps=3, max_draws=max_draws, in_order=in_order), 0
    for version in range(3):
        expected, next_task = rounds(batch, max_draws, skipped, dull, first)
        opened = admit(a)
        assert opened == list(range(first, first + batch)), "exactly one batch when its version is published"
        opened, taken = set(opened), list[int]()
        while not a.complete:
            while (got := a.take()) is not None:
                taken.append(got.index)
            if opened:
                index = data.draw(st.sampled_from(sorted(opened)))
                opened.remove(index)
                if index in skipped:
                    a.dismiss(index)
                else:
                    a.finish(group(index, version), informative=index not in dull)
                opened.update(admit(a))
        assert not opened
        assert sorted(taken) == expected
        assert not in_order or taken == expected
        assert a.next_task == next_task
        first = next_task
        a.publish()
    assert admit(a) == [], "the run is over"


def test_oldest_group_is_taken_first() -> None:
    a = Admission(batch=3, steps=9, staleness=4)
    a.restore(version=4, next_task=0)
    admit(a)
    for index, oldest in [(0, 4), (5, 1), (2, 3), (7, 1), (1, 2)]:
        a.finish(group(index, oldest, 4))
    order = [got.index for _ in range(3) if (got := a.take())]
    assert order == [5, 7, 1]
    assert a.complete
    assert a.take() is None, "the batch is complete"


def test_group_is_trained_without_its_responses_that_are_too_old() -> None:
    a = Admission(batch=1, steps=9, staleness=1)
    a.restore(version=5, next_task=0)
    admit(a)
    a.finish(group(0, 3, 4, 5, 2))
    got = a.take()
    assert got is not None
    assert [r.id for r in got.responses] == ["0/1", "0/2"]
    assert (a.dropped.responses, a.dropped.tokens) == (2, 4)
    a.publish()
    assert a.dropped.responses == 0, "counted for every step"


def test_gate_goes_on_while_every_response_is_too_old() -> None:
    """All workers stay on version 0. As soon as one loads a newer version, the run goes on."""
    a = Admission(batch=2, steps=6, staleness=1)
    a.restore(version=3, next_task=0)
    for _ in range(500):
        tasks = admit(a)
        assert len(tasks) == 4, "what was dropped makes room for as many tasks that start now"
        for index in tasks[:2]:
            a.drop(index)
        for index in tasks[2:]:
            a.finish(group(index, 0, 1))
        assert a.take() is None
        assert not a.complete
    assert a.dropped.responses == 2000
    for index in admit(a):
        a.finish(group(index, 3))
    assert a.take()
    assert a.take()
    assert a.complete


@pytest.mark.parametrize("eta", [0, 1, 3])
def test_step_continues_with_the_groups_it_has_if_the_batch_cannot_be_filled(eta: int) -> None:
    """In no group do rewards differ. The number of draws for one batch is limited."""
    a, drawn = Admission(batch=4, steps=50, staleness=eta, max_draws=3), 0
    while not a.complete:
        tasks = admit(a)
        drawn += len(tasks)
        for index in tasks:
            a.finish(group(index, 0), informative=False)
    assert drawn == (3 + eta) * 4
    assert a.take() is None
    assert a.taken == []
    a.publish()
    assert len(admit(a)) == (eta + 1) * 4, "the next step may draw again"


def test_run_ends_without_tasks_that_no_step_can_use() -> None:
    a, drawn = Admission(batch=3, steps=5, staleness=2), 0
    while a.version < 5:
        for index in admit(a):
            drawn += 1
            a.finish(group(index, a.version))
        while a.take():
            pass
        assert a.complete
        a.publish()
    assert drawn == 15
    assert a.open_tasks == ()


def test_planned_step_gets_the_groups_that_it_had_in_the_same_order() -> None:
    """Also a group that is not informative any more, and only groups that it had."""
    a = Admission(batch=2, steps=9, staleness=1)
    a.restore(version=3, next_task=6, open_tasks=(4,), planned={3: [1, 2], 4: [7, 4], 5: [6, 9]})
    assert admit(a) == [4, 6, 7, 8, 9], "all tasks up to the last one that was trained on, before new ones"
    a.finish(group(8, 2))
    a.finish(group(6, 3))
    a.finish(group(4, 2), informative=False)
    assert a.take() is None, "task 7 comes first"
    a.finish(group(7, 3))
    assert [got.index for _ in range(2) if (got := a.take())] == [7, 4]
    assert a.complete
    a.publish()
    a.dismiss(9)  # it cannot be had any more
    assert [got.index for _ in range(2) if (got := a.take())] == [6]
    assert a.complete, "a task that is gone is not waited for"
    a.publish()
    got = a.take()
    assert got is None, "task 8 is too old by now"
    assert a.dropped.responses == 1
    a.check()


def test_plan_does_not_depend_on_when_completeness_is_asked_for() -> None:
    a = Admission(batch=1, steps=9, staleness=1)
    a.restore(version=3, next_task=6, planned={4: [6]})
    assert not a.complete
    admit(a)
    a.finish(group(6, 3))
    got = a.take()
    assert got is not None
    assert got.index == 6


def test_plan_with_a_gap_is_not_waited_for() -> None:
    """Part of the journal was lost. Later plans would hold back groups that the step without a plan needs."""
    a = Admission(batch=1, steps=20, staleness=1)
    a.restore(version=3, next_task=6, planned={5: [6], 6: [7], 7: [8]})
    for index in admit(a):
        a.finish(group(index, 3))
    got = a.take()
    assert got is not None
    assert a.complete


def test_tokens_that_are_newer_than_the_trainer_are_not_trained_on() -> None:
    """The trainer fell back behind a response that the journal has, and part of the journal is lost."""
    a = Admission(batch=1, steps=20, staleness=1)
    a.restore(version=3, next_task=6, open_tasks=(4, 5))
    admit(a)
    a.finish(Group(index=4, task=Task(id="4", prompt=""), responses=(response(4, 0, [3, 5]), response(4, 1, [3]))))
    got = a.take()
    assert got is not None
    assert [r.id for r in got.responses] == ["4/1"]
    assert (a.dropped.responses, a.too_new) == (0, 1), "it is not too old"
    a.publish()
    assert a.too_new == 0, "counted for every step"


def test_taking_is_fast_with_thousands_of_ready_groups() -> None:
    """A step of the largest batches must not take seconds of the event loop."""
    n = 4000
    a = Admission(batch=n, steps=9, staleness=2)
    a.restore(version=2, next_task=0, planned={3: list(range(0, 2 * n, 2))})
    groups = {index: group(index, index % 3) for index in admit(a)}
    began = time.process_time()
    for complete in groups.values():
        a.finish(complete)
    for _ in range(3):
        while a.take():
            assert len(a.taken) <= n
        if a.complete:
            a.publish()
        admit(a)
    took_s = time.process_time() - began
    assert took_s < 2.0, f"{took_s:.1f} s"


def test_check_finds_every_broken_rule() -> None:
    def broken(how: Callable[[Admission], object]) -> None:
        a = Admission(batch=2, steps=9, staleness=1)
        for index in admit(a):
            a.finish(group(index, 0)) if index else None
        a.take()
        a.check()
        how(a)
        with pytest.raises(AssertionError):
            a.check()

    broken(lambda a: a._open.update({a.taken[0]: 0}))
    broken(lambda a: a._again.append(0))
    broken(lambda a: a._open.update({99: 0}))
    broken(lambda a: a.taken.extend(set(a._ready) | {0}) or a._ready.clear() or a._open.clear())


@given(
    batch=st.integers(1, 4), bound=st.integers(0, 4), steps=st.integers(1, 12), seed=st.integers(0, 1 << 30),
)  # fmt: skip
@settings(deadline=None, max_examples=200)
def test_no_group_is_overtaken_until_it_is_too_old(batch: int, bound: int, steps: int, seed: int) -> None:
    """Responses start at the version at which their task was admitted, or later, and take any time: none is dropped,
    and the trainer never waits while it could take a group without harm."""
    rng = random.Random(seed)
    a = Admission(batch=batch, steps=steps, staleness=bound)
    queued: list[int] = []
    running: list[tuple[int, int]] = []
    trained = 0
    while a.version < steps:
        queued += admit(a)
        while a.take() is not None:
            trained += 1
        assert a.dropped.responses == 0
        if a.complete:
            a.publish()
            a.not_begun(queued)
        elif queued and (not running or rng.random() < 0.5):
            running.append((queued.pop(0), a.version))
        else:
            assert running, "the trainer waits, and nothing is being generated"
            index, version = running.pop(rng.randrange(len(running)))
            a.finish(group(index, rng.randint(version, a.version)))
        a.check()
    assert trained == steps * batch
