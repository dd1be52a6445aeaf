"""The controller's process: one port, the journal, the loop. No torch.

    supervisor ──starts──▶ control ◀──dial── trainer, workers

It ends with status 0 when the run is finished or was stopped, 2 after an error that a person can put right, 1 after any
other exception, wherever it was raised: in a task, a callback, or while attending to a link (unhandled.py). Killed, it
is started again and goes on from its journal: workers and trainer dial again by themselves.

    run ─┬─ _run         the steps of launch/assembly.py    until the run is finished or stopped
         ├─ watch        of dispatch                    for ever
         ├─ _snapshots   fleet.json                     for ever
         ├─ tick         of seeding                     for ever
         └─ _broken      a write that failed            whoever wrote: its error ends the run

The first of them to end ends the others; nothing here fails unseen.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import traceback
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import xxhash

from windfall import config, unhandled
from windfall import run_folder as folders
from windfall.config import Recipe
from windfall.envs import held_out
from windfall.envs.hosting import env_host
from windfall.errors import WindfallError
from windfall.events.log import EventLog, tensorboard
from windfall.launch import tls
from windfall.launch.assembly import ControllerLife, first
from windfall.launch.fleet_report import Ended
from windfall.ledger.journal import Journal
from windfall.link import auth, listener
from windfall.link import messages as m
from windfall.link.base import Link, LinkClosed
from windfall.link.gate import Gate, Terms
from windfall.link.socket import Port, Route
from windfall.models import tokenizer
from windfall.models.text import Text
from windfall.rollout.groups import Stopped

TRAINER_BEAT_S = 10.0
TRAINER_HELLO_BYTES = 1 << 20
"""Its Hello has the model's whole configuration."""
SNAPSHOT_S = 1.0
SNAPSHOT_TRIES = 10
"""In a row. Less than the supervisor takes for a sign that we are frozen."""


def main(folder: Path) -> int:
    recipe = config.load(folder / "recipe.toml")
    with folders.owned(folder, "controller", timeout_s=10.0):
        again = (folder / "events.jsonl").is_file()
        try:
            with contextlib.closing(EventLog(folder / "events.jsonl")) as events:
                if recipe.log.tensorboard:
                    events.attach(tensorboard(folder / "tensorboard"))
                asyncio.run(unhandled.guard(Control(recipe, folder, events, again).run()))
        except WindfallError as e:
            folders.fail(folder, "controller", e)
            return 2
        except Exception as e:  # fault boundary: the traceback goes to the log, its last line to the supervisor
            traceback.print_exc()
            fix = (
                "This is a defect. Please report it with the traceback at the end of that file; the run can be resumed."
            )
            what = f"the controller failed: {unhandled.last_line(e)}"
            folders.fail(folder, "controller", WindfallError(what, where=str(folder / "controller.log"), fix=fix))
            return 1
    return 0


def settings(recipe: Recipe) -> str:
    """A fingerprint of all that decides which tokens a response gets. The journal is void when it changes."""
    return xxhash.xxh3_128_hexdigest(json.dumps(config.deciding(recipe)).encode())


