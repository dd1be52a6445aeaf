"""The error that a user can fix, and how an unexpected exception ends the process.

    raise WindfallError(what, where=..., fix=...)    shown without a traceback: what happened, where, what to do
    asyncio.run(guard(main()))                       every process of a run starts like this

asyncio only logs an exception that is raised in a callback or in a task that is never awaited. `guard` makes such an
exception end the process:

- The first unexpected exception cancels `main` and is raised in its place. It may come from a callback (`call_soon`,
  `call_later`), a task that is never awaited, or `call_exception_handler`. Its traceback is logged at once.
- If `main` was already failing, so that the exception only disturbs its cleanup, the error of `main` itself is raised.
- A failure of one socket (a peer, too many open files) is only logged: the code that uses the socket gets an error too.

The simulator's virtual event loop follows the same rule (sim/core/loop.py).
"""

from __future__ import annotations

import asyncio
import difflib
import errno
import os
import shlex
import shutil
import signal
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
FILE_SYSTEM_ERRORS = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip
"""File system errors that can occur with any file. They are not bugs in windfall."""
SOCKET_KEYS = ("socket", "transport", "protocol", "server")
"""Keys that mark an asyncio exception context as an error of one connection."""


class WindfallError(Exception):
    """An error that a user can fix, shown without a traceback. `fix` is a sentence that says what to do."""

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        super().__init__("\n".join(p for p in (f"{where}: {what}" if where else what, fix) if p))


def nearest(word: str, known: Iterable[str], ending: str = "") -> str:
    """Return `Did you mean 'x'?`, or the list of known names if none is close. `ending`: what all names end with, which
    makes none of them closer.

    >>> nearest("temprature", ["temperature", "top_p"])
    "Did you mean 'temperature'?"
    >>> nearest("agnet.toml", ["agent.toml", "demo.toml"], ".toml"), nearest("x.toml", ["demo.toml"], ".toml")
    ("Did you mean 'agent.toml'?", 'Known: demo.toml.')
    """
    names = {name.removesuffix(ending): name for name in sorted(known)}
    close = difflib.get_close_matches(word.removesuffix(ending), names, n=1, cutoff=0.6)
    if close:
        return f"Did you mean '{names[close[0]]}'?"
    return f"Known: {', '.join(names.values())}." if names else ""


def install_command(extra: str) -> str:
    """The command that installs an extra of windfall, in a clone or beside an installed wheel."""
    clone = Path(__file__).resolve().parents[2]
    if not (clone / "pyproject.toml").is_file():
        return f"pip install 'windfall[{extra}]'"
    return f"pip install -e {shlex.quote(f'{clone}[{extra}]')}"


def newer_format(what: str, found: int, newest: int, where: object) -> WindfallError:
    """The error for a file that a newer windfall wrote. `found`: its format; `newest`: the newest one known here.

    >>> print(newer_format("the journal", 2, 1, "runs/demo/journal/000004.wal"))
    runs/demo/journal/000004.wal: the journal has format 2, but this windfall knows formats up to 1
    A newer windfall wrote it: use the same version, or a later one.
    """
    what = f"{what} has format {found}, but this windfall knows formats up to {newest}"
    return WindfallError(what, where=str(where), fix="A newer windfall wrote it: use the same version, or a later one.")


async def guard(main: Coroutine[Any, Any, T]) -> T:
    """Run `main`; raise the first exception that asyncio would otherwise only log."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(main)
    errors: list[BaseException] = []

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        error = context.get("exception")
        if error is None or (isinstance(error, OSError) and any(key in context for key in SOCKET_KEYS)):
            return
        errors.append(error)
        task.cancel()

    previous_handler = loop.get_exception_handler()
    loop.set_exception_handler(handle)
    try:
        result = await task
    except BaseException as e:  # raised again, unless it is only a consequence of the cancellation above
        if not errors:
            raise
        raise (_error_before_cancellation(e) or errors[0]) from None
    finally:
        loop.set_exception_handler(previous_handler)
    if errors:
        raise errors[0]
    return result


async def run_until_first(*coroutines: Coroutine[Any, Any, Any]) -> None:
    """Run all until the first one ends or fails; then cancel the others and wait for them."""
    tasks = [asyncio.create_task(c) for c in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _error_before_cancellation(error: BaseException) -> BaseException | None:
    """The exception that a coroutine had raised before it was canceled. None if it had not failed by then."""
    chain = [error]
    while (cause := chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    last = max((i for i, e in enumerate(chain) if isinstance(e, asyncio.CancelledError)), default=-1)
    return chain[last + 1] if last + 1 < len(chain) else None


def report_failure(task: asyncio.Task[Any]) -> None:
    """A done callback. It reports the task's exception at once, not when the task is garbage collected."""
    if not task.cancelled() and (error := task.exception()) is not None:
        context = {"message": f"task {task.get_name()} failed", "exception": error, "task": task}
        task.get_loop().call_exception_handler(context)


def last_line(error: BaseException, max_chars: int = 300) -> str:
    """The last line of the exception's traceback.

    >>> last_line(KeyError("x")), last_line(ValueError("two\\nlines"))
    ("KeyError: 'x'", 'ValueError: two')
    """
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:max_chars] if text else type(error).__name__


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed because a disk or a quota is full. Libraries that are not written in Python raise other
    types than OSError.

    >>> is_disk_full(OSError(errno.ENOSPC, "No space left on device")), is_disk_full(OSError(errno.EACCES, "denied"))
    (True, False)
    >>> is_disk_full(Exception("I/O error: No space left on device (os error 28)"))
    True
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return os.strerror(errno.ENOSPC) in str(error)


def describe_write(error: BaseException, path: Path) -> str:
    """Why a file or folder cannot be written; of a full disk, with its free bytes."""
    why = error.strerror or str(error) if isinstance(error, OSError) else last_line(error)
    if not is_disk_full(error):
        return why
    try:
        return f"{why} ({shutil.disk_usage(path if path.exists() else path.parent).free:,} bytes are free there)"
    except OSError:
        return why


def unwritable(what: str, path: Path, error: OSError, fix: str = "") -> WindfallError:
    """The error for a file or folder that cannot be written. `fix`: by default, what its kind of failure calls for."""
    why = describe_write(error, path)
    return WindfallError(f"cannot write {what}: {why}", where=str(path), fix=fix or _fix_of_write(error))


def _fix_of_write(error: OSError) -> str:
    if is_disk_full(error):
        return "Free space on its disk, or choose another folder."
    if error.errno == errno.ENOENT:
        return "Create its folder first, or choose another one."
    return "Choose another folder, or make this one writable."


def file_system_error(error: BaseException, folder: Path) -> WindfallError | None:
    """The error for the user if an exception comes from the file system and not from a bug in windfall. `folder`: what
    the process writes to. A failed write does not say to which file it belongs, unlike a failed open."""
    named = error.filename if isinstance(error, OSError) and error.errno in FILE_SYSTEM_ERRORS else None
    if not named and not is_disk_full(error):
        return None
    if isinstance(error, OSError) and is_disk_full(error):
        named = error.filename2 or named  # of a copy, the first name is what was read
    path = Path(str(named or folder))
    fix = "Free space on its disk." if is_disk_full(error) else "Check the permissions of it and of its folder."
    fix += " Then continue a run with `windfall resume`."
    return WindfallError(describe_write(error, path), where=str(path), fix=fix)


def describe_exit(code: int) -> str:
    """How a process ended.

    >>> describe_exit(1), describe_exit(-9), describe_exit(-99)
    ('ended with status 1', 'was killed (SIGKILL)', 'was killed (signal 99)')
    """
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed (signal {-code})"
