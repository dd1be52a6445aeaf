"""Places responses on workers, and takes them back to move them: applies balance.py to the ledger. No
clock, no I/O.

    Example: the queue is ["1/0", "1/1", "2/0"], `a` and `b` have free slots, and `b` has the prompt of group 1 in its
    prefix cache.

    Next turns of a response are placed first, where their tokens are (turns.py). With the order "context", responses
    are taken from the queue by their expected lengths (order.py, lengths.py); with any order, only while there will be
    room for them in KV caches (kv_room.py).

    loads()     the running responses, slots and speed of every worker, from the ledger and the speeds measured here
    assign()    takes responses from the queue and assigns them: 1/0 and 1/1 to `b` (their prefix), 2/0 to `a`
    reclaim()   chooses, once the queue is empty, responses that should move; their workers release them, they return to
                the queue, and assign() gives each to the target of its move

`Placement` stores what these decisions need: the speed of every worker, which groups each worker has in its prefix
cache, the target of every move, and the mean length of responses.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import msgspec
import numpy as np
import xxhash

from windfall.controller.cost.bill import Gathering
from windfall.controller.ledger.episode import Episode
from windfall.controller.ledger.ledger import Ledger, LedgerEntry, room
from windfall.controller.scheduling.balance import ROUND_TRIP_S, Move, Running, WorkerLoad, busy_s, place, rebalance
from windfall.controller.scheduling.kv_room import NEARLY_FULL, KvLoad, KvRow, more_responses, relieve
from windfall.controller.scheduling.lengths import LengthPredictor
from windfall.controller.scheduling.local_time import FleetSpeed
from windfall.controller.scheduling.order import by_context
from windfall.controller.scheduling.tails import keep_merged, merge
from windfall.controller.scheduling.turns import NextTurn, Turns, route
from windfall.controller.workers.members import Member
from windfall.controller.workers.worker_speed import WorkerSpeeds
from windfall.step_time import StepTime

PREFILL_SHARE = 0.1
"""If more than this share of a worker's tokens must be prefilled again, ignore its step times: they measure prefill,
not decode."""
MAX_TAIL = 1024
"""The value of moves is computed only while at most this many responses run: it takes a look at all of them."""
STALLED_S = 2.0
"""A worker that has work and made no engine step for this many seconds gets no next turns."""


@dataclass(slots=True)
class _Prefill:
    """Tokens that a worker prefills again."""

    last: LedgerEntry
    """The last response of the prefill; when it continues, the prefill is complete."""
    tokens: int = 0
    seconds: float = 0.0
    """Seconds since the responses were assigned, minus the expected time of the worker's decode steps."""


