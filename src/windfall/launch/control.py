"""The controller's process: one port, the journal, the loop. No torch.

    supervisor ──starts──▶ control ◀──dial── trainer, workers

It ends with status 0 when the run is finished or was stopped, 2 after an error that a person can put right. Killed, it
is started again and goes on from its journal: workers and trainer dial again by themselves.

    run ─┬─ _run         the trainer, then the loop     until the run is finished or stopped
         ├─ watch        of dispatch                    for ever
         ├─ _snapshots   fleet.json                     for ever
         ├─ _tick        of seeding                     for ever
         └─ _broken      a write that failed            whoever wrote: its error ends the run

The first of them to end ends the others; nothing here fails unseen.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Coroutine, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import xxhash

from windfall import algorithms, config, envs, listening, prices, tokenizer
from windfall.config import Recipe
from windfall.controller import Controller
from windfall.errors import WindfallError
from windfall.events import EventLog, read, tensorboard
from windfall.launch import folder as folders
from windfall.launch import security
from windfall.launch.telling import Telling, billed_s
from windfall.link import auth
from windfall.link import messages as m
from windfall.link.base import Link
from windfall.link.gate import Gate, Terms
from windfall.link.socket import Port, Route
from windfall.rollout import offload
from windfall.rollout.dispatch import Dispatch
from windfall.rollout.journal import Journal
from windfall.rollout.manager import Rollout, Stopped
from windfall.rollout.members import Patience
from windfall.rollout.seeding import Seeding
from windfall.rollout.work import Offer
from windfall.text import Text
from windfall.train.base import TrainerLost
from windfall.train.checkpoint import State
from windfall.train.remote import RemoteTrainer
from windfall.types import Lease

TRAINER_START_S = 600.0
TRAINER_BEAT_S = 10.0
TRAINER_HELLO_BYTES = 1 << 20
"""Its Hello has the model's whole configuration."""
SNAPSHOT_S = 1.0
TICK_S = 0.1
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
                asyncio.run(Control(recipe, folder, events, again).run())
        except WindfallError as e:
            folders.fail(folder, "controller", e)
            return 2
    return 0


def settings(recipe: Recipe) -> str:
    """A fingerprint of all that decides which tokens a response gets. The journal is void when it changes."""
    parts = [recipe.env, recipe.algorithm, recipe.rollout, recipe.train, recipe.model]
    said = json.dumps([p.model_dump(mode="json") for p in parts] + [recipe.run.seed, recipe.run.deterministic])
    return xxhash.xxh3_128_hexdigest(said.encode())


