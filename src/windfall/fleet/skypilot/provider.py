"""Workers from clouds through SkyPilot's command line: `sky jobs launch`, `sky jobs queue` and `sky jobs cancel`.

- A job is identified by its name, which contains the label of the run and the name of the worker.
- SkyPilot recovers preempted machines. A job that SkyPilot gave up (FAILED...) is not started again: each start costs
  the boot of a machine, and SkyPilot has tried before. A job that succeeded has drained, and is replaced.
- SkyPilot cannot send a signal to a worker, so a worker that is no longer needed is canceled. Its responses continue
  elsewhere.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from windfall.fleet.base import EXIT_REFUSED, OnEvent, ignore_event
from windfall.fleet.job_queue import Job, JobSpawner, command
from windfall.fleet.skypilot.task import SkyPilotOptions, task
from windfall.fleet.slots import SlotProvider
from windfall.fleet.worker_command import TLS_PIN, TOKEN, WorkerCommand

FIX = "pip install 'windfall[skypilot]', or pipx install skypilot; then: sky check"
POLL_S = 20.0
"""Seconds between two queries: each takes SkyPilot several seconds."""
WAITING = {"PENDING", "SUBMITTED", "STARTING", "RECOVERING"}


class SkyPilotQueue:
    def __init__(
        self, options: SkyPilotOptions, worker: WorkerCommand, *, label: str, folder: Path,
        url: Callable[[], Awaitable[str]], secrets: Mapping[str, str],
    ) -> None:  # fmt: skip
        """`folder`: where the task files go."""
        self._options, self._worker, self._label = options, worker, label
        self._folder, self._url, self._secrets = folder.resolve(), url, secrets

    async def submit(self, workers: Sequence[str]) -> Mapping[str, str]:
        url = await self._url()
        ids = {worker: f"{self._label}-{worker.replace('.', '-')}" for worker in workers}
        for worker, job in ids.items():
            described = task(
                self._options, self._worker, url=url, worker=worker, certificate=self._secrets.get(TLS_PIN, "")
            )
            path = self._folder / f"{job}.yaml"
            path.write_text(json.dumps(described, indent=2))  # JSON is YAML
            environment = {**os.environ, TOKEN: self._secrets[TOKEN]}
            await _run(
                "sky", "jobs", "launch", "--yes", "--detach-run", "--name", job, "--secret", TOKEN, str(path),
                env=environment,
            )  # fmt: skip
        return ids

    async def states(self, ids: Iterable[str]) -> Mapping[str, Job]:
        return parse_states(await _run("sky", "jobs", "queue", "--all", "--output", "json"))

    async def drain(self, id: str, job: Job | None) -> None:
        await self.cancel(id)

    async def cancel(self, id: str) -> None:
        await _run("sky", "jobs", "cancel", "--yes", "--name", id)

    async def cancel_leftovers(self) -> None:
        for name, job in (await self.states(())).items():
            if name.startswith(f"{self._label}-") and job.code is None:
                await self.cancel(name)


async def _run(*argv: str, env: Mapping[str, str] | None = None) -> str:
    return await command(*argv, where="fleet.skypilot", fix=FIX, env=env)


def parse_states(text: str) -> dict[str, Job]:
    """The jobs in the output of `sky jobs queue --output json`, by name. The newest of several with one name counts.

    >>> parse_states('[{"job_id": 1, "job_name": "a", "status": "FAILED"}]')
    {'a': Job(code=3, waiting=False)}
    """
    start = text.find("[")
    try:
        rows: list[dict[str, Any]] = json.loads(text[start:]) if start >= 0 else []
    except ValueError as e:
        raise OSError(f"sky jobs queue did not print JSON: {e}") from e
    jobs: dict[str, Job] = {}
    for row in sorted(rows, key=lambda row: row.get("job_id") or 0):
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


class SkyPilotProvider(SlotProvider):
    name = "skypilot"

    def __init__(
        self, queue: SkyPilotQueue, worker: WorkerCommand, count: int, *, on_event: OnEvent = ignore_event,
        poll_s: float = POLL_S, grace_s: float = 60.0,
    ) -> None:  # fmt: skip
        self._jobs = JobSpawner(queue, poll_s=poll_s)
        super().__init__(self._jobs.spawn, count, terms=worker.lease, on_event=on_event, grace_s=grace_s, prefix="sky")

    async def run(self) -> None:
        async with self._jobs:
            await super().run()
