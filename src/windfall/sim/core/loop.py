"""The virtual clock: an asyncio event loop whose time jumps to the next timer.

Code written for asyncio runs on it unchanged. Rules:
- Only waiting takes time: the clock stands still while callbacks run, and jumps when none is due.
- There are no threads, sockets or signals. Asking for one is an error, because the clock would not wait for it.
- Callbacks run in the order of their due times, then in the order in which they were scheduled: every run is the same.
- If every task waits and no timer is scheduled, `Deadlock` is raised. It lists the tasks and where each one waits.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio import base_events
from collections.abc import Callable, Coroutine
from contextvars import Context
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from windfall.errors import WindfallError
from windfall.events.log import Clock

T = TypeVar("T")
CLOSE_S = 1e-9
"""Timers that are less than this apart are due together."""
CANCEL_ROUNDS = 4
"""How often remaining tasks are cancelled at the end: a cancelled task may start others."""
EPOCH_S = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
"""Wall-clock time at which virtual time begins (seconds since 1970)."""


class Deadlock(WindfallError):
    """Tasks wait and no timer is scheduled."""


class VirtualLoop(base_events.BaseEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._due: dict[float, list[asyncio.TimerHandle]] = {}
        """Timers by due time. In a simulation, many timers share one due time."""
        self._times: list[float] = []
        """A heap of the due times."""
        self.set_exception_handler(self._record_error)
        self.error: BaseException | None = None
        """The first error of a callback. A plain event loop only logs it; a simulation must stop."""

    def time(self) -> float:
        return self._now_s

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Lists keep the order of timers that are due together; a heap of timers would not."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        if when in self._due:
            self._due[when].append(timer)
        else:
            self._due[when] = [timer]
            heapq.heappush(self._times, when)
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing to do: a cancelled timer is skipped when it is due."""

    def _run_once(self) -> None:
        """Run the callbacks that are due now, but none scheduled meanwhile. If none is due, jump to the next timer."""
        ready, times, due = self._ready, self._times, self._due  # pyright: ignore[reportAttributeAccessIssue]
        if not ready and not self._stopping:  # pyright: ignore[reportAttributeAccessIssue]
            while times and all(timer.cancelled() for timer in due[times[0]]):
                del due[heapq.heappop(times)]
            if not times:
                what = f"no timer is scheduled; waiting tasks:\n{waiting_tasks(self)}"
                raise Deadlock(what, where="virtual time")
            self._now_s = max(self._now_s, times[0])
        while times and times[0] < self._now_s + CLOSE_S:
            ready.extend(due.pop(heapq.heappop(times)))
        for _ in range(len(ready)):
            handle = self._ready.popleft()  # pyright: ignore[reportAttributeAccessIssue]
            if not handle._cancelled:
                handle._run()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        raise RuntimeError(f"{func} needs a thread: there are no threads in virtual time")

    async def create_server(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError("cannot listen on a port: there is no network in virtual time")

    async def create_connection(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError("cannot connect: there is no network in virtual time")

    def _write_to_self(self) -> None:
        raise RuntimeError("called from another thread: there are no threads in virtual time")

    def _record_error(self, _: Any, context: dict[str, Any]) -> None:
        self.error = self.error or context.get("exception") or RuntimeError(context["message"])
        self.stop()


def clock(loop: VirtualLoop) -> Clock:
    """The clock of an event log: virtual seconds since the start, and the matching date."""
    return Clock(wall=lambda: EPOCH_S + loop.time(), monotonic=loop.time)


def run(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]], loop: VirtualLoop | None = None) -> T:
    """Run `main(loop)` to its end, then cancel all remaining tasks. The first error of any callback ends the run."""
    loop = loop or VirtualLoop()

    def stop(_: object) -> None:
        loop.stop()

    asyncio.set_event_loop(loop)
    task = loop.create_task(main(loop), name="main")
    task.add_done_callback(stop)
    try:
        loop.run_forever()
        if loop.error is not None:
            raise loop.error
        return task.result()
    finally:
        task.remove_done_callback(stop)  # it would end the cancelling too early
        _cancel_all(loop)
        asyncio.set_event_loop(None)
        loop.close()


def _cancel_all(loop: VirtualLoop) -> None:
    loop.set_exception_handler(lambda _, context: None)  # only the first error counts
    for _ in range(CANCEL_ROUNDS):
        tasks = sorted(asyncio.all_tasks(loop), key=lambda t: t.get_name())
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


def waiting_tasks(loop: asyncio.AbstractEventLoop) -> str:
    """List every task by name with the innermost frames that it waits in: one of ours and one of asyncio's."""
    lines = []
    for task in sorted(asyncio.all_tasks(loop), key=lambda t: t.get_name()):
        frames, coroutine = [], task.get_coro()
        while (frame := getattr(coroutine, "cr_frame", None)) is not None:
            frames.append(frame)
            coroutine = coroutine.cr_await  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        ours = [f for f in frames if "asyncio" not in Path(f.f_code.co_filename).parts]
        shown = list(dict.fromkeys([*ours[-1:], *frames[-1:]]))
        short = ["/".join(Path(f.f_code.co_filename).parts[-3:]) for f in shown]
        where = ", in ".join(f"{s}:{f.f_lineno} {f.f_code.co_qualname}" for s, f in zip(short, shown, strict=True))
        lines.append(f"  {task.get_name()}: {where}")
    return "\n".join(lines) or "  none"
