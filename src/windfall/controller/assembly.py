"""The objects of a controller, assembled from a recipe and the files of the run. It continues where the last one ended.

    attend, attend_trainer      one call per authenticated worker or trainer     until its link closes
    steps                       the loop of loop.py                              until the run is finished or stopped
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
from itertools import count
from typing import Any

import msgspec

from windfall import algorithms
from windfall.controller.cost import prices
from windfall.controller.cost.accounts import Accounts
from windfall.controller.directory.directory import Directory
from windfall.controller.directory.traffic import TrafficPrices
from windfall.controller.fleet_report import FleetReport, read_history
from windfall.controller.generation import Generation
from windfall.controller.ledger.journal import Journal
from windfall.controller.ledger.journal_damage import JournalDamage, needed
from windfall.controller.ledger.journal_format import History, JournalContents, oldest_versions
from windfall.controller.loop import Loop
from windfall.controller.remote_trainer import RemoteTrainer
from windfall.controller.rollout.advisor import Advisor
from windfall.controller.rollout.assignment import Offer
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.rollout.evaluation import Evaluation
from windfall.controller.rollout.local_generation import IdleGeneration, LocalGeneration
from windfall.controller.rollout.stream import Rollout, Stopped
from windfall.controller.scheduling.admission import Admission
from windfall.controller.scheduling.local_time import LocalTimePolicy, OnlyWithoutWorkers, PredictedLocalTime
from windfall.controller.scheduling.members import Patience
from windfall.controller.scheduling.placement import Placement
from windfall.envs.base import EnvHost
from windfall.envs.held_out import EvaluationTasks
from windfall.events.log import Event, EventLog
from windfall.link import messages as m
from windfall.link.base import Link
from windfall.models.text import Text
from windfall.recipe.sections import Recipe
from windfall.training import CheckpointState, NewVersion, TrainerLost
from windfall.types import Lease

TRAINER_START_S = 600.0
"""Timeout for a trainer to connect, in seconds."""
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
        read_journal: Callable[[Journal, int], Awaitable[JournalContents]] | None = None,
        observe: Sequence[Callable[[Event], None]] = (), rules: Rules | None = None,
    ) -> None:  # fmt: skip
        """`resumed`: the run was started before. `journal`: None if nothing must survive this controller.
        `read_journal`: reads the journal from a step on; by default in a thread. `observe`: called with every event,
        also with those that are in the log already."""
        f, t = recipe.fleet, recipe.techniques
        rules = rules or Rules()
        self.recipe, self.events, self.journal, self._resumed = recipe, events, journal, resumed
        self._read_journal = read_journal or (lambda journal, step: asyncio.to_thread(journal.read, step))
        self._journal_damage = JournalDamage(events)

        history = read_history(events, [self._journal_damage.observe, *observe])
        self._evaluated, self._last_logged = history.evaluated, history.step
        self._left_fp8 = history.left_fp8
        patience = Patience(suspect_s=f.suspect_s, gone_s=f.gone_s, stalled_s=f.stalled_s)
        self.dispatch = Dispatch(
            events=events, journal=journal, patience=patience, techniques=t,
            staleness=recipe.rollout.staleness, on_new_weights=recipe.rollout.on_new_weights,
            borrowed_max=f.borrowed_max, accounts=Accounts(history.billed_s), placement=rules.placement,
            order=recipe.rollout.order, step_groups=recipe.rollout.groups, directory=_directory(recipe),
        )  # fmt: skip
        self.trainer = RemoteTrainer(self.dispatch.weights)
        self.dispatch.loading.served = lambda: self.trainer.hello is not None
        policy = rules.local_time() if t.trainer_generates else OnlyWithoutWorkers()
        pace = IdleGeneration if recipe.rollout.staleness else LocalGeneration
        self.local_generation = pace(self.dispatch, policy, events, recipe.rollout.groups * recipe.rollout.group_size)
        self.report = FleetReport(recipe, self.dispatch, events, rules.advisor)
        self.rollout: Rollout | None = None
        self.loop: Loop | None = None
        self.state = CheckpointState(step=0, next_task=0)
        self.held_out: EvaluationTasks | None = None
        """The held-out tasks, if the environment can describe them."""
        self.stop = asyncio.Event()
        """Set when the run should stop and save."""
        self.on_trainer: Callable[[m.TrainerHello], None] = lambda hello: None
        """Called with every trainer that the run continues with, before any worker gets its weights."""
        self.on_rollout: Callable[[Rollout, int | None], Awaitable[None]] | None = None
        """Called once with the rollout and the model's context, before anything is rolled out."""
        self.attend = self.dispatch.attend
        self._trainers = count(1)
        self._count_agents: Callable[[], dict[str, Any]] = dict
        self._lent: dict[str, list[float]] = {}
        """What lenders lent when that was last logged."""

    async def steps(
        self, env: EnvHost, text: Callable[[], Text], counters: Callable[[], dict[str, Any]] | None = None
    ) -> CheckpointState:
        """Run all remaining steps. `text` is called once a trainer has connected, because the trainer writes the
        tokenizer. `counters`: what happened to agents since its last call."""
        hello = await self.unless_stopped(self.trainer.connected(TRAINER_START_S))
        recipe = self.recipe
        if not self._resumed:
            self.events.instant("start", step=hello.step, steps=recipe.run.steps, **hello.facts)
        rollout = self.rollout = Rollout(
            self.dispatch, env, text(), recipe.rollout, seed=recipe.run.seed, events=self.events
        )
        if self.on_rollout is not None:
            context = json.loads(hello.engine.model_config).get("max_position_embeddings")
            await self.unless_stopped(self.on_rollout(rollout, context))
        watch_stop = asyncio.create_task(self._interrupt_on_stop(rollout))
        self._count_agents = counters or dict
        algorithm = algorithms.make(recipe.algorithm.name, **recipe.algorithm.options)
        generation = Generation(recipe, algorithm, rollout, self.local_generation, hello.micro_tokens)
        evaluation = Evaluation(recipe, rollout, self.events, self.held_out, evaluated=self._evaluated)
        loop = self.loop = Loop(recipe, algorithm, self.trainer, generation, evaluation, self, self.events)
        try:
            return await loop.run()
        finally:
            watch_stop.cancel()
            self.dispatch.weights.end_run()

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

    async def connected(self) -> None:
        """Wait for a trainer."""
        await self.unless_stopped(self.trainer.connected(TRAINER_START_S))

    async def restore(self, admission: Admission) -> CheckpointState:
        """Continue from the step of the connected trainer, with the journal's tokens of later steps."""
        hello = self.trainer.hello
        if hello is None:
            raise TrainerLost("it disconnected")
        open_tasks = set(hello.open_tasks)
        self.state = CheckpointState(step=hello.step, next_task=hello.next_task, open_tasks=hello.open_tasks)
        if self._resumed:
            self.events.instant("resumed", step=hello.step)
        if hello.step > self._last_logged:
            self.events.instant("log_gap", first=self._last_logged + 1, last=hello.step)
        self._resumed, self._last_logged = True, math.inf
        pids = [int(pid) for pid in str(hello.facts.get("rank_pids", "")).split()]
        ranks = {"rank_pids": pids} if pids else {}
        self.events.instant("trainer_ready", step=hello.step, pid=hello.facts["pid"], digest=hello.digest, **ranks)
        assert self.rollout is not None, "restore() was called before steps()"
        trained: dict[int, tuple[int, ...]] = {}
        history: History = {}
        if self.journal is not None:
            self.journal.close()
            # Reading a long journal takes seconds. Messages of workers must be handled meanwhile.
            found = await self._read_journal(self.journal, hello.step)
            if self.trainer.hello is not hello:
                raise TrainerLost("it disconnected, or another trainer replaced it")
            self._journal_damage.report_journal(found, step=hello.step)
            history, trained = self.journal.open(hello.step, found), found.trained
            evaluated = self.loop.evaluation.evaluated if self.loop else self._evaluated
            done = {f"eval-{step}" for step in evaluated if step <= hello.step}
            self.rollout.load_history(
                history, lambda id: needed(id, hello.next_task, open_tasks) and id.rpartition(":")[0] not in done
            )
            self.events.instant("journal", file=self.journal.file)
        model = json.loads(hello.engine.model_config)
        self.dispatch.ledger.vocabulary = model.get("vocab_size", 1 << 32)
        self.rollout.context = model.get("max_position_embeddings")
        self.on_trainer(hello)
        self.dispatch.set_offer(Offer(version=hello.version, digest=hello.digest), self.trainer.weights)
        admission.restore(
            version=hello.step, next_task=hello.next_task, open_tasks=hello.open_tasks, planned=trained,
            oldest=oldest_versions(history),
        )  # fmt: skip
        return self.state

    def before_update(self, step: int, tasks: Sequence[int]) -> None:
        """With staleness 0, the tasks of a step follow from its number."""
        if self.journal is not None and self.recipe.rollout.staleness:
            self.journal.write_trained(step, tuple(tasks))
            self.journal.flush()

    def offer(self, published: NewVersion) -> None:
        if self.trainer.hello is not None:  # otherwise it was just lost, and the next trainer announces its version
            self.state = CheckpointState(step=published.version, next_task=self.state.next_task)
            offer = Offer(version=published.version, digest=published.digest)
            self.dispatch.set_offer(offer, self.trainer.weights)

    def saved(self, state: CheckpointState) -> None:
        if self.journal is not None and self._journal_damage.saved(state.step):
            entries = self.dispatch.ledger.entries.values()
            self.journal.rotate(state.step, {e.handle: e.episode.id for e in entries if e.state == "running"})
            self.events.instant("journal", file=self.journal.file)

    async def attend_trainer(self, link: Link, hello: m.TrainerHello) -> None:
        """Serve the link of one trainer until it closes."""
        if self.rollout is not None:
            # The run continues from this trainer's step, and the weights of the current step may no longer exist.
            self.rollout.interrupt(TrainerLost("another trainer replaced it"))
        with self._billed(hello):
            await self.trainer.attend(link, hello)

    @contextlib.contextmanager
    def _billed(self, hello: m.TrainerHello) -> Iterator[None]:
        """Bill a trainer without an engine of its own: it is not a worker, but its machine costs money, too."""
        if self.recipe.fleet.local:
            yield
            return
        accounts, loop, id = self.dispatch.accounts, asyncio.get_running_loop(), f"trainer {next(self._trainers)}"
        device = str(hello.facts.get("machine", ""))
        lease = Lease(kind="reserved", device=device, price_usd_per_h=self.recipe.fleet.trainer_price_usd_per_h)
        now = loop.time()
        accounts.join(now, id, kind="reserved", usd_per_h=prices.of(lease).if_known, trainer=True, name="trainer",
                      started_s=now - float(hello.facts.get("age_s", 0.0)))  # fmt: skip
        accounts.paused(now, id)
        try:
            yield
        finally:
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
        if self.trainer.hello is not None:  # otherwise the next trainer's spec is changed
            self.on_trainer(self.trainer.hello)
        self.dispatch.rebuild_fp8_engines("the KV cache goes back from fp8 to bf16")

    def counters(self, staleness: dict[str, Any]) -> dict[str, Any]:
        now_s = asyncio.get_running_loop().time()
        return {**self.report.counters(self.local_generation.last, now_s, staleness), **self._count_agents()}

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.local_generation.tick()
            if self.loop is not None:
                self.loop.generation.tick(TICK_S)

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


def _directory(recipe: Recipe) -> Directory:
    w = recipe.weights
    prices = TrafficPrices(across_usd_per_gb=w.across_regions_usd_per_gb, bucket_usd_per_gb=w.bucket_usd_per_gb)
    peers = "none" if w.peers == "off" else "machine" if recipe.fleet.tls_cert else "all"
    return Directory(prices, peers=peers, region=w.region)
