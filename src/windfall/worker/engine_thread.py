"""The engine's thread: takes orders between two engine steps, and emits one frame for every step.

    orders (a queue) ──▶ [ orders │ step │ frame ] ──▶ emit(message)

The thread alone touches the engine, and makes it, if it is not there yet; orders wait meanwhile. When there is nothing
to make, it waits for orders; and in `emit` when nobody takes its frames: no more tokens are made than can be sent.
"""

from __future__ import annotations

import queue
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from windfall.engine.base import Engine
from windfall.errors import WindfallError
from windfall.link.messages import Rejected, Released, Stats, Work
from windfall.types import Request
from windfall.worker.frame import frame

Emit = Callable[[object], None]
Make = Callable[[], tuple[Engine, int]]
"""An engine, and how many responses it runs at once."""


class EngineThread:
    def __init__(self, engine: Engine | None, slots: int = 0, *, make: Make | None = None) -> None:
        """`make`, where there is no engine yet, is called in the engine's thread."""
        assert (engine is None) == (make is not None), "an engine, or a way to make one"
        self._engine, self.slots, self._make = engine, slots, make
        self.failed: BaseException | None = None
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._emit: Emit = lambda message: None
        self._running: set[int] = set()
        self._paused = False
        self._made = self._steps = 0
        self._stepped_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._on_failure: Callable[[], None] = lambda: None

    def start(self, on_failure: Callable[[], None] = lambda: None) -> None:
        """`on_failure` is called, in the engine's thread, if the engine raises: this host is then of no more use."""
        self._on_failure = on_failure
        self._thread.start()

    @property
    def built(self) -> bool:
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "orders wait until the engine is there"
        return self._engine

    @property
    def longest(self) -> int:
        """The most tokens of one response, its prompt included, that the engine has room for; 0: it does not say."""
        return getattr(self._engine, "limit", 0)

    @property
    def excused(self) -> bool:
        """The engine waits for whoever shares its weights, which may take any time."""
        return bool(getattr(self._engine, "waiting", False))

    # orders; each takes effect between two steps

    def attach(self, emit: Emit) -> None:
        """A new link: whatever was running is forgotten, and frames go to `emit` from now on."""

        def order() -> None:
            self._forget()
            self._emit, self._paused = emit, False

        self._orders.put(order)

    def detach(self) -> None:
        self._orders.put(self._forget)

    def add(self, work: Iterable[Work]) -> None:
        def order() -> None:
            for w in work:
                self._add(w)

        self._orders.put(order)

    def cancel(self, handles: Iterable[int]) -> None:
        self._orders.put(lambda: self._drop(handles))

    def release(self, handles: tuple[int, ...]) -> None:
        """Give up these. Their tokens have been emitted; that is confirmed after them."""

        def order() -> None:
            self._drop(handles)
            self._emit(Released(handles=handles))

        self._orders.put(order)

    def swap(
        self, version: int, weights: Mapping[str, Any] | None, done: Callable[[BaseException | None], None]
    ) -> None:
        def order() -> None:
            try:
                self.engine.swap(version, weights)
            except (WindfallError, RuntimeError) as e:  # the weights do not fit this model
                done(e)
            else:
                done(None)

        self._orders.put(order)

    def pause(self, paused: bool) -> None:
        def order() -> None:
            self._paused = paused
            self._stepped_s = time.monotonic()

        self._orders.put(order)

    def finish(self, done: Callable[[], None]) -> None:
        """Make no more tokens; `done` after the last frame."""

        def order() -> None:
            self._forget()
            done()

        self._orders.put(order)

    def close(self, timeout_s: float = 10.0) -> None:
        self._orders.put(None)
        self._thread.join(timeout_s)

    def stats(self) -> Stats:
        """Safe from any thread; the numbers may be a step old."""
        engine = self._engine
        running = 0 if engine is None else len(engine)
        waits = running > 0 and not self._paused and not self.excused
        counters = getattr(engine, "counters", None)
        return Stats(
            running=running, made=self._made, steps=self._steps,
            idle_s=time.monotonic() - self._stepped_s if waits else 0.0,
            preemptions=getattr(counters, "preemptions", 0), waiting=getattr(counters, "waiting", 0),
            reused_tokens=getattr(counters, "reused_tokens", 0),
        )  # fmt: skip

    # in the thread

    def _run(self) -> None:
        try:
            if self._make is not None:
                engine, self.slots = self._make()
                self._engine, self._make = engine, None  # last: from now on it is `built`
            while True:
                idle = self._paused or len(self.engine) == 0
                try:
                    while True:
                        order = self._orders.get() if idle else self._orders.get_nowait()
                        if order is None:
                            return
                        order()
                        idle = self._paused or len(self.engine) == 0
                except queue.Empty:
                    pass
                self._step()
        except BaseException as e:  # fault boundary: the worker must learn of it, and nobody else would tell
            self.failed = e
            self._on_failure()

    def _step(self) -> None:
        chunks = self.engine.step()
        self._stepped_s = time.monotonic()
        self._steps += 1
        if chunks:
            self._made += sum(len(c.tokens) for c in chunks)
            self._running -= {int(c.id) for c in chunks if c.finish}
            self._emit(frame(chunks))

    def _add(self, work: Work) -> None:
        if len(self.engine) == 0:
            self._stepped_s = time.monotonic()
        try:
            self.engine.add(
                Request(
                    id=str(work.handle), prompt=tuple(array("I", work.prompt)), seed=work.seed, position=work.position,
                    max_tokens=work.max_tokens, sampling=work.sampling, stop=frozenset(work.stop),
                )
            )  # fmt: skip
            self._running.add(work.handle)
        except WindfallError as e:
            self._emit(Rejected(handle=work.handle, why=str(e)))

    def _drop(self, handles: Iterable[int]) -> None:
        for handle in handles:
            self.engine.cancel(str(handle))
            self._running.discard(handle)

    def _forget(self) -> None:
        self._drop(list(self._running))
        self._emit = lambda message: None
