"""Faults put into effect on a simulated run: on its machines, links, rewards, trainer and controller.

Every link of a worker is a FaultyWire, which does to messages what the faults ask for, and keeps their order. Machines
that are taken, or leave because they were warned, are replaced; so is the trainer's process, and the controller's. When
the last fault has come the run makes one more step and is asked to stop.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from windfall.events.log import Event
from windfall.fleet.trace_formats import Change
from windfall.link import messages as m
from windfall.sim.chaos.faults import Fault
from windfall.sim.core.link import SimLink
from windfall.sim.core.loop import VirtualLoop
from windfall.sim.core.run import Simulation
from windfall.sim.core.service import uniform
from windfall.sim.machines.worker import SimWorker
from windfall.types import LOCAL, Feedback, Task, Turn

LOOK_S = 4.0
"""Machines whose worker has left are replaced so often."""
FOR_EVER_S = 8.0
"""A worker that stands still for so long never goes on; its machine is replaced."""
MISSING = 0.03
"""The share of responses that never get a reward."""
SLOWER = 20.0


class LinkFaults:
    """What the next messages of one machine are in for, over all links of its workers."""

    def __init__(self) -> None:
        self.cut_after: int | None = None
        self.double = self.hole = self.stale = self.garbage = self.refuse = self.echo = self.hang = self.reject = 0
        self.heard: deque[tuple[int, m.Tokens]] = deque(maxlen=6)
        """Frames, each with the life of the controller that it was for: handles are that one's."""


class FaultyWire(SimLink):
    def __init__(self, chaos: Chaos, peer: str, hear: Any, ended: Any, latency_s: float) -> None:
        super().__init__(peer, hear, ended, latency_s)
        self.loaded: tuple[int, str] | None = None
        """The last version that the worker said it holds, on this link."""
        self.hangs_s: float | None = None
        """Since when the worker hangs in a pull."""
        self._chaos = chaos
        self._troubles = chaos.troubles(peer)

    async def send(self, message: object) -> None:
        self._chaos.sent(self, message)
        self._wear()
        t = self._troubles
        if isinstance(message, m.Load):
            if why := self._unreadable(message):
                self.say(m.LoadFailed(version=message.version, why=why))
                return
            if t.hang:
                t.hang = 0
                self.hangs_s = self._chaos.now_s
                return
            self.hangs_s = None
        if isinstance(message, m.Assign) and t.reject:
            t.reject -= 1
            for work in message.work:
                self.say(m.Rejected(handle=work.handle, why="it does not fit"))
            return
        await super().send(message)

    def say(self, message: object) -> None:
        t = self._troubles
        self._wear()
        if isinstance(message, m.Loaded):
            self.loaded = (message.version, message.digest)
        if not isinstance(message, m.Tokens):
            super().say(message)
            return
        if t.echo:
            t.echo = 0
            for life, frame in t.heard:
                if life == self._chaos.simulation.lives:
                    super().say(frame)
        t.heard.append((self._chaos.simulation.lives, message))
        if t.garbage:
            t.garbage -= 1
            message = msgspec.structs.replace(message, tokens=message.tokens[:-4])
        elif t.stale:
            t.stale -= 1
            message = msgspec.structs.replace(message, version=message.version + 1)
        elif t.hole and not message.finished:  # nobody would ever speak of one that has ended again
            t.hole -= 1
            return
        super().say(message)
        if t.double:
            t.double -= 1
            super().say(message)

    def _unreadable(self, load: m.Load) -> str:
        """Why these weights cannot be had, if they cannot."""
        if self._troubles.refuse:
            self._troubles.refuse -= 1
            return "a chunk's checksum is wrong"
        return "" if load.digest in self._chaos.simulation.learner.published else "nobody has this version"

    def _wear(self) -> None:
        t = self._troubles
        if t.cut_after is None or self.over:
            return
        t.cut_after -= 1
        if t.cut_after < 0:
            t.cut_after = None
            self.vanish("the network failed")


class FlakyEnv:
    """Some responses never get a reward; others, when a fault says so, not at the first try."""

    def __init__(self, env: Any, seed: int) -> None:
        self._env, self._seed = env, seed
        self.failing = 0
        self._failed: set[str] = set()

    def task(self, index: int) -> Task:
        return self._env.task(index)

    def missing(self, tag: int) -> bool:
        return uniform(f"{self._seed}/missing/{tag}") < MISSING

    async def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        tag = turns[-1].text
        if self.missing(int(tag)):
            raise ValueError("nobody can say")
        if self.failing and tag not in self._failed:
            self.failing -= 1
            self._failed.add(tag)
            raise TimeoutError("not now")
        return await self._env.feedback(task, turns)


