"""The serving load of benchmarks/serve/coserve.py and benchmarks/serve/beside_vllm.py, and the figures of a run.

It uses the standard library only.

Arrivals and lengths come from a trace with the columns of Azure's (TIMESTAMP, ContextTokens, GeneratedTokens; not
shipped: github.com/Azure/AzurePublicDataset), or from a generator with the quantiles of its 19,366 conversations of
November 2023. The order and the relative distances of the arrivals are kept; the rate is scaled to the wanted load.
The first twentieth of the trace is left out: it begins almost idle.
"""

from __future__ import annotations

import csv
import random
from bisect import bisect_right
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path

CONTEXT = ((0.0, 10), (0.01, 29), (0.1, 207), (0.25, 396), (0.5, 1020), (0.75, 1189), (0.9, 2734), (0.99, 4142))
GENERATED = ((0.0, 5), (0.01, 16), (0.1, 54), (0.25, 85), (0.5, 129), (0.75, 395), (0.9, 424), (0.99, 601))
"""Quantiles of the conversations: (share, tokens). Between two of them, lengths are equally likely."""
SKIPPED = 0.05
"""Share of the requests at the beginning of a trace that are left out."""


@dataclass(frozen=True)
class Arrival:
    at_s: float
    prompt: int
    tokens: int


def _quantile(table: tuple[tuple[float, int], ...], share: float) -> int:
    for (low, a), (high, b) in pairwise(table):
        if share < high:
            return round(a + (b - a) * (share - low) / (high - low))
    return table[-1][1]


def requests(trace: Path | None, count: int, *, max_prompt: int, max_output: int, seed: int = 0) -> list[Arrival]:
    """`count` requests, at a mean rate of 1 per second."""
    rng, out, at_s = random.Random(seed), list[Arrival](), 0.0
    if trace is not None:
        first: datetime | None = None
        with trace.open() as file:
            rows = list(csv.DictReader(file))
        for row in rows[int(SKIPPED * len(rows)) :][:count]:
            when = datetime.fromisoformat(row["TIMESTAMP"][:26])
            first = first or when
            at_s = (when - first).total_seconds()
            out.append(Arrival(at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"])))
        if not out:
            raise SystemExit(f"{trace} has no requests")
    else:
        for _ in range(count):
            at_s += rng.expovariate(1.0)
            out.append(Arrival(at_s, _quantile(CONTEXT, rng.random()), _quantile(GENERATED, rng.random())))
    scale = len(out) / max(out[-1].at_s, 1e-9)
    return [Arrival(a.at_s * scale, max(1, min(a.prompt, max_prompt)), max(2, min(a.tokens, max_output))) for a in out]


def schedule(base: list[Arrival], rate: float, seconds: float, burst: float = 1.0) -> list[Arrival]:
    """`seconds` of the requests at this mean rate; in the middle third of the time, at `burst` times the rate.

    >>> base = [Arrival(float(n), 8, 8) for n in range(100)]
    >>> [len(schedule(base, 2.0, 12.0, burst)) for burst in (1.0, 4.0)]
    [24, 48]
    """
    # Arrival n of the base comes when the integral of the rate over time has reached its time.
    edges, total = [0.0], 0.0
    parts = [(seconds / 3, rate), (seconds / 3, rate * burst), (seconds / 3, rate)]
    for length, each in parts:
        total += length * each
        edges.append(total)
    out: list[Arrival] = []
    for a in base:
        if a.at_s >= total:
            break
        part = min(bisect_right(edges, a.at_s) - 1, 2)
        at_s = part * seconds / 3 + (a.at_s - edges[part]) / parts[part][1]
        out.append(Arrival(at_s, a.prompt, a.tokens))
    return out


@dataclass
class Served:
    """The times of one request."""

    arrival_s: float
    wanted: int
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0
    error: str = ""

    def got(self, now_s: float, tokens: int) -> None:
        if not self.tokens:
            self.first_s = now_s
        self.last_s = now_s
        self.tokens += tokens

    @property
    def done(self) -> bool:
        return bool(self.error) or self.tokens >= self.wanted

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass
class Figures:
    """One row of the table."""

    what: str
    load: str
    values: dict[str, float] = field(default_factory=dict)


def latencies(served: list[Served], took_s: float, *, ttft_s: float, tpot_s: float) -> dict[str, float]:
    good = [s for s in served if not s.error and s.tokens]
    ttft, tpot = sorted(s.ttft_s for s in good), sorted(t for s in good if (t := s.tpot_s) is not None)
    late = sum(t > ttft_s for t in ttft) + sum(t > tpot_s for t in tpot) + len(served) - len(good)
    return {
        "requests": len(served), "errors": len(served) - len(good),
        "ttft_p50_ms": 1000 * at_share(ttft, 0.5), "ttft_p99_ms": 1000 * at_share(ttft, 0.99),
        "tpot_p50_ms": 1000 * at_share(tpot, 0.5), "tpot_p99_ms": 1000 * at_share(tpot, 0.99),
        "violations": late, "tok_per_s": sum(s.tokens for s in good) / took_s,
    }  # fmt: skip


def at_share(values: list[float], share: float) -> float:
    """The value below which this share of the sorted values is."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0
