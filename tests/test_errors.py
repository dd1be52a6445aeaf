"""An exception in a callback, or in a task that is never awaited, ends the process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from windfall import errors
from windfall.errors import WindfallError
from windfall.worker import process as worker


async def waits() -> str:
    asyncio.get_running_loop().call_later(0.01, lambda: None)
    await asyncio.sleep(30)
    return "over"


def fail() -> None:
    raise KeyError("unexpected")


async def fails() -> None:
    fail()


def soon() -> None:
    asyncio.get_running_loop().call_soon(fail)


def later() -> None:
    asyncio.get_running_loop().call_later(0.01, fail)


def lost() -> None:
    asyncio.get_running_loop().create_task(fails())


def kept() -> None:
    KEPT.append(asyncio.get_running_loop().create_task(fails()))
    KEPT[-1].add_done_callback(errors.report_failure)


KEPT: list[asyncio.Task[None]] = []


@pytest.mark.parametrize("happens", [soon, later, lost, kept])
def test_first_error_of_a_callback_or_task_is_raised(
    happens: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> str:
        happens()
        return await waits()

    with pytest.raises(KeyError, match="unexpected"):
        asyncio.run(asyncio.wait_for(errors.guard(main()), 240))
    assert any(record.exc_info for record in caplog.records), "the traceback is logged"


def test_error_that_follows_from_the_cancellation_does_not_hide_the_cause() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(fail)
        try:
            await waits()
        finally:
            raise ValueError("a consequence")

    with pytest.raises(KeyError, match="unexpected"):
        asyncio.run(errors.guard(main()))


@pytest.mark.parametrize("swallows", [False, True])
def test_error_during_cleanup_does_not_hide_the_original_error(swallows: bool) -> None:
    async def cleanup() -> None:
        asyncio.get_running_loop().call_soon(fail)
        with contextlib.suppress(*([asyncio.CancelledError] if swallows else [])):
            await asyncio.sleep(30)

    async def main() -> None:
        try:
            raise WindfallError("the disk is full")
        finally:
            await cleanup()

    with pytest.raises(WindfallError, match="the disk is full"):
        asyncio.run(asyncio.wait_for(errors.guard(main()), 240))


def test_error_reported_just_before_the_end_is_raised() -> None:
    async def main() -> str:
        asyncio.get_running_loop().call_exception_handler({"message": "at the end", "exception": KeyError("late")})
        return "over"

    with pytest.raises(KeyError, match="late"):
        asyncio.run(errors.guard(main()))


def test_error_of_one_socket_does_not_end_the_process() -> None:
    async def main() -> str:
        loop = asyncio.get_running_loop()
        context = {"message": "socket.accept() out of system resource", "exception": OSError(24, "Too many open files")}
        loop.call_exception_handler({**context, "socket": None})
        loop.call_exception_handler({"message": "a message without an exception"})
        await asyncio.sleep(0)
        return "over"

    assert asyncio.run(errors.guard(main())) == "over"


def test_result_error_and_cancellation_of_main_are_passed_on() -> None:
    async def one() -> int:
        return 1

    async def main() -> None:
        assert await errors.guard(one()) == 1
        with pytest.raises(KeyError):
            await errors.guard(fails())
        task = asyncio.create_task(errors.guard(waits()))
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(main())


def test_failing_callback_ends_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def live(self: object) -> int:
        asyncio.get_running_loop().call_soon(fail)
        await asyncio.sleep(30)
        return 0

    monkeypatch.setattr("windfall.worker.controller_client.ControllerClient._serve_links", live)
    monkeypatch.setattr("os._exit", lambda code: pytest.fail(f"it ended with {code}"))
    with pytest.raises(KeyError, match="unexpected"):
        worker.main(
            "http://127.0.0.1:9", "a-token-of-16-ch", name="w", kind="spot", device="cpu", region="",
            price_usd_per_h=0.0, threads=1, share=0.4, clouds="none", ca=None, patience_s=1.0,
        )  # fmt: skip


HANGS = """
import asyncio, time
from windfall.worker import process as worker
from windfall.worker.controller_client import ControllerClient

async def run(self, clouds=()):
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 300)
    await asyncio.sleep(0.1)
    print("it is over")
    return 3

ControllerClient.run = run
worker.main("http://127.0.0.1:9", "a-token-of-16-ch", name="w", kind="spot", device="cpu", region="",
            price_usd_per_h=0.0, threads=1, share=0.4, clouds="none", ca=None, patience_s=1.0)
"""


def test_worker_with_a_hanging_pull_still_ends() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], timeout=120, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "it is over\n"), done.stderr


def test_errors_of_the_file_system_are_no_bugs(tmp_path: Path) -> None:
    """They name the file, or the folder of the process if a failed write does not say which file it was."""
    denied = errors.file_system_error(PermissionError(errno.EACCES, "Permission denied", "a/b"), tmp_path)
    assert denied is not None
    assert str(denied).startswith("a/b: Permission denied\nCheck the permissions of it and of its folder.")
    for full in (OSError(errno.ENOSPC, "No space left on device"), Exception("No space left on device (os error 28)")):
        found = errors.file_system_error(full, tmp_path)
        assert found is not None
        assert found.where == str(tmp_path)
        assert "bytes are free there" in found.what
    copied = errors.file_system_error(OSError(errno.ENOSPC, "No space left on device", "from", None, "to"), tmp_path)
    assert copied is not None
    assert copied.where == "to"
    for other in (OSError(errno.EPERM, "Operation not permitted"), OSError(errno.EIO, "I/O error", "a"), KeyError("a")):
        assert errors.file_system_error(other, tmp_path) is None
