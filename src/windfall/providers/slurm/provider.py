"""Workers on a Slurm cluster, by the programs sbatch, squeue and scancel.

- Workers that are wanted at the same time are one job array. A worker is identified by its array task, `4711_3`.
- A requeued task is the same job to Slurm, so it counts as running; its worker joins under a new name.
- Exit statuses come from squeue, which lists ended jobs for a while (MinJobAge, 300 s by default).
"""

from __future__ import annotations

import getpass
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from windfall.providers.job_queue import Job, QueuedRun, command
from windfall.providers.slots import slot_of
from windfall.providers.slurm.script import script
from windfall.providers.slurm.section import Slurm

FIX = "Run windfall on a login node of the cluster, where sbatch works."
WAITING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "CONFIGURING"}
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL", "REVOKED"}
LOST = {"NODE_FAIL", "PREEMPTED"}
"""States of a task whose machine was taken away. With --requeue, Slurm starts it again."""


@dataclass(kw_only=True, eq=False)
class SlurmQueue(QueuedRun):
    name = "slurm"
    prefix = "slurm"
    together = True

    source: Slurm
    _submissions: int = 0

    async def submit(self, workers: Sequence[str]) -> Mapping[str, str]:
        text = script(
            self.source,
            label=self.label,
            url=await self.url(),
            workers=workers,
            log=str(self.folder / "slurm-%A_%a.log"),
        )
        self._submissions += 1
        path = self.folder / f"slurm-{self._submissions}.sh"
        path.write_text(text)
        out = await _run("sbatch", "--parsable", str(path), env={**os.environ, **self.secrets})
        array = out.strip().partition(";")[0]  # with several clusters: id;cluster
        return {worker: f"{array}_{slot_of(worker)}" for worker in workers}

    async def states(self, ids: Iterable[str]) -> Mapping[str, Job]:
        # By name: squeue fails for a list of ids if one of them has expired.
        out = await _run(
            "squeue",
            "--noheader",
            "--array",
            "--states=all",
            f"--name={self.label}",
            f"--user={getpass.getuser()}",
            "--Format=ArrayJobID:|,ArrayTaskID:|,State:|,exit_code:|",
        )
        return parse_states(out)

    async def drain(self, id: str, job: Job | None) -> None:
        if job is not None and not job.waiting:
            await _run("scancel", "--batch", "--signal=TERM", id)
        else:
            await self.cancel(id)

    async def cancel(self, id: str) -> None:
        await _run("scancel", id)

    async def cancel_leftovers(self) -> int:
        await _run("scancel", f"--name={self.label}", f"--user={getpass.getuser()}")
        return 0  # Slurm finds and cancels them in one step


async def _run(*argv: str, env: Mapping[str, str] | None = None) -> str:
    return await command(*argv, where="fleet.slurm", fix=FIX, env=env)


def parse_states(text: str) -> dict[str, Job]:
    """The jobs in the output of squeue.

    >>> parse_states("4711|3|FAILED|768|\\n4711|4|RUNNING|0|\\n")
    {'4711_3': Job(code=3, waiting=False), '4711_4': Job(code=None, waiting=False)}
    """
    jobs: dict[str, Job] = {}
    for line in text.splitlines():
        array, task, state, code, *_ = [*(part.strip() for part in line.split("|")), "", "", "", ""]
        if state in LOST or state in WAITING or state not in ENDED:
            jobs[f"{array}_{task}"] = Job(waiting=state in WAITING or state in LOST)
        else:
            jobs[f"{array}_{task}"] = Job(code=_exit_code(state, code))
    return jobs


def _exit_code(state: str, code: str) -> int:
    """squeue prints an exit status as wait() returns it (768 is status 3), or as `3:0`: status and signal."""
    if ":" in code:
        status, number = (int(part or 0) for part in code.split(":")[:2])
    else:
        raw = int(code) if code.isdecimal() else 0
        status, number = raw >> 8, raw & 0x7F
    if state in ("COMPLETED", "FAILED"):
        return -number if number else status
    return -signal.SIGKILL
