"""The workers of a recorded run, simulated: each joins when it did, is ready when it was, and meets what it met.

Until the steps that are to be predicted begin, the clock is set at the end of every step: what happened so long after
it happens so long after it here, too. From there on it runs free, and a simulation that is too fast or too slow meets
every change of the fleet at another place of its work, as a prediction must.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windfall.events.log import Event
from windfall.sim.calibrate.event_log import Pulls
from windfall.sim.core.run import Simulation
from windfall.sim.core.service import Service, uniform
from windfall.sim.machines.fleet import Stay
from windfall.sim.machines.network import Network
from windfall.sim.machines.worker import Kit, SimWorker
from windfall.sim.replay.log import Deed, RecordedWorker
from windfall.types import LOCAL

JITTER = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One entry of the fleet's diary."""

    after_s: float
    """Since the clock was last set."""
    life: RecordedWorker
    deed: Deed | None
    """None: it joins."""


def diary(lives: Sequence[RecordedWorker], set_s: Sequence[float]) -> list[list[Item]]:
    """What happens after each of the moments at which the clock is set; what came before the first happens at it."""
    moments = [(life.joined_s, life, None) for life in lives]
    moments += [(deed.at_s, life, deed) for life in lives for deed in life.deeds]
    out: list[list[Item]] = [[] for _ in set_s]
    for at_s, life, deed in sorted(moments, key=lambda row: row[0]):
        n = max([k for k, s in enumerate(set_s) if s <= at_s], default=0)
        out[n].append(Item(after_s=max(0.0, at_s - set_s[n]), life=life, deed=deed))
    return out


class ReplayedFleet:
    """Stands where a simulation has its Machines."""

    def __init__(
        self, simulation: Simulation, items: Sequence[Sequence[Item]], services: Mapping[str, Service],
        pulls: Pulls, start_s: float, seed: int = 0,
    ) -> None:  # fmt: skip
        """`seed`: 0 for workers as fitted, any other for some that are a little faster or slower."""
        self._sim, self._items, self._services, self._pulls = simulation, items, services, pulls
        self._start_s, self._seed = start_s, seed
        self._network = Network(pulls.egress_per_s)
        self._ended = [asyncio.Event() for _ in range(len(items) + 1)]
        """By number: the step is over."""
        self._ended[0].set()
        self.workers: dict[str, SimWorker] = {}
        """By the name that it joined under; of several, the last."""
        self._of: dict[int, SimWorker] = {}
        self.stays: list[Stay] = []

    def local(self) -> SimWorker | None:
        found = self.workers.get(LOCAL)
        return None if found is None or found.over else found

    def follow(self, said: dict[str, Any]) -> None:
        """Workers come and go as they did, whatever was advised."""

    def heard(self, event: Event) -> None:
        """Every event of the simulation."""
        if (event["kind"], event["name"]) == ("scalar", "step") and event["step"] < len(self._ended):
            self._ended[event["step"]].set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for n, items in enumerate(self._items):
            await self._ended[n].wait()
            set_s, last = loop.time(), n + 1 == len(self._items)
            for item in items:
                left_s = set_s + item.after_s - loop.time()
                if left_s > 0 and last:
                    await asyncio.sleep(left_s)
                elif left_s > 0:
                    await _either(self._ended[n + 1], left_s)
                self._do(item)
        await asyncio.Event().wait()

    def _do(self, item: Item) -> None:
        if item.deed is None:
            self._join(item.life)
            return
        worker, deed = self._of[id(item.life)], item.deed
        match deed.what:
            case "frozen":
                worker.freeze()
            case "thawed":
                worker.thaw()
            case "warned":
                worker.warn(deed.source, deed.left_s if deed.left_s is not None else 0.0)
            case "drained":
                self._drain(item.life.name)
            case _:
                worker.kill()

    def _service(self, life: RecordedWorker) -> Service:
        fitted = self._services[life.kind]
        draw = 2 * uniform(f"{self._seed}/{life.name}/{life.joined_s}") - 1
        return fitted.slower(1 + JITTER * draw) if self._seed else fitted

    def _drain(self, name: str) -> None:
        for member in list(self._sim.dispatch.members.here()):
            if member.name == name:
                self._sim.dispatch.drain(member.id, "as in the log")

    def _join(self, life: RecordedWorker) -> None:
        now, s = asyncio.get_running_loop().time(), self._sim.world.real
        local = life.name == LOCAL
        waited_s = max(0.0, self._start_s - life.joined_s)  # for the run to begin, which is not simulated
        kit = Kit(
            name=life.name, lease=life.lease, service=self._service(life), slots=life.slots,
            network=None if local else self._network, weights_bytes=self._pulls.size_bytes,
            ingress_per_s=self._pulls.ingress_per_s,
            heartbeat_s=s.fleet.heartbeat_s, latency_s=0.0 if local else s.sim.latency_s,
            quantum_s=self._sim.world.quantum_s, build_s=max(0.0, life.ready_s - waited_s),
        )  # fmt: skip
        worker = SimWorker(kit, self._sim.book, self._sim.attend, started_s=now - life.age_s)
        self.workers[life.name] = self._of[id(life)] = worker
        worker.dial()


async def _either(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass
