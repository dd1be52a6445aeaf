"""`windfall worker --gpus`: real worker processes, on the CPU instead of GPUs. They look for a controller that is not
there. Not covered: real GPUs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from windfall.devices import Place
from windfall.errors import WindfallError
from windfall.worker.worker_group import find_places

WAIT_S = 60.0
CODE = """
import sys
from windfall.devices import Place
from windfall.worker import worker_group
places = {"0": Place(gpu="7"), "2": Place(gpu="GPU-x")}
options = {"--join": sys.argv[1], "--clouds": "none", "--patience": sys.argv[2], "--threads": 1}
sys.exit(worker_group.main(places, options, name="node", token="0123456789abcdefXYZ-_"))
"""


def test_places_are_those_of_the_option() -> None:
    for gpus, found in (("all", {"0": "5", "1": "3"}), ("1", {"1": "3"})):
        places = find_places(gpus, {"CUDA_VISIBLE_DEVICES": "5,3"}, installed=8)
        assert places == {key: Place(device="cuda", gpu=gpu) for key, gpu in found.items()}


@pytest.mark.parametrize(
    ("gpus", "installed", "why"),
    [("all", 0, "has 0 GPUs"), ("0,4", 4, "has 4 GPUs"), ("0,0", 4, "not a list"), ("a", 4, "not a list")],
)
def test_impossible_places_are_refused(gpus: str, installed: int, why: str) -> None:
    with pytest.raises(WindfallError, match=why):
        find_places(gpus, {}, installed=installed)


def wait_for(holds: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (found := holds()):
        assert time.monotonic() < deadline, f"waited {WAIT_S:g} s until {what}"
        time.sleep(0.05)
    return found


class Group:
    def __init__(self, patience_s: float) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", CODE, url, str(patience_s)], stderr=subprocess.PIPE, text=True
        )

    def workers(self) -> dict[str, int]:
        """Pids of the worker processes that have reached their main program, by name."""
        found = {}
        for folder in Path("/proc").iterdir():
            try:
                if not folder.name.isdecimal() or self._parent(folder) != self.process.pid:
                    continue
                command = (folder / "cmdline").read_text().split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if "windfall.run.cli" in command and "--name" in command and not any("parent_death" in c for c in command):
                found[command[command.index("--name") + 1]] = int(folder.name)
        return found

    @staticmethod
    def _parent(folder: Path) -> int:
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])

    def both(self) -> dict[str, int]:
        return wait_for(lambda: len(w := self.workers()) == 2 and w, "two workers run")

    def dialing(self, pid: int) -> bool:
        """Whether the worker handles SIGTERM, which it does before it dials."""
        status = Path(f"/proc/{pid}/status").read_text()
        caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
        return bool(caught >> (signal.SIGTERM - 1) & 1)


@pytest.fixture
def start() -> Iterator[Callable[..., Group]]:
    started: list[Group] = []

    def make(patience_s: float = 300.0) -> Group:
        started.append(Group(patience_s))
        return started[-1]

    yield make
    for group in started:
        group.process.kill()
        group.process.communicate()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_killed_worker_is_restarted_and_sigterm_drains_all(start: Callable[..., Group]) -> None:
    group = start()
    first = group.both()
    assert set(first) == {"node-0", "node-2"}
    seen = {name: Path(f"/proc/{pid}/environ").read_text().split("\0") for name, pid in first.items()}
    assert "CUDA_VISIBLE_DEVICES=7" in seen["node-0"]
    assert "CUDA_VISIBLE_DEVICES=GPU-x" in seen["node-2"]
    assert all("0123456789" not in Path(f"/proc/{pid}/cmdline").read_text() for pid in first.values())
    os.kill(first["node-0"], signal.SIGKILL)
    second = wait_for(
        lambda: (w := group.workers()).get("node-0") not in (None, first["node-0"]) and w, "another is started"
    )
    assert second["node-2"] == first["node-2"], "the other one is left alone"
    wait_for(lambda: all(group.dialing(pid) for pid in second.values()), "they dial")
    group.process.terminate()
    _, said = group.process.communicate(timeout=WAIT_S)
    assert group.process.returncode == 0, said
    assert "node-0: was killed (SIGKILL); restarting in 0.2 s" in said
    assert "node-2: warned by sigterm" in said
    assert not any(alive(pid) for pid in second.values())


def test_workers_die_with_a_killed_group(start: Callable[..., Group]) -> None:
    group = start()
    workers = group.both()
    group.process.kill()
    wait_for(lambda: not any(alive(pid) for pid in workers.values()), "the workers are dead")


def test_group_ends_when_no_worker_finds_a_controller(start: Callable[..., Group]) -> None:
    group = start(patience_s=1.0)
    _, said = group.process.communicate(timeout=WAIT_S)
    assert group.process.returncode == 5, said
    assert "node-2: waited 1 s for a controller" in said
    assert "restarting" not in said
