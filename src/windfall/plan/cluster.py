"""Clusters: machines with GPUs of one type, and the links among all GPUs as a graph. Pure.

A cluster is written as TOML, or as text such as "8xH100 + 6x2xH100:spot": 8 H100 in one machine, and six spot machines
with two each.

    [[machine]]
    gpu = "H100"                  # a name of plan/devices.py, or of a [[device]] table
    count = 8                     # GPUs per machine
    machines = 2                  # machines of this kind
    lease = "spot"                # or "reserved", the default
    price_usd_per_gpu_h = 2.15    # by default that of the price table
    address = "10.0.0.5"          # needed only to write the recipe of a trainer on several machines

    [[device]]                    # a GPU that the table does not have
    name = "X1"
    memory_gb = 64
    bandwidth_gb_per_s = 1600
    tflops = 200
    link_gb_per_s = 50

    [links]                       # between machines
    same_type_gb_per_s = 12.5
    across_types_gb_per_s = 12.5
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from windfall.errors import WindfallError, nearest
from windfall.plan import devices
from windfall.plan.devices import Gpu, Terms

NETWORK = 12.5e9
"""Bytes per second of a machine's network, unless the cluster says otherwise (100 Gbit/s)."""
MAX_GPUS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    same_type: float = NETWORK
    """Bytes per second between machines of one GPU type."""
    across_types: float = NETWORK


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    name: str
    gpu: Gpu
    count: int
    lease: Terms = "reserved"
    address: str = ""

    @property
    def kind(self) -> Kind:
        return Kind(gpu=self.gpu, lease=self.lease)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """GPUs that are alike: same type, same terms, same price."""

    gpu: Gpu
    lease: Terms

    @property
    def usd_per_h(self) -> float:
        return self.gpu.price(self.lease == "spot")

    @property
    def name(self) -> str:
        return self.gpu.name if self.lease == "reserved" else f"{self.gpu.name} {self.lease}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    machines: tuple[Machine, ...]
    links: Links = field(default_factory=Links)

    def kinds(self) -> dict[Kind, list[Machine]]:
        """Machines by kind, in the order of the cluster."""
        out: dict[Kind, list[Machine]] = {}
        for machine in self.machines:
            out.setdefault(machine.kind, []).append(machine)
        return out

    @property
    def gpus(self) -> int:
        return sum(m.count for m in self.machines)

    @property
    def usd_per_h(self) -> float:
        return sum(m.count * m.kind.usd_per_h for m in self.machines)

    def bandwidth(self, a: Machine, b: Machine) -> float:
        """Bytes per second between a GPU of one machine and a GPU of another, or of the same one."""
        if a.name == b.name:
            return a.gpu.link
        return self.links.same_type if a.gpu.name == b.gpu.name else self.links.across_types

    def __str__(self) -> str:
        return " + ".join(f"{sum(m.count for m in ms)} {kind.name}" for kind, ms in self.kinds().items())


MACHINE_KEYS = ("gpu", "count", "machines", "lease", "price_usd_per_gpu_h", "address")
DEVICE_KEYS = ("name", "memory_gb", "bandwidth_gb_per_s", "tflops", "link_gb_per_s")
LINK_KEYS = ("same_type_gb_per_s", "across_types_gb_per_s")


def parse(data: Mapping[str, Any], where: str, known: Mapping[str, Gpu] | None = None) -> Cluster:
    """A cluster from the data of a TOML file. `known`: GPUs with the prices of a price list."""
    _only(data, ("machine", "device", "links"), where)
    table = {**devices.TABLE, **(known or {})}
    for row in _tables(data, "device", where):
        gpu = _device(row, where)
        table[gpu.name] = gpu
    machines: list[Machine] = []
    for row in _tables(data, "machine", where):
        machines += _machines(row, table, where, len(machines))
    links = data.get("links", {})
    _only(links, LINK_KEYS, f"{where}, [links]")
    same = _number(links, LINK_KEYS[0], where, NETWORK / 1e9) * 1e9
    across = _number(links, LINK_KEYS[1], where, same / 1e9) * 1e9
    return _checked(tuple(machines), where, Links(same_type=same, across_types=across))


