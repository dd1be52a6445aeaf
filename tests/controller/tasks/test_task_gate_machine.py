"""Several policies over one stream of tasks: each keeps its own bound, trains only on its own tokens, and gets on,
whatever trainers and controllers do. One policy gets exactly what its Admission alone would give it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from windfall.controller.tasks.admission import Admission, staleness
from windfall.controller.tasks.task_gate import TaskGate
from windfall.training import CheckpointState
from windfall.types import Group, Response, Task, policy_of

START = CheckpointState(step=0, next_task=0)
NAMES = ("solver", "verifier", "critic")


def response(index: int, sibling: int, role: str, versions: list[int]) -> Response:
    n = len(versions)
    return Response(
        id=f"{index}/{sibling}", prompt=(1,), tokens=(7,) * n, logprobs=(-1.0,) * n, sampled=(True,) * n,
        versions=tuple(versions), finish="stop", reward=1.0, role=role,
    )  # fmt: skip


def joined(segments: list[Response]) -> Response:
    first, *more = segments
    return Response(
        **{name: getattr(first, name) for name in first.__slots__ if name not in ("more", "rewards")},
        more=tuple(more), rewards=((first.role, 1.0),),
    )  # fmt: skip


@dataclass
class Policy:
    """One policy of the run: what its trainer and the disk know."""

    options: dict[str, Any]
    state: CheckpointState = START
    saved: CheckpointState = START
    batches: dict[int, list[int]] = field(default_factory=dict)
    """By step: the tasks it was trained on, when it was trained first."""
    taken: list[int] = field(default_factory=list)
    history: dict[int, list[int]] = field(default_factory=dict)
    """The batches that its weights have seen."""


class Run(RuleBasedStateMachine):
    @initialize(data=st.data(), count=st.integers(1, 3), synchronous=st.booleans())
    def begin(self, data: st.DataObject, count: int, synchronous: bool) -> None:
        draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
        self.policies = {
            name: Policy({
                "batch": draw(1, 4), "steps": 4, "staleness": 0 if synchronous else draw(0, 2),
                "max_draws": draw(1, 3), "in_order": data.draw(st.booleans()),
            })
            for name in NAMES[:count]
        }  # fmt: skip
        self.tokens: dict[tuple[str, int], list[int]] = {}
        """The journal: by policy and task, the versions of its tokens."""
        self.fates: dict[int, tuple[dict[str, bool], bool]] = {}
        """By task: which policies speak, whether they can learn from it, and whether the environment has it
        and its prompt is not skipped."""
        self.streaming: set[int] = set()
        self.admissions: dict[str, Admission] = {}
        self.restart(dict.fromkeys(self.policies, False))

    def restart(self, lost: dict[str, bool]) -> None:
        """A controller starts. The trainers that are lost start from their checkpoints."""
        self.admissions = {name: Admission(**p.options) for name, p in self.policies.items()}
        self.gate = TaskGate(self.admissions)
        for name in self.policies:
            self.restore(name, lost=lost[name])
        self.streaming = set()
        self.gate.reopen()

    def restore(self, name: str, *, lost: bool) -> None:
        p, a = self.policies[name], self.admissions[name]
        p.state = p.saved if lost else p.state
        p.taken = []
        p.history = {step: tasks for step, tasks in p.history.items() if step <= p.state.step}
        a.restore(
            version=p.state.step, next_task=p.state.next_task, open_tasks=p.state.open_tasks,
            planned={step: tuple(tasks) for step, tasks in p.batches.items() if tasks and a.staleness},
            oldest={task: min(versions) for (of, task), versions in self.tokens.items() if of == name},
        )  # fmt: skip

    # What the run does.

    @rule()
    def open(self) -> None:
        rooms = {name: (a.next_task, a.capacity) for name, a in self.admissions.items() if not a.done}
        first, tasks = self.gate.next_task, self.gate.open()
        assert tasks == sorted(set(tasks))
        assert not self.streaming & set(tasks)
        assert all(self.gate.next_task - first <= max(0, n + room - first) for n, room in rooms.values())
        for task in tasks:
            assert all(a.is_open(task) or not a.will_admit()(task) for a in self.admissions.values())
            for name, a in self.admissions.items():
                if a.is_open(task) and self.speaks(task, name):
                    self.tokens.setdefault((name, task), [a.version])
        self.streaming.update(tasks)

    def speaks(self, task: int, name: str) -> bool:
        return task not in self.fates or name in self.fates[task][0]

    def fate(self, data: st.DataObject, task: int) -> tuple[dict[str, bool], bool]:
        if task not in self.fates:
            fates = {n: data.draw(st.sampled_from([None, True, True, True, False])) for n in self.policies}
            speak = {n: informative for n, informative in fates.items() if informative is not None}
            self.fates[task] = speak, data.draw(st.integers(0, 9)) > 0
        return self.fates[task]

    @precondition(lambda self: self.streaming)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self._finish(data, data.draw(st.sampled_from(sorted(self.streaming))))

    def _finish(self, data: st.DataObject, task: int) -> None:
        self.streaming.remove(task)
        speak, exists = self.fate(data, task)
        had_open = [name for name, a in self.admissions.items() if a.is_open(task)]
        assert had_open, "a task was generated for no policy"
        if not exists:
            (self.gate.dismiss if task % 2 else self.gate.skip)(task)
            return
        segments = []
        for name in speak:
            versions, a = self.tokens.setdefault((name, task), [self.admissions[name].version]), self.admissions[name]
            if name in had_open:
                if a.staleness == 0:
                    assert set(versions) == {a.version}, "with staleness 0, a task has tokens of one version"
                elif versions[-1] < a.version and len(versions) == 1:
                    versions.append(a.version)
            segments.append(response(task, 0, name, versions))
        group = Group(index=task, task=Task(id="t", prompt=""), responses=(joined(segments),) if segments else ())
        parts = self.gate.finish(group, lambda name, part: speak[name])
        assert set(parts) == set(had_open)
        for name, part in parts.items():
            assert bool(part.responses) == (name in speak)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        self._take(data.draw(st.sampled_from(sorted(self.policies))))

    def _take(self, name: str) -> bool:
        p, a = self.policies[name], self.admissions[name]
        group = None if a.done else a.take()
        if group is None:
            return False
        for r in group.responses:
            assert {policy_of(segment.role) for segment in r.segments} == {name}, "tokens of another policy"
            assert 0 <= staleness(r, a.version) <= a.staleness, "the bound is exceeded"
        assert group.index not in [t for tasks in p.history.values() for t in tasks], "trained on twice"
        p.taken.append(group.index)
        return True

    @rule(data=st.data(), save=st.booleans())
    def train(self, data: st.DataObject, save: bool) -> None:
        self._train(data.draw(st.sampled_from(sorted(self.policies))), save)

    def _train(self, name: str, save: bool) -> bool:
        while self._take(name):
            pass
        p, a = self.policies[name], self.admissions[name]
        if a.done or not a.complete:
            return False
        step = a.version + 1
        if p.batches.get(step):
            assert p.taken == p.batches[step] or (a.staleness == 0 and sorted(p.taken) == sorted(p.batches[step]))
        p.history[step] = p.batches[step] = p.taken
        p.state = CheckpointState(step=step, next_task=a.next_task, open_tasks=a.open_tasks)
        p.taken = []
        a.publish()
        if a.staleness:
            a.not_begun(task for task in self.gate.waiting() if (name, task) not in self.tokens)
        if save:
            p.saved = p.state
        return True

    @rule(data=st.data(), lost=st.booleans())
    def replace_trainer(self, data: st.DataObject, lost: bool) -> None:
        self.restore(data.draw(st.sampled_from(sorted(self.policies))), lost=lost)
        self.streaming = set()
        self.gate.reopen()

    @rule(data=st.data())
    def replace_controller(self, data: st.DataObject) -> None:
        self.restart({name: data.draw(st.booleans()) for name in self.policies})

    # What always holds.

    @invariant()
    def consistent(self) -> None:
        if self.admissions:
            self.gate.check()
            assert all(self.gate.needed(task) for task in self.streaming)
            assert all(a.next_task <= self.gate.next_task for a in self.admissions.values())

    def teardown(self) -> None:
        """From here on nothing is lost: every policy makes all its steps."""
        if not getattr(self, "policies", None):
            return
        for _ in range(1000):
            self.open()
            for task in sorted(self.streaming):
                self.fates.setdefault(task, (dict.fromkeys(self.policies, True), True))
                self._finish(None, task)  # pyright: ignore[reportArgumentType]
                self.open()
            trained = [name for name in self.policies if self._train(name, save=True)]
            if all(a.done for a in self.admissions.values()):
                return
            assert trained or self.streaming or self.gate.open() == [], "lost a task"
        states = {name: vars(a) for name, a in self.admissions.items()}
        raise AssertionError(f"the run is stuck: {states}")


class AloneAdmission(Admission):
    """One policy, as before there was a gate."""

    def admit(self) -> list[int]:
        new, again = self.capacity, len(self._again)
        if self.staleness == 0 and not self._planned:
            again = max(0, min(again, self.batch - len(self._open) - len(self._ready) - len(self.taken)))
        tasks = [*(self._again.popleft() for _ in range(again)), *range(self.next_task, self.next_task + new)]
        self.next_task += new
        versions = {task: min(self.version, self._restored.pop(task, self.version)) for task in tasks}
        self._open |= versions
        self._held.update(versions.values())
        if self._in_order:
            self._order.extend(tasks)
        return tasks


class OnePolicy(RuleBasedStateMachine):
    @initialize(batch=st.integers(1, 4), staleness=st.integers(0, 2), draws=st.integers(1, 3), in_order=st.booleans())
    def begin(self, batch: int, staleness: int, draws: int, in_order: bool) -> None:
        options: dict[str, Any] = {
            "batch": batch, "steps": 5, "staleness": staleness, "max_draws": draws, "in_order": in_order
        }  # fmt: skip
        self.alone, self.gated = AloneAdmission(**options), Admission(**options)
        self.gate = TaskGate({"": self.gated})
        self.open_tasks: set[int] = set()
        self.plans: dict[int, tuple[int, ...]] = {}
        self.states = [START]

    @rule()
    def admit(self) -> None:
        tasks = self.alone.admit()
        assert self.gate.open() == tasks
        self.open_tasks |= set(tasks)

    @precondition(lambda self: self.open_tasks)
    @rule(data=st.data(), fate=st.sampled_from(["finish", "finish", "replace", "drop", "dismiss"]))
    def end(self, data: st.DataObject, fate: str) -> None:
        task = data.draw(st.sampled_from(sorted(self.open_tasks)))
        self.open_tasks.remove(task)
        oldest = data.draw(st.integers(0, self.alone.version))
        responses = () if fate == "drop" else (response(task, 0, "", [oldest, self.alone.version]),)
        group = Group(index=task, task=Task(id="t", prompt=""), responses=responses)
        if fate == "dismiss":
            self.alone.dismiss(task)
            self.gate.dismiss(task)
        else:
            if fate == "drop":
                self.alone.drop(task)
            else:
                self.alone.finish(group, informative=fate == "finish")
            assert self.gate.finish(group, lambda name, part: fate == "finish") == {"": group}

    @rule(save=st.booleans())
    def train(self, save: bool) -> None:
        while (group := self.alone.take()) is not None:
            assert self.gated.take() == group
        assert self.gated.take() is None
        if self.alone.done or not self.alone.complete:
            return
        step = self.alone.version + 1
        if self.alone.taken:
            self.plans[step] = tuple(self.alone.taken)
        if save:
            a = self.alone
            self.states.append(CheckpointState(step=step, next_task=a.next_task, open_tasks=a.open_tasks))
        self.alone.publish()
        self.gated.publish()

    @precondition(lambda self: self.open_tasks)
    @rule(data=st.data())
    def not_begun(self, data: st.DataObject) -> None:
        tasks = data.draw(st.lists(st.sampled_from(sorted(self.open_tasks)), unique=True))
        self.alone.not_begun(tasks)
        self.gated.not_begun([*tasks, 10**6])  # one that waits for nothing here

    @rule(data=st.data(), planned=st.booleans(), change=st.booleans())
    def restart(self, data: st.DataObject, planned: bool, change: bool) -> None:
        state = data.draw(st.sampled_from(self.states))
        self.states = [s for s in self.states if s.step <= state.step]
        if change:  # the run is resumed with another bound
            self.alone.staleness = self.gated.staleness = data.draw(st.integers(0, 2))
        for a in (self.alone, self.gated):
            a.restore(
                version=state.step, next_task=state.next_task, open_tasks=state.open_tasks,
                planned=self.plans if planned else {}, oldest={3: 0},
            )  # fmt: skip
        self.gate.reopen()
        self.open_tasks = set()

    @invariant()
    def same(self) -> None:
        if hasattr(self, "alone"):
            for name in ("next_task", "capacity", "complete", "open_tasks", "closed", "taken", "_open", "_again"):
                assert getattr(self.alone, name) == getattr(self.gated, name), name
            self.gate.check()


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestOnePolicy = OnePolicy.TestCase
TestOnePolicy.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
