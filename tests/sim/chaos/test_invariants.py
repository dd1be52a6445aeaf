"""Every rule of chaos can fail: break the product, and a few seeds find it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from windfall.cost.accounts import Accounts
from windfall.envs.failures import EnvFailed
from windfall.envs.grade import Graded
from windfall.ledger import journal_reader
from windfall.ledger.journal import Journal
from windfall.ledger.ledger import Ledger
from windfall.rollout import groups as manager
from windfall.rollout.dispatch import Dispatch
from windfall.rollout.groups import Rollout
from windfall.scheduling.members import Members, WorkerState
from windfall.scheduling.placement import Placement
from windfall.sim.chaos.trial import trial
from windfall.train.base import TrainerLost
from windfall.train.remote import RemoteTrainer

FAULTS, SEEDS = 120, 16
Patch = pytest.MonkeyPatch
Broken = Callable[[Patch], None]
MUTANTS: dict[str, tuple[Broken, set[str], int]] = {}


def breaks(*rules: str, seed: int = 0) -> Callable[[Broken], Broken]:
    """`seed`: the first that is tried, since it is known to find this; others would, too."""

    def keep(mutant: Broken) -> Broken:
        MUTANTS[mutant.__name__] = (mutant, set(rules), seed)
        return mutant

    return keep


@breaks("tokens")
def a_frame_that_comes_twice_is_taken_twice(patch: Patch) -> None:
    real = Ledger._tokens_to_skip

    def unusual(self: Ledger, entry: Any, handle: int, position: int, *rest: Any) -> int:
        if entry is not None and entry.version == rest[1] and position < len(entry.episode.tokens):
            return 0
        return real(self, entry, handle, position, *rest)

    patch.setattr(Ledger, "_tokens_to_skip", unusual)


@breaks("tokens")
def a_gap_is_not_noticed(patch: Patch) -> None:
    real = Ledger._tokens_to_skip

    def unusual(self: Ledger, entry: Any, handle: int, position: int, *rest: Any) -> int:
        if entry is not None and entry.version == rest[1] and position > len(entry.episode.tokens):
            return 0
        return real(self, entry, handle, position, *rest)

    patch.setattr(Ledger, "_tokens_to_skip", unusual)


@breaks("tokens")
def a_lost_workers_response_loses_its_last_token(patch: Patch) -> None:
    real = Ledger.release

    def release(self: Ledger, worker: str) -> list[str]:
        ids = real(self, worker)
        for id in ids:
            episode = self.entries[id].episode
            if episode.tokens:
                version, count = episode.version_runs.pop()
                if count > 1:
                    episode.version_runs.append((version, count - 1))
                episode.tokens.pop()
                episode.logprobs.pop()
                self.entries[id].recorded -= 1
                self.counts.accepted -= 1
        return ids

    patch.setattr(Ledger, "release", release)


@breaks("version", "holder")
def work_goes_to_whoever_is_ready(patch: Patch) -> None:
    def routable(self: Members, version: int, digest: str) -> list[Any]:
        return [
            m
            for m in self.all.values()
            if m.state in (WorkerState.READY, WorkerState.PULLING) and m.slots and not m.suspect
        ]

    patch.setattr(Members, "routable", routable)


@breaks("version", seed=20)
def the_same_number_is_taken_for_the_same_weights(patch: Patch) -> None:
    """After a fall back a step is trained again: the version's number is the same, its weights need not be."""

    real = Members.outdated

    def routable(self: Members, version: int, digest: str) -> list[Any]:
        return [m for m in self.all.values() if m.state is WorkerState.READY and not m.suspect and m.version == version]

    def outdated(self: Members, version: int, digest: str, *, needed: bool) -> list[Any]:
        lacks = real(self, version, digest, needed=needed)
        return [m for m in lacks if m.state is not WorkerState.READY or m.version != version]

    patch.setattr(Members, "routable", routable)
    patch.setattr(Members, "outdated", outdated)


@breaks("again", seed=1)
def the_journal_is_not_flushed(patch: Patch) -> None:
    patch.setattr(Journal, "flush", lambda self: None)


@breaks("again")
def the_journal_is_read_without_its_last_stretch(patch: Patch) -> None:
    real = journal_reader._Rows.merge

    def settle(self: Any) -> None:
        real(self)
        for said in self._history.values():
            if said and isinstance(said[-1], journal_reader.TokenRun) and said[-1].finish is None:
                said.pop()

    patch.setattr(journal_reader._Rows, "merge", settle)


@breaks("again", "batch", seed=5)
def a_checkpoint_makes_the_whole_journal_void(patch: Patch) -> None:
    """Also what is known of later steps, from before a fall back."""
    real = Journal.rotate

    def rotate(self: Journal, step: int) -> None:
        real(self, step)
        for path in self.folder.glob("*.wal"):
            if path != self._path:
                path.unlink()
        assert self._file is not None
        self._file.truncate(0)

    patch.setattr(Journal, "rotate", rotate)


