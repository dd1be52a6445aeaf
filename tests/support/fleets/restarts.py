"""A simulated run whose trainer and controller can be killed and restart, with a journal; its workers can be frozen.

    trainer.start ──▶ dial ──▶ [ a verb of verbs.py ]* ──▶ dial again when the link closes
          ▲                                                   │
          └── down_s ── killed, or the link closed between two updates of a step: restart from the last checkpoint

With several policies, those of one base have one process, with a link for each. When the trainer is killed, `local`
dies with it. When its link closes, the current order is completed, but its reply is lost: an update counts, and samples
accumulated for the next update are dropped. A killed controller loses everything that is not on disk; its event log and
its journal are. Its links close, and the peers dial again.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

from benchmarks.support.sim_lenders import LendingFleet
from tests.support.fleets.freezing import FreezingLender, FreezingWorker
from windfall.controller.assembly import ControllerLife
from windfall.controller.ledger.journal import Journal
from windfall.controller.ledger.journal_format import JournalContents
from windfall.controller.process import settings_digest
from windfall.events.log import EventLog
from windfall.link import messages as m
from windfall.sim.core.link import SimLink
from windfall.sim.core.run import Simulation
from windfall.sim.machines.linked_trainer import LinkedTrainer
from windfall.training import Sample
from windfall.types import LOCAL

REDIAL_S = 0.2


def lose_controller(link: SimLink, why: str) -> None:
    """The controller dies, and every message that it has not received is lost."""
    if link._closed is None:
        link._to_controller.clear()
        link._inbox.clear()
        link.cut(why)
        link._loop.call_soon(link._on_closed, why)


def abandon_journal(journal: Journal) -> None:
    """Behave as if the controller had been killed: unflushed records never reach the file."""
    if journal._file is not None:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, journal._file.fileno())
        os.close(devnull)


class RestartingTrainer(LinkedTrainer):
    def __init__(self, *args: Any, **options: Any) -> None:
        self.down_s = 60.0
        """Seconds until a killed process has been replaced."""
        self._updates = 0
        """Number of updates since the last complete step."""
        super().__init__(*args, **options)
        self.on_exit: Callable[[], None] = lambda: None
        self.on_trained: Callable[[int, list[Sample]], None] = lambda step, samples: None
        """Called after every completed step with all its samples."""
        self.saved = self.weights
        self.published: set[str] = set()
        """Digests of the versions that can be pulled: those that this process has published."""

    def start(self, began_s: float = 0.0) -> None:
        """Start a process with the weights of the last checkpoint."""
        self.weights, self.published = self.saved, {self.saved.digest}
        self._drop_samples()
        self.base.stores[0].fail("")
        super().start(began_s)

    def kill(self, why: str = "killed") -> None:
        """Kill the process. The next one starts after `down_s`."""
        for trainer in cast(list[RestartingTrainer], self.base.trainers):
            trainer._die(why)

    def _die(self, why: str) -> None:
        if self._process is None:
            return
        loop = asyncio.get_running_loop()
        if self._process is not asyncio.current_task():
            self._process.cancel()
        self._process = None
        self.published = set()
        self.base.stores[0].fail("unreachable")
        self.cut(why)
        self.on_exit()
        loop.call_later(self.down_s, self.start, loop.time())

    async def _run(self) -> None:
        while True:
            await super()._run()
            if self._completed is not None:
                self._publish()
            if self._updates:
                self.kill("its weights belong to no version")
                return
            self._drop_samples()
            await asyncio.sleep(REDIAL_S)

    async def _execute(self, order: object) -> object:
        reply = await super()._execute(order)
        if isinstance(order, m.Save):
            self.saved = self.weights
        return reply

    async def _update(self, order: m.OptimStep) -> m.Optimized:
        self._updates += 1
        return await super()._update(order)

    def _publish(self) -> m.PublishedVersion:
        samples = self._samples
        version = super()._publish()
        self.published.add(version.digest)
        self.on_trained(version.version, samples)
        return version

    def _drop_samples(self) -> None:
        super()._drop_samples()
        self._updates = 0


class RestartingFleet(LendingFleet):
    worker_class = FreezingWorker
    lender_class = FreezingLender


class RestartingSimulation(Simulation):
    """Everything that outlives a controller, and the current controller (`life`)."""

    trainer_class = RestartingTrainer
    trainer: RestartingTrainer
    trainers: dict[str, RestartingTrainer]
    fleet_class = RestartingFleet
    fleet: RestartingFleet

    def __init__(self, *args: Any, **options: Any) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.journal = Path(self._folder.name)
        self.controller_down_s = 5.0
        """Seconds until the replacement of a killed controller accepts connections."""
        self.down = False
        self.controller_starts = 0
        self._stopping = False
        self._killed = asyncio.Event()
        self._attending: dict[asyncio.Task[Any], SimLink] = {}
        self.on_hello: Callable[[Any, m.Hello], None] = lambda link, hello: None
        """Called with every worker that dials in."""
        super().__init__(*args, **options)
        self.trainer.on_exit = lambda: self.fleet._kill(LOCAL)

    def _start_controller(self) -> ControllerLife:
        recipe = self.scenario.recipe
        events = EventLog(self._log, self._sinks, clock=self._clock)
        journal = Journal(self.journal, settings_digest(recipe))
        self.controller_starts += 1
        life = ControllerLife(
            recipe,
            events,
            journal,
            resumed=self.controller_starts > 1,
            read_journal=self._find,
            rules=self.scenario.rules,
        )
        if self._stopping:
            life.stop.set()
        return life

    @staticmethod
    async def _find(journal: Journal, number: int, lowest: int) -> JournalContents:
        await asyncio.sleep(0.0)  # a real controller reads in a thread, and messages may arrive meanwhile
        return journal.read(number, lowest)

    def stop(self) -> None:
        self._stopping = True
        super().stop()

    def kill_controller(self) -> None:
        """From here on, nothing that this controller does reaches another process or the disk."""
        if self.down:
            return
        self._killed.set()
        self.down = True
        self.life.events.abandon()
        if self.life.journal is not None:
            abandon_journal(self.life.journal)
        for task, link in self._attending.items():
            lose_controller(link, "the controller was killed")
            task.cancel()
        self._attending.clear()

    async def run(self) -> None:
        with self._folder:
            await super().run()

    async def _run_controller(self, life: ControllerLife) -> None:
        await super()._run_controller(life)
        if life.journal is not None:
            life.journal.close()

    async def _run_controllers(self) -> None:
        """One controller after another."""
        while True:
            running = asyncio.create_task(self._run_controller(self.life))
            killed = asyncio.create_task(self._killed.wait())
            try:
                await asyncio.wait([running, killed], return_when=asyncio.FIRST_COMPLETED)
                if running.done() and not self.down:
                    running.result()
                    return
            finally:
                running.cancel()
                killed.cancel()
                await asyncio.gather(running, killed, return_exceptions=True)
            await asyncio.sleep(self.controller_down_s)
            self._killed.clear()
            self.life, self.down = self._start_controller(), False

    async def attend(self, link: Any, hello: m.Hello) -> None:
        self.on_hello(link, hello)
        await super().attend(link, hello)

    async def _answer(self, link: SimLink, attend: Coroutine[Any, Any, None]) -> None:
        if self.down:
            attend.close()
            lose_controller(link, "no controller is listening")
            return
        task = asyncio.current_task()
        assert task is not None
        self._attending[task] = link
        try:
            await super()._answer(link, attend)
        finally:
            self._attending.pop(task, None)
