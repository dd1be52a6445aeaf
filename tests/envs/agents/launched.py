"""Agents for tests of the launcher. They do not call a policy."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any


def act(task: dict[str, Any]) -> Any:
    """Do what the task says."""
    return globals()[task["do"]](**task.get("options", {}))


def value(given: Any = 0.5, after_s: float = 0.0) -> Any:
    time.sleep(after_s)
    return given


def fork_and_return() -> float:
    os.fork()
    return 0.5


def write(data: str, to: int = 3) -> float:
    os.write(to, data.encode())
    return 0.5


def escape(path: str, wait_s: float = 0.0) -> float:
    """Leave two processes behind that belong to no group of ours."""
    first = subprocess.Popen(["sleep", "600"], start_new_session=True)
    shell = "setsid sleep 600 > /dev/null 2>&1 & echo $!"
    second = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, start_new_session=True).stdout
    Path(path).write_text(f"{first.pid} {second.strip()} {os.getpid()}")
    time.sleep(wait_s)
    return 0.5


def read(paths: list[str]) -> dict[str, Any]:
    """The reward is the number of files that could be read."""
    found = list[str]()
    for path in paths:
        try:
            found.append(Path(path).read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return {"reward": len(found), "text": "".join(found)}


def folder() -> str:
    return os.getcwd()


def signals(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    return True
