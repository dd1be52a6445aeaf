"""The rules that always hold, checked between any two callbacks of a simulated run. `InvariantBroken` says which does not.

- tokens: every position of a response is accepted once, in order, and is the token that stands there;
- again: nothing that was accepted is made again, but what a controller accepted in the very moment it was killed in;
- version: all tokens of a step are of one version, and work is given only to who has said, on that link, that it holds
  this version with this digest;
- holder: what runs is held by one worker, who is there and ready (or pausing, or leaving), and nobody who is silent, or
  hangs in a pull, for longer than the recipe's patience is there;
- batch: a step that is trained again, because a checkpoint was older, is trained on the same; no response is in it
  twice, and none whose reward is missing;
- bill: every second of every worker is in one bill (sim/chaos/bill_invariant.py says which are in none, and why);
- level: when a step is over, nothing of it is left in the controller;
- progress: somebody makes a token, or a step, within a stated time.

What is cheap is looked at every time something has changed; what has not changed is not looked at again. The product's
own `check()` of ledger and members is part of it.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

import xxhash

from windfall.events.log import Event
from windfall.launch.assembly import ControllerLife
from windfall.ledger.ledger import LedgerEntry
from windfall.link import messages as m
from windfall.rollout.dispatch import Dispatch
from windfall.rollout.groups import Rollout
from windfall.scheduling.members import WorkerState
from windfall.sim.chaos.broken import InvariantBroken
from windfall.sim.chaos.inject import Chaos, FaultyWire
from windfall.sim.core import loop as loops
from windfall.sim.core.token_schedule import FIRST_TAG, TAGS
from windfall.sim.machines.decode import STOP, marked

PROGRESS_S = 600.0
LATE_S = 1.0
"""A silent worker is found so long after its time at the latest."""
MEMBERS_EVERY = 64
TASKS = 40
"""Of asyncio, besides four for every worker."""
HOLDING = (WorkerState.READY, WorkerState.PAUSED, WorkerState.DRAINING)
Batch = dict[int, str]
"""By a response's tag: a fingerprint of its tokens and its advantage."""


