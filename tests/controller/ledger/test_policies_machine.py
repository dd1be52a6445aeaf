"""The ledger and the journal with several policies, under any order of events: every token belongs to its response's
policy, in a version that this policy's window allowed and its worker held; and what any checkpoint needs can be read
back, whatever other policies have saved."""

from __future__ import annotations

import tempfile
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.fleets.restarts import abandon_journal
from windfall.controller.assembly import ControllerLife, _lowest_task
from windfall.controller.ledger.episode import Episode, Malformed
from windfall.controller.ledger.journal import Journal
from windfall.controller.ledger.journal_format import TokenRun
from windfall.controller.ledger.ledger import Ledger
from windfall.link.messages import Tokens
from windfall.training import CheckpointState
from windfall.types import Sampling

START = CheckpointState(step=0, next_task=0)
POLICIES, WORKERS, STALENESS = ("a", "b"), ("v", "w"), {"a": 0, "b": 2}
policies, workers = st.sampled_from(POLICIES), st.sampled_from(WORKERS)


class PoliciesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.opened = Ledger(), 0
        self.newest = dict.fromkeys(POLICIES, 0)
        self.held = {worker: dict(self.newest) for worker in WORKERS}
        """The version of each policy in the engine of each worker."""
        self.sent: dict[str, list[tuple[str, int]]] = {}
        """By response: policy and version of each token that was accepted."""
        for policy in POLICIES:
            self.ledger.set_window(policy, -STALENESS[policy], 0)

    @rule(policy=policies)
    def open(self, policy: str) -> None:
        self.opened += 1
        id = f"{self.opened}/0"
        self.ledger.open(_episode(id, policy))
        self.sent[id] = []

    @rule(policy=policies, worker=workers)
    def assign(self, policy: str, worker: str) -> None:
        queue, version = self.ledger.queues[policy], self.held[worker][policy]
        while queue and self.newest[policy] - STALENESS[policy] <= version <= self.newest[policy]:
            entry = self.ledger.assign(queue.popleft(), worker, version)
            assert entry.policy == policy

    @rule(worker=workers, count=st.integers(1, 2))
    def frame(self, worker: str, count: int) -> None:
        """All responses of a worker get tokens, in one frame with a version for each policy."""
        entries = [e for e in self.ledger.held(worker) if len(e.episode.tokens) + count <= 6]
        if not entries:
            return
        ends = {n: "length" for n, e in enumerate(entries) if len(e.episode.tokens) + count == 6}
        versions = {policy: self.held[worker][policy] for policy in {e.policy for e in entries}}
        frame = _frame([e.handle for e in entries], [len(e.episode.tokens) for e in entries], count, versions, ends)
        accepted = self.ledger.accept(worker, frame, loaded=self.held[worker])
        for n, entry in enumerate(entries):
            if n in accepted.rows:
                self.sent[entry.episode.id] += [(entry.policy, versions[entry.policy])] * count
            else:
                low, high = self.newest[entry.policy] - STALENESS[entry.policy], self.newest[entry.policy]
                assert not low <= versions[entry.policy] <= high, "a version in the window was refused"

    @precondition(lambda self: any(self.ledger.held(worker) for worker in WORKERS))
    @rule(worker=workers, behind=st.integers(-1, 1))
    def false_versions(self, worker: str, behind: int) -> None:
        """The worker claims versions that it does not hold. None but those that it was given work for count."""
        entries = [e for e in self.ledger.held(worker) if len(e.episode.tokens) < 5]
        lies = {policy: newest - behind for policy, newest in self.newest.items()}
        true, before = self.held[worker], {e.handle: (e.policy, e.version) for e in entries}
        frame = _frame([e.handle for e in entries], [len(e.episode.tokens) for e in entries], 1, lies, {})
        for n in self.ledger.accept(worker, frame, loaded=true).rows:
            policy, given = before[entries[n].handle]
            assert lies[policy] in (given, true[policy]), "the worker does not hold this version"
            self.sent[entries[n].episode.id].append((policy, lies[policy]))

    @rule(worker=workers)
    def unnamed_version(self, worker: str) -> None:
        if held := self.ledger.held(worker):
            before = self.ledger.counts.accepted
            other = next(policy for policy in POLICIES if policy != held[0].policy)
            with pytest.raises(Malformed, match="without its version"):
                self.ledger.accept(worker, _frame([held[0].handle], [len(held[0].episode.tokens)], 1, {other: 0}, {}))
            assert self.ledger.counts.accepted == before

    @rule(policy=policies)
    def publish(self, policy: str) -> None:
        self.newest[policy] += 1
        running = {p: {e.handle for w in WORKERS for e in self.ledger.held(w, p)} for p in POLICIES}
        newest = self.newest[policy]
        canceled = self.ledger.set_window(policy, newest - STALENESS[policy], newest)
        assert {h for handles in canceled.values() for h in handles} <= running[policy], "of this policy only"

    @rule(policy=policies, worker=workers)
    def swap(self, policy: str, worker: str) -> None:
        self.held[worker][policy] = self.newest[policy]

    @rule(worker=workers)
    def lose(self, worker: str) -> None:
        self.ledger.release(worker)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        if ids := sorted(self.ledger.entries):
            self.ledger.withdraw([data.draw(st.sampled_from(ids))])

    @rule()
    def close(self) -> None:
        for id, entry in list(self.ledger.entries.items()):
            if entry.state == "turn":
                self.ledger.close(id)

    @invariant()
    def holds(self) -> None:
        self.ledger.check()
        for id, entry in self.ledger.entries.items():
            versions = [v for v, count in entry.episode.version_runs for _ in range(count)]
            versions += [entry.version] * (len(entry.episode.tokens) - len(versions))
            assert [(entry.policy, version) for version in versions] == self.sent[id]


