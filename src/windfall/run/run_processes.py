"""The processes of one run: starts them, restarts killed ones, and reads what happens from the event log.

    RunProcesses ─┬─ controller                              killed: restarted, continues from its journal
                  ├─ ranks of a trainer on several machines, which dial in (ranks/joined_ranks.py)
                  └─ forks (a process that has imported torch) ─┬─ trainers   one for each base, which is one without
                                                                │             [policies]; killed or failed: restarted
                                                                │             from the last checkpoint
                                                                └─ workers    started and restarted by their providers
    Ray, Kubernetes, SkyPilot, Slurm ── workers elsewhere      by their providers (worker_sources.py)

It keeps no state: what a run needs to continue is in its folder. `windfall train` has one (supervisor.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from windfall import devices
from windfall import run_folder as folders
from windfall.errors import WindfallError, describe_exit, report_failure
from windfall.events import log
from windfall.link import auth, invitation
from windfall.processes import process
from windfall.processes.process import Handle
from windfall.providers.base import Provider
from windfall.providers.slots import SlotProvider
from windfall.providers.trace_provider import TraceProvider
from windfall.recipe.sections import Recipe
from windfall.run import liveness, worker_sources
from windfall.run.gpu_assignment import GpuAssignment
from windfall.run.ranks.joined_ranks import JoinedRanks
from windfall.run.ranks.rank_group import RankGroup
from windfall.run.recipe_check import trace_changes
from windfall.trainer.ranks.rank_place import RankPlace, trainer_devices
from windfall.turns import client as turns
from windfall.types import Lease

BETWEEN_VERSIONS = 4
"""Exit status of a trainer that lost its controller between two updates: its weights belong to no version."""
READ_BYTES = 1 << 24
"""Upper limit for one read of the event log, and for one of its lines."""
LOGS_KEPT = 50
"""Log files of ended workers to keep."""


class Forks(Protocol):
    """Starts processes that have imported torch already: a ForkClient, or a part of one."""

    async def start(self, *, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path) -> Handle: ...


class RunProcesses:
    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        forks: Forks,
        environment: Mapping[str, str],
        *,
        notice: Callable[[str], None],
        on_event: Callable[[log.Event], None],
        places: Sequence[devices.Place] | None = None,
        trainer_places: Sequence[devices.Place] | None = None,
        trainer_environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment`: of the processes. `notice`: shows a line. `on_event`: gets every event of the log from now on.
        `places`: the devices for the workers of this machine, by default the GPUs that the recipe allows.
        `trainer_places`: those for the trainers, which are the first ones of `places`; by default all.
        `trainer_environment`: what trainers have besides."""
        self.recipe = recipe
        self.folder = folder
        self.stopping = False
        self.finished = False
        """Whether the log has the event of a run that has made all its steps."""
        self._forks, self._environment = forks, dict(environment)
        self._trainer_environment = self._environment | dict(trainer_environment or {})
        self._notice, self._on_event = notice, on_event
        self._token = auth.read_token(folder / "token")
        self._controller: Handle | None = None
        self._trainers: dict[str, Handle] = {}
        """By base."""
        self._ranks: dict[str, list[Handle]] = {}
        """By base: the ranks of its trainer that this process has started."""
        self._joined: JoinedRanks | None = None
        """The ranks of a trainer on several machines."""
        self._workers: dict[str, Handle] = {}
        """Worker processes that this run started, by name."""
        self._scaled: dict[str, Provider] = {}
        """Providers whose number of workers can be chosen, by name."""
        self._places = devices.gpu_places(recipe.run.device) if places is None else places
        f, nodes = recipe.fleet, recipe.trace.nodes
        self._trainer_places = trainer_devices(recipe, self._places if trainer_places is None else trainer_places)
        self._gpus = GpuAssignment(
            len(self._places),
            trainer=len({p for of_base in self._trainer_places.values() for p in of_base if p in self._places}),
            workers=max(f.workers, f.workers_max) + nodes,
        )
        self._autoscaler = worker_sources.autoscaler(recipe)
        self._problems = liveness.WorkerProblems()
        self._error: WindfallError | None = None
        self._newest_steps: dict[str, int] = {}
        """By policy: the newest step completed since this process started. Of a server: the calls it has performed."""

    async def run(self) -> bool:
        """Returns True if the run is finished, False if it was stopped."""
        (self.folder / "workers").mkdir(exist_ok=True)
        if self.recipe.train.rendezvous:
            self._joined = JoinedRanks(self.recipe, self.folder, self._notice)
        async with self._reading_events(), self._joined or contextlib.nullcontext():
            await self._run_processes()
        if self.recipe.weights.bucket:
            await asyncio.to_thread(self._clear_bucket)
        if self._error is not None:
            raise self._error
        return self.finished

    def stop(self) -> None:
        """Ask the run to stop and save. Nothing is restarted any more."""
        self.stopping = True
        if self._controller is not None and self._controller.running:
            os.kill(self._controller.pid, signal.SIGTERM)

    @property
    def controller_pid(self) -> int | None:
        return self._controller.pid if self._controller is not None and self._controller.running else None

    def kill(self) -> None:
        """Kill all processes of the run on this machine at once."""
        self.stopping = True
        ranks = chain.from_iterable(self._ranks.values())
        for handle in (self._controller, *ranks, *self._workers.values()):
            if handle is not None:
                handle.kill()

    def _clear_bucket(self) -> None:
        from windfall.weights.bucket import BucketFailed, bucket_of_policy, bucket_of_run

        try:
            store = bucket_of_run(self.recipe.weights.bucket, self.recipe.run.name, self._token)
            for name in self.recipe.names():
                bucket_of_policy(store, name).clear()
        except (BucketFailed, WindfallError) as e:
            self._notice(f"weights may be left in the bucket: {e}")

    async def _run_processes(self) -> None:
        argv = [sys.executable, "-m", "windfall.run.cli", "_controller", str(self.folder)]

        async def controller() -> Handle:
            self._controller = process.start(
                name="controller", argv=argv, env=self._environment, log=self.folder / "controller.log"
            )
            return self._controller

        async def trainer(base: str) -> Handle:
            self._trainers[base] = await self._start_trainer(base)
            return self._trainers[base]

        providers = await self._providers()  # first: this can fail, and nothing is started yet
        tasks = [
            *(
                asyncio.create_task(self._keep_running(folders.trainer_role(base), partial(trainer, base)))
                for base in self.recipe.bases()
            ),
            asyncio.create_task(self._watch()),
            *(asyncio.create_task(p.run()) for p in providers),
        ]
        main = asyncio.create_task(self._keep_running("controller", controller))
        try:
            waiting = {main, *tasks}
            while main in waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        except WindfallError as e:
            self._error = e
        finally:
            for task in (main, *tasks):
                task.cancel()
            await asyncio.gather(main, *tasks, return_exceptions=True)

    async def _start_trainer(self, base: str) -> Handle:
        """Start all ranks of the trainer of a base. They meet at a place whose name was never used before."""
        role = folders.trainer_role(base)
        (self.folder / f".{role}.failure").unlink(missing_ok=True)
        if self._joined is not None:
            return await self._joined.start()
        for met in self.folder.glob(f".ranks-{role}.*"):
            met.unlink(missing_ok=True)
        places, sharded = self._trainer_places[base], len(self._trainer_places[base]) > 1
        meeting = f"file://{self.folder.resolve()}/.ranks-{role}.{os.urandom(8).hex()}" if sharded else ""
        shared = _turns_on(places)
        started: list[Handle] = []
        try:
            for number, device in enumerate(places):
                rank = RankPlace(
                    rank=number, size=len(places), local_rank=number, local_size=len(places), rendezvous=meeting,
                    base=base,
                )  # fmt: skip
                env = device.environment(self._trainer_environment | shared | rank.environment())
                argv, log = ["windfall", "_trainer", str(self.folder), base], self.folder / f"{rank.name}.log"
                started.append(await self._forks.start(name=rank.name, argv=argv, env=env, log=log))
        except BaseException:  # raised again: no rank may be left
            for handle in started:
                handle.kill()
            raise
        self._ranks[base] = started
        return started[0] if len(started) == 1 else RankGroup(started)

    async def _keep_running(self, role: str, start: Callable[[], Any]) -> None:
        """Run a process until it exits with status 0 or the run is asked to stop. A killed process is restarted. A
        trainer is also restarted when it fails, but not after an error that the user must fix (2). The run ends if
        restarts bring no progress (liveness.py)."""
        handle, failures, kills = None, liveness.failures(), liveness.kills()
        trains = role != "controller"
        try:
            while not self.stopping:
                try:
                    handle = await start()
                    code = await handle.wait()
                    how = describe_exit(code)
                except OSError as e:  # the fork server died together with its children, or it took too long
                    code, how = -signal.SIGKILL, f"could not be started: {e}"
                if (code == 0 and not trains) or (code <= 0 and self.stopping):
                    return
                who = handle.cause if isinstance(handle, RankGroup) else role
                crashed, steps = trains and -code in liveness.CRASHES, sum(self._newest_steps.values())
                if crashed or (code > 0 and not (trains and code == BETWEEN_VERSIONS)):
                    delay_s = failures.restart_delay_s(steps) if trains and code != 2 else None
                    error = folders.failure(self.folder, role, code, who)
                    if delay_s is None:
                        raise failures.final_error(error)
                    count = f"failure {failures.count} of {failures.limit}"
                    self._notice(f"{error.what}; restarting in {delay_s:g} s ({count})")
                    (self.folder / f".{role}.failure").unlink(missing_ok=True)
                else:
                    delay_s = kills.restart_delay_s(steps)
                    if delay_s is None:
                        log = self.folder / f"{who}.log"
                        fix = "Check the free memory of this machine, and whether something kills its processes."
                        raise kills.final_error(WindfallError(f"the {who} {how}", where=str(log), fix=fix))
                    self._notice(f"the {role} {how}; restarting it")
                await asyncio.sleep(delay_s)
        finally:
            if handle is not None and handle.running:
                await asyncio.shield(handle.terminate(0.0 if trains else 3.0))

    async def _watch(self) -> None:
        """Kill controllers, trainers and workers that are frozen, so that they are restarted; and autoscale."""
        silent, stopped = liveness.Unchanged[int](liveness.FROZEN_S), liveness.Unchanged[int](liveness.FROZEN_S)
        missing = liveness.Unchanged[str](liveness.MISSING_S)
        while True:
            await asyncio.sleep(liveness.CHECK_S)
            ranks = chain.from_iterable(self._ranks.values())
            started = {h.pid: h for h in (self._controller, *ranks) if h is not None and h.running}
            snapshot, controller = folders.read_json(self.folder / "fleet.json"), self._controller
            pid = controller.pid if controller is not None and controller.running else None
            frozen = {*silent.update(liveness.pulse(pid, snapshot)), *stopped.update(process.stopped(started))}
            for number in frozen:
                name = started[number].name
                self._notice(f"the {name} has been frozen for {liveness.FROZEN_S:g} s; killing it")
                started[number].kill()
            snapshot = snapshot if silent.changed_lately(pid) else None
            self._workers = {name: worker for name, worker in self._workers.items() if worker.running}
            for name in missing.update(liveness.missing_workers(set(self._workers), snapshot)):
                self._notice(
                    f"worker {name} runs but has been missing from the fleet for {liveness.MISSING_S:g} s; killing it"
                )
                self._workers[name].kill()
            self._kill_frozen_trainer()
            self._autoscale(snapshot)

    def _autoscale(self, snapshot: dict[str, Any] | None) -> None:
        if self.stopping:
            return
        names = {w["worker"].partition("#")[0] for w in (snapshot or {}).get("workers", []) if w["state"] != "gone"}
        own = {source: {name for name in names if p.owns(name)} for source, p in self._scaled.items()}
        for source, wanted in self._autoscaler.update(snapshot, own, time.monotonic()).items():
            where = "on this machine" if source == SlotProvider.name else f"from {source}"
            self._notice(f"scaling to {wanted} workers {where}, by prices and measured rates")
            self._scaled[source].target(wanted)

    def _kill_frozen_trainer(self) -> None:
        """Kill a trainer if the controller has reported it as frozen. Only a process that we started is killed: by
        now, the reported pid may belong to another process."""
        path = self.folder / folders.FROZEN_TRAINER
        report = folders.read_json(path)
        if report is None:
            return
        for base, trainer in self._trainers.items():
            first = trainer.ranks[0] if isinstance(trainer, RankGroup) else trainer
            if trainer.running and first.pid == report.get("pid"):
                self._notice(f"the {folders.trainer_role(base)} does not respond; killing it")
                trainer.kill()
        path.unlink(missing_ok=True)

    async def _providers(self) -> list[Provider]:
        f, t = self.recipe.fleet, self.recipe.trace

        async def spawn(name: str, lease: Lease) -> Handle:
            gpu = self._gpus.assign(name)
            place = devices.Place(device=self.recipe.run.device) if gpu is None else self._places[gpu]
            memory = f.worker_memory or self._gpus.memory_share(name)
            try:
                argv = [
                    "windfall", "worker", "--join", await self._controller_url(), "--name", name, "--lease", lease.kind,
                    "--price", str(lease.price_usd_per_h), "--threads", str(f.worker_threads), "--clouds", "none",
                    "--device", "auto" if self.recipe.run.device == "auto" else place.device, "--memory", str(memory),
                ]  # fmt: skip
                handle = await self._forks.start(
                    name=name,
                    argv=argv,
                    env=place.environment(self._environment | _turns_on([place])),
                    log=self.folder / "workers" / f"{name}.log",
                )
            except BaseException:  # raised again: the place is free for the next worker
                self._gpus.release(name)
                raise
            handle.when_ended(lambda: self._gpus.release(name))
            self._workers[name] = handle
            # Which logs of Slurm and Ray belong to living workers is not known here.
            logs = self.folder / "workers"
            others = {path.name for source in ("slurm", "ray") for path in logs.glob(f"{source}*")}
            folders.keep_newest(logs, LOGS_KEPT, spare={f"{n}.log" for n in self._workers} | others)
            return handle

        self._scaled = worker_sources.providers(
            self.recipe, self.folder, self._token, url=self._public_url, on_event=self._on_provider_event
        )
        if f.workers:
            terms = Lease(kind=f.kind, price_usd_per_h=f.price_usd_per_h)
            local = SlotProvider(spawn, f.workers, terms=terms, on_event=self._on_provider_event)
            self._scaled[SlotProvider.name] = local
        providers = list(self._scaled.values())
        if t.nodes:
            terms = Lease(kind="spot", price_usd_per_h=t.price_usd_per_h)
            changes = trace_changes(self.recipe)
            providers.append(
                TraceProvider(spawn, changes, speedup=t.speedup, terms=terms, on_event=self._on_provider_event)
            )
        return providers

    async def _public_url(self) -> str:
        """The address at which workers on other machines reach the controller."""
        await self._controller_url()
        address = folders.address(self.folder)
        if address is None:
            raise OSError("the controller is being restarted")
        return invitation.url(address, self.recipe.fleet)

    async def _controller_url(self, timeout_s: float = 60.0) -> str:
        for _ in range(int(timeout_s * 20)):
            address, controller = folders.address(self.folder), self._controller
            if address is not None and controller and controller.running and address.get("pid") == controller.pid:
                return address["url"]
            await asyncio.sleep(0.05)
        raise OSError(f"waited {timeout_s:g} s for the controller to listen")

    def _on_provider_event(self, name: str, /, **fields: Any) -> None:
        """Show problems of worker processes. What the workers themselves do is in the event log."""
        if line := self._problems.describe(name, fields, time.monotonic()):
            self._notice(line)

    # the event log

    @contextlib.asynccontextmanager
    async def _reading_events(self) -> AsyncIterator[None]:
        path = self.folder / "events.jsonl"
        start = path.stat().st_size if path.is_file() else 0
        reading = asyncio.create_task(self._follow_log(path, start), name="reading the event log")
        reading.add_done_callback(report_failure)  # without this task the run would continue, but its end be missed
        try:
            yield
        finally:
            await asyncio.sleep(0.15)  # long enough to read the last events
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _follow_log(self, path: Path, offset: int) -> None:
        rest = b""
        while True:
            data = b""
            with contextlib.suppress(OSError), path.open("rb") as file:  # not there yet, or a temporary problem
                file.seek(offset)
                data = file.read(READ_BYTES)
            offset += len(data)
            *lines, rest = (rest + data).split(b"\n")
            rest = rest if len(rest) < READ_BYTES else b""  # no line of windfall's is so long
            for line in lines:
                self._handle_line(line)
            await asyncio.sleep(0.1)

    def _handle_line(self, line: bytes) -> None:
        event = log.parse(line)
        if event is None:
            return  # truncated by a kill, or not written by windfall
        if event["name"] == "end":
            self.finished = bool(event.get("finished"))
        if event["kind"] == "scalar" and event["name"] in ("step", "sft", "tinker"):
            policy, step = str(event.get("policy", "")), event.get("step", 0)
            if isinstance(step, int):
                self._newest_steps[policy] = max(self._newest_steps.get(policy, 0), step)
        self._on_event(event)


def _turns_on(places: Sequence[devices.Place]) -> dict[str, str]:
    """Which shared devices a process computes on; empty if it has its devices for itself."""
    names = [place.name for place in places if place.name]
    return {turns.DEVICES: ",".join(names)} if names else {}
