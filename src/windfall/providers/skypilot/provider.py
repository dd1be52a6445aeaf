"""Workers from clouds through SkyPilot's command line: `sky jobs launch`, `sky jobs queue` and `sky jobs cancel`.

- A job is identified by its name, which contains the label of the run and the name of the worker. Jobs are canceled by
  their numbers: `sky jobs cancel --name` refuses a name that two jobs have.
- A launch that failed, or took too long, may still have started its job. If the queue lists the job, it is used.
  Otherwise it is canceled as soon as the queue lists it.
- SkyPilot recovers preempted machines. A job whose worker failed too often (FAILED, FAILED_SETUP) is not started
  again: each start costs the boot of a machine, and SkyPilot has tried before. A job is replaced if SkyPilot found no
  machine for it or lost its controller, or if it succeeded (its worker has drained).
- SkyPilot cannot send a signal to a worker, so a worker that is no longer needed is canceled. Its responses continue
  elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from windfall.processes.process import EXIT_REFUSED
from windfall.providers.job_queue import COMMAND_TIMEOUT_S, Job, QueuedRun, command
from windfall.providers.skypilot.section import SkyPilot
from windfall.providers.skypilot.task import task
from windfall.providers.worker_command import TLS_PIN, TOKEN

FIX = "Install it in an environment of its own: pipx install skypilot; then: sky check"
POLL_S = 20.0
"""Seconds between two queries: each takes SkyPilot several seconds."""
CANCEL_S = 60.0
"""Seconds that a canceled job may take to end before it is canceled again."""
CANCELING = "CANCELLING"
"""As SkyPilot spells it."""
LAUNCH_TIMEOUT_S = 1200.0
"""Seconds that a launch may take. The first one also starts the machine of SkyPilot's job controller."""
LAUNCHES = 4
"""Number of launches at the same time."""
WAITING = {"PENDING", "SUBMITTED", "STARTING", "RECOVERING"}


@dataclass(kw_only=True, eq=False)
class SkyPilotQueue(QueuedRun):
    name = "skypilot"
    prefix = "sky"
    together = False

    source: SkyPilot
    _launches: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LAUNCHES))
    _doubtful: set[str] = field(default_factory=set)
    """Names of jobs whose launch failed, although SkyPilot may still start them."""

    async def submit(self, workers: Sequence[str]) -> Mapping[str, str]:
        url = await self.url()
        ids = {worker: f"{self.label}-{worker.replace('.', '-')}" for worker in workers}
        for worker, job in ids.items():
            described = task(self.source, url=url, worker=worker, certificate=self.secrets.get(TLS_PIN, ""))
            path = self.folder / f"{job}.yaml"
            path.write_text(json.dumps(described, indent=2))  # JSON is YAML
            environment = {**os.environ, TOKEN: self.secrets[TOKEN]}
            try:
                async with self._launches:
                    await _run(
                        "sky",
                        "jobs",
                        "launch",
                        "--yes",
                        "--detach-run",
                        "--name",
                        job,
                        "--secret",
                        TOKEN,
                        str(path),
                        env=environment,
                        timeout_s=LAUNCH_TIMEOUT_S,
                    )
            except OSError:
                self._doubtful.add(job)
                if not _live(await self._rows(), job):
                    raise
                self._doubtful.discard(job)
        return ids

    async def states(self, ids: Iterable[str]) -> Mapping[str, Job]:
        rows = await self._rows()
        if unwanted := [number for name in self._doubtful for number in _live(rows, name)]:
            await _cancel(unwanted)
        return parse_states(rows)

    async def _rows(self) -> list[dict[str, Any]]:
        return parse_queue(await _run("sky", "jobs", "queue", "--all", "--output", "json"))

    async def drain(self, id: str, job: Job | None) -> None:
        await self.cancel(id)

    async def cancel(self, id: str) -> None:
        if numbers := _live(await self._rows(), id):
            await _cancel(numbers)

    async def cancel_leftovers(self) -> int:
        rows = await self._rows()
        names = {str(row.get("job_name")) for row in rows}
        numbers = [n for name in names if name.startswith(f"{self.label}-") for n in _live(rows, name)]
        failure: OSError | None = None
        for number in numbers:
            try:
                await _cancel([number])
            except OSError as e:
                failure = e
        if failure is not None:
            raise failure
        return len(numbers)


async def _run(*argv: str, env: Mapping[str, str] | None = None, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    return await command(*argv, where="fleet.skypilot", fix=FIX, env=env, timeout_s=timeout_s)


async def _cancel(numbers: Iterable[int]) -> None:
    await _run("sky", "jobs", "cancel", "--yes", *(str(number) for number in numbers))


def _live(rows: Iterable[dict[str, Any]], name: str) -> list[int]:
    """Numbers of the jobs with this name that have not ended and are not being canceled."""
    named = [(row.get("job_id"), str(row.get("status") or "")) for row in rows if row.get("job_name") == name]
    return [int(number) for number, status in named if number and status != CANCELING and _exit_code(status) is None]


def parse_queue(text: str) -> list[dict[str, Any]]:
    """The jobs in the output of `sky jobs queue --output json`."""
    lines = text.splitlines(keepends=True)
    start = next((n for n, line in enumerate(lines) if line.startswith(("[{", "[]", "[\n", "[ "))), 0)  # after warnings
    try:
        return json.loads("".join(lines[start:]))
    except ValueError as e:
        raise OSError(f"sky jobs queue did not print JSON: {e}") from e


def parse_states(rows: Iterable[dict[str, Any]]) -> dict[str, Job]:
    """The jobs by name. Of several with one name, the newest that has not ended counts, otherwise the newest.

    >>> parse_states([{"job_id": 1, "job_name": "a", "status": "FAILED"}])
    {'a': Job(code=3, waiting=False)}
    """

    def rank(row: dict[str, Any]) -> tuple[bool, int]:
        return _exit_code(str(row.get("status") or "")) is None, row.get("job_id") or 0

    jobs: dict[str, Job] = {}
    for row in sorted(rows, key=rank):
        status = str(row.get("status") or "")
        jobs[str(row.get("job_name"))] = Job(code=_exit_code(status), waiting=status in WAITING)
    return jobs


def _exit_code(status: str) -> int | None:
    match status:
        case "SUCCEEDED":
            return 0
        case "CANCELLED":
            return -signal.SIGTERM
        case "FAILED_NO_RESOURCE" | "FAILED_CONTROLLER":
            return -signal.SIGKILL
        case _ if status.startswith("FAILED"):
            return EXIT_REFUSED
    return None
