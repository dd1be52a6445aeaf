"""Virtual time: an event loop whose clock jumps to the next timer.

What was written for asyncio runs on it unchanged. Rules:
- nothing takes time but waiting: the clock stands still while callbacks run, and jumps when none is due;
- no thread, no socket, no signal: asking for one is an error, because the clock would not wait for it;
- callbacks run in the order of their time, then of their making, so the same coroutines do the same thing every time;
- when everybody waits and nothing is scheduled, nobody will ever go on: `Deadlock` says who waits, and where.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
from asyncio import base_events
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context
from datetime import UTC, datetime
from pathlib import Path
from types import AsyncGeneratorType
from typing import Any, TypeVar

from windfall.errors import WindfallError
from windfall.events.log import Clock

T = TypeVar("T")
CLOSE_S = 1e-9
"""Timers that are less apart are due together."""
ROUNDS = 4
"""Tasks that are cancelled may begin others."""
EPOCH_S = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
"""What a wall clock shows when virtual time begins."""


class Deadlock(WindfallError):
    """Nothing is scheduled, and somebody waits."""


class _Ready(deque[Any]):
    """Callbacks that are due; `between` is called before each is taken."""

    between: Callable[[], None] = staticmethod(lambda: None)

    def popleft(self) -> Any:
        self.between()
        return super().popleft()


class VirtualLoop(base_events.BaseEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._due: dict[float, list[asyncio.TimerHandle]] = {}
        """Timers by their time: in a simulation many go off at one moment."""
        self._times: list[float] = []
        """A heap of these times."""
        self.set_exception_handler(self._remember)
        self.error: BaseException | None = None
        """The first that a callback raised: an event loop only logs it, a simulation must not go on."""

    def time(self) -> float:
        return self._now_s

    def leap(self, seconds: float) -> None:
        """Nothing happens for so long, and then everything that was due."""
        self._now_s += seconds

    def watch(self, between: Callable[[], None]) -> None:
        """Call this between any two callbacks. What it raises ends the run."""
        ready = _Ready(self._ready)
        ready.between = between
        self._ready = ready

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """A heap of timers would not keep the order of those that are due together; lists do."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        if when in self._due:
            self._due[when].append(timer)
        else:
            self._due[when] = [timer]
            heapq.heappush(self._times, when)
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing to do: it is left out when its time comes."""

    def _run_once(self) -> None:
        """One round of asyncio's loop: all that is due now, but nothing that is asked for meanwhile. If nothing is due,
        the clock jumps to the next timer first."""
        ready, times, due = self._ready, self._times, self._due  # pyright: ignore[reportAttributeAccessIssue]
        if not ready and not self._stopping:  # pyright: ignore[reportAttributeAccessIssue]
            while times and all(timer.cancelled() for timer in due[times[0]]):
                del due[heapq.heappop(times)]
            if not times:
                raise Deadlock("nothing is scheduled, and these wait:\n" + waiting(self), where="virtual time")
            self._now_s = max(self._now_s, times[0])
        while times and times[0] < self._now_s + CLOSE_S:
            ready.extend(due.pop(heapq.heappop(times)))
        for _ in range(len(ready)):
            handle = self._ready.popleft()  # pyright: ignore[reportAttributeAccessIssue]
            if not handle._cancelled:
                handle._run()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        raise RuntimeError(f"{func} wants a thread: there is none in virtual time")

    async def create_server(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError("a port is wanted: there is no network in virtual time")

    async def create_connection(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError("a connection is wanted: there is no network in virtual time")

    def _write_to_self(self) -> None:
        raise RuntimeError("another thread calls: there is none in virtual time")

    def _remember(self, _: Any, said: dict[str, Any]) -> None:
        self.error = self.error or said.get("exception") or RuntimeError(said["message"])
        self.stop()


def clock(loop: VirtualLoop) -> Clock:
    """For an event log: seconds since the start, and the date that they make."""
    return Clock(wall=lambda: EPOCH_S + loop.time(), monotonic=loop.time)


def run(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]], between: Callable[[], None] | None = None) -> T:
    """`main(loop)` to its end; whatever is left then is cancelled. The first error of any callback ends it. `between`:
    called between any two callbacks."""
    loop = VirtualLoop()
    if between is not None:
        loop.watch(between)
    try:
        asyncio.set_event_loop(loop)
        task = loop.create_task(main(loop), name="main")
        task.add_done_callback(lambda _: loop.stop())
        loop.run_forever()
        if loop.error is not None:
            raise loop.error
        return task.result()
    finally:
        _cancel_all(loop)
        asyncio.set_event_loop(None)
        loop.close()


def _cancel_all(loop: VirtualLoop) -> None:
    loop.watch(lambda: None)
    loop.set_exception_handler(lambda _, said: None)  # the first error has been told; others are of the taking down
    for _ in range(ROUNDS):
        tasks = sorted(asyncio.all_tasks(loop), key=lambda t: t.get_name())
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


def waiting(loop: asyncio.AbstractEventLoop) -> str:
    """Every task by name, and the innermost frames that it waits in: of our own, and of asyncio."""
    lines = []
    for task in sorted(asyncio.all_tasks(loop), key=lambda t: t.get_name()):
        frames = list(_frames(task.get_coro()))
        ours = [f for f in frames if "asyncio" not in Path(f.f_code.co_filename).parts]
        shown = list(dict.fromkeys([*ours[-1:], *frames[-1:]]))
        where = ", in ".join(f"{_short(f.f_code.co_filename)}:{f.f_lineno} {f.f_code.co_qualname}" for f in shown)
        lines.append(f"  {task.get_name()}: {where or 'has not begun'}")
    return "\n".join(lines) or "  nobody"


def _frames(coroutine: Any) -> Iterator[Any]:
    """Down the chain of what awaits what, as far as it is Python's."""
    while coroutine is not None:
        frame = next((x for a in ("cr_frame", "gi_frame", "ag_frame") if (x := getattr(coroutine, a, None))), None)
        if frame is not None:
            yield frame
        links = (getattr(coroutine, a, None) for a in ("cr_await", "gi_yieldfrom", "ag_await"))
        before, coroutine = coroutine, next((x for x in links if x is not None), None)
        if coroutine is None and frame is None:  # the step of an async generator does not say whose it is
            coroutine = next((x for x in gc.get_referents(before) if isinstance(x, AsyncGeneratorType)), None)


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-3:])
