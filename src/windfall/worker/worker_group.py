"""`windfall worker --gpus`: one worker process for each GPU of this machine.

    group ─┬─ worker NAME-0    CUDA_VISIBLE_DEVICES=0
           └─ worker NAME-2    CUDA_VISIBLE_DEVICES=2

- The workers are independent: each has its own link, engine and weights, and watches for preemption notices itself.
- A worker that crashes or is killed is restarted with back-off (slots.py says when). One that was drained or
  refused, that found no controller, or that reports an error which a person must fix, is not.
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
from collections.abc import Mapping, Sequence

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
    chosen = range(len(seen)) if gpus == "all" else _numbers(gpus)
    if not seen or max(chosen) >= len(seen):
        fix = f"Use numbers from 0 to {len(seen) - 1}, or all." if seen else "Start a worker without --gpus."
        raise WindfallError(f"this machine has {len(seen)} GPUs that can be used", where=f"--gpus {gpus}", fix=fix)
    return {str(n): seen[n] for n in chosen}


def _numbers(gpus: str) -> list[int]:
    entries = gpus.split(",")
    if not all(entry.isdecimal() for entry in entries) or len(set(entries)) < len(entries):
        fix = "Give all, or numbers separated by commas, such as 0,2."
        raise WindfallError(f"{gpus!r} is not a list of GPUs", where="--gpus", fix=fix)
    return [int(entry) for entry in entries]


def main(places: Mapping[str, devices.Place], options: Mapping[str, object], *, name: str, token: str) -> int:
    """Run one worker for each place, named `name`-KEY. `options`: command line options of `windfall worker`. Returns
    the exit status of the group."""
    name = name or f"{socket.gethostname()}-{os.getpid()}"
    if not options.get("--threads"):
        options = {**options, "--threads": max(1, (os.cpu_count() or 1) // len(places))}
    group = WorkerGroup(places, [str(part) for option in options.items() for part in option], name=name, token=token)
    return asyncio.run(errors.guard(group.run()))


class WorkerGroup:
    def __init__(self, places: Mapping[str, devices.Place], options: Sequence[str], *, name: str, token: str) -> None:
        self._places = places
        self._options = options
        self._name = name
        # The token is passed in the environment: every user of the machine can read a command line.
        self._environment = {**os.environ, "WINDFALL_TOKEN": token}
        self._stopping = asyncio.Event()
        self._handles: dict[str, Handle] = {}

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._terminate)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        try:
            async with asyncio.TaskGroup() as tasks:
                keeping = [tasks.create_task(self._keep_running(*place)) for place in self._places.items()]
        finally:
            for handle in self._handles.values():
                handle.kill()
            loop.remove_signal_handler(signal.SIGTERM)
            loop.remove_signal_handler(signal.SIGINT)
        return max(task.result() for task in keeping)

    def _terminate(self) -> None:
        if not self._stopping.is_set():
            self._stopping.set()
            self._signal(signal.SIGTERM)
            asyncio.get_running_loop().call_later(GRACE_S, self._signal, signal.SIGKILL)

    def _interrupt(self) -> None:
        self._stopping.set()
        self._signal(signal.SIGINT)

    def _signal(self, number: int) -> None:
        for handle in self._handles.values():
            handle.signal(number)

    async def _keep_running(self, key: str, place: devices.Place) -> int:
        """Run a worker on this place until it ends for good. Returns its exit status."""
        name, delay, code = f"{self._name}-{key}", RestartDelay(), 0
        while not self._stopping.is_set():
            began = time.monotonic()
            code = await self._run_worker(name, place)
            if code in FINAL or self._stopping.is_set():
                break
            pause_s = delay.after_death(lived_s=time.monotonic() - began)
            self._say(name, f"{describe_exit(code)}; restarting in {pause_s:g} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
        if self._stopping.is_set() and code in (-signal.SIGTERM, -signal.SIGINT):
            return 0  # it had nothing to hand over yet, so it had no handler for the signal
        return code if code >= 0 else 1

    async def _run_worker(self, name: str, place: devices.Place) -> int:
        argv = [sys.executable, "-m", "windfall.run.cli", "worker", *self._options, "--name", name]
        argv += ["--device", place.device]
        try:
            handle = process.start(name=name, argv=argv, env=place.environment(self._environment), log=2)
        except OSError as e:  # it may be temporary, for example too many processes
            self._say(name, f"could not be started: {e}")
            return 1
        self._handles[name] = handle
        return await handle.wait()

    @staticmethod
    def _say(name: str, line: str) -> None:
        print(f"{name}: {line}", file=sys.stderr, flush=True)
