"""A whole run on a Ray cluster, from one process: what `windfall ray` does, alone or as the entry point of a Ray job.

    windfall ray ── placement group ──┬─ bundle 0: RunActor ── windfall resume RUN (supervisor, controller)
    (driver)                          │                    └── windfall trainer --join, rank 0
                                      ├─ bundle 1: RankActor ── windfall trainer --join, rank 1
                                      └─ ...                          workers: [fleet.ray] of the recipe

- One bundle for each rank (`train.ranks`). With "auto" there is one bundle, and the run itself starts a rank for each
  of its GPUs.
- The run's folder must be on storage that the cluster's nodes share. Every start of the run is a resume, so a run whose
  node is lost goes on elsewhere as after any kill: Ray finds a new node for the bundle, and the ranks join again.
- A rank whose node is lost gets another actor in its bundle; the run waits for it (`train.machine_timeout_s`).
- SIGTERM, as `ray job stop` sends it, lets the run save. If this process is killed, Ray ends all actors, and the
  processes in them die with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windfall.backoff import RestartDelay
from windfall.errors import WindfallError
from windfall.link import network
from windfall.providers.ray.driver import CONNECT_S, SHUTDOWN_S, WorkerActor

PASSED_ON = ("RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_USAGE_STATS_ENABLED")
"""Environment variables of a Ray job that the drivers of the run's workers need: its runtime environment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayRun:
    """A run, and what Ray reserves for it."""

    folder: Path
    ranks: int
    """Number of ranks that dial in; 0 if the run starts them itself."""
    secret: str
    """The secret of the trainer."""
    address: str
    cpus: float
    gpus: float
    """CPUs and GPUs of each bundle."""
    room_s: float
    """Seconds to wait for room in the cluster."""
    stop_s: float
    """Seconds that the run has to save after SIGTERM."""

    def bundle(self) -> dict[str, float]:
        wanted = {"CPU": self.cpus, "GPU": self.gpus}
        return {name: number for name, number in wanted.items() if number}

    def rank_command(self, url: str) -> list[str]:
        return ["-m", "windfall.run.cli", "trainer", "--join", url]

    def rank_environment(self, rank: int) -> dict[str, str]:
        """Every rank sees only the GPUs of its actor, so its local number says nothing but which rank it is."""
        numbers = {"RANK": rank, "WORLD_SIZE": self.ranks, "LOCAL_RANK": rank}
        return {name: str(value) for name, value in numbers.items()} | {"WINDFALL_TRAINER_TOKEN": self.secret}


def restart_delay() -> RestartDelay:
    """How long to wait before a rank starts again: it loads software for many seconds before it can fail."""
    return RestartDelay(young_s=60.0, limit_s=60.0)


