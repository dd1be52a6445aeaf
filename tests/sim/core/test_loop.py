"""The virtual clock: order of callbacks, exact times, what it rejects, and the report of a deadlock."""

from __future__ import annotations

import asyncio
import socket

import pytest

from windfall.sim.core import loop as loops
from windfall.sim.core.loop import Deadlock, VirtualLoop


def test_waiting_takes_no_real_time_and_the_clock_is_exact() -> None:
    async def main(loop: VirtualLoop) -> list[float]:
        seen = []
        for s in (0.1, 1e6, 0.25):
            await asyncio.sleep(s)
            seen.append(loop.time())
        return seen

    assert loops.run(main) == [0.1, 1e6 + 0.1, 1e6 + 0.1 + 0.25]


def test_callbacks_run_in_order_of_their_due_times() -> None:
    async def main(loop: VirtualLoop) -> list[int]:
        out: list[int] = []
        for n in (3, 1, 2):
            loop.call_later(n, out.append, n)
        await asyncio.sleep(5)
        return out

    assert loops.run(main) == [1, 2, 3]


def test_deadlock_lists_the_waiting_tasks_and_where() -> None:
    async def waits_forever() -> None:
        await asyncio.Event().wait()

    async def main(_: VirtualLoop) -> None:
        task = asyncio.create_task(waits_forever(), name="the patient one")
        await task

    with pytest.raises(Deadlock) as e:
        loops.run(main)
    text = str(e.value)
    assert "the patient one: " in text
    assert "Event.wait" in text, "the innermost frame"
    assert "waits_forever, in " in text, "and our innermost frame"
    assert "main: " in text
    assert "test_loop.py" in text


def test_task_that_has_not_started_is_listed() -> None:
    async def main(loop: VirtualLoop) -> str:
        task = asyncio.create_task(asyncio.sleep(1), name="fresh")
        text = loops.waiting_tasks(loop)
        await task
        return text

    assert "fresh: " in loops.run(main)


def test_threads_and_sockets_are_rejected() -> None:
    async def thread(_: VirtualLoop) -> None:
        await asyncio.to_thread(print)

    async def port(_: VirtualLoop) -> None:
        await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)

    with pytest.raises(RuntimeError, match="thread"):
        loops.run(thread)
    with pytest.raises(RuntimeError, match="no network"):
        loops.run(port)


def test_loop_opens_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socketpair", refuse)
    assert loops.run(lambda _: asyncio.sleep(1, "ok")) == "ok"


def test_error_in_a_callback_ends_the_run() -> None:
    def fails() -> None:
        raise ValueError("broken")

    async def main(loop: VirtualLoop) -> None:
        loop.call_later(1, fails)
        await asyncio.sleep(10)

    with pytest.raises(ValueError, match="broken"):
        loops.run(main)


def test_remaining_tasks_are_cancelled() -> None:
    ended = []

    async def runs_on() -> None:
        try:
            await asyncio.sleep(1e9)
        finally:
            ended.append(True)

    async def main(_: VirtualLoop) -> int:
        asyncio.create_task(runs_on(), name="left over")  # noqa: RUF006
        await asyncio.sleep(1)
        return 7

    assert loops.run(main) == 7
    assert ended == [True]


def test_timers_due_together_run_in_the_order_of_scheduling() -> None:
    """Other timers before and after, some of them cancelled, do not change the order."""

    async def main(loop: VirtualLoop) -> list[int]:
        out: list[int] = []
        for n in range(200):
            loop.call_at(5.0, out.append, n)
            loop.call_at(1.0 + n * 37 % 91, lambda: None)
            loop.call_at(n * 0.1, out.append, -1).cancel()
        await asyncio.sleep(5.0)
        return out

    assert loops.run(main) == list(range(200))


def test_clock_does_not_jump_to_a_cancelled_timer() -> None:
    async def main(loop: VirtualLoop) -> float:
        loop.call_at(5.0, lambda: None).cancel()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(9.0):
                await asyncio.sleep(100.0)
        loop.call_at(20.0, lambda: None).cancel()
        await asyncio.sleep(1.0)
        return loop.time()

    assert loops.run(main) == 10.0
