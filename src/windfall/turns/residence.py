"""Which trainers have their state on a device, if the states of all jobs do not fit at the same time. Pure.

    asleep, in pinned memory ─ its turn comes, and there is room ──▶ awake, on the device ── others need room ──▶ asleep

Rules:
- the states that are awake on a device, and those on their way, fit into its limit; one alone is always allowed;
- the trainer that used its state least recently sleeps first;
- a switch must pay: a trainer whose state had to be fetched keeps its place until it has worked WORTH times as long as
  the switch took, or has asked for nothing for as long as a switch takes. So trainers that take turns after every small
  piece of work do not spend their time on switching.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WORTH = 10.0
"""A state that was fetched stays for at least this many times its switching time of work."""
FIRST_SWITCH_S = 0.5
"""Assumed seconds of a switch until one was measured."""


@dataclass(kw_only=True, slots=True)
class TrainerState:
    nbytes: int
    awake: bool = True
    worked_s: float = math.inf
    """Seconds of work since its state was last fetched; infinite if it never was."""
    used_at_s: float = 0.0
    """When it last gave its turn back."""
    switch_s: float = FIRST_SWITCH_S
    """What the last sleep and wake took together."""


class Residence:
    """The trainers of one device, by a key of the caller."""

    def __init__(self, limit_bytes: int) -> None:
        """`limit_bytes`: 0: no limit, so nothing ever sleeps."""
        self.limit_bytes = limit_bytes
        self.states: dict[int, TrainerState] = {}

    def join(self, key: int, nbytes: int, now_s: float) -> None:
        """A trainer has started; its state is on the device. It may be updated later, because Adam's moments appear
        with the first update."""
        state = self.states.setdefault(key, TrainerState(nbytes=nbytes, used_at_s=now_s))
        state.nbytes = nbytes

    def leave(self, key: int) -> None:
        self.states.pop(key, None)

    def worked(self, key: int, seconds: float, now_s: float) -> None:
        if (state := self.states.get(key)) is not None:
            state.worked_s += seconds
            state.used_at_s = now_s

    def slept(self, key: int, seconds: float) -> None:
        """Its state has left the device."""
        if (state := self.states.get(key)) is not None:
            state.awake = False
            state.switch_s = 2 * seconds

    def woke(self, key: int) -> None:
        """Its state is on the device again, or on the way."""
        if (state := self.states.get(key)) is not None and not state.awake:
            state.awake, state.worked_s = True, 0.0

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
