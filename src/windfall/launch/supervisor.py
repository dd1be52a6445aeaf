"""`windfall train`: starts a run's processes, starts again what is killed, and shows what happens. Keeps no state.

    supervisor ─┬─ controller                              killed: started again, goes on from its journal
                └─ nursery (has torch imported) ─┬─ trainer    killed: started again, from the last checkpoint
                                                 └─ workers    local, or by a trace: their providers' business

All of them end with the supervisor, however it ends (see fleet/guard.py). What it shows, it reads from the event log.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from windfall import algorithms, envs, models
from windfall.config import Recipe
from windfall.console import Console
from windfall.errors import WindfallError
from windfall.fleet import process, trace
from windfall.fleet.base import Handle, Provider
from windfall.fleet.local import LocalProvider
from windfall.fleet.nursery import Nursery, NurseryLost
from windfall.fleet.replay import TraceProvider
from windfall.launch import folder as folders
from windfall.launch import security
from windfall.link import auth
from windfall.types import Lease

PRELOADED = ["torch", "transformers", "windfall.launch.training", "windfall.launch.joining", "windfall.worker.build",
             "windfall.engine.engine", "windfall.train.trainer", "windfall.weights.publish"]  # fmt: skip
QUICK_DEATHS = 8
"""A process that is killed so often within QUICK_S of its start has a cause that starting it again does not cure."""
QUICK_S = 5.0
FROZEN_S = 30.0
"""A controller that gives no sign of life for so long is killed, and so started again."""
MISSING_S = 15.0
"""So is a worker of ours that runs and is not in the fleet for so long: frozen, it would hold its place for ever."""
TRACE_S = 24 * 3600.0


def check(recipe: Recipe) -> None:
    """Everything that can be found wrong before any work: model, environment, trace, certificates."""
    models.resolve(recipe.model.path)
    if recipe.run.device == "cuda":
        from windfall import devices

        devices.place("cuda", "auto", 0)
    envs.make(recipe.env, recipe.run.seed).task(0)
    algorithms.make(recipe.algorithm.name, **recipe.algorithm.options)
    security.serving(recipe.fleet)
    changes(recipe)
    if recipe.log.tensorboard and importlib.util.find_spec("tensorboard") is None:
        fix = "pip install 'windfall[tensorboard]'"
        raise WindfallError("tensorboard is not installed", where="log.tensorboard", fix=fix)


def changes(recipe: Recipe) -> list[Any]:
    """What the recipe's trace does to its machines."""
    t = recipe.trace
    if t.nodes == 0:
        return []
    if t.file is None:
        return trace.synthetic(
            nodes=t.nodes, mean_up_s=t.mean_up_s, mean_down_s=t.mean_down_s, seconds=TRACE_S, seed=t.seed
        )
    return trace.slots(trace.window(trace.read(t.file), t.start_s, TRACE_S * 365), t.nodes)


def train(recipe: Recipe, folder: Path, *, resume: bool = False, quiet: bool = False) -> None:
    """Run, or go on with, the run in `folder`, to its end or until it is stopped."""
    check(recipe)
    with folders.owned(folder):
        if resume:
            folders.write_recipe(recipe, folder)  # what was changed with --set holds for the next resume, too
        for left in folder.glob(".*.failure"):
            left.unlink()
        auth.make_token(folder / "token")
        console = None if quiet else Console(recipe, folder)
        with console or contextlib.nullcontext():
            finished = asyncio.run(Supervisor(recipe, folder, console).run())
        if console is not None:
            console.summary(finished=finished)


