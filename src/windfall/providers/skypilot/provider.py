"""Workers from clouds through SkyPilot's command line: `sky jobs launch`, `sky jobs queue` and `sky jobs cancel`.

- One managed job per worker, on a spot machine with an on-demand one as fallback. Not one job with many nodes: after a
  preemption SkyPilot replaces all machines of a job.
- A job is identified by its name, which contains the label of the run and the name of the worker. Jobs are canceled by
  their numbers: `sky jobs cancel --name` refuses a name that two jobs have.
- A launch that failed, or took too long, may still have started its job. If the queue lists the job, it is used.
  Otherwise it is canceled when the queue lists it (job_queue.py).
- SkyPilot recovers preempted machines, also in other regions. It restarts a failed worker at most `max_restarts` times.
  A job whose worker failed more often (FAILED, FAILED_SETUP) is not started again: each start costs the boot of a
  machine. A job is replaced if SkyPilot found no machine for it or lost its controller, or if it succeeded (its worker
  has drained). A worker that finds no controller ends its job as if it had succeeded: SkyPilot would otherwise start
  machines for a run that is dead.
- SkyPilot cannot send a signal to a worker, so a worker that is no longer needed is canceled. Its responses continue
  elsewhere.
- The token is a SkyPilot secret, given by `sky jobs launch --secret`; it is not in the file.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from windfall.processes.process import EXIT_NO_CONTROLLER, EXIT_REFUSED
from windfall.providers.job_queue import COMMAND_TIMEOUT_S, ClusterJob, command
from windfall.providers.skypilot.section import SkyPilot
from windfall.providers.source_part import Employer
from windfall.providers.worker_command import TLS_PIN, TOKEN, shell

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
class SkyPilotQueue:
    name = "skypilot"
    prefix = "sky"
    together = False

    source: SkyPilot
    run: Employer
    _launches: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LAUNCHES))

    async def submit(self, workers: Sequence[str]) -> Mapping[str, str]:
        url, secrets = await self.run.url(), self.run.secrets
        folder = (self.run.folder / "workers").resolve()
        ids = {worker: f"{self.run.label}-{worker.replace('.', '-')}" for worker in workers}
        for worker, job in ids.items():
            described = task(self.source, url=url, worker=worker, certificate=secrets.get(TLS_PIN, ""))
            path = folder / f"{job}.yaml"
            path.write_text(json.dumps(described, indent=2))  # JSON is YAML
            launch = ["sky", "jobs", "launch", "--yes", "--detach-run", "--name", job, "--secret", TOKEN, str(path)]
            env = {**os.environ, TOKEN: secrets[TOKEN]}
            try:
                async with self._launches:
                    await _run(*launch, env=env, timeout_s=LAUNCH_TIMEOUT_S)
            except OSError:
                if not _live(await self._rows(), job):
                    raise
        return ids

    async def jobs(self) -> Mapping[str, ClusterJob]:
        return parse_states(await self._rows())

    async def _rows(self) -> list[dict[str, Any]]:
        rows = parse_queue(await _run("sky", "jobs", "queue", "--all", "--output", "json"))
        return [row for row in rows if str(row.get("job_name")).startswith(f"{self.run.label}-")]

    async def drain(self, ids: Sequence[str]) -> None:
        await self.cancel(ids)

    async def cancel(self, ids: Sequence[str]) -> None:
        rows = await self._rows()
        if numbers := [str(number) for id in ids for number in _live(rows, id)]:
            await _run("sky", "jobs", "cancel", "--yes", *numbers)


def task(source: SkyPilot, *, url: str, worker: str, certificate: str = "") -> dict[str, Any]:
    """The task as SkyPilot reads it from YAML. `worker`: the name of the worker."""
    spot = source.kind == "spot"
    given = {"infra": source.infra, "cpus": source.cpus, "image_id": source.image}
    resources: dict[str, Any] = {key: value for key, value in given.items() if value}
    # SkyPilot does not take a list of accelerators beside any_of, so every combination is an alternative.
    asked = [source.accelerators] if isinstance(source.accelerators, str) else source.accelerators
    gpus = [{"accelerators": gpu} for gpu in asked if gpu] or [{}]
    terms = [True, False] if spot and source.fallback else [spot]
    resources["any_of"] = [{**gpu, "use_spot": use_spot} for use_spot in terms for gpu in gpus]
    resources["job_recovery"] = {"max_restarts_on_errors": source.max_restarts}
    name = f"{worker}-r$(date +%s)"
    return {
        "name": worker,
        "resources": resources,
        **({"envs": {TLS_PIN: certificate}} if certificate else {}),
        **({"setup": source.setup} if source.setup else {}),
        "run": f"# A recovered worker is a new worker, so its name contains the time.\n{shell(source, url, name)}\n"
        f'status=$?; if [ "$status" = {EXIT_NO_CONTROLLER} ]; then exit 0; fi; exit "$status"\n',
    }


async def _run(*argv: str, env: Mapping[str, str] | None = None, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    return await command(*argv, where="fleet.skypilot", fix=FIX, env=env, timeout_s=timeout_s)


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


def parse_states(rows: Iterable[dict[str, Any]]) -> dict[str, ClusterJob]:
    """The jobs by name. Of several with one name, the newest that has not ended counts, otherwise the newest.

    >>> parse_states([{"job_id": 1, "job_name": "a", "status": "FAILED"}])
    {'a': ClusterJob(code=3, waiting=False, leaving=False)}
    """

    def rank(row: dict[str, Any]) -> tuple[bool, int]:
        return _exit_code(str(row.get("status") or "")) is None, row.get("job_id") or 0

    jobs: dict[str, ClusterJob] = {}
    for row in sorted(rows, key=rank):
        status = str(row.get("status") or "")
        jobs[str(row.get("job_name"))] = ClusterJob(_exit_code(status), status in WAITING, status == CANCELING)
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