class Placement:
    def __init__(
        self, ledger: Ledger, *, balancing: bool = True, affinity: bool = True,
        order: Literal["context", "fifo"] = "fifo", step_groups: int = 0,
    ) -> None:  # fmt: skip
        """`balancing` False: all workers count as equally fast, and running responses do not move. `affinity` False:
        what is in a worker's prefix cache does not matter. `order`: as in the recipe. `step_groups`: groups of a step,
        if those of several steps are open at once."""
        self.speeds, self.turns, self.lengths = WorkerSpeeds(), Turns(), LengthPredictor()
        self._by_context, self._step_groups = order == "context", step_groups
        self._ledger = ledger
        self._balancing = balancing
        self._affinity = affinity
        self._prefix_holders: dict[str, dict[str, None]] = {}
        """By group: the workers that have its prompt in their prefix cache. They are in the order in which they got it,
        so that the order does not depend on the process."""
        self.move_targets: dict[str, str] = {}
        """By response: the worker to which it is being moved."""
        self._finished = self._finished_tokens = 0
        self._kv_full: dict[str, int] = {}
        """By worker: number of responses beside which no more fit into its KV cache."""
        self._gathering = Gathering()
        self._tasks: dict[str, int] = {}
        """By open group: a digest of its prompt, which is the same in every epoch."""
        self._least_context: dict[str, int] = {}
        """By worker: a lower bound for the context of its responses. A context only grows, so a bound stays one until
        the worker gets another response."""
        self._prefilling: dict[str, _Prefill] = {}
        """By worker: the responses begun elsewhere that it prefills, if these are a large part of its tokens."""

    @property
    def typical(self) -> float:
        """Mean number of tokens that a response generates before it ends or waits for its environment: its length, or
        that of a turn if there are several; 0: not known."""
        if self.turns.several:
            return self.turns.typical
        return self._finished_tokens / self._finished if self._finished else 0.0

    def rate(self, member: Member, responses: int, sharing: int) -> float:
        """Expected tokens per second of a worker that gets an equal share of `responses` among `sharing` workers; 0:
        not known."""
        batch = min(member.lendable, -(-responses // max(1, sharing)))
        return self.speeds.tok_per_s(member.id, batch) if batch else 0.0

    def fleet_speed(self, members: Iterable[Member]) -> FleetSpeed | None:
        """The combined speed of these workers; None if the speed of one is not known, or if there are no workers."""
        counts: dict[StepTime, int] = {}
        slots = 0
        for member in members:
            profile = self.speeds.profile(member.id)
            if profile is None:
                return None
            if member.lendable:
                counts[profile] = counts.get(profile, 0) + 1
                slots += member.lendable
        return FleetSpeed(tuple(counts.items()), slots) if counts else None

    def observe(self, worker: str, batch: int, tokens: int, seconds: float, context: int) -> None:
        """Learns the speed of a worker from a frame, or the speed of its prefill while it prefills moved responses."""
        prefill = self._prefilling.get(worker)
        if prefill is None:
            self.speeds.observe(worker, batch, tokens, seconds, context)
            return
        rate = self.speeds.tok_per_s(worker, batch)
        prefill.seconds += seconds - (tokens / rate if rate else 0.0)
        if prefill.last.worker != worker:  # it ended or moved away before it was seen to continue here
            del self._prefilling[worker]
        elif len(prefill.last.episode.tokens) > prefill.last.recorded:
            self.speeds.prefilled(worker, prefill.tokens, prefill.seconds)
            del self._prefilling[worker]

    def forget(self, worker: str) -> None:
        """The worker is gone."""
        self.speeds.forget(worker)
        self.turns.cleared(worker)
        self._prefilling.pop(worker, None)
        self._least_context.pop(worker, None)
        self._kv_full.pop(worker, None)

    def loads(self, ready: Iterable[Member]) -> list[WorkerLoad]:
        speed = self.speeds.profile if self._balancing else lambda worker: None
        running = self._ledger.running
        return [
            WorkerLoad(
                worker=w.id, running=(count := running(w.id)), slots=w.open_slots, profile=speed(w.id),
                waiting=min(w.stats.waiting, count) if w.stats and w.stats.waiting else 0,
                prefill_tok_per_s=self.speeds.prefill_tok_per_s(w.id), turn_preference=_turn_preference(w),
                stalled=w.stats is not None and w.stats.idle_s >= STALLED_S, kv_tokens=w.kv_tokens,
                contended=w.contended,
            )
            for w in ready
        ]  # fmt: skip

    def nothing_to_assign(self, ready: Collection[Member]) -> bool:
        """Whether all slots are taken. In a large fleet this is so in most rounds, and computing its loads takes
        long."""
        running = self._ledger.running
        return not self.turns.queued and not any(running(w.id) < w.open_slots for w in ready)

    def too_long(self, most: float, policy: str = "") -> LedgerEntry | None:
        """The first queued response of this policy that needs room for more tokens than `most`."""
        if self._ledger.longest <= most:
            return None
        queued = (self._ledger.entries[id] for id in self._ledger.queues[policy])
        return next((entry for entry in queued if room(entry.episode) > most), None)

    def assign(
        self, loads: Sequence[WorkerLoad], versions: Mapping[str, int], *, coming: int,
        longest: Mapping[str, float] | None = None, policy: str = "",
    ) -> dict[str, list[LedgerEntry]]:  # fmt: skip
        """Takes the responses of this policy that should start now from its queue and assigns them. `versions`: the
        version that each worker holds. `longest`: the most tokens for which a worker has room, where known. A response
        goes only where it fits. Responses that fit on the fewest workers are placed first."""
        out: dict[str, list[LedgerEntry]] = {}
        waiting = self._assign_turns(loads, versions, longest, policy, out)
        sizes = [(longest or {}).get(load.worker, math.inf) for load in loads]
        small = sorted({size for size in sizes if size < self._ledger.longest})
        for n in range(len(small), -1, -1):  # one pass in most fleets, where no worker is too small
            fit = [load for load, size in zip(loads, sizes, strict=True) if n == 0 or size > small[n - 1]]
            fit = [_with(load, len(out.get(load.worker, ()))) for load in fit]
            self._assign_queued(self._queued(small, n, waiting, policy), fit, versions, coming, out)
        for worker, entries in out.items():
            moved = [e for e in entries if e.moved or e.episode.turn_start]
            tokens = sum(self._to_prefill(e, worker) for e in moved)
            if tokens > PREFILL_SHARE * self._ledger.context(worker):
                before = self._prefilling.get(worker, _Prefill(moved[-1]))
                self._prefilling[worker] = _Prefill(moved[-1], before.tokens + tokens, before.seconds)
        return out

    def _to_prefill(self, entry: LedgerEntry, worker: str) -> int:
        """Tokens that the worker must prefill before a response that has begun can continue."""
        holder, kept = self.turns.holder(entry.episode.id)
        context = len(entry.episode.prompt) + len(entry.episode.tokens)
        return max(0, context - kept) if holder == worker else context

    def _assign_turns(
        self, loads: Sequence[WorkerLoad], versions: Mapping[str, int], longest: Mapping[str, float] | None,
        policy: str, out: dict[str, list[LedgerEntry]],
    ) -> set[str]:  # fmt: skip
        """Assigns next turns. Returns those that wait for the worker that has their tokens."""
        if not self._affinity or not self._balancing or not self.turns.queued:
            return set()
        next_turns = []
        for id in self.turns.queued:
            if (entry := self._ledger.entries[id]).policy != policy:
                continue
            episode, (holder, kept) = entry.episode, self.turns.holder(id)
            context = len(episode.prompt) + len(episode.tokens)
            next_turns.append(NextTurn(id=id, context=context, holder=holder, kept=kept, room=room(episode)))
        routes = route(next_turns, loads, typical=self.turns.typical, longest=longest)
        for id, worker in routes.placed:
            self._take(id, worker, versions, out)
        return routes.waiting

    def _queued(self, small: Sequence[float], n: int, waiting: Collection[str], policy: str) -> Sequence[str]:
        """Queued responses of this policy, in order, that need more room than the first n sizes of `small`, but not
        more than the next. Without those that wait for one worker."""
        ledger = self._ledger
        queue = ledger.queues[policy]
        if not small and not waiting:
            return queue
        queued = [(id, ledger.entries[id].episode) for id in queue if id not in waiting]
        return [id for id, e in queued if bisect_left(small, room(e)) == n]

    def _assign_queued(
        self, queued: Sequence[str], loads: Sequence[WorkerLoad], versions: Mapping[str, int], coming: int,
        out: dict[str, list[LedgerEntry]],
    ) -> None:  # fmt: skip
        if not queued:
            return
        loads = self._within_kv(loads, queued[0])
        first = self._first(queued, _free_slots(loads))
        if first and first[0] != queued[0]:  # it may be longer
            loads = self._within_kv(loads, first[0])
            first = first[: _free_slots(loads)]
        for id, worker in self.choose(first, loads, backlog=len(queued) - len(first), coming=coming):
            self._take(id, worker, versions, out)

    def _first(self, queued: Sequence[str], count: int) -> list[str]:
        """The first `count` queued responses, by the order of the recipe (order.py)."""
        if not self._by_context or len(queued) <= count or self.turns.several:  # turns come in the order of the queue
            return list(islice(queued, count))
        entries = self._ledger.entries
        episodes = (entries[id].episode for id in queued)
        head = next((n for n, e in enumerate(episodes) if not e.tokens and e.version is None), len(queued))

        def length(id: str) -> float:
            episode = entries[id].episode
            return self.lengths.order_length(_group(id), self._task(episode), episode.max_tokens)

        return by_context(queued, count, begun=self._prefix_holders, length=length, step=self._step_of, head=head)

    def _step_of(self, group: str) -> int:
        """The step that a group was drawn for, if those of several steps are open at once."""
        index = group.rpartition(":")[2]
        return int(index) // self._step_groups if self._step_groups and index.isdigit() else 0

    def _within_kv(self, loads: Sequence[WorkerLoad], next_id: str) -> Sequence[WorkerLoad]:
        """The loads with only as many slots as will have room in the KV cache for responses like the next one."""
        if not self._balancing or not self.lengths.known or not any(load.kv_tokens for load in loads):
            return loads
        new = self._kv_row(self._ledger.entries[next_id].episode)
        return [
            msgspec.structs.replace(load, slots=min(load.slots, load.running + self._more_responses(load, new)))
            if load.kv_tokens and load.running < load.slots
            else load
            for load in loads
        ]

    def _more_responses(self, load: WorkerLoad, new: KvRow) -> int:
        """How many responses may begin on a worker. Once it has room for none, that remains so until one ends."""
        if not load.running or self._kv_full.get(load.worker) != load.running:
            more = max(more_responses(self._kv_rows(load.worker), new, load.kv_tokens), not load.running)
            self._kv_full[load.worker] = -1 if more else load.running
            return more
        return 0

    def _kv_rows(self, worker: str) -> list[KvRow]:
        """The responses that a worker has in its KV cache. Siblings share the pages of their prompt."""
        rows, groups = [], set[str]()
        for entry in self._ledger.held(worker):
            group = _group(entry.episode.id)
            rows.append(self._kv_row(entry.episode, alone=group not in groups))
            groups.add(group)
        return rows

    def _kv_context(self, worker: str, kv_tokens: int) -> int:
        """Tokens in a worker's KV cache of `kv_tokens`. Shared prompts count once only if it is nearly full without
        that: it takes a look at all responses of the worker."""
        most = self._ledger.context(worker)
        return sum(row.context for row in self._kv_rows(worker)) if most > NEARLY_FULL * kv_tokens else most

    def _kv_row(self, e: Episode, *, alone: bool = True) -> KvRow:
        mean, sigma = self.lengths.estimate(_group(e.id), self._task(e))
        context = len(e.tokens) + (len(e.prompt) if alone else 0)
        return KvRow(context=context, generated=len(e.tokens), limit=e.max_tokens, mean=mean, sigma=sigma)

    def _remaining(self, episode: Episode) -> float:
        """Tokens that a response is expected to generate from now on; 0 if nothing is known yet."""
        generated = len(episode.tokens)
        expected = self.lengths.expected(_group(episode.id), self._task(episode), generated)
        return max(0.0, min(expected, episode.max_tokens) - generated)

    def _task(self, episode: Episode) -> int:
        group = _group(episode.id)
        if group not in self._tasks:
            self._tasks[group] = xxhash.xxh3_64_intdigest(np.array(episode.prompt, np.uint32).tobytes())
        return self._tasks[group]

    def choose(
        self, queued: Sequence[str], loads: Sequence[WorkerLoad], *, backlog: int, coming: int
    ) -> list[tuple[str, str]]:
        """(response, worker) for each queued response that should start now (balance.py)."""
        return place(
            queued,
            loads,
            backlog=backlog,
            coming=coming,
            prefix_holders=self._prefix_holders if self._affinity else None,
            move_targets=self.move_targets,
        )

    def _take(self, id: str, worker: str, versions: Mapping[str, int], out: dict[str, list[LedgerEntry]]) -> None:
        """Take a response from the queue and assign it."""
        queue = self._ledger.queues[self._ledger.entries[id].policy]
        queue.remove(id)  # the head, unless an earlier response waits for more room
        self.move_targets.pop(id, None)
        self._prefix_holders.setdefault(_group(id), {})[worker] = None
        entry = self._ledger.assign(id, worker, versions[worker])
        alone = self._ledger.running(worker) == 1
        context = len(entry.episode.prompt) + len(entry.episode.tokens)
        self._least_context[worker] = context if alone else min(context, self._least_context.get(worker, 0))
        out.setdefault(worker, []).append(entry)

    def reclaim(
        self, loads: Sequence[WorkerLoad], longest: Mapping[str, float] | None = None
    ) -> list[tuple[str, LedgerEntry]]:
        """(worker, response that it should release) for each move; the queues are empty. `longest`: as in `assign`."""
        if not self._balancing:
            return []
        rooms, entries = longest or {}, self._ledger.entries

        def fits(id: str, worker: str) -> bool:
            return room(entries[id].episode) <= rooms.get(worker, math.inf)

        ends = self._is_the_end(loads)
        gathering = merge(loads, self.held, fits=fits) if ends else []
        if not gathering:
            gathering = [move for move in self.moves(loads) if fits(move.id, move.target)]
            gathering = keep_merged(loads, self.held, gathering) if ends else gathering
        moves = gathering or [move for move in self.relieving_moves(loads) if fits(move.id, move.target)]
        if gathering and ends:
            self._value(loads, moves)
        self.move_targets |= {move.id: move.target for move in moves}
        return [(move.source, entries[move.id]) for move in moves]

    def _is_the_end(self, loads: Sequence[WorkerLoad]) -> bool:
        """Whether few responses of the step are left, whose lengths can be predicted, and the step waits for the last
        one: several steps are not open at once."""
        known = self.lengths.known and not self.turns.several and not self._step_groups
        return known and sum(load.running for load in loads) <= MAX_TAIL

    def _value(self, loads: Sequence[WorkerLoad], moves: Sequence[Move]) -> None:
        """Add what these moves are expected to bring."""
        before, after = busy_s(loads, self.held), busy_s(loads, self.held, moves)
        released_s = [s for worker, s in before.items() if worker not in after]
        self._gathering += Gathering(
            moves=len(moves), released=len(released_s), freed_s=sum(released_s),
            sooner_s=max(before.values(), default=0.0) - max(after.values(), default=0.0),
        )  # fmt: skip

    def take_gathering(self) -> Gathering:
        """What was gathered since the last call."""
        gathering, self._gathering = self._gathering, Gathering()
        return gathering

    def moves(self, loads: Sequence[WorkerLoad]) -> list[Move]:
        """The running responses that should continue on another worker (balance.py)."""
        return rebalance(
            loads, self.held, typical=self.typical,
            least_context=lambda worker: self._least_context.get(worker, 0),
        )  # fmt: skip

    def relieving_moves(self, loads: Sequence[WorkerLoad]) -> list[Move]:
        """The running responses that should leave a worker before its engine must evict one (kv_room.py)."""
        if not self.lengths.known:
            return []
        return relieve(
            [
                KvLoad(
                    worker=load.worker, tokens=load.kv_tokens, context=self._kv_context(load.worker, load.kv_tokens),
                    free_slots=load.slots - load.running, step_s=load.profile.step_s(load.running),
                    prefill_s=load.prefill_s,
                )
                for load in loads
                if load.kv_tokens and load.profile is not None
            ],
            self._kv_rows,
            self.held,
            round_trip_s=ROUND_TRIP_S,
        )  # fmt: skip

    def nearly_full(self, members: Iterable[Member]) -> bool:
        """Whether the KV cache of a worker is nearly full, and that of another is not: responses may have to move."""
        if not self._balancing:
            return False
        full = {self._kv_context(w.id, w.kv_tokens) > NEARLY_FULL * w.kv_tokens for w in members if w.kv_tokens}
        return len(full) == 2

    def held(self, worker: str) -> list[Running]:
        """The responses that a worker has."""
        out = [
            Running(
                id=e.episode.id, context=len(e.episode.prompt) + len(e.episode.tokens), moves=e.moves,
                waiting=len(e.episode.tokens) == e.recorded,  # the worker has not sent a token of it
                remaining=self._remaining(e.episode) if not self.turns.several else 0.0,
            )
            for e in self._ledger.held(worker)
        ]  # fmt: skip
        self._least_context[worker] = min((r.context for r in out), default=0)
        return out

    def finished(self, episode: Episode) -> None:
        """A response has finished."""
        self._finished += 1
        self._finished_tokens += len(episode.tokens)
        group = _group(episode.id)
        if ":" not in group:  # held-out tasks and other scopes have lengths of their own
            self.lengths.finished(group, self._task(episode), len(episode.tokens))

    def done_with(self, group: str, size: int) -> None:
        """This group of `size` responses is complete: its prefix and moves are forgotten."""
        self._prefix_holders.pop(group, None)
        self._tasks.pop(group, None)
        self.lengths.complete(group)
        for sibling in range(size):  # a response may have finished on the worker that was asked to release it
            self.move_targets.pop(f"{group}/{sibling}", None)


def _group(id: str) -> str:
    return id.rpartition("/")[0]


def _free_slots(loads: Iterable[WorkerLoad]) -> int:
    return sum(max(0, load.slots - load.running) for load in loads)


def _with(load: WorkerLoad, more: int) -> WorkerLoad:
    return msgspec.structs.replace(load, running=load.running + more) if more else load


def _turn_preference(member: Member) -> float:
    if member.capacity is not None:
        return member.capacity.use
    return -1.0 if member.lease.kind == "reserved" else math.inf
