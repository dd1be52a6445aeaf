"""Phase 1: how many GPUs of each kind train, and how many replicas of which size generate. Pure.

    steps per second   1 / max(train, tokens / H + update, tail)      staleness above 0: training overlaps
                       1 / (the longer of training and g = max(tokens / H, tail), plus the part of the shorter one
                       that pipelining does not hide, + update)       staleness 0
    H                  sum of the replicas' tokens per second

Three solvers give the same answer; `solve` chooses:

    exact        every trainer and every number of rollout GPUs per kind; H by a knapsack table. Small problems.
    milp         one mixed-integer program on HiGHS, through SciPy (the extra `plan`). 1 / time is concave
                 in H, so tangents bound it from above; a tangent is added where the solution exceeds the true rate.
                 Cost per token is a ratio: Dinkelbach's method solves cost - lambda x rate until lambda is that ratio.
    bisection    AReaL-Hex: for every kind that can train, bisect on its number of GPUs until training takes as long as
                 generation. Only for the highest throughput without a budget, where all other GPUs generate.

AReaL-Hex states rollout as x responses and y replicas per configuration, which is bilinear; with continuous x it is the
knapsack for H used here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np

from windfall.errors import WindfallError, install_command

Objective = Literal["throughput", "cost", "deadline"]
EXACT_LIMIT = 200_000
"""Largest number of combinations that are enumerated."""
TANGENTS = 24
TOLERANCE = 1e-6
MAX_ROUNDS = 40
INFEASIBLE = 2
"""Status of scipy.optimize.milp."""


class TrainOption(NamedTuple):
    kind: int
    gpus: int
    step_s: float


class ReplicaOption(NamedTuple):
    kind: int
    tp: int
    tok_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    have: tuple[int, ...]
    """GPUs of every kind."""
    usd_per_h: tuple[float, ...]
    """Price of one GPU of every kind."""
    trainers: tuple[TrainOption, ...]
    replicas: tuple[ReplicaOption, ...]
    tokens: float
    """Response tokens of a step."""
    update_s: float = 0.0
    """Seconds per step that generation loses to new weights and rewards."""
    tail_s: float = 0.0
    """Lower bound of a step, set by its longest responses."""
    overlapped: bool = True
    hidden: float = 0.0
    """If not overlapped: share of the shorter of training and generation that pipelining hides."""
    objective: Objective = "throughput"
    budget_usd_per_h: float = math.inf
    deadline_rate: float = 0.0
    """Steps per second that must be reached."""

    def rate(self, train_s: float, tok_per_s: float) -> float:
        """Steps per second."""
        if tok_per_s <= 0:
            return 0.0
        generate_s = self.tokens / tok_per_s
        if self.overlapped:
            return 1 / max(train_s, generate_s + self.update_s, self.tail_s)
        parts = train_s, max(generate_s, self.tail_s)
        return 1 / (max(parts) + (1 - self.hidden) * min(parts) + self.update_s)

    def key(self, rate: float, usd_per_h: float) -> tuple[float, ...]:
        """Smaller is better. Solutions over the budget or behind the deadline are not compared."""
        match self.objective:
            case "throughput":
                return -rate, usd_per_h
            case "cost":
                return usd_per_h / rate, -rate
            case "deadline":
                return usd_per_h, -rate

    def allowed(self, rate: float, usd_per_h: float) -> bool:
        late = self.objective == "deadline" and rate < self.deadline_rate * (1 - TOLERANCE)
        return rate > 0 and usd_per_h <= self.budget_usd_per_h * (1 + TOLERANCE) and not late


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """A solution: one trainer, and replicas by option."""

    trainer: TrainOption
    replicas: dict[ReplicaOption, int] = field(hash=False)
    rate: float
    usd_per_h: float
    method: str

    @property
    def tok_per_s(self) -> float:
        """What the replicas could generate."""
        return sum(option.tok_per_s * count for option, count in self.replicas.items())


def solve(problem: Problem, count: int = 1, method: str = "auto") -> list[Split]:
    """The best solutions, best first, each with another trainer. Empty: nothing satisfies the limits."""
    if not problem.trainers or not problem.replicas:
        return []
    if method == "auto":
        if combinations(problem) <= EXACT_LIMIT:
            method = "exact"
        elif _has_scipy():
            method = "milp"
        elif _bisectable(problem):
            method = "bisection"
        else:
            fix = f"Install SciPy: {install_command('plan')}"
            raise WindfallError("this search needs a solver", where="windfall plan", fix=fix)
    match method:
        case "exact":
            return _exact(problem, count)
        case "milp":
            return _milp(problem, count)
        case _:
            return _bisection(problem, count)


def combinations(problem: Problem) -> int:
    if _bisectable(problem):
        return len(problem.trainers)
    return len(problem.trainers) * math.prod(n + 1 for n in problem.have)


def _bisectable(problem: Problem) -> bool:
    return problem.objective == "throughput" and math.isinf(problem.budget_usd_per_h)


def _has_scipy() -> bool:
    try:
        import scipy.optimize  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    return True


# exact


class _Fill(NamedTuple):
    """The best use of n GPUs of one kind."""

    tok_per_s: float
    used: int
    option: ReplicaOption | None


def knapsack(options: Sequence[ReplicaOption], gpus: int) -> list[_Fill]:
    """For every n up to `gpus`, the highest tokens per second; of equal ones, that with the fewest GPUs.

    >>> table = knapsack([ReplicaOption(0, 1, 2.0), ReplicaOption(0, 2, 5.0)], 3)
    >>> [fill.tok_per_s for fill in table]
    [0.0, 2.0, 5.0, 7.0]
    """
    table = [_Fill(0.0, 0, None)]
    for n in range(1, gpus + 1):
        best = _Fill(table[-1].tok_per_s, table[-1].used, None)
        for option in options:
            if option.tp <= n and option.tok_per_s > 0:
                before = table[n - option.tp]
                made = _Fill(before.tok_per_s + option.tok_per_s, before.used + option.tp, option)
                if made.tok_per_s > best.tok_per_s * (1 + 1e-12):
                    best = made
        table.append(best)
    return table


def _chosen(table: Sequence[_Fill], n: int) -> Iterator[ReplicaOption]:
    while n > 0:
        option = table[n].option
        if option is None:
            n -= 1
        else:
            yield option
            n -= option.tp


def _exact(problem: Problem, count: int) -> list[Split]:
    kinds = range(len(problem.have))
    tables = [knapsack([r for r in problem.replicas if r.kind == k], problem.have[k]) for k in kinds]
    found: list[tuple[tuple[float, ...], TrainOption, tuple[int, ...], float, float]] = []
    for trainer in problem.trainers:
        left = [problem.have[k] - (trainer.gpus if trainer.kind == k else 0) for k in kinds]
        if min(left) < 0:
            continue
        every = [tuple(left)] if _bisectable(problem) else product(*(range(n + 1) for n in left))
        best = None
        for counts in every:
            fills = [tables[k][n] for k, n in enumerate(counts)]
            usd = problem.usd_per_h[trainer.kind] * trainer.gpus
            usd += sum(f.used * p for f, p in zip(fills, problem.usd_per_h, strict=True))
            rate = problem.rate(trainer.step_s, sum(f.tok_per_s for f in fills))
            if problem.allowed(rate, usd):
                row = (problem.key(rate, usd), trainer, counts, rate, usd)
                best = row if best is None or row[0] < best[0] else best
        if best is not None:
            found.append(best)
    found.sort(key=lambda row: row[0])
    out = []
    for _, trainer, counts, rate, usd in found[:count]:
        replicas: dict[ReplicaOption, int] = {}
        for k, n in enumerate(counts):
            for option in _chosen(tables[k], n):
                replicas[option] = replicas.get(option, 0) + 1
        out.append(Split(trainer=trainer, replicas=replicas, rate=rate, usd_per_h=usd, method="exact"))
    return out


# bisection


def _bisection(problem: Problem, count: int) -> list[Split]:
    kinds = range(len(problem.have))
    tables = [knapsack([r for r in problem.replicas if r.kind == k], problem.have[k]) for k in kinds]
    tried: set[TrainOption] = set()
    for kind in kinds:
        options = sorted((t for t in problem.trainers if t.kind == kind), key=lambda t: t.gpus)
        low, high = 0, len(options) - 1
        while low < high:  # training gets shorter and generation longer as more GPUs train
            middle = (low + high) // 2
            trainer = options[middle]
            tok_per_s = sum(tables[k][problem.have[k] - trainer.gpus * (k == kind)].tok_per_s for k in kinds)
            tried.add(trainer)
            if trainer.step_s > problem.tokens / max(tok_per_s, 1e-9) + problem.update_s:
                low = middle + 1
            else:
                high = middle
        tried.update(options[max(0, low - 1) : low + 2])
    few = [t for t in problem.trainers if t in tried]
    splits = _exact(Problem(**{**_fields(problem), "trainers": tuple(few)}), count)
    return [Split(**{**_fields(s), "method": "bisection"}) for s in splits]


def _fields(x: Problem | Split) -> dict:
    return {name: getattr(x, name) for name in x.__dataclass_fields__}


# mixed-integer program


class _Unsolved(Exception):
    """The program has no solution within the limits, or HiGHS gave none."""


class _Solved(NamedTuple):
    """What scipy.optimize.milp returns, as far as it is used."""

    x: np.ndarray | None
    infeasible: bool


def _milp(problem: Problem, count: int) -> list[Split]:
    out: list[Split] = []
    banned: set[TrainOption] = set()
    while len(out) < count:
        trainers = tuple(t for t in problem.trainers if t not in banned and t.gpus <= problem.have[t.kind])
        if not trainers:
            break
        try:
            split = _Program(Problem(**{**_fields(problem), "trainers": trainers})).best()
        except _Unsolved:
            break
        banned.add(split.trainer)
        out.append(split)
    return out


class _Program:
    """Variables: one binary per trainer, one integer per replica option, then the rate and H, scaled to about 1."""

    def __init__(self, problem: Problem) -> None:
        self.p = problem
        self.z, self.y = len(problem.trainers), len(problem.replicas)
        self.size = self.z + self.y + 2
        most = sum(problem.have[r.kind] // r.tp * r.tok_per_s for r in problem.replicas)
        self.h_scale = max(most, 1e-9)
        self.rate_scale = max(problem.rate(t.step_s, self.h_scale) for t in problem.trainers) or 1.0
        self.rows: list[np.ndarray] = []
        self.low: list[float] = []
        self.high: list[float] = []
        usd = [problem.usd_per_h[t.kind] * t.gpus for t in problem.trainers]
        usd += [problem.usd_per_h[r.kind] * r.tp for r in problem.replicas]
        self.usd = np.array([*usd, 0.0, 0.0])
        self._limits()
        self._bounds_on_rate()

    def _add(self, row: np.ndarray, low: float, high: float) -> None:
        self.rows.append(row)
        self.low.append(low)
        self.high.append(high)

    def _limits(self) -> None:
        p, one = self.p, np.zeros(self.size)
        one[: self.z] = 1
        self._add(one, 1, 1)
        some = np.zeros(self.size)
        some[self.z : self.z + self.y] = 1
        self._add(some, 1, np.inf)  # something must generate
        for k, have in enumerate(p.have):
            row = np.zeros(self.size)
            row[: self.z] = [t.gpus * (t.kind == k) for t in p.trainers]
            row[self.z : self.z + self.y] = [r.tp * (r.kind == k) for r in p.replicas]
            self._add(row, 0, have)
        row = np.zeros(self.size)
        row[self.z : self.z + self.y] = [r.tok_per_s / self.h_scale for r in p.replicas]
        row[-1] = -1
        self._add(row, 0, 0)
        if math.isfinite(p.budget_usd_per_h):
            self._add(self.usd.copy(), 0, p.budget_usd_per_h)
        if p.objective == "deadline":
            row = np.zeros(self.size)
            row[-2] = 1
            self._add(row, p.deadline_rate / self.rate_scale, np.inf)

    def _bounds_on_rate(self) -> None:
        p = self.p
        row = np.zeros(self.size)
        row[-2] = 1
        # The rate with any number of replicas: the trainer's own limit.
        row[: self.z] = [-p.rate(t.step_s, 1e30) / self.rate_scale for t in p.trainers]
        self._add(row, -np.inf, 0)
        for n in range(TANGENTS):
            h = self.h_scale * 2.0 ** (-n / 2)
            for k in range(self.z) if not p.overlapped else (0,):
                self._tangent(k, h)

    def _tangent(self, k: int, h: float) -> None:
        """R <= the line that touches 1 / time at h. Overlapped: the same for all trainers."""
        p = self.p
        forms = [(1.0, p.update_s)]  # seconds of a step = share x tokens / h + fixed, for every form
        if not p.overlapped:
            train_s = p.trainers[k].step_s
            forms = [(1.0, p.update_s + (1 - p.hidden) * train_s), (1 - p.hidden, p.update_s + train_s)]
        for share, fixed_s in forms:
            tokens = share * p.tokens
            value, slope = h / (tokens + fixed_s * h), tokens / (tokens + fixed_s * h) ** 2
            row = np.zeros(self.size)
            row[-2], row[-1] = 1, -slope * self.h_scale / self.rate_scale
            high = (value - slope * h) / self.rate_scale
            if not p.overlapped:
                row[k] = 1.0  # the bound holds only for this trainer; the rate is at most 1
                high += 1.0
            self._add(row, -np.inf, high)

    def best(self) -> Split:
        if self.p.objective != "cost":
            first = self._solve(self._objective(0.0))
            if self.p.objective == "deadline":
                return first
            return self._cheapest(first)
        found = self._solve(self._objective(0.0))
        for _ in range(MAX_ROUNDS):
            ratio = found.usd_per_h / (found.rate / self.rate_scale)
            try:
                new = self._solve(self._objective(ratio))
            except _Unsolved:  # `found` is a solution, so this is a failure of HiGHS
                break
            if new.usd_per_h / new.rate >= found.usd_per_h / found.rate * (1 - TOLERANCE):
                break
            found = new
        return found

    def _objective(self, ratio: float) -> np.ndarray:
        """What to minimize. The rate alone, the cost alone (deadline), or cost - ratio x rate."""
        c = np.zeros(self.size)
        if self.p.objective == "deadline":
            return self.usd / max(self.usd.max(), 1e-9)
        c[-2] = -1.0
        if ratio:
            c += self.usd / ratio
        return c

    def _cheapest(self, split: Split) -> Split:
        """Return the cheapest solution with this rate: GPUs that do not help are left out."""
        row = np.zeros(self.size)
        row[-2] = 1
        self._add(row, split.rate / self.rate_scale * (1 - TOLERANCE), np.inf)
        try:
            return self._solve(self.usd / max(self.usd.max(), 1e-9))
        except _Unsolved:
            return split

    def _solve(self, objective: np.ndarray) -> Split:
        touched = set[tuple[int, tuple[tuple[ReplicaOption, int], ...]]]()
        for _ in range(MAX_ROUNDS):
            done = self._run(objective, presolve=True)
            if done.x is None and not done.infeasible:  # HiGHS ends some small programs with "Solve error"
                done = self._run(objective, presolve=False)
            if done.x is None:
                raise _Unsolved
            split, k = self._split(done.x)
            point = k, tuple(split.replicas.items())
            # The bound touches the true rate where a tangent was added; what is left are the tolerances of HiGHS.
            if point in touched or done.x[-2] * self.rate_scale <= split.rate * (1 + TOLERANCE):
                return split
            touched.add(point)
            self._tangent(k, max(split.tok_per_s, 1e-9 * self.h_scale))
        return split

    def _run(self, objective: np.ndarray, *, presolve: bool) -> _Solved:
        import scipy.optimize  # pyright: ignore[reportMissingImports]

        highs: Any = scipy.optimize  # SciPy's types say float where arrays are meant
        upper = [1.0] * self.z + [self.p.have[r.kind] // r.tp for r in self.p.replicas] + [1.0 + 1e-9, np.inf]
        whole = np.array([1] * (self.z + self.y) + [0, 0])
        constraint = highs.LinearConstraint(np.array(self.rows), np.array(self.low), np.array(self.high))
        done = highs.milp(
            objective, constraints=constraint, bounds=highs.Bounds(np.zeros(self.size), np.array(upper)),
            integrality=whole,
            options={"mip_rel_gap": TOLERANCE / 10, "time_limit": 60.0, "presolve": presolve},
        )  # fmt: skip
        return _Solved(done.x, done.status == INFEASIBLE)

    def _split(self, x: np.ndarray) -> tuple[Split, int]:
        p = self.p
        k = int(np.argmax(x[: self.z]))
        replicas = {r: n for r, n in zip(p.replicas, np.rint(x[self.z : -2]).astype(int).tolist(), strict=True) if n}
        tok_per_s = sum(r.tok_per_s * n for r, n in replicas.items())
        rate = p.rate(p.trainers[k].step_s, tok_per_s)
        usd = p.usd_per_h[p.trainers[k].kind] * p.trainers[k].gpus
        usd += sum(p.usd_per_h[r.kind] * r.tp * n for r, n in replicas.items())
        return Split(trainer=p.trainers[k], replicas=replicas, rate=rate, usd_per_h=usd, method="milp"), k
