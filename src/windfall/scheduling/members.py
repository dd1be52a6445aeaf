"""The workers of a run and their states. Decides who may get work, and who is lost; acts on nothing, reads no clock.

    JOINING ▶ PULLING ▶ READY ⇄ PAUSED ▶ DRAINING ▶ GONE        every state may go straight to GONE
                 ▲────────┘  (a newer version)

Rules, all in `check()`:
- only a READY worker that is not suspect, and holds the version asked for, is given work;
- a worker that is silent for `suspect_s` is suspect: it gets no new work. Any message makes it well again. Silent for
  `gone_s`, or making no step for `stalled_s` though it has work, it is gone;
- a PULLING worker that gets no byte of the weights for `stalled_s` is stuck, whatever it says and however often it
  tries: it is sent away. Bytes that arrive put the deadline off, and so does every moment in which nobody serves the
  weights (`excuse`). Building the engine and swapping the weights in have limits of their own, which the worker keeps
  itself; LOADING_S is for one that does not;
- a worker that was told to leave and is still here after LEAVING_S is gone;
- GONE is final: who comes back is a new worker with a new id;
- the controller's own stall is not held against anybody: after a late tick every deadline is put off by the delay.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from windfall.link.messages import Stats
from windfall.types import LOCAL, Lease

LOADING_S = {"build": 960.0, "swap": 150.0}
"""Longest time in these parts of a load: a little more than the worker allows itself (worker/startup.py,
session.py)."""
LEAVING_S = 20.0
"""From Drain until the worker must have left; it takes 8 s at most."""


class WorkerState(StrEnum):
    JOINING = "joining"
    PULLING = "pulling"
    READY = "ready"
    PAUSED = "paused"
    DRAINING = "draining"
    GONE = "gone"


_NEXT = {
    WorkerState.JOINING: {WorkerState.PULLING, WorkerState.DRAINING, WorkerState.GONE},
    WorkerState.PULLING: {WorkerState.READY, WorkerState.PULLING, WorkerState.DRAINING, WorkerState.GONE},
    WorkerState.READY: {WorkerState.PULLING, WorkerState.PAUSED, WorkerState.DRAINING, WorkerState.GONE},
    WorkerState.PAUSED: {WorkerState.READY, WorkerState.PULLING, WorkerState.DRAINING, WorkerState.GONE},
    WorkerState.DRAINING: {WorkerState.GONE},
    WorkerState.GONE: set(),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long a worker may be silent, and how often the controller looks."""

    suspect_s: float = 3.0
    gone_s: float = 8.0
    stalled_s: float = 60.0
    tick_s: float = 0.25


@dataclass(slots=True, kw_only=True)
class Member:
    id: str
    name: str
    lease: Lease
    joined_s: float
    seen_s: float
    state: WorkerState = WorkerState.JOINING
    suspect: bool = False
    version: int = -1
    digest: str = ""
    slots: int = 0
    stats: Stats | None = None
    asked: tuple[int, str] = (-1, "")
    """Version and digest that it was asked to load last."""
    failed: int = 0
    """Loads in a row that it could not do."""
    pulling_s: float = 0.0
    """Since when."""
    moved_s: float = 0.0
    """While it pulls: when its load last got anywhere."""
    told_s: float = math.inf
    """When it was told to leave."""
    longest: float = math.inf
    """The most tokens, prompt and response together, that it can take, as far as is known."""
    made: int = 0
    """Tokens the ledger took from it."""
    framed_s: float = 0.0
    """When its last tokens came."""
    moved: int = 0
    """Responses it lost, or gave back, unfinished."""
    tok_per_s: float = 0.0
    why: str = ""
    """Why it is gone, or draining."""
    taken: bool = False
    """Its machine was taken away, with or without a word."""
    _rate_from: tuple[float, int] = field(default=(0.0, 0))

    @property
    def booted(self) -> bool:
        """It has been ready before."""
        return self.slots > 0


@dataclass(frozen=True, slots=True)
class MemberChange:
    id: str
    what: Literal["suspect", "well", "gone", "stuck"]
    why: str = ""


