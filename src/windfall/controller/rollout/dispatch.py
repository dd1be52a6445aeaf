"""Between the ledger and the workers: assigns work, accepts tokens, notices lost workers. This is the only part of
rollout that waits for workers.

    attend(link)    one per worker   waits for: its next message   unblocked by: the worker, or the end of its link
    outbox sender   one per worker   waits for: a message to send, room on the link (queue full: the worker is lost)
    watch()         one              waits for: the next tick       finds silent workers

There is one fleet for all policies of the run. What has versions is kept by policy (`versions`).

Decisions are pure and made elsewhere (ledger/ledger.py; members.py, placement.py, siblings.py and holding.py of
scheduling/).
Everything here acts in one event loop, with no await between a decision and the change it makes.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

from windfall import errors
from windfall.controller.cost import prices
from windfall.controller.cost.accounts import Accounts
from windfall.controller.directory.directory import Directory
from windfall.controller.directory.traffic import TrafficPrices
from windfall.controller.ledger.episode import Episode
from windfall.controller.ledger.journal import Journal
from windfall.controller.ledger.ledger import Ledger, LedgerEntry, Malformed, context_of, room
from windfall.controller.rollout.assignment import work_frames
from windfall.controller.rollout.loading import MAX_CHARS, Loading, Refusals
from windfall.controller.rollout.weight_routes import WeightRoutes
from windfall.controller.scheduling.placement import Placement
from windfall.controller.scheduling.siblings import Siblings
from windfall.controller.workers.borrowing import Borrowing
from windfall.controller.workers.holding import BaseDemand, HeldBases
from windfall.controller.workers.members import Member, Members, Patience, WorkerState
from windfall.controller.workers.versions import Offer, PolicyVersions
from windfall.errors import WindfallError
from windfall.events.log import EventLog
from windfall.link import messages as m
from windfall.link.base import BadFrame, Link, LinkClosed, clip
from windfall.recipe.sections import Techniques
from windfall.types import Capabilities

NO_ROOM_S = 60.0
"""Seconds for which a queued response may fit on no worker. Then it is rejected, if every worker has booted, so that
the room of each is known."""
NO_WORKERS_S = 15.0
"""Seconds that work waits without any worker before a `no_workers` event is logged, and between two such events."""
SMALL_FLEET, PAUSE_PER_WORKER_S = 256, 4e-5
"""Scheduling takes a few microseconds per worker, no matter how much there is to assign. Between two rounds it pauses
PAUSE_PER_WORKER_S seconds for every worker above SMALL_FLEET. With 10,000 workers, a free slot may wait for 0.4
seconds, and scheduling takes an eighth of a core."""
MAX_NAME = 32
"""Characters of an engine's name and version that are kept."""
MAX_QUEUED = 4096
"""Messages that may wait for one worker."""
OPERATOR_SOURCES = ("sigterm", "ctrl-c")
"""Notices that come from the person who runs the worker, not from the owner of its machine."""
SWITCH_S = 60.0
"""Seconds for which a worker that was asked to join with another base is expected back."""
DRAIN_LEAD_S = 2.0
"""Seconds before the announced end at which a warned worker is drained. A drain takes one engine step and a round
trip."""


class ResponseOwner(Protocol):
    """Opens responses, and is told what happens to them. There may be any number of owners."""

    def turn_ended(self, id: str) -> None: ...

    def rejected(self, id: str, why: str) -> None:
        """No worker can generate the response."""
        ...


