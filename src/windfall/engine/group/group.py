"""Several engines that act as one: an engine in a child process for each GPU of the trainer.

    EngineThread ── TrainerEngine ── EngineGroup ── EngineProcesses ─┬─ child 0: its own engine, weights and KV cache
                                                                     └─ child 1 ...

A child makes steps by itself, as many as it was granted. `step` returns what has arrived and grants as many again, so a
child computes while its last tokens are on their way, and stops soon after `step` is no longer called.

    child:   DOWN ── forked ──▶ UP ── Build ──▶ BUILDING ──▶ BUILT: asleep ⇄ has weights

Rules:
- A request goes to the child with the most free slots and stays there. Chunks of one version are returned together.
- There is one version. `swap` loads it into all children from the publisher's buffer. A child that was started later,
  or was asleep, loads the same version again. If the publisher has overwritten it meanwhile, nothing is generated until
  the next `swap`.
- After `pause` or `sleep` has returned, no child computes, and no child begins to, until `step` or `swap` is called.
  After `sleep`, no child holds memory for KV cache or weights. Only weights with an adapter stay if they are small.
- If a child ends, its responses continue in other children from their last token, or wait for a child. The child is
  started again with back-off. A child that is stuck is killed. After MAX_FAILURES ends of one child in a row without a
  token in between, the group fails: `step` and `swap` raise the last error, until `build` is called again.

The group's lock is held only for moments; waiting releases it. `add`, `cancel`, `step` and `swap` are called by one
thread; `pause` and `sleep` also by another, but not at the same time as `step` or `swap` (TrainerTurn sees to that).
"""

from __future__ import annotations

import enum
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from windfall.devices import Place
from windfall.engine.base import Counters, Engine, check_request, duplicate_id
from windfall.engine.group import messages as m
from windfall.engine.group.processes import MODULES, EngineProcesses
from windfall.errors import WindfallError
from windfall.link.messages import EngineSpec
from windfall.types import Capabilities, Chunk, Request
from windfall.weights.shared import OpenVersion
from windfall.weights.source import Source

WINDOW = 2
"""Steps of a child that are granted or whose tokens were not returned yet."""
STEP_WAIT_S = 0.05
"""Upper limit (seconds) for the time that `step` waits for tokens."""
BUILD_S = 900.0
"""Time limit for building an engine, compiling kernels and capturing graphs (seconds)."""
SWAP_S = 100.0
"""Time limit until at least one child has loaded a version (seconds)."""
ORDER_S = 120.0
"""Time limit for one engine step, and for one order such as a copy of the weights (seconds)."""
LATE_CHECK_S = 1.0
"""Seconds between checks for children that take too long, while the group waits for them."""
MAX_FAILURES = 4


class ChildState(enum.Enum):
    DOWN = "down"
    UP = "up"
    BUILDING = "building"
    BUILT = "built"


@dataclass(eq=False, slots=True)
class PlacedResponse:
    request: Request
    handle: int
    tokens: list[int] = field(default_factory=list)
    """Tokens that have arrived; `step` may not have returned all of them yet."""
    ended: bool = False
    """Whether the last token has arrived."""

    def rest(self) -> Request:
        """What a child must generate. It keeps nothing for a next turn, which may go to another child."""
        r, done = self.request, len(self.tokens)
        return replace(
            r,
            id=str(self.handle),
            prompt=r.prompt + tuple(self.tokens),
            position=r.position + done,
            max_tokens=r.max_tokens - done,
            session="",
            keep_s=0.0,
        )


