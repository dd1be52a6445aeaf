"""How long one step of rollout takes under four ways to spread responses over workers. Simulated, in virtual time.

    python benchmarks/balance.py [--seeds 8] [--groups 128]

A worker's step takes fixed + each * batch seconds (a slower one: times 2, 4 or 10) and gives one token to each response
it runs; a prefill stops it for as long as its tokens take, a prompt that a sibling left there is free, and a response
that moves is away for a round trip. Lengths are log-normal (sigma 0.7); nobody knows them. In each step the first worker
is lost when a third of the work should be done; its responses go on from their last token, under every policy.

    round-robin   in turn, at once, whatever the load; what does not fit waits at the worker
    shortest      join the shortest queue by count, hold back what does not fit, share out when somebody is idle
    rlboost       Algorithm 2: fewest pending below a bound; then move one pending, or all above B to an idle worker
    windfall      rollout/balance.py, with speeds learned in the step before

Each figure is the mean time of a step over the seeds, divided by a bound that nothing can beat: all work at the full
rate of all workers while they are there, or the longest response alone on the fastest. `moved`: responses a step.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from windfall.rollout.balance import Load, Running, even, place, rebalance
from windfall.rollout.speed import Profile, Speeds

ENGINE = Profile(fixed_s=0.010, each_s=0.00006)
PREFILL_S, PROMPT, MEDIAN, SIGMA, SIBLINGS, LONGEST = 1 / 20_000, 300, 1500, 0.7, 8, 14_000
ROUND_TRIP_S, TICK_S, NOISE = 0.05, 0.1, 0.1
PENDING = 8
"""rlboost's bound on what waits at one worker: the paper leaves it open; of 1, 8 and 32 this was best or equal here."""
FLEETS = {
    "8 equal": [1] * 8,
    "one 4x slower": [1] * 7 + [4],
    "one 10x slower": [1] * 7 + [10],
    "mixed 1:2:4": [1, 1, 1, 2, 2, 2, 4, 4],
}


@dataclass(slots=True)
class Response:
    id: str
    length: float
    made: float = 0.0
    moves: int = 0


@dataclass(slots=True)
class Worker:
    """`clock` counts the tokens that each response running here has made: a response ends when it gets to its end."""

    name: str
    profile: Profile
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
    """One step: what a policy sees (queue, workers) and may do (give, move)."""

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


class Policy:
    """Round-robin; the others say where they differ."""

    turn = 0

    def decide(self, step: Step) -> None:
        names = list(step.workers)
        while step.queue:
            self.turn += 1
            step.give(step.queue.popleft(), names[self.turn % len(names)])

    def back(self, step: Step, r: Response, target: str | None) -> None:
        step.queue.appendleft(r)

    def observe(self, step: Step, rng: random.Random) -> None:
        for worker in step.workers.values():
            worker.tokens = 0.0


class Shortest(Policy):
    def decide(self, step: Step) -> None:
        loads = [Load(worker=n, running=len(w.running), slots=w.slots) for n, w in step.workers.items()]
        if step.queue:
            for _, worker in place([r.id for r in step.queue], loads):
                step.give(step.queue.popleft(), worker)
        elif not step.away:
            for worker, count in even(loads):
                held = sorted(step.workers[worker].running.values(), key=lambda x: x[0].made - x[1])
                for r, _ in held[:count]:
                    step.move(worker, r.id)


class RLBoost(Policy):
    def decide(self, step: Step) -> None:
        workers = step.workers
        while step.queue:
            open_ = [n for n, w in workers.items() if len(w.waiting) < PENDING]
            if not open_:
                return
            least = min(open_, key=lambda n: (len(workers[n].waiting), len(workers[n].running)))
            step.give(step.queue.popleft(), least)
        if step.away:
            return
        most = max(workers, key=lambda n: len(workers[n].waiting))
        if workers[most].waiting:
            if any(not w.waiting and len(w.running) < w.slots for w in workers.values()):
                step.move(most, workers[most].waiting[-1].id)
            return
        if any(not w.running for w in workers.values()):
            busiest = max(workers, key=lambda n: len(workers[n].running))
            w = workers[busiest]
            nearly = 0.8 * w.profile.tok_per_s(w.slots)  # B: four fifths of what a full batch gives
            b = nearly * w.profile.fixed_s / (1 - nearly * w.profile.each_s)
            for id in list(w.running)[: max(0, len(w.running) - math.ceil(b))]:
                step.move(busiest, id)


class Windfall(Policy):
    def __init__(self) -> None:
        self.speeds, self.meant, self.holds = Speeds(), dict[str, str](), dict[str, list[str]]()
        self.s, self.most_s, self.calls = 0.0, 0.0, 0

    def decide(self, step: Step) -> None:
        start = time.perf_counter()
        loads = [
            Load(
                worker=n, running=len(w.running), slots=w.slots, profile=self.speeds.profile(n),
                prefill_tok_per_s=1 / PREFILL_S / w.slower,
            )
            for n, w in step.workers.items()
        ]  # fmt: skip
        if step.queue:
            placed = place([r.id for r in step.queue], loads, holds=self.holds, meant=self.meant)
            for id, worker in placed:
                self.meant.pop(id, None)
                step.give(step.queue.popleft(), worker)
                group = self.holds.setdefault(id.rpartition("/")[0], [])
                if worker not in group:
                    group.append(worker)
        elif not step.away:
            for move in rebalance(loads, held_by(step), typical=MEDIAN * 1.28, round_trip_s=ROUND_TRIP_S):
                step.move(move.source, move.id, move.target)
        took = time.perf_counter() - start
        self.s, self.most_s, self.calls = self.s + took, max(self.most_s, took), self.calls + 1

    def back(self, step: Step, r: Response, target: str | None) -> None:
        step.queue.appendleft(r)
        if target is not None:
            self.meant[r.id] = target

    def observe(self, step: Step, rng: random.Random) -> None:
        for n, w in step.workers.items():
            if w.running and w.tokens:
                self.speeds.observe(n, len(w.running), round(w.tokens), TICK_S * rng.lognormvariate(0, NOISE))
            w.tokens = 0.0


def held_by(step: Step) -> Callable[[str], Sequence[Running]]:
    def held(name: str) -> list[Running]:
        w = step.workers[name]
        return [
            Running(id=id, context=PROMPT + int(r.made + w.clock - since), moves=r.moves)
            for id, (r, since) in w.running.items()
        ]

    return held


def one(policy: Policy, fleet: list[int], slots: int, groups: int, seed: int) -> tuple[float, int]:
    """Time over bound, and moves."""
    rng = random.Random(seed)
    responses = [
        Response(f"{g}/{n}", min(LONGEST, max(2.0, rng.lognormvariate(math.log(MEDIAN), SIGMA))))
        for g in range(groups) for n in range(SIBLINGS)
    ]  # fmt: skip
    workers = {f"w{n}": Worker(f"w{n}", ENGINE.times(k), slots, k) for n, k in enumerate(fleet)}
    per_worker = min(slots, groups * SIBLINGS)
    rates = [w.profile.tok_per_s(per_worker) for w in workers.values()]
    total = sum(r.length for r in responses)
    lost_s = total / sum(rates) / 3
    bound_s = max((total - lost_s * rates[0]) / sum(rates[1:]), max(r.length for r in responses) * ENGINE.step_s(1))
    step = Step(workers, deque(responses))
    return step.run(policy, lost_s, rng) / bound_s, step.moved


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--seeds", type=int, default=8)
    args.add_argument("--groups", type=int, default=128)
    said = args.parse_args()
    policies = {"round-robin": Policy, "shortest": Shortest, "rlboost": RLBoost, "windfall": Windfall}
    print(f"{'fleet':<16}{'slots':>6}" + "".join(f"{name:>20}" for name in policies))
    for slots in (64, 256):
        for name, fleet in FLEETS.items():
            cells = []
            for make in policies.values():
                results = []
                for seed in range(said.seeds):
                    policy = make()
                    one(policy, fleet, slots, said.groups, 1000 + seed)  # so that speeds are known, as in a run
                    results.append(one(policy, fleet, slots, said.groups, seed))
                ratio = sum(r for r, _ in results) / len(results)
                cells.append(f"{ratio:>8.2f}x {sum(m for _, m in results) / len(results):>4.0f} moved")
            print(f"{name:<16}{slots:>6}" + "".join(f"{c:>20}" for c in cells), flush=True)


if __name__ == "__main__":
    main()
