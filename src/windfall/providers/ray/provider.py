"""Workers on a Ray cluster: one actor per worker, with GPUs, labels and custom resources as Ray schedules them.

    supervisor ── RayProvider ── driver.py (one process per worker) ── Ray ── WorkerActor ── worker process

- A lost node ends its workers. They are restarted with a growing delay (slots.py) wherever Ray finds room.
- A driver that dies, or that Ray ends because the cluster is gone, is a lost worker.
- Ray knows nothing of the run. Workers dial the controller as from anywhere.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import sys

from windfall.backoff import RestartDelay
from windfall.errors import WindfallError, install_command
from windfall.processes import process
from windfall.processes.process import Handle
from windfall.providers.ray.driver import CONNECT_S, SHUTDOWN_S
from windfall.providers.ray.section import Ray
from windfall.providers.slots import SlotProvider
from windfall.providers.source_part import Employer
from windfall.providers.worker_command import arguments
from windfall.types import Lease

CLOSE_S = SHUTDOWN_S + 5.0
"""Seconds that a driver has to end, beside the time that its worker has to drain."""
DIED = {"error": "the driver of Ray died", "temporary": True}


def check_installed() -> None:
    if importlib.util.find_spec("ray") is None:
        fix = f"Install it: {install_command('ray')}"
        raise WindfallError("Ray is not installed", where="fleet.ray", fix=fix)


def restart_delay() -> RestartDelay:
    """A worker loads its software from the disk of a node for many seconds before it can fail."""
    return RestartDelay(young_s=60.0, limit_s=60.0)


class RayProvider(SlotProvider):
    name = "ray"

    def __init__(self, source: Ray, run: Employer, *, connect_s: float = CONNECT_S) -> None:
        self._source = source
        self._run = run
        self._connect_s = connect_s
        super().__init__(
            self._spawn,
            source.workers,
            terms=source.lease,
            on_event=run.on_event,
            grace_s=source.drain_s + CLOSE_S,
            prefix="ray",
            delay=restart_delay,
            patient=True,
        )

    async def _spawn(self, name: str, lease: Lease) -> Handle:
        """Start a driver, and wait until its worker runs: as soon as the cluster has room for it."""
        check_installed()
        command = ["-m", "windfall.run.cli", *arguments(self._source, await self._run.url(), name)]
        request = {
            "address": self._source.address,
            "connect_s": self._connect_s,
            "actor": self._source.of_actor(),
            "start": [name, command, dict(self._run.secrets)],
            "drain_s": self._source.drain_s,
        }
        # Ray's usage report uses the network at the start; it is off unless the user enables it.
        env = {"RAY_USAGE_STATS_ENABLED": "0", **os.environ}
        argv = [sys.executable, "-m", "windfall.providers.ray.driver"]
        log = self._run.folder / "workers" / f"{name}.log"
        ours, theirs = socket.socketpair()
        with theirs:
            driver = process.start(
                name=name, argv=argv, env=env, log=log, channel=theirs.fileno(), death=signal.SIGTERM
            )
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
            writer.write(json.dumps(request).encode() + b"\n")
            answer = json.loads(await reader.readline() or json.dumps(DIED))
            writer.close()
        except BaseException:  # raised again: no driver may be left
            await driver.terminate(CLOSE_S)
            raise
        if "pid" in answer:
            return driver
        await driver.terminate(CLOSE_S)
        if answer["temporary"]:
            raise OSError(f"{answer['error']}; see {log}")
        raise WindfallError(answer["error"], where="fleet.ray", fix="Check the keys of [fleet.ray].")
