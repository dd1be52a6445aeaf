"""Which trainers have their state on a device, if the states of all jobs do not fit at the same time, and where the
others keep theirs. Pure.

    asleep, in host memory or a file ─ its turn comes ──▶ awake, on the device ── others need room ──▶ asleep

Rules:
- the states that are awake on a device, and those on their way, fit into its limit; one alone is always allowed;
- the limit is given, or STATE_SHARE of the memory that is free besides what the jobs use for weights and KV caches. The
  rest is for the activations of the trainer that works;
- the trainer that used its state least recently sleeps first;
- a switch must pay: a trainer whose state had to be fetched keeps its place until it has worked WORTH times as long as
  the switch took, or has asked for nothing for as long as a switch takes. So trainers that take turns after every small
  piece of work do not spend their time on switching.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

STATE_SHARE = 0.7
"""Share of a device's memory, without weights and KV caches, that the states of trainers may use."""
MEMORY_SHARE = 0.8
"""Share of the machine's free memory that new copies of a state may use."""
DISK_SHARE = 0.5
"""Share of the free disk space that the copies of a state may use."""
WORTH = 10.0
"""A state that was fetched stays for at least this many times its switching time of work."""
FIRST_SWITCH_S = 0.5
"""Assumed seconds of a switch until one was measured."""


@dataclass(kw_only=True, slots=True)
class TrainerState:
    nbytes: int
    awake: bool = True
    worked_s: float = math.inf
    """Seconds of work since its state was last fetched; infinite if it never slept."""
    used_at_s: float = 0.0
    """When it last gave its turn back."""
    sleep_s: float = FIRST_SWITCH_S / 2
    wake_s: float = FIRST_SWITCH_S / 2
    """What the last move in each direction took. A wake counts as long as the sleep before it, until it is measured."""

    lent_bytes: int = 0
    """Memory of the device that its process has freed until its next rollout turn: that of its KV cache."""

    @property
    def switch_s(self) -> float:
        return self.sleep_s + self.wake_s


class Residence:
    """The trainers of one device, by a key of the caller."""

    def __init__(self, limit_bytes: int | None) -> None:
        """`limit_bytes`: 0: no limit, so nothing ever sleeps. None: by what trainers measure."""
        self._by_measurement = limit_bytes is None
        self.limit_bytes = limit_bytes or 0
        self.states: dict[int, TrainerState] = {}

    def join(self, key: int, nbytes: int, now_s: float, *, awake: bool = True) -> None:
        """A trainer has started. `awake`: whether its state is on the device; not if it must still be built."""
        state = self.states.setdefault(key, TrainerState(nbytes=nbytes, used_at_s=now_s, awake=awake))
        state.nbytes = nbytes

    def measured(self, free_bytes: int) -> None:
        """A trainer has found this number of bytes of the device free while no state was moving.

        >>> r = Residence(limit_bytes=None)
        >>> r.join(1, 60, now_s=0.0)
        >>> r.lends(1, 20)
        >>> r.measured(60)
        >>> r.limit_bytes
        70
        """
        if self._by_measurement and free_bytes:
            awake = sum(state.nbytes for state in self.states.values() if state.awake)
            lent = sum(state.lent_bytes for state in self.states.values())
            self.limit_bytes = max(1, int(STATE_SHARE * (awake + max(0, free_bytes - lent))))

    def lends(self, key: int, nbytes: int) -> None:
        """Its process has freed this number of bytes until its next rollout turn. 0: it uses them again."""
        if (state := self.states.get(key)) is not None:
            state.lent_bytes = nbytes

    def leave(self, key: int) -> None:
        self.states.pop(key, None)

    def worked(self, key: int, seconds: float, now_s: float) -> None:
        if (state := self.states.get(key)) is not None:
            state.worked_s += seconds
            state.used_at_s = now_s

    def slept(self, key: int, seconds: float) -> None:
        """Its state has left the device."""
        if (state := self.states.get(key)) is not None:
            state.awake, state.worked_s = False, 0.0
            state.sleep_s = state.wake_s = seconds

    def fetched(self, key: int, seconds: float) -> None:
        """How long its state took to come back."""
        if (state := self.states.get(key)) is not None:
            state.wake_s = seconds

    def woke(self, key: int) -> None:
        """Its state is on the device again, or on the way."""
        if (state := self.states.get(key)) is not None:
            state.awake = True

    def is_awake(self, key: int) -> bool:
        return key not in self.states or self.states[key].awake

    def sleepers(self, key: int) -> list[int]:
        """The trainers that must sleep before this one can work, those first that were used least recently.

        >>> r = Residence(limit_bytes=20)
        >>> for key in (1, 2, 3):
        ...     r.join(key, 10, now_s=key)
        >>> r.sleepers(3)
        [1]
        """
        state = self.states.get(key)
        if state is None or not self.limit_bytes:
            return []
        others = [k for k, s in self.states.items() if s.awake and k != key]
        others.sort(key=lambda k: self.states[k].used_at_s)
        used, out = state.nbytes + sum(self.states[k].nbytes for k in others), []
        for other in others:
            if used <= self.limit_bytes:
                break
            out.append(other)
            used -= self.states[other].nbytes
        return out

    def may_work(self, key: int, waiting: set[int], now_s: float) -> bool:
        """Whether this trainer may have the turn now. `waiting`: the keys of all trainers that want it. One that is
        awake always may: it has grown, or has just started, and the others make room."""
        for other in [] if self.is_awake(key) else self.sleepers(key):
            state = self.states[other]
            done = state.worked_s >= WORTH * state.switch_s
            idle = other not in waiting and now_s - state.used_at_s >= state.switch_s
            if not (done or idle):
                return False
        return True

    def next_change_s(self, now_s: float) -> float:
        """Seconds until `may_work` may answer differently although nothing has happened."""
        waits = [s.used_at_s + s.switch_s - now_s for s in self.states.values() if s.awake]
        return max(0.001, min([w for w in waits if w > 0], default=FIRST_SWITCH_S))


def place_of_copies(nbytes: int, new_bytes: int, *, memory_free: int, disk_free: int) -> Literal["memory", "disk", ""]:
    """Where the copies of a state go: into the machine's memory, of which `new_bytes` must be allocated, or else into a
    file. "": there is no room.

    >>> [place_of_copies(50, 50, memory_free=free, disk_free=100) for free in (100, 60)]
    ['memory', 'disk']
    >>> place_of_copies(50, 0, memory_free=0, disk_free=0), place_of_copies(51, 51, memory_free=60, disk_free=100)
    ('memory', '')
    """
    if new_bytes <= MEMORY_SHARE * memory_free:
        return "memory"
    return "disk" if nbytes <= DISK_SHARE * disk_free else ""
