"""The simulated fleet: the recipe's own workers, which stay, and machines that come and go by a trace.

A machine that comes up boots, then its worker dials in. Each time the same node comes up, its worker has a new name
(`n3.1`, `n3.2`), as in providers/trace_provider.py. If the recipe asks for it, a worker is warned before its machine is
preempted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from windfall.errors import WindfallError
from windfall.providers.trace_formats import Change
from windfall.run import worker_sources
from windfall.sim.core.draws import uniform
from windfall.sim.core.link import SimLink
from windfall.sim.core.scenario import MachineKind, Scenario
from windfall.sim.core.token_schedule import TokenSchedule
from windfall.sim.machines.turn import FREE, SimTurn, TurnTaker
from windfall.sim.machines.weight_store import StoreNetwork
from windfall.sim.machines.worker import Attend, SimWorker, WorkerSpec
from windfall.step_time import StepTime
from windfall.types import LOCAL, Lease, LeaseKind


@dataclass(slots=True, kw_only=True)
class Stay:
    """One machine from its start to its end: the time that is paid for."""

    name: str
    usd_per_h: float
    start_s: float
    end_s: float = math.inf
    joined: bool = False
    """Its worker has dialed in."""


class SimFleet:
    worker_class = SimWorker

    def __init__(self, scenario: Scenario, token_schedule: TokenSchedule, attend: Attend) -> None:
        self._scenario, self._token_schedule, self._attend = scenario, token_schedule, attend
        s = scenario.real.sim
        self.net = StoreNetwork(regions={region.name: region for region in s.regions}, latency_s=s.latency_s)
        self._regions = [region.name for region in s.regions for _ in range(region.share)] or [
            scenario.real.weights.region
        ]
        self._region: dict[str, str] = {}
        """Region of each node, assigned in turn."""
        self.workers: dict[str, SimWorker] = {}
        """Current workers by node."""
        self.stays: list[Stay] = []
        """Stays of all machines of the trace so far."""
        self.make_link: Callable[..., SimLink] = SimLink
        self.turn_of: Callable[[str, TurnTaker], SimTurn] = lambda device, taker: FREE
        """The turn of a device, by its name: LOCAL is the trainer's machine."""
        self._starts: dict[str, count[int]] = {}
        self._up: dict[str, Stay] = {}
        self._kinds: dict[str, MachineKind] = {}
        """Kind of each node of the trace, assigned in turn when the node first comes up. It never changes."""
        self._autoscaler = worker_sources.autoscaler(scenario.real, elsewhere=False)
        self._own_workers: dict[str, SimWorker | float] = {}
        """Workers that are not in the trace, by name. A number is the time at which the worker started to boot."""

    def local(self) -> SimWorker | None:
        return self.workers.get(LOCAL)

    async def run(self) -> None:
        """Start the workers that stay, then play back the whole trace."""
        self.start()
        for at_s, what, change in with_notices(self._scenario.changes, self._scenario.real.sim.notice_s):
            await _until(at_s)
            if what == "up":
                self.bring_up(change.node, ago_s=max(0.0, -at_s))
            elif what == "down":
                self.take_down(change.node)
            elif change.node in self.workers:
                self.workers[change.node].warn("spot", change.at_s - at_s)
        if math.isfinite(self._scenario.trace_s):
            await _until(self._scenario.trace_s)
            what = f"the run is not finished, and its generated trace ends after {self._scenario.trace_s:,.0f} s"
            raise WindfallError(what, where="sim", fix="Set sim.seconds, or lower run.steps.")
        await asyncio.Event().wait()

    def start(self) -> None:
        self._scale_to(self._scenario.real.fleet.workers)

    def start_local(self, started_s: float) -> None:
        """Start the engine on the trainer's machine, if the recipe has one. It is paid for from `started_s` on."""
        f, s = self._scenario.real.fleet, self._scenario.real.sim
        if f.local:
            lease = Lease(kind="reserved", device="simulated trainer", price_usd_per_h=f.trainer_price_usd_per_h)
            first = next(iter(self._scenario.policies.values()))
            spec = WorkerSpec(
                name=LOCAL, lease=lease, service=first.trainer, slots=s.trainer_slots,
                heartbeat_s=f.heartbeat_s, quantum_s=self._scenario.quantum_s, make_link=self.make_link,
            )  # fmt: skip
            self._start(LOCAL, spec, started_s)

    def _worker_spec(self, node: str, kind: MachineKind, terms: LeaseKind, usd_per_h: float) -> WorkerSpec:
        s, limit = self._scenario.real.sim, self._scenario.real.weights.upload_gbit_per_s * 1e9 / 8
        region = self._region.setdefault(node.partition(".")[0], self._regions[len(self._region) % len(self._regions)])
        return WorkerSpec(
            name=node, lease=Lease(kind=terms, device=kind.device, region=region, price_usd_per_h=usd_per_h),
            service=self._service(node, kind.service), slots=kind.slots, kv_tokens=kind.kv_tokens,
            longest=longest(self._scenario, kind.kv_tokens), net=self.net,
            up_per_s=min(s.ingress_bytes_per_s, limit or math.inf), down_per_s=s.ingress_bytes_per_s,
            heartbeat_s=self._scenario.real.fleet.heartbeat_s, latency_s=s.latency_s,
            quantum_s=self._scenario.quantum_s, make_link=self.make_link,
            bases={name: policy.base for name, policy in self._scenario.policies.items()},
            base_services={base: self._service(node, s) for base, s in self._scenario.base_services.items()},
        )  # fmt: skip

    def _service(self, node: str, worker: StepTime) -> StepTime:
        """Step times of this node. With sim.worker_spread, each node has its own constant factor."""
        spread = self._scenario.real.sim.worker_spread
        if not spread:
            return worker
        total = sum(uniform(f"{self._scenario.real.run.seed}/{node.partition('.')[0]}/{n}") for n in range(12)) - 6
        return worker.slower(math.exp(spread * total))

    def up(self, node: str) -> bool:
        return node in self._up

    def bring_up(self, node: str, ago_s: float = 0.0) -> None:
        """`ago_s`: seconds of its boot that are over already, for a machine that is older than the run."""
        now = asyncio.get_running_loop().time()
        life = next(self._starts.setdefault(node, count(1)))
        kinds = self._scenario.kinds
        kind = self._kinds.setdefault(node, kinds[len(self._kinds) % len(kinds)])
        self._up[node] = stay = Stay(name=f"{node}.{life}", usd_per_h=kind.usd_per_h, start_s=now)
        self.stays.append(stay)
        asyncio.get_running_loop().call_later(
            max(0.0, self._scenario.real.sim.boot_s - ago_s), self._booted, node, stay
        )

    def _booted(self, node: str, stay: Stay) -> None:
        if self._up.get(node) is not stay:
            return  # preempted while it booted
        stay.joined = True
        self._start(node, self._worker_spec(stay.name, self._kinds[node], "spot", stay.usd_per_h), stay.start_s)

    # workers that stay or are autoscaled

    def follow(self, snapshot: dict[str, Any]) -> None:
        """Autoscale the recipe's own workers, as the supervisor does. `snapshot`: the fleet after a step."""
        if not self._scenario.real.fleet.workers_max:
            return
        running = {name for name, worker in self._own_workers.items() if isinstance(worker, SimWorker)}
        now_s = asyncio.get_running_loop().time()
        changes = self._autoscaler.update(snapshot, {"local": running}, now_s)
        if "local" in changes:
            self._scale_to(changes["local"])

    def _scale_to(self, count: int) -> None:
        """Start or stop workers. The workers with the highest numbers leave as they would after SIGTERM: they send
        their tokens first."""
        loop, names = asyncio.get_running_loop(), [f"w{n + 1}" for n in range(count)]
        for name in [name for name in self._own_workers if name not in names]:
            worker = self._own_workers.pop(name)
            if isinstance(worker, SimWorker):
                if worker.link is None:  # no link to send the notice on
                    worker.kill()
                worker.warn("sigterm", 0.0)
                del self.workers[name]
        for name in [name for name in names if name not in self._own_workers]:
            self._own_workers[name] = loop.time()
            loop.call_later(self._scenario.real.sim.boot_s, self._own_worker_booted, name, loop.time())

    def _own_worker_booted(self, name: str, started_s: float) -> None:
        if self._own_workers.get(name) == started_s:  # otherwise it was stopped while it booted
            f = self._scenario.real.fleet
            self._start(name, self._worker_spec(name, self._scenario.worker, f.kind, f.price_usd_per_h), started_s)
            self._own_workers[name] = self.workers[name]

    def _start(self, node: str, spec: WorkerSpec, started_s: float) -> None:
        worker = self.workers[node] = self.worker_class(spec, self._token_schedule, self._attend, started_s=started_s)
        worker.turn = self.turn_of(node, worker)
        worker.dial()

    def stop(self) -> None:
        """The run has ended: its workers leave all machines."""
        for node in list(self.workers):
            self._kill(node)

    def take_down(self, node: str) -> None:
        self._up.pop(node).end_s = asyncio.get_running_loop().time()
        self._kill(node)

    def _kill(self, node: str) -> None:
        if node in self.workers:
            self.workers.pop(node).kill()


