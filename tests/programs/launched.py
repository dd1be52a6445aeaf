"""Agents for tests of the launcher. They do not call a policy."""

from __future__ import annotations

import contextlib
import os
import re
import signal
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


def keys_in_memory() -> list[str]:
    """All keys that can be found in the memory of this process."""
    pattern, found = re.compile(b"sk" + b"-[0-9A-Z]{20}"), set[str]()
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, rights = line.split()[:2]
            start, end = (int(word, 16) for word in span.split("-"))
            if rights.startswith("rw"):
                with contextlib.suppress(OSError, OverflowError, ValueError):
                    memory.seek(start)
                    found |= {key.decode() for key in pattern.findall(memory.read(end - start))}
    return sorted(found)


def kill_reaper(path: str) -> float:
    """Leave a process behind, and kill the one that would see to it."""
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(path).write_text(f"{left.pid} {os.getppid()} {os.getpid()}")
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60.0)
    return 0.5


def folder() -> str:
    return os.getcwd()


def signals(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    return True
