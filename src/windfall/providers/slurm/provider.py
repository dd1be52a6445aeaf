"""Workers on a Slurm cluster, by the programs sbatch, squeue and scancel.

- Workers that are wanted at the same time are one job array, one task per worker: `4711_3` is the id of one.
- `--requeue`: a task whose node fails or that is preempted is started again by Slurm. It is the same job to Slurm, so
  it counts as running; its worker joins under a new name.
- `--signal=B:TERM@...`: the shell gets SIGTERM before the time limit and passes it to the worker, which drains. Slurm
  would otherwise signal only at the limit, and kill 30 s later.
- The token is in the environment of sbatch, which Slurm passes to the job. It is neither in the script nor on a command
  line.
- Exit statuses come from squeue, which lists ended jobs for a while (MinJobAge, 300 s by default).
"""

from __future__ import annotations

import getpass
import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from windfall.errors import WindfallError
from windfall.providers.job_queue import ClusterJob, command
from windfall.providers.slots import slot_of
from windfall.providers.slurm.section import Slurm
from windfall.providers.source_part import Employer
from windfall.providers.worker_command import shell

FIX = "Run windfall on a login node of the cluster, where sbatch works."
WAITING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "CONFIGURING"}
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL", "REVOKED"}
LOST = {"NODE_FAIL", "PREEMPTED"}
"""States of a task whose machine was taken away. With --requeue, Slurm starts it again."""


@dataclass(kw_only=True, eq=False)
class SlurmQueue:
    name = "slurm"
    prefix = "slurm"
    together = True

    source: Slurm
    run: Employer
    _submissions: int = 0

    async def submit(self, workers: Sequence[str]) -> Mapping[str, str]:
        folder = (self.run.folder / "workers").resolve()
        log = str(folder / "slurm-%A_%a.log")
        text = script(self.source, label=self.run.label, url=await self.run.url(), workers=workers, log=log)
        self._submissions += 1
        path = folder / f"slurm-{self._submissions}.sh"
        path.write_text(text)
        out = await _run("sbatch", "--parsable", str(path), env={**os.environ, **self.run.secrets})
        array = out.strip().partition(";")[0]  # with several clusters: id;cluster
        return {worker: f"{array}_{slot_of(worker)}" for worker in workers}

    async def jobs(self) -> Mapping[str, ClusterJob]:
        # By name: squeue fails for a list of ids if one of them has expired.
        columns = "ArrayJobID:|,ArrayTaskID:|,State:|,exit_code:|"
        mine = [f"--name={self.run.label}", f"--user={getpass.getuser()}"]
        return parse_states(await _run("squeue", "--noheader", "--array", "--states=all", *mine, f"--Format={columns}"))

    async def drain(self, ids: Sequence[str]) -> None:
        await _run("scancel", "--batch", "--signal=TERM", *ids)

    async def cancel(self, ids: Sequence[str]) -> None:
        await _run("scancel", *ids)


async def _run(*argv: str, env: Mapping[str, str] | None = None) -> str:
    return await command(*argv, where="fleet.slurm", fix=FIX, env=env)


def parse_states(text: str) -> dict[str, ClusterJob]:
    """The jobs in the output of squeue.

    >>> parse_states("4711|3|FAILED|768|\\n4711|4|RUNNING|0|\\n")["4711_3"]
    ClusterJob(code=3, waiting=False, leaving=False)
    """
    jobs: dict[str, ClusterJob] = {}
    for line in text.splitlines():
        array, task, state, code, *_ = [*(part.strip() for part in line.split("|")), "", "", "", ""]
        if state in ENDED:
            jobs[f"{array}_{task}"] = ClusterJob(code=_exit_code(state, code))
        else:
            jobs[f"{array}_{task}"] = ClusterJob(waiting=state in WAITING | LOST, leaving=state == "COMPLETING")
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


def script(source: Slurm, *, label: str, url: str, workers: Sequence[str], log: str) -> str:
    """The script for these workers. `log`: file for their output, with Slurm's %A and %a."""
    slots = {slot_of(worker): worker for worker in workers}
    names = " ".join(f"[{slot}]={worker}" for slot, worker in sorted(slots.items()))
    name = "${names[$SLURM_ARRAY_TASK_ID]}${SLURM_RESTART_COUNT:+-r$SLURM_RESTART_COUNT}"
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {line}" for line in _directives(source, label, sorted(slots), log)),
        "",
        *([source.setup.strip(), ""] if source.setup.strip() else []),
        "# A worker name is used once, so a requeued worker gets a new one.",
        f"declare -A names=({names})",
        "# SIGTERM comes before the time limit, or when the run needs fewer workers: the worker drains and leaves.",
        """asked=; worker=; trap 'asked=1; [ -z "$worker" ] || kill -TERM "$worker" 2>/dev/null' TERM""",
        f"{shell(source, url, name)} &",
        "worker=$!",
        '[ -z "$asked" ] || kill -TERM "$worker" 2>/dev/null',
        'asked=; wait "$worker"; status=$?',
        'while [ -n "$asked" ]; do asked=; wait "$worker"; status=$?; done',
        'exit "$status"',
    ]
    return "\n".join(lines) + "\n"


def _directives(o: Slurm, label: str, slots: Sequence[int], log: str) -> list[str]:
    given = {
        "job-name": label, "array": _ranges(slots), "partition": o.partition, "account": o.account, "qos": o.qos,
        "constraint": o.constraint, "nodes": "1", "ntasks": "1", "cpus-per-task": str(o.cpus),
        "gres": "" if o.gpus in ("", "0") else f"gpu:{o.gpus}",
        "mem": f"{round(o.memory_gib * 1024)}M" if o.memory_gib else "",
        "time": str(o.time_limit_min), "signal": f"B:TERM@{o.warning_s}", "open-mode": "append", "output": log,
        "export": "ALL",
    }  # fmt: skip
    for key, value in [*given.items(), *(option.lstrip("-").partition("=")[::2] for option in o.options)]:
        if "\n" in key + value:
            fix = "Write it on one line."
            raise WindfallError(
                f"{value or key!r} has a line break", where=f"fleet.slurm, option --{key} of sbatch", fix=fix
            )
    lines = [f"--{key}={shlex.quote(value)}" for key, value in given.items() if value]
    return [*lines, "--requeue", *o.options]


def _ranges(numbers: Sequence[int]) -> str:
    """
    >>> _ranges([1, 2, 3, 7])
    '1-3,7'
    """
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][-1] == n - 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
