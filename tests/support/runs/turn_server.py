"""A turn server in a thread of the test, and processes that take turns from it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from windfall.turns.client import SharedDevice
from windfall.turns.server import TurnServer
from windfall.turns.server_thread import TurnServerThread

WAIT_S = 30.0
T = TypeVar("T")


def until(done: Callable[[], T], what: str) -> T:
    """The first true value. Fails after WAIT_S."""
    end_s = time.monotonic() + WAIT_S
    while not (found := done()):
        assert time.monotonic() < end_s, f"waited {WAIT_S:g} s for {what}"
        time.sleep(0.005)
    return found


class Served:
    """A server with the jobs a, b and c, whose keys are key-a, key-b and key-c."""

    def __init__(self, path: Path, devices: tuple[str, ...] = ("gpu",), **options: Any) -> None:
        self.path, self.devices, self.options = path, devices, options
        self.turns: list[dict[str, Any]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.start()

    def start(self) -> None:
        self.server = TurnServer(
            self.devices, log=self.turns.append, on_event=lambda *event: self.events.append(event), **self.options
        )
        for job in "abc":
            self.server.register(f"key-{job}", job)
        self._thread = TurnServerThread(self.server)
        self._thread.start(self.path)

    def stop(self) -> None:
        self._thread.close()

    def call(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """The result of the function, which is called in the server's thread."""
        return self._thread.call(function, *args, **options)

    def snapshot(self) -> dict[str, Any]:
        return self.call(self.server.snapshot)

    def holder(self, device: str = "gpu") -> str:
        return self.snapshot()["devices"][device]["job"]

    def waiting(self, device: str = "gpu") -> list[str]:
        return [turn["job"] for turn in self.snapshot()["devices"][device]["waiting"]]

    def client(self, job: str, kind: Any = "rollout", device: str = "gpu") -> SharedDevice:
        return SharedDevice(str(self.path), f"key-{job}", kind, device)

    def process(self, program: str, job: str, kind: str = "rollout", devices: str = "gpu") -> subprocess.Popen[str]:
        """A process that runs this program with `turn`; its lines can be read from `stdout`."""
        head = f"from windfall.turns.client import of_environment\nturn = of_environment({kind!r})\n"
        names = {"WINDFALL_TURNS": str(self.path), "WINDFALL_TURN_KEY": f"key-{job}", "WINDFALL_TURN_DEVICES": devices}
        return subprocess.Popen(
            [sys.executable, "-uc", head + program],
            env={**os.environ, **names},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@contextlib.contextmanager
def served(path: Path, devices: tuple[str, ...] = ("gpu",), **options: Any) -> Iterator[Served]:
    own = Served(path, devices, **options)
    try:
        yield own
    finally:
        own.stop()
