"""`sky jobs launch`, `queue` and `cancel` with managed jobs that are real processes here. State: files in $FAKE_SKY.

What is like SkyPilot: secrets from the environment, restarts of a failing job up to max_restarts_on_errors, the states
and the JSON of the queue.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STATE = Path(os.environ.get("FAKE_SKY", "/nonexistent"))


def write(job: str, **fields: object) -> None:
    path = STATE / f"{job}.json"
    temporary = STATE / f".{job}.{os.getpid()}"
    temporary.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **fields}))
    temporary.replace(path)


def new_number() -> int:
    """Launches run at the same time, and no two jobs may have one number."""
    number = 1
    while True:
        try:
            (STATE / f"{number}.taken").touch(exist_ok=False)
        except FileExistsError:
            number += 1
        else:
            return number


def launch(arguments: list[str]) -> None:
    task = json.loads(Path(arguments[-1]).read_text())
    name = arguments[arguments.index("--name") + 1]
    secret = arguments[arguments.index("--secret") + 1]
    if secret not in os.environ:
        sys.exit(f"no secret {secret}")
    number = new_number()
    write(f"{number}", job_id=number, job_name=name, status="PENDING", task=task)
    subprocess.Popen(
        [sys.executable, "-S", __file__, "controller", str(number)], start_new_session=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    if (STATE / "slow_launch").exists():
        time.sleep(60)
    print(f"Managed job submitted, ID: {number}")


def controller(number: str) -> None:
    task = json.loads((STATE / f"{number}.json").read_text())["task"]
    left = task["resources"]["job_recovery"]["max_restarts_on_errors"]
    while True:
        shell = subprocess.Popen(["bash", "-c", f"{task['setup']}\n{task['run']}"], start_new_session=True)
        write(number, status="RUNNING")
        while (status := shell.poll()) is None:
            if (STATE / f"{number}.cancel").exists():
                os.killpg(shell.pid, signal.SIGKILL)  # the machine is terminated
                shell.wait()
                write(number, status="CANCELLED")
                return
            time.sleep(0.02)
        if status == 0 or left == 0:
            write(number, status="FAILED" if status else "SUCCEEDED")
            return
        left -= 1
        write(number, status="RECOVERING")


def queue(arguments: list[str]) -> None:
    assert arguments[-2:] == ["--output", "json"]
    rows = [json.loads(p.read_text()) for p in STATE.glob("*.json")]
    print("Fetching managed job statuses...")
    print(json.dumps([{k: r[k] for k in ("job_id", "job_name", "status")} for r in rows], indent=2))


def cancel(arguments: list[str]) -> None:
    numbers = [int(a) for a in arguments if a.isdecimal()]
    if not numbers or (STATE / "no_cancel").exists():
        sys.exit("sky: cannot cancel")
    for path in STATE.glob("*.json"):
        row = json.loads(path.read_text())
        if row["job_id"] in numbers and row["status"] not in ("SUCCEEDED", "CANCELLED", "FAILED"):
            (STATE / f"{row['job_id']}.cancel").touch()


if __name__ == "__main__":
    if sys.argv[1] == "controller":
        controller(sys.argv[2])
    else:
        {"launch": launch, "queue": queue, "cancel": cancel}[sys.argv[2]](sys.argv[3:])
