"""The service of a fleet: runs the jobs in its queue on shared devices, charges them, and continues after any kill.

    windfall up ─┬─ api.py          submit, list, stop, resume                     over HTTP
                 ├─ store.py        jobs and their states                          on disk
                 ├─ machines.py     other machines that have joined                what they report
                 ├─ machine/host.py devices, turns, the process to fork from       one for each machine
                 └─ job_run.py      the processes of a job                         one for each job that runs

Every second it starts jobs from the queue, ends those beyond their limits or their budget, and writes what it knows:

    FOLDER/token           the fleet's token: for submitting jobs, and for all commands
    FOLDER/address.json    where it listens
    FOLDER/jobs.json       devices and jobs, for `windfall jobs`, `windfall top` and the page
    FOLDER/turns.jsonl     every turn that has ended
    FOLDER/bill.json       device time, for the next start. A kill loses the last second; it is on no bill
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from windfall import run_folder as folders
from windfall.errors import WindfallError, report_failure, unwritable
from windfall.jobs import job_run, store
from windfall.jobs.bill import REMOVED, Bill
from windfall.jobs.job_run import JobRun
from windfall.jobs.machine import limits
from windfall.jobs.machine.host import DeviceHost
from windfall.jobs.machine.report import MachineReport
from windfall.jobs.machines import Machines
from windfall.jobs.settings import FleetSettings
from windfall.jobs.store import Job, State, Store
from windfall.jobs.turn_log import TurnLog
from windfall.link import auth
from windfall.recipe.file import parse_recipe
from windfall.run import start
from windfall.turns.accounts import IDLE

EVERY_S = 1.0
"""Seconds between two looks at everything."""
MORE_THREADS = 16
"""Threads for slow work, beside one for each job that may run."""
LIMITS_S = 0.25
"""Seconds between two looks at the processes of environments: they can grow fast."""
Say = Callable[[str], None]
P = ParamSpec("P")
T = TypeVar("T")


class Service:
    def __init__(self, settings: FleetSettings, say: Say) -> None:
        self.settings, self.folder = settings, settings.folder
        self.token = auth.make_token(self.folder / "token")
        self.store = Store(self.folder)
        self.store.load()
        self.turn_log = TurnLog(self.folder / "turns.jsonl")
        self.host = DeviceHost(
            settings,
            self.folder / "fork_server.log",
            preload=f"windfall.run.preload:preload_runs:{self.store.folder}",
            on_event=self._on_turn_event,
        )
        self.bill = Bill.load(self.folder / "bill.json")
        self.running: dict[str, JobRun] = {}
        self.machines = Machines(self.bill)
        self.stopping = False
        self._say = say
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failing: set[asyncio.Task[None]] = set()
        """Jobs beyond their limits that are being ended."""
        self._adding = asyncio.Lock()
        self._devices = self._look_at_devices()
        """Who has each device now, and who waits for it."""
        self._tokens: dict[str, str] = {}
        self._usd: dict[str, float] = {}
        self._written = True
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="disk")
        """Writes the files of the service, in the order in which they are given: a slow disk delays no other job."""

    async def run(self) -> None:
        """Run jobs until `stop`; then let them save, and end."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(self.settings.jobs_at_once + MORE_THREADS))
        for job in [*self.store.jobs.values()]:
            if job.state == "running":  # when the service before this one was killed
                await self._set(job, job.ending or "queued")
        async with self.host:
            guard = asyncio.create_task(self._keep_limits())
            guard.add_done_callback(report_failure)
            try:
                while not (self.stopping and not self._tasks):
                    await self._look()
                    await asyncio.sleep(EVERY_S if not self.stopping else 0.05)
            finally:
                self.kill()
                tasks = [guard, *self._failing, *self._tasks.values()]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await self._look()
                await self._on_disk(self.turn_log.close)

    def stop(self) -> None:
        """Stop and save all jobs. They continue with the next start of the service."""
        self.stopping = True
        for run in self.running.values():
            run.stop()

    def kill(self) -> None:
        self.stopping = True
        for run in self.running.values():
            run.kill()

    # what the api calls

    async def submit(
        self, recipe: str, *, name: str, share: float, priority: int, max_usd: float, deadline_s: float, directory: str
    ) -> Job:
        async with self._adding:  # one at a time: names are unique
            self.store.check_name(name)
            try:
                data = tomllib.loads(recipe)
            except tomllib.TOMLDecodeError as e:
                raise WindfallError(f"not valid TOML: {e}", where="the recipe") from e
            own = [f"run.name={json.dumps(name)}", f"run.folder={json.dumps(str(self.store.folder))}"]
            parsed = parse_recipe(data, where="the recipe", overrides=own)
            parsed = job_run.fitted(parsed, self.settings, self.host)
            await self._on_disk(self.store.begin, name)
            job = Job(
                name=name, number=self.store.next_number(), share=share, priority=priority, max_usd=max_usd,
                deadline_s=deadline_s, directory=directory, submitted_s=time.time(), steps=parsed.run.steps,
            )  # fmt: skip
            try:
                folder = await asyncio.to_thread(start.new_folder, parsed)
                await self._on_disk(auth.make_token, folder / "token")
                await self._free_name(name)
                await self._on_disk(self.store.record, job)
            except BaseException:  # raised again: nothing of it may be left
                await asyncio.to_thread(self.store.abandon, name)
                raise
            self.store.jobs[name] = job
        self._say(f"{name}: submitted")
        await self._look()
        return job

    async def stop_job(self, name: str) -> Job:
        job = self.store.get(name)
        if job.state == "queued":
            await self._set(job, "stopped", "stopped by a user")
        elif job.state == "running":
            await self._end(job, "stopped", "stopped by a user")
        return job

    async def resume_job(self, name: str, max_usd: float | None = None) -> Job:
        job = self.store.get(name)
        if job.state == "done":
            raise WindfallError(f"job {name!r} is done", where="resume", fix="Submit a new one with more run.steps.")
        limit = job.max_usd if max_usd is None else max_usd
        if not 0 <= limit < math.inf:
            raise WindfallError(f"{limit} is no limit", where="--max-usd", fix="Give dollars, or 0 for no limit.")
        if limit and self.spent(name) >= limit:
            what = f"job {name!r} has spent ${self.spent(name):.4f} of ${limit:g}"
            raise WindfallError(
                what, where="resume", fix=f"Give it more: windfall resume {name} --max-usd ... --on URL"
            )
        if job.state == "running" and job.ending:
            what = f"job {name!r} is still stopping"
            raise WindfallError(what, where="resume", fix="Wait until `windfall jobs` shows that it has stopped.")
        job.max_usd = limit
        if job.state == "running":
            await self._on_disk(self.store.save, job)
        else:
            await self._set(job, "queued")
        await self._look()
        return job

    async def remove_job(self, name: str) -> None:
        """Delete the folder of a job that has ended. Its bill stays in the sum of all removed jobs."""
        job = self.store.get(name)
        if job.active:
            fix = f"Stop it first: windfall stop {name} --on URL"
            raise WindfallError(f"job {name!r} is {job.state}", where="remove", fix=fix)
        if folders.held(self.store.path(name)):
            what = f"another process runs job {name!r}"
            raise WindfallError(what, where=str(self.store.path(name)), fix="Stop it first.")
        del self.store.jobs[name]
        try:
            gone = await self._on_disk(self.store.set_aside, name)
        except WindfallError:
            self.store.jobs[name] = job
            raise
        self._tokens.pop(name, None)
        self._say(f"{name}: removed")
        await asyncio.to_thread(shutil.rmtree, gone, ignore_errors=True)

    async def _free_name(self, name: str) -> None:
        """Let a new job begin with an empty bill, although a removed one had its name. This is on disk before the job
        is: otherwise, after a kill, it would pay for both."""
        self.bill.free(name)
        try:
            await self._on_disk(self._save_bill, self._bill_json())
        except OSError as e:
            raise unwritable("the bill", self.folder, e, "Free disk space, then submit the job again.") from e

    def spent(self, name: str) -> float:
        return self._usd.get(name, 0.0)

    def job_token(self, name: str) -> str:
        if name not in self._tokens:
            self._tokens[name] = auth.read_token(self.store.path(name) / "token")
        return self._tokens[name]

    async def report(self, machine: str, report: MachineReport) -> dict[str, Any]:
        """A machine that has joined reports. Returns the answer: the number of the first turn that it should report
        next, and the jobs that its workers should work for."""
        ended = self.machines.hear(machine, report)
        turns = await self._on_disk(self.turn_log.add_reported, report.life, report.first_turn, ended)
        found = []
        for name, run in self.running.items():
            address, job = folders.address(run.folder), run.job
            if address is not None and not job.ending:  # its workers stay while its controller is restarted
                found.append(
                    {
                        "name": name, "url": address["url"], "port": address["port"], "token": run.token,
                        "certificate": run.certificate,
                        "share": job.share, "priority": job.priority, "deadline_s": job.deadline_s,
                    }
                )  # fmt: skip
        return {"turns": turns, "jobs": found}

    # every second

    async def _look(self) -> None:
        await self._on_disk(self.store.retry)
        self.bill.report("", self.host.life, self.host.times(), self.host.price_usd_per_h)
        self._usd = self.bill.usd()
        self.machines.forget_gone()
        for name, run in [*self.running.items()]:
            run.job.step = max(run.job.step, run.progress.step)
            self.host.expect(name, run.progress.eta_s)
            if run.job.max_usd and self.spent(name) >= run.job.max_usd and not run.job.ending:
                what = f"it has spent ${self.spent(name):.4f}, and may spend ${run.job.max_usd:g}"
                await self._end(run.job, "over_budget", what)
        while not self.stopping and len(self.running) < self.settings.jobs_at_once and (jobs := self.store.waiting()):
            await self._start(jobs[0])
        await self._on_disk(self._write, self.host.ended_turns(), self._bill_json(), json.dumps(self.snapshot()))

    async def _start(self, job: Job) -> None:
        job.started_s = job.started_s or time.time()
        try:
            run = JobRun(
                job, self.store.path(job.name), self.settings, self.host, lambda line: self._say(f"{job.name}: {line}")
            )
        except WindfallError as e:  # its token is damaged
            await self._set(job, "failed", str(e))
            return
        job.state, job.reason = "running", ""
        self.running[job.name] = run
        self._tasks[job.name] = asyncio.create_task(self._run(run), name=f"job {job.name}")

    async def _run(self, run: JobRun) -> None:
        job = run.job
        try:
            try:
                await self._on_disk(self.store.save, job)
                self._say(f"{job.name}: running")
                state, reason = await run.run()
            finally:
                self.running.pop(job.name, None)
            job.step = max(job.step, run.progress.step)
            if state is None:
                await self._set(job, job.ending or "queued", job.reason)
            else:
                await self._set(job, state, reason)
        finally:
            if self._tasks.get(job.name) is asyncio.current_task():  # it has not been resumed meanwhile
                del self._tasks[job.name]
        if not self.stopping:
            await self._look()

    async def _end(self, job: Job, state: State, reason: str) -> None:
        job.ending, job.reason = state, reason
        run = self.running.get(job.name)
        await self._on_disk(self.store.save, job)
        self._say(f"{job.name}: stopping, because {reason}")
        if run is not None:
            run.stop()

    async def _set(self, job: Job, state: State, reason: str = "") -> None:
        job.state, job.reason, job.ending = state, reason, ""
        if state not in ("queued", "running"):
            job.ended_s = time.time()
        await self._on_disk(self.store.save, job)
        self._say(f"{job.name}: {state}{f' ({reason})' if reason else ''}")

    async def _keep_limits(self) -> None:
        most = limits.most_bytes(self.settings.limits, self.settings.jobs_at_once)
        while True:
            await asyncio.sleep(LIMITS_S)
            runs = {pid: run for run in self.running.values() if (pid := run.controller) is not None}
            if not runs:
                continue
            try:
                used = await asyncio.to_thread(limits.usage, runs)
            except (OSError, RuntimeError) as e:  # no more threads or files, perhaps because of one of these jobs
                self._say(f"limits of jobs cannot be checked now: {e}")
                continue
            for pid, run in runs.items():
                if why := limits.exceeded(used[pid], self.settings.limits, most):
                    failing = asyncio.create_task(self._fail(run, why), name=f"failing {run.job.name}")
                    self._failing.add(failing)
                    failing.add_done_callback(self._failing.discard)

    async def _fail(self, run: JobRun, why: str) -> None:
        """This takes seconds; the limits of the others are checked meanwhile."""
        try:
            await run.fail(why)
        except (OSError, RuntimeError) as e:  # as above; its processes are killed all the same
            self._say(f"{run.job.name}: some of what it has started may be left: {e}")

    def _on_turn_event(self, event: str, fields: Mapping[str, Any]) -> None:
        if event == "hung":
            held = f"{fields['device']} for {fields['held_s']:.0f} s while others waited"
            self._say(f"{fields['job']}: a process ({fields['kind']}, pid {fields['pid']}) kept {held}; it was killed")

    # what others read

    def describe(self, job: Job) -> dict[str, Any]:
        run = self.running.get(job.name)
        waiting_for = ""
        if job.state == "queued":
            waiting_for = f"one of {self.settings.jobs_at_once} places"
        elif run is not None:
            waiting_for = self._waits(job.name) or (
                "" if run.progress.step or run.progress.serves else "its first step"
            )
        return {
            "state": job.state, "share": job.share, "priority": job.priority, "step": job.step, "steps": job.steps,
            "usd": self.spent(job.name), "max_usd": job.max_usd, "deadline": job.deadline_s,
            "tokens_per_s": run.progress.tokens_per_s if run else 0.0, "eta_s": run.progress.eta_s if run else None,
            "reason": job.reason, "waiting_for": waiting_for, "submitted_s": job.submitted_s,
            "started_s": job.started_s, "ended_s": job.ended_s, "folder": str(self.store.path(job.name)),
            "serves": run.progress.serves if run else "",
        }  # fmt: skip

    def _waits(self, name: str) -> str:
        """Which devices a job waits for, if it has none at the moment."""
        devices = self._devices.items()
        if any(name in (device["job"], device["beside"]) for _, device in devices):
            return ""
        waits = [each for each, device in devices if any(waiting["job"] == name for waiting in device["waiting"])]
        return f"its turn on {', '.join(waits)}" if waits else ""

    def _look_at_devices(self) -> dict[str, dict[str, Any]]:
        return self.host.turns()["devices"] | self.machines.devices()

    def snapshot(self) -> dict[str, Any]:
        self._devices = self._look_at_devices()
        devices: dict[str, Any] = {}
        for name, jobs in self.bill.devices().items():
            held = self._devices.get(name, {"job": "", "kind": "", "beside": ""})
            used_s = defaultdict[str, float](float)
            for job, ns in jobs.items():
                if ns and job != IDLE:
                    used_s[self._shown(job)] += ns / 1e9
            state = {key: held[key] for key in ("job", "kind", "beside")}
            devices[name] = state | {"idle_s": jobs.get(IDLE, 0) / 1e9, "used_s": dict(used_s)}
        jobs = sorted(self.store.jobs.values(), key=lambda job: job.number)
        return {
            "time_s": time.time(),
            "devices": devices,
            "jobs": {job.name: self.describe(job) for job in jobs},
            "bill": {
                "usd": self.bill.total_usd(),
                "idle_usd": self._usd.get(IDLE, 0.0),
                "removed_usd": sum(usd for job, usd in self._usd.items() if self._shown(job) == REMOVED),
                "machines": self.machines.names,
            },
        }

    def _shown(self, job: str) -> str:
        """Under which name a job is on the bill."""
        return job if job in self.store.jobs or job == IDLE else REMOVED

    async def _on_disk(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """The result of a function that writes, called after all those that were given before."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, partial(function, *args, **options))

    def _bill_json(self) -> str:
        return json.dumps(self.bill.to_dict())

    def _save_bill(self, text: str) -> None:
        folders.replace(self.folder / "bill.json", text)

    def _write(self, turns: list[dict[str, Any]], bill: str, jobs: str) -> None:
        """A full disk loses nothing but turns of the timeline: the next look writes everything else again. A slow disk
        delays what the service does, but no turn (turns/server_thread.py)."""
        self.turn_log.add(turns)
        try:
            self._save_bill(bill)
            folders.replace(self.folder / "jobs.json", jobs)
            self._written = True
        except OSError as e:
            if self._written:
                error = unwritable(
                    "the state of the jobs", self.folder, e, "Free disk space; no job is lost meanwhile."
                )
                self._say(str(error))
            self._written = False


def summary(jobs: Mapping[str, Job]) -> str:
    """How many jobs are in which state.

    >>> summary({"a": Job(name="a", number=1, state="done"), "b": Job(name="b", number=2)})
    '1 queued, 1 done'
    """
    counts = {state: sum(job.state == state for job in jobs.values()) for state in store.STATES}
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "no jobs"
