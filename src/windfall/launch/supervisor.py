"""`windfall train`: starts a run's processes, starts again what is killed, and shows what happens. Keeps no state.

    supervisor ─┬─ controller                              killed: started again, goes on from its journal
                └─ nursery (has torch imported) ─┬─ trainer    killed or failed: started again, from the last checkpoint
                                                 └─ workers    local, or by a trace: their providers' business

All of them end with the supervisor, however it ends (see fleet/parent_death.py). What it shows, it reads from the event log.

Ctrl-C or SIGTERM: the run stops and saves, and nothing is started any more. Once more: everything is killed at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from windfall import algorithms, unhandled
from windfall import run_folder as folders
from windfall.backoff import delay_s
from windfall.config import JsonLinesEnv, Recipe
from windfall.envs.hosting import env_host
from windfall.envs.scoring.gold_answers import check_answers
from windfall.envs.trial import trial
from windfall.errors import WindfallError
from windfall.events import log
from windfall.fleet import process, trace
from windfall.fleet.base import Handle, Provider
from windfall.fleet.fork_client import ForkClient
from windfall.fleet.local import LocalProvider
from windfall.fleet.trace_provider import TraceProvider
from windfall.launch import context_check, invitation, tls
from windfall.launch.autoscale import Following
from windfall.launch.liveness import FAILURES, FROZEN_S, LOOK_S, MISSING_S, Absent, Failures, Pulse, WorkerTroubles
from windfall.launch.liveness import how as ended
from windfall.link import auth
from windfall.models import load
from windfall.types import Lease
from windfall.views.console import Console

QUICK_DEATHS = 8
"""A process that is killed so often within QUICK_S of its start has a cause that starting it again does not cure."""
QUICK_S = 5.0
LOGS_KEPT = 50
"""Of workers that ended."""
FROZEN_TRAINER = ".trainer.frozen"
TRACE_S = 24 * 3600.0


def check(recipe: Recipe) -> str:
    """Everything that can be found wrong before any work: model, environment, trace, certificates. Returns what the
    environment said when it was called once."""
    load.resolve(recipe.model.path)
    if recipe.run.device == "cuda":
        from windfall import devices

        devices.place("cuda", "auto", 0)
    if isinstance(recipe.env, JsonLinesEnv):
        check_answers(recipe.env)
    _check_groups(recipe)
    tls.serving(recipe.fleet)
    changes(recipe)
    if recipe.log.tensorboard and importlib.util.find_spec("tensorboard") is None:
        fix = "pip install 'windfall[tensorboard]'"
        raise WindfallError("tensorboard is not installed", where="log.tensorboard", fix=fix)
    host, o = env_host(recipe.env, recipe.run.seed), recipe.rollout
    task, said = asyncio.run(trial(host, o.reward_timeout_s, o.reward_tries))
    unchecked = context_check.check(recipe, task)
    return f"{said}; {unchecked}" if unchecked else said


def _check_groups(recipe: Recipe) -> None:
    name, algorithm = recipe.algorithm.name, algorithms.make(recipe.algorithm.name, **recipe.algorithm.options)
    if recipe.rollout.group_size == 1 and not algorithms.learns_alone(algorithm):
        able = [n for n in algorithms.ALGORITHMS if algorithms.learns_alone(algorithms.make(n))]
        what = (
            f"{name} compares the responses of a group, and a group of one has nothing to compare: nothing is learned"
        )
        fix = f"Set it to 2 or more, or algorithm.name to one that works with single responses: {', '.join(able)}."
        raise WindfallError(what, where="rollout.group_size = 1", fix=fix)


def changes(recipe: Recipe) -> list[Any]:
    """What the recipe's trace does to its machines."""
    t = recipe.trace
    if t.nodes == 0:
        if t.file is not None:
            what = "trace.file is given, and trace.nodes is 0: no machine would ever come"
            raise WindfallError(
                what, where="trace.nodes", fix="Set it to how many may be there at once, or leave out the file."
            )
        return []
    if t.file is None:
        return trace.synthetic(
            nodes=t.nodes, mean_up_s=t.mean_up_s, mean_down_s=t.mean_down_s, seconds=TRACE_S, seed=t.seed
        )
    return trace.slots(trace.window(trace.read(t.file), t.start_s, TRACE_S * 365), t.nodes)