TestPolicies = PoliciesMachine.TestCase


@dataclass
class Saving:
    """One policy: its trainer's state, and the checkpoint on disk."""

    name: str
    state: CheckpointState = START
    checkpoint: CheckpointState = START
    batches: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The tasks of every step that was trained, also of those that the trainer has lost."""
    on_disk: CheckpointState | None = None
    """The checkpoint, if the current controller has seen it."""


class JournalMachine(RuleBasedStateMachine):
    """Policies save at their own pace, and fall back; the files that no checkpoint needs are removed meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.policies = {name: Saving(name) for name in POLICIES}
        self.opened = self.handle = 0
        self.accepted: dict[str, list[int]] = {}
        """Tokens by segment."""
        self.start()

    def teardown(self) -> None:
        self.journal.close()
        self.folder.cleanup()

    def start(self) -> None:
        """A controller starts, and reads what its trainers' states need."""
        self.journal, self.running, self.handle = Journal(Path(self.folder.name), "s"), dict[str, int](), 0
        states = [p.state for p in self.policies.values()]
        found = self.read(states)
        self.journal.open(sum(s.step for s in states), found)
        self.journal_end = max((int(id.partition("/")[0]) + 1 for id in found.history), default=0)
        for p in self.policies.values():
            p.on_disk = None

    def read(self, states: list[CheckpointState]) -> Any:
        """Read the journal for these states, and check that it has what they need."""
        found = self.journal.read(sum(s.step for s in states), _lowest_task(states))
        assert found.damage is None
        for (name, p), state in zip(self.policies.items(), states, strict=True):
            for task in {*state.open_tasks, *range(state.next_task, self.opened)}:
                for id in (f"{task}/0", f"{task}/0+1"):
                    runs = [run for run in found.history.get(id, []) if isinstance(run, TokenRun)]
                    have = [token for run in runs for token in run.tokens]
                    assert have == self.accepted.get(id, []), f"{name} needs {id}"
            again = {step: tasks for step, tasks in p.batches.items() if step > state.step}
            assert again.items() <= {step: t for (of, step), t in found.trained.items() if of == name}.items()
        return found

    @rule(task=st.integers(0, 30), policy=st.sampled_from((0, 1)), count=st.integers(1, 3))
    def generate(self, task: int, policy: int, count: int) -> None:
        """A worker sends tokens of a task: an open one, or the next."""
        task = min(task, self.opened)
        if task < min(min((*p.state.open_tasks, p.state.next_task)) for p in self.policies.values()):
            return
        self.opened = max(self.opened, task + 1)
        id, name = f"{task}/0" + ("+1" if policy else ""), POLICIES[policy]
        if id not in self.running:
            self.handle += 1
            self.running[id] = self.handle
            self.journal.write_assigned({self.handle: id}, {self.handle: name})
        tokens = self.accepted.setdefault(id, [])
        versions = {name: self.policies[name].state.step}
        self.journal.write_tokens(_frame([self.running[id]], [len(tokens)], count, versions, {}))
        tokens += [7] * count

    @rule(name=policies, data=st.data())
    def train(self, name: str, data: st.DataObject) -> None:
        p = self.policies[name]
        left = sorted({*p.state.open_tasks, *range(p.state.next_task, self.opened)})
        if not left:
            return
        step = p.state.step + 1
        tasks = p.batches.get(step) or tuple(data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True)))
        p.batches[step] = tasks
        self.journal.write_trained(step, tasks, name)
        left = tuple(task for task in left if task not in tasks)
        p.state = CheckpointState(step=step, next_task=self.opened, open_tasks=left)

    @rule(name=policies)
    def save(self, name: str) -> None:
        p = self.policies[name]
        p.checkpoint = p.on_disk = p.state
        episodes = {handle: SimpleNamespace(id=id, policy=POLICIES["+" in id]) for id, handle in self.running.items()}
        entries = {e.id: SimpleNamespace(state="running", handle=h, episode=e) for h, e in episodes.items()}
        life: Any = SimpleNamespace(
            journal=self.journal, trained=self.policies, _journal_end=self.journal_end,
            generation=SimpleNamespace(
                rollout=SimpleNamespace(streams=[]), gate=SimpleNamespace(next_task=self.opened)
            ),
            dispatch=SimpleNamespace(ledger=SimpleNamespace(entries=entries)),
            _journal_damage=SimpleNamespace(saved=lambda step, policy: True),
            events=SimpleNamespace(instant=lambda *args, **more: None),
        )  # fmt: skip
        ControllerLife.rotate_journal(life, p)  # pyright: ignore[reportArgumentType]

    @rule(lost=st.fixed_dictionaries(dict.fromkeys(POLICIES, st.booleans())), controller=st.booleans())
    def restart(self, lost: dict[str, bool], controller: bool) -> None:
        """Trainers are lost, and possibly the controller with them."""
        self.journal.flush()
        for name, p in self.policies.items():
            p.state = p.checkpoint if lost[name] else p.state
        if controller:
            abandon_journal(self.journal)
            self.start()
        else:
            self.running.clear()  # the stream is stopped, and its responses are opened again

    @invariant()
    def checkpoints_are_covered(self) -> None:
        self.journal.flush()
        self.read([p.checkpoint for p in self.policies.values()])