class Dispatch:
    def __init__(
        self,
        *,
        events: EventLog,
        journal: Journal | None = None,
        patience: Patience | None = None,
        vocabulary: int = 1 << 32,
        techniques: Techniques | None = None,
        accounts: Accounts | None = None,
        versions: Iterable[PolicyVersions] | None = None,
        on_new_weights: Literal["interrupt", "finish"] = "interrupt",
        borrowed_max: int = 64,
        placement: type[Placement] = Placement,
        order: Literal["context", "fifo"] = "fifo",
        step_groups: int = 0,
        directories: Mapping[str, Directory] | None = None,
    ) -> None:
        """`versions`: the policies of the run; one without a name if there are none. `on_new_weights`, `borrowed_max`
        and `order`: as in the recipe. `step_groups`: groups of a step. `directories`: by policy."""
        t = techniques or Techniques()
        policies = [PolicyVersions()] if versions is None else list(versions)
        self.versions = {each.name: each for each in policies}
        """By policy."""
        self.ledger = Ledger(vocabulary, migrate=t.migration)
        self.members = Members(patience)
        self.placement = placement(
            self.ledger, balancing=t.balancing, affinity=t.affinity, order=order,
            step_groups=step_groups if any(each.staleness for each in policies) else 0,
        )  # fmt: skip
        self.turns = self.placement.turns
        self.siblings = Siblings()
        self.journal = journal
        self.accounts = accounts or Accounts()
        self.refusals = Refusals()
        self._no_room_s = math.inf
        """When a queued response first fitted on no worker (loop time, seconds). Infinite if all fit."""
        self._events = events
        self._owners: dict[str, ResponseOwner] = {}
        """The owner of each open response."""
        self.on_failure: Callable[[WindfallError], None] = lambda error: None
        """Called on every tick while no worker will ever be able to do the queued work."""
        self._outbox = Outbox(self._lose)
        self._send = self._outbox.send
        finish = on_new_weights == "finish"
        named = {each.name: (directories or {}).get(each.name) or Directory(TrafficPrices()) for each in policies}
        self.weights = WeightRoutes(named, self.accounts, events, self._send)
        self.loading = Loading(
            self.versions, self.members, self.weights, self.accounts, events, self._send, self.drain, finish=finish
        )  # fmt: skip
        self.borrowing = Borrowing(borrowed_max)
        self.holding = HeldBases()
        self._switching: dict[str, tuple[str, float]] = {}
        """By name of a worker that was asked to join again: the base that it will have, and when it was asked."""
        self._join_s = 0.0
        """Seconds that the last worker took from its joining until it was ready."""
        self._migration = t.migration
        self.drain_timers: dict[str, asyncio.TimerHandle] = {}
        """By worker that got a notice: the timer that drains it."""
        self._releasing: dict[int, str] = {}
        """By handle that a worker was asked to release: the worker. A handle may end in another way before the worker
        sends Released."""
        self._scheduled = self._flush_scheduled = False
        self._last_schedule_s = -math.inf

    # Called by a stream.

    def close(self, id: str) -> None:
        """Close a response that is finished and part of its group."""
        entry = self.ledger.entries[id]
        self.placement.finished(entry.episode)
        self.siblings.closed(entry)
        self.ledger.close(id)
        self.turns.over(id)
        del self._owners[id]

    def group_done(self, group: str, size: int) -> None:
        """This group of `size` responses is complete, or was given up."""
        self.placement.done_with(group, size)
        self.siblings.done_with(group)

    def open(self, episode: Episode, owner: ResponseOwner) -> None:
        if episode.policy not in self.versions:
            raise ValueError(f"{episode.id}: no policy {episode.policy!r}; there are {list(self.versions)}")
        self.ledger.open(episode)
        self._owners[episode.id] = owner
        self._schedule_soon()

    def next_turn(self, id: str) -> None:
        self.ledger.next_turn(id)
        self.turns.returned(id)
        self._schedule_soon()

    def withdraw(self, ids: Collection[str]) -> None:
        self._cancel(self.ledger.withdraw(ids))
        for id in ids:
            self.turns.over(id, withdrawn=True)
        for id in ids:
            self._owners.pop(id, None)
        if any(each.staleness for each in self.versions.values()):
            self._schedule_soon()  # a worker that has become idle may load a new version

    def cut(self, id: str, length: int) -> None:
        """End the turn of a response after its first `length` tokens. Its owner is not told."""
        worker = self.ledger.entries[id].worker
        self._cancel(self.ledger.cut(id, length))
        self.turns.queued.pop(id, None)
        if worker:
            self._turn_ended(id, worker)

    def _turn_ended(self, id: str, worker: str) -> None:
        e = self.ledger.entries[id].episode
        context, sampled = len(e.prompt) + len(e.tokens), len(e.tokens) - e.turn_start
        self.turns.ended(id, worker, context=context, sampled=sampled)

    def _cancel(self, handles: Mapping[str, list[int]]) -> None:
        """Cancel assignments that the ledger has ended, by worker."""
        for worker, ended in handles.items():
            self._send(worker, m.Cancel(handles=tuple(ended)))
            self._account_idle(worker)

    @property
    def lead(self) -> PolicyVersions:
        """The first policy."""
        return next(iter(self.versions.values()))

    def set_offer(self, offer: Offer, files: m.PublishedFiles | None = None, *, policy: str = "") -> None:
        """The newest version of a policy, which workers load. `files`: what its trainer has published, unless all
        workers have its weights."""
        if files is not None:
            self.weights.publish(files, policy)
        versions = self.versions[policy]
        versions.advance(offer)
        self._cancel(self.ledger.set_window(policy, versions.window.oldest, versions.window.newest))
        self._schedule_soon()

    def has_free_slots(self, policy: str = "") -> bool:
        """Whether a worker could take more work of this policy, but none is queued."""
        return not self.ledger.queues[policy] and any(
            self.ledger.running(w.id) < w.open_slots for w in self.members.routable(self.versions[policy])
        )

    # Workers join, send messages and leave.

    def choose_base(self, hello: m.Hello, among: Collection[str] | None = None) -> str:
        """The base for a worker that joins, of those in `among` if not of all: the one that it was asked to switch to,
        or has already, or that needs it most. The same, until it has joined."""
        bases = [base for base in self._bases() if among is None or base in among]
        target, asked_s = self._switching.get(hello.name, ("", -math.inf))
        if target in bases and _now() - asked_s < SWITCH_S:
            return target
        holds = [v.base for policy in hello.held if (v := self.versions.get(policy)) is not None and v.base in bases]
        if holds or len(bases) == 1:
            return (holds or bases)[0]
        return self.holding.choose(self._demands(bases))

    def _bases(self) -> dict[str, list[str]]:
        """The policies on each base."""
        out: dict[str, list[str]] = {}
        for versions in self.versions.values():
            out.setdefault(versions.base, []).append(versions.name)
        return out

    def _demands(self, bases: Collection[str]) -> list[BaseDemand]:
        now = _now()
        staying = Counter(w.base for w in self.members.here() if w.state is not WorkerState.DRAINING)
        coming = Counter(base for base, asked_s in self._switching.values() if now - asked_s < SWITCH_S)
        responses = {
            base: sum(len(self.ledger.queues[policy]) + self.ledger.running_of[policy] for policy in policies)
            for base, policies in self._bases().items()
        }
        return [
            BaseDemand(name=base, responses=responses[base], workers=staying[base] + coming[base]) for base in bases
        ]

    def _policies_for(self, hello: m.Hello, base: str) -> tuple[str, ...]:
        """The policies that a worker with this base is to hold, as many as it can. First those that it has, then those
        that need it most."""
        policies = self._bases()[base]
        if len(policies) > 1:
            holders = Counter(policy for w in self.members.here() for policy in w.held)
            policies.sort(key=lambda p: (p not in hello.held, -len(self.ledger.queues[p]) / (1 + holders[p])))
        return tuple(policies[: _most_policies(hello.engine, hello.lends)])

    async def attend(self, link: Link, hello: m.Hello, base: str | None = None) -> None:
        """Handle one worker from its Hello until it is gone. `base`: what `choose_base` has chosen for it."""
        now, lease = _now(), hello.lease
        base = self.choose_base(hello) if base is None else base
        self._switching.pop(hello.name, None)
        policies = self._policies_for(hello, base)
        member = self.members.join(
            hello.name, lease, now, held=hello.held, base=base, policies=policies, lends=hello.lends
        )
        id, price = member.id, prices.of(lease)
        self._set_engine(member, hello.engine)
        # A lender's steps wait for those of its service, so its speed says nothing of other machines of this device.
        device = f"{lease.device} {base}" if base else lease.device
        self.placement.speeds.join(id, f"{device} that serves" if hello.lends else device)
        started = now - hello.age_s if 0 <= hello.age_s < math.inf else now
        usd_per_h = price.if_known
        self.accounts.join(
            now, id, kind=lease.kind, usd_per_h=usd_per_h, trainer=member.local, started_s=started, name=hello.name
        )
        shown = {"device": lease.device, "usd_per_h": usd_per_h, "price_from": price.label, "age_s": now - started}
        self._events.instant("worker_joined", worker=id, lease=lease.kind, **shown)
        sender = self._outbox.open(id, link)
        self.weights.join(member, hello, link.peer)
        self._schedule_soon()
        why = "cancelled"
        try:
            while True:
                message = await link.receive()
                if member.state is WorkerState.GONE:
                    return
                self._handle(member, message)
        except Malformed as e:
            why = f"sent a malformed frame: {e}"
        except BadFrame as e:
            why = str(e)
        except LinkClosed as e:
            why = f"link closed ({e})"
        finally:
            self._lose(id, why)
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    def _handle(self, member: Member, message: object) -> None:
        id, now = member.id, _now()
        if self.members.seen(id, now, message if isinstance(message, m.Stats) else None):
            self._events.instant("worker_well", worker=id)
            self._schedule_soon()
        match message:
            case m.Tokens():
                self._accept(member, message)
            case m.Stats():
                self.weights.progress(member, message)
                if member.contended:
                    self._schedule_soon()  # its responses may have to make room for other jobs
            case m.AskRoute():
                self.weights.ask(member, message)
            case m.Capacity():
                if self.borrowing.report(member, message, now):
                    self._schedule_soon()
            case m.Loaded():
                self._loaded(member, message, now)
            case m.LoadFailed():
                self.loading.failed(member, message)
            case m.Released():
                self._released(member, message.handles)
            case m.Rejected():
                self._rejected_by(member, message)
            case m.Notice():
                self._warned(member, message)
            case m.Left():
                if message.refused:
                    self.refusals.refused(member, message.why, now)
                self._lose(id, f"left: {'refused: ' if message.refused else ''}{message.why}")
            case _:
                raise Malformed(f"unexpected message {type(message).__name__}")

    def _loaded(self, member: Member, message: m.Loaded, now: float) -> None:
        id, booted = member.id, member.booted
        self.turns.cleared(id)
        self._set_engine(member, message.engine)
        if not self.loading.done(member, message, now):
            return
        if not booted:
            self._join_s = now - member.joined_s
        missing = [policy for policy, held in member.held.items() if held.version < 0]
        if missing and len(member.held) - len(missing) >= _most_policies(member.engine, member.lends):
            for policy in missing:  # it has no room for them
                self.weights.leave(member, policy)
                del member.held[policy]
        self.refusals.ready()
        self._schedule_soon()
        # Its running responses of this policy are prefilled with the new weights.
        if context := sum(map(context_of, self.ledger.held(id, message.policy))):
            self.accounts.moved_in(now, id, context, self.placement.speeds.prefill_tok_per_s(id))
            self.ledger.counts.prefilled_again += context

    def _set_engine(self, member: Member, engine: Capabilities) -> None:
        if not engine.name:
            return
        member.engine = replace(engine, name=engine.name[:MAX_NAME], version=engine.version[:MAX_NAME])
        self.ledger.engines[member.id] = member.engine.rounding

    def _accept(self, member: Member, frame: m.Tokens) -> None:
        if strange := frame.versions.keys() - member.held.keys():
            raise Malformed(f"has a version of policy {clip(min(strange))!r}, which it was not asked for")
        batch, now = self.ledger.running(member.id), member.seen_s
        context = self.ledger.context(member.id)
        # A worker that began a pull before the trainer fell back may have weights that no longer belong to the version.
        loaded = {
            policy: held.version if self.versions[policy].window.allows(held.version, held.digest) else -1
            for policy, held in member.held.items()
        }
        accepted = self.ledger.accept(member.id, frame, loaded=loaded)
        member.generated += accepted.tokens
        if accepted.tokens:
            # Otherwise it has prefilled all its responses of a policy again.
            if frame.by_policy.items() <= member.frame_versions.items():
                self.placement.observe(member.id, batch, accepted.tokens, now - member.last_tokens_s, context)
            self.accounts.frame(now, member.id, accepted.tokens, accepted.tokens_of)
        member.last_tokens_s = now
        member.frame_versions |= frame.by_policy
        if batch:
            self._account_idle(member.id)
        if self.journal is not None and accepted.tokens:
            self.journal.write_tokens(frame, None if accepted.complete else accepted.rows)
            self._flush_soon()
        if accepted.dropped:
            self._send(member.id, m.Cancel(handles=tuple(accepted.dropped)))
        for id in accepted.ended_turns:
            self._turn_ended(id, member.id)
            self._owners[id].turn_ended(id)
        if accepted.ended_turns or accepted.dropped:
            self._schedule_soon()

    def _rejected_by(self, member: Member, message: m.Rejected) -> None:
        """The worker is too small for this response and others that need as much room: another worker gets it. Or the
        response is invalid: it fails, and the worker's room is as it was."""
        if (entry := self.ledger.held_with(member.id, message.handle)) is None:
            return
        id, needed, why = entry.episode.id, room(entry.episode), message.why[:MAX_CHARS]
        if message.invalid:
            self._owners[id].rejected(id, f"worker {member.id} says that it is invalid: {why}")
            return
        member.longest = min(member.longest, needed - 1)
        member.why = why
        self._events.instant("work_rejected", worker=member.id, response=id, tokens=needed, why=why)
        self.ledger.requeue(entry)
        self._account_idle(member.id)
        self._schedule_soon()

    def _check_room(self, now: float) -> None:
        """Report a queued response that fits on no worker; reject it after NO_ROOM_S."""
        entry, most, staying = None, math.inf, list[Member]()
        for policy in self.versions:
            here = self.members.here()
            staying = [w for w in here if policy in w.held and w.state is not WorkerState.DRAINING]
            most = max((w.longest for w in staying if w.booted), default=math.inf)
            if (entry := self.placement.too_long(most, policy)) is not None:
                break
        if entry is None:
            self._no_room_s = math.inf
            return
        id, needed = entry.episode.id, room(entry.episode)
        if math.isinf(self._no_room_s):
            self._no_room_s = now
            self._events.instant("no_room", response=id, tokens=needed, most=most)
        elif now - self._no_room_s >= NO_ROOM_S and all(w.booted for w in staying):
            self._no_room_s = math.inf
            what = f"it needs room for {needed} tokens (its prompt and rollout.max_tokens)"
            most_room = f"for {NO_ROOM_S:g} s no worker has had more than {most:g}"
            fix = f"Set engine.kv_tokens to {needed + 1} or more, or add a worker with more memory"
            self._owners[id].rejected(id, f"{what}, and {most_room}. {fix}")

    def _released(self, member: Member, handles: tuple[int, ...]) -> None:
        was_busy = self.ledger.running(member.id) > 0
        for handle in handles:
            self._releasing.pop(handle, None)
            if entry := self.ledger.held_with(member.id, handle):
                self.ledger.requeue(entry)
                member.moved += 1
        if was_busy:
            self._account_idle(member.id)
        self._schedule_soon()

    def _account_idle(self, worker: str) -> None:
        """Account the worker as idle if it has no work left."""
        if not self.ledger.running(worker):
            self.accounts.idle(_now(), worker)

    def _warned(self, member: Member, notice: m.Notice) -> None:
        """Drain the worker shortly before its machine is taken. A second notice counts only if its end is earlier."""
        source, detail = notice.source[:MAX_CHARS], notice.detail[:MAX_CHARS]
        left_s = 0.0 if notice.left_s is None or not math.isfinite(notice.left_s) else notice.left_s
        loop = asyncio.get_running_loop()
        at_s, timer = loop.time() + max(0.0, left_s - DRAIN_LEAD_S), self.drain_timers.get(member.id)
        if timer is not None:
            if timer.when() <= at_s:
                return
            timer.cancel()
        elif member.state is WorkerState.DRAINING:
            return
        member.preempted, member.why = source not in OPERATOR_SOURCES, f"{source}: {detail}"
        self._events.instant("worker_warned", worker=member.id, source=source, left_s=notice.left_s, detail=detail)
        if not self._migration:  # a response that it cannot finish would start again from its first token
            self._stop_assigning(member.id, member.why)
        self.drain_timers[member.id] = loop.call_at(at_s, self.drain, member.id, "warned")

    def rebuild_fp8_engines(self, why: str) -> None:
        """Ask the workers that have a KV cache in fp8, or may be building one, to join again: the spec has changed."""
        for member in [w for w in self.members.here() if not w.lends]:
            if member.engine.kv_dtype == "fp8" or not member.engine.name:
                self.drain(member.id, why, again=True)

    def drain(self, id: str, why: str, *, again: bool = False) -> None:
        """Ask a worker to send what it has and leave, or to join `again`. Its responses move once it has done so."""
        member = self.members.all.get(id)
        if member is None or member.state is WorkerState.GONE:
            return
        self._stop_assigning(id, why)
        member.drain_sent_s = min(member.drain_sent_s, _now())
        self._send(id, m.Drain(why=why, again=again))

    def _stop_assigning(self, id: str, why: str) -> None:
        """Assign no more work to a worker that is going to leave."""
        if self.members.all[id].state is not WorkerState.DRAINING:
            self.members.move(id, WorkerState.DRAINING, why)
            self.accounts.draining(_now(), id)

    def pause(self, id: str) -> None:
        """Move the worker's responses elsewhere. It keeps its weights and waits."""
        self.members.move(id, WorkerState.PAUSED)
        self.accounts.paused(_now(), id)
        self._send(id, m.Pause())
        self._request_release(id, self.ledger.held(id))

    def resume(self, id: str) -> None:
        for held in self.members.all[id].held.values():
            held.requested = (held.version, held.digest)  # otherwise a load that failed meanwhile is not retried
        self.members.move(id, WorkerState.READY)
        self.accounts.resumed(_now(), id)
        self._send(id, m.Resume())
        self._schedule_soon()

    def _lose(self, id: str, why: str) -> None:
        """Remove a worker, whatever happened to it, and queue its responses for others."""
        member, why = self.members.all.get(id), why[:MAX_CHARS]
        if member is None or member.state is WorkerState.GONE:
            return
        entries = self.ledger.held(id)
        tokens = sum(len(e.episode.tokens) for e in entries)
        self._releasing = {handle: worker for handle, worker in self._releasing.items() if worker != id}
        self.ledger.release(id)
        if fatal := self.ledger.find_fatal(entries):
            lost = f"{fatal.lost_in_a_row} workers in a row were lost while they held this response"
            self._owners[fatal.episode.id].rejected(fatal.episode.id, f"{lost}; the last one: {why}")
        member.moved += len(entries)
        drained = member.state is WorkerState.DRAINING
        self.members.move(id, WorkerState.GONE, why)
        if id in self.drain_timers:
            self.drain_timers.pop(id).cancel()
        now = _now()
        self.placement.forget(id)
        self.siblings.forget(id)
        self.accounts.gone(now, id, heard_s=member.seen_s)
        name, s = "worker_left" if drained else "worker_lost", now - member.joined_s
        self._events.instant(name, worker=id, why=why, moved=len(entries), kept_tokens=tokens, s=s)
        self._outbox.close(id, why)
        self.weights.leave(member)
        self._schedule_soon()

    async def watch(self) -> None:
        """Look for silent and stuck workers, and for work that no worker can do, until the run ends."""
        loop, tick_s = asyncio.get_running_loop(), self.members.patience.tick_s
        last_usable_s = last_event_s = loop.time()
        while True:
            now = loop.time()
            for policy in self.versions:
                if not self.loading.served(policy):
                    self.members.extend_deadlines(now, policy)
            for change in self.members.tick(now, self.ledger.running):
                if change.what == "gone":
                    self._lose(change.id, change.why)
                    continue
                self._events.instant(f"worker_{change.what}", worker=change.id, why=change.why)
                if change.what == "stuck":
                    self.drain(change.id, change.why)
            self._switch(now)
            if self.ledger.queued or self.placement.nearly_full(self.members.here()):
                self._schedule_soon()  # work may have been held back for a worker that takes too long
            self._check_room(now)
            for worker, message in self.siblings.choose(now, self._outbox.idle):
                self._send(worker, message)
            if self.ledger.queued and (error := self.refusals.check(self.members.here(), now)):
                self.on_failure(error)
            if not self.ledger.queued or self.borrowing.usable(self.members.here(), now):
                last_usable_s = now
            elif now - max(last_usable_s, last_event_s) >= NO_WORKERS_S:
                last_event_s = now
                queued, lenders = self.ledger.queued, self.members.count  # no other workers are here
                self._events.instant("no_workers", queued=queued, lenders=lenders, s=now - last_usable_s)
            await asyncio.sleep(tick_s)

    def _switch(self, now: float) -> None:
        """Have a worker join again with another base, if that is needed more: the one that loses least."""
        if not self.holding.due(now):
            return
        switch = self.holding.switch(self._demands(self._bases()), now, self._join_s)
        if switch is None:
            return
        source, target = switch
        able = [
            w for w in self.members.here()
            if w.base == source and not w.lends and not w.local and w.state in (WorkerState.READY, WorkerState.PULLING)
        ]  # fmt: skip
        if able:
            worker = min(able, key=lambda w: self.ledger.context(w.id))
            self._switching[worker.name] = target, now
            self._events.instant("worker_switched", worker=worker.id, source=source, target=target)
            self.drain(worker.id, f"more responses wait for {target}", again=True)

    def _flush_soon(self) -> None:
        """Flush once per round of the event loop: a controller that is killed loses at most the frames of one round."""
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self.journal is not None:
            self.journal.flush()

    # Work is assigned and taken back.

    def _schedule_soon(self) -> None:
        """Schedule once per round of the event loop, no matter how often this is called. In a large fleet, where it is
        called more often and scheduling takes longer, schedule less often."""
        if not self._scheduled:
            self._scheduled = True
            loop = asyncio.get_running_loop()
            at_s = self._last_schedule_s + max(0, self.members.count - SMALL_FLEET) * PAUSE_PER_WORKER_S
            if at_s <= loop.time():
                loop.call_soon(self._schedule)
            else:
                loop.call_at(at_s, self._schedule)

    def _schedule(self) -> None:
        """Have outdated workers load the newest versions; then assign queued work or, if there is none, rebalance."""
        self._scheduled, self._last_schedule_s = False, _now()
        if self.journal is not None:
            self.journal.flush()
        offered = [versions for versions in self.versions.values() if versions.offer is not None]
        if not offered:
            return
        self.loading.request_all(self.ledger, self.borrowing)
        ready = {versions.name: self._ready(versions) for versions in offered}
        self._borrow(ready)
        waiting = [
            (self.ledger.entries[queue[0]].number, policy) for policy, queue in self.ledger.queues.items() if queue
        ]
        for _, policy in sorted(waiting):  # the one whose next response was opened first
            if policy in ready and not self.placement.nothing_to_assign(ready[policy]):
                self._assign_queued(policy, ready[policy])
        queued = {self.versions[policy].base for _, policy in waiting}
        for base, policies in self._bases().items():
            if base not in queued and not self._releasing:
                others = [{w.id for w in ready.get(policy, ())} for policy in policies[1:]]
                self._reclaim([w for w in ready.get(policies[0], ()) if all(w.id in ids for ids in others)])

    def _ready(self, versions: PolicyVersions) -> list[Member]:
        """The workers that get work of this policy. A response that starts on older weights would be older than
        admission assumes (tasks/admission.py)."""
        name, newest = versions.name, versions.window.newest
        return [w for w in self.members.routable(versions) if w.held[name].version == newest and self._open(w)]

    def _assign_queued(self, policy: str, ready: Sequence[Member]) -> None:
        now, versions = self._last_schedule_s, {w.id: w.held[policy].version for w in ready}
        loads, longest = self.placement.loads(ready), {w.id: w.longest for w in ready}
        coming = sum(policy in w.held for w in self.borrowing.usable(self.members.nearly_ready(now), now))
        placed = self.placement.assign(loads, versions, coming=coming, longest=longest, policy=policy)
        for worker, entries in placed.items():
            self._assign(worker, entries)

    def _reclaim(self, ready: Sequence[Member]) -> None:
        """Move running responses among these workers, each of which can take any of them."""
        if ready:
            longest = {w.id: w.longest for w in ready}
            for worker, entry in self.placement.reclaim(self.placement.loads(ready), longest):
                self._request_release(worker, [entry])
            self.accounts.gathered(self.placement.take_gathering())

    def _borrow(self, ready: Mapping[str, Sequence[Member]]) -> None:
        """Decide which lenders to use. `ready`: by policy."""
        needed = 0
        for policy, members in ready.items():
            most = max((w.longest for w in members if not w.lends), default=math.inf)
            if (too_long := self.placement.too_long(most, policy)) is not None:
                needed = room(too_long.episode)
        each = list({w.id: w for members in ready.values() for w in members}.values())
        here = list(self.members.here())
        running, profile = self.ledger.running, self.placement.speeds.profile
        self.borrowing.update(here, each, self.ledger.queued, running, profile, self._last_schedule_s, room=needed)

    def _open(self, member: Member) -> bool:
        """Whether the worker takes work now: an engine without live slots only if it is idle."""
        return member.engine.live_slots or not self.ledger.running(member.id)

    def _assign(self, worker: str, entries: list[LedgerEntry]) -> None:
        """Send a worker the responses that the ledger has just assigned to it."""
        now = _now()
        if self.ledger.running(worker) == len(entries):  # it was idle, and idle time is not part of a step time
            self.members.all[worker].last_tokens_s = now
            self.accounts.busy(now, worker)
        if moved := [e for e in entries if e.moved]:
            prefilled_again = sum(len(e.episode.prompt) + len(e.episode.tokens) for e in moved)
            speed, sources = self.placement.speeds.prefill_tok_per_s(worker), [e.last_worker for e in moved]
            self.accounts.moved_in(now, worker, prefilled_again, speed, sources=sources)
        if self.journal is not None:
            policies = {e.handle: e.policy for e in entries if e.policy}
            self.journal.write_assigned({e.handle: e.episode.id for e in entries}, policies)
        for e in entries:
            self.turns.assigned(e.episode.id, worker)
        engine = self.members.all[worker].engine
        self.siblings.assigned(worker, entries, drafts=engine.drafts)
        for work in work_frames(entries, exact=engine.exact):
            self._send(worker, m.Assign(work=work))

    def _request_release(self, worker: str, entries: list[LedgerEntry]) -> None:
        """Ask a worker to give these responses back, so that others can continue them."""
        handles = tuple(e.handle for e in entries)
        if handles:
            self._releasing |= dict.fromkeys(handles, worker)
            self._send(worker, m.Release(handles=handles))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _most_policies(engine: Capabilities, lends: bool) -> int:
    """How many policies a worker can hold: as many as its engine has slots for adapters. All, while that is not known;
    one without such slots, and on a lender."""
    return 1 if lends else max(1, engine.adapters) if engine.name else sys.maxsize


