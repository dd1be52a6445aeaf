"""What moving weights takes: measured rates, and bytes, dollars and seconds per version. Pure.

Rules:
- A rate is an exponential mean of what readers report. It is kept per link (within a machine, or from one region to
  another), and per holder.
- A byte counts for the kind of its source. A byte from the reader's own machine crosses no network, and counts as
  `machine`.
- A byte from another region costs the price between regions; one from the bucket costs the bucket's price as well.
- A version is complete when all workers that were connected when it was published have it or have left.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from windfall.controller.directory.holders import WeightHolder
from windfall.types import ZONE_USD_PER_GB

GUESS_BYTES_PER_S = {"machine": 2e9, "region": 1e9, "across": 1e8}
"""Rates of links that have not been measured."""
WEIGHT = 0.3
"""How much a new measurement counts in a mean."""
LEAST_BYTES = 1 << 20
"""Shorter reads measure the latency, not the rate."""
SLOW = 0.25
"""A holder below this share of the median of all holders is slow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficPrices:
    across_usd_per_gb: float = ZONE_USD_PER_GB
    bucket_usd_per_gb: float = 0.0

    def usd_per_gb(self, reader: WeightHolder, source: WeightHolder) -> float:
        across = self.across_usd_per_gb if reader.across(source) else 0.0
        return across + (self.bucket_usd_per_gb if source.kind == "bucket" else 0.0)


def mean(before: float | None, new: float) -> float:
    """The exponential mean after a new measurement."""
    return new if before is None else WEIGHT * new + (1 - WEIGHT) * before


class Rates:
    """Measured rates in bytes per second, by link and by holder."""

    def __init__(self) -> None:
        self._links: dict[tuple[str, ...], float] = {}
        self._holders: dict[str, float] = {}
        self.slow: frozenset[str] = frozenset()

    def add(self, reader: WeightHolder, source: WeightHolder, count: int, s: float) -> None:
        if count < LEAST_BYTES or s <= 0:
            return
        link = _link(reader, source)
        self._links[link] = mean(self._links.get(link), count / s)
        self._holders[source.id] = mean(self._holders.get(source.id), count / s)
        limit = SLOW * statistics.median(self._holders.values())
        self.slow = frozenset(id for id, rate in self._holders.items() if rate < limit)

    def forget(self, id: str) -> None:
        self._holders.pop(id, None)
        self.slow -= {id}

    def between(self, reader: WeightHolder, source: WeightHolder) -> float:
        link = _link(reader, source)
        guess = GUESS_BYTES_PER_S["machine" if len(link) == 1 else "region" if link[0] == link[1] else "across"]
        return self._links.get(link, guess)


def _link(reader: WeightHolder, source: WeightHolder) -> tuple[str, ...]:
    return ("machine",) if reader.shares_machine(source) else (source.region, reader.region)


@dataclass(slots=True)
class Traffic:
    """What one version has moved so far."""

    version: int = -1
    full_bytes: int = 0
    """Size of its full copy (or adapter)."""
    delta_bytes: int = 0
    """Size of the delta from the version before; 0 if there is none."""
    since_s: float = 0.0
    waiting: set[str] = field(default_factory=set)
    """Workers that do not have it yet, of those that were connected when it was published."""
    half: int = field(init=False)
    """Half of their number."""
    readers: int = 0
    """Workers that have it by now."""
    bytes: Counter[str] = field(default_factory=Counter)
    """By kind: trainer, peer, machine and bucket; beside these `across`, between regions, and `upload`."""
    usd: float = 0.0
    """What they cost."""
    half_s: float | None = None
    last_s: float | None = None
    """When half of those, and when the last of them so far had it: seconds after it was published."""

    def __post_init__(self) -> None:
        self.half = len(self.waiting) // 2

    def add(self, reader: WeightHolder, source: WeightHolder, count: int, usd: float) -> None:
        self.bytes["machine" if reader.shares_machine(source) else source.kind] += count
        self.bytes["across"] += count if reader.across(source) else 0
        self.usd += usd

    def ready(self, reader: str, now_s: float) -> None:
        """A worker has the version."""
        self.readers += 1
        if reader in self.waiting:
            self.waiting.discard(reader)
            self.last_s = now_s - self.since_s
            if self.half_s is None and len(self.waiting) <= self.half:
                self.half_s = self.last_s

    def describe(self) -> dict[str, Any]:
        kinds = ("trainer", "peer", "machine", "bucket", "upload", "across")
        return {
            "version": self.version,
            "readers": self.readers,
            "full_bytes": self.full_bytes,
            "delta_bytes": self.delta_bytes,
            **{f"{kind}_bytes": self.bytes[kind] for kind in kinds},
            "usd": self.usd,
            "half_s": self.half_s,
            "all_s": None if self.waiting else self.last_s,
        }
