"""Workers as jobs of a batch system: submitted, watched by polling, and ended by the system's own commands.

    JobProvider ── spawn(name) ──▶ JobSpawner ── submit(names) ──▶ JobQueue (Slurm, SkyPilot)
                                       └──── states() every poll_s ────┘

- Workers that are wanted at the same time are submitted together.
- A waiting job counts as started: the system decides when it runs.
- A job that is missing from three answers in a row has been lost. A query that fails changes nothing, whatever the
  error; errors that last are reported.
- A submission that failed may still have started jobs. SkyPilot's are looked for and canceled during the run, because
  each has its worker's name; Slurm's at the end of the run.
- Jobs that are left at the start or at the end are canceled until the system lists none.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

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
"""Number of answers without a job after which it counts as lost."""
COMMAND_TIMEOUT_S = 120.0
TRIES = 4
"""Attempts to end a job, 0.5 s, 1 s and 2 s apart. Jobs that are left get the same number of attempts."""
REPORTED_FAILURES = 5
"""Number of failed queries in a row after which they are reported."""
KILL_TIMEOUT_S = 90.0
"""Seconds that the system has to end a job. Slurm itself waits 30 s between SIGTERM and SIGKILL."""


@dataclass(frozen=True, slots=True)
class Job:
    """The state of a job. `code`: None until it has ended; then its exit status, or the negative number of a signal."""

    code: int | None = None
    waiting: bool = False


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

    async def states(self, ids: Iterable[str]) -> Mapping[str, Job]: ...

    async def drain(self, id: str, job: Job | None) -> None:
        """Ask the worker to leave. `job`: its last known state."""
        ...

    async def cancel(self, id: str) -> None: ...

    async def cancel_leftovers(self) -> int:
        """Cancel all jobs of this run. Returns how many it found; 0: none is left, or all are being canceled."""
        ...


def check_program(name: str, *, where: str, fix: str) -> None:
    if shutil.which(name) is None:
        raise WindfallError(f"program '{name}' not found", where=where, fix=fix)


@dataclass(kw_only=True, eq=False)
class QueuedRun:
    """What the queue of every batch system needs to know about a run."""

    label: str
    """The name of its jobs, or how their names begin."""
    folder: Path
    """Where the files that are submitted go, and the logs of workers."""
    url: Callable[[], Awaitable[str]]
    """Waits for the address of the controller."""
    secrets: Mapping[str, str]


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
        out, err = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError as e:
        raise OSError(f"waited {timeout_s:g} s for {' '.join(argv[:3])}") from e
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    if process.returncode:
        said = (err or out).decode(errors="replace").strip().splitlines()
        raise OSError(f"{argv[0]} failed with status {process.returncode}: {said[-1] if said else 'no message'}")
    return out.decode(errors="replace")


@dataclass(slots=True)
class _Watched:
    handle: Handle
    job: Job | None = None
    missing: int = 0
    """Number of answers in a row that did not contain the job."""


class JobSpawner:
    """Used as `async with`. `spawn` has the interface that providers need."""

    def __init__(self, queue: JobQueue, *, poll_s: float, on_event: OnEvent = ignore_event) -> None:
        self._queue = queue
        self._poll_s = poll_s
        self._on_event = on_event
        self._wanted: dict[str, asyncio.Future[str]] = {}
        self._submission: asyncio.Task[None] | None = None
        self._watched: dict[str, _Watched] = {}
        self._polling: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._submissions: set[asyncio.Task[None]] = set()
        """Submissions that are under way."""
        self._unsure = False
        """A submission has failed, so there may be jobs that are not known here."""

    def restart_delay(self) -> backoff.RestartDelay:
        """The back-off between two jobs of a slot. Its times are multiples of the time between two queries, because the
        age of a job is not known more exactly."""
        return backoff.RestartDelay(first_s=self._poll_s, young_s=15 * self._poll_s, limit_s=30 * self._poll_s)

    async def __aenter__(self) -> Self:
        await self._cancel_leftovers()
        self._polling = asyncio.create_task(self._poll(), name="polling the job queue")
        self._polling.add_done_callback(report_failure)
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [t for t in (self._polling, self._submission, *self._submissions) if t is not None]
        self._unsure |= bool(self._submissions)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._tasks, return_exceptions=True)
        try:
            await self._cancel_leftovers()
        except WindfallError as e:
            self._stuck("jobs", f"jobs of this run may be left: {e}")

    async def _cancel_leftovers(self) -> None:
        """Cancel all jobs of this run until none is listed; twice, if a submission may still be on its way."""
        clean, failure = 0, ""
        for attempt in range(TRIES):
            try:
                found = await self._queue.cancel_leftovers()
                clean, failure = clean + 1 if not found else 0, f"{found} were just canceled"
            except OSError as e:
                clean, failure = 0, str(e)
            if clean > self._unsure:
                return
            if attempt < TRIES - 1:
                await asyncio.sleep(backoff.delay_s(attempt, first_s=min(0.5, self._poll_s)))
        if not clean:
            self._stuck("jobs", f"jobs of this run may be left: {failure}")

    def _stuck(self, worker: str, error: str) -> None:
        self._on_event("stuck", worker=worker, pid=0, error=error)

    async def spawn(self, name: str, lease: Lease) -> Handle:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._wanted[name] = future
        if self._submission is None:
            self._submission = asyncio.create_task(self._submit(), name="submitting jobs")
        try:
            id = await asyncio.shield(future)
        except asyncio.CancelledError:
            if self._wanted.pop(name, None) is None:  # it is being submitted, so it must be canceled afterwards
                future.add_done_callback(self._cancel_unwanted)
            raise
        digits = "".join(itertools.takewhile(str.isdecimal, id))
        handle = Handle(
            name=name,
            pid=int(digits or 0),
            send=lambda number: self._send(id, number),
            kill_timeout_s=KILL_TIMEOUT_S,
            waiting=True,
        )
        self._watched[id] = _Watched(handle)
        return handle

    async def _submit(self) -> None:
        await asyncio.sleep(GATHER_S)
        self._submission, wanted, self._wanted = None, self._wanted, {}
        parts = [wanted] if self._queue.together else [{name: future} for name, future in wanted.items()]
        for part in parts:
            if part:
                task = asyncio.create_task(self._submit_part(part), name="submitting jobs")
                self._submissions.add(task)
                task.add_done_callback(self._submissions.discard)

    async def _submit_part(self, wanted: Mapping[str, asyncio.Future[str]]) -> None:
        try:
            ids = await self._queue.submit(list(wanted))
            for name, future in wanted.items():
                future.set_result(ids[name])
        except Exception as e:  # raised by the spawns of these workers
            self._unsure = True
            for future in wanted.values():
                if not future.done():
                    future.set_exception(e)
                    future.exception()  # retrieved here, in case the spawn was canceled

    def _cancel_unwanted(self, future: asyncio.Future[str]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._start(self._try_repeatedly(self._queue.cancel, future.result()))

    def _send(self, id: str, number: int) -> None:
        watched = self._watched.get(id)
        if number == signal.SIGKILL:
            self._start(self._try_repeatedly(self._queue.cancel, id))
        elif number == signal.SIGTERM:
            self._start(self._try_repeatedly(self._queue.drain, id, watched.job if watched else None))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _try_repeatedly(self, call: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        id, failure = arguments[0], ""
        for attempt in range(TRIES):
            try:
                await call(*arguments)
                return
            except Exception as e:  # any error is reported below
                failure = f"{type(e).__name__}: {e}"
            if attempt < TRIES - 1:
                await asyncio.sleep(backoff.delay_s(attempt, first_s=0.5))
        watched = self._watched.get(id)
        self._stuck(watched.handle.name if watched else id, f"job {id} could not be ended: {failure}")

    async def _poll(self) -> None:
        failures = 0
        while True:
            await asyncio.sleep(backoff.delay_s(failures, first_s=self._poll_s, limit_s=10 * self._poll_s))
            if not self._watched and not self._unsure:
                continue
            asked = list(self._watched.items())
            try:
                jobs = await self._queue.states([id for id, _ in asked])
                failures = 0
            except Exception as e:  # a failed query, whatever the reason
                failures += 1
                if failures == REPORTED_FAILURES:
                    self._stuck("jobs", f"{failures} queries of the job queue have failed: {type(e).__name__}: {e}")
                continue
            for id, watched in asked:
                self._update(id, watched, jobs.get(id))

    def _update(self, id: str, watched: _Watched, job: Job | None) -> None:
        watched.missing = watched.missing + 1 if job is None else 0
        watched.job = job or watched.job
        if job is not None and job.code is None and not job.waiting:
            watched.handle.runs()
        code = job.code if job is not None else -signal.SIGKILL if watched.missing >= MISSING else None
        if code is not None:
            del self._watched[id]
            watched.handle.ended(code)


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
        self._jobs = JobSpawner(queue, poll_s=poll_s, on_event=on_event)
        super().__init__(
            self._jobs.spawn,
            source.workers,
            terms=source.lease,
            on_event=on_event,
            grace_s=grace_s,
            prefix=queue.prefix,
            delay=self._jobs.restart_delay,
            patient=True,
        )

    async def run(self) -> None:
        async with self._jobs:
            await super().run()