class Rules:
    def __init__(self, chaos: Chaos) -> None:
        self._chaos, self._simulation = chaos, chaos.simulation
        self._loop = asyncio.get_running_loop()
        self.looked = 0
        self.batches: dict[int, Batch] = {}
        self.told: dict[int, Event] = {}
        """What the log said of every step, the last time."""
        self.births: list[float] = []
        """When every life of the controller began."""
        self.started: list[float] = []
        """And every process of the trainer."""
        self._life: ControllerLife | None = None
        self._mark: Any = None
        self._seen: dict[str, tuple[LedgerEntry, int, int]] = {}
        """Of open responses: the entry, its handle, and how many tokens have been looked at."""
        self._accepted: dict[str, int] = {}
        """The most tokens that were ever accepted of a response, and are on disk."""
        self._before: dict[str, int] = {}
        """Of those that grew in this moment: what it was before."""
        self._moment_s = self._moved_s = self._unserved_s = 0.0
        self._moved: Any = None
        self._error: InvariantBroken | None = None
        chaos.sent = self._kept(self._sent)
        learner, started = chaos.simulation.learner, chaos.simulation.learner.started
        learner.started = lambda began_s: (self.started.append(began_s), started(began_s))[1]
        learner.trained = self._kept(self._trained)
        self.heard = self._kept(self._heard)
        """To be told of every event of the log."""

    def _kept(self, look: Callable[..., None]) -> Callable[..., None]:
        """Where nobody would hear of an error, it waits for the next `check`."""

        def kept(*said: Any) -> None:
            try:
                look(*said)
            except InvariantBroken as e:
                self._error = self._error or e

        return kept

    def check(self) -> None:
        self.looked += 1
        if self._error is not None:
            raise self._error
        now, life = self._loop.time(), self._simulation.life
        if now != self._moment_s:
            self._moment_s = now
            self._before.clear()
        if life is not self._life:
            self._begin(life)
        ledger = life.dispatch.ledger
        c = ledger.counts
        mark = (c.accepted, c.moved, c.closed, c.withdrawn, len(ledger.entries), len(ledger.queue))
        if mark != self._mark:
            self._mark = mark
            self._ledger(life)
        if not self.looked % MEMBERS_EVERY:
            self._members(life)
            self._progress(now, (c.accepted, self._simulation.learner.trained_tokens, self._simulation.lives))

    def _begin(self, life: ControllerLife) -> None:
        """The life before was killed: what it accepted in that moment may not be on disk."""
        self._accepted.update(self._before)
        self._before.clear()
        self._life, self._seen, self._mark = life, {}, None
        self.births.append(self._loop.time())

    # tokens, again, version, holder

    def _ledger(self, life: ControllerLife) -> None:
        if self._simulation.down:  # nothing that it does from here on reaches anybody
            return
        ledger, offer, members = life.dispatch.ledger, life.dispatch.offer, life.dispatch.members.all
        try:
            ledger.check()
        except AssertionError as e:
            raise InvariantBroken("tokens", str(e)) from e
        if len(self._seen) > len(ledger.entries):
            self._seen = {id: s for id, s in self._seen.items() if id in ledger.entries}
        for id, entry in ledger.entries.items():
            have, seen = len(entry.episode.tokens), self._seen.get(id)
            if seen is None or seen[0] is not entry or seen[1] != entry.handle or seen[2] != have:
                self._entry(id, entry, have, 0 if seen is None or seen[0] is not entry else seen[2])
                self._seen[id] = (entry, entry.handle, have)
                versions = {v for v, _ in entry.episode.version_runs} | (
                    {entry.version} if entry.handle >= 0 else set()
                )
                if offer is None or not versions <= {offer.version}:
                    raise InvariantBroken("version", f"{id} has tokens of {sorted(versions)}, and {offer} is offered")
                if entry.handle >= 0 and members[entry.worker].state not in HOLDING:
                    raise InvariantBroken("holder", f"{entry.worker} holds {id} and is {members[entry.worker].state}")

    def _entry(self, id: str, entry: LedgerEntry, have: int, seen: int) -> None:
        known = self._accepted.get(id, 0)
        if have < seen:
            raise InvariantBroken("tokens", f"{id} had {seen} tokens and has {have}")
        if have < known:
            raise InvariantBroken("again", f"{id} goes on from {have}, and {known} tokens of it were accepted")
        tokens, tag = entry.episode.tokens, FIRST_TAG + entry.episode.seed % TAGS
        for position in range(seen, have):
            right = tag if position == 0 else marked(tag, position)
            if tokens[position] != right and not (tokens[position] == STOP and position == have - 1):
                raise InvariantBroken("tokens", f"{id}: token {position} of {have} is {tokens[position]}, not {right}")
        if have > known:
            self._before.setdefault(id, known)
            self._accepted[id] = have

    def _sent(self, wire: FaultyWire, message: object) -> None:
        if isinstance(message, m.Assign) and not self._simulation.down:
            offer, weights = self._simulation.life.dispatch.offer, self._simulation.learner.weights
            assert offer is not None
            if wire.loaded != (offer.version, offer.digest):
                raise InvariantBroken("version", f"{wire.peer} gets work with {offer} and holds {wire.loaded}")
            if offer.version > weights.state.step and not self._simulation.learner.lives > 1:
                raise InvariantBroken("version", f"{offer} is offered, and the trainer has {weights}")

    def _members(self, life: ControllerLife) -> None:
        if self._simulation.down:
            return
        members, accounts = life.dispatch.members, life.dispatch.accounts
        try:
            members.check()
        except AssertionError as e:
            raise InvariantBroken("holder", str(e)) from e
        since_s = self._loop.time() - members.patience.gone_s - LATE_S
        if silent := [w.id for w in members.here() if max(w.seen_s, self._chaos.stood_at_s) < since_s]:
            raise InvariantBroken("holder", f"{silent} said nothing since {since_s:.1f} s")
        if life.trainer.hello is None:
            self._unserved_s = self._loop.time()
        for worker in self._simulation.machines.workers.values():
            hangs_s = getattr(worker.wire, "hangs_s", None)
            if hangs_s is None or worker.frozen:
                continue
            still_s = self._loop.time() - max(hangs_s, self._chaos.stood_at_s, self._unserved_s)
            if still_s > members.patience.stalled_s + 3 * LATE_S:
                raise InvariantBroken(
                    "holder", f"{worker.kit.name} hangs in a pull for {still_s:.1f} s, and is still paid for"
                )
        here, paid = {w.id for w in members.here()}, {w for w in accounts._here if not w.startswith("trainer ")}
        if here != paid:
            raise InvariantBroken("bill", f"here: {sorted(here)}; paid for: {sorted(paid)}")

    def _progress(self, now: float, moved: Any) -> None:
        if moved != self._moved:
            self._moved, self._moved_s = moved, now
        elif now - self._moved_s > PROGRESS_S:
            raise InvariantBroken("progress", f"no token in {PROGRESS_S:g} s; these wait:\n{loops.waiting(self._loop)}")

    # batch

    def _trained(self, step: int, samples: list[m.SampleMessage]) -> None:
        batch: Batch = {}
        for s in samples:
            tag = s.ids[s.targets[0]]
            if tag in batch:
                raise InvariantBroken("batch", f"step {step} has response {tag} twice")
            if self._chaos.env.missing(tag):
                raise InvariantBroken("missing", f"step {step} is trained on {tag}, whose reward is missing")
            batch[tag] = f"{xxhash.xxh3_64_hexdigest(array('I', s.ids).tobytes())} {s.advantage:.9g} {len(s.targets)}"
        if (before := self.batches.get(step)) is not None:
            compare(step, before, batch)
        self.batches[step] = batch

    # level

    def _heard(self, event: Event) -> None:
        """Of the log."""
        if (event["kind"], event["name"]) != ("scalar", "step"):
            return
        self.told[event["step"]] = event
        dispatch, rollout = self._simulation.life.dispatch, self._simulation.life.rollout
        here = {w.id for w in dispatch.members.here()}
        assert rollout is not None
        if left := left_over(dispatch, rollout, here, self._simulation.learner.weights.state.next_task):
            raise InvariantBroken("level", f"after step {event['step']} there are left: {left}")
        if event["lost_tokens"]:
            raise InvariantBroken("tokens", f"{event['lost_tokens']} lost in step {event['step']}")
        tasks = len(asyncio.all_tasks(self._loop))
        if tasks > TASKS + 4 * len(self._simulation.machines.workers):
            raise InvariantBroken("level", f"{tasks} tasks after step {event['step']}:\n{loops.waiting(self._loop)}")