@dataclass(eq=False, slots=True)
class Child:
    number: int
    state: ChildState = ChildState.DOWN
    built: m.Built = field(default_factory=lambda: m.Built(slots=0, limit=0, vocabulary=0))
    """The limits that it reported when it last built its engine."""
    digest: str = ""
    """Digest of the weights in its engine; empty if it has none, or parts of two versions."""
    held: OpenVersion | None = None
    """The version as which it uses these weights; None if it cannot make a step with them."""
    asleep: bool = False
    granted: int = 0
    unread: int = 0
    """Frames that `step` has not returned yet."""
    order: int = 0
    """Number of the order that it has not answered yet; 0 if none."""
    loading: OpenVersion | None = None
    responses: dict[int, PlacedResponse] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    earlier: Counters = field(default_factory=Counters)
    """Sums of the processes before this one."""
    since_s: float = 0.0
    """When it began what it does, or last made a step (monotonic clock, seconds)."""
    failures: int = 0
    """Ends in a row without a token in between."""
    error: Exception | None = None
    """What it reported before it ended."""
    killed: bool = False
    """Whether the group has killed it, and has not yet learned of its end."""

    @property
    def ready(self) -> bool:
        return self.state is ChildState.BUILT

    @property
    def busy(self) -> bool:
        return bool(self.granted or self.order) or self.state is ChildState.BUILDING

    def reset(self) -> None:
        """The process is gone."""
        self.earlier = replace(add_counters(self.earlier, self.counters), waiting=0)
        self.state = ChildState.DOWN
        self.counters = Counters()
        self.error = None
        self.digest = ""
        self.held = None
        self.asleep = False
        self.loading = None
        self.granted = 0
        self.order = 0
        self.responses = {}


def add_counters(a: Counters, b: Counters) -> Counters:
    return Counters(**{f.name: getattr(a, f.name) + getattr(b, f.name) for f in fields(Counters)})


