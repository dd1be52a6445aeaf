"""What the log of a run says to the planner: measured times of its devices, and its lengths. Pure: events in.

Times of a log hold for its model, its lengths and its engine. They replace the cost model's for machines of the same
kind: same terms, same device, same price.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from windfall.errors import WindfallError
from windfall.events.log import Event
from windfall.plan.model.cluster import Cluster, Machine
from windfall.plan.model.cost_model import LINK_SHARE
from windfall.plan.model.workload import Workload
from windfall.sim.calibrate import event_log
from windfall.step_time import StepTime
from windfall.types import LOCAL


def same_kind(found: str, *, device: str, lease: str, usd_per_h: float) -> bool:
    """Whether the kind of a log (controller/cost/prices.py, `kind`) is this device on these terms.

    >>> same_kind("spot NVIDIA H100 80GB HBM3 at $2.63/h", device="H100", lease="spot", usd_per_h=2.63)
    True
    >>> same_kind("spot cpu at $0.20/h", device="cpu", lease="spot", usd_per_h=0.5)
    False
    """
    terms, _, price = found.partition(" at $")
    words = set(re.findall(r"\w+", terms.lower()))
    named = set(re.findall(r"\w+", device.lower())) <= words
    return terms.startswith(f"{lease} ") and named and (not price or abs(float(price[:-2]) - usd_per_h) < 0.006)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpeeds:
    """Measured times of one run."""

    workers: dict[str, StepTime]
    """Step times of an engine by kind, with prefill and context included."""
    trainer: StepTime | None
    trainer_device: str
    lengths: tuple[int, ...]
    prompt_tokens: float
    weights_s: float = 0.0
    """Median seconds from an offer of new weights until a worker holds them; a worker's first pull is longer."""

    def worker(self, machine: Machine) -> StepTime | None:
        price = 0.0 if machine.lease == "borrowed" else machine.kind.usd_per_h
        for kind, service in self.workers.items():
            if same_kind(kind, device=machine.gpu.name, lease=machine.lease, usd_per_h=price):
                return service
        return None


def measured_steps(events: Sequence[Event]) -> list[Event]:
    """The steps that can be compared: the first one includes start-up."""
    steps = event_log.steps_of(events)
    return steps[1:] or steps


def speeds(events: Sequence[Event], where: str) -> RunSpeeds:
    steps = measured_steps(events)
    if not steps:
        raise WindfallError("no step of this run is complete yet", where=where, fix="Wait for the first step.")
    trained = event_log.training(events, [e["step"] for e in steps])
    start = next((e for e in events if e["name"] == "start"), {})
    ranks = len(str(start.get("rank_pids", "")).split())
    trainer = None
    if trained is not None and ranks <= 1:  # the times of several ranks do not say what one of them does
        trainer = StepTime(fixed_s=1e-9, each_s=0.0, **trained._asdict())
    services = event_log.services(steps, None)
    pulls = [e["s"] for e in events if e["name"] == "worker_ready" and e.get("version", 0) > 0 and e.get("s", 0) > 0]
    return RunSpeeds(
        workers={kind: service for kind, service in services.items() if kind != LOCAL}, trainer=trainer,
        trainer_device=str(start.get("machine") or start.get("device", "")), lengths=tuple(_lengths(steps)),
        prompt_tokens=statistics.mean(e.get("prompt_tokens") or 1.0 for e in steps),
        weights_s=statistics.median(pulls) if pulls else 0.0,
    )  # fmt: skip


def _lengths(steps: Iterable[Event]) -> list[int]:
    return [n for e in steps for row in e.get("lengths", ()) for n in row if n]


def with_speeds(cluster: Cluster, measured: RunSpeeds, work: Workload) -> Cluster:
    """The cluster with measured times for the machines that the run had, and links on which a pull takes as long."""
    machines = []
    for machine in cluster.machines:
        gpu, worker = machine.gpu, measured.worker(machine)
        words = set(re.findall(r"\w+", measured.trainer_device.lower()))
        trains = machine.lease == "reserved" and set(re.findall(r"\w+", gpu.name.lower())) <= words
        gpu = replace(gpu, worker=worker or gpu.worker, trainer=(measured.trainer if trains else None) or gpu.trainer)
        machines.append(replace(machine, gpu=gpu))
    links = cluster.links
    if measured.weights_s:
        links = replace(links, pull=work.update_bytes / LINK_SHARE / measured.weights_s)
    return replace(cluster, machines=tuple(machines), links=links)


def with_lengths(work: Workload, lengths: Sequence[int], prompt_tokens: float = 0.0) -> Workload:
    """The workload with the lengths of a run: spread from their logarithms, and exactly their mean."""
    if len(lengths) < 2:
        return work
    median, sigma = statistics.median(lengths), event_log.length_keys([{"lengths": [[n, n] for n in lengths]}])["sigma"]
    made = replace(work, median_tokens=float(median), sigma=float(sigma))
    if prompt_tokens:
        made = replace(made, prompt_tokens=max(1, round(prompt_tokens)))
    low, high = 0.1 * median, 10.0 * median
    for _ in range(40):  # the mean grows with the median
        middle = (low + high) / 2
        below = replace(made, median_tokens=middle).mean_tokens < statistics.mean(lengths)
        low, high = (middle, high) if below else (low, middle)
    return replace(made, median_tokens=high)
