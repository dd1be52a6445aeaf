"""An exception that no one awaits ends the process: asyncio only logs what a callback or a lost task raises.

    asyncio.run(guard(main()))      every process of a run begins like this

- The first unexpected exception of a callback (`call_soon`, `call_later`), of a task that nobody awaits, or reported
  with `call_exception_handler`, cancels `main` and is raised in its place. Its traceback is logged at once.
- If `main` was failing already and such an exception only disturbs its cleanup, the error of `main` itself is raised.
- Trouble with one socket (a peer, too many open files) is logged only: whoever uses the socket hears of it anyway.

The virtual loop of the simulator has the same rule (sim/core/loop.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
SOCKET = ("socket", "transport", "protocol", "server")
"""Keys by which asyncio says that an error is of one connection."""


async def guard(main: Coroutine[Any, Any, T]) -> T:
    """Run `main`; raise the first exception that would otherwise only be logged."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(main)
    errors: list[BaseException] = []

    def handle(loop: asyncio.AbstractEventLoop, said: dict[str, Any]) -> None:
        loop.default_exception_handler(said)
        error = said.get("exception")
        if error is None or (isinstance(error, OSError) and any(key in said for key in SOCKET)):
            return
        errors.append(error)
        task.cancel()

    before = loop.get_exception_handler()
    loop.set_exception_handler(handle)
    try:
        result = await task
    except BaseException as e:  # it goes on up, unless it only follows from what `main` was cancelled for
        if not errors:
            raise
        raise (_before_cancelling(e) or errors[0]) from None
    finally:
        loop.set_exception_handler(before)
    if errors:
        raise errors[0]
    return result


def _before_cancelling(error: BaseException) -> BaseException | None:
    """What a cancelled coroutine had failed with before it was cancelled; None: it was all right until then."""
    chain = [error]
    while (cause := chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    last = max((i for i, e in enumerate(chain) if isinstance(e, asyncio.CancelledError)), default=-1)
    return chain[last + 1] if last + 1 < len(chain) else None


def report(task: asyncio.Task[Any]) -> None:
    """As a done callback: what the task raised is reported at once, not when it is collected."""
    if not task.cancelled() and (error := task.exception()) is not None:
        said = {"message": f"task {task.get_name()} failed", "exception": error, "task": task}
        task.get_loop().call_exception_handler(said)


def last_line(error: BaseException, most: int = 300) -> str:
    """What a traceback ends with.

    >>> last_line(KeyError("x")), last_line(ValueError("two\\nlines"))
    ("KeyError: 'x'", 'ValueError: two')
    """
    said = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {said}"[:most] if said else type(error).__name__
