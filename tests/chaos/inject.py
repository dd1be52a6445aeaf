"""Injects faults into a simulated run: on its machines, links, rewards, trainer and controller.

Every link of a worker is a FaultyLink. It applies link faults to messages and keeps their order. Machines that are
preempted, or that leave after a notice, are replaced; so are the processes of the trainer and the controller. After the
last fault, the run completes one more step, or several if steps overlap; then it is asked to stop.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from tests.chaos.faults import Fault, FaultKind
from tests.support.fleets.restarts import RestartingSimulation, RestartingTrainer, lose_controller
from tests.support.fleets.virtual_loop import CheckedLoop
from windfall.events.log import Event
from windfall.link import messages as m
from windfall.sim.core.draws import uniform
from windfall.sim.core.link import SimLink
from windfall.sim.core.token_schedule import id_token_of
from windfall.sim.machines.decode import FILLER
from windfall.sim.machines.worker import SimWorker
from windfall.types import LOCAL, Feedback, Task, Turn

REPLACE_EVERY_S = 4.0
"""Machines whose worker has left are replaced at this interval."""
FOREVER_S = 8.0
"""A worker that is frozen for at least this long never resumes; its machine is replaced."""
MISSING_REWARDS = 0.03
"""Share of responses that never get a reward."""
SLOW_FACTOR = 20.0
DISTINCT_TOKENS = 1 << 20
MACHINE_FAULTS = ("kill", "notice", "false_notice", "freeze", "slow", "hang", "reject", "liar", "stall_source")
"""Faults that do not strike the trainer's machine."""


def distinct_token(id_token: int, position: int) -> int:
    """A token that depends on its response and position, and is neither a filler nor a stop.

    >>> distinct_token(7, 3) == distinct_token(7, 3) != distinct_token(7, 4)
    True
    """
    return FILLER + 1 + (id_token + 7919 * position) % DISTINCT_TOKENS


class LinkFaults:
    """Faults that will apply to the next messages of one node, on any link of its workers."""

    def __init__(self) -> None:
        self.cut_after: int | None = None
        self.pending = Counter[FaultKind]()
        """How many of the next messages, versions or assignments each kind of fault strikes."""
        self.sent_frames: deque[tuple[int, m.Tokens]] = deque(maxlen=6)
        """The last frames, each with the number of its controller: handles are valid only for that controller."""


class FaultyLink(SimLink):
    def __init__(self, injector: FaultInjector, peer: str, deliver: Any, on_closed: Any, latency_s: float) -> None:
        super().__init__(peer, deliver, on_closed, latency_s)
        self.loaded: dict[str, tuple[int, str]] = {}
        """By policy: the last version and digest that the worker reported as loaded on this link."""
        self.hangs: str | None = None
        self.hangs_since_s = 0.0
        """The policy whose pull hangs, and since when (loop time, seconds)."""
        self._behind: dict[str, m.Load] = {}
        """By policy: the load that waits until the one that hangs is replaced."""
        self._injector = injector
        self._faults = injector.link_faults(peer)

    async def send(self, message: object) -> None:
        self._injector.on_send(self, message)
        self._injector.messages += 1
        self._count_message()
        faults = self._faults
        if isinstance(message, m.Load):
            if why := self._load_error(message):
                self.send_to_controller(m.LoadFailed(version=message.version, why=why, policy=message.policy))
                return
            if self.hangs not in (None, message.policy):
                self._behind[message.policy] = message
                return
            if faults.pending["hang"]:
                faults.pending["hang"] = 0
                self.hangs, self.hangs_since_s = message.policy, self._loop.time()
                return
            self.hangs = None
            for load in (self._behind.pop(policy) for policy in list(self._behind)):
                await super().send(load)
        if isinstance(message, m.Assign):
            controller = self._injector.simulation.controller_starts
            for work in message.work:
                self._injector.responses[controller, work.handle] = id_token_of(work.seed), work.policy
            if faults.pending["reject"]:
                faults.pending["reject"] -= 1
                for work in message.work:
                    self.send_to_controller(m.Rejected(handle=work.handle, why="it does not fit"))
                return
        await super().send(message)

    def send_to_controller(self, message: object) -> None:
        faults = self._faults
        self._injector.on_receive(self, message)
        self._injector.messages += 1
        self._count_message()
        if isinstance(message, m.Loaded):
            self.loaded[message.policy] = (message.version, message.digest)
        if not isinstance(message, m.Tokens):
            super().send_to_controller(message)
            return
        message = self._distinct(message)
        self._record_versions(message)
        if faults.pending["echo"]:
            faults.pending["echo"] = 0
            for controller, frame in faults.sent_frames:
                if controller == self._injector.simulation.controller_starts:
                    super().send_to_controller(frame)
        faults.sent_frames.append((self._injector.simulation.controller_starts, message))
        if faults.pending["garbage"]:
            faults.pending["garbage"] -= 1
            message = msgspec.structs.replace(message, tokens=message.tokens[:-4])
        elif faults.pending["stale"]:
            faults.pending["stale"] -= 1
            versions = {policy: version + 1 for policy, version in message.versions.items()}
            message = msgspec.structs.replace(message, version=message.version + 1, versions=versions)
        elif faults.pending["hole"] and not message.finished:  # the loss of a last frame would go unnoticed
            faults.pending["hole"] -= 1
            return
        super().send_to_controller(message)
        if faults.pending["double"]:
            faults.pending["double"] -= 1
            super().send_to_controller(message)

    def _record_versions(self, frame: m.Tokens) -> None:
        """Record which weights generated these tokens."""
        counts, injector = frame.counts or (1,) * len(frame.handles), self._injector
        for handle, position, count in zip(frame.handles, frame.positions, counts, strict=True):
            id_token, policy = injector.response(handle)
            for n in range(position, position + count):
                injector.generated.setdefault((id_token, n), set()).add(self.loaded.get(policy, (-1, "")))

    def _distinct(self, frame: m.Tokens) -> m.Tokens:
        """The frame with a token of its own in every position instead of fillers, so that it can be checked."""
        tokens, injector, n = array("I", frame.tokens), self._injector, 0
        counts = frame.counts or (1,) * len(frame.handles)
        for handle, position, count in zip(frame.handles, frame.positions, counts, strict=True):
            id_token, _ = injector.response(handle)
            for at in range(position, position + count):
                tokens[n] = distinct_token(id_token, at) if tokens[n] == FILLER else tokens[n]
                n += 1
        return msgspec.structs.replace(frame, tokens=tokens.tobytes())

    def _load_error(self, load: m.Load) -> str:
        """Why these weights cannot be loaded. Empty: they can."""
        if self._faults.pending["refuse"]:
            self._faults.pending["refuse"] -= 1
            return "a chunk's checksum is wrong"
        published = self._injector.simulation.trainers[load.policy].published
        return "" if load.digest in published else "no source has this version"

    def _count_message(self) -> None:
        """Break the link if this is the message that a `cut` fault waits for."""
        faults = self._faults
        if faults.cut_after is None or self._closed is not None:
            return
        faults.cut_after -= 1
        if faults.cut_after < 0:
            faults.cut_after = None
            lose_controller(self, "the network failed")


