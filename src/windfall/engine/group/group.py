"""Several engines that act as one: an engine in a child process for each GPU of the trainer.

    EngineThread ── TrainerEngine ── EngineGroup ── thread `engines` ─┬─ child 0: its own engine, weights and KV cache
                                                    (an event loop)   └─ child 1 ...

All state belongs to the group's thread. The methods of the engine run there, too, while their callers wait. A task for
each child keeps its process running and tells it what to do, one message at a time: build, load the version, step.

Rules:
- A request goes to the child with the most free slots and stays there. Chunks of one version are returned together.
- A child steps as long as `step` takes its tokens: at most WINDOW frames of each wait to be returned.
- There is one version. `swap` loads it into all children from the publisher's buffer. A child that was started later,
  or was asleep, loads the same version again. If the publisher has overwritten it meanwhile, nothing is generated until
  the next `swap`.
- After `pause` or `sleep` has returned, no child computes, and no child begins to, until `step` or `swap` is called.
  After `sleep`, no child holds memory for KV cache or weights.
- If a child ends, its responses continue in other children from their last token, or wait for a child. The child is
  started again with back-off. A child that is stuck is killed. After MAX_FAILURES ends of one child in a row without a
  token in between, the group fails: `step` and `swap` raise the last error, until `build` is called again.
- All processes end with the thread, and so with the trainer, however it ends (processes/fork_client.py).

`add`, `cancel`, `step` and `swap` are called by one thread; `pause` and `sleep` also by another, but not at the same
time as `step` or `swap` (TrainerTurn sees to that).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from windfall.backoff import RestartDelay
from windfall.devices import Place
from windfall.engine.base import Counters, Engine, check_request, duplicate_id
from windfall.engine.group import messages as m
from windfall.errors import WindfallError, describe_exit, run_until_first
from windfall.link.messages import EngineSpec
from windfall.processes.fork_client import ForkClient
from windfall.processes.process import Handle
from windfall.types import Capabilities, Chunk, Request
from windfall.weights.shared import OpenVersion
from windfall.weights.source import Source

MODULES = ("windfall.engine.torch.engine", "windfall.engine.torch.runner")
"""Modules that the fork server imports besides those of child.py."""
WINDOW = 2
"""Frames of a child that wait until `step` returns them, before the child makes no more steps."""
STEP_WAIT_S = 0.05
"""Upper limit (seconds) for the time that `step` waits for tokens."""
BUILD_S = 900.0
"""Time limit for building an engine, compiling kernels and capturing graphs (seconds)."""
SWAP_S = 100.0
"""Time limit until at least one child has loaded a version (seconds)."""
ORDER_S = 120.0
"""Time limit for one engine step, and for one order such as a copy of the weights (seconds)."""
MAX_FAILURES = 4

P = ParamSpec("P")
T = TypeVar("T")


def in_thread(
    method: Callable[Concatenate[EngineGroup, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[EngineGroup, P], T]:
    """The method runs in the group's thread; the caller waits for its result."""

    @functools.wraps(method)
    def run(self: EngineGroup, *args: P.args, **kwargs: P.kwargs) -> T:
        return asyncio.run_coroutine_threadsafe(method(self, *args, **kwargs), self.loop).result()

    return run


@dataclass(eq=False, slots=True)
class PlacedResponse:
    request: Request
    handle: int
    tokens: list[int] = field(default_factory=list)
    """Tokens that have arrived; `step` may not have returned all of them yet."""
    ended: bool = False
    """Whether the last token has arrived."""

    def rest(self) -> Request:
        """What a child must generate."""
        r, done = self.request, len(self.tokens)
        return replace(
            r,
            id=str(self.handle),
            prompt=r.prompt + tuple(self.tokens),
            position=r.position + done,
            max_tokens=r.max_tokens - done,
        )


class ChildEnded(Exception):
    """The process ended without a reason of its own, or was given up."""


