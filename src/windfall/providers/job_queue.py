"""Workers as jobs of a batch system: submitted, listed every `poll_s` and ended by the system's own commands.

    JobProvider ── spawn(name) ──▶ submit(workers) ──▶ JobQueue (Slurm, SkyPilot)
        └──── jobs() every poll_s, then drain(ids) and cancel(ids) ────┘

- Workers that are wanted at the same time are submitted together.
- A waiting job counts as started: the system decides when it runs.
- A job that is missing from three lists in a row has been lost. A query that fails changes nothing, whatever the error;
  errors that last are reported.
- A listed job that belongs to no worker is canceled: a killed supervisor left it, or its submission failed although the
  system took it, or it is no longer wanted. Not while jobs are being submitted, because their ids are not known yet.
- A job that cannot be ended is asked again after every query, and reported once.
- Before the first worker starts, and after the last one has ended, jobs are canceled until none is listed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from windfall import backoff
from windfall.errors import WindfallError, report_failure
from windfall.processes.process import Handle
from windfall.providers.base import OnEvent, ignore_event
from windfall.providers.slots import SlotProvider
from windfall.recipe.worker_source import WorkerSource
from windfall.types import Lease

GATHER_S = 0.1
"""Seconds to wait for more workers before a submission."""
MISSING = 3
"""Number of lists without a job after which it counts as lost."""
COMMAND_TIMEOUT_S = 120.0
TRIES = 4
"""Attempts to end a job before it is reported, and to cancel the jobs that are left: 0.5 s, 1 s and 2 s apart."""
REPORTED_FAILURES = 5
"""Number of failed queries in a row after which they are reported."""
KILL_TIMEOUT_S = 90.0
"""Seconds that the system has to end a job. Slurm itself waits 30 s between SIGTERM and SIGKILL."""


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """The state of a job. `code`: None until it has ended; then its exit status, or the negative number of a signal."""

    code: int | None = None
    waiting: bool = False
    leaving: bool = False
    """It is being canceled."""

    @property
    def wanted(self) -> bool:
        """Whether it runs, or will run."""
        return self.code is None and not self.leaving


class JobQueue(Protocol):
    """The commands of a batch system. OSError: may work later. WindfallError: a person must fix it."""

    name: str
    prefix: str
    """How the names of its workers begin."""
    together: bool
    """Whether several workers are one submission."""

    async def submit(self, workers: Sequence[str]) -> Mapping[str, str]:
        """Submit a job for each worker; returns the id of each."""
        ...

    async def jobs(self) -> Mapping[str, ClusterJob]:
        """The jobs of this run that the system lists, by id."""
        ...

    async def drain(self, ids: Sequence[str]) -> None:
        """Ask the workers of running jobs to leave."""
        ...

    async def cancel(self, ids: Sequence[str]) -> None: ...


def check_program(name: str, *, where: str, fix: str) -> None:
    if shutil.which(name) is None:
        raise WindfallError(f"program '{name}' not found", where=where, fix=fix)


async def command(
    *argv: str, where: str, fix: str, env: Mapping[str, str] | None = None, timeout_s: float = COMMAND_TIMEOUT_S
) -> str:
    """Run a program and return its output. A program that is missing is a WindfallError, a failure is an OSError."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=None if env is None else dict(env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except FileNotFoundError as e:
        raise WindfallError(f"program '{argv[0]}' not found", where=where, fix=fix) from e
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate()
    except TimeoutError as e:
        raise OSError(f"waited {timeout_s:g} s for {' '.join(argv[:3])}") from e
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            # Close the pipes, too: a child of the program may hold them, and the event loop may end before the program.
            process._transport.close()  # pyright: ignore[reportAttributeAccessIssue]
    if process.returncode:
        said = (err or out).decode(errors="replace").strip().splitlines()
        raise OSError(f"{argv[0]} failed with status {process.returncode}: {said[-1] if said else 'no message'}")
    return out.decode(errors="replace")


@dataclass(eq=False, slots=True)
class _Watched:
    """The job of a worker."""

    handle: Handle
    job: ClusterJob | None = None
    missing: int = 0
    """Number of lists in a row that did not contain it."""
    signal: int = 0
    """What it is to get: SIGTERM (drain) or SIGKILL (cancel)."""


