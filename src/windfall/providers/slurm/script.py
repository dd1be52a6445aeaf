"""The batch script of Slurm workers: one array task per worker.

- `--requeue`: a task whose node fails or that is preempted is started again by Slurm, under a new worker name.
- `--signal=B:TERM@...`: the shell gets SIGTERM before the time limit and passes it to the worker, which drains. Slurm
  would otherwise signal only at the limit, and kill 30 s later.
- The token is in the environment of sbatch, which Slurm passes to the job. It is neither in the script nor on a command
  line.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from windfall.errors import WindfallError
from windfall.providers.slots import slot_of
from windfall.providers.worker_command import WorkerCommand
from windfall.recipe.worker_sources import Slurm


def script(options: Slurm, command: WorkerCommand, *, label: str, url: str, workers: Sequence[str], log: str) -> str:
    """The script for these workers. `log`: file for their output, with Slurm's %A and %a."""
    slots = {slot_of(worker): worker for worker in workers}
    names = " ".join(f"[{slot}]={worker}" for slot, worker in sorted(slots.items()))
    name = "${names[$SLURM_ARRAY_TASK_ID]}${SLURM_RESTART_COUNT:+-r$SLURM_RESTART_COUNT}"
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {line}" for line in _directives(options, label, sorted(slots), log)),
        "",
        *([options.setup.strip(), ""] if options.setup.strip() else []),
        "# A worker name is used once, so a requeued worker gets a new one.",
        f"declare -A names=({names})",
        "# SIGTERM comes before the time limit, or when the run needs fewer workers: the worker drains and leaves.",
        """asked=; worker=; trap 'asked=1; [ -z "$worker" ] || kill -TERM "$worker" 2>/dev/null' TERM""",
        f"{command.shell(url, name)} &",
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