class Chaos:
    def __init__(self, simulation: Simulation, faults: Iterator[Fault], count: int) -> None:
        """The first `count` of these faults. None: only the rewards that are always missing."""
        self.simulation, self.done = simulation, Counter[str]()
        self.sent: Any = lambda wire, message: None
        """Told of everything that the controller sends to a worker, before it is sent."""
        self._faults, self._left, self._stood_s = faults, count, 0.0
        self.stood_at_s = 0.0
        """The end of the last stall."""
        self._troubles: dict[str, LinkFaults] = {}
        self._machines, self._loop = simulation.machines, cast(VirtualLoop, asyncio.get_running_loop())
        self.env = simulation.env = FlakyEnv(simulation.env, simulation.world.recipe.run.seed)
        simulation.book.marks = True
        self._machines.wire = partial(FaultyWire, self)
        if count:
            self._next()
            self._loop.call_later(LOOK_S, self._replace)

    @property
    def now_s(self) -> float:
        return self._loop.time()

    def troubles(self, peer: str) -> LinkFaults:
        return self._troubles.setdefault(peer.partition(".")[0], LinkFaults())

    def heard(self, event: Event) -> None:
        """Of the log: the step after the last fault is whole."""
        if not self._left and self.done and (event["kind"], event["name"]) == ("scalar", "step"):
            self.simulation.stop()

    def _next(self) -> None:
        if self._left:
            fault = next(self._faults)
            self._loop.call_at(max(fault.at_s + self._stood_s, self._loop.time()), self._strike, fault)

    def _strike(self, fault: Fault) -> None:
        self._left -= 1
        if self._do(fault):
            self.done[fault.kind] += 1
        else:
            self._left += 1  # there is nobody whom it could happen to
        self._next()

    def _do(self, fault: Fault) -> bool:
        match fault.kind:
            case "controller":
                down, _ = self.simulation.down, self.simulation.kill_controller()
                return not down
            case "trainer":
                self.simulation.learner.kill()
                return True
            case "trainer_cut":
                self.simulation.learner.cut("the network failed")
                return True
            case "stall":
                self._loop.leap(fault.s)
                self._stood_s += fault.s
                self.stood_at_s = self._loop.time()
                return True
            case "reward":
                self.env.failing += fault.n
                return True
        there = [(node, w) for node, w in self._machines.workers.items() if not w.over]
        if not there:
            return False
        node, worker = there[int(fault.who * len(there))]
        if fault.kind in ("kill", "notice", "false_notice", "freeze", "slow", "hang", "reject"):
            return node != LOCAL and self._machine(fault, node, worker)
        return self._link(fault, self.troubles(worker.kit.name), worker)

    def _machine(self, fault: Fault, node: str, worker: SimWorker) -> bool:
        later = self._loop.call_later
        match fault.kind:
            case "kill":
                self._machines.take_down(node)
                later(fault.s, self._bring_up, node)
            case "notice":
                worker.warn("spot", fault.s)
                later(fault.s, self._take_down, node, worker)
            case "false_notice":
                worker.warn("spot", fault.s)
            case "freeze":
                worker.freeze()
                later(fault.s, worker.thaw if fault.s < FOR_EVER_S else partial(self._take_down, node, worker))
            case "slow":
                before = worker.kit
                worker.kit = dataclasses.replace(before, ingress_per_s=before.ingress_per_s / SLOWER)
                later(fault.s, setattr, worker, "kit", before)
            case "hang":
                self.troubles(worker.kit.name).hang = 1
            case "reject":
                self.troubles(worker.kit.name).reject = 1
                later(fault.s, self._take_down, node, worker)
        return True

    def _link(self, fault: Fault, troubles: LinkFaults, worker: SimWorker) -> bool:
        match fault.kind:
            case "cut":
                troubles.cut_after = fault.n - 1
            case "flap":
                for n in range(fault.n):
                    self._loop.call_later(n * 2 * fault.s, worker.flap, fault.s)
            case "delay":
                self._delay(worker, fault.s)
            case "double" | "hole" | "stale" | "garbage" | "refuse" | "echo":
                setattr(troubles, fault.kind, fault.n if fault.kind in ("double", "refuse") else 1)
        return True

    def _delay(self, worker: SimWorker, s: float) -> None:
        wire = worker.wire
        if wire is not None:
            wire.latency_s += s
            self._loop.call_later(5 * s, setattr, wire, "latency_s", worker.kit.latency_s)

    # machines that are replaced

    def _take_down(self, node: str, worker: SimWorker) -> None:
        if self._machines.workers.get(node) is worker:
            self._machines.take_down(node)
            self._bring_up(node)

    def _bring_up(self, node: str) -> None:
        if not self._machines.up(node):
            self._machines.bring_up(node)

    def _replace(self) -> None:
        for node, worker in list(self._machines.workers.items()):
            if worker.over and node != LOCAL:
                self._take_down(node, worker)
        self._loop.call_later(LOOK_S, self._replace)


def all_up(nodes: int) -> tuple[Change, ...]:
    """A trace in which machines come, and nobody but the faults takes them."""
    return tuple(Change(at_s=0.0, node=f"n{n + 1}", up=True) for n in range(nodes))