class ChildLink:
    """The connection to one child process."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handle: Handle) -> None:
        self.handle = handle
        self.error: Exception | None = None
        """What the child reported before it ended, or why it was given up."""
        self._reader = reader
        self._writer = writer
        self._answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def call(self, message: object, limit_s: float) -> Any:
        """Send a message, and return its answer. Raises ChildEnded. The child is given up if it takes too long."""
        answer = self._answer = asyncio.get_running_loop().create_future()
        self._writer.write(m.encode(message))
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            self.error = m.ChildFailed(f"it has not responded for {limit_s:g} s")
            raise ChildEnded from None
        finally:
            if answer.cancelled():
                self._writer.transport.abort()

    async def read(self) -> None:
        """Read answers until the process ends."""
        decoder = msgspec.msgpack.Decoder(m.FromChild)
        try:
            while True:
                length = await self._reader.readexactly(m.LENGTH_BYTES)
                message = decoder.decode(await self._reader.readexactly(int.from_bytes(length, "big")))
                if isinstance(message, m.ChildError):
                    self.error = message.error()
                else:
                    self._answer.set_result(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            if not self._answer.done():
                self._answer.set_exception(ChildEnded())
                self._answer.exception()  # it is possible that nothing waits for it


@dataclass(eq=False, slots=True)
class Child:
    number: int
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the child does what a message says."""
    link: ChildLink | None = None
    built: m.Built = field(default_factory=lambda: m.Built(slots=0, limit=0, vocabulary=0))
    """The limits that it reported when it last built its engine."""
    ready: bool = False
    """Whether it has an engine."""
    held: OpenVersion | None = None
    """The version in its engine; None if it has none, or parts of two."""
    responses: dict[int, PlacedResponse] = field(default_factory=dict)
    add: list[Request] = field(default_factory=list)
    cancel: list[int] = field(default_factory=list)
    """Requests and cancellations that its next step takes along."""
    counters: Counters = field(default_factory=Counters)
    """Sums of this process and those before it."""
    earlier: Counters = field(default_factory=Counters)
    """Sums of the processes before this one."""
    failures: int = 0
    """Ends in a row without a token in between."""

    def reset(self) -> None:
        """The process is gone."""
        self.earlier = self.counters = replace(self.counters, waiting=0)
        self.ready = False
        self.held = None
        self.responses = {}
        self.add = []
        self.cancel = []


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
        self._source = source
        self._folder = folder
        self._share = share
        self._threads = threads
        self._say = say
        self._client = ForkClient(
            entry="windfall.engine.group.child:main", modules=modules, log=folder / "fork_server.log"
        )
        self._spec: EngineSpec | None = None
        self._children = [Child(n) for n in range(len(places))]
        self._tasks: list[asyncio.Task[None]] = []
        self._responses: dict[str, PlacedResponse] = {}
        self._unplaced: dict[int, PlacedResponse] = {}
        self._arrived: deque[tuple[Child, list[tuple[PlacedResponse, Chunk]]]] = deque()
        """Frames that `step` has not returned yet."""
        self._target: OpenVersion | None = None
        """The version that the children load."""
        self._awake = False
        self._swapping = False
        self._starting = False
        self._failure: Exception | None = None
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()
        self._closing = asyncio.Event()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="engines", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        async with self._client:
            with contextlib.suppress(OSError, WindfallError):  # the first child starts another fork server, or fails
                await self._client.ready()
            await self._closing.wait()
            await self._stop()

    def close(self) -> None:
        """End all processes. The group cannot be used any more."""
        self.loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

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
        total = Counters(waiting=len(self._unplaced))
        for child in self._children:
            total = add_counters(total, child.counters)
        return total

    def __len__(self) -> int:
        return len(self._responses)

    @in_thread
    async def build(self, spec: EngineSpec) -> int:
        """Build an engine in every child, in place of any that exists. Returns the number of slots. Raises the error of
        a child that cannot build its engine."""
        await self._stop()
        self._responses.clear()
        self._unplaced.clear()
        self._arrived.clear()
        self._spec = spec
        self._failure = None
        for child in self._children:
            child.failures = 0
        self._starting = self._awake = True
        self._tasks = [asyncio.create_task(self._keep_running(c)) for c in self._children]
        await self._until(lambda: self._failure or all(c.ready for c in self._children))
        self._starting = False
        self._raise_failure()
        return self.slots

    @in_thread
    async def add(self, request: Request) -> None:
        if request.id in self._responses:
            raise duplicate_id(request)
        check_request(request, max(c.built.vocabulary for c in self._children), self.limit)
        response = self._responses[request.id] = PlacedResponse(request, next(self._numbers))
        self._place(response)

    @in_thread
    async def cancel(self, id: str) -> None:
        response = self._responses.pop(id, None)
        if response is not None:
            self._unplaced.pop(response.handle, None)
            for child in self._children:
                if child.responses.pop(response.handle, None):
                    child.cancel.append(response.handle)

    @in_thread
    async def step(self) -> list[Chunk]:
        """Tokens that have arrived since the last call; waits up to STEP_WAIT_S for the first."""
        self._awake = True
        self._notify()
        if self._responses:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STEP_WAIT_S):
                    await self._until(lambda: self._arrived or self._failure)
        self._raise_failure()
        return self._take()

    @in_thread
    async def swap(self, version: int, weights: Any = None) -> None:
        """Load this version from the publisher's buffer into all children. WindfallError: nothing has changed.
        RuntimeError: the version was overwritten meanwhile, or no child is ready, and nothing is generated until a swap
        succeeds."""
        assert weights is None, "the children load what is published"
        self._raise_failure()
        target = OpenVersion(self._source, version)
        self._awake = self._swapping = True
        self._notify()
        try:
            await self._load_all(target)
        except WindfallError:
            target.close()
            raise
        except BaseException:  # raised again: the children may have different versions, or mixtures
            target.close()
            self._set_target(None)
            raise
        finally:
            self._swapping = False
            self._notify()
        self._set_target(target)
        self.version = version

    @in_thread
    async def pause(self) -> None:
        """Return when no child computes any more. `step` and `swap` end the pause."""
        await self._pause_all(free=False)

    @in_thread
    async def sleep(self) -> None:
        """Like `pause`; also free the children's memory for KV cache and weights. `step` and `swap` load them again."""
        await self._pause_all(free=True)

    @in_thread
    async def check(self) -> None:
        placed = [r for c in self._children for r in c.responses.values()]
        open_responses = [r for r in self._responses.values() if not r.ended]
        assert len(placed) + len(self._unplaced) == len(open_responses), "a response is nowhere, or twice"
        assert all(r in open_responses for r in (*placed, *self._unplaced.values())), "a response was not removed"
        for c in self._children:
            assert self._unread(c) <= WINDOW, f"child {c.number} has made too many steps"
            assert c.ready or not c.responses, f"child {c.number} has work but no engine"

    # The processes

    async def _keep_running(self, child: Child) -> None:
        delay = RestartDelay()
        while self._failure is None:
            began_s = time.monotonic()
            try:
                await self._live(child)
            except Exception as e:  # fault boundary: the process ended or could not be started, or reported an error
                self._lose(child, e)
            await asyncio.sleep(delay.after_death(lived_s=time.monotonic() - began_s))

    async def _live(self, child: Child) -> None:
        """Run one process until it ends, and raise the reason."""
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            with theirs:
                handle = await self._client.start(
                    name=f"engine{child.number}.{next(self._numbers)}",
                    argv=["windfall-engine"],
                    env=self._places[child.number].environment(os.environ),
                    log=self._folder / f"engine{child.number}.log",
                    channel=theirs,
                )
            link = child.link = ChildLink(reader, writer, handle)
            try:
                with contextlib.suppress(ChildEnded):
                    await run_until_first(link.read(), self._drive(child, link))
            finally:
                child.link = None
                code = await handle.terminate(0.0)
        finally:
            writer.close()
        raise link.error or ChildEnded(f"the process {describe_exit(code)}")

    async def _drive(self, child: Child, link: ChildLink) -> None:
        """Tell the child again and again what it needs to do next."""
        while True:
            await self._until(lambda: self._has_task(child))
            async with child.lock:
                if not self._has_task(child):  # the group was paused while this waited for the lock
                    continue
                if not child.ready:
                    await self._build_child(child, link)
                elif self._target is not None and child.held is not self._target:
                    await self._load(child, link, self._target)
                    if child.held is None:  # the publisher has overwritten it: wait for the next swap
                        self._set_target(None)
                else:
                    await self._step(child, link)
            self._notify()

    def _has_task(self, child: Child) -> bool:
        if not self._awake or not child.ready:
            return self._awake
        if self._swapping or self._target is None:
            return False
        return child.held is not self._target or (bool(child.responses) and self._unread(child) < WINDOW)

    def _unread(self, child: Child) -> int:
        """Frames that `step` has not returned yet."""
        return sum(c is child for c, _ in self._arrived)

    async def _build_child(self, child: Child, link: ChildLink) -> None:
        assert self._spec is not None, "`build` starts the children"
        device = self._places[child.number].device
        message = m.Build(spec=self._spec, device=device, share=self._share, threads=self._threads)
        child.built = await link.call(message, BUILD_S)
        child.ready = True
        for response in list(self._unplaced.values()):
            self._place(response)

    async def _step(self, child: Child, link: ChildLink) -> None:
        message = m.StepEngine(add=child.add, cancel=child.cancel)
        child.add = []
        child.cancel = []
        stepped: m.Stepped = await link.call(message, ORDER_S)
        child.counters = add_counters(child.earlier, stepped.counters)
        chunks: list[tuple[PlacedResponse, Chunk]] = []
        for chunk in stepped.chunks:
            response = child.responses.get(int(chunk.id))
            if response is None:  # it was canceled
                continue
            response.tokens += chunk.tokens
            if chunk.finish:
                response.ended = True
                del child.responses[response.handle]
            chunks.append((response, replace(chunk, id=response.request.id)))
        if chunks:
            child.failures = 0
            self._arrived.append((child, chunks))

    def _take(self) -> list[Chunk]:
        """All chunks that have arrived, up to a change of the version."""
        out: list[Chunk] = []
        version = self._arrived[0][1][0][1].version if self._arrived else -1
        while self._arrived and self._arrived[0][1][0][1].version == version:
            _, chunks = self._arrived.popleft()
            for response, chunk in chunks:
                if self._responses.get(chunk.id) is response:  # otherwise it was canceled
                    out.append(chunk)
                    if chunk.finish:
                        del self._responses[chunk.id]
        self._notify()
        return out

    async def _load_all(self, target: OpenVersion) -> None:
        """Load the version into all children that are ready, at least one."""

        async def load(child: Child) -> None:
            async with child.lock:
                if child.link is not None:
                    with contextlib.suppress(ChildEnded):
                        await self._load(child, child.link, target)

        try:
            async with asyncio.timeout(SWAP_S):
                while not any(c.held is target for c in self._children):
                    await self._until(lambda: self._failure or any(c.ready for c in self._children))
                    self._raise_failure()
                    loads = await asyncio.gather(*(load(c) for c in self._children if c.ready), return_exceptions=True)
                    for error in filter(None, loads):
                        raise error
                    if not target.intact():
                        raise RuntimeError(f"version {target.version} was overwritten while it was loaded")
        except TimeoutError as e:
            what = f"waited {SWAP_S:g} s for the trainer's engines to load version {target.version}"
            raise RuntimeError(what) from e

    async def _load(self, child: Child, link: ChildLink, target: OpenVersion) -> None:
        answer = await link.call(m.LoadVersion(version=target.version, shared=target.shared), ORDER_S)
        if isinstance(answer, m.VersionRefused):
            raise WindfallError(answer.why)
        child.held = target if target.intact() else None

    async def _pause_all(self, *, free: bool) -> None:
        async def pause(child: Child) -> None:
            async with child.lock:  # it may be building its engine, which also needs the device
                if child.link is not None and child.ready:
                    with contextlib.suppress(ChildEnded):
                        await child.link.call(m.PauseEngine(free=free), ORDER_S)
                if free:
                    child.held = None

        self._awake = False
        await asyncio.gather(*(pause(c) for c in self._children))

    async def _stop(self) -> None:
        """End the children, and forget the version."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for child in self._children:
            child.reset()
        self._set_target(None)

    def _place(self, response: PlacedResponse) -> None:
        """Give the response to the child with the most free slots, or keep it until a child is built."""
        built = [c for c in self._children if c.ready]
        if not built:
            self._unplaced[response.handle] = response
            return
        self._unplaced.pop(response.handle, None)
        child = max(built, key=lambda c: c.built.slots - len(c.responses))
        child.responses[response.handle] = response
        child.add.append(response.rest())
        self._notify()

    def _lose(self, child: Child, error: Exception) -> None:
        """The child's process has ended: its responses continue elsewhere."""
        lost = list(child.responses.values())
        child.reset()
        child.failures += 1
        self._say(f"engine {child.number} of the trainer ended: {error}; {len(lost)} responses continue elsewhere")
        if self._starting and not isinstance(error, ChildEnded | OSError):
            self._failure = error
        elif child.failures >= MAX_FAILURES:
            self._failure = m.ChildFailed(f"engine {child.number} failed {child.failures} times in a row: {error}")
        for response in lost:
            response.handle = next(self._numbers)
            self._place(response)
        self._notify()

    def _set_target(self, target: OpenVersion | None) -> None:
        if self._target is not None:
            self._target.close()
        self._target = target
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, holds: Callable[[], object]) -> None:
        while not holds():
            await self._changed.wait()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
