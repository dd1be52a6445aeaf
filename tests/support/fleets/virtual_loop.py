"""The simulator's event loop in virtual time, for tests that inspect and disturb a fleet between any two callbacks.

The same coroutines run the same callbacks every time. In a StepLoop, unlike in a simulation, work for a thread is done
at once, and an error of a callback does not end the run: it is collected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from windfall.sim.core.loop import VirtualLoop


class _Ready(deque[Any]):
    """Callbacks that are due. `between` is called before each one runs."""

    between: Callable[[], None] = staticmethod(lambda: None)

    def popleft(self) -> Any:
        self.between()
        return super().popleft()


class CheckedLoop(VirtualLoop):
    def between(self, call: Callable[[], None] | None) -> None:
        """From now on, call this between any two callbacks. An error that it raises ends the run."""
        ready = _Ready(self._ready)
        ready.between = call or (lambda: None)
        self._ready = ready

    def stall(self, seconds: float) -> None:
        """Advance the clock without running anything. Timers that were due meanwhile run late."""
        self._now_s += seconds


class StepLoop(CheckedLoop):
    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []
        """Exceptions of callbacks and of tasks that are never awaited: an event loop only logs them."""

    def _record_error(self, _: Any, context: dict[str, Any]) -> None:
        who = context.get("task") or context.get("future") or context.get("handle")
        self.errors.append(f"{context['message']}: {context.get('exception')!r} {who!r}")

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as e:  # raised where the result is awaited, as from a thread
            done.set_exception(e)
        return done

    def _write_to_self(self) -> None:
        """Nothing to do: what was called as if from another thread is due already."""