class Control:
    def __init__(self, recipe: Recipe, folder: Path, events: EventLog, again: bool) -> None:
        self.recipe, self.folder, self.events = recipe, folder, events
        self.journal = Journal(folder / "journal", settings(recipe))
        self.life = ControllerLife(recipe, events, self.journal, again=again)
        self.dispatch, self.trainer = self.life.dispatch, self.life.trainer
        self.gate = Gate(
            recipe.run.name, auth.read_token(folder / "token"), log=events.instant,
            most_workers=recipe.fleet.max_workers, trainer_secret=auth.make_token(folder / "trainer.secret"),
        )  # fmt: skip
        self.life.connected = self._set_terms
        self.life.held_out = held_out.describe(recipe.env, recipe.eval.tasks)
        for warning in self.life.held_out.warnings if recipe.eval.tasks and not again else ():
            events.instant("eval_warning", why=warning)
        self._error: WindfallError | None = None
        self._failed = asyncio.Event()
        self.journal.failed = events.failed = self._fail
        self._end: dict[str, Any] | None = None
        """The log's last word; none when the run ends by an error."""

    async def run(self) -> None:
        port = await self._listen()
        try:
            with self._signals():
                await first(self._run(), self.dispatch.watch(), self._snapshots(), self.life.tick(), self._broken())
        finally:
            await self._send_all_away()
            await port.close()
            with contextlib.suppress(OSError):  # the disk is full: that is being said already, or matters to nobody
                how = "failed" if self._end is None else "finished" if self._end["finished"] else "stopped"
                self._snapshot(ended=how)
            self.journal.close()
            if self._end is not None:
                now = asyncio.get_running_loop().time()
                self.events.instant("end", **self._end, **self.life.telling.last_bill(now))

    async def _run(self) -> None:
        async with env_host(self.recipe.env, self.recipe.run.seed) as env:
            await self.life.or_stop(env.ready())
            reached = await self.life.steps(env, self._text)
        self._end = {"step": reached.step, "finished": reached.step >= self.recipe.run.steps}

    def _text(self) -> Text:
        """The trainer has written the tokenizer before it dialled."""
        return Text(tokenizer.load(self.folder / "tokenizer"), tokenizer.stop_ids(self.folder / "tokenizer"))

    def _fail(self, error: WindfallError) -> None:
        """Something was not written. Whoever wrote it may be a worker's link or a callback: it is raised here, too."""
        self._error = self._error or error
        self._failed.set()

    async def _broken(self) -> None:
        await self._failed.wait()
        assert self._error is not None
        raise self._error

    def _set_terms(self, hello: m.TrainerHello) -> None:
        f = self.recipe.fleet
        self.gate.terms = Terms(
            model=hello.model, engine=hello.engine, heartbeat_s=f.heartbeat_s, stalled_s=f.stalled_s
        )

    async def _attend_trainer(self, link: Link, hello: m.TrainerHello) -> None:
        await self.life.attend_trainer(link, hello)
        await asyncio.sleep(TRAINER_BEAT_S)
        if self.trainer.hello is None and folders.held(self.folder, "trainer"):
            # Its process is there and does not dial again: it is frozen. The supervisor, which knows what it has
            # started, kills it and starts another: nobody is killed by a number that came over a link.
            pid = int(hello.facts["pid"])
            with contextlib.suppress(ProcessLookupError):  # it has died: its successor holds the lock, and starts up
                os.kill(pid, 0)
                self.events.instant("trainer_frozen", pid=pid)
                folders.replace(self.folder / ".trainer.frozen", json.dumps({"pid": pid}))

    async def _attend(self, link: Link, attending: Awaitable[None]) -> None:
        try:
            await attending
        except LinkClosed:
            raise
        except Exception as e:  # fault boundary: the web server would only log it, and this must end the controller
            said = {"message": f"the controller failed {link.peer}", "exception": e}
            asyncio.get_running_loop().call_exception_handler(said)

    # the port

    async def _listen(self) -> Port:
        f = self.recipe.fleet
        listener.raise_file_limit()
        context = tls.serving(f)
        routes = {
            "/worker": Route(
                receives=m.FromWorker, most_bytes=m.MAX_FRAME_BYTES,
                attend=lambda link: self._attend(link, self.gate.worker(link, self.life.attend)),
            ),
            "/trainer": Route(
                receives=m.FromTrainer, most_bytes=m.MAX_TRAINER_FRAME_BYTES, heartbeat_s=TRAINER_BEAT_S,
                here_only=True, stranger_bytes=TRAINER_HELLO_BYTES,
                attend=lambda link: self._attend(link, self.gate.trainer(link, self._attend_trainer)),
            ),
        }  # fmt: skip
        before = (folders.address(self.folder) or {}).get("port", 0)
        port = Port(f.host, f.port or before, routes, context)
        try:
            await port.open()
        except WindfallError:
            if f.port or not before:
                raise
            port = Port(f.host, 0, routes, context)  # somebody else has taken the one of last time
            await port.open()
        host = "127.0.0.1" if f.host in ("0.0.0.0", "::", "") else f.host
        url = f"{'https' if context else 'http'}://{f'[{host}]' if ':' in host else host}:{port.port}"
        said = {"url": url, "port": port.port, "pid": os.getpid()}
        folders.replace(self.folder / "address.json", json.dumps(said))
        return port

    async def _send_all_away(self) -> None:
        for member in list(self.dispatch.members.here()):
            self.dispatch.drain(member.id, "the run is over")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                while any(True for _ in self.dispatch.members.here()):
                    await asyncio.sleep(0.02)

    # what others see

    async def _snapshots(self) -> None:
        failed, path = 0, self.folder / "fleet.json"
        while True:
            try:
                self._snapshot()
                failed = 0
            except OSError as e:
                failed += 1  # the run does not need it, and the next may work
                if failed == SNAPSHOT_TRIES:
                    fix = "Make room, or make it writable; then go on with `windfall resume`."
                    raise WindfallError(f"cannot write: {e.strerror or e}", where=str(path), fix=fix) from e
            await asyncio.sleep(SNAPSHOT_S)

    def _snapshot(self, ended: Ended | None = None) -> None:
        now_s = asyncio.get_running_loop().time()
        said = self.life.telling.snapshot(step=self.life.state.step, now_s=now_s, ended=ended)
        folders.replace(self.folder / "fleet.json", json.dumps(said))

    # stopping

    @contextlib.contextmanager
    def _signals(self) -> Any:
        """SIGTERM, from the supervisor, asks the run to stop and save."""
        loop = asyncio.get_running_loop()

        def asked() -> None:
            if not self.life.stop.is_set():
                self.life.stop.set()
                self.events.instant("stopping")

        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, asked)
        try:
            yield
        except Stopped:  # before there was anything to save
            self.events.instant("stopped", step=self.life.state.step)
            self._end = {"step": self.life.state.step, "finished": False}
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
