"""NVIDIA's Multi-Process Service: lets kernels of several processes run on one GPU at the same moment.

Without it, the driver gives the whole GPU to one process at a time, in slices, and switching costs more than what a
second process gains: on one H200 the relative speeds of training beside generation add up to 0.88 to 0.94, with the
service to 1.07 to 1.10 (benchmarks/jobs/beside.py). So jobs share a GPU at the same moment only under the service.

The daemon has a pipe folder of its own: other programs of this machine are not its clients. A fatal error of one client
may end the others on the same GPU; their processes are then restarted, like after any other loss.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from windfall.errors import WindfallError
from windfall.processes import process
from windfall.processes.process import Handle

PROGRAM = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
START_S, STOP_S = 20.0, 5.0


class Mps:
    """The daemon, while it is entered."""

    def __init__(self, log: Path, environ: Mapping[str, str]) -> None:
        self._log = log
        self._environ = dict(environ)
        self._folder: str | None = None
        self._daemon: Handle | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to be its client; empty while the daemon does not run."""
        if self._folder is None:
            return {}
        return {PIPES: self._folder, LOGS: self._folder}

    async def __aenter__(self) -> Mps:
        if shutil.which(PROGRAM) is None:
            fix = "Install it with NVIDIA's driver, or set co_running = false."
            raise WindfallError(f"{PROGRAM} is not on the PATH", where="co_running", fix=fix)
        self._folder = tempfile.mkdtemp(prefix="windfall-mps-")
        environ = {**self._environ, **self.environment}
        self._daemon = process.start(name="MPS daemon", argv=[PROGRAM, "-f"], env=environ, log=self._log)
        try:
            async with asyncio.timeout(START_S):
                while not (Path(self._folder) / "control").exists():
                    if not self._daemon.running:
                        raise WindfallError("the MPS daemon has ended", where=str(self._log), fix="Read its output.")
                    await asyncio.sleep(0.05)
        except BaseException as e:  # raised again: no daemon may be left
            await self.__aexit__()
            if isinstance(e, TimeoutError):
                what = f"waited {START_S:g} s for the MPS daemon to open its control pipe"
                raise WindfallError(
                    what, where=str(self._log), fix="Read its output, or set co_running = false."
                ) from e
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        daemon, folder, self._daemon = self._daemon, self._folder, None
        if daemon is not None and daemon.running:
            with contextlib.suppress(subprocess.TimeoutExpired, OSError):  # then it is killed
                environ = {**self._environ, **self.environment}
                quits = [PROGRAM]
                await asyncio.to_thread(
                    subprocess.run, quits, input=b"quit -t 1\n", env=environ, timeout=STOP_S, capture_output=True
                )
            await daemon.terminate(STOP_S)
        self._folder = None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