class JobProvider(SlotProvider):
    def __init__(
        self,
        queue: JobQueue,
        source: WorkerSource,
        *,
        poll_s: float,
        grace_s: float,
        on_event: OnEvent = ignore_event,
    ) -> None:
        self.name = queue.name
        self._queue = queue
        self._poll_s = poll_s
        self._wanted: dict[str, asyncio.Future[Handle]] = {}
        self._gathering: asyncio.Task[None] | None = None
        self._submissions: set[asyncio.Task[None]] = set()
        self._watched: dict[str, _Watched] = {}
        self._failures: dict[str, int] = {}
        """How often in a row jobs could not be ended."""
        self._asked = asyncio.Event()
        """A job is to be ended."""
        super().__init__(
            self._spawn,
            source.workers,
            terms=source.lease,
            on_event=on_event,
            grace_s=grace_s,
            prefix=queue.prefix,
            delay=self._restart_delay,
            patient=True,
        )

    def _restart_delay(self) -> backoff.RestartDelay:
        """The back-off between two jobs of a slot. Its times are multiples of the time between two queries, because the
        age of a job is not known more exactly."""
        return backoff.RestartDelay(first_s=self._poll_s, young_s=15 * self._poll_s, limit_s=30 * self._poll_s)

    async def run(self) -> None:
        await self._cancel_all()
        polling = asyncio.create_task(self._poll(), name="polling the job queue")
        polling.add_done_callback(report_failure)
        try:
            await super().run()
        finally:
            tasks = [t for t in (polling, self._gathering, *self._submissions) if t is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            try:
                await self._cancel_all(times=2)  # a submission that was canceled may still be on its way
            except WindfallError as e:
                self._stuck("jobs", f"jobs of this run may be left: {e}")

    async def _cancel_all(self, times: int = 1) -> None:
        """Cancel all jobs of this run until none is listed this many times in a row."""
        clean, failure = 0, ""
        for attempt in range(TRIES):
            try:
                left = [id for id, job in (await self._queue.jobs()).items() if job.wanted]
                clean, failure = 0 if left else clean + 1, f"{len(left)} were just canceled"
                if left:
                    await self._queue.cancel(left)
            except OSError as e:
                clean, failure = 0, str(e)
            if clean >= times:
                return
            if attempt < TRIES - 1:
                await asyncio.sleep(backoff.delay_s(attempt, first_s=min(0.5, self._poll_s)))
        if not clean:
            self._stuck("jobs", f"jobs of this run may be left: {failure}")

    def _stuck(self, worker: str, error: str) -> None:
        self.on_event("stuck", worker=worker, pid=0, error=error)

    async def _spawn(self, name: str, lease: Lease) -> Handle:
        future = self._wanted[name] = asyncio.get_running_loop().create_future()
        if self._gathering is None:
            self._gathering = asyncio.create_task(self._submit_wanted(), name="submitting jobs")
        return await future  # if this is canceled, the job belongs to no worker

    async def _submit_wanted(self) -> None:
        await asyncio.sleep(GATHER_S)
        self._gathering, wanted, self._wanted = None, self._wanted, {}
        wanted = {name: future for name, future in wanted.items() if not future.done()}
        parts = [wanted] if self._queue.together else [{name: future} for name, future in wanted.items()]
        for part in filter(None, parts):
            task = asyncio.create_task(self._submit(part), name="submitting jobs")
            self._submissions.add(task)
            task.add_done_callback(self._submissions.discard)

    async def _submit(self, wanted: Mapping[str, asyncio.Future[Handle]]) -> None:
        try:
            ids = await self._queue.submit(list(wanted))
        except Exception as e:  # raised by the spawns of these workers
            for future in wanted.values():
                if not future.done():
                    future.set_exception(e)
            return
        for name, future in wanted.items():
            if not future.done():
                future.set_result(self._watch(name, ids[name]))

    def _watch(self, name: str, id: str) -> Handle:
        def send(number: int) -> None:
            watched.signal = number
            self._asked.set()

        digits = "".join(itertools.takewhile(str.isdecimal, id))
        handle = Handle(name=name, pid=int(digits or 0), send=send, kill_timeout_s=KILL_TIMEOUT_S, waiting=True)
        watched = self._watched[id] = _Watched(handle)
        return handle

    async def _poll(self) -> None:
        failures = 0
        while True:
            retry = any(w.signal for w in self._watched.values())
            wait_s = backoff.delay_s(failures, first_s=self._poll_s, limit_s=10 * self._poll_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(0.5, wait_s) if retry else wait_s):
                    await self._asked.wait()
            self._asked.clear()
            known, submitting = list(self._watched.items()), bool(self._submissions)
            orphans: list[str] = []
            try:
                jobs = await self._queue.jobs()
                failures = 0
            except Exception as e:  # a failed query, whatever the reason
                failures += 1
                if failures == REPORTED_FAILURES:
                    self._stuck("jobs", f"{failures} queries of the job queue have failed: {type(e).__name__}: {e}")
            else:
                for id, watched in known:
                    self._update(id, watched, jobs.get(id))
                if not submitting and not self._submissions:
                    orphans = [id for id, job in jobs.items() if job.wanted and id not in self._watched]
            await self._end_jobs(orphans)

    def _update(self, id: str, watched: _Watched, job: ClusterJob | None) -> None:
        watched.missing = watched.missing + 1 if job is None else 0
        watched.job = job or watched.job
        if job is not None and job.code is None and not job.waiting:
            watched.handle.runs()
        code = job.code if job is not None else -signal.SIGKILL if watched.missing >= MISSING else None
        if code is not None:
            del self._watched[id]
            watched.handle.ended(code)

    async def _end_jobs(self, orphans: Sequence[str]) -> None:
        """Drain and cancel the jobs that are to end. What fails is repeated with the next query."""
        asked = {id: (watched, watched.signal) for id, watched in self._watched.items() if watched.signal}
        runs = {id for id, (watched, _) in asked.items() if watched.job is not None and not watched.job.waiting}
        drained = [id for id, (_, number) in asked.items() if number == signal.SIGTERM and id in runs]
        canceled = [*(id for id in asked if id not in drained), *orphans]
        for watched, _ in asked.values():
            watched.signal = 0
        try:
            if drained:
                await self._queue.drain(drained)
            if canceled:
                await self._queue.cancel(canceled)
            self._failures = {}
        except Exception as e:  # any error is reported
            self._failures = {id: self._failures.get(id, 0) + 1 for id in (*asked, *orphans)}
            for watched, number in asked.values():
                watched.signal = watched.signal or number
            for id in [id for id, count in self._failures.items() if count == TRIES]:
                name = asked[id][0].handle.name if id in asked else "jobs"
                self._stuck(name, f"job {id} could not be ended: {type(e).__name__}: {e}")
