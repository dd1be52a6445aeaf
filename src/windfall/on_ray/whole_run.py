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
import importlib
import os
import signal
import sys
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windfall import run_folder as folders
from windfall.errors import WindfallError
from windfall.link import network
from windfall.providers.ray import driver
from windfall.providers.ray.driver import WorkerActor
from windfall.providers.ray.provider import restart_delay

PASSED_ON = ("RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_USAGE_STATS_ENABLED")
"""Environment variables of a Ray job that the drivers of the run's workers need: its runtime environment."""

LEFT_S = 90.0
"""Seconds to wait for processes of the run whose driver or node was lost. They end by themselves."""


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
        """Whether this node sees the run's folder, which is free once what a lost node left there has ended."""
        run, loop = Path(folder), asyncio.get_running_loop()
        end_s = loop.time() + LEFT_S
        while folders.held(run) and loop.time() < end_s:
            await asyncio.sleep(0.1)
        return (run / "recipe.toml").is_file()


class RayDriver:
    def __init__(self, run: RayRun) -> None:
        self._run = run

    async def drive(self) -> int:
        """The exit status of the run."""
        run, delay, loop = self._run, restart_delay(), asyncio.get_running_loop()
        try:
            self._ray = await driver.connect(run.address, driver.CONNECT_S, show_logs=True)
        except OSError as e:
            fix = "Give the address of the cluster, or run the command on one of its nodes."
            raise WindfallError(str(e), where="--address", fix=fix) from e
        self._leaving = driver.when_signaled(signal.SIGTERM, signal.SIGINT)
        try:
            groups: Any = importlib.import_module("ray.util.placement_group")
            count = max(1, run.ranks)
            self._group = groups.placement_group([run.bundle()] * count, strategy="PACK")
            say(f"asking Ray for {count} x {run.bundle()}")
            await self._in_time(self._group.ready(), f"{count} bundles of {run.bundle()}")
            while True:
                began_s = loop.time()
                try:
                    return await self._attempt()
                except self._ray.exceptions.RayError as e:
                    wait_s = delay.after_death(lived_s=loop.time() - began_s)
                    say(f"the node of the run is lost; resuming it elsewhere in {wait_s:g} s ({driver.why(e)})")
                await asyncio.wait({self._leaving}, timeout=wait_s)
        except StopRequested:
            return 128 + signal.SIGTERM
        finally:
            await driver.disconnect()

    async def _attempt(self) -> int:
        """Start the run, and wait for its end. Returns its exit status. Raises RayError if its node is lost."""
        run, tasks = self._run, list[asyncio.Task[None]]()
        with self._placed(RunActor, 0) as actor:
            try:
                host, port = await self._in_time(actor.place.remote(), "the node of the run")
                if not await self._in_time(actor.sees.remote(str(run.folder)), "the node of the run"):
                    what = f"the run's node ({host}) does not see this folder"
                    fix = "Set run.folder to storage that all nodes of the cluster share."
                    raise WindfallError(what, where=str(run.folder), fix=fix)
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
                say(f"the run is on {host}")
                return await driver.exit_status(actor, self._leaving, run.stop_s)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_rank(self, rank: int, url: str) -> None:
        """Keep the command of a rank running in its bundle, wherever Ray puts that."""
        run, delay, loop = self._run, restart_delay(), asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            try:
                with self._placed(RankActor, rank) as actor:
                    await actor.keep.remote(f"rank-{rank}", run.rank_command(url), run.rank_environment(rank))
            except self._ray.exceptions.RayError as e:
                say(f"rank {rank} is lost ({driver.why(e)}); starting it again")
            await asyncio.sleep(delay.after_death(lived_s=loop.time() - began_s))

    def _placed(self, kind: type[WorkerActor], bundle: int) -> AbstractContextManager[Any]:
        strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        where = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return driver.placed(
            self._ray, kind, scheduling_strategy=where, num_cpus=self._run.cpus, num_gpus=self._run.gpus
        )

    async def _in_time(self, result: Awaitable[Any], what: str) -> Any:
        """The result, unless the job is stopped or the cluster has no room in time."""
        waiting = asyncio.ensure_future(result)
        await asyncio.wait({waiting, self._leaving}, timeout=self._run.room_s, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        waiting.cancel()
        if self._leaving.done():
            raise StopRequested
        said = f"waited {self._run.room_s:g} s for {what}"
        fix = "Look at `ray status`: the cluster has too little room. Ask for less (--cpus, --gpus), or raise --room."
        raise WindfallError(said, where=self._run.address, fix=fix)


class StopRequested(Exception):
    """The job was stopped before the run has started."""


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
