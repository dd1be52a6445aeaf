"""Every chaos invariant can fail: break the product, and a few seeds detect it."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.trial import trial
from windfall import training
from windfall.controller import assembly
from windfall.controller.assembly import ControllerLife
from windfall.controller.cost.accounts import Accounts
from windfall.controller.directory.directory import Directory
from windfall.controller.generation import PolicyGroups
from windfall.controller.ledger import journal_format
from windfall.controller.ledger.journal import Journal
from windfall.controller.ledger.ledger import Ledger
from windfall.controller.loop import Loop
from windfall.controller.remote_trainer import RemoteTrainer
from windfall.controller.rollout import grading
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.rollout.evaluation import Evaluation
from windfall.controller.rollout.loading import Loading
from windfall.controller.rollout.stream import Rollout, Stream
from windfall.controller.rollout.weight_routes import WeightRoutes
from windfall.controller.scheduling.placement import Placement
from windfall.controller.tasks import admission
from windfall.controller.tasks.admission import Admission
from windfall.controller.tasks.task_gate import TaskGate
from windfall.controller.workers.borrowing import Borrowing
from windfall.controller.workers.members import Members, WorkerState
from windfall.controller.workers.versions import PolicyVersions, VersionWindow
from windfall.envs.failures import EnvFailed
from windfall.envs.grade import Graded
from windfall.training import TrainerLost
from windfall.types import Response

FAULTS, SEEDS = 120, 16
Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch], None]
MUTANTS: dict[str, tuple[Mutant, set[str], int, int]] = {}


def breaks(*invariants: str, seed: int = 0, policies: int = 1) -> Callable[[Mutant], Mutant]:
    """Register a mutant that breaks one of these invariants in a run with this number of policies. `seed` is tried
    first because it is known to detect it."""

    def register(mutant: Mutant) -> Mutant:
        MUTANTS[mutant.__name__] = (mutant, set(invariants), seed, policies)
        return mutant

    return register


@breaks("tokens")
def duplicate_frame_is_accepted_twice(patch: Patch) -> None:
    real = Ledger._tokens_to_skip

    def unusual(self: Ledger, entry: Any, handle: int, position: int, *rest: Any) -> int:
        if entry is not None and entry.version == rest[1] and position < len(entry.episode.tokens):
            return 0
        return real(self, entry, handle, position, *rest)

    patch.setattr(Ledger, "_tokens_to_skip", unusual)


@breaks("tokens")
def gap_is_not_detected(patch: Patch) -> None:
    real = Ledger._tokens_to_skip

    def unusual(self: Ledger, entry: Any, handle: int, position: int, *rest: Any) -> int:
        if entry is not None and entry.version == rest[1] and position > len(entry.episode.tokens):
            return 0
        return real(self, entry, handle, position, *rest)

    patch.setattr(Ledger, "_tokens_to_skip", unusual)


@breaks("tokens")
def response_of_lost_worker_loses_its_last_token(patch: Patch) -> None:
    real = Ledger.release

    def release(self: Ledger, worker: str) -> None:
        lost = self.held(worker)
        real(self, worker)
        for entry in lost:
            episode = entry.episode
            if episode.tokens:
                version, count = episode.version_runs.pop()
                if count > 1:
                    episode.version_runs.append((version, count - 1))
                episode.tokens.pop()
                episode.logprobs.pop()
                entry.recorded -= 1
                self.counts.accepted -= 1

    patch.setattr(Ledger, "release", release)


@breaks("version", "holder", "tokens", "window")
def work_goes_to_workers_that_still_pull(patch: Patch) -> None:
    real = Loading.request

    def request(self: Loading, member: Any, policy: str) -> None:
        real(self, member, policy)
        held = member.held[policy]
        held.version, held.digest = held.requested

    def routable(self: Members, versions: PolicyVersions) -> list[Any]:
        states = (WorkerState.READY, WorkerState.PULLING)
        return [m for m in self.all.values() if m.state in states and m.slots and not m.suspect]

    patch.setattr(Loading, "request", request)
    patch.setattr(Members, "routable", routable)


@breaks("version", "window", seed=26)
def same_version_number_counts_as_same_weights(patch: Patch) -> None:
    """After a fallback, a step is trained again: its version has the same number but maybe other weights."""

    patch.setattr(VersionWindow, "allows", lambda self, version, digest: version in self.digests)


@breaks("again", "journal", seed=1)
def journal_is_not_flushed(patch: Patch) -> None:
    patch.setattr(Journal, "flush", lambda self: None)


@breaks("again", "journal")
def journal_is_read_without_its_last_stretch(patch: Patch) -> None:
    real = journal_format.read_journal

    def read(*args: Any, **options: Any) -> journal_format.JournalContents:
        found = real(*args, **options)
        for entries in found.history.values():
            if entries and isinstance(entries[-1], journal_format.TokenRun) and entries[-1].finish is None:
                entries.pop()
        return found

    patch.setattr(journal_format, "read_journal", read)


@breaks("again", "batch", "journal", seed=5)
def checkpoint_discards_the_whole_journal(patch: Patch) -> None:
    """This includes what the journal has of later steps from before a fallback."""
    real = Journal.rotate

    def rotate(self: Journal, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        for path in self.folder.glob("*.wal"):
            if path != self._path:
                path.unlink()
        assert self._file is not None
        self._file.truncate(0)

    patch.setattr(Journal, "rotate", rotate)


@breaks("batch", "lost", seed=1)
def response_is_left_out_after_a_trainer_was_lost(patch: Patch) -> None:
    attend, forward_backward, connections = RemoteTrainer.attend, RemoteTrainer.forward_backward, Counter[int]()

    async def attended(self: RemoteTrainer, *args: Any) -> None:
        connections[id(self)] += 1
        await attend(self, *args)

    patch.setattr(RemoteTrainer, "attend", attended)

    async def without_the_last(self: RemoteTrainer, samples: Any, loss: Any = None, *, id: str) -> Any:
        again = connections[builtins.id(self)] > 1
        return await forward_backward(self, samples[:-1] if again else samples, loss, id=id)

    patch.setattr(RemoteTrainer, "forward_backward", without_the_last)


@breaks("batch", "version", "bound", "lost", "window", seed=7)
def reconnected_trainer_continues_its_step(patch: Patch) -> None:
    """Accumulated samples are lost with the old link."""
    real, interrupt = RemoteTrainer._ask, PolicyGroups.interrupt

    async def ask(self: RemoteTrainer, message: object, expected: type[Any]) -> Any:
        while True:
            while self._link is None:
                await self._present.wait()
            self._current = self._link
            with contextlib.suppress(TrainerLost):
                return await real(self, message, expected)

    patch.setattr(RemoteTrainer, "_ask", ask)
    patch.setattr(
        PolicyGroups, "interrupt", lambda self, error: isinstance(error, TrainerLost) or interrupt(self, error)
    )
    patch.setattr(Evaluation, "interrupt", lambda self, error: None)


@breaks("missing")
def missing_reward_counts_as_zero(patch: Patch) -> None:
    real = Stream._missing

    def missing(self: Stream, episode: Any, error: Any) -> Any:
        real(self, episode, error)
        return episode.close(0.0)

    patch.setattr(Stream, "_missing", missing)


@breaks("bill", seed=9)
def time_between_links_is_not_billed(patch: Patch) -> None:
    real = Accounts.join

    def join(self: Accounts, now_s: float, worker: str, **options: Any) -> None:
        real(self, now_s, worker, **options)
        self._here[worker].settled.pop("lost", None)

    patch.setattr(Accounts, "join", join)


@breaks("bill", seed=33)
def worker_that_dials_again_early_is_billed_twice(patch: Patch) -> None:
    patch.setattr("windfall.controller.cost.accounts.SAME_START_S", -1.0)


@breaks("bill", seed=8)
def next_controller_bills_everything_again(patch: Patch) -> None:
    real = Accounts.__init__
    patch.setattr(Accounts, "__init__", lambda self, billed_s=0.0, activity=None: real(self))


@breaks("level", seed=1)
def pages_are_never_released(patch: Patch) -> None:
    patch.setattr(Placement, "done_with", lambda self, group, size: None)


@breaks("level", seed=12)
def late_move_is_never_dropped(patch: Patch) -> None:
    """The response ended on its old worker before it could move."""
    real = Placement.done_with

    def done_with(self: Placement, group: str, size: int) -> None:
        targets = self.move_targets.copy()
        real(self, group, size)
        self.move_targets = targets

    patch.setattr(Placement, "done_with", done_with)


@breaks("level")
def prefills_of_a_lost_worker_are_never_dropped(patch: Patch) -> None:
    patch.setattr(Placement, "forget", lambda self, worker: self.speeds.forget(worker))


@breaks("level", seed=25)
def restored_responses_are_never_dropped(patch: Patch) -> None:
    patch.setattr(Rollout, "forget_history", lambda self, needed: None)


@breaks("holder", "tokens", "progress", seed=2)
def lost_worker_keeps_its_work(patch: Patch) -> None:
    patch.setattr(Ledger, "release", lambda self, worker: [])


@breaks("borrowed", seed=11)
def every_lender_is_used(patch: Patch) -> None:
    real = Borrowing.update

    def update(self: Borrowing, here: Any, *args: Any, **more: Any) -> None:
        real(self, here, *args, **more)
        for worker in here:
            worker.in_use = True

    patch.setattr(Borrowing, "update", update)


@breaks("holder")
def silence_is_never_detected(patch: Patch) -> None:
    patch.setattr(Members, "tick", lambda self, now_s, running: [])


@breaks("holder", "weights", seed=3)
def hanging_pull_is_never_detected(patch: Patch) -> None:
    patch.setattr(Members, "_stuck", lambda self, member, now_s: "")


@breaks("weights")
def lost_source_is_still_a_source(patch: Patch) -> None:
    patch.setattr(Directory, "_repair", lambda self, suspects: None)


@breaks("weights")
def importer_is_not_logged(patch: Patch) -> None:
    patch.setattr(Directory, "_log_import", lambda self, *args: None)


@breaks("weights")
def worker_gets_no_files_to_read(patch: Patch) -> None:
    real = WeightRoutes.load
    patch.setattr(WeightRoutes, "load", lambda self, *args: real(self, *args)[:0])


@breaks("no error")
def callback_raises_an_error(patch: Patch) -> None:
    real = Dispatch._schedule

    def settle(self: Dispatch) -> None:
        real(self)
        if self.ledger.counts.moved > 20:
            raise KeyError("unexpected")

    patch.setattr(Dispatch, "_schedule", settle)


@breaks("no error")
def rejection_by_one_worker_ends_the_run(patch: Patch) -> None:
    def rejected_by(self: Dispatch, member: Any, message: Any) -> None:
        for entry in self.ledger.held(member.id):
            if entry.handle == message.handle:
                self._owners[entry.episode.id].rejected(entry.episode.id, message.why)

    patch.setattr(Dispatch, "_rejected_by", rejected_by)


@breaks("progress", seed=3)
def failed_reward_is_never_retried(patch: Patch) -> None:
    async def grade(host: Any, index: int, task: Any, turns: Any, *, timeout_s: float, **_: Any) -> Graded:
        try:
            return Graded(feedback=await host.feedback(index, task, turns, timeout_s), tries=1)
        except EnvFailed as e:
            if "TimeoutError" in e.cause:
                await asyncio.Event().wait()
            return Graded(feedback=None, tries=1, failure=e)

    patch.setattr(grading, "grade", grade)


@breaks("bound", seed=1)
def response_that_is_too_old_is_trained_on(patch: Patch) -> None:
    patch.setattr(admission.Admission, "_must_wait", lambda self, oldest: False)  # else hardly any becomes too old
    patch.setattr(admission, "is_usable", lambda response, version, bound: True)
    patch.setattr(Stream, "expire", lambda self, oldest: None)


@breaks("bound", seed=1)
def trainer_takes_every_token_for_fresh(patch: Patch) -> None:
    patch.setattr(training, "_lag", lambda response, version: None)


@breaks("twice", seed=2)
def trained_tasks_are_open_in_the_checkpoint(patch: Patch) -> None:
    real = Admission.open_tasks.fget
    assert real is not None
    patch.setattr(Admission, "open_tasks", property(lambda self: tuple(sorted({*real(self), *self.taken}))))


@breaks("batch", "bound", "lost", seed=13)
def step_that_is_trained_again_chooses_other_groups(patch: Patch) -> None:
    real = Admission.restore

    def restore(self: Admission, *, planned: Any = None, **state: Any) -> None:
        real(self, **state)

    patch.setattr(Admission, "restore", restore)


@breaks("lost", "batch", seed=2)
def open_tasks_are_forgotten_after_a_restart(patch: Patch) -> None:
    real = Admission.restore

    def restore(self: Admission, *, open_tasks: Any, **state: Any) -> None:
        real(self, open_tasks=[task for task in open_tasks if task % 3], **state)

    patch.setattr(Admission, "restore", restore)


@breaks("lost", "batch", seed=1)
def every_seventh_group_is_forgotten(patch: Patch) -> None:
    real = Admission.finish

    def finish(self: Admission, group: Any, **options: Any) -> None:
        real(self, group, **options)
        if group.index % 7 == 6 and self.staleness:
            self._ready.pop(group.index, None)

    patch.setattr(Admission, "finish", finish)


@breaks("lost", seed=1)
def dropped_response_leaves_its_group(patch: Patch) -> None:
    """The last response of every group is dropped, although it is not too old."""
    real = Admission.take

    def take(self: Admission) -> Any:
        group = real(self)
        if group is None or not self.staleness or len(group.responses) < 2:
            return group
        return dataclasses.replace(group, responses=group.responses[:-1])

    patch.setattr(Admission, "take", take)


@breaks("window", seed=5)
def frame_may_claim_any_version_of_the_window(patch: Patch) -> None:
    real = Ledger.accept
    patch.setattr(Ledger, "accept", lambda self, worker, frame, loaded=None: real(self, worker, frame))


@breaks("again", "journal", seed=1)
def journal_does_not_name_responses_that_run_during_a_checkpoint(patch: Patch) -> None:
    real = Journal.rotate
    patch.setattr(Journal, "rotate", lambda self, step, running, policies, **tasks: real(self, step, {}, {}, **tasks))


@breaks("level")
def gate_admits_two_more_batches(patch: Patch) -> None:
    def capacity(self: Admission) -> int:
        held = len(self._again) + len(self._open) + len(self._ready) + len(self.taken)
        return max(0, (self.staleness + 3) * self.batch - held)

    patch.setattr(Admission, "capacity", property(capacity))


# Several policies.


@breaks("policy", policies=2)
def policy_is_trained_on_whole_responses(patch: Patch) -> None:
    def of(self: Response, policy: str) -> tuple[Response, ...]:
        return tuple(self._of_role(role) for role in dict.fromkeys(segment.role for segment in self.segments))

    patch.setattr(Response, "of", of)


@breaks("twice", seed=18, policies=2)
def task_that_one_policy_needs_again_is_trained_on_by_all(patch: Patch) -> None:
    real = TaskGate.finish

    def finish(self: TaskGate, group: Any, informative: Any) -> Any:
        for a in self.admissions.values():
            if not a.is_held(group.index) and group.index not in a.taken:
                a._open[group.index] = a.version
                a._held[a.version] += 1
        return real(self, group, informative)

    patch.setattr(TaskGate, "finish", finish)


@breaks("bound", seed=1, policies=2)
def lags_are_those_of_the_policy_that_is_ahead(patch: Patch) -> None:
    real = Loop._credit

    def credit(self: Loop, groups: Any) -> Any:
        own, policies = self.state, self._run._life.policies  # pyright: ignore[reportAttributeAccessIssue]
        self.state = max((policy.state for policy in policies.values()), key=lambda state: state.step)
        try:
            return real(self, groups)
        finally:
            self.state = own

    patch.setattr(Loop, "_credit", credit)


@breaks("version", "window", seed=4, policies=2)
def worker_that_has_loaded_one_policy_counts_as_holding_all(patch: Patch) -> None:
    real = Members.loaded

    def loaded(self: Members, id: str, *args: Any) -> None:
        real(self, id, *args)
        for held in self.all[id].held.values():
            held.version, held.digest = held.requested

    patch.setattr(Members, "loaded", loaded)


@breaks("journal", policies=2)
def checkpoint_of_one_policy_removes_what_the_other_needs(patch: Patch) -> None:
    patch.setattr(assembly, "_lowest_task", lambda states: max(min((*s.open_tasks, s.next_task)) for s in states))


@breaks("base", policies=2)
def worker_is_asked_for_policies_of_another_base(patch: Patch) -> None:
    patch.setattr(Dispatch, "_policies_for", lambda self, hello, base: tuple(self.versions))


@breaks("bill", policies=2)
def tokens_are_not_billed_by_policy(patch: Patch) -> None:
    real = Accounts.frame
    patch.setattr(Accounts, "frame", lambda self, now_s, worker, tokens, of=None: real(self, now_s, worker, tokens))


@breaks("bill", seed=1, policies=2)
def process_is_billed_for_each_of_its_policies(patch: Patch) -> None:
    patch.setattr(ControllerLife, "base_of", lambda self, policy: policy)


@pytest.mark.parametrize(
    "name",  # each takes seconds: every third one, and all with `make slow`
    [name if n % 3 == 0 else pytest.param(name, marks=pytest.mark.slow) for n, name in enumerate(MUTANTS)],
)
def test_broken_product_is_detected(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant, invariants, first, policies = MUTANTS[name]
    mutant(monkeypatch)
    for seed in [first, *range(SEEDS)]:
        outcome = trial(seed, faults=FAULTS, folder=tmp_path, policies=policies)
        if outcome.broken is not None:
            assert outcome.broken.invariant in invariants, f"seed {seed}: {outcome.broken}"
            assert outcome.last_events
            return
    pytest.fail(f"{SEEDS} seeds of {FAULTS} faults did not detect it")