@breaks("batch", seed=1)
def a_response_is_not_trained_on_after_a_trainer_was_lost(patch: Patch) -> None:
    attend, accumulate, seen = RemoteTrainer.attend, RemoteTrainer.accumulate, Counter[int]()

    async def attended(self: RemoteTrainer, *said: Any) -> None:
        seen[id(self)] += 1
        await attend(self, *said)

    patch.setattr(RemoteTrainer, "attend", attended)
    patch.setattr(RemoteTrainer, "accumulate", lambda self, s: accumulate(self, s[:-1] if seen[id(self)] > 1 else s))


@breaks("batch", "version", seed=4)
def a_trainer_that_came_back_is_asked_to_go_on(patch: Patch) -> None:
    """What was accumulated is lost with the old link."""
    real, interrupt = RemoteTrainer._ask, Rollout.interrupt

    async def ask(self: RemoteTrainer, message: object, expected: type[Any]) -> Any:
        while True:
            while self._link is None:
                await self._here.wait()
            self._asked = self._link
            with contextlib.suppress(TrainerLost):
                return await real(self, message, expected)

    patch.setattr(RemoteTrainer, "_ask", ask)
    patch.setattr(Rollout, "interrupt", lambda self, error=None: error or interrupt(self))


@breaks("missing")
def a_missing_reward_is_a_zero(patch: Patch) -> None:
    real = Rollout._missing

    def missing(self: Rollout, episode: Any, error: str) -> Any:
        real(self, episode, error)
        return episode.close(0.0)

    patch.setattr(Rollout, "_missing", missing)


@breaks("bill", seed=3)
def the_time_away_is_not_billed(patch: Patch) -> None:
    real = Accounts.join

    def join(self: Accounts, now_s: float, worker: str, **said: Any) -> None:
        real(self, now_s, worker, **said)
        self._here[worker].settled.pop("lost", None)

    patch.setattr(Accounts, "join", join)


@breaks("bill", seed=33)
def one_that_dials_again_early_is_billed_twice(patch: Patch) -> None:
    patch.setattr("windfall.cost.accounts.SAME_START_S", -1.0)


@breaks("bill", seed=8)
def the_next_controller_bills_all_again(patch: Patch) -> None:
    real = Accounts.__init__
    patch.setattr(Accounts, "__init__", lambda self, billed_s=0.0: real(self))


@breaks("level", seed=1)
def pages_are_never_forgotten(patch: Patch) -> None:
    patch.setattr(Placement, "done_with", lambda self, groups: None)


@breaks("level")
def a_move_that_came_too_late_is_remembered(patch: Patch) -> None:
    """Of a response that ended where it was."""
    real = Placement.done_with

    def done_with(self: Placement, groups: Any) -> None:
        targets = self._move_targets
        real(self, groups)
        self._move_targets = targets

    patch.setattr(Placement, "done_with", done_with)


@breaks("level")
def what_a_lost_worker_computed_again_is_remembered(patch: Patch) -> None:
    patch.setattr(Placement, "forget", lambda self, worker: self.speeds.forget(worker))


@breaks("level", seed=25)
def the_past_is_never_forgotten(patch: Patch) -> None:
    patch.setattr(Rollout, "load_history", lambda self, found, next_task: setattr(self, "history", found))


@breaks("holder", "tokens", "progress")
def a_lost_worker_keeps_its_work(patch: Patch) -> None:
    patch.setattr(Ledger, "release", lambda self, worker: [])


@breaks("holder")
def silence_is_never_noticed(patch: Patch) -> None:
    patch.setattr(Members, "tick", lambda self, now_s: [])


@breaks("holder")
def a_pull_that_hangs_is_never_noticed(patch: Patch) -> None:
    patch.setattr(Members, "_stuck", lambda self, member, now_s: "")


@breaks("no error")
def an_error_in_a_callback(patch: Patch) -> None:
    real = Dispatch._schedule

    def settle(self: Dispatch) -> None:
        real(self)
        if self.ledger.counts.moved > 20:
            raise KeyError("nobody expected it")

    patch.setattr(Dispatch, "_schedule", settle)


@breaks("no error")
def one_worker_that_rejects_ends_the_run(patch: Patch) -> None:
    def rejected_by(self: Dispatch, member: Any, message: Any) -> None:
        for entry in self.ledger.held(member.id):
            if entry.handle == message.handle:
                self._rejected(entry.episode.id, message.why)

    patch.setattr(Dispatch, "_rejected_by", rejected_by)


@breaks("progress", seed=3)
def a_reward_that_fails_is_never_asked_for_again(patch: Patch) -> None:
    async def grade(host: Any, index: int, task: Any, turns: Any, *, timeout_s: float, **_: Any) -> Graded:
        try:
            return Graded(feedback=await host.feedback(index, task, turns, timeout_s), tries=1)
        except EnvFailed as e:
            if "TimeoutError" in e.cause:
                await asyncio.Event().wait()
            return Graded(feedback=None, tries=1, error=str(e))

    patch.setattr(manager, "grade", grade)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_product_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant, rules, first = MUTANTS[name]
    mutant(monkeypatch)
    for seed in [first, *range(SEEDS)]:
        outcome = trial(seed, faults=FAULTS, folder=tmp_path)
        if outcome.broken is not None:
            assert outcome.broken.rule in rules, f"seed {seed}: {outcome.broken}"
            assert outcome.last
            return
    pytest.fail(f"{SEEDS} seeds of {FAULTS} faults did not find it")