def from_text(text: str, known: Mapping[str, Gpu] | None = None) -> Cluster:
    """
    >>> str(from_text("8xH100 + 6x2xH100:spot"))
    '8 H100 + 12 H100 spot'
    """
    table = {**devices.TABLE, **(known or {})}
    machines: list[Machine] = []
    for part in re.split(r"[+,]", text):
        found = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(\d+)\s*x\s*([\w-]+)\s*(?::\s*(\w+))?\s*", part)
        if found is None:
            fix = "Write machines as 8xH100, or 6x2xH100:spot for six spot machines with two GPUs each."
            raise WindfallError(f"cannot parse {part.strip()!r}", where="--gpus", fix=fix)
        row = {"gpu": found[3], "count": int(found[2]), "machines": int(found[1] or 1), "lease": found[4] or "reserved"}
        machines += _machines(row, table, "--gpus", len(machines))
    return _checked(tuple(machines), "--gpus", Links())


def _checked(machines: tuple[Machine, ...], where: str, links: Links) -> Cluster:
    cluster = Cluster(machines=machines, links=links)
    if not machines:
        raise WindfallError("the cluster has no machines", where=where, fix="Add a [[machine]] table.")
    if cluster.gpus > MAX_GPUS:
        raise WindfallError(f"{cluster.gpus} GPUs", where=where, fix=f"At most {MAX_GPUS} can be planned.")
    return cluster


def _machines(row: Mapping[str, Any], table: Mapping[str, Gpu], where: str, first: int) -> list[Machine]:
    _only(row, MACHINE_KEYS, f"{where}, [[machine]]")
    gpu = devices.find(str(row.get("gpu", "")), table)
    count, machines = _count(row, "count", where), _count(row, "machines", where)
    lease = row.get("lease", "reserved")
    if lease not in ("reserved", "spot"):
        what = f"unknown lease {lease!r}; expected one of: reserved, spot"
        raise WindfallError(what, where=where, fix=nearest(str(lease), ("reserved", "spot")))
    if "price_usd_per_gpu_h" in row:
        usd = _number(row, "price_usd_per_gpu_h", where, 0.0)
        field = "spot_usd_per_h" if lease == "spot" else "reserved_usd_per_h"
        gpu = replace(gpu, **{field: usd}, price_source=where)
    address = str(row.get("address", ""))
    return [
        Machine(name=f"m{first + n}", gpu=gpu, count=count, lease=lease, address=address if n == 0 else "")
        for n in range(machines)
    ]


def _device(row: Mapping[str, Any], where: str) -> Gpu:
    place = f"{where}, [[device]]"
    _only(row, DEVICE_KEYS, place)
    if not row.get("name"):
        raise WindfallError("a device has no name", where=place, fix="Set name.")
    memory, bandwidth, tflops, link = (_number(row, key, place, None) for key in DEVICE_KEYS[1:])
    return Gpu(
        name=str(row["name"]), memory_bytes=memory * 1e9, bandwidth=bandwidth * 1e9, flops=tflops * 1e12,
        link=link * 1e9, source=where,
    )  # fmt: skip


def _tables(data: Mapping[str, Any], key: str, where: str) -> list[Mapping[str, Any]]:
    rows = data.get(key, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise WindfallError(f"'{key}' is not a list of tables", where=where, fix=f"Write [[{key}]].")
    return rows


def _only(row: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in row:
        if key not in known:
            raise WindfallError(f"unknown key '{key}'", where=where, fix=nearest(key, known))


def _count(row: Mapping[str, Any], key: str, where: str) -> int:
    value = row.get(key, 1)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise WindfallError(f"{key} is {value!r}", where=where, fix="Give a whole number of at least 1.")
    return value


def _number(row: Mapping[str, Any], key: str, where: str, default: float | None) -> float:
    value = row.get(key, default)
    if value is None:
        raise WindfallError(f"'{key}' is missing", where=where, fix=f"Set {key}.")
    if not isinstance(value, int | float) or isinstance(value, bool) or not (math.isfinite(value) and value > 0):
        raise WindfallError(f"{key} is {value!r}", where=where, fix="Give a number above 0.")
    return float(value)
