"""One job while it runs: its processes, its progress, and how it ended.

A job is a run as `windfall train` runs it, with its own controller, trainer, workers, journal and token. Only two
things differ: its recipe is fitted to the devices of the fleet, and its processes take turns on them.
"""

from __future__ import annotations

import asyncio
import statistics
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windfall import errors
from windfall import run_folder as folders
from windfall.defaults import KV_SHARE
from windfall.errors import WindfallError
from windfall.events import log
from windfall.jobs.machine import host as hosts
from windfall.jobs.machine import limits
from windfall.jobs.machine.host import DeviceHost
from windfall.jobs.settings import FleetSettings
from windfall.jobs.store import Job, State
from windfall.link import auth, tls
from windfall.recipe.file import load_recipe
from windfall.recipe.sections import Recipe
from windfall.run import recipe_check, resume_check, start
from windfall.run.run_processes import RunProcesses

STOP_S = 120.0
"""Seconds that a job has to stop and save; then its processes are killed. Its journal has what was not saved."""
RECENT = 5
"""Steps whose time predicts the rest."""


def fitted(recipe: Recipe, settings: FleetSettings, host: DeviceHost) -> Recipe:
    """The recipe of a job on this fleet: its trainer on the fleet's devices for trainers, and one worker on each other
    device; on all of them if the trainer's own engine does not generate and there is no other. Everything that makes
    the weights stays as it is."""
    others = len(host.places) - len(host.trainers)
    run: dict[str, Any] = {"device": host.places[0].device}
    fleet: dict[str, Any] = {
        "workers": others or (0 if recipe.fleet.local else len(host.places)),
        "workers_max": 0, "host": settings.host, "port": 0, "weights_port": 0,
    }  # fmt: skip
    if settings.tls_cert:
        fleet |= {"tls_cert": settings.tls_cert, "tls_key": settings.tls_key}
    if run["device"] == "cpu":
        fleet["worker_threads"] = run["threads"] = 1
    else:
        fleet["worker_memory"] = recipe.fleet.worker_memory or KV_SHARE / settings.jobs_at_once
    return recipe.model_copy(
        update={"fleet": recipe.fleet.model_copy(update=fleet), "run": recipe.run.model_copy(update=run)}
    )


class JobProgress:
    """What the events of a job say about its progress."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.serves = ""
        """The address at which the job answers, if it is a server."""
        self._reached: dict[str, int] = {}
        """By policy that is trained."""
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        """Seconds and tokens of the last steps."""

    def add(self, event: log.Event) -> None:
        self.serves = str(event.get("serves", self.serves))
        if (event["kind"], event["name"]) == ("scalar", "step"):
            self._reached[str(event.get("policy", ""))] = int(event["step"])
            self._recent.append((float(event["s"]), float(event["made"])))

    @property
    def step(self) -> int:
        return min(self._reached.values(), default=0)

    @property
    def tokens_per_s(self) -> float:
        seconds = sum(s for s, _ in self._recent)
        return sum(tokens for _, tokens in self._recent) / seconds if seconds else 0.0

    @property
    def eta_s(self) -> float | None:
        """Predicted seconds to the end; None: not known yet."""
        if not self._recent:
            return None
        return max(0, self.steps - self.step) * statistics.median(s for s, _ in self._recent)


class JobRun:
    def __init__(
        self, job: Job, folder: Path, settings: FleetSettings, host: DeviceHost, say: Callable[[str], None]
    ) -> None:
        self.job, self.folder = job, folder
        self.token = auth.read_token(folder / "token")
        self.progress = JobProgress(0)
        self.certificate = ""
        """Certificate of its controller (PEM); empty if it has none."""
        self._settings, self._host, self._say = settings, host, say
        self._processes: RunProcesses | None = None
        self._failure = ""
        """Why the service ended the job."""
        self._stop = asyncio.Event()

    async def run(self) -> tuple[State | None, str]:
        """Run the job to its end. Returns its state and the reason; None if it was stopped."""
        job = self.job
        try:
            recipe = await asyncio.to_thread(self._prepare)
            if recipe is None:
                return "done", ""
            self.progress.steps = recipe.run.steps
            own = self._host.admit(job.name, share=job.share, priority=job.priority, deadline_s=job.deadline_s)
            with folders.owned(self.folder):
                self._processes = RunProcesses(
                    recipe,
                    self.folder,
                    self._host.forks_of(job.name),
                    hosts.environment(own, token=self.token, directory=job.directory, pin=recipe.fleet.tls_cert),
                    notice=self._say,
                    on_event=self._on_event,
                    places=self._host.places,
                    trainer_places=self._host.trainers,
                )
                finished = await self._until_stopped(self._processes)
        except WindfallError as e:
            return "failed", self._failure or str(e)
        except Exception as e:  # fault boundary: what fails in one job must not end the others
            if (known := errors.file_system_error(e, self.folder)) is None:
                traceback.print_exc()
            return "failed", self._failure or str(known or errors.last_line(e))
        finally:
            self._host.forget(job.name)
        if self._failure:
            return "failed", self._failure
        return ("done", "") if finished else (None, "")

    async def _until_stopped(self, processes: RunProcesses) -> bool:
        running = asyncio.create_task(processes.run())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({running, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                processes.stop()
                await asyncio.wait({running}, timeout=STOP_S)
            if not running.done():
                self._say(f"waited {STOP_S:g} s for it to stop; killing it")
                processes.kill()
            return await running
        finally:
            stop.cancel()
            running.cancel()
            await asyncio.gather(stop, running, return_exceptions=True)

    def stop(self) -> None:
        """Ask the job to stop and save."""
        self._stop.set()

    def kill(self) -> None:
        self._stop.set()
        if self._processes is not None:
            self._processes.kill()

    async def fail(self, reason: str) -> None:
        """End the job at once, with all that its environment has started."""
        if self._failure or self._processes is None:
            return
        self._failure = reason
        try:
            if (pid := self.controller) is not None:
                await asyncio.to_thread(limits.kill_tree, pid)
        finally:
            self.kill()

    @property
    def controller(self) -> int | None:
        """Its process id."""
        return self._processes.controller_pid if self._processes is not None else None

    def _prepare(self) -> Recipe | None:
        """Check the job and its folder. None: it is finished."""
        stored = load_recipe(self.folder / "recipe.toml")
        recipe = fitted(stored, self._settings, self._host)
        for warning in resume_check.check_files(self.folder):
            self._say(warning)
        resume_check.check_changes(recipe, self.folder)
        if (self.folder / "events.jsonl").is_file():
            for event in log.scan(self.folder / "events.jsonl"):
                self._on_event(event)
        if resume_check.finished(recipe, self.folder) is not None:
            return None
        if report := recipe_check.check(recipe):
            self._say(report)
        if recipe.fleet.tls_cert:
            self.certificate = tls.first_certificate(recipe.fleet.tls_cert)
        start.clear(self.folder)
        start.record(recipe, self.folder, resume_check.check_changes(recipe, self.folder))
        return recipe

    def _on_event(self, event: log.Event) -> None:
        try:
            self.progress.add(event)
        except Exception as e:  # fault boundary: whatever is in the log of a job, the service goes on
            self._say(f"cannot read event {event.get('name')!r}: {errors.last_line(e)}")
