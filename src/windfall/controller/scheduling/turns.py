"""What is known of responses with several turns: which worker has their tokens in its prefix cache. Pure: the caller
gives the time.

    ended ──▶ (the environment works) ──▶ returned ──▶ assigned ──▶ ended ──▶ ... ──▶ over

`TurnCounts` are the figures of a step: for the event log, and for a simulation of the same sessions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class LogSums:
    """Sums over the logarithms of values, for a log-normal distribution."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        x = math.log(max(value, 1e-3))
        self.count, self.total, self.squares = self.count + 1, self.total + x, self.squares + x * x

    def row(self) -> list[float]:
        """[count, mean, mean of squares] of the logarithms."""
        n = max(1, self.count)
        return [self.count, round(self.total / n, 6), round(self.squares / n, 6)]


@dataclass(slots=True)
class TurnCounts:
    sessions: int = 0
    """Number of responses that have ended, with one turn or with several."""
    turns: int = 0
    """Turns of these responses."""
    routed: int = 0
    """Next turns that were assigned to a worker."""
    to_holder: int = 0
    """Those that went to the worker that has their tokens."""
    env_s: LogSums = field(default_factory=LogSums)
    """Seconds between two turns."""
    observed: LogSums = field(default_factory=LogSums)
    """Tokens of an observation."""
    sampled: LogSums = field(default_factory=LogSums)
    """Tokens that the policy sampled in a turn."""


@dataclass(slots=True)
class _Session:
    turns: int = 0
    ended_s: float = 0.0
    holder: str = ""
    kept: int = 0


class Turns:
    def __init__(self) -> None:
        self.several = False
        """Whether responses have several turns."""
        self.counts = TurnCounts()
        self.queued: dict[str, None] = {}
        """Next turns in the queue, in order of arrival."""
        self._sessions: dict[str, _Session] = {}
        """Open responses that have ended a turn."""
        self._held: dict[str, set[str]] = {}
        """By worker: the responses whose tokens it has."""
        self._turns = self._tokens = 0

    @property
    def typical(self) -> float:
        """Mean number of sampled tokens in a turn; 0: not known."""
        return self._tokens / self._turns if self._turns else 0.0

    def ended(self, id: str, worker: str, *, context: int, sampled: int, now_s: float) -> None:
        """A turn with `sampled` tokens has ended on a worker that has all `context` tokens of the response."""
        session = self._sessions.setdefault(id, _Session())
        session.turns, session.ended_s = session.turns + 1, now_s
        self._turns, self._tokens = self._turns + 1, self._tokens + sampled
        if sampled:  # otherwise the call of an agent was canceled
            self.counts.sampled.add(sampled)
        self._set_holder(id, session, worker, context)

    def returned(self, id: str, observed: int, now_s: float) -> None:
        """The environment has answered with an observation of this many tokens: the next turn is queued."""
        session = self._sessions.get(id)
        self.queued[id] = None
        if session is not None:
            self.several = True
            self.counts.env_s.add(now_s - session.ended_s)
            self.counts.observed.add(observed)

    def holder(self, id: str) -> tuple[str, int]:
        """The worker that has tokens of this response, and how many; ("", 0) if there is none."""
        session = self._sessions.get(id)
        return (session.holder, session.kept) if session is not None else ("", 0)

    def assigned(self, id: str, worker: str) -> None:
        """The response continues on this worker."""
        session = self._sessions.get(id)
        if self.queued.pop(id, 0) is None:
            self.counts.routed += 1
            self.counts.to_holder += session is not None and session.holder == worker
        if session is not None:
            self._set_holder(id, session, "", 0)

    def over(self, id: str, *, withdrawn: bool = False) -> None:
        """The response has no further turn."""
        self.queued.pop(id, None)
        session = self._sessions.pop(id, None)
        if session is None:
            return
        if not withdrawn:
            self.counts.sessions += 1
            self.counts.turns += session.turns
        self._set_holder(id, session, "", 0)

    def cleared(self, worker: str) -> None:
        """The worker has dropped everything: it has other weights now, or it is gone."""
        for id in list(self._held.get(worker, ())):
            self._set_holder(id, self._sessions[id], "", 0)

    def take_counts(self) -> TurnCounts:
        """The counts since the last call."""
        counts, self.counts = self.counts, TurnCounts()
        return counts

    def _set_holder(self, id: str, session: _Session, worker: str, kept: int) -> None:
        if session.holder:
            held = self._held.get(session.holder, set())
            held.discard(id)
            if not held:
                self._held.pop(session.holder, None)
        session.holder, session.kept = worker, kept
        if worker:
            self._held.setdefault(worker, set()).add(id)