class EngineGroup(Engine):
    def __init__(
        self,
        places: Sequence[Place],
        source: Source,
        *,
        folder: Path,
        share: float = 0.3,
        threads: int = 0,
        modules: Sequence[str] = MODULES,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:
        """Start the fork server; `build` starts the children. `places`: one for each child. `source`: has the
        weights that the children load. `folder`: for the children's logs. `share`: share of the free memory for each
        KV cache. `threads`: CPU threads of each child. `modules`: what to import before the children are forked."""
        self.version = 0
        self._places = places
        self._share = share
        self._threads = threads
        self._say = say
        self._source = source
        self._spec: EngineSpec | None = None
        self._children = [Child(n) for n in range(len(places))]
        self._responses: dict[str, PlacedResponse] = {}
        self._unplaced: dict[int, PlacedResponse] = {}
        self._arrived: deque[tuple[Child, int, list[tuple[PlacedResponse, Chunk]]]] = deque()
        """Frames that `step` has not returned yet, each with its child and its version."""
        self._target: OpenVersion | None = None
        """The version that the children load."""
        self._awake = False
        self._swapping = False
        self._starting = False
        self._refused = ""
        self._withdrawn = False
        """Why the last load failed: the weights do not fit, or were overwritten meanwhile."""
        self._failure: BaseException | None = None
        self._broken = False
        """Whether no process can be started any more."""
        self._next_number = 0
        self._changed = threading.Condition()
        self._processes = EngineProcesses(places, self, folder=folder, modules=modules)

    # The engine

    @property
    def slots(self) -> int:
        return sum(c.built.slots for c in self._children)

    @property
    def capabilities(self) -> Capabilities:
        """What the children's engines can do; they are all of one kind."""
        return self._children[0].built.engine

    @property
    def limit(self) -> int:
        """Tokens of the longest response, prompt included, that fits into every child."""
        return min((c.built.limit for c in self._children if c.built.limit), default=0)

    @property
    def counters(self) -> Counters:
        with self._changed:
            total = Counters()
            for c in self._children:
                total = add_counters(add_counters(total, c.earlier), c.counters)
            return replace(total, waiting=total.waiting + len(self._unplaced))

    def __len__(self) -> int:
        return len(self._responses)

    def build(self, spec: EngineSpec) -> int:
        """Build an engine in every child, in place of any that exists. Returns the number of slots. Raises the error of
        a child that cannot build its engine."""
        with self._changed:
            if not self._broken:
                self._failure = None
            self._raise_failure()
            self._spec = spec
            self._starting = True
            self._awake = True
            self._forget()
            for child in self._children:
                child.failures = 0
                if child.state in (ChildState.BUILDING, ChildState.BUILT):
                    self._kill(child)
                self._advance(child)
            self._processes.start()
            try:
                self._wait(lambda: all(c.ready for c in self._children), BUILD_S, "build their engines")
            finally:
                self._starting = False
            return self.slots

    def add(self, request: Request) -> None:
        with self._changed:
            if request.id in self._responses:
                raise duplicate_id(request)
            check_request(request, max(c.built.vocabulary for c in self._children), self.limit)
            response = self._responses[request.id] = PlacedResponse(request, self._number())
            self._place(response)

    def cancel(self, id: str) -> None:
        """Stop this response. An unknown id is not an error: the response may just have finished."""
        with self._changed:
            response = self._responses.pop(id, None)
            if response is not None:
                self._unplaced.pop(response.handle, None)
                for child in self._children:
                    if child.responses.pop(response.handle, None):
                        self._send(child, m.CancelResponse(handle=response.handle))

    def step(self) -> list[Chunk]:
        """Tokens that have arrived since the last call; waits up to STEP_WAIT_S for the first."""
        with self._changed:
            self._raise_failure()
            self._kill_late()
            self._wake_up()
            if self._responses:
                self._changed.wait_for(lambda: self._arrived or self._failure, STEP_WAIT_S)
            self._raise_failure()
            return self._take()

    def swap(self, version: int, weights: Mapping[str, Any] | None = None) -> None:
        """Load this version from the publisher's buffer into all children. WindfallError: nothing has changed.
        RuntimeError: the version was overwritten meanwhile, or no child is ready, and nothing is generated until a swap
        succeeds."""
        assert weights is None, "the children load what is published"
        with self._changed:
            self._raise_failure()
            target = OpenVersion(self._source, version)
            before = self._target
            self._target = target
            self._swapping = True
            try:
                self._quiet(building=False)
                self._refused = ""
                self._withdrawn = False
                self._wake_up()
                self._wait(self._settled, SWAP_S, f"load version {version}")
                if self._refused:
                    raise WindfallError(self._refused)
                if self._withdrawn:
                    raise RuntimeError(f"version {version} was overwritten while it was loaded")
            except WindfallError:
                self._set_target(before)
                raise
            except BaseException:  # raised again: the children may have different versions, or mixtures
                self._set_target(None)
                if before is not None:
                    before.close()
                raise
            finally:
                self._refused = ""
                self._swapping = False
            self.version = version
            if before is not None:
                before.close()
            self._wake_up()

    def pause(self) -> None:
        """Return when no child computes any more. `step` and `swap` end the pause."""
        with self._changed:
            self._quiet()

    def sleep(self) -> None:
        """Like `pause`; also free the children's memory for KV cache and weights. `step` and `swap` load them again."""
        with self._changed:
            self._quiet()
            for child in self._children:
                if child.ready and not child.asleep:
                    self._order(child, lambda number: m.Sleep(order=number))
                    child.held = None
                    child.asleep = True
            self._wait_until_answered()

    def close(self) -> None:
        """End all processes. The group cannot be used any more."""
        self._processes.close()
        with self._changed:
            self._set_target(None)

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
        with self._changed:
            placed = [r for c in self._children for r in c.responses.values()]
            open_responses = [r for r in self._responses.values() if not r.ended]
            assert len(placed) + len(self._unplaced) == len(open_responses), "a response is nowhere, or twice"
            assert all(r in open_responses for r in (*placed, *self._unplaced.values())), "a response was not removed"
            for c in self._children:
                assert c.granted + c.unread <= WINDOW, f"child {c.number} was granted too many steps"
                assert c.ready or not (c.granted or c.order or c.responses), f"child {c.number} has work but no engine"

    # Called by the processes, in their thread.

    def on_up(self, child: int) -> None:
        with self._changed:
            self._children[child].state = ChildState.UP
            self._advance(self._children[child])

    def on_message(self, child: int, message: object) -> None:
        with self._changed:
            it = self._children[child]
            if it.state is ChildState.DOWN:  # it was killed
                return
            match message:
                case m.Built():
                    it.state = ChildState.BUILT
                    it.built = message
                    it.asleep = False
                    for response in list(self._unplaced.values()):
                        self._place(response)
                case m.Stepped():
                    self._stepped(it, message)
                case m.OrderDone():
                    self._answered(it, message)
                case m.VersionRefused():
                    it.order = 0
                    it.loading = None
                    self._refused = message.why
                case m.ChildError():
                    it.error = message.error()
            self._advance(it)
            self._changed.notify_all()

    def on_down(self, child: int, why: str) -> None:
        with self._changed:
            self._lose(self._children[child], why)
            self._changed.notify_all()

    def on_failure(self, error: BaseException) -> None:
        with self._changed:
            self._failure = error
            self._broken = True
            for child in self._children:
                child.reset()
            self._changed.notify_all()

    # The methods below need the lock.

    def _wake_up(self) -> None:
        self._awake = True
        for child in self._children:
            self._advance(child)

    def _advance(self, child: Child) -> None:
        """Give the child what it needs for its next step, unless the group is paused."""
        if not self._awake or self._spec is None or child.order:
            return
        if child.state is ChildState.UP:
            child.since_s = time.monotonic()
            child.state = ChildState.BUILDING
            device = self._places[child.number].device
            self._send(child, m.Build(spec=self._spec, device=device, share=self._share, threads=self._threads))
        if not child.ready or self._target is None:
            return
        if child.held is not self._target:
            self._load(child, self._target)
        elif child.responses and not self._swapping and (more := WINDOW - child.granted - child.unread) > 0:
            if not child.granted:
                child.since_s = time.monotonic()
            child.granted += more
            self._send(child, m.Grant(steps=more))

    def _load(self, child: Child, target: OpenVersion) -> None:
        if self._refused:
            return
        if not target.intact():
            self._overwritten()
            return
        held = child.digest == target.digest
        child.loading = target
        child.asleep = False
        shared = None if held else target.shared
        self._order(child, lambda number: m.LoadVersion(order=number, version=target.version, shared=shared))

    def _answered(self, child: Child, done: m.OrderDone) -> None:
        assert done.order == child.order, f"child {child.number} answered order {done.order}, not {child.order}"
        child.order = 0
        child.granted = 0
        loading = child.loading
        if child.asleep and not done.kept_weights:
            child.digest = ""
        if loading is not None:
            child.loading = None
            child.digest = ""
            child.held = None
            if loading is not self._target:  # it may have been closed before the child opened it
                return
            if loading.intact():
                child.digest = loading.digest
                child.held = loading
            else:
                self._overwritten()

    def _overwritten(self) -> None:
        """Wait for the next swap: the publisher has overwritten the version, before or while it was loaded."""
        self._withdrawn = True
        if not self._swapping:
            self._set_target(None)

    def _set_target(self, target: OpenVersion | None) -> None:
        if self._target is not None:
            self._target.close()
        self._target = target

    def _settled(self) -> bool:
        """Whether a swap is over: every child that is ready (at least one) has the version, or a load has failed."""
        if self._refused or self._withdrawn:
            return not any(c.order for c in self._children)
        ready = [c for c in self._children if c.ready]
        return bool(ready) and all(c.held is self._target for c in ready)

    def _stepped(self, child: Child, message: m.Stepped) -> None:
        child.granted -= 1
        child.since_s = time.monotonic()
        child.counters = message.counters
        if not message.chunks:
            return
        chunks: list[tuple[PlacedResponse, Chunk]] = []
        for chunk in message.chunks:
            response = child.responses.get(int(chunk.id))
            if response is None:  # it was canceled
                continue
            response.tokens += chunk.tokens
            if chunk.finish:
                response.ended = True
                del child.responses[response.handle]
            chunks.append((response, replace(chunk, id=response.request.id)))
        child.failures = 0
        child.unread += 1
        self._arrived.append((child, message.chunks[0].version, chunks))

    def _take(self) -> list[Chunk]:
        """All chunks that have arrived, up to a change of the version."""
        out: list[Chunk] = []
        version = self._arrived[0][1] if self._arrived else -1
        while self._arrived and self._arrived[0][1] == version:
            child, _, chunks = self._arrived.popleft()
            child.unread -= 1
            for response, chunk in chunks:
                if self._responses.get(chunk.id) is response:  # otherwise it was canceled
                    out.append(chunk)
                    if chunk.finish:
                        del self._responses[chunk.id]
        for child in self._children:
            self._advance(child)
        return out

    def _place(self, response: PlacedResponse) -> None:
        """Give the response to the child with the most free slots, or keep it until a child is built."""
        built = [c for c in self._children if c.ready]
        if not built:
            self._unplaced[response.handle] = response
            return
        self._unplaced.pop(response.handle, None)
        child = max(built, key=lambda c: c.built.slots - len(c.responses))
        child.responses[response.handle] = response
        self._send(child, m.Add(request=response.rest()))
        self._advance(child)

    def _lose(self, child: Child, why: str) -> None:
        """The child's process has ended: its responses continue elsewhere."""
        if child.killed:
            child.killed = False
            return
        lost, error = list(child.responses.values()), child.error or m.ChildFailed(f"the process {why}")
        reported = child.error is not None
        child.reset()
        self._say(f"engine {child.number} of the trainer ended: {error}; {len(lost)} responses continue elsewhere")
        self._count_failure(child, error, final=self._starting and reported)
        for response in lost:
            self._move(response)

    def _count_failure(self, child: Child, error: Exception, *, final: bool = False) -> None:
        child.failures += 1
        if final:
            self._failure = error
        elif child.failures >= MAX_FAILURES:
            self._failure = m.ChildFailed(f"engine {child.number} failed {child.failures} times in a row: {error}")

    def _move(self, response: PlacedResponse) -> None:
        response.handle = self._number()
        self._place(response)

    def _kill(self, child: Child) -> None:
        """Kill the child, which is then started again. Its responses continue elsewhere."""
        lost = list(child.responses.values())
        child.killed = True
        self._processes.kill(child.number)
        child.reset()
        for response in lost:
            self._move(response)

    def _forget(self) -> None:
        """Forget all responses and the version."""
        for child in self._children:
            child.responses = {}
            child.unread = 0
        self._responses = {}
        self._unplaced = {}
        self._arrived.clear()
        self._set_target(None)

    def _quiet(self, *, building: bool = True) -> None:
        """Wait until every child has finished what it does (`building`: also its engine), and let none begin more."""
        self._awake = False
        for child in self._children:
            if child.granted and not child.order:
                self._order(child, lambda number: m.PauseSteps(order=number))
        self._wait_until_answered(building=building)

    def _wait_until_answered(self, *, building: bool = True) -> None:
        def at_work(child: Child) -> bool:
            return child.busy and (building or child.state is not ChildState.BUILDING)

        while not self._changed.wait_for(lambda: not any(map(at_work, self._children)), LATE_CHECK_S):
            self._kill_late()

    def _kill_late(self) -> None:
        """Kill the children that take too long: their devices, or they themselves, are stuck."""
        now_s = time.monotonic()
        for child in self._children:
            limit_s = BUILD_S if child.state is ChildState.BUILDING else ORDER_S
            if child.busy and now_s - child.since_s > limit_s:
                self._say(f"engine {child.number} of the trainer has not responded for {limit_s:g} s; killing it")
                self._kill(child)
                self._count_failure(child, m.ChildFailed("it does not respond"))

    def _wait(self, holds: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            self._raise_failure()
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise RuntimeError(f"waited {timeout_s:g} s for the trainer's engines to {what}")
            self._changed.wait(left_s)

    def _order(self, child: Child, make: Callable[[int], object]) -> None:
        child.order = self._number()
        child.since_s = time.monotonic()
        self._send(child, make(child.order))

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number

    def _send(self, child: Child, message: object) -> None:
        self._processes.send(child.number, message)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
