"""The output of failing agents in the run's folder: agents.log, and before it agents.log.1, each of limited size."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from windfall.envs.failures import EnvFailed

MAX_BYTES = 1 << 20


class AgentLog:
    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path, self._max_bytes = path, max_bytes

    def write(self, response: str, error: EnvFailed) -> None:
        """Append what the agent printed last. A disk that is full does not end the run."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        with contextlib.suppress(OSError):
            if self.path.exists() and self.path.stat().st_size > self._max_bytes:
                self.path.replace(self.path.with_name(f"{self.path.name}.1"))
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"--- {when} UTC, response {response}: {error.error}\n{error.traceback.rstrip()}\n")