class Supervisor:
    def __init__(self, recipe: Recipe, folder: Path, console: Console | None) -> None:
        self.recipe, self.folder, self._console = recipe, folder, console
        self._token = auth.read_token(folder / "token")
        self._end: dict[str, Any] | None = None
        self._stopping = self._told = False
        self._controller: Handle | None = None
        self._trainer: Handle | None = None
        self._workers: dict[str, Handle] = {}
        """Those that this run started."""
        self._local: LocalProvider | None = None
        self._following = Following(recipe.fleet.workers, recipe.fleet.workers_max)
        self._troubles = WorkerTroubles()
        self._error: WindfallError | None = None
        self._reached = 0
        """The newest step that was completed while this process watched."""

    async def run(self) -> bool:
        """True: the run is finished; False: it was stopped."""
        environment = {**os.environ, "WINDFALL_TOKEN": self._token}
        if self.recipe.fleet.tls_cert:
            environment["WINDFALL_TLS_PIN"] = str(self.recipe.fleet.tls_cert)
        nursery = ForkClient(
            entry="windfall.cli:main", modules=[f"windfall.launch.processes.preload:rehearse:{self.folder}"],
            log=self.folder / "nursery.log", env=environment,
        )  # fmt: skip
        (self.folder / "workers").mkdir(exist_ok=True)
        async with self._signals(nursery), nursery, self._showing():
            await self._all(nursery, environment)
        if self._error is not None:
            raise self._error
        return bool(self._end and self._end.get("finished"))

    async def _all(self, nursery: ForkClient, environment: dict[str, str]) -> None:
        argv = [sys.executable, "-m", "windfall.cli", "_controller", str(self.folder)]

        async def controller() -> Handle:
            self._controller = await process.start(
                name="controller", argv=argv, env=environment, log=self.folder / "controller.log"
            )
            return self._controller

        async def trainer() -> Handle:
            self._trainer = await nursery.start(
                name="trainer", argv=["windfall", "_trainer", str(self.folder)], env=environment,
                log=self.folder / "trainer.log",
            )  # fmt: skip
            return self._trainer

        tasks = [
            asyncio.create_task(self._keep("trainer", trainer, restart_on={4})),
            asyncio.create_task(self._thaw()),
            *(asyncio.create_task(p.run()) for p in await self._providers(nursery, environment)),
        ]
        main = asyncio.create_task(self._keep("controller", controller))
        try:
            done, _ = await asyncio.wait([main, *tasks], return_when=asyncio.FIRST_COMPLETED)
            while main not in done and all(t.exception() is None for t in done if not t.cancelled()):
                rest = [t for t in (main, *tasks) if not t.done()]
                done, _ = await asyncio.wait(rest, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except WindfallError as e:
            self._error = e
        finally:
            for task in (main, *tasks):
                task.cancel()
            await asyncio.gather(main, *tasks, return_exceptions=True)

    async def _keep(self, role: str, start: Callable[[], Any], restart_on: set[int] | None = None) -> None:
        """Until it ends by itself with status 0, or the run is asked to stop. Killed, it is started again. The trainer
        is also started again when it fails, but not for ever, nor after an error that a person has to put right (2)."""
        quick, handle, failures = 0, None, Failures()
        try:
            while not self._stopping:
                began, how = time.monotonic(), "was killed"
                try:
                    handle = await start()
                    code = await handle.wait()
                    how = ended(code)
                except OSError as e:  # the nursery died, and took its children with it; or it took too long
                    code, how = -signal.SIGKILL, f"could not be started: {e}"
                if (code == 0 and role == "controller") or (code <= 0 and self._stopping):
                    return
                if code > 0 and code not in (restart_on or set()):
                    wait_s = failures.again_s(self._reached) if role == "trainer" and code != 2 else None
                    error = folders.failure(self.folder, role, code)
                    if wait_s is None:
                        raise failures.last(error)
                    often = f"failure {failures.count} of {FAILURES}"
                    self._say(f"{error.what}; starting it again in {wait_s:g} s ({often})")
                    (self.folder / f".{role}.failure").unlink(missing_ok=True)
                    await asyncio.sleep(wait_s)
                    continue
                quick = quick + 1 if time.monotonic() - began < QUICK_S else 0
                if quick >= QUICK_DEATHS:
                    what = f"the {role} was killed {quick} times within {QUICK_S:g} s of its start"
                    raise WindfallError(what, where=str(self.folder), fix="Is there enough memory? See its log.")
                self._say(f"the {role} {how}; starting it again")
                await asyncio.sleep(delay_s(quick, first_s=0.1, limit_s=5.0))
        finally:
            if handle is not None and handle.running:
                await asyncio.shield(handle.terminate(3.0 if role == "controller" else 0.0))

    async def _thaw(self) -> None:
        """A controller, trainer or worker that stands still is as bad as a dead one."""
        pulse, absent = Pulse(), Absent()
        while True:
            await asyncio.sleep(LOOK_S)
            handle, said = self._controller, folders.read_json(self.folder / "fleet.json")
            frozen = pulse.look(handle.pid if handle and handle.running else None, said)
            if frozen and handle is not None:
                self._say(f"the controller gave no sign of life for {FROZEN_S:g} s; it is killed")
                handle.kill()
                pulse = Pulse()
            self._workers = {name: worker for name, worker in self._workers.items() if worker.running}
            for name in absent.look(set(self._workers), said if pulse.beats else None):
                self._say(f"worker {name} runs, but has not been in the fleet for {MISSING_S:g} s; it is killed")
                self._workers[name].kill()
            self._kill_frozen_trainer()
            self._follow(said if pulse.beats else None)

    def _follow(self, said: dict[str, Any] | None) -> None:
        """More workers of our own, or fewer, where that pays."""
        local, f = self._local, self.recipe.fleet
        if local is None or not f.workers_max or self._stopping:
            return
        ours = {name for name in self._workers if name.startswith(local.prefix)}
        wanted = self._following.look(said, ours)
        if wanted is not None:
            self._say(f"{wanted} workers of this machine are worth having, by prices and measured rates")
            local.target(wanted)

    def _kill_frozen_trainer(self) -> None:
        """The controller found it so, and left word. Only our own is killed: a pid alone may be anybody's by now."""
        path = self.folder / FROZEN_TRAINER
        said = folders.read_json(path)
        if said is None:
            return
        if self._trainer is not None and self._trainer.running and self._trainer.pid == said.get("pid"):
            self._say("the trainer does not answer; it is killed")
            self._trainer.kill()
        path.unlink(missing_ok=True)

    async def _providers(self, nursery: ForkClient, environment: dict[str, str]) -> list[Provider]:
        f, t = self.recipe.fleet, self.recipe.trace

        async def spawn(name: str, lease: Lease) -> Handle:
            argv = [
                "windfall", "worker", "--join", await self._url(), "--name", name, "--lease", lease.kind,
                "--price", str(lease.price_usd_per_h), "--threads", str(f.worker_threads), "--clouds", "none",
                "--device", self.recipe.run.device, "--memory", str(f.worker_memory),
            ]  # fmt: skip
            handle = await nursery.start(
                name=name, argv=argv, env=environment, log=self.folder / "workers" / f"{name}.log"
            )
            self._workers[name] = handle
            folders.keep_newest(self.folder / "workers", LOGS_KEPT, spare={f"{n}.log" for n in self._workers})
            return handle

        out: list[Provider] = []
        if f.workers:
            terms = Lease(kind=f.kind, price_usd_per_h=f.price_usd_per_h)
            self._local = LocalProvider(spawn, f.workers, terms=terms, on_event=self._heard)
            out.append(self._local)
        if t.nodes:
            terms = Lease(kind="spot", price_usd_per_h=t.price_usd_per_h)
            out.append(TraceProvider(spawn, changes(self.recipe), speedup=t.speedup, terms=terms, on_event=self._heard))
        return out

    async def _url(self, timeout_s: float = 60.0) -> str:
        for _ in range(int(timeout_s * 20)):
            said, controller = folders.address(self.folder), self._controller
            if said is not None and controller and controller.running and said.get("pid") == controller.pid:
                return said["url"]
            await asyncio.sleep(0.05)
        raise OSError(f"waited {timeout_s:g} s for the controller to listen")

    def _heard(self, name: str, /, **fields: Any) -> None:
        """Of a provider. What the workers themselves do is in the event log."""
        if line := self._troubles.hear(name, fields, time.monotonic()):
            self._say(line)

    # showing

    @contextlib.asynccontextmanager
    async def _showing(self) -> AsyncIterator[None]:
        path = self.folder / "events.jsonl"
        at = path.stat().st_size if path.is_file() else 0
        show = asyncio.create_task(self._show(path, at), name="showing the event log")
        show.add_done_callback(unhandled.report)  # without it the run would go on unseen, and its end be missed
        try:
            yield
        finally:
            await asyncio.sleep(0.15)  # what was written last
            show.cancel()
            await asyncio.gather(show, return_exceptions=True)

    async def _show(self, path: Path, at: int) -> None:
        """Every line that is added to the event log."""
        rest, said = b"", ""
        while True:
            data = b""
            try:
                if path.is_file():
                    with path.open("rb") as file:
                        file.seek(at)
                        data = file.read()
            except OSError as e:  # it may be over by the next look
                if str(e) != said:
                    said = str(e)
                    self._say(f"the event log cannot be read: {e}; trying again")
            at += len(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._take(line)
            await asyncio.sleep(0.1)

    def _take(self, line: bytes) -> None:
        event = log.parse(line)
        if event is None:
            return  # torn by a kill, or not windfall's
        if event["name"] == "end":
            self._end = event
        if (event["kind"], event["name"]) == ("scalar", "step"):
            self._reached = max(self._reached, event.get("step", 0))
        if self._console is None or (event["name"] == "stopping" and not self._stopping):
            return  # the controller is sent away because of an error, which is said at the end
        try:
            self._console.show(event)
        except (KeyError, TypeError, ValueError) as e:
            self._say(f"an event '{event['name']}' cannot be shown: {type(e).__name__}: {e}")
        if event["name"] == "trainer_ready" and not self._told:
            self._told = True  # earlier, the run may still turn out to be impossible
            self._tell_how_to_join()

    def _tell_how_to_join(self) -> None:
        said, f = folders.address(self.folder), self.recipe.fleet
        if said is not None and self._console is not None:
            everywhere = f.host in invitation.EVERYWHERE
            where = self.folder / "token"
            self._console.join(invitation.url(said, f), where, everywhere=everywhere, ca=f.tls_cert)

    def _say(self, line: str) -> None:
        if self._console is not None:
            self._console.say(line)

    @contextlib.asynccontextmanager
    async def _signals(self, nursery: ForkClient) -> AsyncIterator[None]:
        """The first Ctrl-C or SIGTERM asks the run to stop and save; the second ends it at once."""
        loop = asyncio.get_running_loop()
        current = asyncio.current_task()

        def asked() -> None:
            if self._stopping:
                nursery.kill()  # and so the trainer and all workers
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
            loop.add_signal_handler(number, asked)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