class Members:
    def __init__(self, patience: Patience | None = None, *, remember: int = 1000) -> None:
        self.patience = patience or Patience()
        self.all: dict[str, Member] = {}
        """Those that are here, and the newest of those that are gone."""
        self._here: dict[str, Member] = {}
        self._gone: deque[str] = deque()
        self.lost = 0
        self._remember = remember
        self._generation: dict[str, int] = {}
        self._ticked_s: float | None = None
        self.pull_s = 0.0
        """How long the last pull took."""

    def here(self) -> Iterator[Member]:
        return iter(self._here.values())

    @property
    def count(self) -> int:
        """How many are here."""
        return len(self._here)

    def join(self, name: str, lease: Lease, now_s: float, *, version: int = -1, digest: str = "") -> Member:
        """A new member, also when one of this name was here before."""
        self._generation[name] = n = self._generation.get(name, 0) + 1
        id = name if n == 1 else f"{name}#{n}"
        if len(self._generation) > 100 * self._remember:
            del self._generation[next(iter(self._generation))]
        member = Member(id=id, name=name, lease=lease, joined_s=now_s, seen_s=now_s, version=version, digest=digest)
        member._rate_from = (now_s, 0)
        self.all[id] = self._here[id] = member
        return member

    def move(self, id: str, state: WorkerState, why: str = "") -> None:
        member = self.all[id]
        assert state in _NEXT[member.state], f"{id}: {member.state} cannot become {state}"
        if state is WorkerState.GONE and member.state is not WorkerState.DRAINING:
            self.lost += 1
            member.taken = True
        member.state = state
        member.why = why or member.why
        if state is WorkerState.GONE:
            member.suspect = False
            del self._here[id]
            self._gone.append(id)
            if len(self._gone) > self._remember:
                del self.all[self._gone.popleft()]

    def pull(self, id: str, now_s: float) -> None:
        self.move(id, WorkerState.PULLING)
        self.all[id].pulling_s = self.all[id].moved_s = now_s

    def excuse(self, now_s: float) -> None:
        """Nobody serves the weights just now: that nothing arrives is not the fault of those who pull."""
        for member in self.here():
            member.moved_s = now_s

    def loaded(self, id: str, version: int, digest: str, slots: int, s: float) -> None:
        """`s`: how long that took it. The first time it built its engine as well, and local has the weights."""
        member = self.all[id]
        if member.booted and member.name != LOCAL and 0 <= s < math.inf:
            self.pull_s = s
        member.version, member.digest, member.slots = version, digest, slots
        if member.state is WorkerState.PULLING:
            self.move(id, WorkerState.READY)
            member.failed = 0

    def coming(self, now_s: float) -> list[Member]:
        """Workers that should be ready any moment, judged by how long the last pull took. Nobody waits for others, nor
        for one that has never been ready: who knows how long it takes to start."""
        soon_s = max(0.5, 2 * self.pull_s)
        return [
            m for m in self._here.values()
            if m.state is WorkerState.PULLING and m.booted and not m.suspect and now_s - m.pulling_s < soon_s
        ]  # fmt: skip

    def seen(self, id: str, now_s: float, stats: Stats | None = None) -> bool:
        """It has said something. True: it was suspect, and is well again."""
        member = self.all[id]
        member.seen_s = now_s
        if stats is not None:
            before, member.stats = member.stats, stats
            if before is None or (before.pulled_bytes, _part(before)) != (stats.pulled_bytes, _part(stats)):
                member.moved_s = now_s
            since_s, made = member._rate_from
            if now_s - since_s >= 1.0:
                member.tok_per_s = (member.made - made) / (now_s - since_s)
                member._rate_from = (now_s, member.made)
        was, member.suspect = member.suspect, False
        return was

    def tick(self, now_s: float) -> list[MemberChange]:
        """Called every `tick_s`. Who has become suspect, and who is gone (the caller then says so with `move`)."""
        p = self.patience
        if self._ticked_s is not None and (late_s := now_s - self._ticked_s - 2 * p.tick_s) > 0:
            for member in self.here():  # nobody could be heard while the controller itself stood still
                member.seen_s = min(now_s, member.seen_s + late_s)
                member.moved_s = min(now_s, member.moved_s + late_s)
                member.told_s += late_s
        self._ticked_s = now_s
        changes = []
        for member in self.here():
            silent_s = now_s - member.seen_s
            if silent_s >= p.gone_s:
                changes.append(MemberChange(member.id, "gone", f"silent for {silent_s:.1f} s"))
            elif member.stats is not None and member.stats.idle_s >= p.stalled_s:
                changes.append(MemberChange(member.id, "gone", f"no engine step for {member.stats.idle_s:.0f} s"))
            elif now_s - member.told_s >= LEAVING_S:
                changes.append(MemberChange(member.id, "gone", f"told to leave, and still here after {LEAVING_S:g} s"))
            elif why := self._stuck(member, now_s):
                changes.append(MemberChange(member.id, "stuck", why))
            elif silent_s >= p.suspect_s and not member.suspect:
                member.suspect = True
                changes.append(MemberChange(member.id, "suspect", f"silent for {silent_s:.1f} s"))
        return changes

    def _stuck(self, member: Member, now_s: float) -> str:
        """Why its load will not come to an end, if so."""
        if (
            member.state is not WorkerState.PULLING or member.name == LOCAL
        ):  # local has the weights when the trainer has
            return ""
        part = _part(member.stats) if member.stats is not None else ""
        still_s = now_s - member.moved_s
        if still_s < LOADING_S.get(part, self.patience.stalled_s):
            return ""
        what = {"build": "it has been building its engine", "swap": "its engine has been taking the weights"}.get(part)
        version = member.asked[0]
        if what:
            return f"{what} for {still_s:.0f} s and is not ready with version {version}"
        failed = f", and {member.failed} tries failed" if member.failed else ""
        return f"no byte of version {version} has reached it in {still_s:.0f} s{failed}"

    def routable(self, version: int, digest: str) -> list[Member]:
        return [
            m for m in self._here.values()
            if m.state is WorkerState.READY and not m.suspect and m.version == version and m.digest == digest
        ]  # fmt: skip

    def behind(self, version: int, digest: str, *, needed: bool) -> list[Member]:
        """Who should pull this version now: at once when new, else when there is work that needs it."""
        here, wanted = self._here.values(), (version, digest)
        if not needed:
            return [m for m in here if m.state is WorkerState.JOINING]
        return [
            m for m in here
            if m.state is WorkerState.JOINING
            or (m.state is WorkerState.READY and (m.version != version or m.digest != digest))
            or (m.state is WorkerState.PULLING and m.asked != wanted)
        ]  # fmt: skip

    def check(self) -> None:
        """Raise AssertionError if a rule above is broken."""
        for id, m in self.all.items():
            assert id == m.id
            assert m.state is not WorkerState.READY or (m.version >= 0 and m.slots > 0), (
                f"{id} is ready with no version"
            )
            assert m.state is not WorkerState.GONE or not m.suspect, f"{id} is gone and suspect"
            assert (m.state is not WorkerState.GONE) == (id in self._here) == (id not in self._gone), (
                f"{id}: here or gone"
            )


def _part(stats: Stats) -> str:
    """What its load waits for, apart from bytes. A pull that begins anew is no progress."""
    return stats.loading if stats.loading in LOADING_S else ""