class FlakyEnv:
    """An environment in which some responses never get a reward, and others fail once when a fault asks for it."""

    def __init__(self, env: Any, seed: int) -> None:
        self._env = env
        self._seed = seed
        self.failing = 0
        self._failed: set[str] = set()

    def task(self, index: int) -> Task:
        return self._env.task(index)

    def reward(self, task: str, role: str, response: str) -> float:
        return self._env.reward(task, role, response)

    def missing(self, id_token: int) -> bool:
        return uniform(f"{self._seed}/missing/{id_token}") < MISSING_REWARDS

    async def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        id_token = turns[0].text
        if self.missing(int(id_token)):
            raise ValueError("this response has no reward")
        if self.failing and id_token not in self._failed:
            self.failing -= 1
            self._failed.add(id_token)
            raise TimeoutError("the reward failed once")
        return await self._env.feedback(task, turns)


class FaultInjector:
    def __init__(self, simulation: RestartingSimulation, faults: Iterator[Fault], count: int) -> None:
        """Inject the first `count` of these faults. With 0, nothing fails but the rewards that are always missing."""
        self.simulation = simulation
        self.done = Counter[str]()
        self.on_send: Any = lambda link, message: None
        """Called with every message from the controller to a worker, before it is sent."""
        self.on_receive: Any = lambda link, message: None
        """Called with every message from a worker to the controller, before it is sent."""
        self.messages = 0
        """Messages in both directions so far."""
        self._faults = faults
        self._left = count
        self._stalled_s = 0.0
        recipe = simulation.scenario.recipe
        trained = filter(recipe.is_trained, recipe.names())
        self._steps_after = {name: 2 * recipe.of(name).rollout.staleness for name in trained}
        """By policy: number of steps to complete after the step in which the last fault strikes. With staleness, these
        train on most of what was open at that time."""
        self.stall_ended_s = 0.0
        """End of the last stall (loop time, seconds)."""
        self.responses: dict[tuple[int, int], tuple[int, str]] = {}
        """By controller and handle: the first token of the response, which identifies it, and its policy."""
        self.generated: dict[tuple[int, int], set[tuple[int, str]]] = {}
        """By first token of a response and position: versions and digests of the weights that generated the token.
        There may be several, because a token may be lost and generated again."""
        self._link_faults: dict[str, LinkFaults] = {}
        """Pending link faults by node."""
        self._fleet = simulation.fleet
        self._loop = cast(CheckedLoop, asyncio.get_running_loop())
        self.env = simulation.env = FlakyEnv(simulation.env, recipe.run.seed)
        self._fleet.make_link = partial(FaultyLink, self)
        simulation.on_hello = self._on_hello
        if count:
            self._schedule_next()
            self._loop.call_later(REPLACE_EVERY_S, self._replace_finished)

    def _on_hello(self, link: FaultyLink, hello: m.Hello) -> None:
        """A worker with several policies may get work of those that it says it holds, once one of them is loaded."""
        link.loaded |= {policy: held for policy, held in hello.held.items() if policy}

    def link_faults(self, peer: str) -> LinkFaults:
        return self._link_faults.setdefault(peer.partition(".")[0], LinkFaults())

    def response(self, handle: int) -> tuple[int, str]:
        """The first token and the policy of a response of the current controller; (-1, "") if it is unknown."""
        return self.responses.get((self.simulation.controller_starts, handle), (-1, ""))

    def on_event(self, event: Event) -> None:
        """Stop the run when enough steps are complete after the last fault."""
        if not self._left and self.done and (event["kind"], event["name"]) == ("scalar", "step"):
            self._steps_after[event.get("policy", "")] -= 1
            if max(self._steps_after.values()) < 0:
                self.simulation.stop()

    def _schedule_next(self) -> None:
        if self._left:
            fault = next(self._faults)
            self._loop.call_at(max(fault.at_s + self._stalled_s, self._loop.time()), self._strike, fault)

    def _strike(self, fault: Fault) -> None:
        self._left -= 1
        if self._apply(fault):
            self.done[fault.kind] += 1
        else:
            self._left += 1  # the fault could not strike
        self._schedule_next()

    def _apply(self, fault: Fault) -> bool:
        match fault.kind:
            case "controller":
                was_down = self.simulation.down
                self.simulation.kill_controller()
                return not was_down
            case "trainer":
                self._trainer(fault).kill()
            case "trainer_cut":
                self._trainer(fault).cut("the network failed")
            case "stall":
                self._loop.stall(fault.s)
                self._stalled_s += fault.s
                self.stall_ended_s = self._loop.time()
            case "reward":
                self.env.failing += fault.n
            case "bucket_gone" | "bucket_liar":
                stores = self._trainer(fault).base.stores
                if len(stores) < 2:
                    return False
                bucket = stores[1]
                bucket.fail("unreachable" if fault.kind == "bucket_gone" else "wrong")
                self._loop.call_later(fault.s, bucket.fail, "")
            case _:
                return self._apply_to_worker(fault)
        return True

    def _trainer(self, fault: Fault) -> RestartingTrainer:
        trainers = list(self.simulation.trainers.values())
        return trainers[int(fault.target * len(trainers))]

    def _apply_to_worker(self, fault: Fault) -> bool:
        workers = [(node, w) for node, w in self._fleet.workers.items() if not w.finished]
        if not workers:
            return False
        node, worker = workers[int(fault.target * len(workers))]
        if fault.kind in MACHINE_FAULTS and node == LOCAL:
            return False
        later, link_faults = self._loop.call_later, self.link_faults(worker.spec.name)
        match fault.kind:
            case "kill":
                self._fleet.take_down(node)
                later(fault.s, self._bring_up, node)
            case "notice":
                worker.warn("spot", fault.s)
                later(fault.s, self._replace_machine, node, worker)
            case "false_notice":
                worker.warn("spot", fault.s)
            case "freeze":
                worker.freeze()
                later(fault.s, worker.thaw if fault.s < FOREVER_S else partial(self._replace_machine, node, worker))
            case "slow":
                worker.store.down_per_s = worker.spec.down_per_s / SLOW_FACTOR
                later(fault.s, setattr, worker.store, "down_per_s", worker.spec.down_per_s)
            case "liar" | "stall_source":
                worker.store.fail("wrong" if fault.kind == "liar" else "stalled")
                later(fault.s, self._serve_again, worker)
            case "reject":
                link_faults.pending["reject"] = 1
                later(fault.s, self._end_reject, node)
            case "cut":
                link_faults.cut_after = fault.n - 1
            case "flap":
                for n in range(fault.n):
                    later(n * 2 * fault.s, worker.flap, fault.s)
            case "delay":
                if worker.link is not None:
                    worker.link.latency_s += fault.s
                    later(5 * fault.s, setattr, worker.link, "latency_s", worker.spec.latency_s)
            case _:  # double, hole, stale, garbage, refuse, echo, hang
                link_faults.pending[fault.kind] = fault.n if fault.kind in ("double", "refuse") else 1
        return True

    def _serve_again(self, worker: SimWorker) -> None:
        if not worker.finished and not worker.frozen:
            worker.store.fail("")

    # replacing machines

    def _end_reject(self, node: str) -> None:
        """Replace the machine that was too small, even if another one has replaced it meanwhile."""
        self.link_faults(node).pending["reject"] = 0
        if (worker := self._fleet.workers.get(node)) is not None:
            self._replace_machine(node, worker)

    def _replace_machine(self, node: str, worker: SimWorker) -> None:
        if self._fleet.workers.get(node) is worker:
            self._fleet.take_down(node)
            self._bring_up(node)

    def _bring_up(self, node: str) -> None:
        if not self._fleet.up(node):
            self._fleet.bring_up(node)

    def _replace_finished(self) -> None:
        for node, worker in list(self._fleet.workers.items()):
            if worker.finished and node != LOCAL:
                self._replace_machine(node, worker)
        self._loop.call_later(REPLACE_EVERY_S, self._replace_finished)