class Control:
    def __init__(self, recipe: Recipe, folder: Path, events: EventLog, again: bool) -> None:
        f = recipe.fleet
        self.recipe, self.folder, self.events, self._again = recipe, folder, events, again
        self.journal = Journal(folder / "journal", settings(recipe))
        patience = Patience(suspect_s=f.suspect_s, gone_s=f.gone_s, stalled_s=f.stalled_s)
        t = recipe.techniques
        self.dispatch = Dispatch(
            events=events, journal=self.journal, patience=patience, techniques=t, billed_s=billed_s(events.path)
        )
        self.trainer = RemoteTrainer()
        policy = offload.make(f.offload if t.seeding else "never", first_s=f.first_seed_s)
        self.seeding = Seeding(self.dispatch, policy, events, recipe.rollout.groups * recipe.rollout.group_size)
        self.telling = Telling(recipe, self.dispatch, events)
        self.gate = Gate(
            recipe.run.name, auth.read_token(folder / "token"), log=events.instant, most_workers=f.max_workers,
            trainer_secret=auth.make_token(folder / "trainer.secret"),
        )  # fmt: skip
        self.rollout: Rollout | None = None
        self._stop = asyncio.Event()
        self._trainers = count(1)
        self._state = State(step=0, next_task=0)
        self._error: WindfallError | None = None
        self._failed = asyncio.Event()
        self.journal.failed = events.failed = self._fail
        self._end: dict[str, Any] | None = None
        """The log's last word; none when the run ends by an error."""

    async def run(self) -> None:
        port = await self._listen()
        try:
            env = envs.make(self.recipe.env, self.recipe.run.seed)
            with self._signals():
                await first(self._run(env), self.dispatch.watch(), self._snapshots(), self._tick(), self._broken())
        finally:
            await self._send_all_away()
            await port.close()
            with contextlib.suppress(OSError):  # the disk is full: that is being said already, or matters to nobody
                self._snapshot(ended=True)
            self.journal.close()
            if self._end is not None:
                self.events.instant("end", **self._end, **self.telling.last_bill(asyncio.get_running_loop().time()))

    async def _run(self, env: Any) -> None:
        hello = await self._or_stop(self.trainer.connected(TRAINER_START_S))
        text = Text(tokenizer.load(self.folder / "tokenizer"), tokenizer.stop_ids(self.folder / "tokenizer"))
        self._announce(hello)
        await self._loop(env, text, hello.micro_tokens)

    def _fail(self, error: WindfallError) -> None:
        """Something was not written. Whoever wrote it may be a worker's link or a callback: it is raised here, too."""
        self._error = self._error or error
        self._failed.set()

    async def _broken(self) -> None:
        await self._failed.wait()
        assert self._error is not None
        raise self._error

    async def _loop(self, env: Any, text: Text, micro_tokens: int) -> None:
        recipe = self.recipe
        self.rollout = Rollout(self.dispatch, env, text, recipe.rollout, seed=recipe.run.seed, events=self.events)
        watch_stop = asyncio.create_task(self._interrupt())
        controller = Controller(
            recipe=recipe, algorithm=algorithms.make(recipe.algorithm.name, **recipe.algorithm.options),
            trainer=self.trainer, rollout=self.rollout, pace=self.seeding, events=self.events,
            connect=self._connect, offer=self._offer,
            saved=lambda state: self.journal.rotate(state.step), counters=self._counters, micro_tokens=micro_tokens,
            evaluated={e["step"] for e in read(self.events.path) if (e["kind"], e["name"]) == ("scalar", "eval")},
        )  # fmt: skip
        try:
            reached = await controller.run()
        finally:
            watch_stop.cancel()
        self._end = {"step": reached.step, "finished": reached.step >= recipe.run.steps}

    async def _connect(self) -> State:
        """A trainer is here: go on from the step it has, with what the journal knows of later ones."""
        hello = await self._or_stop(self.trainer.connected(TRAINER_START_S))
        self._state = State(step=hello.step, next_task=hello.next_task)
        if self._again:
            self.events.instant("resumed", step=hello.step)
        self._again = True
        self.events.instant("trainer_ready", step=hello.step, pid=hello.facts["pid"], digest=hello.digest)
        assert self.rollout is not None, "connected before there is a loop"
        self.journal.close()
        found = await asyncio.to_thread(self.journal.find)  # seconds for a long one; workers must be heard meanwhile
        if self.trainer.hello is not hello:
            raise TrainerLost("it went away, or another has taken its place")
        self.rollout.past = self.journal.begin(hello.step, found)
        self.dispatch.ledger.vocabulary = json.loads(hello.engine.model_config).get("vocab_size", 1 << 32)
        self.gate.terms = Terms(model=hello.model, engine=hello.engine, heartbeat_s=self.recipe.fleet.heartbeat_s,
                                stalled_s=self.recipe.fleet.stalled_s)  # fmt: skip
        self.dispatch.set_offer(Offer(version=hello.version, digest=hello.digest, url=hello.url))
        return self._state

    def _offer(self, published: m.Updated) -> None:
        hello = self.trainer.hello
        if hello is not None:  # else it has just been lost, and the next one says what there is
            self._state = State(step=published.version, next_task=self._state.next_task)
            self.dispatch.set_offer(Offer(version=published.version, digest=published.digest, url=hello.url))

    def _announce(self, hello: m.TrainerHello) -> None:
        if not self._again:
            self.events.instant("start", step=hello.step, steps=self.recipe.run.steps, **hello.facts)

    async def _attend_trainer(self, link: Link, hello: m.TrainerHello) -> None:
        if self.rollout is not None:
            # The run goes on from what this one has. Nobody else may have the weights of the step under way any more.
            self.rollout.interrupt(TrainerLost("another trainer has taken its place"))
        with self._paying(hello):
            await self.trainer.attend(link, hello)
        await asyncio.sleep(TRAINER_BEAT_S)
        if self.trainer.hello is None and folders.held(self.folder, "trainer"):
            # Its process is there and does not dial again: it is frozen. The supervisor, which knows what it has
            # started, kills it and starts another: nobody is killed by a number that came over a link.
            pid = int(hello.facts["pid"])
            with contextlib.suppress(ProcessLookupError):  # it has died: its successor holds the lock, and starts up
                os.kill(pid, 0)
                self.events.instant("trainer_frozen", pid=pid)
                folders.replace(self.folder / ".trainer.frozen", json.dumps({"pid": pid}))

    @contextlib.contextmanager
    def _paying(self, hello: m.TrainerHello) -> Iterator[None]:
        """A trainer without an engine of its own is no worker, and costs all the same."""
        if self.recipe.fleet.local:
            yield
            return
        accounts, loop, id = self.dispatch.accounts, asyncio.get_running_loop(), f"trainer {next(self._trainers)}"
        device = str(hello.facts.get("machine", ""))
        lease = Lease(kind="reserved", device=device, price_usd_per_h=self.recipe.fleet.trainer_price_usd_per_h)
        now = loop.time()
        accounts.join(now, id, kind="reserved", usd_per_h=prices.of(lease).or_none, trainer=True, name="trainer",
                      started_s=now - float(hello.facts.get("age_s", 0.0)))  # fmt: skip
        accounts.paused(now, id)
        try:
            yield
        finally:
            accounts.gone(loop.time(), id, heard_s=loop.time())

    # the port

    async def _listen(self) -> Port:
        f = self.recipe.fleet
        listening.raise_file_limit()
        context = security.serving(f)
        routes = {
            "/worker": Route(
                receives=m.FromWorker, most_bytes=m.MAX_FRAME_BYTES,
                attend=lambda link: self.gate.worker(link, self.dispatch.attend),
            ),
            "/trainer": Route(
                receives=m.FromTrainer, most_bytes=m.MAX_TRAINER_FRAME_BYTES, heartbeat_s=TRAINER_BEAT_S,
                here_only=True, stranger_bytes=TRAINER_HELLO_BYTES,
                attend=lambda link: self.gate.trainer(link, self._attend_trainer),
            ),
        }  # fmt: skip
        before = (folders.read_json(self.folder / "address.json") or {}).get("port", 0)
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

    def _counters(self) -> dict[str, Any]:
        return self.telling.counters(self.seeding.last, asyncio.get_running_loop().time())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.seeding.tick()

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

    def _snapshot(self, ended: bool = False) -> None:
        said = self.telling.snapshot(step=self._state.step, now_s=asyncio.get_running_loop().time(), ended=ended)
        folders.replace(self.folder / "fleet.json", json.dumps(said))

    # stopping

    async def _or_stop(self, wait: Any) -> Any:
        """What is waited for, unless somebody asks the run to stop first."""
        waiting, stop = asyncio.ensure_future(wait), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([waiting, stop], return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise Stopped
            return waiting.result()
        finally:
            waiting.cancel()
            stop.cancel()

    async def _interrupt(self) -> None:
        await self._stop.wait()
        if self.rollout is not None:
            self.rollout.interrupt()

    @contextlib.contextmanager
    def _signals(self) -> Any:
        """SIGTERM, from the supervisor, asks the run to stop and save."""
        loop = asyncio.get_running_loop()

        def asked() -> None:
            if not self._stop.is_set():
                self._stop.set()
                self.events.instant("stopping")

        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, asked)
        try:
            yield
        except Stopped:  # before there was anything to save
            self.events.instant("stopped", step=self._state.step)
            self._end = {"step": self._state.step, "finished": False}
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


async def first(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Until the first of them ends, or fails; the others are then cancelled, and waited for."""
    tasks = [asyncio.create_task(c) for c in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
