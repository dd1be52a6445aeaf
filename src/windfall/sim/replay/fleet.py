"""Simulates the workers of a recorded run: each one joins, becomes ready and has its incidents when it did in the run.

Until the predicted steps begin, the clock is aligned at the end of every step: an event happens as long after the end
of that step as in the run. From then on the clock runs freely. If the simulation is then too fast or too slow, changes
of the fleet come too late or too early in its work, as they would in any prediction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from windfall.events.log import Event
from windfall.sim.calibrate.event_log import Pulls
from windfall.sim.core.run import Simulation
from windfall.sim.machines.fleet import Stay
from windfall.sim.machines.network import Network
from windfall.sim.machines.worker import SimWorker, WorkerSpec
from windfall.sim.replay.log import Incident, RecordedWorker
from windfall.step_time import StepTime
from windfall.types import LOCAL


class FleetEvent(NamedTuple):
    """A worker joins, or something happens to it."""

    after_s: float
    """Seconds since the clock was last aligned."""
    record: RecordedWorker
    incident: Incident | None
    """None: the worker joins."""


def fleet_events(workers: Sequence[RecordedWorker], aligned_s: Sequence[float]) -> list[list[FleetEvent]]:
    """The events after each moment at which the clock is aligned. Earlier events happen at the first such moment."""
    events = [(worker.joined_s, worker, None) for worker in workers]
    events += [(incident.at_s, worker, incident) for worker in workers for incident in worker.incidents]
    out: list[list[FleetEvent]] = [[] for _ in aligned_s]
    for at_s, worker, incident in sorted(events, key=lambda row: row[0]):
        n = max([k for k, s in enumerate(aligned_s) if s <= at_s], default=0)
        out[n].append(FleetEvent(after_s=max(0.0, at_s - aligned_s[n]), record=worker, incident=incident))
    return out


class ReplayedFleet:
    """Takes the place of a simulation's SimFleet."""

    def __init__(
        self,
        simulation: Simulation,
        events: Sequence[Sequence[FleetEvent]],
        services: Mapping[str, StepTime],
        pulls: Pulls,
        start_s: float,
    ) -> None:
        self._simulation = simulation
        self._events = events
        self._services = services
        self._pulls = pulls
        self._start_s = start_s
        self._network = Network(pulls.egress_per_s)
        self._step_ended = [asyncio.Event() for _ in range(len(events) + 1)]
        """Set when the step with this number has ended."""
        self._step_ended[0].set()
        self.workers: dict[str, SimWorker] = {}
        """The latest worker with each name."""
        self._workers_by_record: dict[int, SimWorker] = {}
        self.stays: list[Stay] = []

    def local(self) -> SimWorker | None:
        found = self.workers.get(LOCAL)
        return None if found is None or found.finished else found

    def follow(self, snapshot: dict[str, Any]) -> None:
        """Ignore advice: workers come and go as they did in the run."""

    def on_event(self, event: Event) -> None:
        """Called with every event of the simulation."""
        if (event["kind"], event["name"]) == ("scalar", "step") and event["step"] < len(self._step_ended):
            self._step_ended[event["step"]].set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for n, events in enumerate(self._events):
            await self._step_ended[n].wait()
            aligned_s, last = loop.time(), n + 1 == len(self._events)
            for event in events:
                left_s = aligned_s + event.after_s - loop.time()
                if left_s > 0 and last:
                    await asyncio.sleep(left_s)
                elif left_s > 0:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(left_s):
                            await self._step_ended[n + 1].wait()
                self._apply(event)
        await asyncio.Event().wait()

    def _apply(self, event: FleetEvent) -> None:
        if event.incident is None:
            self._join(event.record)
            return
        worker, incident = self._workers_by_record[id(event.record)], event.incident
        match incident.what:
            case "frozen":
                worker.freeze()
            case "thawed":
                worker.thaw()
            case "warned":
                worker.warn(incident.source, incident.left_s or 0.0)
            case "drained":
                for member in list(self._simulation.dispatch.members.here()):
                    if member.name == event.record.name:
                        self._simulation.dispatch.drain(member.id, "drained in the recorded run")
            case _:
                worker.kill()

    def _join(self, record: RecordedWorker) -> None:
        now, recipe = asyncio.get_running_loop().time(), self._simulation.scenario.real
        local = record.name == LOCAL
        waited_s = max(0.0, self._start_s - record.joined_s)  # until the run started, which is not simulated
        spec = WorkerSpec(
            name=record.name,
            lease=record.lease,
            service=self._services[record.kind],
            slots=record.slots,
            network=None if local else self._network,
            weights_bytes=self._pulls.size_bytes,
            ingress_per_s=self._pulls.ingress_per_s,
            heartbeat_s=recipe.fleet.heartbeat_s,
            latency_s=0.0 if local else recipe.sim.latency_s,
            quantum_s=self._simulation.scenario.quantum_s,
            build_s=max(0.0, record.ready_s - waited_s),
        )
        worker = SimWorker(spec, self._simulation.token_schedule, self._simulation.attend, started_s=now - record.age_s)
        self.workers[record.name] = self._workers_by_record[id(record)] = worker
        worker.dial()
