"""The time of one rollout step under four policies for placing responses on workers. Simulated, in virtual time.

    python benchmarks/fleet/balance.py [--seeds 8] [--groups 128]

one_step.py simulates the workers; a slower worker takes 2, 4 or 10 times as long for everything. Lengths are log-normal
(sigma 0.7) and not known in advance. In each step the first worker is lost when a third of the work should be done;
under every policy its responses continue from their last token. With 64 slots half of the responses run at once, with
256 all.

    round-robin   workers in turn, regardless of load; what does not fit waits at the worker
    shortest      join the shortest queue by count, hold back what does not fit, rebalance when a worker is idle
    rlboost       Algorithm 2: fewest pending below a bound; then move one pending, or all above B to an idle worker
    windfall      scheduling/balance.py, with speeds learned from noisy measurements in the step before

Each figure is the mean time of a step over the seeds, divided by a lower bound: all work at the full rate of all
workers while they are available, or the longest response alone on the fastest worker. `moved`: moved responses per
step.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

from benchmarks.support.one_step import PREFILL_S, PROMPT, ROUND_TRIP_S, TICK_S, Policy, Response, Step, Worker
from windfall.controller.scheduling.balance import Running, WorkerLoad, place, rebalance
from windfall.controller.workers.worker_speed import WorkerSpeeds
from windfall.step_time import StepTime

ENGINE = StepTime(fixed_s=0.010, each_s=0.00006)
MEDIAN, SIGMA, SIBLINGS, LONGEST = 1500, 0.7, 8, 14_000
MEAN = MEDIAN * math.exp(SIGMA**2 / 2)
NOISE = 0.1
PENDING = 8
"""RLBoost's bound on pending responses per worker. The paper leaves it open; of 1, 8 and 32 this was best or equal
here."""
FLEETS = {
    "8 equal": [1] * 8,
    "one 4x slower": [1] * 7 + [4],
    "one 10x slower": [1] * 7 + [10],
    "mixed 1:2:4": [1, 1, 1, 2, 2, 2, 4, 4],
}


class RoundRobin:
    """Round-robin; the other policies override what differs."""

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


class Shortest(RoundRobin):
    def decide(self, step: Step) -> None:
        workers = step.workers
        while step.queue:
            free = [n for n, w in workers.items() if len(w.running) < w.slots]
            if not free:
                return
            step.give(step.queue.popleft(), min(free, key=lambda n: len(workers[n].running)))
        if step.away or all(w.running for w in workers.values()):
            return
        fair = -(-sum(len(w.running) for w in workers.values()) // len(workers))
        for n, w in workers.items():
            youngest = sorted(w.running.values(), key=lambda x: x[0].made - x[1])
            for r, _ in youngest[: max(0, len(w.running) - fair)]:
                step.move(n, r.id)


class RLBoost(RoundRobin):
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
            nearly = 0.8 * w.profile.tok_per_s(w.slots)  # B: four fifths of a full batch's rate
            b = nearly * w.profile.fixed_s / (1 - nearly * w.profile.each_s)
            for id in list(w.running)[: max(0, len(w.running) - math.ceil(b))]:
                step.move(busiest, id)


class Windfall(RoundRobin):
    def __init__(self) -> None:
        self.speeds, self.move_targets, self.prefix_holders = WorkerSpeeds(), dict[str, str](), dict[str, list[str]]()

    def decide(self, step: Step) -> None:
        loads = [
            WorkerLoad(
                worker=n, running=len(w.running), slots=w.slots, profile=self.speeds.profile(n),
                prefill_tok_per_s=1 / PREFILL_S / w.slower,
            )
            for n, w in step.workers.items()
        ]  # fmt: skip
        if step.queue:
            placed = place(
                [r.id for r in step.queue],
                loads,
                prefix_holders=self.prefix_holders,
                move_targets=self.move_targets,
            )
            for id, worker in placed:
                self.move_targets.pop(id, None)
                step.give(step.queue.popleft(), worker)
                group = self.prefix_holders.setdefault(id.rpartition("/")[0], [])
                if worker not in group:
                    group.append(worker)
        elif not step.away:
            for move in rebalance(loads, held_by(step), typical=MEAN, round_trip_s=ROUND_TRIP_S):
                step.move(move.source, move.id, move.target)

    def back(self, step: Step, r: Response, target: str | None) -> None:
        step.queue.appendleft(r)
        if target is not None:
            self.move_targets[r.id] = target

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
    """Returns (time / lower bound, moved responses)."""
    rng = random.Random(seed)
    responses = [
        Response(f"{g}/{n}", min(LONGEST, max(2.0, rng.lognormvariate(math.log(MEDIAN), SIGMA))))
        for g in range(groups) for n in range(SIBLINGS)
    ]  # fmt: skip
    workers = {f"w{n}": Worker(f"w{n}", ENGINE.slower(k), slots, k) for n, k in enumerate(fleet)}
    per_worker = min(slots, groups * SIBLINGS)
    rates = [w.profile.tok_per_s(per_worker) for w in workers.values()]
    total = sum(r.length for r in responses)
    lost_s = total / sum(rates) / 3
    bound_s = max((total - lost_s * rates[0]) / sum(rates[1:]), max(r.length for r in responses) * ENGINE.step_s(1))
    step = Step(workers, deque(responses))
    return step.run(policy, lost_s, rng) / bound_s, step.moved


def at_scale() -> None:
    """Prints the time of a decision with 1,000 workers, a third each of three speeds, and 20,000 responses."""
    profiles = [ENGINE, ENGINE.slower(2), ENGINE.slower(4)]
    names = [f"w{n}" for n in range(1000)]
    ids = [f"{n // SIBLINGS}/{n % SIBLINGS}" for n in range(20_000)]
    empty = [WorkerLoad(worker=w, running=0, slots=32, profile=profiles[n % 3]) for n, w in enumerate(names)]
    busy = [WorkerLoad(worker=w, running=20, slots=32, profile=profiles[n % 3]) for n, w in enumerate(names)]
    held = [Running(id=id, context=1000) for id in ids[:20]]
    speeds = WorkerSpeeds()
    cases: dict[str, Callable[[], object]] = {
        "place 20,000 on empty workers": lambda: place(ids, empty),
        "place 100 on busy ones": lambda: place(ids[:100], busy),
        "rebalance, 256 moves": lambda: rebalance(busy, lambda _: held, typical=MEAN),
        "rebalance, nothing to do": lambda: rebalance(empty, lambda _: [], typical=MEAN),
        "observe 1,000 frames": lambda: [speeds.observe(w, 20, 20, 0.02) for w in names],
    }
    print("\nthe best of 9, in ms")
    for name, case in cases.items():
        best = math.inf
        for _ in range(9):
            start = time.perf_counter()
            case()
            best = min(best, time.perf_counter() - start)
        print(f"{name:<32}{best * 1e3:>8.2f}")


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--seeds", type=int, default=8)
    args.add_argument("--groups", type=int, default=128)
    said = args.parse_args()
    policies = {"round-robin": RoundRobin, "shortest": Shortest, "rlboost": RLBoost, "windfall": Windfall}
    print(f"{'fleet':<16}{'slots':>6}" + "".join(f"{name:>20}" for name in policies))
    for slots in (64, 256):
        for name, fleet in FLEETS.items():
            cells = []
            for make in policies.values():
                results = []
                for seed in range(said.seeds):
                    policy = make()
                    one(policy, fleet, slots, said.groups, 1000 + seed)  # to learn the speeds, as in a run
                    results.append(one(policy, fleet, slots, said.groups, seed))
                ratio = sum(r for r, _ in results) / len(results)
                cells.append(f"{ratio:>8.2f}x {sum(m for _, m in results) / len(results):>4.0f} moved")
            print(f"{name:<16}{slots:>6}" + "".join(f"{c:>20}" for c in cells), flush=True)
    at_scale()


if __name__ == "__main__":
    main()
