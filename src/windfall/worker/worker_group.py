"""`windfall worker --gpus`: one worker process for each GPU of this machine.

    group ─┬─ worker NAME-0    CUDA_VISIBLE_DEVICES=0
           └─ worker NAME-2    CUDA_VISIBLE_DEVICES=2

- The workers are independent: each has its own link, engine and weights, and watches for preemption notices itself.
- A worker that crashes or is killed is restarted with back-off. One that was drained or refused, that found no
  controller, or that reports an error which a person must fix, is not.
- SIGTERM and Ctrl-C are passed on: every worker drains, and none is restarted. A second Ctrl-C ends them at once.
- The workers die with the group, however it ends.
- The group ends when its last worker has ended. Its exit status is the largest of theirs: 0 if all were drained.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping

from windfall import devices, errors
from windfall.backoff import RestartDelay
from windfall.errors import WindfallError, describe_exit
from windfall.processes import process
from windfall.processes.process import EXIT_NO_CONTROLLER, EXIT_REFUSED, Handle

FINAL = (0, 2, EXIT_REFUSED, EXIT_NO_CONTROLLER)
"""Exit statuses after which a worker is not restarted. 2 is an error that a person must fix."""
GRACE_S = 30.0
"""Seconds that the workers have to drain after SIGTERM. A worker ends itself after about 10 s."""


def find_places(
    gpus: str, environment: Mapping[str, str] | None = None, installed: int | None = None
) -> dict[str, devices.Place]:
    """The places that `--gpus` asks for, by GPU number.

    >>> {name: place.gpu for name, place in find_places("0,2", {}, installed=4).items()}
    {'0': '0', '2': '2'}
    """
    seen = devices.gpu_places("cuda", environment, installed)
    chosen = [str(n) for n in range(len(seen))] if gpus == "all" else gpus.split(",")
    if not all(entry.isdecimal() for entry in chosen) or len(set(chosen)) < len(chosen):
        fix = "Give all, or numbers separated by commas, such as 0,2."
        raise WindfallError(f"{gpus!r} is not a list of GPUs", where="--gpus", fix=fix)
    if not seen or max(map(int, chosen)) >= len(seen):
        fix = f"Use numbers from 0 to {len(seen) - 1}, or all." if seen else "Start a worker without --gpus."
        raise WindfallError(f"this machine has {len(seen)} GPUs that can be used", where=f"--gpus {gpus}", fix=fix)
    return {entry: seen[int(entry)] for entry in chosen}


def main(places: Mapping[str, devices.Place], options: Mapping[str, object], *, name: str, token: str) -> int:
    """Run one worker for each place, named `name`-KEY. `options`: command line options of `windfall worker`. Returns
    the exit status of the group."""
    name = name or f"{socket.gethostname()}-{os.getpid()}"
    if not options.get("--threads"):
        options = {**options, "--threads": max(1, (os.cpu_count() or 1) // len(places))}
    group = WorkerGroup([str(part) for option in options.items() for part in option], token)
    return asyncio.run(errors.guard(group.run({f"{name}-{key}": place for key, place in places.items()})))


class WorkerGroup:
    def __init__(self, options: list[str], token: str) -> None:
        self._argv = [sys.executable, "-m", "windfall.run.cli", "worker", *options]
        # The token is passed in the environment: every user of the machine can read a command line.
        self._environment = {**os.environ, "WINDFALL_TOKEN": token}
        self._stopping = asyncio.Event()
        self._handles: dict[str, Handle] = {}

    async def run(self, places: Mapping[str, devices.Place]) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        try:
            return max(await asyncio.gather(*(self._keep_running(*place) for place in places.items())))
        finally:
            for handle in self._handles.values():
                handle.kill()

    def _stop(self, number: int) -> None:
        self._stopping.set()
        for handle in self._handles.values():
            handle.signal(number)
            asyncio.get_running_loop().call_later(GRACE_S, handle.kill)

    async def _keep_running(self, name: str, place: devices.Place) -> int:
        """Run a worker on this place until it ends for good. Returns its exit status."""
        argv, delay, code = [*self._argv, "--name", name, "--device", place.device], RestartDelay(), 0
        while not self._stopping.is_set():
            began = time.monotonic()
            environment = place.environment(self._environment)
            self._handles[name] = process.start(name=name, argv=argv, env=environment, log=sys.stderr.fileno())
            code = await self._handles[name].wait()
            if code in FINAL or self._stopping.is_set():
                break
            pause_s = delay.after_death(lived_s=time.monotonic() - began)
            print(f"{name}: {describe_exit(code)}; restarting in {pause_s:g} s", file=sys.stderr, flush=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
        if self._stopping.is_set() and code in (-signal.SIGTERM, -signal.SIGINT):
            return 0  # it had nothing to hand over yet, so it had no handler for the signal
        return code if code >= 0 else 1