class Supervisor:
    def __init__(self, recipe: Recipe, folder: Path, console: Console | None) -> None:
        self.recipe, self.folder, self._console = recipe, folder, console
        self._token = auth.read_token(folder / "token")
        self._end: dict[str, Any] | None = None
        self._stopping = False
        self._controller: Handle | None = None
        self._workers: dict[str, tuple[Handle, float]] = {}
        """Those that this run started, and when each was last known to be in the fleet."""
        self._error: WindfallError | None = None

    async def run(self) -> bool:
        """True: the run is finished; False: it was stopped."""
        environment = {**os.environ, "WINDFALL_TOKEN": self._token}
        if self.recipe.fleet.tls_cert:
            environment["WINDFALL_TLS_PIN"] = str(self.recipe.fleet.tls_cert)
        nursery = Nursery(
            entry="windfall.cli:main", modules=PRELOADED, log=self.folder / "nursery.log", env=environment
        )
        (self.folder / "workers").mkdir(exist_ok=True)
        async with nursery, self._signals(), self._showing():
            await self._all(nursery, environment)
        if self._error is not None:
            raise self._error
        return bool(self._end and self._end["finished"])

    async def _all(self, nursery: Nursery, environment: dict[str, str]) -> None:
        argv = [sys.executable, "-m", "windfall.cli", "_controller", str(self.folder)]

        async def controller() -> Handle:
            self._controller = await process.start(
                name="controller", argv=argv, env=environment, log=self.folder / "controller.log"
            )
            return self._controller

        async def trainer() -> Handle:
            return await nursery.start(
                name="trainer", argv=["windfall", "_trainer", str(self.folder)], env=environment,
                log=self.folder / "trainer.log",
            )  # fmt: skip

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
            self._error = self._failure() or e
        finally:
            for task in (main, *tasks):
                task.cancel()
            await asyncio.gather(main, *tasks, return_exceptions=True)

    async def _keep(self, role: str, start: Callable[[], Any], restart_on: set[int] | None = None) -> None:
        """Until it ends by itself with status 0. Killed by a signal, it is started again."""
        quick, handle = 0, None
        try:
            while True:
                began = time.monotonic()
                try:
                    handle = await start()
                    code = await handle.wait()
                except NurseryLost:
                    code = -signal.SIGKILL  # it took its children with it
                if code == 0 and (role == "controller" or self._stopping):
                    return
                if code > 0 and code not in (restart_on or set()):
                    raise WindfallError(
                        f"the {role} ended with status {code}", where=str(self.folder / f"{role}.log"),
                        fix=_tail(self.folder / f"{role}.log"),
                    )  # fmt: skip
                quick = quick + 1 if time.monotonic() - began < QUICK_S else 0
                if quick >= QUICK_DEATHS:
                    what = f"the {role} was killed {quick} times within {QUICK_S:g} s of its start"
                    raise WindfallError(what, where=str(self.folder), fix="Is there enough memory? See its log.")
                self._say(f"the {role} was killed (status {code}); starting it again")
                await asyncio.sleep(min(5.0, 0.1 * 2**quick))
        finally:
            if handle is not None and handle.running:
                await asyncio.shield(handle.terminate(3.0 if role == "controller" else 0.0))

    async def _thaw(self) -> None:
        """A controller or a worker that stands still is as bad as a dead one."""
        while True:
            await asyncio.sleep(1.0)
            handle, said = self._controller, folders.read_json(self.folder / "fleet.json")
            self._look_for_workers(said)
            if handle and handle.running and said and said["t"] and not said["ended"]:
                seen = max(said["t"], (self.folder / "address.json").stat().st_mtime)
                if time.time() - seen > FROZEN_S:
                    self._say(f"the controller gave no sign of life for {FROZEN_S:g} s")
                    handle.kill()
                    await asyncio.sleep(FROZEN_S)

    def _look_for_workers(self, said: dict[str, Any] | None) -> None:
        """`said`: what the controller last said of the fleet. While it is silent, nobody is held to be missing."""
        now, live = time.monotonic(), said is not None and said["version"] is not None and time.time() - said["t"] < 3.0
        here = {w["worker"].partition("#")[0] for w in said["workers"] if w["state"] != "gone"} if said else set()
        for name, (handle, seen_s) in list(self._workers.items()):
            if not handle.running:
                del self._workers[name]
            elif not live or name in here:
                self._workers[name] = (handle, now)
            elif now - seen_s > MISSING_S:
                self._say(f"worker {name} runs, but has not been in the fleet for {MISSING_S:g} s; it is killed")
                handle.kill()

    async def _providers(self, nursery: Nursery, environment: dict[str, str]) -> list[Provider]:
        f, t = self.recipe.fleet, self.recipe.trace

        async def spawn(name: str, lease: Lease) -> Handle:
            argv = [
                "windfall", "worker", "--join", await self._url(), "--name", name, "--lease", lease.kind,
                "--price", str(lease.price_usd_per_h), "--threads", str(f.worker_threads), "--clouds", "none",
                "--device", self.recipe.run.device,
            ]  # fmt: skip
            handle = await nursery.start(
                name=name, argv=argv, env=environment, log=self.folder / "workers" / f"{name}.log"
            )
            self._workers[name] = (handle, time.monotonic())
            return handle

        out: list[Provider] = []
        if f.workers:
            terms = Lease(kind=f.kind, price_usd_per_h=f.price_usd_per_h)
            out.append(LocalProvider(spawn, f.workers, terms=terms, on_event=self._heard))
        if t.nodes:
            terms = Lease(kind="spot", price_usd_per_h=t.price_usd_per_h)
            out.append(TraceProvider(spawn, changes(self.recipe), speedup=t.speedup, terms=terms, on_event=self._heard))
        return out

    async def _url(self, timeout_s: float = 60.0) -> str:
        for _ in range(int(timeout_s * 20)):
            said = folders.read_json(self.folder / "address.json")
            if said and self._controller and self._controller.running:
                return said["url"]
            await asyncio.sleep(0.05)
        raise OSError(f"waited {timeout_s:g} s for the controller to listen")

    def _heard(self, name: str, /, **fields: Any) -> None:
        """Of a provider. What the workers themselves do is in the event log."""
        if name == "refused":
            self._say(f"worker {fields.get('worker', '?')} was refused: see workers/*.log")

    # showing

    @contextlib.asynccontextmanager
    async def _showing(self) -> AsyncIterator[None]:
        path = self.folder / "events.jsonl"
        at = path.stat().st_size if path.is_file() else 0
        show = asyncio.create_task(self._show(path, at))
        try:
            yield
        finally:
            await asyncio.sleep(0.15)  # what was written last
            show.cancel()
            await asyncio.gather(show, return_exceptions=True)

    async def _show(self, path: Path, at: int) -> None:
        """Every line that is added to the event log."""
        told, rest = False, b""
        while True:
            if path.is_file():
                with path.open("rb") as file:
                    file.seek(at)
                    data = file.read()
                at += len(data)
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take(line)
            if not told and (self.folder / "address.json").is_file() and self._controller:
                told = True
                self._tell_how_to_join()
            await asyncio.sleep(0.1)

    def _take(self, line: bytes) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            return  # torn by a kill
        if event.get("name") == "end":
            self._end = event
        if self._console is not None:
            self._console.show(event)

    def _tell_how_to_join(self) -> None:
        said = folders.read_json(self.folder / "address.json")
        if said and self._console is not None:
            self._console.join(said["url"], self._token)

    def _say(self, line: str) -> None:
        if self._console is not None:
            self._console.say(line)

    def _failure(self) -> WindfallError | None:
        """What one of the processes left word of."""
        for path in sorted(self.folder.glob(".*.failure")):
            said = folders.read_json(path)
            if said:
                return WindfallError(said["what"], where=said["where"], fix=said["fix"])
        return None

    @contextlib.asynccontextmanager
    async def _signals(self) -> AsyncIterator[None]:
        """The first Ctrl-C or SIGTERM asks the run to stop and save; the second ends it at once."""
        loop = asyncio.get_running_loop()
        current = asyncio.current_task()

        def asked() -> None:
            if self._stopping:
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


def _tail(log: Path, lines: int = 8) -> str:
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