class RankActor(WorkerActor):
    async def keep(self, name: str, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        """Keep a command running, as long as this actor lives."""
        delay, loop = restart_delay(), asyncio.get_running_loop()
        while True:
            command, began_s = WorkerActor(), loop.time()
            await command.start(name, arguments, env)
            code = await command.wait()
            wait_s = delay.after_death(lived_s=loop.time() - began_s)
            print(f"{name} ended with status {code}; starting it again in {wait_s:g} s", file=sys.stderr, flush=True)
            await asyncio.sleep(wait_s)


class RunActor(RankActor):
    """The run's own processes: that of `windfall resume`, and the command of rank 0, which must be on its machine."""

    async def place(self) -> tuple[str, int]:
        """The address of this node, and a free port."""
        ray: Any = importlib.import_module("ray")
        host = ray.util.get_node_ip_address()
        return host, network.free_port(host)

    async def sees(self, folder: str) -> bool:
        return (Path(folder) / "recipe.toml").is_file()


class RayDriver:
    def __init__(self, run: RayRun) -> None:
        self._run = run
        self._ray: Any = importlib.import_module("ray")  # an extra
        self._group: Any = None
        self._asked = asyncio.Event()

    async def drive(self) -> int:
        """The exit status of the run."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked.set)
        await self._connect()
        try:
            groups: Any = importlib.import_module("ray.util.placement_group")
            count = max(1, self._run.ranks)
            self._group = groups.placement_group([self._run.bundle()] * count, strategy="PACK")
            self._say(f"asking Ray for {count} x {self._run.bundle()}")
            await self._in_time(self._group.ready(), f"{count} bundles of {self._run.bundle()}")
            delay = restart_delay()
            while not self._asked.is_set():
                began_s = loop.time()
                code = await self._start()
                if code is not None:
                    return code
                wait_s = delay.after_death(lived_s=loop.time() - began_s)
                self._say(f"the node of the run is lost; resuming it elsewhere in {wait_s:g} s")
                await self._sleep(wait_s)
            return 128 + signal.SIGTERM
        except StopRequested:
            return 128 + signal.SIGTERM
        finally:
            await self._close()

    async def _start(self) -> int | None:
        """Start the run, and wait for its end. None: its actor or node was lost."""
        run, lost = self._run, self._ray.exceptions.RayError
        actor, tasks = self._actor(RunActor, 0), list[asyncio.Task[None]]()
        try:
            host, port = await self._in_time(actor.place.remote(), "the node of the run")
            if not await self._in_time(actor.sees.remote(str(run.folder)), "the node of the run"):
                fix = "Set run.folder to storage that all nodes of the cluster share."
                raise WindfallError(f"the run's node ({host}) does not see this folder", where=str(run.folder), fix=fix)
            changes = ["--set", f"fleet.host={host}"]
            if run.ranks:
                url = f"http://{network.in_url(host)}:{port}"
                changes += ["--set", f"train.rendezvous={url.removeprefix('http://')}"]
                actor.keep.remote("rank-0", run.rank_command(url), run.rank_environment(0))  # ends with the actor
                tasks += [asyncio.create_task(self._keep_rank(rank, url)) for rank in range(1, run.ranks)]
            env = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
            env["RAY_ADDRESS"] = self._ray.get_runtime_context().gcs_address
            arguments = ["-m", "windfall.run.cli", "resume", str(run.folder), *changes]
            await self._in_time(actor.start.remote("run", arguments, env), "the start of the run")
            self._say(f"the run is on {host}; its folder is {run.folder}")
            ending, leaving = _waiting(actor.wait.remote()), asyncio.create_task(self._asked.wait())
            await asyncio.wait({ending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                _waiting(actor.signal.remote(int(signal.SIGTERM)))
                await asyncio.wait({ending}, timeout=run.stop_s)
            leaving.cancel()
            code = ending.result() if ending.done() else -signal.SIGKILL
            return code if code >= 0 else 128 - code
        except lost as e:
            self._say(f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0]}")
            return None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(lost):
                self._ray.kill(actor)

    async def _keep_rank(self, rank: int, url: str) -> None:
        """Keep the command of a rank running in its bundle, wherever Ray puts that."""
        run, lost = self._run, self._ray.exceptions.RayError
        delay, loop = restart_delay(), asyncio.get_running_loop()
        while True:
            actor, began_s = self._actor(RankActor, rank), loop.time()
            try:
                await actor.keep.remote(f"rank-{rank}", run.rank_command(url), run.rank_environment(rank))
            except lost as e:
                self._say(f"rank {rank} is lost ({type(e).__name__}); starting it again")
            finally:
                with contextlib.suppress(lost):
                    self._ray.kill(actor)
            await asyncio.sleep(delay.after_death(lived_s=loop.time() - began_s))

    def _actor(self, kind: type[WorkerActor], bundle: int) -> Any:
        strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        where = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        options = {"num_cpus": self._run.cpus, "num_gpus": self._run.gpus, "max_restarts": 0, "max_concurrency": 8}
        return self._ray.remote(kind).options(scheduling_strategy=where, **options).remote()

    async def _connect(self) -> None:
        address = self._run.address
        try:
            async with asyncio.timeout(CONNECT_S):  # on a thread: it blocks, and would take the signal handlers
                await asyncio.to_thread(self._ray.init, address, namespace="windfall", log_to_driver=True)
        except (ConnectionError, OSError, RuntimeError, ValueError) as e:
            why = str(e) or f"no answer within {CONNECT_S:g} s"
            fix = "Give the address of the cluster with --address, or run the command on one of its nodes."
            raise WindfallError(f"cannot connect to the Ray cluster: {why}", where=address, fix=fix) from e

    async def _in_time(self, result: Awaitable[Any], what: str) -> Any:
        """The result, unless the job is stopped or the cluster has no room in time."""
        asked, waiting = asyncio.create_task(self._asked.wait()), _waiting(result)
        await asyncio.wait({waiting, asked}, timeout=self._run.room_s, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if waiting.done():
            return waiting.result()
        waiting.cancel()
        if self._asked.is_set():
            raise StopRequested
        said = f"waited {self._run.room_s:g} s for {what}"
        fix = "Look at `ray status`: the cluster has too little room. Ask for less (--cpus, --gpus), or raise --room."
        raise WindfallError(said, where=self._run.address, fix=fix)

    async def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._asked.wait()

    async def _close(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_S):
                await asyncio.to_thread(self._ray.shutdown)

    @staticmethod
    def _say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class StopRequested(Exception):
    """The job was stopped before the run has started."""


async def _value(result: Awaitable[Any]) -> Any:
    return await result


def _waiting(result: Awaitable[Any]) -> asyncio.Task[Any]:
    return asyncio.create_task(_value(result))
