"""`windfall train`: starts the processes of a run, restarts killed ones, and shows what happens. Keeps no state.

    supervisor ─┬─ controller                              killed: restarted, continues from its journal
                ├─ ranks of a trainer on several machines, which dial in (ranks/joined_ranks.py)
                └─ fork server (imported torch) ─┬─ trainers   one for each base, which is one without [policies];
                                                 │             killed or failed: restarted from the last checkpoint
                                                 └─ workers    started and restarted by their providers (local, trace)
    Ray, Kubernetes, SkyPilot, Slurm ── workers elsewhere      by their providers (worker_sources.py)

The processes of this machine end with the supervisor, however it ends (see parent_death.py). Workers elsewhere
end when it stops them, or when they find no controller for a while. Kubernetes is the exception: a Deployment restarts
such workers until a person deletes it (docs/guides/kubernetes.md).

The supervisor reads what it shows from the event log.

On the first Ctrl-C or SIGTERM the run stops and saves, and nothing is restarted. On the second, all processes are
killed at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from windfall import devices
from windfall import run_folder as folders
from windfall.errors import WindfallError, describe_exit, report_failure
from windfall.events import log
from windfall.link import auth, invitation
from windfall.processes import process
from windfall.processes.fork_client import ForkClient
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
from windfall.run.views.console import Console
from windfall.trainer.ranks.rank_place import RankPlace, trainer_devices
from windfall.types import Lease

BETWEEN_VERSIONS = 4
"""Exit status of a trainer that lost its controller between two updates: its weights belong to no version."""
LOGS_KEPT = 50
"""Log files of ended workers to keep."""


class Supervisor:
    def __init__(
        self, recipe: Recipe, folder: Path, console: Console, places: Sequence[devices.Place] | None = None
    ) -> None:
        """`places`: the GPUs for the workers of this machine; by default, those that the recipe allows."""
        self.recipe = recipe
        self.folder = folder
        self._console = console
        self._token = auth.read_token(folder / "token")
        self._end: dict[str, Any] | None = None
        """The event that ended the run."""
        self._stopping = self._join_shown = False
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
        self._trainer_places = trainer_devices(recipe, self._places)
        self._gpus = GpuAssignment(
            len(self._places),
            trainer=len({place for places in self._trainer_places.values() for place in places if place.gpu}),
            workers=max(f.workers, f.workers_max) + nodes,
        )
        self._autoscaler = worker_sources.autoscaler(recipe)
        self._problems = liveness.WorkerProblems()
        self._error: WindfallError | None = None
        self._newest_steps: dict[str, int] = {}
        """By policy: the newest step completed since this process started."""

    async def run(self) -> bool:
        """Returns True if the run is finished, False if it was stopped."""
        environment = {**os.environ, "WINDFALL_TOKEN": self._token}
        if self.recipe.fleet.tls_cert:
            environment["WINDFALL_TLS_PIN"] = str(self.recipe.fleet.tls_cert)
        fork_client = ForkClient(
            entry="windfall.run.cli:main",
            modules=[f"windfall.run.preload:preload_run:{self.folder}"],
            log=self.folder / "fork_server.log",
            env=environment,
        )
        (self.folder / "workers").mkdir(exist_ok=True)
        if self.recipe.train.rendezvous:
            self._joined = JoinedRanks(self.recipe, self.folder, self._console.notice)
        joined = self._joined or contextlib.nullcontext()
        async with self._handling_signals(fork_client), fork_client, self._showing_events(), joined:
            await self._run_processes(fork_client, environment)
        if self.recipe.weights.bucket:
            await asyncio.to_thread(self._clear_bucket)
        if self._error is not None:
            raise self._error
        return bool(self._end and self._end.get("finished"))

    def _clear_bucket(self) -> None:
        from windfall.weights.bucket import BucketFailed, bucket_of_policy, bucket_of_run

        try:
            store = bucket_of_run(self.recipe.weights.bucket, self.recipe.run.name, self._token)
            for name in self.recipe.names():
                bucket_of_policy(store, name).clear()
        except (BucketFailed, WindfallError) as e:
            self._console.notice(f"weights may be left in the bucket: {e}")

    async def _run_processes(self, fork_client: ForkClient, environment: dict[str, str]) -> None:
        argv = [sys.executable, "-m", "windfall.run.cli", "_controller", str(self.folder)]

        async def controller() -> Handle:
            self._controller = process.start(
                name="controller", argv=argv, env=environment, log=self.folder / "controller.log"
            )
            return self._controller

        async def trainer(base: str) -> Handle:
            self._trainers[base] = await self._start_trainer(base, fork_client, environment)
            return self._trainers[base]

        providers = await self._providers(fork_client, environment)  # first: this can fail, and nothing is started yet
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

    async def _start_trainer(self, base: str, fork_client: ForkClient, environment: dict[str, str]) -> Handle:
        """Start all ranks of the trainer of a base. They meet at a place whose name was never used before."""
        role = folders.trainer_role(base)
        (self.folder / f".{role}.failure").unlink(missing_ok=True)
        if self._joined is not None:
            return await self._joined.start()
        for met in self.folder.glob(f".ranks-{role}.*"):
            met.unlink(missing_ok=True)
        places, trained = self._trainer_places[base], self.recipe.is_trained(base)
        sharded = len(places) > 1 or (self.recipe.train.offload and trained)
        meeting = f"file://{self.folder.resolve()}/.ranks-{role}.{os.urandom(8).hex()}" if sharded else ""
        started: list[Handle] = []
        try:
            for number, device in enumerate(places):
                rank = RankPlace(
                    rank=number, size=len(places), local_rank=number, local_size=len(places), rendezvous=meeting,
                    base=base,
                )  # fmt: skip
                env = device.environment(environment | rank.environment())
                argv, log = ["windfall", "_trainer", str(self.folder), base], self.folder / f"{rank.name}.log"
                started.append(await fork_client.start(name=rank.name, argv=argv, env=env, log=log))
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
            while not self._stopping:
                try:
                    handle = await start()
                    code = await handle.wait()
                    how = describe_exit(code)
                except OSError as e:  # the fork server died together with its children, or it took too long
                    code, how = -signal.SIGKILL, f"could not be started: {e}"
                if (code == 0 and not trains) or (code <= 0 and self._stopping):
                    return
                who = handle.cause if isinstance(handle, RankGroup) else role
                crashed, steps = trains and -code in liveness.CRASHES, sum(self._newest_steps.values())
                if crashed or (code > 0 and not (trains and code == BETWEEN_VERSIONS)):
                    delay_s = failures.restart_delay_s(steps) if trains and code != 2 else None
                    error = folders.failure(self.folder, role, code, who)
                    if delay_s is None:
                        raise failures.final_error(error)
                    count = f"failure {failures.count} of {failures.limit}"
                    self._console.notice(f"{error.what}; restarting in {delay_s:g} s ({count})")
                    (self.folder / f".{role}.failure").unlink(missing_ok=True)
                else:
                    delay_s = kills.restart_delay_s(steps)
                    if delay_s is None:
                        log = self.folder / f"{who}.log"
                        fix = "Check the free memory of this machine, and whether something kills its processes."
                        raise kills.final_error(WindfallError(f"the {who} {how}", where=str(log), fix=fix))
                    self._console.notice(f"the {role} {how}; restarting it")
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
                self._console.notice(f"the {name} has been frozen for {liveness.FROZEN_S:g} s; killing it")
                started[number].kill()
            snapshot = snapshot if silent.changed_lately(pid) else None
            self._workers = {name: worker for name, worker in self._workers.items() if worker.running}
            for name in missing.update(liveness.missing_workers(set(self._workers), snapshot)):
                self._console.notice(
                    f"worker {name} runs but has been missing from the fleet for {liveness.MISSING_S:g} s; killing it"
                )
                self._workers[name].kill()
            self._kill_frozen_trainer()
            self._autoscale(snapshot)

    def _autoscale(self, snapshot: dict[str, Any] | None) -> None:
        if self._stopping:
            return
        names = {w["worker"].partition("#")[0] for w in (snapshot or {}).get("workers", []) if w["state"] != "gone"}
        own = {source: {name for name in names if p.owns(name)} for source, p in self._scaled.items()}
        for source, wanted in self._autoscaler.update(snapshot, own, time.monotonic()).items():
            where = "on this machine" if source == SlotProvider.name else f"from {source}"
            self._console.notice(f"scaling to {wanted} workers {where}, by prices and measured rates")
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
                self._console.notice(f"the {folders.trainer_role(base)} does not respond; killing it")
                trainer.kill()
        path.unlink(missing_ok=True)

    async def _providers(self, fork_client: ForkClient, environment: dict[str, str]) -> list[Provider]:
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
                handle = await fork_client.start(
                    name=name,
                    argv=argv,
                    env=place.environment(environment),
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
            self._console.notice(line)

    # the event log

    @contextlib.asynccontextmanager
    async def _showing_events(self) -> AsyncIterator[None]:
        path = self.folder / "events.jsonl"
        start = path.stat().st_size if path.is_file() else 0
        show = asyncio.create_task(self._follow_log(path, start), name="showing the event log")
        show.add_done_callback(report_failure)  # without this task the run would continue, but its end be missed
        try:
            yield
        finally:
            await asyncio.sleep(0.15)  # long enough to read the last events
            show.cancel()
            await asyncio.gather(show, return_exceptions=True)

    async def _follow_log(self, path: Path, offset: int) -> None:
        rest = b""
        while True:
            data = b""
            with contextlib.suppress(OSError), path.open("rb") as file:  # not there yet, or a temporary problem
                file.seek(offset)
                data = file.read()
            offset += len(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._handle_line(line)
            await asyncio.sleep(0.1)

    def _handle_line(self, line: bytes) -> None:
        event = log.parse(line)
        if event is None:
            return  # truncated by a kill, or not written by windfall
        if event["name"] == "end":
            self._end = event
        if (event["kind"], event["name"]) == ("scalar", "step"):
            policy = event.get("policy", "")
            self._newest_steps[policy] = max(self._newest_steps.get(policy, 0), event.get("step", 0))
        if event["name"] == "stopping" and not self._stopping:
            return  # the controller is stopped because of an error, which is shown at the end
        try:
            self._console.show(event)
        except Exception as e:  # fault boundary: a view must never fail the run, whatever the log contains
            self._console.notice(f"cannot show event '{event['name']}': {type(e).__name__}: {e}")
        if event["name"] == "trainer_ready" and not self._join_shown:
            self._join_shown = True  # not earlier: until the trainer is ready, the start may still fail
            self._show_how_to_join()

    def _show_how_to_join(self) -> None:
        address, f = folders.address(self.folder), self.recipe.fleet
        if address is not None:
            remote = f.host in invitation.ALL_INTERFACES
            url = invitation.url(address, f)
            self._console.join(url, self.folder / "token", remote=remote, ca=f.tls_cert)
            if "/page" in address.get("pages", ()):
                self._console.page(f"{url}/page?key={auth.page_key(self._token)}")

    @contextlib.asynccontextmanager
    async def _handling_signals(self, fork_client: ForkClient) -> AsyncIterator[None]:
        """The first Ctrl-C or SIGTERM asks the run to stop and save; the second ends it at once."""
        loop = asyncio.get_running_loop()
        current = asyncio.current_task()

        def on_signal() -> None:
            if self._stopping:
                fork_client.kill()  # kills the trainer and all workers, too
                if self._controller is not None:
                    self._controller.kill()
                if current is not None:
                    current.cancel()
                return
            self._stopping = True
            if self._controller is not None and self._controller.running:
                os.kill(self._controller.pid, signal.SIGTERM)

        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, on_signal)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
