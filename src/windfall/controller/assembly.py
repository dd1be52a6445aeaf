"""The objects of a controller, assembled from a recipe and the files of the run. It continues where the last one ended.

    attend, attend_trainer      one call per authenticated worker or trainer     until its link closes
    steps                       the loop of every policy (run_policy.py)         until the run is finished or stopped
    tick                        the timer of local_generation                    forever

No sockets, processes or signals: those are in controller/process.py, and windfall.sim uses the same objects in
virtual time. A killed controller leaves its event log, its journal, the trainer's checkpoint, and workers and a trainer
that reconnect; everything else is created again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import count
from typing import Any

import msgspec

from windfall import __version__
from windfall.controller.cost import prices
from windfall.controller.cost.accounts import Accounts
from windfall.controller.directory.directory import Directory
from windfall.controller.directory.traffic import TrafficPrices
from windfall.controller.fleet_report import FleetReport, read_history
from windfall.controller.generation import Generation, make_admission
from windfall.controller.ledger.journal import Journal
from windfall.controller.ledger.journal_damage import JournalDamage
from windfall.controller.ledger.journal_format import JournalContents, end_of, oldest_versions
from windfall.controller.ledger.ledger import UNLIMITED
from windfall.controller.rollout.advisor import Advisor
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.rollout.stream import Rollout, Stopped
from windfall.controller.run_policy import RunPolicy
from windfall.controller.scheduling.local_time import (
    LocalTimePolicy,
    OnlyWithoutWorkers,
    PredictedLocalTime,
    StepMeasurement,
)
from windfall.controller.scheduling.placement import Placement
from windfall.controller.tasks.task_gate import TaskGate
from windfall.controller.workers.members import Patience
from windfall.controller.workers.versions import PolicyVersions
from windfall.envs.base import EnvHost
from windfall.envs.held_out import EvaluationTasks
from windfall.events.log import Event, EventLog
from windfall.link import messages as m
from windfall.link.base import Link
from windfall.models.text import Text
from windfall.recipe.sections import Recipe
from windfall.training import CheckpointState
from windfall.types import Lease

TICK_S = 0.1
ACTIVITY_S = 10.0
"""Seconds between two events `activity`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The rules by which a controller decides. A benchmark may replace them by those of a paper, in a simulated run."""

    local_time: Callable[[], LocalTimePolicy] = PredictedLocalTime
    placement: type[Placement] = Placement
    advisor: type[Advisor] = Advisor


class ControllerLife:
    """One lifetime of a controller, from its start until it ends or is killed."""

    def __init__(
        self, recipe: Recipe, events: EventLog, journal: Journal | None, *, resumed: bool,
        read_journal: Callable[[Journal, int, int], Awaitable[JournalContents]] | None = None,
        observe: Sequence[Callable[[Event], None]] = (), rules: Rules | None = None,
    ) -> None:  # fmt: skip
        """`resumed`: the run was started before. `journal`: None if nothing must survive this controller.
        `read_journal`: calls Journal.read; by default in a thread. `observe`: called with every event,
        also with those that are in the log already."""
        f, t = recipe.fleet, recipe.techniques
        self._bases = recipe.bases()
        rules = rules or Rules()
        self.recipe, self.events, self.journal, self.resumed = recipe, events, journal, resumed
        self._read_journal = read_journal or (
            lambda journal, number, lowest: asyncio.to_thread(journal.read, number, lowest)
        )
        self._journal_damage = JournalDamage(events)

        history = read_history(events, [self._journal_damage.observe, *observe])
        self._left_fp8 = history.left_fp8
        patience = Patience(suspect_s=f.suspect_s, gone_s=f.gone_s, stalled_s=f.stalled_s)
        self.dispatch = Dispatch(
            events=events, journal=journal, patience=patience, techniques=t,
            versions=_versions(recipe), on_new_weights=recipe.rollout.on_new_weights,
            borrowed_max=f.borrowed_max, accounts=Accounts(history.billed_s), placement=rules.placement,
            order=recipe.rollout.order, step_groups=recipe.rollout.fresh_groups,
            directories={name: _directory(recipe) for name in recipe.answering()},
        )  # fmt: skip
        local_time = rules.local_time if t.trainer_generates else OnlyWithoutWorkers
        self.policies = {name: RunPolicy(name, recipe.of(name), self, local_time()) for name in recipe.names()}
        self.trained = {name: policy for name, policy in self.policies.items() if policy.trained}
        self.lead = self.policies[recipe.names()[0]]
        for name, policy in self.policies.items():
            policy.evaluated, policy.last_logged = history.evaluated.get(name, set()), history.steps.get(name, 0)
        self.dispatch.loading.served = lambda policy: self.policies[policy].trainer.hello is not None
        self.report = FleetReport(recipe, self.dispatch, events, rules.advisor)
        self.rollout: Rollout | None = None
        self.generation: Generation | None = None
        self.held_out: dict[str, EvaluationTasks] = {}
        """The held-out tasks of each trained policy, if the environment can describe them."""
        self.stop = asyncio.Event()
        """Set when the run should stop and save."""
        self.on_trainer: Callable[[m.TrainerHello], None] = lambda hello: None
        """Called with every trainer that the run continues with, before any worker gets its weights."""
        self.on_rollout: Callable[[Rollout], Awaitable[None]] | None = None
        """Called once with the rollout, before anything is rolled out."""
        self.attend = self.dispatch.attend
        self._trainers = count(1)
        self._billed: dict[Any, tuple[str, int]] = {}
        """By trainer process: the id of its account, and its open links."""
        self._trained: dict[tuple[str, int], tuple[int, ...]] = {}
        self._oldest: dict[tuple[str, int], int] = {}
        """What the journal says: the tasks of each trained step of a policy, and the oldest version of each task."""
        self._journal_end = 0
        """The first task that the journal had no token of when it was last read."""
        self._count_agents: Callable[[], dict[str, Any]] = dict
        self._lent: dict[str, list[float]] = {}
        """What lenders lent when that was last logged."""

    async def steps(
        self, env: EnvHost, text: Callable[[str], Text], counters: Callable[[], dict[str, Any]] | None = None
    ) -> CheckpointState:
        """Run all remaining steps. `text` is called for each policy once its trainer has connected, because the trainer
        writes the tokenizer. `counters`: what happened to agents since its last call."""
        self.recipe.refuse_slots()
        for policy in self.policies.values():
            await policy.connected()
        recipe, hello = self.recipe, self.lead.hello
        if not self.resumed:
            bases = {"bases": self._bases} if recipe.policies else {}
            versions = {"windfall": __version__} | {name: metadata.version(name) for name in ("torch", "transformers")}
            start = {"step": hello.step, "steps": recipe.run.steps, "versions": versions}
            self.events.instant("start", **start, **bases, **hello.facts)
        texts = {name: text(name) for name in self.policies}
        rollout = self.rollout = Rollout(self.dispatch, env, texts, recipe, seed=recipe.run.seed, events=self.events)
        for name, policy in self.policies.items():
            model = json.loads(policy.hello.engine.model_config)
            rollout.contexts[name] = model.get("max_position_embeddings")
            self.dispatch.ledger.vocabularies[name] = model.get("vocab_size", UNLIMITED)
        if self.on_rollout is not None:
            await self.unless_stopped(self.on_rollout(rollout))
        watch_stop = asyncio.create_task(self._interrupt_on_stop(rollout))
        self._count_agents = counters or dict
        gate = TaskGate({name: make_admission(policy.recipe) for name, policy in self.trained.items()})
        generation = self.generation = Generation(rollout, gate, recipe.rollout.group_size)
        generation.reload = self._reload
        for policy in self.trained.values():
            policy.assemble(generation)
        try:
            return await self._run()
        finally:
            watch_stop.cancel()
            with contextlib.suppress(Exception):  # fault boundary: the run is over, or ends with another error
                await generation.stop()
            self.dispatch.weights.end_run()

    async def _run(self) -> CheckpointState:
        """Run all policies until those that are trained are done. Returns the state of the one that got least far."""
        tasks = {asyncio.create_task(policy.run()): policy for policy in self.policies.values()}
        training = [task for task, policy in tasks.items() if policy.trained]
        try:
            while not all(task.done() for task in training):
                running = [task for task in tasks if not task.done()]
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            return min((task.result() for task in training), key=lambda state: state.step)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def log_activities(self) -> None:
        """Log what workers do, forever."""
        while True:
            await asyncio.sleep(ACTIVITY_S)
            self.log_activity(asyncio.get_running_loop().time())

    def log_activity(self, now_s: float) -> None:
        """Write an event about what workers have done since the last one, and what lenders lend."""
        fields = self.dispatch.accounts.activity.drain(now_s)
        shares = self.report.lent()
        lenders = {name: share for name, share in shares.items() if self._lent.get(name) != share}
        if lenders:
            fields["lenders"] = lenders
        self._lent = shares
        if fields:
            self.events.instant("activity", **fields)

    # The journal, and what policies ask for.

    async def _reload(self) -> None:
        """Read the journal: each policy continues from its trainer's step. The stream stands still, but an evaluation
        of another policy may write meanwhile."""
        journal, rollout = self.journal, self.rollout
        if journal is None or rollout is None:
            return
        states = [policy.recovery_state for policy in self.trained.values()]
        number, lowest = sum(s.step for s in states), _lowest_task(states)
        journal.flush()
        # Reading a long journal takes seconds. Messages of workers must be handled meanwhile.
        found = await self._read_journal(journal, number, lowest)
        self._journal_damage.report_journal(found, step=self.lead.hello.step)
        if not journal.is_open or found.damage is not None:
            journal.open(number, found)
        self._trained, self._oldest = found.trained, oldest_versions(found.history)
        self._journal_end = end_of(found.history)
        rollout.history = {
            id: past
            for id, past in found.history.items()
            if ":" not in id or any(policy.restores(id.rpartition(":")[0]) for policy in self.trained.values())
        }
        self.events.instant("journal", file=journal.file)

    def restored_of(self, policy: str) -> tuple[dict[int, tuple[int, ...]], dict[int, int]]:
        """What the journal has of a policy: the tasks of each trained step, and the oldest version of each task."""
        trained = {step: tasks for (name, step), tasks in self._trained.items() if name == policy}
        return trained, {task: version for (name, task), version in self._oldest.items() if name == policy}

    def rotate_journal(self, policy: RunPolicy) -> None:
        """A checkpoint of the policy is on disk."""
        journal, trained = self.journal, self.trained.values()
        if journal is None or self.generation is None or not self._journal_damage.saved(policy.state.step, policy.name):
            return
        entries = [e for e in self.dispatch.ledger.entries.values() if e.state == "running"]
        saved = [p.on_disk for p in trained if p.on_disk is not None]
        evaluating = any(stream.scope for stream in self.generation.rollout.streams)
        known = len(saved) == len(trained) and not evaluating
        journal.rotate(
            sum((p.on_disk or p.state).step for p in trained),
            {e.handle: e.episode.id for e in entries},
            {e.handle: e.episode.policy for e in entries if e.episode.policy},
            next_task=max(self.generation.gate.next_task, self._journal_end),
            lowest=_lowest_task(saved) if known else 0,
        )
        self.events.instant("journal", file=journal.file)

    async def attend_trainer(self, link: Link, hello: m.TrainerHello) -> None:
        """Serve the link of one trainer until it closes."""
        with self._bill(hello):
            await self.policies[hello.policy].attend(link, hello)

    @contextlib.contextmanager
    def _bill(self, hello: m.TrainerHello) -> Iterator[None]:
        """Bill a trainer without an engine of its own: it is not a worker, but its machine costs money, too. A process
        that trains several policies has a link for each, and one account."""
        if self.recipe.fleet.local:
            yield
            return
        accounts, loop = self.dispatch.accounts, asyncio.get_running_loop()
        base = self.base_of(hello.policy)
        device, now = str(hello.facts.get("machine", "")), loop.time()
        process = base, device, hello.facts.get("pid")
        id, links = self._billed.get(process, ("", 0))
        if not links:
            id = f"trainer {next(self._trainers)}"
            lease = Lease(kind="reserved", device=device, price_usd_per_h=self.recipe.fleet.trainer_price_usd_per_h)
            accounts.join(now, id, kind="reserved", usd_per_h=prices.of(lease).if_known, trainer=True,
                          name=f"trainer-{base}" if base else "trainer", base=base,
                          started_s=now - float(hello.facts.get("age_s", 0.0)))  # fmt: skip
            accounts.paused(now, id)
        self._billed[process] = id, links + 1
        try:
            yield
        finally:
            id, links = self._billed.pop(process)
            if links > 1:
                self._billed[process] = id, links - 1
            else:
                accounts.gone(loop.time(), id, heard_s=loop.time())

    def engine_spec(self, hello: m.TrainerHello) -> m.EngineSpec:
        """The engine that workers must build."""
        if self._left_fp8 and hello.engine.kv_dtype == "fp8":
            return msgspec.structs.replace(hello.engine, kv_dtype="bf16")
        return hello.engine

    def leave_fp8(self, step: int, gap: float) -> None:
        if self._left_fp8:
            return
        self._left_fp8, limit = True, self.recipe.train.engine_gap_alarm
        how = f"differed by {gap:.3g} nats on average, which is above {limit:g} (train.engine_gap_alarm)"
        if not math.isfinite(gap):
            how = "could not be compared, because some were not finite"
        why = f"in fp8, log-probs of engine and trainer {how}"
        self.events.instant("kv_dtype", step=step, kv_dtype="bf16", gap=gap, why=why)
        for policy in self.policies.values():
            if policy.trainer.hello is not None:  # otherwise the next trainer's spec is changed
                self.on_trainer(policy.trainer.hello)
        self.dispatch.rebuild_fp8_engines("the KV cache goes back from fp8 to bf16")

    def counters(self, policy: RunPolicy, last: StepMeasurement | None, staleness: dict[str, Any]) -> dict[str, Any]:
        """What happened to the fleet since the last step of any policy. `last`: the measurements of this step."""
        now_s, done = asyncio.get_running_loop().time(), policy.state.step >= self.recipe.run.steps
        return {**self.report.counters(last, now_s, staleness, policy.name, done=done), **self._count_agents()}

    def base_of(self, policy: str) -> str:
        return next(base for base, names in self._bases.items() if policy in names)

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for policy in self.policies.values():
                policy.local_generation.tick()
            if self.generation is not None:
                self.generation.tick(TICK_S)

    async def unless_stopped(self, wait: Awaitable[Any]) -> Any:
        """The result of `wait`. Raises Stopped if the run is asked to stop first."""
        waiting, stop = asyncio.ensure_future(wait), asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait([waiting, stop], return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise Stopped
            return waiting.result()
        finally:
            waiting.cancel()
            stop.cancel()

    async def _interrupt_on_stop(self, rollout: Rollout) -> None:
        await self.stop.wait()
        rollout.interrupt()


def _lowest_task(states: Sequence[CheckpointState]) -> int:
    """The first task that is needed to continue from these states."""
    return min(min((*state.open_tasks, *state.replay, state.next_task)) for state in states)


def _versions(recipe: Recipe) -> list[PolicyVersions]:
    base = {name: base for base, names in recipe.bases().items() for name in names}
    return [PolicyVersions(name, base[name], recipe.of(name).rollout.staleness) for name in recipe.answering()]


def _directory(recipe: Recipe) -> Directory:
    w = recipe.weights
    prices = TrafficPrices(across_usd_per_gb=w.across_regions_usd_per_gb, bucket_usd_per_gb=w.bucket_usd_per_gb)
    peers = "none" if w.peers == "off" else "machine" if recipe.fleet.tls_cert else "all"
    return Directory(prices, peers=peers, region=w.region)
