"""Clusters: machines with GPUs of one type, and the links among all GPUs as a graph. Pure.

A cluster is written as TOML, or as text such as "8xH100 + 6x2xH100:spot": 8 H100 in one machine, and six spot machines
with two each. docs/plan.md has a file with all tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from windfall.errors import WindfallError, nearest
from windfall.plan.model import devices
from windfall.plan.model.devices import Gpu, Terms
from windfall.step_time import StepTime
from windfall.types import ZONE_USD_PER_GB

EngineName = Literal["windfall", "vllm"]
ProviderName = Literal["ray", "kubernetes", "skypilot", "slurm"]
PROVIDERS = get_args(ProviderName)
LENT = 0.5
"""Share of a lender's speed that a run gets, unless the cluster says otherwise. Assumed; docs/serve.md has figures."""
NETWORK = 12.5e9
"""Bytes per second of a machine's network, unless the cluster says otherwise (100 Gbit/s)."""
MAX_GPUS = 4096


class ZoneLink(NamedTuple):
    a: str
    b: str
    bandwidth: float
    """Bytes per second."""
    usd_per_gb: float | None = None
    """Price of traffic; None: as between any two zones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    same_type: float = NETWORK
    """Bytes per second between machines of one GPU type: that of the network of a whole machine, in one direction."""
    across_types: float = NETWORK
    zones: tuple[ZoneLink, ...] = ()
    """Between machines of two zones, or of one; instead of the above."""
    pull: float = 0.0
    """Measured bytes per second of a pull of new weights; 0: by the links."""
    usd_per_gb: float = ZONE_USD_PER_GB
    """Price of traffic between two zones."""

    def _zone_link(self, a: str, b: str) -> ZoneLink | None:
        return next((link for link in self.zones if (link.a, link.b) in ((a, b), (b, a))), None)

    def price(self, a: str, b: str) -> float:
        """Dollars per GB between two zones. Traffic within a zone is free.

        >>> links = Links(zones=(ZoneLink("a", "b", 1e9, 0.08),))
        >>> links.price("b", "a"), links.price("a", "c"), links.price("a", "a")
        (0.08, 0.02, 0.0)
        """
        link = self._zone_link(a, b)
        if link is not None and link.usd_per_gb is not None:
            return link.usd_per_gb
        return 0.0 if a == b else self.usd_per_gb

    def between(self, a: str, b: str, *, same_type: bool) -> float:
        """Bytes per second between a machine of zone `a` and one of zone `b`.

        >>> links = Links(zones=(ZoneLink("a", "b", 1e9),))
        >>> links.between("b", "a", same_type=True), links.between("a", "a", same_type=True)
        (1000000000.0, 12500000000.0)
        """
        link = self._zone_link(a, b)
        if link is not None:
            return link.bandwidth
        return self.same_type if same_type else self.across_types

    def __str__(self) -> str:
        """
        >>> str(Links()), str(Links(same_type=5e9, across_types=1.5e9))
        ('12.5 GB/s between machines', '5 GB/s between machines of one type, 1.5 GB/s between others')
        """
        same, across = f"{self.same_type / 1e9:.4g} GB/s between machines", f"{self.across_types / 1e9:.4g} GB/s"
        text = same if self.same_type == self.across_types else f"{same} of one type, {across} between others"
        text += "".join(f", {x.bandwidth / 1e9:.4g} GB/s between zones {x.a} and {x.b}" for x in self.zones)
        return f"{text}; pulls measured at {self.pull / 1e9:.3g} GB/s" if self.pull else text


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterMachine:
    name: str
    gpu: Gpu
    count: int
    lease: Terms = "reserved"
    address: str = ""
    engine: EngineName = "windfall"
    provider: str = ""
    lent: float = LENT
    zone: str = ""

    @property
    def kind(self) -> Kind:
        lent = self.lent if self.lease == "borrowed" else 1.0
        return Kind(gpu=self.gpu, lease=self.lease, engine=self.engine, provider=self.provider, lent=lent)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """GPUs that are alike: same type, same terms, same price, same engine, and workers from the same system."""

    gpu: Gpu
    lease: Terms
    engine: EngineName = "windfall"
    provider: str = ""
    lent: float = 1.0

    @property
    def usd_per_h(self) -> float:
        """Dollars per hour of one GPU. A lender pays for its own."""
        return 0.0 if self.lease == "borrowed" else self.gpu.price(self.lease == "spot")

    @property
    def can_train(self) -> bool:
        """Providers start workers only, and what can be taken away never trains."""
        return self.lease == "reserved" and not self.provider

    @property
    def name(self) -> str:
        return self.gpu.name if self.lease == "reserved" else f"{self.gpu.name} {self.lease}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    machines: tuple[ClusterMachine, ...]
    links: Links = field(default_factory=Links)

    def kinds(self) -> dict[Kind, list[ClusterMachine]]:
        """Machines by kind, in the order of the cluster."""
        out: dict[Kind, list[ClusterMachine]] = {}
        for machine in self.machines:
            out.setdefault(machine.kind, []).append(machine)
        return out

    @property
    def gpus(self) -> int:
        return sum(m.count for m in self.machines)

    @property
    def usd_per_h(self) -> float:
        return sum(m.count * m.kind.usd_per_h for m in self.machines)

    def bandwidth(self, a: ClusterMachine, b: ClusterMachine) -> float:
        """Bytes per second between a GPU of one machine and a GPU of another, or of the same one."""
        if a.name == b.name:
            return a.gpu.link
        return self.links.between(a.zone, b.zone, same_type=a.gpu.name == b.gpu.name)

    def pull_rate(self, worker: ClusterMachine, sources: Iterable[ClusterMachine]) -> float:
        """Bytes per second at which a machine pulls new weights from the best of these."""
        alike = {(source.zone, source.gpu.name, source.name == worker.name): source for source in sources}
        return self.links.pull or max(self.bandwidth(worker, source) for source in alike.values())

    def groups(self) -> dict[str, list[ClusterMachine]]:
        """Machines that are rented together: same kind, same zone. By name, in the order of the cluster.

        >>> list(from_text("8xH100 + 6x2xH100:spot").groups())
        ['8 H100', '12 H100 spot']
        """
        found: dict[tuple[Kind, str], list[ClusterMachine]] = {}
        for machine in self.machines:
            found.setdefault((machine.kind, machine.zone), []).append(machine)
        out: dict[str, list[ClusterMachine]] = {}
        for (kind, zone), machines in found.items():
            name = f"{sum(m.count for m in machines)} {kind.name}" + (f" in {zone}" if zone else "")
            out[name if name not in out else f"{name} at ${kind.usd_per_h:g}"] = machines
        return out

    def without(self, machines: Iterable[ClusterMachine]) -> Cluster:
        gone = {m.name for m in machines}
        return replace(self, machines=tuple(m for m in self.machines if m.name not in gone))

    def __str__(self) -> str:
        return " + ".join(f"{sum(m.count for m in ms)} {kind.name}" for kind, ms in self.kinds().items())


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
TimeName = Literal["fixed_s", "each_s", "context_s", "over_batch", "over_s", "prefill_s", "train_s", "update_s"]


class Table(BaseModel):
    """A table of a cluster file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class MachineTable(Table):
    gpu: str
    """A name of devices.py, or of a [[device]] table."""
    count: Count = 1
    """GPUs per machine."""
    machines: Count = 1
    lease: Terms = "reserved"
    price_usd_per_gpu_h: Positive | None = None
    """None: that of the price table."""
    address: str = ""
    """Needed only to write the recipe of a trainer on several machines."""
    engine: EngineName | None = None
    """None: that of the recipe. Only vLLM spans several GPUs."""
    provider: ProviderName | None = None
    """The system that starts workers there. None: the run itself on the trainer's machine, otherwise by hand."""
    lent: Annotated[float, Field(gt=0, le=1)] = LENT
    """Share of a lender's speed that a run gets."""
    zone: str = ""
    """A rack, a data center or a cloud: where links differ."""


class DeviceTable(Table):
    name: Annotated[str, Field(min_length=1)]
    memory_gb: Positive
    bandwidth_gb_per_s: Positive
    tflops: Positive
    link_gb_per_s: Positive
    worker: dict[TimeName, NotNegative] | None = None
    """Measured times of an engine on one of these, as `windfall sim calibrate` prints them; they hold for one model."""
    trainer: dict[TimeName, NotNegative] | None = None


class LinksTable(Table):
    same_type_gb_per_s: Positive = NETWORK / 1e9
    across_types_gb_per_s: Positive | None = None
    pull_gb_per_s: Positive | None = None
    across_zones_usd_per_gb: NotNegative = ZONE_USD_PER_GB


class ZoneLinkTable(Table):
    between: Annotated[list[str], Field(min_length=2, max_length=2)]
    gb_per_s: Positive
    usd_per_gb: NotNegative | None = None


class ClusterTables(Table):
    machine: list[MachineTable] = []
    device: list[DeviceTable] = []
    links: LinksTable = LinksTable()
    link: list[ZoneLinkTable] = []


TABLES = {"machine": MachineTable, "device": DeviceTable, "links": LinksTable, "link": ZoneLinkTable}


def parse(data: Mapping[str, Any], where: str, engine: EngineName = "windfall") -> Cluster:
    """A cluster from the data of a TOML file. `engine`: of machines that name none."""
    try:
        tables = ClusterTables.model_validate(data)
    except ValidationError as error:
        raise _explained(min(error.errors(), key=lambda e: e["type"] != "extra_forbidden"), where) from None
    gpus = {**devices.TABLE, **{row.name: _device(row, where) for row in tables.device}}
    machines: list[ClusterMachine] = []
    for row in tables.machine:
        machines += _machines(row, gpus, where, len(machines), engine)
    _check_links(tables.link, {m.zone for m in machines if m.zone}, where)
    links = tables.links
    cluster = Cluster(
        machines=tuple(machines),
        links=Links(
            same_type=links.same_type_gb_per_s * 1e9,
            across_types=(links.across_types_gb_per_s or links.same_type_gb_per_s) * 1e9,
            zones=tuple(
                ZoneLink(row.between[0], row.between[1], row.gb_per_s * 1e9, row.usd_per_gb) for row in tables.link
            ),
            pull=(links.pull_gb_per_s or 0.0) * 1e9,
            usd_per_gb=links.across_zones_usd_per_gb,
        ),
    )
    if not machines:
        raise WindfallError("the cluster has no machines", where=where, fix="Add a [[machine]] table.")
    _check_size(cluster.gpus, where)
    return cluster