def longest(scenario: Scenario, kv_tokens: int) -> int:
    """Longest response, in simulated tokens, that fits into this KV cache. 0: every length that the recipe allows."""
    if not kv_tokens or kv_tokens >= max(p.prompt_tokens + p.max_tokens for p in scenario.policies.values()):
        return 0
    return max(1, kv_tokens // scenario.granule)


def with_notices(changes: Sequence[Change], notice_s: float) -> list[tuple[float, str, Change]]:
    """The trace with a notice before each preemption, but never before the machine comes up.

    >>> trace = [Change(at_s=0.0, node="a", up=True), Change(at_s=50.0, node="b", up=True)]
    >>> trace += [Change(at_s=60.0, node="a", up=False)]
    >>> [(at_s, what) for at_s, what, _ in with_notices(trace, 20.0)]
    [(0.0, 'up'), (40.0, 'warned'), (50.0, 'up'), (60.0, 'down')]
    """
    out: list[tuple[float, str, Change]] = []
    up_since_s: dict[str, float] = {}
    for change in changes:
        if change.up:
            up_since_s[change.node] = change.at_s
        elif notice_s:
            out.append((max(up_since_s[change.node], change.at_s - notice_s), "warned", change))
        out.append((change.at_s, "up" if change.up else "down", change))
    return sorted(out, key=lambda row: row[0])


async def _until(at_s: float) -> None:
    left_s = at_s - asyncio.get_running_loop().time()
    if left_s > 0:
        await asyncio.sleep(left_s)
