"""The invariants: rules that always hold, checked between any two callbacks of a simulated run. With several policies,
each of them has a trainer, batches, versions and a bound of its own.

- tokens: every position of a response is accepted exactly once, in order, and has the right token;
- again: no accepted token is generated again, except what a controller accepted at the very moment it was killed;
- version: with staleness 0, all tokens of a step come from one version, and work is assigned only to a worker that has
  reported, on that link, that it holds this version with this digest. With more: window, bound, twice and lost
  (tests/chaos/staleness_invariants.py);
- policy: a policy is trained only on tokens that its own weights generated, and in one history of its weights on no
  task and role in two steps;
- base: a worker holds responses only of policies that it is to hold, all of them on its base;
- journal: what is on disk has every token of the tasks that some policy's checkpoint needs;
- holder: a running response is held by one worker that is connected and ready (or pausing, or draining), and no worker
  stays a member that is silent, or whose pull hangs, for longer than the recipe allows;
- weights: the rules of the directory hold after every message; a worker that reports weights has read them; every
  byte that crosses into a region was read by an importer that the log names; no worker stays a member whose reading
  stands still for longer than the recipe allows;
- borrowed: no more than `fleet.borrowed_max` lenders hold responses;
- batch: a step that is trained again from an older checkpoint gets the same samples; no response is in it twice, and
  none whose reward is missing (`missing`);
- bill: every second of every worker is in exactly one bill (tests/chaos/bill_invariant.py lists the exceptions), and
  the dollars of the policies add up to the bill;
- level: after a step, the controller keeps nothing of that step, and of later ones no more than admission allows;
- progress: a token is accepted, or a step completed, within PROGRESS_S.

Cheap checks run whenever something has changed; what has not changed is not checked again. windfall's own `check()`
of ledger and members is part of this. To add an invariant, add a check to `Invariants` that raises `InvariantBroken`
with its name, and a mutant that breaks it to tests/chaos/test_invariants.py.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import xxhash

from tests.chaos import InvariantBroken, bill_invariant
from tests.chaos.inject import FaultInjector, FaultyLink, distinct_token
from tests.chaos.staleness_invariants import StalenessInvariants
from tests.support.fleets import directory_rules
from windfall.controller.assembly import ControllerLife
from windfall.controller.directory.holders import NO_WORKER
from windfall.controller.ledger.journal_format import TokenRun
from windfall.controller.ledger.ledger import LedgerEntry
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.rollout.stream import Rollout, seed_of
from windfall.controller.tasks.task_gate import TaskGate
from windfall.controller.workers.members import Member, WorkerState
from windfall.events.log import Event
from windfall.link import messages as m
from windfall.sim.core import loop as loops
from windfall.sim.core.token_schedule import id_token_of
from windfall.sim.machines.decode import OBSERVED, STOP
from windfall.sim.machines.weight_store import WeightReading
from windfall.training import Sample
from windfall.types import LOCAL, policy_of

PROGRESS_S = 600.0
"""Longest time without progress, in virtual seconds."""
LATE_S = 1.0
"""A silent worker is detected at most this long after its deadline, in seconds."""
MEMBERS_EVERY = 64
"""Members and progress are checked once per this many callbacks."""
TASKS = 40
"""Most asyncio tasks of a policy after a step, in addition to four per worker."""
HOLDING = (WorkerState.READY, WorkerState.PAUSED, WorkerState.DRAINING)
Batch = dict[int, str]
"""By the first token of a response, which identifies it: a fingerprint of its tokens and its advantage."""


class Invariants:
    def __init__(self, injector: FaultInjector) -> None:
        self._injector = injector
        self._simulation = injector.simulation
        self._loop = asyncio.get_running_loop()
        self.checks = 0
        """Number of times that the invariants were checked."""
        self.batches: dict[tuple[str, int], Batch] = {}
        """By policy and step: the last batch."""
        self.step_events: dict[tuple[str, int], Event] = {}
        """By policy and step: the last `step` event."""
        self.controller_starts: list[float] = []
        """When each controller process started (loop time, seconds)."""
        self.trainer_starts: list[float] = []
        """When each process of the lead's trainer started (loop time, seconds)."""
        self._life: ControllerLife | None = None
        self._ledger_counts: Any = None
        self._checked: dict[str, tuple[LedgerEntry, int, int]] = {}
        """Open responses: the entry, its handle, and how many of its tokens have been checked."""
        self._accepted: dict[str, int] = {}
        """The largest number of tokens ever accepted and written to disk, by response."""
        self._accepted_before: dict[str, int] = {}
        """Responses that grew at this moment: their number of accepted tokens before it."""
        self._sampled: dict[str, int] = {}
        """By response: the position after its last token that was sampled."""
        self._segments: dict[int, tuple[str, str]] = {}
        """By first token of a response, or of a role's part of it, which identifies it: its id and role."""
        self._trained_in: dict[str, dict[tuple[str, str], int]] = {}
        """By policy, and by task and role: the step, in the history of its weights, that trained on it."""
        self._now_s = self._progress_s = self._no_trainer_s = 0.0
        self._last_progress: Any = None
        self._error: InvariantBroken | None = None
        recipe, trainers = self._simulation.scenario.recipe, self._simulation.trainers
        self._bases = {policy: base for base, policies in recipe.bases().items() for policy in policies}
        self._staleness = {
            name: StalenessInvariants(injector, name, self._segments)
            for name in trainers if recipe.is_trained(name) and recipe.of(name).rollout.staleness
        }  # fmt: skip
        self._reopened: int | None = None
        """Number of tasks that the current controller opened first. None: it has not begun."""
        injector.on_send = self._deferred(self._check_assignment)
        injector.on_receive = self._deferred(self._check_reads)
        self._messages = 0
        self._received: dict[WeightReading, tuple[float, float]] = {}
        """Bytes of each reading, and since when it has them (loop time, seconds)."""
        self._across = Counter[str]()
        """By region: bytes that crossed into it, less what its importers had to read."""
        for name, trainer in trainers.items():
            trainer.on_start = partial(self._trainer_started, name, trainer.on_start)
            trainer.on_trained = self._deferred(partial(self._check_batch, name))
        self.on_event = self._deferred(self._check_step)
        """To be called with every event of the log."""

    def _trainer_started(self, policy: str, on_start: Callable[[float], None], began_s: float) -> None:
        if self._simulation.trainers[policy] is self._simulation.trainer:
            self.trainer_starts.append(began_s)
        if policy in self._staleness:
            self._staleness[policy].trainer_started()
        on_start(began_s)

    def _deferred(self, check: Callable[..., None]) -> Callable[..., None]:
        """Keep an error for the next `check`: the caller of these hooks may swallow it."""

        def deferred(*args: Any) -> None:
            try:
                check(*args)
            except InvariantBroken as e:
                self._error = self._error or e

        return deferred

    def check(self) -> None:
        self.checks += 1
        if self._error is not None:
            raise self._error
        now, life = self._loop.time(), self._simulation.life
        if now != self._now_s:
            self._now_s = now
            self._accepted_before.clear()
        if life is not self._life:
            self._start_controller(life)
        ledger = life.dispatch.ledger
        if self._reopened is None and life.generation is not None and life.generation._stream is not None:
            self._reopened = len(_open_tasks(life.generation.gate))
        c = ledger.counts
        counts = (c.accepted, c.moved, c.closed, c.withdrawn, len(ledger.entries), ledger.queued)
        if counts != self._ledger_counts:
            self._ledger_counts = counts
            self._check_ledger(life)
        if self._messages != self._injector.messages:
            self._messages = self._injector.messages
            self._check_directory(life)
        if not self.checks % MEMBERS_EVERY:
            self._check_members(life)
            self._check_readings(life)
            trained_tokens = sum(trainer.trained_tokens for trainer in self._simulation.trainers.values())
            self._check_progress(now, (c.accepted, trained_tokens, self._simulation.controller_starts))

    def _start_controller(self, life: ControllerLife) -> None:
        """The previous controller was killed, and tokens that it accepted at that moment may not be on disk."""
        self._accepted.update(self._accepted_before)
        for id, count in self._accepted_before.items():
            self._sampled[id] = min(self._sampled.get(id, 0), count)
        for staleness in self._staleness.values():
            staleness.forget_tokens(self._accepted_before)
        self._accepted_before.clear()
        self._reopened = None
        self._life = life
        self._checked = {}
        self._ledger_counts = None
        self.controller_starts.append(self._loop.time())

    # tokens, again, version, holder

    def _check_ledger(self, life: ControllerLife) -> None:
        if self._simulation.down:  # nothing that a killed controller does has an effect
            return
        ledger, members = life.dispatch.ledger, life.dispatch.members.all
        try:
            ledger.check()
        except AssertionError as e:
            raise InvariantBroken("tokens", str(e)) from e
        if len(self._checked) > len(ledger.entries):
            self._checked = {id: s for id, s in self._checked.items() if id in ledger.entries}
        for id, entry in ledger.entries.items():
            have, checked = len(entry.episode.tokens), self._checked.get(id)
            if checked is None or checked[0] is not entry or checked[1] != entry.handle or checked[2] != have:
                before = None if checked is None or checked[0] is not entry else checked[2]
                offer, staleness = life.dispatch.versions[entry.policy].offer, self._staleness.get(entry.policy)
                # An evaluation generates the same responses again.
                self._segments[id_token_of(entry.episode.seed)] = id.rpartition(":")[2], entry.episode.role
                self._check_tokens(id, entry, have, before or 0)
                self._checked[id] = (entry, entry.handle, have)
                if staleness is not None:
                    staleness.check_tokens(entry, offer, before or 0, restored=before is None)
                versions = {v for v, _ in entry.episode.version_runs if v >= 0} | (
                    {entry.version} if entry.handle >= 0 else set()
                )
                current = offer is not None and versions <= {offer.version}
                if staleness is None and not current and self._needs(life, entry):
                    what = f"{id} has tokens of versions {sorted(versions)}, but the offer is {offer}"
                    raise InvariantBroken("version", what)
                if entry.handle >= 0 and members[entry.worker].state not in HOLDING:
                    raise InvariantBroken("holder", f"{entry.worker} holds {id} but is {members[entry.worker].state}")
                if entry.handle >= 0:
                    self._check_base(id, entry, members[entry.worker])

    def _needs(self, life: ControllerLife, entry: LedgerEntry) -> bool:
        """Whether the response's own policy will use it: not one that only other policies evaluate, or train on
        again."""
        id, policy = entry.episode.id, entry.policy
        if not policy or life.generation is None:
            return True
        if ":" in id:
            return entry.episode.version is not None
        admission = life.generation.gate.admissions.get(policy)  # a frozen policy has none
        return admission is None or admission.is_open(int(id.partition("/")[0]))

    def _check_base(self, id: str, entry: LedgerEntry, member: Member) -> None:
        if member.base != self._bases[entry.policy] or entry.policy not in member.held:
            what = (
                f"{member.id} has the base {member.base!r} and {sorted(member.held)}, but {id} is of {entry.policy!r}"
            )
            raise InvariantBroken("base", what)

    def _check_tokens(self, id: str, entry: LedgerEntry, have: int, checked: int) -> None:
        known = self._accepted.get(id, 0)
        tokens, id_token = entry.episode.tokens, id_token_of(entry.episode.seed)
        offer = self._simulation.dispatch.versions[entry.policy].offer
        staleness = self._staleness.get(entry.policy)
        if staleness is not None and offer is not None and staleness.is_too_old(id_token, offer.version):
            known = self._accepted[id] = have  # nothing can be trained on it, and the journal may have forgotten it
        if have < checked:
            raise InvariantBroken("tokens", f"{id} had {checked} tokens and now has {have}")
        if have < known:
            raise InvariantBroken("again", f"{id} continues at token {have}, but {known} of its tokens were accepted")
        for position in range(checked, have):
            if tokens[position] != OBSERVED:
                self._sampled[id] = max(self._sampled.get(id, 0), position + 1)
            expected = id_token if position == 0 else distinct_token(id_token, position)
            ends = position == have - 1 or tokens[position + 1] == OBSERVED
            if tokens[position] not in (expected, OBSERVED) and not (tokens[position] == STOP and ends):
                what = f"{id}: token {position} of {have} is {tokens[position]}, not {expected}"
                raise InvariantBroken("tokens", what)
        if have > known:
            self._accepted_before.setdefault(id, known)
            self._accepted[id] = have

    def _check_assignment(self, link: FaultyLink, message: object) -> None:
        if not isinstance(message, m.Assign) or self._simulation.down:
            return
        for policy in {work.policy for work in message.work}:
            offer, trainer = self._simulation.dispatch.versions[policy].offer, self._simulation.trainers[policy]
            assert offer is not None
            if policy in self._staleness:
                self._staleness[policy].check_assignment(link, offer)
            elif link.loaded.get(policy) != (offer.version, offer.digest):
                raise InvariantBroken("version", f"{link.peer} gets work for {offer} but holds {link.loaded}")
            if offer.version > trainer.weights.state.step and not trainer.starts > 1:
                raise InvariantBroken("version", f"the offer is {offer}, but the trainer has {trainer.weights}")

    def _check_members(self, life: ControllerLife) -> None:
        if self._simulation.down:
            return
        members, accounts = life.dispatch.members, life.dispatch.accounts
        try:
            members.check()
        except AssertionError as e:
            raise InvariantBroken("holder", str(e)) from e
        since_s = self._loop.time() - members.patience.gone_s - LATE_S
        if silent := [w.id for w in members.here() if max(w.seen_s, self._injector.stall_ended_s) < since_s]:
            raise InvariantBroken("holder", f"{silent} have sent nothing since {since_s:.1f} s")
        if any(policy.trainer.hello is None for policy in life.policies.values()):
            self._no_trainer_s = self._loop.time()
        for worker in self._simulation.fleet.workers.values():
            if not isinstance(worker.link, FaultyLink) or worker.link.hangs is None or worker.frozen:
                continue
            excused_s = max(self._injector.stall_ended_s, self._no_trainer_s)
            hangs_s = self._loop.time() - max(worker.link.hangs_since_s, excused_s)
            if hangs_s > members.patience.stalled_s + 3 * LATE_S:
                what = f"the pull of {worker.spec.name} has hung for {hangs_s:.1f} s, and it is still a member"
                raise InvariantBroken("holder", what)
        d = life.dispatch
        lenders = [w.id for w in members.here() if w.lends and d.ledger.running(w.id)]
        if len(lenders) > d.borrowing.most:
            raise InvariantBroken("borrowed", f"{lenders} hold responses")
        here, paid = {w.id for w in members.here()}, {w for w in accounts._here if not w.startswith("trainer ")}
        if here != paid:
            raise InvariantBroken("bill", f"members: {sorted(here)}; billed: {sorted(paid)}")

    # weights

    def _check_directory(self, life: ControllerLife) -> None:
        try:
            for directory in life.dispatch.weights.directories.values():
                directory_rules.check(directory)
        except AssertionError as e:
            raise InvariantBroken("weights", f"the directory breaks a rule: {e}") from e

    def _check_reads(self, link: FaultyLink, message: object) -> None:
        if not isinstance(message, m.AskRoute | m.Loaded) or link.peer == LOCAL:
            return
        stores = self._simulation.fleet.net.stores
        me = stores[f"http://{link.peer}"]
        if isinstance(message, m.Loaded) and message.digest not in {file.digest for file in me.complete}:
            raise InvariantBroken("weights", f"{link.peer} reports {message.digest}, but has {list(me.files)}")
        for use in message.used:
            worker, _, place = use.source.partition(NO_WORKER)
            source = stores.get(f"http://{worker}" if worker else place)
            if source is not None and source.region != me.region:
                self._across[me.region] += use.bytes
        if self._across[me.region] > 0:
            raise InvariantBroken(
                "weights", f"{self._across[me.region]} more bytes crossed into {me.region} than are logged"
            )

    def _check_readings(self, life: ControllerLife) -> None:
        """A reading that stands still is ended: its worker is removed."""
        now, patience = self._loop.time(), life.dispatch.members.patience
        excused_s = max(self._injector.stall_ended_s, self._no_trainer_s)
        readings = {w._reading: w for w in self._simulation.fleet.workers.values() if w._reading is not None}
        self._received = {r: self._received.get(r, (-1.0, now)) for r in readings}
        for reading, (received, since_s) in self._received.items():
            if reading.received != received or readings[reading].frozen:
                self._received[reading] = (reading.received, now)
            elif now - max(since_s, excused_s) > patience.stalled_s + 3 * LATE_S and not self._simulation.down:
                what = f"{readings[reading].spec.name} has waited for {reading.digest} since {since_s:.1f} s"
                raise InvariantBroken("weights", what)

    def _check_progress(self, now: float, progress: Any) -> None:
        if progress != self._last_progress:
            self._last_progress = progress
            self._progress_s = now
        elif now - self._progress_s > PROGRESS_S:
            what = f"no token in {PROGRESS_S:g} s; waiting tasks:\n{loops.waiting_tasks(self._loop)}"
            raise InvariantBroken("progress", what)

    # batch, missing

    def _check_batch(self, policy: str, step: int, samples: list[Sample]) -> None:
        batch: Batch = {}
        trained_in = {key: s for key, s in self._trained_in.get(policy, {}).items() if s < step}
        for s in samples:
            id_token = s.ids[s.targets[0]]
            id, role = self._segments[id_token]
            task, first = id.partition("/")[0], self._first_token(id)
            if id_token in batch:
                raise InvariantBroken("batch", f"step {step} has response {id_token} twice")
            if self._injector.env.missing(first):
                raise InvariantBroken("missing", f"step {step} contains {id_token}, whose reward is missing")
            if policy_of(role) != policy:
                raise InvariantBroken("policy", f"step {step} of {policy!r} contains {id} of {role!r}")
            if trained_in.setdefault((task, role), step) != step:
                what = f"step {step} of {policy!r} trains on task {task} as {role!r}"
                raise InvariantBroken("twice", f"{what}, and so did step {trained_in[task, role]}")
            batch[id_token] = (
                f"{xxhash.xxh3_64_hexdigest(array('I', s.ids).tobytes())} {s.advantage:.9g} {len(s.targets)}"
            )
        self._trained_in[policy] = trained_in
        if policy in self._staleness:
            self._staleness[policy].check_batch(step, samples)
        previous = self.batches.get((policy, step))
        if previous or (previous is not None and policy not in self._staleness):
            # With staleness, a step for which all draws were replaced may find something when it is trained again.
            compare(policy, step, previous, batch)
        self.batches[policy, step] = batch

    def _first_token(self, id: str) -> int:
        """The first token of the response that a part of it with this id belongs to."""
        task, sibling = id.partition("+")[0].split("/")
        return id_token_of(seed_of(self._simulation.scenario.recipe.run.seed, int(task), int(sibling)))

    # journal

    def _check_journal(self, life: ControllerLife) -> None:
        """What any checkpoint needs is on disk, but for what was accepted at this moment."""
        journal = life.journal
        if journal is None or self._simulation.down:
            return
        states = [self._simulation.trainers[n].saved.state for n, policy in life.policies.items() if policy.trained]
        lowest = min(min((*state.open_tasks, state.next_task)) for state in states)
        found = journal.read(sum(state.step for state in states), lowest)
        needed = {task for state in states for task in state.open_tasks}
        next_task = min(state.next_task for state in states)
        for id, accepted in self._sampled.items():
            if ":" in id or id in self._accepted_before:
                continue
            if (task := int(id.partition("/")[0])) < next_task and task not in needed:
                continue
            past = [run for run in found.history.get(id, []) if isinstance(run, TokenRun)]
            have = max((run.position + len(run.tokens) for run in past), default=0)
            if have < accepted:
                what = f"it has {have} tokens of {id}, but {accepted} were accepted, and a checkpoint needs them"
                raise InvariantBroken("journal", what)

    # level

    def _check_step(self, event: Event) -> None:
        if event["name"] == "trainer_ready":
            self._reopened = None
        if event["name"] == "importer":
            directory = self._simulation.dispatch.weights.directories[event.get("policy", "")]
            known = directory._files[event["file"]].file
            self._across[event["region"]] -= known.nbytes if known is not None else 0
        if event["name"] == "journal":
            self._check_journal(self._simulation.life)
        if (event["kind"], event["name"]) != ("scalar", "step"):
            return
        life, policy = self._simulation.life, event.get("policy", "")
        self.step_events[policy, event["step"]] = event
        dispatch, rollout = life.dispatch, life.rollout
        here = {w.id for w in dispatch.members.here()}
        assert rollout is not None
        assert life.generation is not None
        admissions = life.generation.gate.admissions
        if policy in self._staleness:
            self._staleness[policy].check_lost(admissions[policy], event["step"] - 1)
        limit = 0
        if self._staleness or len(admissions) > 1:
            most = sum((a.staleness + 1) * a.batch for a in admissions.values())
            limit = max(most, self._reopened or 0) * rollout.options.group_size * len(admissions)
        next_task = min(self._simulation.trainers[name].weights.state.next_task for name in admissions)
        if left := left_over(dispatch, rollout, here, next_task, limit):
            raise InvariantBroken("level", f"the controller still holds after step {event['step']}: {left}")
        if event["lost_tokens"]:
            raise InvariantBroken("tokens", f"{event['lost_tokens']} tokens were lost in step {event['step']}")
        bill_invariant.check_policies(event["bill"], self._simulation.scenario.recipe.bases())
        tasks = len(asyncio.all_tasks(self._loop))
        if tasks > TASKS * len(admissions) + 4 * len(self._simulation.fleet.workers):
            what = f"{tasks} asyncio tasks after step {event['step']}:\n{loops.waiting_tasks(self._loop)}"
            raise InvariantBroken("level", what)


