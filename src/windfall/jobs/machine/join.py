"""`windfall join`: this machine lends its devices to the jobs of a service on another one.

    every second   POST /machines/NAME  device time and turns (report.py)  ──▶ service
                   the jobs that run, with address and token               ◀──
    for each job   one worker on every device, which takes turns on it (host.py), until the job ends

If the service does not answer, the workers go on: each belongs to the controller of its job, and leaves by itself when
it finds none.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from windfall import backoff, errors
from windfall.errors import WindfallError
from windfall.jobs.client import JobsClient, RequestRefused
from windfall.jobs.machine import host as hosts
from windfall.jobs.machine.host import DeviceHost
from windfall.jobs.machine.report import EndedTurn, HeldDevice, MachineReport, UnconfirmedTurns
from windfall.jobs.machines import REPLACED_S
from windfall.jobs.settings import FleetSettings
from windfall.link import network
from windfall.processes.process import Handle
from windfall.providers.slots import SlotProvider
from windfall.run.gpu_assignment import GpuAssignment
from windfall.turns.client import DEVICES
from windfall.types import Lease

EVERY_S = 1.0
MOST_WAIT_S = 10.0
"""Upper limit for the seconds between two reports while the service does not answer."""
REPORT_S = 20.0
"""Seconds to wait for the answer to a report."""
KEPT_S = 10.0
"""Seconds for which the workers of a job stay that the service does not name: it may be starting again."""
GONE_S = 600.0
"""Seconds without an answer of the service after which this machine ends its workers and the command."""
NAME_IN_USE = 409
FREE_NAME_S = 2 * REPLACED_S
"""Seconds for which a new process tries again if its name is in use: it may be that of a machine that has crashed."""


def main(on: str, token: str, ca: Path | None, name: str, settings: FleetSettings) -> int:
    client = JobsClient(on, token, ca, timeout_s=REPORT_S)
    folder = Path(tempfile.mkdtemp(prefix="windfall-join-"))
    print(f"logs of the workers: {folder}", flush=True)
    asyncio.run(errors.guard(JoinedMachine(client, name or socket.gethostname(), settings, folder).run()))
    return 0


class JoinedMachine:
    def __init__(self, client: JobsClient, name: str, settings: FleetSettings, folder: Path) -> None:
        self._client, self._name, self._folder = client, name, folder
        preload = f"windfall.run.preload:preload_runs:{folder}"
        self._turns = UnconfirmedTurns()
        self._host = DeviceHost(settings, folder / "fork_server.log", preload=preload)
        self._workers: dict[str, asyncio.Task[None]] = {}
        """By job: what keeps its workers running."""
        self._missing_s: dict[str, float] = {}
        """When the service first left out these jobs (monotonic time, seconds)."""
        self._stop = asyncio.Event()

    async def run(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        began_s = answered_s = time.monotonic()
        accepted, failures = False, 0
        async with self._host:
            try:
                while not self._stop.is_set():
                    try:
                        self._follow(await self._report())
                        answered_s, accepted, failures = time.monotonic(), True, 0
                    except WindfallError as e:
                        now_s = time.monotonic()
                        if now_s - answered_s > GONE_S or _is_final(e, accepted, now_s - began_s):
                            raise
                        print(f"{e.what}; trying again", flush=True)
                        failures += 1
                    pause_s = backoff.delay_s(failures, first_s=EVERY_S, limit_s=MOST_WAIT_S)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(pause_s):
                            await self._stop.wait()
            finally:
                await self._end(list(self._workers))
                with contextlib.suppress(WindfallError):  # what it does not get is on no bill
                    await self._report()

    async def _report(self) -> list[dict[str, Any]]:
        """Report what the devices did. Returns the jobs that run."""
        self._turns.add(self._host.ended_turns())
        report = MachineReport(
            life=self._host.life, times=self._host.times(), price_usd_per_h=self._host.price_usd_per_h,
            now_s=time.time(), devices=msgspec.convert(self._host.turns()["devices"], dict[str, HeldDevice]),
            first_turn=self._turns.first, turns=msgspec.convert(self._turns.oldest(), list[EndedTurn]),
        )  # fmt: skip
        fields = msgspec.to_builtins(report)
        answer = await asyncio.to_thread(self._client.post, f"/machines/{self._name}", **fields)
        self._turns.confirm(answer["turns"])
        return answer["jobs"]

    def _follow(self, jobs: list[dict[str, Any]]) -> None:
        """Start workers for the jobs that run, and end those of the others."""
        now = {f"{job['name']} {job['url']}": job for job in jobs}
        for key, task in list(self._workers.items()):
            if task.done():
                del self._workers[key]
                self._missing_s.pop(key, None)
                if not task.cancelled() and (error := task.exception()) is not None:
                    print(f"workers of {key} cannot run: {error}; trying again", flush=True)
            elif key in now:
                self._missing_s.pop(key, None)
            elif time.monotonic() - self._missing_s.setdefault(key, time.monotonic()) > KEPT_S:
                task.cancel()  # it stays here until its workers have ended: the next one of this job comes after that
        busy = {key.partition(" ")[0] for key in self._workers}
        for key in now.keys() - self._workers.keys():
            if now[key]["name"] not in busy:
                self._workers[key] = asyncio.create_task(self._work_for(now[key]), name=f"workers of {key}")

    async def _work_for(self, job: dict[str, Any]) -> None:
        name = job["name"]
        own = self._host.admit(name, share=job["share"], priority=job["priority"], deadline_s=job["deadline_s"])
        environment = hosts.environment(own, token=job["token"], pin=job["certificate"])
        assigned = GpuAssignment(len(self._host.places), trainer=0, workers=len(self._host.places))
        forks = self._host.forks_of(name)
        reached = network.in_url(str(urlsplit(self._client.url).hostname))
        url = f"{urlsplit(job['url']).scheme}://{reached}:{job['port']}"

        async def spawn(worker: str, lease: Lease) -> Handle:
            number = assigned.assign(worker)
            assert number is not None, "a machine has at least one device"
            place, full = self._host.places[number], f"{self._name}-{worker}"
            argv = [
                "windfall", "worker", "--join", url, "--name", full, "--lease", lease.kind, "--price",
                str(lease.price_usd_per_h), "--threads", "1" if place.device == "cpu" else "0", "--clouds", "none",
                "--device", place.device, "--memory", str(assigned.memory_share(worker)),
            ]  # fmt: skip
            env = place.environment(environment | {DEVICES: place.name})
            log = self._folder / name / f"{worker}.log"
            handle = await forks.start(name=worker, argv=argv, env=env, log=log)
            handle.when_ended(partial(assigned.release, worker))
            return handle

        terms = Lease(kind="reserved", price_usd_per_h=self._host.price_usd_per_h)
        try:
            await SlotProvider(spawn, len(self._host.places), terms=terms, on_event=lambda event, **fields: None).run()
        finally:
            self._host.forget(name)

    async def _end(self, keys: list[str]) -> None:
        tasks = [self._workers.pop(key) for key in keys]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _is_final(error: WindfallError, accepted: bool, age_s: float) -> bool:
    """Whether trying again cannot help. `accepted`: the service has accepted a report before. `age_s`: of this process.

    >>> refused, in_use, unreachable = RequestRefused("wrong token"), RequestRefused("name in use"), WindfallError("")
    >>> in_use.status = NAME_IN_USE
    >>> [_is_final(error, False, 5.0) for error in (refused, in_use, unreachable)]
    [True, False, False]
    >>> [_is_final(in_use, *args) for args in ((False, 60.0), (True, 60.0))]
    [True, True]
    """
    if not isinstance(error, RequestRefused):
        return False
    if error.status == NAME_IN_USE:
        return accepted or age_s > FREE_NAME_S
    return not accepted
