"""Clusters: machines with GPUs of one type, and the links among all GPUs as a graph. Pure.

A cluster is written as TOML, or as text such as "8xH100 + 6x2xH100:spot": 8 H100 in one machine, and six spot machines
with two each.

    [[machine]]
    gpu = "H100"                  # a name of plan/model/devices.py, or of a [[device]] table
    count = 8                     # GPUs per machine
    machines = 2                  # machines of this kind
    lease = "spot"                # or "reserved", the default, or "borrowed": servers that lend what they do not need
    lent = 0.5                    # share of a lender's speed that a run gets; only for "borrowed"
    engine = "vllm"               # or "windfall"; by default that of the recipe. Only vLLM spans several GPUs
    provider = "slurm"            # system that starts workers there: ray, kubernetes, skypilot or slurm. By default
                                  # the run itself on the trainer's machine, and commands by hand on others
    price_usd_per_gpu_h = 2.15    # by default that of the price table
    address = "10.0.0.5"          # needed only to write the recipe of a trainer on several machines
    zone = "a"                    # a rack, a data center, a cloud: where links differ, see [[link]]

    [[device]]                    # a GPU that the table does not have
    name = "X1"
    memory_gb = 64
    bandwidth_gb_per_s = 1600
    tflops = 200
    link_gb_per_s = 50
    worker = { fixed_s = 0.02, each_s = 0.001 }      # measured times instead, as `windfall sim calibrate` prints them;
    trainer = { train_s = 0.0005, update_s = 0.3 }   # they hold for one model. See also `windfall plan --measured RUN`

    [links]                       # between machines: the network of a whole machine, in one direction
    same_type_gb_per_s = 12.5
    across_types_gb_per_s = 12.5
    pull_gb_per_s = 0.5           # measured speed of a pull of new weights, if there is one; instead of the links
    across_zones_usd_per_gb = 0.02    # price of traffic between two zones; 0.02 if it is left out

    [[link]]                      # between the machines of two zones, or of one: between = ["a", "a"]
    between = ["a", "b"]
    gb_per_s = 1.0
    usd_per_gb = 0.08             # price of traffic between these two, instead of across_zones_usd_per_gb; 0: free
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from windfall.errors import WindfallError, nearest
from windfall.plan.model import devices
from windfall.plan.model.devices import Gpu, Terms
from windfall.step_time import StepTime

EngineName = Literal["windfall", "vllm"]
ENGINES = get_args(EngineName)
PROVIDERS = ("ray", "kubernetes", "skypilot", "slurm")
LENT = 0.5
"""Share of a lender's speed that a run gets, unless the cluster says otherwise. Assumed; docs/serve.md has figures."""
NETWORK = 12.5e9
"""Bytes per second of a machine's network, unless the cluster says otherwise (100 Gbit/s)."""
MAX_GPUS = 4096
ZONE_USD_PER_GB = 0.02
"""Dollars per GB between two zones, unless the cluster says otherwise: what large clouds charge between zones (0.01 in
each direction) and between near regions. Between continents, or over the internet, it is 0.05 to 0.09."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    same_type: float = NETWORK
    """Bytes per second between machines of one GPU type: that of the network of a whole machine, in one direction."""
    across_types: float = NETWORK
    zones: tuple[tuple[str, str, float], ...] = ()
    """Bytes per second between machines of two zones, or of one; instead of the above."""
    pull: float = 0.0
    """Measured bytes per second of a pull of new weights; 0: by the links."""
    usd_per_gb: float = ZONE_USD_PER_GB
    """Price of traffic between two zones."""
    zone_prices: tuple[tuple[str, str, float], ...] = ()
    """Dollars per GB between two zones, instead of the above."""

    def price(self, a: str, b: str) -> float:
        """Dollars per GB between two zones. Traffic within a zone is free.

        >>> links = Links(zone_prices=(("a", "b", 0.08),))
        >>> links.price("b", "a"), links.price("a", "c"), links.price("a", "a")
        (0.08, 0.02, 0.0)
        """
        for x, y, usd in self.zone_prices:
            if (x, y) in ((a, b), (b, a)):
                return usd
        return 0.0 if a == b else self.usd_per_gb

    def between(self, a: str, b: str, *, same_type: bool) -> float:
        """Bytes per second between a machine of zone `a` and one of zone `b`.

        >>> links = Links(zones=(("a", "b", 1e9),))
        >>> links.between("b", "a", same_type=True), links.between("a", "a", same_type=True)
        (1000000000.0, 12500000000.0)
        """
        for x, y, bandwidth in self.zones:
            if (x, y) in ((a, b), (b, a)):
                return bandwidth
        return self.same_type if same_type else self.across_types

    def __str__(self) -> str:
        """
        >>> str(Links()), str(Links(same_type=5e9, across_types=1.5e9))
        ('12.5 GB/s between machines', '5 GB/s between machines of one type, 1.5 GB/s between others')
        """
        same, across = f"{self.same_type / 1e9:.4g} GB/s between machines", f"{self.across_types / 1e9:.4g} GB/s"
        text = same if self.same_type == self.across_types else f"{same} of one type, {across} between others"
        text += "".join(f", {bandwidth / 1e9:.4g} GB/s between zones {a} and {b}" for a, b, bandwidth in self.zones)
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


MACHINE_KEYS = (
    "gpu", "count", "machines", "lease", "price_usd_per_gpu_h", "address", "engine", "provider", "lent", "zone",
)  # fmt: skip
DEVICE_KEYS = ("name", "memory_gb", "bandwidth_gb_per_s", "tflops", "link_gb_per_s", "worker", "trainer")
LINK_KEYS = ("same_type_gb_per_s", "across_types_gb_per_s", "pull_gb_per_s", "across_zones_usd_per_gb")
ZONE_KEYS = ("between", "gb_per_s", "usd_per_gb")


def parse(
    data: Mapping[str, Any], where: str, known: Mapping[str, Gpu] | None = None, engine: EngineName = "windfall"
) -> Cluster:
    """A cluster from the data of a TOML file. `known`: GPUs with the prices of a price list. `engine`: of machines that
    name none."""
    _only(data, ("machine", "device", "links", "link"), where)
    table = {**devices.TABLE, **(known or {})}
    for row in _tables(data, "device", where):
        gpu = _device(row, where)
        table[gpu.name] = gpu
    machines: list[ClusterMachine] = []
    for row in _tables(data, "machine", where):
        machines += _machines(row, table, where, len(machines), engine)
    links = data.get("links", {})
    if not isinstance(links, dict):
        raise WindfallError("'links' is not a table", where=where, fix="Write [links] above its keys.")
    _only(links, LINK_KEYS, f"{where}, [links]")
    same = _number(links, LINK_KEYS[0], where, NETWORK / 1e9) * 1e9
    across = _number(links, LINK_KEYS[1], where, same / 1e9) * 1e9
    pull = _number(links, LINK_KEYS[2], where, 0.0) * 1e9 if LINK_KEYS[2] in links else 0.0
    rows = _tables(data, "link", where)
    zones = tuple(_zone_link(row, machines, f"{where}, [[link]]") for row in rows)
    usd = _number(links, LINK_KEYS[3], where, ZONE_USD_PER_GB, free=True)
    usd_between = tuple(
        (a, b, _number(row, "usd_per_gb", f"{where}, [[link]]", None, free=True))
        for row, (a, b, _) in zip(rows, zones, strict=True) if "usd_per_gb" in row
    )  # fmt: skip
    made = Links(
        same_type=same, across_types=across, zones=zones, pull=pull, usd_per_gb=usd, zone_prices=usd_between
    )  # fmt: skip
    return _checked(tuple(machines), where, made)


def _zone_link(row: Mapping[str, Any], machines: Sequence[ClusterMachine], where: str) -> tuple[str, str, float]:
    _only(row, ZONE_KEYS, where)
    named, known = row.get("between"), {m.zone for m in machines if m.zone}
    if not isinstance(named, list) or len(named) != 2 or not all(isinstance(zone, str) for zone in named):
        raise WindfallError(f"between is {named!r}", where=where, fix='Name two zones: between = ["a", "b"].')
    for zone in named:
        if zone not in known:
            what, fix = f"no machine is in the zone {zone!r}", f"Set zone of its machines. {nearest(zone, known)}"
            raise WindfallError(what, where=where, fix=fix.strip())
    return named[0], named[1], _number(row, "gb_per_s", where, None) * 1e9


def from_text(text: str, known: Mapping[str, Gpu] | None = None, engine: EngineName = "windfall") -> Cluster:
    """
    >>> str(from_text("8xH100 + 6x2xH100:spot"))
    '8 H100 + 12 H100 spot'
    """
    table = {**devices.TABLE, **(known or {})}
    machines: list[ClusterMachine] = []
    for part in re.split(r"[+,]", text):
        found = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(\d+)\s*x\s*([\w-]+)\s*(?::\s*(\w+))?\s*", part)
        if found is None:
            fix = "Write machines as 8xH100, or 6x2xH100:spot for six spot machines with two GPUs each."
            raise WindfallError(f"cannot parse {part.strip()!r}", where="--gpus", fix=fix)
        row = {"gpu": found[3], "count": int(found[2]), "machines": int(found[1] or 1), "lease": found[4] or "reserved"}
        machines += _machines(row, table, "--gpus", len(machines), engine)
    return _checked(tuple(machines), "--gpus", Links())


def _checked(machines: tuple[ClusterMachine, ...], where: str, links: Links) -> Cluster:
    cluster = Cluster(machines=machines, links=links)
    if not machines:
        raise WindfallError("the cluster has no machines", where=where, fix="Add a [[machine]] table.")
    _check_size(cluster.gpus, where)
    return cluster


def _check_size(gpus: int, where: str) -> None:
    if gpus > MAX_GPUS:
        raise WindfallError(f"the cluster has {gpus:,} GPUs", where=where, fix=f"At most {MAX_GPUS:,} can be planned.")


def _machines(
    row: Mapping[str, Any], table: Mapping[str, Gpu], where: str, first: int, engine: EngineName
) -> list[ClusterMachine]:
    _only(row, MACHINE_KEYS, f"{where}, [[machine]]")
    if not isinstance(row.get("gpu"), str):
        raise WindfallError(f"a machine has no GPU: gpu is {row.get('gpu')!r}", where=where, fix='Set gpu = "H100".')
    gpu = devices.find(row["gpu"], table, where)
    count, machines = _count(row, "count", where), _count(row, "machines", where)
    _check_size(count * machines, where)
    lease = _choice(row, "lease", get_args(Terms), where, "reserved")
    if "price_usd_per_gpu_h" in row:
        usd = _number(row, "price_usd_per_gpu_h", where, 0.0)
        terms = "spot" if lease == "spot" else "reserved"
        gpu = replace(gpu, **{f"{terms}_usd_per_h": usd, f"{terms}_source": where})
    lent = _number(row, "lent", where, LENT)
    if lent > 1 or ("lent" in row and lease != "borrowed"):
        fix = 'Give a share of at most 1, and only with lease = "borrowed".'
        raise WindfallError(f"lent is {lent:g}", where=where, fix=fix)
    address, zone = row.get("address", ""), row.get("zone", "")
    for key, value, example in (("address", address, "10.0.0.5"), ("zone", zone, "a")):
        if not isinstance(value, str):
            raise WindfallError(f"{key} is {value!r}", where=where, fix=f'Give a text: {key} = "{example}".')
    machine = ClusterMachine(
        name="", gpu=gpu, count=count, lease=lease, lent=lent, engine=_choice(row, "engine", ENGINES, where, engine),
        provider=_choice(row, "provider", ("", *PROVIDERS), where, ""), zone=zone,
    )  # fmt: skip
    return [replace(machine, name=f"m{first + n}", address="" if n else address) for n in range(machines)]


def _choice(row: Mapping[str, Any], key: str, known: tuple[str, ...], where: str, default: str) -> Any:
    value = row.get(key, default)
    if value not in known:
        expected = [name for name in known if name]
        what = f"unknown {key} {value!r}; expected one of: {', '.join(expected)}"
        raise WindfallError(what, where=where, fix=nearest(str(value), expected))
    return value


def _device(row: Mapping[str, Any], where: str) -> Gpu:
    place = f"{where}, [[device]]"
    _only(row, DEVICE_KEYS, place)
    if not row.get("name"):
        raise WindfallError("a device has no name", where=place, fix="Set name.")
    memory, bandwidth, tflops, link = (_number(row, key, place, None) for key in DEVICE_KEYS[1:5])
    return Gpu(
        name=str(row["name"]), memory_bytes=memory * 1e9, bandwidth=bandwidth * 1e9, flops=tflops * 1e12,
        link=link * 1e9, source=where, worker=_service(row, "worker", place), trainer=_service(row, "trainer", place),
    )  # fmt: skip


def _service(row: Mapping[str, Any], key: str, where: str) -> StepTime | None:
    """Measured times; a trainer that never generates needs no step times."""
    times = row.get(key)
    if times is None:
        return None
    if not isinstance(times, dict):
        raise WindfallError(f"'{key}' is not a table", where=where, fix=f"Write {key} = {{ fixed_s = 0.02 }}.")
    _only(times, StepTime.KEYS, f"{where}, {key}")
    needed = "fixed_s" if key == "worker" else "train_s"
    given = {name: _number(times, name, f"{where}, {key}", None) for name in times}
    if needed not in given:
        raise WindfallError(f"'{needed}' is missing", where=f"{where}, {key}", fix=f"Set {needed}.")
    return StepTime(**{"fixed_s": 1e-9, "each_s": 0.0, **given})


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


def _number(row: Mapping[str, Any], key: str, where: str, default: float | None, *, free: bool = False) -> float:
    """A number above 0; `free`: or 0."""
    value = row.get(key, default)
    if value is None:
        raise WindfallError(f"'{key}' is missing", where=where, fix=f"Set {key}.")
    if not isinstance(value, int | float) or isinstance(value, bool) or not (math.isfinite(value) and value >= 0):
        raise WindfallError(f"{key} is {value!r}", where=where, fix="Give a number above 0.")
    if value == 0 and not free:
        raise WindfallError(f"{key} is 0", where=where, fix="Give a number above 0.")
    return float(value)


def dump(cluster: Cluster) -> dict[str, Any]:
    """The cluster as data that `parse` reads, with all prices and measured times.

    >>> again = parse(dump(from_text("8xH100 + 6x2xH100:spot")), "a recipe")
    >>> str(again), again.usd_per_h == from_text("8xH100 + 6x2xH100:spot").usd_per_h
    ('8 H100 + 12 H100 spot', True)
    """
    device: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    for machine in cluster.machines:
        g, spot = machine.gpu, machine.lease == "spot"
        same = [n for n, d in device.items() if d["_gpu"] == _unpriced(g)]
        name = same[0] if same else f"{g.name} {len(device)}" if g.name in device else g.name
        if not same:
            device[name] = {"_gpu": _unpriced(g), "name": name, "memory_gb": g.memory_bytes / 1e9,
                            "bandwidth_gb_per_s": g.bandwidth / 1e9, "tflops": g.flops / 1e12,
                            "link_gb_per_s": g.link / 1e9, **_times(g)}  # fmt: skip
        usd = g.spot_usd_per_h if spot else g.reserved_usd_per_h
        row: dict[str, Any] = {"gpu": name, "count": machine.count, "lease": machine.lease, "engine": machine.engine}
        texts = {"address": machine.address, "provider": machine.provider, "zone": machine.zone}
        row |= {key: value for key, value in texts.items() if value}
        row |= {"lent": machine.lent} if machine.lease == "borrowed" else {}
        row |= {"price_usd_per_gpu_h": usd} if usd else {}
        if rows and {**rows[-1], "machines": 1} == {**row, "machines": 1} and not machine.address:
            rows[-1]["machines"] = rows[-1].get("machines", 1) + 1
        else:
            rows.append(row)
    links = {LINK_KEYS[0]: cluster.links.same_type / 1e9, LINK_KEYS[1]: cluster.links.across_types / 1e9}
    links |= {LINK_KEYS[2]: cluster.links.pull / 1e9} if cluster.links.pull else {}
    links |= {LINK_KEYS[3]: cluster.links.usd_per_gb} if len({m.zone for m in cluster.machines}) > 1 else {}
    prices = {(a, b): {"usd_per_gb": usd} for a, b, usd in cluster.links.zone_prices}
    zones = [
        {"between": [a, b], "gb_per_s": bandwidth / 1e9, **prices.get((a, b), {})}
        for a, b, bandwidth in cluster.links.zones
    ]  # fmt: skip
    plain = [{key: value for key, value in d.items() if key != "_gpu"} for d in device.values()]
    return {"machine": rows, "device": plain, "links": links} | ({"link": zones} if zones else {})


def _unpriced(gpu: Gpu) -> Gpu:
    return replace(gpu, reserved_usd_per_h=None, spot_usd_per_h=None, reserved_source="", spot_source="")


def _times(gpu: Gpu) -> dict[str, Any]:
    made = {"worker": gpu.worker, "trainer": gpu.trainer}
    return {
        key: {name: t for name in StepTime.KEYS if (t := getattr(service, name))}
        for key, service in made.items() if service is not None
    }  # fmt: skip