def left_over(dispatch: Dispatch, rollout: Rollout, here: set[str], next_task: int, limit: int = 0) -> dict[str, int]:
    """What the controller still holds although at most `limit` responses are open: counts by name."""
    d, g = dispatch, dispatch.placement
    trained = sum(":" not in id and int(id.partition("/")[0]) < next_task for id in rollout.history)
    outbox = d._outbox
    by_worker = {
        "handles to release": set(d._releasing.values()),
        "timers": d.drain_timers,
        "queues": outbox._queues,
        "links": outbox._links,
        "work": d.ledger._by_worker,
        "contexts": d.ledger._context,
        "prefills": g._prefilling,
        "kept turns": g.turns._held,
    }
    bounded = {
        "responses": len(d.ledger.entries),
        "queued": d.ledger.queued,
        "running": len(d.ledger._running),
        "groups with pages": len(g._prefix_holders),
        "sessions": len(g.turns._sessions),
        "responses with a chosen worker": len(g.move_targets),
    }
    counts = {
        **{name: n for name, n in bounded.items() if n > limit},
        "responses of trained steps": trained,
        **{f"{name} of lost workers": len(set(workers) - here) for name, workers in by_worker.items()},
    }
    return {name: n for name, n in counts.items() if n}


def _open_tasks(gate: TaskGate) -> set[int]:
    return {task for admission in gate.admissions.values() for task in admission.open_tasks}


def compare(policy: str, step: int, expected: Batch, actual: Batch) -> None:
    if actual != expected:
        missing, extra = expected.keys() - actual.keys(), actual.keys() - expected.keys()
        different = [t for t in expected.keys() & actual.keys() if expected[t] != actual[t]]
        what = f"{len(missing)} missing, {len(extra)} extra, {len(different)} different responses"
        raise InvariantBroken("batch", f"step {step} of {policy!r}: {what}")
