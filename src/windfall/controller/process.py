"""The controller process: one port, the journal, the loop. No torch.

    supervisor ──starts──▶ controller ◀──connect── trainer, workers

It exits with status 0 when the run is finished or was stopped, 2 after an error that the user can fix, and 1 after any
other exception, wherever it was raised: in a task, in a callback, or while serving a link (errors.py). If it is
killed, it is restarted and continues from its journal; workers and trainer reconnect by themselves.

    run ─┬─ _run_steps       the steps of controller/assembly.py    until the run is finished or stopped
         ├─ dispatch.watch   heartbeats and deadlines           forever
         ├─ _snapshots       fleet.json                         forever
         ├─ life.tick        local_generation                   forever
         ├─ observers        the page of the run, ...           forever
         ├─ log_activities   what workers do, for the timeline  forever
         └─ _write_failure   waits for a failed write           until one fails; its error ends the run

When the first of them ends, the others are canceled. No failure goes unnoticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import traceback
from collections.abc import Awaitable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from windfall import errors
from windfall import run_folder as folders
from windfall.controller.assembly import ControllerLife
from windfall.controller.fleet_report import Ended
from windfall.controller.gateway.agents import AgentService
from windfall.controller.ledger.journal import Journal
from windfall.controller.observer import ObserverPart, RunObserver
from windfall.controller.own_loop import LoopPart, OwnLoop
from windfall.controller.rollout.stream import Rollout, Stopped
from windfall.envs import held_out
from windfall.envs.hosting import evaluation_data, recipe_host
from windfall.errors import WindfallError, run_until_first
from windfall.events.log import EventLog
from windfall.events.sinks import ThreadedSink, make_sinks
from windfall.link import auth, invitation, listener, tls
from windfall.link import messages as m
from windfall.link.base import Link, LinkClosed
from windfall.link.gate import Gate, Terms
from windfall.link.socket import Port, Route
from windfall.models import tokenizer
from windfall.models.text import Text
from windfall.recipe.changes import token_settings
from windfall.recipe.file import load_recipe
from windfall.recipe.sections import Recipe
from windfall.training import CheckpointState

TRAINER_HEARTBEAT_S = 10.0
"""Seconds between two heartbeats of the trainer's link."""
TRAINER_HELLO_BYTES = 1 << 20
"""Largest Hello of a trainer: it contains the complete configuration of the model."""
TOOLS = {"tensorboard", "wandb", "prometheus"}
"""Keys of the recipe's [log] section that name tools."""
SNAPSHOT_S = 1.0
"""Seconds between two snapshots in fleet.json."""
SNAPSHOT_TRIES = 10
"""Failed snapshots in a row that end the run, before the supervisor considers this process frozen."""


def main(folder: Path, observing: Sequence[ObserverPart] = (), looping: Sequence[LoopPart] = ()) -> int:
    """`observing`: the parts that observe this run. `looping`: those that may have a loop for it."""
    recipe = load_recipe(folder / "recipe.toml")
    with folders.owned(folder, "controller", timeout_s=10.0), contextlib.ExitStack() as stack:
        resumed = (folder / "events.jsonl").is_file()
        try:
            events = stack.enter_context(contextlib.closing(EventLog(folder / "events.jsonl")))
            sinks = make_sinks(folder=folder, run=folder.resolve().name, **recipe.log.model_dump(include=TOOLS))
            for sink in sinks:
                stack.callback(sink.close)
            made = [part.observer(recipe, folder, events) for part in observing]
            observers = [observer for observer in made if observer is not None]
            loop = next((loop for part in looping if (loop := part.loop(recipe, folder)) is not None), None)
            controller = ControllerProcess(recipe, folder, events, resumed, sinks, observers, loop)
            asyncio.run(errors.guard(controller.run()))
        except WindfallError as e:
            return folders.fail(folder, "controller", e, 2)
        except Exception as e:  # fault boundary: the traceback goes to the log, its last line to the supervisor
            traceback.print_exc()
            if (error := errors.file_system_error(e, folder)) is not None:
                return folders.fail(folder, "controller", error, 2)
            fix = "This is a bug. Please report it with the traceback at the end of that file; the run can be resumed."
            error = WindfallError(
                f"the controller failed: {errors.last_line(e)}", where=str(folder / "controller.log"), fix=fix
            )
            return folders.fail(folder, "controller", error)
    return 0


