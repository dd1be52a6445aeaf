"""The machines of a simulated fleet: those of the recipe that stay, and those that come and go by a trace.

A machine that comes up boots, then dials in; a new life of the same node has a new name (`n3.1`, `n3.2`), as in
fleet/trace_provider.py. One that is taken is warned before, if the recipe says so.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from windfall.errors import WindfallError
from windfall.fleet.trace_formats import Change
from windfall.launch.autoscale import Autoscaler
from windfall.sim.core.link import SimLink
from windfall.sim.core.scenario import MachineKind, Scenario
from windfall.sim.core.service import Service, uniform
from windfall.sim.core.token_schedule import TokenSchedule
from windfall.sim.machines.market import Prices
from windfall.sim.machines.network import Network
from windfall.sim.machines.worker import Attend, Kit, SimWorker
from windfall.types import LOCAL, Lease, Terms


@dataclass(slots=True, kw_only=True)
class Stay:
    """One machine from its start to its end, as it is paid for."""

    name: str
    prices: Prices
    start_s: float
    end_s: float = math.inf
    joined: bool = False


class Machines:
    def __init__(self, world: Scenario, book: TokenSchedule, attend: Attend) -> None:
        self._world, self._book, self._attend = world, book, attend
        self._network = Network(world.real.sim.egress_bytes_per_s)
        self.workers: dict[str, SimWorker] = {}
        """Those that are there, by their machine."""
        self.stays: list[Stay] = []
        """Of machines of the trace."""
        self.wire: Callable[..., SimLink] = SimLink
        self._lives: dict[str, count[int]] = {}
        self._up: dict[str, Stay] = {}
        self._kinds: dict[str, MachineKind] = {}
        """Of nodes of the trace: in turn, as they come up for the first time, and for good."""
        f = world.real.fleet
        self._autoscaler = Autoscaler(f.workers, f.workers_max)
        self._ours: dict[str, SimWorker | float] = {}
        """Workers that stay, by name; a number: since then it boots."""
        self._looks = 0

    def local(self) -> SimWorker | None:
        return self.workers.get(LOCAL)

    async def run(self) -> None:
        """The whole trace. Those that stay are there from the start."""
        f, s = self._world.real.fleet, self._world.real.sim
        self._keep(f.workers)
        for at_s, what, change in schedule(self._world.changes, s.notice_s):
            await _until(at_s)
            if what == "up":
                self.bring_up(change.node)
            elif what == "warned":
                self._warn(change.node, change.at_s - at_s)
            else:
                self.take_down(change.node)
        if math.isfinite(self._world.drawn_s):
            await _until(self._world.drawn_s)
            what = f"the run goes on, and the trace that was drawn for it ends after {self._world.drawn_s:,.0f} s"
            raise WindfallError(what, where="sim", fix="Set sim.seconds, or make run.steps fewer.")
        await asyncio.Event().wait()

    def start_local(self, started_s: float) -> None:
        """The trainer's process is up, since `started_s`, and with it its own engine, if the recipe has one."""
        f, s = self._world.real.fleet, self._world.real.sim
        if f.local:
            lease = Lease(kind="reserved", device="simulated trainer", price_usd_per_h=f.trainer_price_usd_per_h)
            kit = Kit(
                name=LOCAL, lease=lease, service=self._world.trainer, slots=s.trainer_slots,
                heartbeat_s=f.heartbeat_s, quantum_s=self._world.quantum_s, wire=self.wire,
            )  # fmt: skip
            self._start(LOCAL, kit, started_s)

    def stop_local(self) -> None:
        local = self.workers.pop(LOCAL, None)
        if local is not None:
            local.kill()

    def _kit(self, node: str, kind: MachineKind, terms: Terms, usd_per_h: float) -> Kit:
        s = self._world.real.sim
        return Kit(
            name=node, lease=Lease(kind=terms, device=kind.device, price_usd_per_h=usd_per_h),
            service=self._service(node, kind.service), slots=kind.slots, kv_tokens=kind.kv_tokens,
            longest=longest(self._world, kind.kv_tokens),
            network=self._network, weights_bytes=s.weights_bytes, ingress_per_s=s.ingress_bytes_per_s,
            heartbeat_s=self._world.real.fleet.heartbeat_s, latency_s=s.latency_s,
            quantum_s=self._world.quantum_s, wire=self.wire,
        )  # fmt: skip

    def _service(self, node: str, worker: Service) -> Service:
        """Machines may differ: each node by a factor of its own, for good."""
        spread = self._world.real.sim.worker_spread
        if not spread:
            return worker
        total = sum(uniform(f"{self._world.real.run.seed}/{node.partition('.')[0]}/{n}") for n in range(12)) - 6
        return worker.slower(math.exp(spread * total))

    def up(self, node: str) -> bool:
        return node in self._up

    def bring_up(self, node: str) -> None:
        now = asyncio.get_running_loop().time()
        life = next(self._lives.setdefault(node, count(1)))
        kinds = self._world.kinds
        kind = self._kinds.setdefault(node, kinds[len(self._kinds) % len(kinds)])
        self._up[node] = stay = Stay(name=f"{node}.{life}", prices=kind.prices, start_s=now)
        self.stays.append(stay)
        asyncio.get_running_loop().call_later(self._world.real.sim.boot_s, self._booted, node, stay)

    def _booted(self, node: str, stay: Stay) -> None:
        if self._up.get(node) is not stay:
            return  # it was taken before
        stay.joined = True
        price = stay.prices.at(asyncio.get_running_loop().time())
        self._start(node, self._kit(stay.name, self._kinds[node], "spot", price), stay.start_s)

    # those that stay, or are kept as advice has it

    def follow(self, said: dict[str, Any]) -> None:
        """`said`: the fleet after a step. More workers of our own, or fewer, where that pays: as the supervisor."""
        if not self._world.real.fleet.workers_max:
            return
        self._looks += 1
        there = {name for name, worker in self._ours.items() if isinstance(worker, SimWorker)}
        wanted = self._autoscaler.update({**said, "step": self._looks}, there)
        if wanted is not None:
            self._keep(wanted)

    def _keep(self, count: int) -> None:
        """The highest ones go, as by SIGTERM: they send what they have and leave."""
        loop, names = asyncio.get_running_loop(), [f"w{n + 1}" for n in range(count)]
        for name in [name for name in self._ours if name not in names]:
            worker = self._ours.pop(name)
            if isinstance(worker, SimWorker):
                if worker.wire is None:  # nobody to say so to
                    worker.kill()
                worker.warn("sigterm", 0.0)
                del self.workers[name]
        for name in [name for name in names if name not in self._ours]:
            self._ours[name] = loop.time()
            loop.call_later(self._world.real.sim.boot_s, self._come, name, loop.time())

    def _come(self, name: str, started_s: float) -> None:
        if self._ours.get(name) == started_s:  # else it was sent away before it had booted
            f = self._world.real.fleet
            self._start(name, self._kit(name, self._world.worker, f.kind, f.price_usd_per_h), started_s)
            self._ours[name] = self.workers[name]

    def _start(self, node: str, kit: Kit, started_s: float) -> None:
        worker = self.workers[node] = SimWorker(kit, self._book, self._attend, started_s=started_s)
        worker.dial()

    def _warn(self, node: str, left_s: float) -> None:
        if node in self.workers:
            self.workers[node].warn("spot", left_s)

    def take_down(self, node: str) -> None:
        self._up.pop(node).end_s = asyncio.get_running_loop().time()
        worker = self.workers.pop(node, None)
        if worker is not None:
            worker.kill()