def _explained(error: Any, where: str) -> WindfallError:
    """What is wrong with a cluster file, in the words of its author. `error`: one that pydantic found."""
    *tables, key = (name for name in error["loc"] if isinstance(name, str))
    wrong, known = error["input"], TABLES[tables[0]].model_fields if tables else ClusterTables.model_fields
    match error["type"]:
        case "extra_forbidden":
            what, fix = f"unknown key '{key}'", nearest(key, known)
        case "missing":
            what, fix = f"'{key}' is missing", f"Set {key}."
        case "literal_error":
            expected = error["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
            what, fix = f"unknown {key.strip('[]')} {wrong!r}; expected one of: {expected}", "Give one of these."
        case "list_type":
            what, fix = f"'{key}' is not a list of tables", f"Write [[{key}]]."
        case "model_type":
            what, fix = f"'{key}' is not a table", f"Write [{key}] above its keys."
        case _:
            what, fix = f"{key} is {wrong!r}", f"{error['msg']}."
    return WindfallError(what, where=", ".join([where, *tables]), fix=fix)


def _check_links(rows: Iterable[ZoneLinkTable], zones: set[str], where: str) -> None:
    for zone in (zone for row in rows for zone in row.between):
        if zone not in zones:
            fix = f"Set zone of its machines. {nearest(zone, zones)}".strip()
            raise WindfallError(f"no machine is in the zone {zone!r}", where=f"{where}, [[link]]", fix=fix)


def from_text(text: str, engine: EngineName = "windfall") -> Cluster:
    """
    >>> str(from_text("8xH100 + 6x2xH100:spot"))
    '8 H100 + 12 H100 spot'
    """
    rows: list[dict[str, Any]] = []
    for part in re.split(r"[+,]", text):
        found = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(\d+)\s*x\s*([\w-]+)\s*(?::\s*(\w+))?\s*", part)
        if found is None:
            fix = "Write machines as 8xH100, or 6x2xH100:spot for six spot machines with two GPUs each."
            raise WindfallError(f"cannot parse {part.strip()!r}", where="--gpus", fix=fix)
        machines, count, gpu, lease = found.groups()
        rows.append({"gpu": gpu, "count": int(count), "machines": int(machines or 1), "lease": lease or "reserved"})
    return parse({"machine": rows}, "--gpus", engine)


def _check_size(gpus: int, where: str) -> None:
    if gpus > MAX_GPUS:
        raise WindfallError(f"the cluster has {gpus:,} GPUs", where=where, fix=f"At most {MAX_GPUS:,} can be planned.")


def _machines(
    row: MachineTable, gpus: Mapping[str, Gpu], where: str, first: int, engine: EngineName
) -> list[ClusterMachine]:
    gpu = devices.find(row.gpu, gpus, where)
    _check_size(row.count * row.machines, where)
    if row.price_usd_per_gpu_h is not None:
        terms = "spot" if row.lease == "spot" else "reserved"
        gpu = replace(gpu, **{f"{terms}_usd_per_h": row.price_usd_per_gpu_h, f"{terms}_source": where})
    if "lent" in row.model_fields_set and row.lease != "borrowed":
        raise WindfallError(f"lent is {row.lent:g}", where=where, fix='Give it only with lease = "borrowed".')
    return [
        ClusterMachine(
            name=f"m{first + n}",
            gpu=gpu,
            count=row.count,
            lease=row.lease,
            address="" if n else row.address,
            engine=row.engine or engine,
            provider=row.provider or "",
            lent=row.lent,
            zone=row.zone,
        )
        for n in range(row.machines)
    ]


def _device(row: DeviceTable, where: str) -> Gpu:
    return Gpu(
        name=row.name,
        memory_bytes=row.memory_gb * 1e9,
        bandwidth=row.bandwidth_gb_per_s * 1e9,
        flops=row.tflops * 1e12,
        link=row.link_gb_per_s * 1e9,
        source=where,
        worker=_times(row.worker, "fixed_s", f"{where}, device, worker"),
        trainer=_times(row.trainer, "train_s", f"{where}, device, trainer"),
    )


def _times(times: Mapping[TimeName, float] | None, needed: TimeName, where: str) -> StepTime | None:
    """Measured times. A trainer that never generates needs no step times."""
    if times is None:
        return None
    if not times.get(needed):
        raise WindfallError(f"'{needed}' is missing", where=where, fix=f"Set {needed}.")
    return StepTime(**{"fixed_s": 1e-9, "each_s": 0.0, **times})
