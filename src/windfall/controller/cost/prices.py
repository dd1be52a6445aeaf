"""GPU prices: a small table with its date and source, and the price of a lease. Pure; fetches nothing.

Rules:
- The price in a lease takes precedence over the table. A price of 0 in a lease means that none is set.
- Reserved workers have the on-demand price, spot workers the spot price. Borrowed workers cost nothing, because their
  lender pays for them anyway.
- A name must identify the GPU exactly: an L40 is not an L40S, an A100 with 40 GB is not one with 80 GB, and a MIG slice
  is not a whole GPU. A GPU that is not in the table has no price; this is reported (`known`), never guessed.
- If no cloud is named, the price is that of the median cloud by on-demand price (the more expensive of two in the
  middle). Its spot price is used as well, so that the spot discount is one that a cloud really offers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile
from typing import get_args

from windfall.errors import WindfallError, nearest
from windfall.types import Lease, LeaseKind

DATE = "2026-08-22"
SOURCE = "skypilot-org/skypilot-catalog"

# cloud, GPU, $ per GPU-hour on demand, $ per GPU-hour spot
TABLE: tuple[tuple[str, str, float, float], ...] = (
    ("aws", "H100", 7.36, 2.63),
    ("aws", "H200", 8.55, 3.29),
    ("aws", "L40S", 3.77, 1.56),
    ("aws", "A10G", 2.04, 0.87),
    ("aws", "L4", 1.90, 0.70),
    ("gcp", "H100", 11.17, 5.10),
    ("gcp", "A100-80GB", 4.42, 2.14),
    ("gcp", "L4", 0.62, 0.37),
    ("nebius", "H100", 3.85, 2.15),
)
CLOUDS = frozenset(row[0] for row in TABLE)
GPUS = frozenset(row[1] for row in TABLE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    usd_per_h: float
    """Dollars per hour for the whole lease, all its GPUs together."""
    source: str
    date: str = ""
    """Date of the source; empty: current."""
    known: bool = True
    """False: the price is not known."""

    @property
    def label(self) -> str:
        """The source and its date, as text."""
        return f"{self.source}, {self.date}" if self.date else self.source

    @property
    def if_known(self) -> float | None:
        """The price, or None if it is not known: for sums, in which an unknown price must not count as free."""
        return self.usd_per_h if self.known else None


def of(lease: Lease) -> Price:
    """The price of a lease.

    >>> of(Lease(kind="spot", device="NVIDIA H200")).usd_per_h
    3.29
    >>> of(Lease(kind="spot", device="NVIDIA H200", price_usd_per_h=2.0)).source
    'the lease'
    >>> of(Lease(device="cpu"))
    Price(usd_per_h=0.0, source='unknown', date='', known=False)
    """
    own = lease.price_usd_per_h
    if not (math.isfinite(own) and own >= 0):
        fix = "Set it to 0 or more; 0 uses the table."
        raise WindfallError(f"the price is {own} $ per hour", where="price_usd_per_h", fix=fix)
    if own > 0:
        return Price(usd_per_h=own, source="the lease")
    return lookup(lease.device, kind=lease.kind, where=lease.region) or UNKNOWN


def kind(lease: Lease, *, lends: bool = False) -> str:
    """The common name of all leases with these terms, device and price. `lends`: of machines that serve requests of
    their own first, which a run cannot start.

    >>> kind(Lease(kind="spot", device="NVIDIA H200")), kind(Lease(kind="borrowed", device="NVIDIA H200"), lends=True)
    ('spot NVIDIA H200 at $3.29/h', 'lent NVIDIA H200')
    """
    if lends:
        return f"lent {lease.device or 'machine'}"
    price = of(lease)
    return f"{lease.kind} {lease.device or 'machine'}" + (f" at ${price.usd_per_h:.2f}/h" if price.known else "")


UNKNOWN = Price(usd_per_h=0.0, source="unknown", known=False)


def lookup(device: str, *, kind: LeaseKind, where: str = "") -> Price | None:
    """The table's price for a device, named as in torch; a prefix "8x" means eight of them. None: not in the table.
    `where`: a cloud or region, such as "aws" or "aws/us-east-1". Only this cloud is used if it is in the table.

    >>> lookup("NVIDIA H100 80GB HBM3", kind="spot", where="nebius")
    Price(usd_per_h=2.15, source='nebius H100 spot, skypilot-org/skypilot-catalog', date='2026-08-22', known=True)
    >>> lookup("8x NVIDIA H100 80GB HBM3", kind="reserved").usd_per_h
    58.88
    >>> lookup("NVIDIA GeForce RTX 4090", kind="spot")
    """
    if kind not in get_args(LeaseKind):
        raise WindfallError(f"unknown terms {kind!r}", where="lease.kind", fix=nearest(kind, get_args(LeaseKind)))
    if kind == "borrowed":
        return Price(usd_per_h=0.0, source="borrowed: the lender pays")
    count, gpu = _gpu(device)
    named = CLOUDS & set(_words(where.lower()))
    rows = sorted((row for row in TABLE if row[1] == gpu and (not named or row[0] in named)), key=lambda row: row[2])
    if not rows:
        return None
    cloud, _, on_demand, spot = rows[len(rows) // 2]
    each, terms = (spot, "spot") if kind == "spot" else (on_demand, "on demand")
    return Price(usd_per_h=round(count * each, 4), source=f"{cloud} {gpu} {terms}, {SOURCE}", date=DATE)


def _gpu(device: str) -> tuple[int, str | None]:
    """The number of GPUs, and the name of the GPU in the table.

    >>> _gpu("2 x NVIDIA L4")
    (2, 'L4')
    """
    name = device.upper().lstrip()
    digits = "".join(takewhile(str.isdecimal, name))
    times = name[len(digits) :].lstrip()
    if digits and not times.startswith("X"):
        return 0, None  # the meaning of the number is not clear
    count, words = (int(digits), set(_words(times[1:]))) if digits else (1, set(_words(name)))
    if "MIG" in words or count < 1:
        return count, None
    return count, next((gpu for gpu in GPUS if set(gpu.split("-")) <= words), None)


def _words(name: str) -> list[str]:
    """
    >>> _words("A100-SXM4-80GB")
    ['A100', 'SXM4', '80GB']
    """
    return "".join(c if c.isalnum() else " " for c in name).split()