def longest(world: Scenario, kv_tokens: int) -> int:
    """Simulated tokens of one response that a worker with this room can take; 0: of any that the recipe allows."""
    real = world.real
    if not kv_tokens or kv_tokens >= real.sim.prompt_tokens + real.rollout.max_tokens:
        return 0
    return max(1, kv_tokens // world.granule)


def schedule(changes: Sequence[Change], notice_s: float) -> list[tuple[float, str, Change]]:
    """What happens when: a machine that is to be taken is warned before, but not before it came.

    >>> trace = [Change(at_s=0.0, node="a", up=True), Change(at_s=50.0, node="b", up=True)]
    >>> trace += [Change(at_s=60.0, node="a", up=False)]
    >>> [(at_s, what) for at_s, what, _ in schedule(trace, 20.0)]
    [(0.0, 'up'), (40.0, 'warned'), (50.0, 'up'), (60.0, 'down')]
    """
    out: list[tuple[float, str, Change]] = []
    came_s: dict[str, float] = {}
    for change in changes:
        if change.up:
            came_s[change.node] = change.at_s
        elif notice_s:
            out.append((max(came_s[change.node], change.at_s - notice_s), "warned", change))
        out.append((change.at_s, "up" if change.up else "down", change))
    return sorted(out, key=lambda row: row[0])


async def _until(at_s: float) -> None:
    left_s = at_s - asyncio.get_running_loop().time()
    if left_s > 0:
        await asyncio.sleep(left_s)
