"""JigsawRL's pairs of pipelines on the same GPUs, beside the paper's figures: stage shares of the paper (table 1), and
what two stages cost each other as measured on one H200 with `python benchmarks/jobs/beside.py`.

    python benchmarks/papers/jigsaw_table.py [--steps 20] [--seeds 2] [--gains 1.0] [--skip-look-ahead]

Every GPU has a replica of both pipelines. A step of a pipeline is rollout, reference and training (and tools, which
need no GPU); each stage ends on all GPUs before the next begins. The rollout of a GPU is split where few responses are
left. If both pipelines have work for a GPU, a policy decides: one of them, or both at their measured relative speeds.

    one after the other   every pipeline alone
    turns                 one stage at a time, first come, first served: no two run at the same time
    greedy                both at once where that was measured to gain, else the one that came first
    greedy, merged tails  responses also leave GPUs that the other pipeline wants, by the rule of the product
                          (src/windfall/controller/scheduling/tails.py); stages of training stay where they are
    look-ahead            the same actions, chosen by simulating the next three decisions (the paper's window), by the
                          end of the critical path

The number is the sum of the relative speeds: 1.00 is as fast as one after the other, 2.00 as if the pipelines did not
share anything. For pairs of equal pipelines it is the ratio of tokens per second. `--gains` scales what running two
stages at once gains in all measurements, to see how much depends on it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

from windfall.controller.scheduling.balance import Running, WorkerLoad
from windfall.controller.scheduling.tails import merge
from windfall.sim.core.draws import LogNormalLengths
from windfall.step_time import StepTime
from windfall.turns.co_running import GAIN

GPUS, GROUPS, SIZE, MAX_TOKENS = 4, 64, 4, 8192
SHARES = {
    "0.6B GSM8K": (66.1, 14.2, 19.7, 0.0), "4B GSM8K": (52.2, 18.7, 29.1, 0.0), "4B AIME": (80.9, 6.9, 12.2, 0.0),
    "Search-R1": (39.1, 16.6, 24.6, 19.7),
}  # fmt: skip
"""Table 1: rollout, reference, training, tools, in percent of a step."""
MEDIANS = {"0.6B GSM8K": 1000.0, "4B GSM8K": 1000.0, "4B AIME": 4000.0, "Search-R1": 500.0}
SIGMA, ALIKE, PROMPT = 0.6, 0.5, 256
EACH = 1 / 200
"""Time that a response adds to a decode step, as a part of that of an empty step: the 0.6B shape on an H200."""
PREFILL = 1 / 800
"""Time to prefill a token, in the same unit: 5 us if an empty step takes 4 ms."""
FEW, TAIL = 32, 16
"""A rollout on a GPU is split where at most this many responses are left. Policies choose at the end of each part."""
TRAIN_BESIDE = ((32, 1.10), (128, 1.07), (math.inf, 1.07))
DECODE_BESIDE = ((32, 1.17), (128, 0.97), (math.inf, 1.00))
"""Sum of the relative speeds of two stages on one GPU, by the rows of decoding: measured at 16, 64 and 256 rows."""
WINDOW = 3
PAPER = {
    ("Qwen3-0.6B", "GSM8K"): (6.4, 12.1, "0.6B GSM8K"), ("Qwen3-0.6B", "MATH"): (11.5, 18.1, "0.6B GSM8K"),
    ("Qwen3-0.6B", "MATH multi"): (11.8, 18.0, "0.6B GSM8K"), ("Qwen3-0.6B", "AIME multi"): (10.8, 20.8, "4B AIME"),
    ("Qwen3-0.6B", "HotpotQA"): (4.4, 6.6, "Search-R1"),
    ("Qwen3-4B", "GSM8K"): (4.2, 7.8, "4B GSM8K"), ("Qwen3-4B", "MATH"): (8.0, 11.2, "4B GSM8K"),
    ("Qwen3-4B", "MATH multi"): (8.3, 11.1, "4B GSM8K"), ("Qwen3-4B", "AIME multi"): (9.4, 14.6, "4B AIME"),
    ("Qwen3-4B", "HotpotQA"): (1.7, 2.5, "Search-R1"),
    ("Qwen3-4B-Instruct", "GSM8K"): (2.6, 5.0, "4B GSM8K"), ("Qwen3-4B-Instruct", "MATH"): (4.8, 6.8, "4B GSM8K"),
    ("Qwen3-4B-Instruct", "MATH multi"): (4.8, 6.8, "4B GSM8K"),
    ("Qwen3-4B-Instruct", "AIME multi"): (8.8, 11.9, "4B AIME"),
    ("Qwen3-4B-Instruct", "HotpotQA"): (3.3, 5.2, "Search-R1"),
    ("Llama-3.1-8B", "GSM8K"): (2.1, 3.8, "4B GSM8K"), ("Llama-3.1-8B", "MATH"): (3.4, 4.7, "4B GSM8K"),
    ("Llama-3.1-8B", "MATH multi"): (3.7, 5.4, "4B GSM8K"), ("Llama-3.1-8B", "AIME multi"): (6.1, 8.1, "4B AIME"),
    ("Llama-3.1-8B", "HotpotQA"): (2.5, 3.6, "Search-R1"),
}  # fmt: skip
"""Figure 12: thousand tokens per second of two equal pipelines with Verl (one after the other) and JigsawRL, and the
stage shares that are used here: the paper gives four of them."""
PAIRS = {
    "0.6B + 4B": ((6.4, "0.6B GSM8K"), (4.2, "4B GSM8K"), 5.1, 7.2),
    "0.6B + 8B": ((6.4, "0.6B GSM8K"), (2.1, "4B GSM8K"), 3.1, 5.4),
    "4B + 8B": ((4.2, "4B GSM8K"), (2.1, "4B GSM8K"), 1.7, 3.7),
}
"""Heterogeneous pairs: speed of each alone (figure 12, GSM8K) with its shares; the pair with Verl and with JigsawRL."""
ASSUMED = (
    f"{GPUS} GPUs: the heterogeneous pairs have 4, and two of their three figures for one after the other follow "
    "from figure 12 (an equal number of tokens of both)",
    f"{GROUPS} prompts with {SIZE} responses, at most {MAX_TOKENS:,} tokens (paper); lengths log-normal, spread "
    f"{SIGMA:g}, medians {', '.join(f'{name} {median:,.0f}' for name, median in MEDIANS.items())}",
    "pairs without published stage shares have those of the nearest one; 8B those of 4B",
    "steps of both pipelines of a pair take equally long alone",
    "two stages at once divide their sum of relative speeds evenly; reference counts as training; two trainings at "
    "once gain nothing; the measurements are those of the 0.6B shape, for all sizes",
    "switching between pipelines is free, and both fit into the memory",
    "lengths are known when responses move; windfall predicts them",
)


class Row(NamedTuple):
    """A response of a rollout."""

    context: float
    """Tokens that a move would have to prefill again."""
    left: float
    """Tokens that it will still generate."""


@dataclass(slots=True)
class Work:
    """A stage, or a part of it, on one GPU."""

    kind: str
    """rollout, reference, train or tool."""
    left_s: float
    rows: float = 0.0
    """Mean rows of a decode step."""
    members: tuple[Row, ...] = ()
    """The responses when the part began, the shortest one first."""
    total_s: float = 0.0
    """How long the part took when it began."""
    tokens: float = 0.0
    """Tokens that each response has in this part, if it does not end before."""

    def rows_left(self) -> list[Row]:
        """The responses that run now."""
        done = self.tokens * (1 - self.left_s / self.total_s)
        return [Row(row.context + done, row.left - done) for row in self.members if row.left > done + 1e-6]


Phase = list[list[Work]]
"""By GPU: what is left of this stage, in order."""


@functools.lru_cache(maxsize=4096)
def _rollout(shares: str, seed: int) -> list[list[Row]]:
    """By GPU: the responses of the rollout of one step."""
    lengths = LogNormalLengths(median=MEDIANS[shares], sigma=SIGMA, alike=ALIKE)
    per_gpu = GROUPS * SIZE // GPUS
    drawn = [
        min(MAX_TOKENS, lengths.draw(1009 * (seed * GROUPS * SIZE + n), seed * GROUPS + n // SIZE))
        for n in range(GROUPS * SIZE)
    ]
    return [[Row(PROMPT, left) for left in drawn[gpu * per_gpu : (gpu + 1) * per_gpu]] for gpu in range(GPUS)]


@functools.lru_cache(maxsize=16)
def _mean_rollout(shares: str) -> float:
    """Mean duration of a rollout on all GPUs."""
    rollouts = [_rollout(shares, seed) for seed in range(9000, 9040)]
    return statistics.mean(max(sum(work.left_s for work in _parts(rows)) for rows in rollout) for rollout in rollouts)


@functools.lru_cache(maxsize=16)
def _unit_s(shares: str) -> float:
    """Seconds of an empty decode step. The shares are those of the mean step: other steps are longer or shorter, as
    their longest responses are."""
    return SHARES[shares][0] / _mean_rollout(shares)


def step_of(shares: str, seed: int) -> list[Phase]:
    """The stages of one step. A step takes about 100 s alone."""
    _, reference, train, tool = SHARES[shares]
    phases: list[Phase] = [[_parts(rows, _unit_s(shares)) for rows in _rollout(shares, seed)]]
    for kind, seconds in (("tool", tool), ("reference", reference), ("train", train)):
        if seconds:
            phases.append([[Work(kind, seconds)] for _ in range(GPUS)])
    return phases


def _parts(rows: Sequence[Row], unit_s: float = 1.0) -> list[Work]:
    """The parts of a rollout with these responses."""
    out: list[Work] = []
    if not rows:
        return out
    rows = sorted(rows, key=lambda row: row.left)
    bounds = [len(rows), *(most for most in (FEW, TAIL) if most < len(rows)), 0]
    done = 0.0
    for count, then in itertools.pairwise(bounds):
        until = rows[len(rows) - then - 1].left
        tokens = sum(max(0.0, min(row.left, until) - done) for row in rows)
        if until > done:
            seconds = (until - done + EACH * tokens) * unit_s
            members = tuple(Row(row.context + done, row.left - done) for row in rows[len(rows) - count :])
            out.append(Work("rollout", seconds, tokens / (until - done), members, seconds, until - done))
        done = until
    return out


@dataclass(slots=True)
class Pipeline:
    shares: str
    seed: int
    phases: list[Phase] = field(default_factory=list)
    steps: int = 0
    ended_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.phases = self.phases or step_of(self.shares, self.seed)

    def on(self, gpu: int) -> Work | None:
        return self.phases[0][gpu][0] if self.phases[0][gpu] else None

    def advance(self, now_s: float) -> None:
        """Drop what is done, and go on to the next stage or step."""
        for parts in self.phases[0]:
            while parts and parts[0].left_s <= 1e-9:
                parts.pop(0)
        while not any(self.phases[0]):
            self.phases.pop(0)
            if not self.phases:
                self.steps += 1
                self.ended_s.append(now_s)
                self.phases = step_of(self.shares, self.seed + 17 * self.steps)

    def left_s(self) -> float:
        """Seconds until the end of the step, alone."""
        return sum(max(sum(work.left_s for work in parts) for parts in phase) for phase in self.phases)


def together(a: Work, b: Work, gains: float = 1.0) -> float:
    """Sum of the relative speeds of two stages on one GPU."""
    decoding = [work for work in (a, b) if work.rows]
    if not decoding:
        return 1.0
    table = DECODE_BESIDE if len(decoding) == 2 else TRAIN_BESIDE
    rows = statistics.mean(work.rows for work in decoding)
    total = next(total for most, total in table if rows <= most)
    return 1.0 + (total - 1.0) * gains if total > 1.0 else total


BOTH = -1
Policy = Callable[["Gpus"], "list[int]"]
"""Which pipeline each GPU works for, or BOTH. May merge tails first."""


class Gpus:
    def __init__(self, pipelines: list[Pipeline], gains: float) -> None:
        self.pipelines, self.gains, self.now_s = pipelines, gains, 0.0
        self.came_s = [[0.0] * GPUS for _ in pipelines]
        """By pipeline and GPU: when the stage that it works on could begin."""
        self.working: list[Work | None] = [None] * GPUS
        """What each GPU works on alone: a stage that has begun is completed."""

    def copy(self) -> Gpus:
        new = Gpus([], self.gains)
        known: dict[int, Work] = {}

        def of(work: Work) -> Work:
            known[id(work)] = replace(work)
            return known[id(work)]

        for p in self.pipelines:
            phases = [[[of(work) for work in parts] for parts in phase] for phase in p.phases]
            new.pipelines.append(Pipeline(p.shares, p.seed, phases, p.steps, [*p.ended_s]))
        new.now_s, new.came_s = self.now_s, [list(times) for times in self.came_s]
        new.working = [known.get(id(work)) for work in self.working]
        return new

    def ready(self, gpu: int) -> list[int]:
        """Pipelines that have work for this GPU."""
        works = [pipeline.on(gpu) for pipeline in self.pipelines]
        return [n for n, work in enumerate(works) if work is not None and work.kind != "tool"]

    def gain(self, gpu: int) -> float:
        """The sum of relative speeds if both pipelines have this GPU."""
        a, b = (pipeline.on(gpu) for pipeline in self.pipelines)
        assert a is not None
        assert b is not None
        return together(a, b, self.gains)

    def first(self, gpu: int, ready: Sequence[int]) -> int:
        """The pipeline whose stage has begun here, else the one that came first."""
        begun = [n for n in ready if self.pipelines[n].on(gpu) is self.working[gpu]]
        return begun[0] if begun else min(ready, key=lambda n: (self.came_s[n][gpu], n))

    def run(self, choice: Sequence[int]) -> None:
        """Work like this until a stage ends."""
        speeds: list[tuple[Work, float]] = []
        for gpu in range(GPUS):
            ready = self.ready(gpu)
            self.working[gpu] = None
            for n in ready:
                work = self.pipelines[n].on(gpu)
                assert work is not None
                both = len(ready) == 2 and choice[gpu] == BOTH
                if both or len(ready) == 1 or choice[gpu] == n:
                    speeds.append((work, self.gain(gpu) / 2 if both else 1.0))
                    self.working[gpu] = None if both else work
            tools = (pipeline.on(gpu) for pipeline in self.pipelines)
            speeds += [(work, 1.0) for work in tools if work is not None and work.kind == "tool"]
        step_s = min(work.left_s / speed for work, speed in speeds)
        self.now_s += step_s
        before = [[pipeline.on(gpu) for gpu in range(GPUS)] for pipeline in self.pipelines]
        for work, speed in speeds:
            work.left_s -= step_s * speed
        for pipeline, works, came_s in zip(self.pipelines, before, self.came_s, strict=True):
            pipeline.advance(self.now_s)
            for gpu, work in enumerate(works):
                if pipeline.on(gpu) is not work:
                    came_s[gpu] = self.now_s

    def merged(self, n: int) -> Gpus | None:
        """The same after responses of pipeline `n` have moved. None: nothing moves."""
        pipeline = self.pipelines[n]
        unit_s = _unit_s(pipeline.shares)
        profile = StepTime(fixed_s=unit_s, each_s=EACH * unit_s)
        works = [pipeline.on(gpu) for gpu in range(GPUS)]
        if len(self.pipelines) == 1 or any(w is not None and not w.members for w in works):
            return None
        other = self.pipelines[1 - n]
        rows = {str(gpu): [] if work is None else work.rows_left() for gpu, work in enumerate(works)}
        held = {
            gpu: [
                Running(id=f"{gpu}/{k}", context=round(row.context), remaining=row.left) for k, row in enumerate(there)
            ]
            for gpu, there in rows.items()
        }
        loads = [
            WorkerLoad(
                worker=gpu, running=len(there), slots=GROUPS * SIZE, profile=profile,
                prefill_tok_per_s=1 / (PREFILL * unit_s), contended=float(other.on(int(gpu)) is not None),
            )
            for gpu, there in rows.items()
        ]  # fmt: skip
        moves = merge(loads, held.__getitem__)
        if not moves:
            return None
        new = self.copy()
        parts, targets = new.pipelines[n].phases[0], {move.id: move.target for move in moves}
        for gpu, there in rows.items():
            stay = [row for row, r in zip(there, held[gpu], strict=True) if r.id not in targets]
            joining = [row for g in rows for row, r in zip(rows[g], held[g], strict=True) if targets.get(r.id) == gpu]
            old, now = parts[int(gpu)], _parts([*stay, *joining], unit_s)
            if joining:
                now[0].left_s += PREFILL * unit_s * sum(row.context for row in joining)
                now[0].total_s = now[0].left_s
            if joining or len(stay) < len(there):
                if old and now and new.working[int(gpu)] is old[0]:  # it goes on
                    new.working[int(gpu)] = now[0]
                parts[int(gpu)] = now
        return new

    def become(self, other: Gpus) -> None:
        self.pipelines, self.working = other.pipelines, other.working


def turns(gpus: Gpus) -> list[int]:
    return [gpus.first(gpu, ready) if (ready := gpus.ready(gpu)) else BOTH for gpu in range(GPUS)]


def greedy(gpus: Gpus) -> list[int]:
    both = [len(gpus.ready(gpu)) == 2 and gpus.gain(gpu) >= GAIN for gpu in range(GPUS)]
    return [BOTH if b else n for b, n in zip(both, turns(gpus), strict=True)]


def merging(gpus: Gpus) -> list[int]:
    for n in range(len(gpus.pipelines)):
        if (new := gpus.merged(n)) is not None:
            gpus.become(new)
    return greedy(gpus)


def look_ahead(gpus: Gpus) -> list[int]:
    """The best first action of all sequences of WINDOW actions, by the end of the critical path of the steps that both
    pipelines are in now."""

    def actions(state: Gpus) -> list[tuple[Gpus, list[int]]]:
        """(the state, with merged tails or without, and a choice)."""
        if len(state.pipelines) == 1:
            return [(state, turns(state))]
        out: list[tuple[Gpus, list[int]]] = []
        for start in (state, *(new for n in range(2) if (new := state.merged(n)) is not None)):
            own, busy = turns(start), [work is not None for work in start.working]
            choices = [[own[g] if busy[g] and way != BOTH else way for g in range(GPUS)] for way in (BOTH, 0, 1)]
            if all(len(start.ready(gpu)) < 2 for gpu in range(GPUS)):
                choices = choices[:1]
            out += [(start, choice) for n, choice in enumerate(choices) if choice not in choices[:n]]
        return out

    def after(state: Gpus, choice: list[int]) -> Gpus:
        new = state.copy()
        new.run(choice)
        return new

    steps = [pipeline.steps for pipeline in gpus.pipelines]

    def cost(state: Gpus, depth: int) -> float:
        left_s = [p.left_s() if p.steps == n else 0.0 for p, n in zip(state.pipelines, steps, strict=True)]
        if depth == 0 or not all(left_s):
            return state.now_s + max(left_s)
        return min(cost(after(*action), depth - 1) for action in actions(state))

    found = actions(gpus)
    best = found[0] if len(found) == 1 else min(found, key=lambda action: cost(after(*action), WINDOW - 1))
    gpus.become(best[0])
    return best[1]


POLICIES: dict[str, Policy] = {
    "turns": turns, "greedy": greedy, "greedy, merged tails": merging, "look-ahead": look_ahead,
}  # fmt: skip
SKIP = 2
"""Steps at the start that are left out."""


def ends(shares: Sequence[str], policy: Policy, steps: int, seed: int, gains: float = 1.0) -> list[list[float]]:
    """By pipeline: when its steps ended."""
    gpus = Gpus([Pipeline(name, 1000 * seed + 100_000 * n) for n, name in enumerate(shares)], gains)
    while min(pipeline.steps for pipeline in gpus.pipelines) < steps:
        gpus.run(policy(gpus))
    return [pipeline.ended_s for pipeline in gpus.pipelines]


def relative_speeds(shares: Sequence[str], policy: Policy, steps: int, seeds: int, gains: float = 1.0) -> list[float]:
    """By pipeline: its speed beside the other one, as a part of that alone, in the same steps."""
    out: list[list[float]] = []
    for seed in range(seeds):
        found: list[float] = []
        for n, ended_s in enumerate(ends(shares, policy, steps, seed, gains)):
            alone = Gpus([Pipeline(shares[n], 1000 * seed + 100_000 * n)], gains)
            while alone.pipelines[0].steps < steps:
                alone.run(turns(alone))
            alone_s = alone.pipelines[0].ended_s
            found.append((alone_s[steps - 1] - alone_s[SKIP]) / (ended_s[steps - 1] - ended_s[SKIP]))
        out.append(found)
    return [statistics.mean(column) for column in zip(*out, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--gains", type=float, default=1.0)
    parser.add_argument("--skip-look-ahead", action="store_true")
    a = parser.parse_args()
    began = time.perf_counter()
    chosen = {name: p for name, p in POLICIES.items() if not (a.skip_look_ahead and name == "look-ahead")}
    print("Assumed:\n" + "\n".join(f"- {line}" for line in ASSUMED))
    print(
        f"\nSum of the relative speeds of two equal pipelines (in brackets: slowdown of the slower one)\n\n{'':26}",
        end="",
    )
    print("".join(f"{name:>22}" for name in chosen))
    found: dict[tuple[str, str], list[float]] = {}
    for shares in SHARES:
        print(f"{shares:26}", end="", flush=True)
        for name, policy in chosen.items():
            speeds = found[shares, name] = relative_speeds((shares, shares), policy, a.steps, a.seeds, a.gains)
            print(f"{sum(speeds):15.2f} ({1 / min(speeds):.2f})", end="", flush=True)
        print()
    print("\nFigure 12, as a multiple of one after the other (1.00)\n")
    print(f"{'':20}{'':14}{'shares of':14}{'paper':>8}" + "".join(f"{name:>22}" for name in chosen))
    means: dict[str, list[float]] = {name: [] for name in ("paper", *chosen)}
    for (model, data), (verl, jigsaw, shares) in PAPER.items():
        row = {"paper": jigsaw / verl, **{name: sum(found[shares, name]) for name in chosen}}
        for name, ratio in row.items():
            means[name].append(ratio)
        print(f"{model:20}{data:14}{shares:14}{row['paper']:8.2f}" + "".join(f"{row[name]:22.2f}" for name in chosen))
    cells = "".join(f"{statistics.mean(means[name]):22.2f}" for name in chosen)
    print(f"{'mean':20}{'':14}{'':14}{statistics.mean(means['paper']):8.2f}{cells}")
    print("\nHeterogeneous pairs, thousand tokens per second of both together. Half of the time each: no gain\n")
    print(f"{'':12}{'Verl':>8}{'JigsawRL':>10}{'half each':>12}" + "".join(f"{name:>22}" for name in chosen))
    for pair, ((fast, first), (slow, second), verl, jigsaw) in PAIRS.items():
        cells = ""
        for policy in chosen.values():
            speeds = relative_speeds((first, second), policy, a.steps, a.seeds, a.gains)
            cells += f"{speeds[0] * fast + speeds[1] * slow:22.1f}"
        print(f"{pair:12}{verl:8.1f}{jigsaw:10.1f}{(fast + slow) / 2:12.1f}{cells}", flush=True)
    print(f"\n{a.steps} steps, {a.seeds} seeds, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
