"""Between the ledger and the workers: gives out work, takes in tokens, notices who is gone. The only part of rollout
that waits for workers.

    attend(link)   one per worker    waits for: its next message    unblocked by: the worker, or its link's end
    _send          one per worker    waits for: something to send, room on the link (a full queue: the worker is lost)
    watch()        one               waits for: the next tick        finds the silent ones

Everything that decides is pure and elsewhere (ledger, members, balance); everything here acts in one event loop, with
no await between a decision and what it changes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from windfall.config import Techniques
from windfall.cost import prices
from windfall.cost.accounts import Accounts
from windfall.errors import WindfallError
from windfall.events.log import EventLog
from windfall.ledger.episode import Episode
from windfall.ledger.journal import Journal
from windfall.ledger.ledger import Ledger, LedgerEntry, Malformed, room
from windfall.link import messages as m
from windfall.link.base import BadFrame, Link, LinkClosed
from windfall.rollout.assignment import Offer, frames
from windfall.rollout.loading import WORDS, Loading
from windfall.rollout.outbox import Outbox
from windfall.rollout.refusals import Refusals
from windfall.scheduling.members import Member, Members, Patience, WorkerState
from windfall.scheduling.placement import Placement
from windfall.scheduling.room import Room
from windfall.types import LOCAL

ALONE_S = 15.0
"""Work without any worker for so long is worth a word, and another as long after."""
ASKED = ("sigterm", "ctrl-c")
"""Warnings that come from whoever runs the worker, not from whoever owns its machine."""
FEW, PAUSE_S = 256, 4e-5
"""Giving out work takes a few microseconds per worker, whatever there is to give. Above FEW workers it waits so long,
per worker, since the last time: at 10,000 a free slot may wait two fifths of a second; an eighth of a core does it."""
LEAVE_S = 2.0
"""A warned worker is drained this long before its machine is taken. A drain takes one engine step and a round trip."""


class Dispatch:
    def __init__(
        self, *, events: EventLog, journal: Journal | None = None, patience: Patience | None = None,
        vocabulary: int = 1 << 32,
        techniques: Techniques | None = None, billed_s: float = -math.inf,
    ) -> None:  # fmt: skip
        t = techniques or Techniques()
        self.ledger, self.members = Ledger(vocabulary, migrate=t.migration), Members(patience)
        self.placement, self.accounts = Placement(self.ledger, balancing=t.balancing), Accounts(billed_s)
        self.journal, self._migration = journal, t.migration
        self.room, self.refusals = Room(self.ledger), Refusals()
        self._events = events
        self._turn_ended: Callable[[str], None] = lambda id: None
        self._rejected: Callable[[str, str], None] = lambda id, why: None
        self.on_failure: Callable[[WindfallError], None] = lambda error: None
        """Called, every tick, when no worker will ever do the work that is queued."""
        self._outbox = Outbox(self._lose)
        self._tell = self._outbox.tell
        self.loading = Loading(self.members, self.accounts, events, self._tell, self.drain)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._releasing: dict[int, str] = {}
        """Handles that were asked back, and of whom. One may be over, otherwise, before the worker says Released."""
        self._settling = self._flushing = False
        self._settled_s = -math.inf

    # what rollout calls

    def close(self, id: str) -> None:
        """It is finished, and its group has it."""
        self.placement.finished(len(self.ledger.entries[id].episode.tokens))
        self.ledger.close(id)

    def listen(self, turn_ended: Callable[[str], None], rejected: Callable[[str, str], None]) -> None:
        self._turn_ended, self._rejected = turn_ended, rejected

    def open(self, episode: Episode) -> None:
        self.ledger.open(episode)
        self._soon()

    def go_on(self, id: str) -> None:
        self.ledger.go_on(id)
        self._soon()

    def withdraw(self, ids: list[str]) -> None:
        for worker, handles in self.ledger.withdraw(ids).items():
            self._tell(worker, m.Cancel(handles=tuple(handles)))
            self._idle_if(worker)

    @property
    def offer(self) -> Offer | None:
        """The version that work is given out with."""
        return self.loading.offer

    def set_offer(self, offer: Offer) -> None:
        self.loading.offer = offer
        self._soon()

    # workers come and go

    async def attend(self, link: Link, hello: m.Hello) -> None:
        """The whole life of one worker. Returns when it is gone."""
        now = asyncio.get_running_loop().time()
        member = self.members.join(hello.name, hello.lease, now, version=hello.version, digest=hello.digest)
        id = member.id
        self.placement.speeds.join(id, hello.lease.device)
        price = prices.of(hello.lease)
        started = now - hello.age_s if 0 <= hello.age_s < math.inf else now
        self.accounts.join(now, id, kind=hello.lease.kind, usd_per_h=price.or_none, trainer=hello.name == LOCAL,
                           started_s=started, name=hello.name)  # fmt: skip
        self._events.instant("worker_joined", worker=id, lease=hello.lease.kind, device=hello.lease.device,
                             usd_per_h=price.or_none, price_from=price.said, age_s=now - started)  # fmt: skip
        sender = self._outbox.open(id, link)
        self._soon()
        why = "cancelled"
        try:
            while True:
                message = await link.receive()
                if member.state is WorkerState.GONE:
                    return
                self._hear(member, message)
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

    def _hear(self, member: Member, message: object) -> None:
        id = member.id
        now = asyncio.get_running_loop().time()
        if self.members.seen(id, now, message if isinstance(message, m.Stats) else None):
            self._events.instant("worker_well", worker=id)
            self._soon()
        match message:
            case m.Tokens():
                self._take(member, message)
            case m.Stats():
                pass
            case m.Loaded():
                if self.loading.done(member, message, now):
                    self.refusals.ready()
                    self._soon()
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
                raise Malformed(f"a {type(message).__name__} was not expected")

    def _take(self, member: Member, frame: m.Tokens) -> None:
        batch, now = self.ledger.running(member.id), member.seen_s
        context = self.ledger.context(member.id)
        taken = self.ledger.take(member.id, frame)
        member.generated += taken.accepted
        if taken.accepted:
            self.placement.observe(member.id, batch, taken.accepted, now - member.last_tokens_s, context)
            self.accounts.frame(now, member.id, taken.accepted)
        member.last_tokens_s = now
        if batch:
            self._idle_if(member.id)
        if self.journal is not None and taken.accepted:
            self.journal.made(frame, None if taken.whole else taken.rows)
            self._flush_soon()
        if taken.dropped:
            self._tell(member.id, m.Cancel(handles=tuple(taken.dropped)))
        for id in taken.turns:
            self._turn_ended(id)
        if taken.turns or taken.dropped:
            self._soon()

    def _rejected_by(self, member: Member, message: m.Rejected) -> None:
        """This worker is too small for that response, and for all that need as much room: another makes it."""
        entry = next((e for e in self.ledger.held(member.id) if e.handle == message.handle), None)
        if entry is None:
            return
        needed, why = room(entry.episode), message.why[:WORDS]
        member.longest = min(member.longest, needed - 1)
        member.why = why
        self._events.instant("work_rejected", worker=member.id, response=entry.episode.id, tokens=needed, why=why)
        self.ledger.recall(entry.episode.id)
        self._idle_if(member.id)
        self._soon()

    def _look_for_room(self, now: float) -> None:
        if (verdict := self.room.look(self.members.here(), now)) is None:
            return
        if verdict.why:
            self._rejected(verdict.response, verdict.why)
        else:
            self._events.instant("no_room", response=verdict.response, tokens=verdict.tokens, most=verdict.most)

    def _released(self, member: Member, handles: tuple[int, ...]) -> None:
        held = {e.handle: e.episode.id for e in self.ledger.held(member.id)}
        for handle in handles:
            self._releasing.pop(handle, None)
            if handle in held:
                self.ledger.recall(held[handle])
                member.moved += 1
        if held:
            self._idle_if(member.id)
        self._soon()

    def _idle_if(self, worker: str) -> None:
        """It may have nothing left."""
        if not self.ledger.running(worker):
            self.accounts.idle(asyncio.get_running_loop().time(), worker)

    def _warned(self, member: Member, notice: m.Notice) -> None:
        source, detail = notice.source[:WORDS], notice.detail[:WORDS]
        left = 0.0 if notice.left_s is None or not math.isfinite(notice.left_s) else notice.left_s
        loop = asyncio.get_running_loop()
        at_s, timer = loop.time() + max(0.0, left - LEAVE_S), self._timers.get(member.id)
        if timer is not None:
            if timer.when() <= at_s:
                return
            timer.cancel()  # it is sooner than was said
        elif member.state is WorkerState.DRAINING:
            return
        member.preempted, member.why = source not in ASKED, f"{source}: {detail}"
        self._events.instant("worker_warned", worker=member.id, source=source, left_s=notice.left_s, detail=detail)
        if not self._migration:  # what it could not finish would have to be made again from its first token
            self._stop_giving(member.id, member.why)
        self._timers[member.id] = loop.call_at(at_s, self.drain, member.id, "warned")

    def drain(self, id: str, why: str) -> None:
        """Ask a worker to send what it has and go. Its responses move when it has."""
        member = self.members.all.get(id)
        if member is None or member.state is WorkerState.GONE:
            return
        self._stop_giving(id, why)
        member.drain_sent_s = min(member.drain_sent_s, asyncio.get_running_loop().time())
        self._tell(id, m.Drain(why=why))

    def _stop_giving(self, id: str, why: str) -> None:
        """It gets no more work, and is going to leave."""
        if self.members.all[id].state is not WorkerState.DRAINING:
            self.members.move(id, WorkerState.DRAINING, why)
            self.accounts.draining(asyncio.get_running_loop().time(), id)

    def pause(self, id: str) -> None:
        """Its responses go on elsewhere; it keeps its weights and waits."""
        self.members.move(id, WorkerState.PAUSED)
        self.accounts.paused(asyncio.get_running_loop().time(), id)
        self._tell(id, m.Pause())
        self._give_back(id, self.ledger.held(id))

    def resume(self, id: str) -> None:
        self.members.move(id, WorkerState.READY)
        self.accounts.resumed(asyncio.get_running_loop().time(), id)
        self._tell(id, m.Resume())
        self._soon()

    def _lose(self, id: str, why: str) -> None:
        """Whatever happened: this worker is no more, and what it held goes on elsewhere."""
        member, why = self.members.all.get(id), why[:WORDS]
        if member is None or member.state is WorkerState.GONE:
            return
        entries = self.ledger.held(id)
        tokens = sum(len(e.episode.tokens) for e in entries)
        self._releasing = {handle: worker for handle, worker in self._releasing.items() if worker != id}
        self.ledger.release(id)
        if poison := self.ledger.poison(entries):
            self._rejected(
                poison.episode.id, f"{poison.fruitless} workers in a row were lost with it, the last of them: {why}"
            )
        member.moved += len(entries)
        drained = member.state is WorkerState.DRAINING
        self.members.move(id, WorkerState.GONE, why)
        if id in self._timers:
            self._timers.pop(id).cancel()
        now = asyncio.get_running_loop().time()
        self.placement.forget(id)
        self.refusals.gone(member, now)
        self.accounts.gone(now, id, heard_s=member.seen_s)
        self._events.instant(
            "worker_left" if drained else "worker_lost", worker=id, why=why, moved=len(entries), kept_tokens=tokens,
            s=now - member.joined_s,
        )  # fmt: skip
        self._outbox.close(id, why)
        self._soon()

    async def watch(self) -> None:
        """Runs as long as the run does."""
        loop, tick_s = asyncio.get_running_loop(), self.members.patience.tick_s
        manned_s = told_s = loop.time()
        while True:
            now = loop.time()
            if not self.loading.served():
                self.members.extend_deadlines(now)
            for change in self.members.tick(now):
                if change.what == "gone":
                    self._lose(change.id, change.why)
                    continue
                self._events.instant(f"worker_{change.what}", worker=change.id, why=change.why)
                if change.what == "stuck":
                    self.drain(change.id, change.why)
            if self.ledger.queue:
                self._soon()  # what was held back for a worker that takes too long
            self._look_for_room(now)
            if self.ledger.queue and (error := self.refusals.look(self.members.here(), now)):
                self.on_failure(error)
            if not self.ledger.queue or any(True for _ in self.members.here()):
                manned_s = now
            elif now - max(manned_s, told_s) >= ALONE_S:
                told_s = now
                self._events.instant("no_workers", queued=len(self.ledger.queue), s=now - manned_s)
            await asyncio.sleep(tick_s)

    def _flush_soon(self) -> None:
        """Once per round of the event loop: a controller killed in between loses the frames of that round at most."""
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self.journal is not None:
            self.journal.flush()

    # giving out

    def _soon(self) -> None:
        """Once per round of the event loop is enough, however many reasons there are; less often in a large fleet,
        where there are more reasons and each takes longer to act on."""
        if not self._settling:
            self._settling = True
            loop = asyncio.get_running_loop()
            at_s = self._settled_s + max(0, self.members.count - FEW) * PAUSE_S
            if at_s <= loop.time():
                loop.call_soon(self._settle)
            else:
                loop.call_at(at_s, self._settle)

    def _settle(self) -> None:
        self._settling, self._settled_s = False, asyncio.get_running_loop().time()
        if self.journal is not None:
            self.journal.flush()
        offer = self.offer
        if offer is None:
            return
        self._bring_up_to_date()
        ready = self.members.routable(offer.version, offer.digest)
        loads, longest = self.placement.loads(ready), {w.id: w.longest for w in ready}
        if self.ledger.queue:
            coming = len(self.members.nearly_ready(asyncio.get_running_loop().time()))
            for worker, entries in self.placement.assign(loads, offer.version, coming=coming, longest=longest).items():
                self._give(worker, entries)
        elif loads and not self._releasing:
            for worker, entry in self.placement.reclaim(loads, longest):
                self._give_back(worker, [entry])

    def _bring_up_to_date(self) -> None:
        """Who lacks the version pulls it: at once when new, else when there is work that needs it."""
        offer, now = self.offer, asyncio.get_running_loop().time()
        assert offer is not None
        for member in self.members.outdated(offer.version, offer.digest, needed=bool(self.ledger.queue)):
            if member.state is not WorkerState.PULLING:  # else it gives up an older one
                self.members.pull(member.id, now)
                self.accounts.pulling(now, member.id)
            self.loading.ask(member)

    def _give(self, worker: str, entries: list[LedgerEntry]) -> None:
        self._given(worker, entries)
        if self.journal is not None:
            self.journal.assigned({e.handle: e.episode.id for e in entries})
        for work in frames(entries):
            self._tell(worker, m.Assign(work=work))

    def _given(self, worker: str, entries: list[LedgerEntry]) -> None:
        now = asyncio.get_running_loop().time()
        if self.ledger.running(worker) == len(entries):  # it had nothing: what came before was not this work's time
            self.members.all[worker].last_tokens_s = now
            self.accounts.busy(now, worker)
        again = sum(len(e.episode.prompt) + len(e.episode.tokens) for e in entries if e.moved)
        if again:
            self.accounts.moved_in(now, worker, again)

    def _give_back(self, worker: str, entries: list[LedgerEntry]) -> None:
        handles = tuple(e.handle for e in entries)
        if handles:
            self._releasing |= dict.fromkeys(handles, worker)
            self._tell(worker, m.Release(handles=handles))
