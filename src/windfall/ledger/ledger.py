"""Every token of every open response, each exactly once; who is making the next one; and what was refused.

    response:  QUEUED ⇄ RUNNING ▶ TURN ▶ closed        TURN: a turn is over, the environment is asked; it may
                 ▲                  │                   say something, and then the response is QUEUED again
                 └──────────────────┘

Rules, all in `check()`:
- a position is accepted once and in order, from the worker that holds the response, of the version it was given with;
- an assignment has a handle of its own; a frame with a handle that is over changes nothing and is counted;
- a response that lost its worker keeps every token it has, and is queued before those that have not begun;
- no accepted token is ever lost: accepted = in open responses + in closed ones + in those the run itself withdrew.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, repeat
from typing import Literal

from windfall.ledger import ends
from windfall.ledger.counts import Counts, Taken
from windfall.ledger.ends import Malformed
from windfall.ledger.episode import Episode
from windfall.link.messages import Tokens, columns
from windfall.types import Finish

Place = Literal["queued", "running", "turn"]
FRUITLESS = 12
"""So many workers lost in a row without one token of a response are no coincidence,"""
SEVERAL = 3
"""if they were so many different ones: a single one may just have a bad link, and dial again and again."""
REMEMBERED = 1 << 16
"""Handles that are over: enough to say why a late frame is late; an older one is just late."""


@dataclass(slots=True)
class LedgerEntry:
    episode: Episode
    place: Place = "queued"
    handle: int = -1
    worker: str = ""
    version: int = -1
    marked: int = 0
    """Tokens whose version has been written down; those after it are of the current assignment."""
    moves: int = 0
    moved: bool = False
    """Since its last assignment: what was computed of it is computed again."""
    fruitless: int = 0
    """Workers in a row that were lost with it and had made no token of it,"""
    blamed: frozenset[str] = frozenset()
    """and their names: one that comes back has another id, and the same name."""


class Ledger:
    def __init__(self, vocabulary: int = 1 << 32, *, migrate: bool = True) -> None:
        self.vocabulary, self._migrate = vocabulary, migrate
        self.entries: dict[str, LedgerEntry] = {}
        self.queue: deque[str] = deque()
        self.counts = Counts()
        self._running: dict[int, LedgerEntry] = {}
        self._over: OrderedDict[int, str] = OrderedDict()
        """The newest handles that are over, and how: moved, cancelled or finished."""
        self._by_worker: dict[str, dict[int, LedgerEntry]] = {}
        self._context: dict[str, int] = {}  # tokens behind what each runs, prompts included
        self._next_handle = 0
        self._stops: set[int] = set()
        """Every stop token of any response so far."""
        self._shortest = math.inf
        """The fewest tokens that any response so far was allowed."""
        self.longest = 0
        """The most room that any response so far needs."""

    def __len__(self) -> int:
        return len(self.entries)

    def running(self, worker: str) -> int:
        return len(self._by_worker.get(worker, ()))

    def context(self, worker: str) -> int:
        return self._context.get(worker, 0)

    def held(self, worker: str) -> list[LedgerEntry]:
        return list(self._by_worker.get(worker, {}).values())

    def open(self, episode: Episode) -> None:
        """With the tokens it has: a response may have begun before."""
        if episode.id in self.entries:
            raise ValueError(f"{episode.id} is open already")
        self.entries[episode.id] = LedgerEntry(episode, marked=len(episode.tokens))
        self._stops |= episode.stop
        self._shortest = min(self._shortest, episode.max_tokens)
        self.longest = max(self.longest, room(episode))
        self.counts.accepted += _made(episode)
        self._enqueue(self.entries[episode.id])

    def assign(self, id: str, worker: str, version: int) -> LedgerEntry:
        """The response `id`, which must be queued, is from now on this worker's. Take it from the queue first."""
        entry = self.entries[id]
        assert entry.place == "queued" and entry.episode.finish is None, f"{id} is {entry.place}"
        self._next_handle += 1
        entry.place, entry.handle, entry.worker, entry.version = "running", self._next_handle, worker, version
        entry.marked = len(entry.episode.tokens)
        self._running[entry.handle] = entry
        self._by_worker.setdefault(worker, {})[entry.handle] = entry
        self._context[worker] = self.context(worker) + _context(entry)
        if entry.moved:
            self.counts.prefilled_again += len(entry.episode.prompt) + len(entry.episode.tokens)
        return entry

    def take(self, worker: str, frame: Tokens) -> Taken:
        """What a worker made. Raises Malformed, and has then taken nothing."""
        try:
            tokens, logprobs = columns(frame)
        except ValueError as e:
            raise Malformed(str(e)) from e
        if tokens and max(tokens) >= self.vocabulary:
            raise Malformed(f"token id {max(tokens)} is outside the vocabulary of {self.vocabulary}")
        if logprobs and not (max(logprobs) <= 1e-3 and math.isfinite(sum(logprobs))):  # one NaN makes the sum NaN
            raise Malformed(f"a log-prob is no log-prob{self._whose(worker, frame, logprobs)}")
        held = self._by_worker.get(worker) or {}
        upto = list(accumulate(frame.counts or repeat(1, len(frame.handles))))
        entries = _next_ones(held, frame)
        if entries is None:
            self._check_rows(held, frame, tokens, upto)
            return self._take_rows(worker, frame, tokens, logprobs)
        # Nearly every frame is like this, and most have one token per response: the time from here on is what bounds
        # how many tokens a controller takes in.
        self._check_ends(entries, frame, tokens, upto)
        if not frame.counts:
            for entry, token, logprob in zip(entries, tokens, logprobs, strict=True):
                episode = entry.episode
                episode.tokens.append(token)
                episode.logprobs.append(logprob)
        else:
            for entry, end, count in zip(entries, upto, frame.counts, strict=True):
                episode = entry.episode
                if count == 1:
                    episode.tokens.append(tokens[end - 1])
                    episode.logprobs.append(logprobs[end - 1])
                else:
                    episode.tokens.extend(tokens[end - count : end])
                    episode.logprobs.extend(logprobs[end - count : end])
        self.counts.accepted += len(tokens)
        self._context[worker] = self.context(worker) + len(tokens)
        out = Taken(accepted=len(tokens), rows=list(range(len(entries))))
        for row in sorted(frame.finished):
            self._end_turn(entries[row], frame.finished[row])
            out.turns.append(entries[row].episode.id)
        return out

    def _whose(self, worker: str, frame: Tokens, logprobs: array[float]) -> str:
        """Which response has the first bad log-prob."""
        bad = next((i for i, x in enumerate(logprobs) if not -math.inf < x <= 1e-3), 0)
        row = next(
            (r for r, end in enumerate(accumulate(frame.counts or repeat(1, len(frame.handles)))) if bad < end), 0
        )
        entry = self._by_worker.get(worker, {}).get(frame.handles[row])
        return f", in {entry.episode.id}" if entry else ""

    def _take_rows(self, worker: str, frame: Tokens, tokens: array[int], logprobs: array[float]) -> Taken:
        """Row by row: not all of them are what comes next, or a response is in the frame twice."""
        held = self._by_worker.get(worker) or {}
        out, counts, at, fresh = Taken(), frame.counts, 0, 0
        version, finished, positions = frame.version, frame.finished, frame.positions
        for row, handle in enumerate(frame.handles):
            count = counts[row] if counts else 1
            entry = held.get(handle)
            if entry is None or entry.version != version or positions[row] != len(entry.episode.tokens):
                out.whole = False
                skip = self._unusual(entry, handle, positions[row], count, version, out)
                if skip == count:
                    at += count
                    continue
            else:
                skip = 0
            episode = entry.episode  # type: ignore[union-attr]
            episode.tokens.extend(tokens[at + skip : at + count])
            episode.logprobs.extend(logprobs[at + skip : at + count])
            self._context[worker] += count - skip
            fresh += count - skip
            at += count
            out.rows.append(row)
            if row in finished:
                self._end_turn(entry, finished[row])  # type: ignore[arg-type]
                out.turns.append(episode.id)
        self.counts.accepted += fresh
        out.accepted = fresh
        return out

    def _check_ends(self, entries: list[LedgerEntry], frame: Tokens, tokens: array[int], upto: list[int]) -> None:
        """A finish where there is none, or none where there is one, is a worker's mistake, not a token's. Only a row
        that has a finish, a stop token or all the tokens it may have can be wrong."""
        doubtful = set(frame.finished)
        if not self._stops.isdisjoint(tokens):
            stops = self._stops
            doubtful.update(bisect_right(upto, at) for at, token in enumerate(tokens) if token in stops)
        if max(frame.positions) + max(frame.counts, default=1) >= self._shortest:
            doubtful.update(range(len(entries)))
        for row in sorted(doubtful):
            ends.check(entries[row].episode, frame, row, tokens, upto[row])

    def _check_rows(self, held: dict[int, LedgerEntry], frame: Tokens, tokens: array[int], upto: list[int]) -> None:
        """The same, of those rows whose response is this worker's."""
        for row, (handle, position) in enumerate(zip(frame.handles, frame.positions, strict=True)):
            entry = held.get(handle)
            if entry is not None and entry.version == frame.version:
                if position < 0:
                    raise Malformed(f"{entry.episode.id}: a token at position {position}")
                ends.check(entry.episode, frame, row, tokens, upto[row])

    def _unusual(
        self, entry: LedgerEntry | None, handle: int, position: int, count: int, version: int, out: Taken
    ) -> int:
        """How many of the `count` tokens to leave out, each of them counted."""
        c = self.counts
        if entry is None:
            how = self._over.get(handle)
            if how == "cancelled":
                c.unwanted += count
            elif how == "finished":
                c.repeated += count
            else:
                c.late += count
            return count
        if entry.version != version:
            c.stale += count
            out.dropped.append(handle)
            self._back(entry)
            return count
        have = len(entry.episode.tokens)
        if position > have:
            c.gaps += 1
            out.dropped.append(handle)
            self._back(entry)
            return count
        old = min(count, have - position)
        c.repeated += old
        return old

    def _end_turn(self, entry: LedgerEntry, finish: Finish) -> None:
        self._settle(entry, "finished")
        entry.place = "turn"
        entry.episode.finish = finish

    def _settle(self, entry: LedgerEntry, how: str = "moved") -> None:
        """The assignment is over."""
        episode = entry.episode
        episode.made_by(entry.version, len(episode.tokens) - entry.marked)
        entry.marked = len(episode.tokens)
        del self._running[entry.handle], self._by_worker[entry.worker][entry.handle]
        self._context[entry.worker] -= _context(entry)
        self._over[entry.handle] = how
        if len(self._over) > REMEMBERED:
            self._over.popitem(last=False)
        entry.handle, entry.worker = -1, ""

    def _back(self, entry: LedgerEntry) -> None:
        self._settle(entry)
        entry.moves += 1
        entry.moved = True
        self.counts.moved += 1
        self._enqueue(entry)

    def _enqueue(self, entry: LedgerEntry) -> None:
        entry.place = "queued"
        if entry.episode.finish is not None:
            entry.place = "turn"
        elif entry.episode.tokens:
            self.queue.appendleft(entry.episode.id)
        else:
            self.queue.append(entry.episode.id)

    def release(self, worker: str) -> list[str]:
        """The worker is gone: what it held is queued again, with every token it has."""
        entries = list(self._by_worker.get(worker, {}).values())
        for entry in reversed(entries):
            if len(entry.episode.tokens) == entry.marked:
                entry.fruitless, entry.blamed = entry.fruitless + 1, entry.blamed | {worker.partition("#")[0]}
            else:
                entry.fruitless, entry.blamed = 0, frozenset()
            self._back(entry)
            if not self._migrate:
                self._discard(entry)
        self._by_worker.pop(worker, None)
        self._context.pop(worker, None)
        return [e.episode.id for e in entries]

    def _discard(self, entry: LedgerEntry) -> None:
        """Without migration: what a lost worker had made of this turn is thrown away."""
        episode = entry.episode
        episode.runs, last = episode.runs[:], len(episode.tokens) - episode.turn_start
        self.counts.discarded += last
        del episode.tokens[episode.turn_start :], episode.logprobs[episode.turn_start :]
        while last > 0:
            version, count = episode.runs.pop()
            if count > last:
                episode.runs.append((version, count - last))
            last -= count
        entry.marked = len(episode.tokens)

    def poison(self, lost: Iterable[LedgerEntry]) -> LedgerEntry | None:
        """Of those that have just lost their worker, one that every worker is lost with, before a single token. Where
        there are not several workers, one has to be lost far more often."""
        most = {True: FRUITLESS, False: SEVERAL * FRUITLESS}
        return next((e for e in lost if e.fruitless >= most[len(e.blamed) >= SEVERAL]), None)

    def recall(self, id: str) -> int:
        """Take a running response back to give it to another. Returns the handle that is over."""
        entry, handle = self.entries[id], self.entries[id].handle
        self._back(entry)
        return handle

    def go_on(self, id: str) -> None:
        """The environment has said something: the next turn."""
        entry = self.entries[id]
        assert entry.place == "turn" and entry.episode.finish is None, f"{id} is {entry.place}"
        entry.marked, entry.moved = len(entry.episode.tokens), False
        self._enqueue(entry)

    def close(self, id: str) -> None:
        """It is finished, and its group has it."""
        entry = self.entries.pop(id)
        assert entry.place == "turn", f"{id} is {entry.place}"
        self.counts.closed += _made(entry.episode)

    def withdraw(self, ids: Iterable[str]) -> dict[str, list[int]]:
        """The run does not want these any more. Returns the handles to cancel, by worker."""
        handles, gone = dict[str, list[int]](), set[str]()
        for id in ids:
            entry = self.entries.pop(id, None)
            if entry is None:
                continue
            gone.add(id)
            if entry.place == "running":
                handles.setdefault(entry.worker, []).append(entry.handle)
                self._settle(entry, "cancelled")
            self.counts.withdrawn += _made(entry.episode)
        if gone:
            self.queue = deque(i for i in self.queue if i not in gone)
        return handles

    def lost(self) -> int:
        """Tokens that were accepted and are nowhere: none, whatever happened."""
        inside = sum(_made(e.episode, e.marked) for e in self.entries.values())
        return self.counts.accepted - inside - self.counts.closed - self.counts.withdrawn - self.counts.discarded

    def check(self) -> None:
        """Raise AssertionError if a rule above is broken."""
        assert self.lost() == 0, f"{self.lost()} tokens lost: {self.counts}"
        assert len(set(self.queue)) == len(self.queue), "queued twice"
        queued = {i for i, e in self.entries.items() if e.place == "queued"}
        assert queued == set(self.queue), "queue and entries disagree"
        running = {e.handle for e in self.entries.values() if e.place == "running"}
        assert running == set(self._running) == {h for held in self._by_worker.values() for h in held}
        assert not running & set(self._over), "a handle is over and running"
        assert all(self.context(w) == sum(map(_context, held.values())) for w, held in self._by_worker.items())
        for id, e in self.entries.items():
            n = len(e.episode.tokens)
            assert n == len(e.episode.logprobs) <= e.episode.max_tokens, f"{id}: lengths"
            assert sum(count for _, count in e.episode.runs) == e.marked <= n, f"{id}: versions"
            assert (e.episode.finish is not None) == (e.place == "turn"), f"{id} is {e.place}"
            assert e.place == "running" or e.marked == n, f"{id}: tokens of nobody"


def _next_ones(held: dict[int, LedgerEntry], frame: Tokens) -> list[LedgerEntry] | None:
    """Whose the rows are; None unless every row is what comes next for its response, and none is there twice."""
    try:
        entries = [held[handle] for handle in frame.handles]
    except KeyError:
        return None
    usual = (
        {entry.version for entry in entries} == {frame.version}
        and tuple([len(entry.episode.tokens) for entry in entries]) == frame.positions
        and len(set(frame.handles)) == len(entries)
    )
    return entries if usual else None


def room(episode: Episode) -> int:
    """Tokens that a worker must have room for to make this response, wherever it goes on from."""
    return len(episode.prompt) + episode.max_tokens


def _context(entry: LedgerEntry) -> int:
    return len(entry.episode.prompt) + len(entry.episode.tokens)


def _made(episode: Episode, marked: int | None = None) -> int:
    """Tokens of the policy: those of its runs, and those of an assignment under way."""
    runs = sum(count for version, count in episode.runs if version >= 0)
    return runs + (0 if marked is None else len(episode.tokens) - marked)
