"""sbatch, squeue and scancel that run array tasks as real processes on this machine. State: files in $FAKE_SLURM.

What is like Slurm: directives in the script, one process group per task, --signal before the time limit, SIGTERM and
then SIGKILL by scancel, requeueing with SLURM_RESTART_COUNT after a node failure, exit statuses as wait() returns them.
A minute of a time limit lasts $FAKE_SLURM_MINUTE_S seconds; a node fails when a file `ID_TASK.nodefail` is written.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

STATE = Path(os.environ.get("FAKE_SLURM", "/nonexistent"))
KILL_WAIT_S = 0.5


def write(task: str, **fields: object) -> None:
    path = STATE / f"{task}.json"
    temporary = STATE / f".{task}.{os.getpid()}"
    temporary.write_text(json.dumps({**read(task), **fields}))
    temporary.replace(path)


def read(task: str) -> dict:
    path = STATE / f"{task}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def sbatch(arguments: list[str]) -> None:
    if "--parsable" not in arguments:
        sys.exit("sbatch: this one prints only --parsable")
    script = Path(arguments[-1])
    text = script.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.MULTILINE))
    if options.get("partition") == "nowhere":
        sys.exit("sbatch: error: invalid partition specified: nowhere")
    number = 1 + len(list(STATE.glob("*.sh")))
    copy = STATE / f"{number}.sh"
    copy.write_text(text)
    for part in options["array"].split(","):
        first, _, last = part.partition("-")
        for index in range(int(first), int(last or first) + 1):
            task = f"{number}_{index}"
            write(task, state="PENDING", code=0, pid=0, name=options["job-name"], options=options)
            subprocess.Popen(
                [sys.executable, "-S", __file__, "stepd", task], start_new_session=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
    print(number)


def stepd(task: str) -> None:
    """Runs one array task, again and again if its node fails."""
    number, index = task.split("_")
    options, restarts = read(task)["options"], 0
    while not (STATE / f"{task}.cancel").exists():
        env = {**os.environ, "SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": index}
        if restarts:
            env["SLURM_RESTART_COUNT"] = str(restarts)
        log = options["output"].replace("%A", number).replace("%a", index)
        with open(log, "ab") as out:
            shell = subprocess.Popen(
                ["bash", str(STATE / f"{number}.sh")], env=env, stdout=out, stderr=out, start_new_session=True
            )
        write(task, state="RUNNING", pid=shell.pid)
        if watch(task, shell, options) != "NODE_FAIL" or "requeue" not in options:
            return
        restarts += 1
        write(task, state="PENDING", pid=0)
        time.sleep(0.2)
    write(task, state="CANCELLED")


def watch(task: str, shell: subprocess.Popen, options: dict) -> str:
    minute_s = float(os.environ.get("FAKE_SLURM_MINUTE_S", "60"))
    limit = time.monotonic() + float(options["time"]) * minute_s
    what, seconds = re.fullmatch(r"B:(\w+)@(\d+)", options["signal"]).groups()
    warn = limit - int(seconds) * minute_s / 60
    asked = None
    while (status := shell.poll()) is None:
        now = time.monotonic()
        if now >= warn:
            warn = float("inf")
            os.kill(shell.pid, getattr(signal, f"SIG{what}"))  # B: only the shell
        if asked is None and (STATE / f"{task}.cancel").exists():
            asked = now
            os.killpg(shell.pid, signal.SIGTERM)
        if (STATE / f"{task}.nodefail").exists() or now >= limit or (asked and now > asked + KILL_WAIT_S):
            os.killpg(shell.pid, signal.SIGKILL)
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(shell.pid, signal.SIGKILL)
    state = "COMPLETED" if status == 0 else "FAILED"
    if (STATE / f"{task}.nodefail").exists():
        (STATE / f"{task}.nodefail").unlink()
        return "NODE_FAIL"
    if asked is not None:
        state = "CANCELLED"
    elif time.monotonic() >= limit:
        state = "TIMEOUT"
    write(task, state=state, code=status << 8 if status >= 0 else -status, pid=0)
    return state


def squeue(arguments: list[str]) -> None:
    asked = next((a for a in arguments if a.startswith("--name=")), "").removeprefix("--name=")
    if not asked:  # real ones fail for a list of ids as soon as one of them has expired
        sys.exit("slurm_load_jobs error: Invalid job id specified")
    for path in sorted(STATE.glob("*_*.json")):
        number, index = path.stem.split("_")
        row = json.loads(path.read_text())
        if row["name"] == asked:
            print(f"{number}|{index}|{row['state']}|{row['code']}|")


def scancel(arguments: list[str]) -> None:
    name = next((a.removeprefix("--name=") for a in arguments if a.startswith("--name=")), None)
    tasks = [p.stem for p in STATE.glob("*_*.json") if name is not None and read(p.stem)["name"] == name]
    tasks += [a for a in arguments if not a.startswith("-")]
    for task in tasks:
        row = read(task)
        if "--signal=TERM" in arguments and "--batch" in arguments:
            if row["pid"]:
                os.kill(row["pid"], signal.SIGTERM)
        elif row["state"] in ("PENDING", "RUNNING"):
            (STATE / f"{task}.cancel").touch()


if __name__ == "__main__":
    tool, *rest = sys.argv[1:]
    stepd(rest[0]) if tool == "stepd" else {"sbatch": sbatch, "squeue": squeue, "scancel": scancel}[tool](rest)