TestJournal = JournalMachine.TestCase
TestJournal.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def _episode(id: str, policy: str) -> Episode:
    return Episode(id=id, prompt=(1,), seed=0, max_tokens=6, sampling=Sampling(), stop=frozenset(), role=policy)


def _frame(handles: list[int], positions: list[int], count: int, versions: dict[str, int], finished: dict) -> Tokens:
    n = count * len(handles)
    return Tokens(
        version=0, handles=tuple(handles), positions=tuple(positions), counts=(count,) * len(handles),
        tokens=array("I", [7] * n).tobytes(), logprobs=array("f", [-1.0] * n).tobytes(), finished=finished,
        versions=versions,
    )  # fmt: skip


def test_vocabularies_are_by_policy() -> None:
    ledger = Ledger()
    ledger.vocabularies |= {"a": 5, "b": 8}
    for policy in POLICIES:
        ledger.open(
            Episode(
                id=f"{policy}/0", prompt=(1,), seed=0, max_tokens=6, sampling=Sampling(), stop=frozenset(), role=policy
            )
        )
        ledger.assign(ledger.queues[policy].popleft(), policy, 0)
    with pytest.raises(Malformed, match="vocabulary of 5"):
        ledger.accept("a", _frame([1], [0], 1, {"a": 0}, {}))
    assert ledger.accept("b", _frame([2], [0], 1, {"b": 0}, {})).tokens == 1