def settings_digest(recipe: Recipe) -> str:
    """Digest of all settings that affect the tokens of a response. If it changes, the journal is void."""
    return xxhash.xxh3_128_hexdigest(json.dumps(token_settings(recipe)).encode())


class ControllerProcess:
    def __init__(
        self, recipe: Recipe, folder: Path, events: EventLog, resumed: bool, sinks: Sequence[ThreadedSink] = (),
        observers: Sequence[RunObserver] = (), own_loop: OwnLoop | None = None,
    ) -> None:  # fmt: skip
        """`own_loop`: takes the place of the loop of reinforcement learning."""
        self.recipe, self.folder, self.events, self.sinks = recipe, folder, events, sinks
        for sink in sinks:
            events.attach(sink)
        # What fills slots also keeps what must survive of their responses.
        self.journal = None if recipe.has_slots else Journal(folder / "journal", settings_digest(recipe))
        self.observers, self.own_loop = observers, own_loop
        self.life = ControllerLife(
            recipe, events, self.journal, resumed=resumed, observe=[observer.observe for observer in observers]
        )
        self._last_snapshot: dict[str, Any] | None = None
        self.dispatch, self.trainer = self.life.dispatch, self.life.lead.trainer
        self.gate = Gate(
            recipe.run.name, auth.read_token(folder / "token"), log=events.instant,
            max_workers=recipe.fleet.max_workers, trainer_secret=auth.make_token(folder / "trainer.secret"),
            borrows=recipe.fleet.borrowed_max > 0, policies=recipe.names(),
        )  # fmt: skip
        self.gate.choose = self.dispatch.choose_base
        self._terms: dict[str, Terms] = {}
        """By base whose trainer has connected."""
        self.life.on_trainer = self._set_terms
        self.life.held_out = {
            name: held_out.describe(recipe.env, recipe.of(name).eval.tasks, evaluation_data(recipe))
            for name in recipe.names()
            if recipe.is_trained(name)
        }
        warnings = dict.fromkeys(warning for each in self.life.held_out.values() for warning in each.warnings)
        for warning in () if resumed else warnings:
            events.instant("eval_warning", why=warning)
        self._error: WindfallError | None = None
        self._write_failed = asyncio.Event()
        events.failed = self._on_write_failure
        if self.journal is not None:
            self.journal.failed = self._on_write_failure
        self._end: dict[str, Any] | None = None
        """Fields of the last event of the log; None if the run ends with an error."""

    async def run(self) -> None:
        port = await self._listen()
        try:
            self._stop_on_signals()
            await run_until_first(
                self._run_steps(), self.dispatch.watch(), self._snapshots(), self.life.tick(),
                self._write_failure(), self.life.log_activities(),
                *(observer.run(lambda: self._last_snapshot) for observer in self.observers),
            )  # fmt: skip
        except Stopped:  # before there was anything to save
            self.events.instant("stopped", step=self.life.lead.state.step)
            self._end = {"step": self.life.lead.state.step, "finished": False}
        finally:
            await self._drain_workers()
            self.life.log_activity(asyncio.get_running_loop().time())
            how = "failed" if self._end is None else "finished" if self._end["finished"] else "stopped"
            for observer in self.observers:
                await observer.close(how)
            await port.close()
            with contextlib.suppress(OSError):  # the disk is full: that is already reported, or no longer matters
                self._snapshot(ended=how)
            if self.journal is not None:
                self.journal.close()
            left = await asyncio.gather(*(asyncio.to_thread(sink.close) for sink in self.sinks))
            for sink, why in zip(self.sinks, left, strict=True):
                if why:  # it did not take the last events
                    self.events.instant("sink_dropped", sink=sink.__qualname__, why=why)
            if self._end is not None:
                now = asyncio.get_running_loop().time()
                self.events.instant("end", **self._end, **self.life.report.bill(now))

    async def _run_steps(self) -> None:
        own = self.own_loop
        reached = await (self._rollout_steps() if own is None else own.run(self.life, self._text))
        self._end = {"step": reached.step, "finished": reached.step >= self.recipe.run.steps}

    async def _rollout_steps(self) -> CheckpointState:
        async with recipe_host(self.recipe, self.events.instant, self.folder) as env:
            await self.life.unless_stopped(env.ready())
            async with AgentService(self.recipe, self.folder, self.events, env) as agents:
                self.life.on_rollout = partial(self._prepare, agents)
                return await self.life.steps(env, self._text, agents.counters)

    async def _prepare(self, agents: AgentService, rollout: Rollout) -> None:
        for observer in self.observers:
            observer.attach(rollout)
        if agents.launcher is not None:
            await agents.open(rollout, {name: tokenizer.load(self._tokenizer(name)) for name in rollout.texts})

    def _text(self, policy: str) -> Text:
        """The trainer wrote the tokenizer before it connected."""
        folder, chat = self._tokenizer(policy), self.recipe.of(policy).chat
        loaded, options = tokenizer.load(folder), chat.options()
        text = Text(loaded, tokenizer.stop_ids(folder), **options)
        for name in sorted({*chat.arguments} - (loaded.reads(options["template"]) if chat.enabled else set())):
            self.events.instant("chat_warning", why=f"chat.arguments.{name} has no effect: no chat template reads it")
        return text

    def _tokenizer(self, policy: str) -> Path:
        return folders.policy_folder(self.folder, policy) / "tokenizer"

    def _on_write_failure(self, error: WindfallError) -> None:
        """A write to the journal or the event log failed. The writer may be a link or a callback, where an exception
        would not end the run, so `_write_failure` raises it, too."""
        self._error = self._error or error
        self._write_failed.set()

    async def _write_failure(self) -> None:
        await self._write_failed.wait()
        assert self._error is not None
        raise self._error

    def _set_terms(self, hello: m.TrainerHello) -> None:
        """No worker joins before the trainers of all bases have connected: all of them would get the first one."""
        f, bases, base = self.recipe.fleet, self.recipe.bases(), self.life.base_of(hello.policy)
        self._terms[base] = Terms(
            model=hello.model,
            engine=self.life.engine_spec(hello),
            heartbeat_s=f.heartbeat_s,
            stalled_s=f.stalled_s,
            upload_bytes_per_s=self.recipe.weights.upload_gbit_per_s * 1e9 / 8,
            policies=tuple(name for name in bases[base] if name in self.recipe.answering()),
        )
        if len(self._terms) == len(bases):
            self.gate.terms = dict(self._terms)

    async def _attend_trainer(self, link: Link, hello: m.TrainerHello) -> None:
        await self.life.attend_trainer(link, hello)
        await asyncio.sleep(TRAINER_HEARTBEAT_S)
        lock = folders.trainer_role(self.life.base_of(hello.policy))
        if self.life.policies[hello.policy].trainer.hello is None and folders.held(self.folder, lock):
            # Its process holds the lock but does not reconnect: it is frozen. The controller does not kill it, because
            # a pid that came over a link cannot be trusted. The supervisor knows what it has started, and restarts it.
            pid = int(hello.facts["pid"])
            with contextlib.suppress(ProcessLookupError):  # it has died: its successor holds the lock and is starting
                os.kill(pid, 0)
                self.events.instant("trainer_frozen", pid=pid)
                folders.replace(self.folder / folders.FROZEN_TRAINER, json.dumps({"pid": pid}))

    async def _attend(self, link: Link, attending: Awaitable[None]) -> None:
        try:
            await attending
        except LinkClosed:
            raise
        except Exception as e:  # fault boundary: the web server would only log it, but it must end the controller
            context = {"message": f"the controller failed while serving {link.peer}", "exception": e}
            asyncio.get_running_loop().call_exception_handler(context)

    # the port

    async def _listen(self) -> Port:
        f = self.recipe.fleet
        listener.raise_file_limit()
        context = tls.server_context(f)
        routes = {
            "/worker": Route(
                receives=m.FromWorker, max_frame_bytes=m.MAX_FRAME_BYTES,
                handler=lambda link: self._attend(link, self.gate.worker(link, self.life.attend)),
            ),
            "/trainer": Route(
                receives=m.FromTrainer, max_frame_bytes=m.MAX_TRAINER_FRAME_BYTES, heartbeat_s=TRAINER_HEARTBEAT_S,
                same_machine_only=True, unauthenticated_bytes=TRAINER_HELLO_BYTES,
                handler=lambda link: self._attend(link, self.gate.trainer(link, self._attend_trainer)),
            ),
        }  # fmt: skip
        before = (folders.address(self.folder) or {}).get("port", 0)
        pages = {path: handler for observer in self.observers for path, handler in observer.pages().items()}
        port = Port(f.host, f.port or before, routes, context, pages=pages)
        try:
            await port.open()
        except WindfallError:
            if f.port or not before:
                raise
            port = Port(f.host, 0, routes, context, pages=pages)  # another process now uses the previous port
            await port.open()
        for observer in self.observers:
            observer.listening(port)
        host = "127.0.0.1" if f.host in invitation.ALL_INTERFACES else f.host
        url = f"{'https' if context else 'http'}://{f'[{host}]' if ':' in host else host}:{port.port}"
        address = {"url": url, "port": port.port, "pid": os.getpid(), "pages": sorted(pages)}
        folders.replace(self.folder / "address.json", json.dumps(address))
        return port

    async def _drain_workers(self) -> None:
        for member in list(self.dispatch.members.here()):
            self.dispatch.drain(member.id, "the run is over")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                while any(True for _ in self.dispatch.members.here()):
                    await asyncio.sleep(0.02)

    # fleet.json

    async def _snapshots(self) -> None:
        failed, path = 0, self.folder / "fleet.json"
        while True:
            try:
                self._snapshot()
                failed = 0
            except OSError as e:
                failed += 1  # the run does not depend on it, and the next one may succeed
                if failed == SNAPSHOT_TRIES:
                    fix = "Free disk space or make the file writable; then continue with `windfall resume`."
                    raise errors.unwritable("the snapshot", path, e, fix) from e
            await asyncio.sleep(SNAPSHOT_S)

    def _snapshot(self, ended: Ended | None = None) -> None:
        now_s = asyncio.get_running_loop().time()
        rollout, graders = self.life.rollout, None
        if rollout is not None:
            graders = rollout.grading.snapshot(now_s)
            if ended is None and rollout.grading.slow_s(now_s) is not None:
                self.events.instant("grading_slow", **graders)
        steps = {name: policy.state.step for name, policy in self.life.trained.items()}
        snapshot = self.life.report.snapshot(steps=steps, now_s=now_s, ended=ended, graders=graders)
        snapshot |= self.own_loop.snapshot() if self.own_loop is not None else {}
        self._last_snapshot = snapshot
        folders.replace(self.folder / "fleet.json", json.dumps(snapshot))

    def _stop_on_signals(self) -> None:
        """SIGTERM from the supervisor, or SIGINT, asks the run to stop and save."""

        def on_signal() -> None:
            if not self.life.stop.is_set():
                self.life.stop.set()
                self.events.instant("stopping")

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
