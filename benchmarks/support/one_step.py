"""One step of rollout in virtual time, for benchmarks/fleet/balance.py: workers with a model of service time.

An engine step of a worker takes fixed + each * batch seconds and generates one token for each running response. A
prefill blocks the worker in proportion to its tokens. A prompt that a sibling has left in the cache is free. A response
that moves is away for a round trip. Time jumps from one event to the next: the end of a response, a loss, the arrival
of a moved response, or a tick.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from windfall.step_time import StepTime

PREFILL_S, PROMPT = 1 / 20_000, 300
ROUND_TRIP_S, TICK_S = 0.05, 0.1


class Policy(Protocol):
    """Decides after every event: assigns queued responses, moves running ones."""

    def decide(self, step: Step) -> None: ...

    def back(self, step: Step, r: Response, target: str | None) -> None:
        """A response that was moved has arrived."""
        ...

    def observe(self, step: Step, rng: random.Random) -> None:
        """Called every TICK_S to observe the tokens that each worker has generated since."""
        ...


@dataclass(slots=True)
class Response:
    id: str
    length: float
    made: float = 0.0
    moves: int = 0


@dataclass(slots=True)
class Worker:
    """`clock` counts the engine steps, so the tokens of each running response. A response ends when the clock reaches
    its entry in `ends`."""

    name: str
    profile: StepTime
    slots: int
    slower: float
    clock: float = 0.0
    stall_s: float = 0.0
    tokens: float = 0.0
    ends: list[tuple[float, str]] = field(default_factory=list)
    running: dict[str, tuple[Response, float]] = field(default_factory=dict)
    waiting: deque[Response] = field(default_factory=deque)
    pages: set[str] = field(default_factory=set)

    def advance(self, s: float) -> None:
        stalled = min(s, self.stall_s)
        self.stall_s -= stalled
        if self.running:
            steps = (s - stalled) / self.profile.step_s(len(self.running))
            self.clock += steps
            self.tokens += steps * len(self.running)

    def end_in_s(self) -> float:
        while self.ends and self.ends[0][1] not in self.running:
            heapq.heappop(self.ends)
        if not self.ends:
            return math.inf
        return self.stall_s + max(0.0, self.ends[0][0] - self.clock) * self.profile.step_s(len(self.running))

    def add(self, r: Response) -> None:
        self.waiting.append(r)
        self.start()

    def start(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            r = self.waiting.popleft()
            group = r.id.rpartition("/")[0]
            self.stall_s += (r.made + (0 if group in self.pages else PROMPT)) * PREFILL_S * self.slower
            self.pages.add(group)
            self.running[r.id] = (r, self.clock)
            heapq.heappush(self.ends, (self.clock + r.length - r.made, r.id))

    def remove(self, id: str) -> Response:
        if id in self.running:
            r, since = self.running.pop(id)
            r.made = min(r.length, r.made + self.clock - since)
            self.start()
            return r
        r = next(r for r in self.waiting if r.id == id)
        self.waiting.remove(r)
        return r


@dataclass(slots=True)
class Step:
    """One rollout step: what a policy can read (queue, workers) and do (give, move)."""

    workers: dict[str, Worker]
    queue: deque[Response]
    now_s: float = 0.0
    moved: int = 0
    away: list[tuple[float, str, Response, str | None]] = field(default_factory=list)

    def give(self, r: Response, worker: str) -> None:
        self.workers[worker].add(r)

    def move(self, worker: str, id: str, target: str | None = None) -> None:
        r = self.workers[worker].remove(id)
        r.moves += 1
        self.moved += 1
        heapq.heappush(self.away, (self.now_s + ROUND_TRIP_S, id, r, target))

    def run(self, policy: Policy, lost_s: float, rng: random.Random) -> float:
        tick_s, waits = 0.0, True
        while waits:
            policy.decide(self)
            ends = {w: worker.end_in_s() for w, worker in self.workers.items()}
            soonest = min(ends, key=ends.__getitem__)
            at_s = min(self.now_s + ends[soonest], tick_s, lost_s, self.away[0][0] if self.away else math.inf)
            for worker in self.workers.values():
                worker.advance(at_s - self.now_s)
            ended = at_s == self.now_s + ends[soonest]
            self.now_s = at_s
            if ended:
                worker = self.workers[soonest]
                del worker.running[worker.ends[0][1]]
                worker.start()
            if self.now_s >= lost_s:
                lost_s = math.inf
                self.lose(next(iter(self.workers)))
            while self.away and self.away[0][0] <= self.now_s:
                _, _, r, target = heapq.heappop(self.away)
                policy.back(self, r, target)
            if self.now_s >= tick_s:
                policy.observe(self, rng)
                tick_s += TICK_S
            waits = bool(self.queue or self.away) or any(w.running or w.waiting for w in self.workers.values())
        return self.now_s

    def lose(self, name: str) -> None:
        worker = self.workers.pop(name)
        for id in [*worker.running, *(r.id for r in worker.waiting)]:
            self.queue.appendleft(worker.remove(id))