def left_over(dispatch: Dispatch, rollout: Rollout, here: set[str], next_task: int) -> dict[str, int]:
    """What the controller still holds, though no response is open: by name, how many."""
    d, g = dispatch, dispatch.placement
    trained = sum(":" not in id and int(id.partition("/")[0]) < next_task for id in rollout.history)
    outbox = d._outbox
    of_nobody = {
        "handles asked back": set(d._releasing.values()), "timers": d._drain_timers, "queues": outbox._queues,
        "links": outbox._links, "work": d.ledger._by_worker, "contexts": d.ledger._context, "prefills": g._prefilling,
    }  # fmt: skip
    found = {
        "responses": len(d.ledger.entries), "queued": len(d.ledger.queue), "running": len(d.ledger._running),
        "groups with pages": len(g._prefix_holders), "responses meant for somebody": len(g._move_targets),
        "responses of trained steps": trained,
        **{f"{name} of nobody": len(set(workers) - here) for name, workers in of_nobody.items()},
    }  # fmt: skip
    return {name: n for name, n in found.items() if n}


def compare(step: int, expected: Batch, found: Batch) -> None:
    if found != expected:
        missing, more = expected.keys() - found.keys(), found.keys() - expected.keys()
        other = [t for t in expected.keys() & found.keys() if expected[t] != found[t]]
        raise InvariantBroken(
            "batch", f"step {step}: {len(missing)} missing, {len(more)} more, {len(other)} other responses"
        )