class Outbox:
    """Messages on their way to workers: one queue and one link per worker. If a queue is full, its worker does not
    read."""

    def __init__(self, lose: Callable[[str, str], None]) -> None:
        """`lose(worker, why)` is called when nothing more can be sent to a worker."""
        self._lose = lose
        self._queues: dict[str, asyncio.Queue[Any]] = {}
        self._links: dict[str, Link] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def open(self, worker: str, link: Link) -> asyncio.Task[None]:
        """Start sending to a worker. Returns the task that sends until it is canceled."""
        self._links[worker], self._queues[worker] = link, asyncio.Queue(MAX_QUEUED)
        sending = asyncio.create_task(self._send_queued(worker, link), name=f"send to {worker}")
        sending.add_done_callback(errors.report_failure)
        return sending

    def close(self, worker: str, why: str) -> None:
        link = self._links.pop(worker)
        del self._queues[worker]
        closing = asyncio.create_task(link.close(why))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def idle(self, worker: str) -> bool:
        """Whether every message to the worker has been sent."""
        return worker in self._queues and self._queues[worker].empty()

    def send(self, worker: str, message: object) -> None:
        """Queue a message. It is dropped if the worker is gone."""
        queue = self._queues.get(worker)
        if queue is None:
            return
        try:
            queue.put_nowait(message)
        except asyncio.QueueFull:
            # Called later: the sender of this message is still in the middle of a decision.
            why = f"does not read: {MAX_QUEUED} messages wait for it"
            asyncio.get_running_loop().call_soon(self._lose, worker, why)

    async def _send_queued(self, worker: str, link: Link) -> None:
        queue = self._queues[worker]
        try:
            while True:
                await link.send(await queue.get())
        except LinkClosed as e:
            self._lose(worker, f"link closed ({e})")
