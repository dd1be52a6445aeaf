"""The ledger with several policies, under any order of events: every token belongs to its response's policy, in a
version that this policy's window allowed."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from windfall.controller.ledger.episode import Episode, Malformed
from windfall.controller.ledger.ledger import Ledger
from windfall.link.messages import Tokens
from windfall.types import Sampling

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
        if queue and self.newest[policy] - STALENESS[policy] <= version <= self.newest[policy]:
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
