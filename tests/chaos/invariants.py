"""The invariants: rules that always hold, checked between any two callbacks of a simulated run.

- tokens: every position of a response is accepted exactly once, in order, and has the right token;
- again: no accepted token is generated again, except what a controller accepted at the very moment it was killed;
- version: with staleness 0, all tokens of a step come from one version, and work is assigned only to a worker that has
  reported, on that link, that it holds this version with this digest. With more: window, bound, twice and lost
  (tests/chaos/staleness_invariants.py);
- holder: a running response is held by one worker that is connected and ready (or pausing, or draining), and no worker
  stays a member that is silent, or whose pull hangs, for longer than the recipe allows;
- weights: the rules of the directory hold after every message; a worker that reports weights has read them; every
  byte that crosses into a region was read by an importer that the log names; no worker stays a member whose reading
  stands still for longer than the recipe allows;
- borrowed: no more than `fleet.borrowed_max` lenders hold responses;
- batch: a step that is trained again from an older checkpoint gets the same samples; no response is in it twice, and
  none whose reward is missing (`missing`);
- bill: every second of every worker is in exactly one bill (tests/chaos/bill_invariant.py lists the exceptions);
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
from typing import Any

import xxhash

from tests.chaos import InvariantBroken
from tests.chaos.inject import FaultInjector, FaultyLink, distinct_token
from tests.chaos.staleness_invariants import StalenessInvariants
from tests.support import directory_rules
from windfall.controller.assembly import ControllerLife
from windfall.controller.directory.holders import NO_WORKER
from windfall.controller.ledger.ledger import LedgerEntry
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.rollout.stream import Rollout
from windfall.controller.scheduling.members import WorkerState
from windfall.events.log import Event
from windfall.link import messages as m
from windfall.sim.core import loop as loops
from windfall.sim.core.token_schedule import id_token_of
from windfall.sim.machines.decode import OBSERVED, STOP
from windfall.sim.machines.weight_store import WeightReading
from windfall.training import Sample
from windfall.types import LOCAL

PROGRESS_S = 600.0
"""Longest time without progress, in virtual seconds."""
LATE_S = 1.0
"""A silent worker is detected at most this long after its deadline, in seconds."""
MEMBERS_EVERY = 64
"""Members and progress are checked once per this many callbacks."""
TASKS = 40
"""Most asyncio tasks after a step, in addition to four per worker."""
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
        self.batches: dict[int, Batch] = {}
        """The last batch of every step."""
        self.step_events: dict[int, Event] = {}
        """The last `step` event of every step."""
        self.controller_starts: list[float] = []
        """When each controller process started (loop time, seconds)."""
        self.trainer_starts: list[float] = []
        """When each trainer process started (loop time, seconds)."""
        self._life: ControllerLife | None = None
        self._ledger_counts: Any = None
        self._checked: dict[str, tuple[LedgerEntry, int, int]] = {}
        """Open responses: the entry, its handle, and how many of its tokens have been checked."""
        self._accepted: dict[str, int] = {}
        """The largest number of tokens ever accepted and written to disk, by response."""
        self._accepted_before: dict[str, int] = {}
        """Responses that grew at this moment: their number of accepted tokens before it."""
        self._now_s = self._progress_s = self._no_trainer_s = 0.0
        self._last_progress: Any = None
        self._error: InvariantBroken | None = None
        recipe = self._simulation.scenario.recipe
        self._staleness = StalenessInvariants(injector) if recipe.rollout.staleness else None
        self._reopened: int | None = None
        """Number of tasks that the current controller opened first. None: it has not begun."""
        injector.on_send = self._deferred(self._check_assignment)
        injector.on_receive = self._deferred(self._check_reads)
        self._messages = 0
        self._received: dict[WeightReading, tuple[float, float]] = {}
        """Bytes of each reading, and since when it has them (loop time, seconds)."""
        self._across = Counter[str]()
        """By region: bytes that crossed into it, less what its importers had to read."""
        trainer, on_start = injector.simulation.trainer, injector.simulation.trainer.on_start

        def trainer_started(began_s: float) -> None:
            self.trainer_starts.append(began_s)
            if self._staleness is not None:
                self._staleness.trainer_started()
            on_start(began_s)

        trainer.on_start = trainer_started
        trainer.on_trained = self._deferred(self._check_batch)
        self.on_event = self._deferred(self._check_step)
        """To be called with every event of the log."""

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
        if self._reopened is None and life.generation is not None and life.generation.running and life.loop is not None:
            self._reopened = len(life.loop.groups.admission.open_tasks)
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
            trained_tokens, starts = self._simulation.trainer.trained_tokens, self._simulation.controller_starts
            self._check_progress(now, (c.accepted, trained_tokens, starts))

    def _start_controller(self, life: ControllerLife) -> None:
        """The previous controller was killed, and tokens that it accepted at that moment may not be on disk."""
        self._accepted.update(self._accepted_before)
        if self._staleness is not None:
            self._staleness.forget_tokens(self._accepted_before)
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
        ledger, offer, members = life.dispatch.ledger, life.dispatch.lead.offer, life.dispatch.members.all
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
                self._check_tokens(id, entry, have, before or 0)
                self._checked[id] = (entry, entry.handle, have)
                if self._staleness is not None:
                    self._staleness.check_tokens(entry, offer, before or 0, restored=before is None)
                versions = {v for v, _ in entry.episode.version_runs if v >= 0} | (
                    {entry.version} if entry.handle >= 0 else set()
                )
                if self._staleness is None and (offer is None or not versions <= {offer.version}):
                    what = f"{id} has tokens of versions {sorted(versions)}, but the offer is {offer}"
                    raise InvariantBroken("version", what)
                if entry.handle >= 0 and members[entry.worker].state not in HOLDING:
                    raise InvariantBroken("holder", f"{entry.worker} holds {id} but is {members[entry.worker].state}")

    def _check_tokens(self, id: str, entry: LedgerEntry, have: int, checked: int) -> None:
        known = self._accepted.get(id, 0)
        tokens, id_token = entry.episode.tokens, id_token_of(entry.episode.seed)
        offer = self._simulation.dispatch.lead.offer
        if self._staleness is not None and offer is not None and self._staleness.is_too_old(id_token, offer.version):
            known = self._accepted[id] = have  # nothing can be trained on it, and the journal may have forgotten it
        if have < checked:
            raise InvariantBroken("tokens", f"{id} had {checked} tokens and now has {have}")
        if have < known:
            raise InvariantBroken("again", f"{id} continues at token {have}, but {known} of its tokens were accepted")
        for position in range(checked, have):
            expected = id_token if position == 0 else distinct_token(id_token, position)
            ends = position == have - 1 or tokens[position + 1] == OBSERVED
            if tokens[position] not in (expected, OBSERVED) and not (tokens[position] == STOP and ends):
                what = f"{id}: token {position} of {have} is {tokens[position]}, not {expected}"
                raise InvariantBroken("tokens", what)
        if have > known:
            self._accepted_before.setdefault(id, known)
            self._accepted[id] = have

    def _check_assignment(self, link: FaultyLink, message: object) -> None:
        if isinstance(message, m.Assign) and not self._simulation.down:
            offer, weights = self._simulation.life.dispatch.lead.offer, self._simulation.trainer.weights
            assert offer is not None
            if self._staleness is not None:
                self._staleness.check_assignment(link, offer)
            elif link.loaded != (offer.version, offer.digest):
                raise InvariantBroken("version", f"{link.peer} gets work for {offer} but holds {link.loaded}")
            if offer.version > weights.state.step and not self._simulation.trainer.starts > 1:
                raise InvariantBroken("version", f"the offer is {offer}, but the trainer has {weights}")

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
        if life.trainer.hello is None:
            self._no_trainer_s = self._loop.time()
        for worker in self._simulation.fleet.workers.values():
            hangs_since_s = worker.link.hangs_since_s if isinstance(worker.link, FaultyLink) else None
            if hangs_since_s is None or worker.frozen:
                continue
            hangs_s = self._loop.time() - max(hangs_since_s, self._injector.stall_ended_s, self._no_trainer_s)
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
            directory_rules.check(life.dispatch.weights.directory)
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

    def _check_batch(self, step: int, samples: list[Sample]) -> None:
        batch: Batch = {}
        for s in samples:
            id_token = s.ids[s.targets[0]]
            if id_token in batch:
                raise InvariantBroken("batch", f"step {step} has response {id_token} twice")
            if self._injector.env.missing(id_token):
                raise InvariantBroken("missing", f"step {step} contains {id_token}, whose reward is missing")
            batch[id_token] = (
                f"{xxhash.xxh3_64_hexdigest(array('I', s.ids).tobytes())} {s.advantage:.9g} {len(s.targets)}"
            )
        if self._staleness is not None:
            self._staleness.check_batch(step, samples)
        if (previous := self.batches.get(step)) is not None:
            compare(step, previous, batch)
        self.batches[step] = batch

    # level

    def _check_step(self, event: Event) -> None:
        if event["name"] == "trainer_ready":
            self._reopened = None
        if event["name"] == "importer":
            known = self._simulation.life.dispatch.weights.directory._files[event["file"]].file
            self._across[event["region"]] -= known.nbytes if known is not None else 0
        if (event["kind"], event["name"]) != ("scalar", "step"):
            return
        self.step_events[event["step"]] = event
        dispatch, rollout = self._simulation.life.dispatch, self._simulation.life.rollout
        here = {w.id for w in dispatch.members.here()}
        assert rollout is not None
        limit, loop = 0, self._simulation.life.loop
        if self._staleness is not None:
            assert loop is not None
            a = loop.groups.admission
            self._staleness.check_lost(a, event["step"] - 1)
            limit = max((a.staleness + 1) * a.batch, self._reopened or 0) * rollout.options.group_size
        if left := left_over(dispatch, rollout, here, self._simulation.trainer.weights.state.next_task, limit):
            raise InvariantBroken("level", f"the controller still holds after step {event['step']}: {left}")
        if event["lost_tokens"]:
            raise InvariantBroken("tokens", f"{event['lost_tokens']} tokens were lost in step {event['step']}")
        tasks = len(asyncio.all_tasks(self._loop))
        if tasks > TASKS + 4 * len(self._simulation.fleet.workers):
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


def compare(step: int, expected: Batch, actual: Batch) -> None:
    if actual != expected:
        missing, extra = expected.keys() - actual.keys(), actual.keys() - expected.keys()
        different = [t for t in expected.keys() & actual.keys() if expected[t] != actual[t]]
        what = f"step {step}: {len(missing)} missing, {len(extra)} extra, {len(different)} different responses"
        raise InvariantBroken("batch", what)
