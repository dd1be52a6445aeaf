"""The output of failing agents in the run's folder: agents.log, and before it agents.log.1, each of limited size."""

from __future__ import annotations

import time
from pathlib import Path

from windfall.envs.failures import EnvFailed
from windfall.processes.output_log import OutputFile

MAX_BYTES = 1 << 20


class AgentLog:
    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._file = OutputFile(str(path), max_bytes)

    def write(self, response: str, error: EnvFailed) -> None:
        """Append what the agent printed last. A disk that is full does not end the run."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        text = f"--- {when} UTC, response {response}: {error.error}\n{error.traceback.rstrip()}\n"
        self._file.write(text.encode(errors="replace"))
