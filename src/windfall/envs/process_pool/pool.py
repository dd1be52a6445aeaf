"""An environment in child processes: its code never runs on our event loop, and what hangs is killed.

    task, feedback ──▶ pending ──▶ the child with the shortest queue ──▶ value or failure
                          ▲                     │
                          └── a child ended ────┘   calls that were not the cause are sent again

- A time limit counts from when a call begins to run, which the child's board says. Over it, an `async def` that waits
  is cancelled; a call that blocks is killed with its child, and the failure has the stack of what it was doing.
- A child runs one plain call at a time; `sizing` says when one more child is worth it.
- Nothing but a value, a failure or the environment's refusal to be built comes out of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import zlib
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any, Self

from windfall import envs
from windfall.envs.failures import EnvFailed, waited
from windfall.envs.process_pool import limits
from windfall.envs.process_pool.calls import Call, PoolChild, answer, exited
from windfall.envs.process_pool.child_process import ChildProcess
from windfall.envs.process_pool.sizing import Sizing
from windfall.errors import WindfallError
from windfall.types import Feedback, Task, Turn, prompt_key

BUILD_S = 300.0
"""How long an environment may take to be imported and built."""
QUIET_S = 5.0
"""A build that takes longer is announced."""
LOOK_S = 0.1
SILENT_S = 5.0
"""Added to the limit of a call before a child is given up that neither runs a call nor answers, or in which a call goes
on after it was cancelled."""
MOST_WAITING = 1024
"""Calls of an `async def` under way in one child."""
MOST_MOVES = 5
"""Children that may end under a call without any sign whose fault it was."""


class EnvPool:
    """Keeps to the Host seam. Used as `async with`; `ready` waits until the environment is built."""

    def __init__(self, section: Any, seed: int, *, build_s: float = BUILD_S) -> None:
        """`section` is one of the env sections of windfall.config."""
        plain = envs.plain(section)
        self.name = plain.get("factory", plain["name"])
        self._strict = plain["name"] != "custom"
        self._order, self._build_s = (0, "build", plain, seed, self._strict), build_s
        self._children: list[PoolChild] = []
        self._pending: deque[Call] = deque()
        self._numbers = 1
        self._pumping = False
        self._sizing = Sizing(cores=cores())
        self._broken: WindfallError | None = None
        self._built: asyncio.Future[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._killing: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        self._built = asyncio.get_running_loop().create_future()
        self._start()
        self._watching = asyncio.create_task(self._watch())
        self._watching.add_done_callback(self._watched)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._watching is not None
        self._watching.cancel()
        for call in [*self._pending, *(call for child in self._children for call in child.sent.values())]:
            call.future.cancel()
        self._pending.clear()
        children, self._children = self._children, []
        await asyncio.gather(*(child.process.kill() for child in children))
        await asyncio.gather(self._watching, *self._killing, return_exceptions=True)

    async def ready(self) -> None:
        assert self._built is not None, "entered with `async with` first"
        await asyncio.wait([self._built], timeout=QUIET_S)
        if not self._built.done():
            said = f"building environment {self.name}; waiting up to {self._build_s:g} s"
            print(said, file=sys.stderr, flush=True)
        await asyncio.shield(self._built)

    # the Host seam

    def task(self, index: int, timeout_s: float) -> asyncio.Future[Task]:
        return self._call("task", (index,), timeout_s, f"{self.name}.task({index})")

    async def feedback(self, index: int, task: Task, turns: Sequence[Turn], timeout_s: float) -> Feedback:
        args = (index, task.id, zlib.crc32(prompt_key(task.prompt)), [(t.text, t.observation) for t in turns])
        return await self._call("feedback", args, timeout_s, f"{self.name}.feedback of task '{task.id}'")

    def _call(self, what: str, args: tuple[Any, ...], limit_s: float, name: str) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        call = Call(number=self._numbers, what=what, args=args, limit_s=limit_s, name=name, future=future)
        self._numbers += 1
        future.add_done_callback(lambda future: self._cancelled(call) if future.cancelled() else None)
        if self._broken is not None:
            call.fail(self._broken)
            return future
        self._pending.append(call)
        self._pump_soon()
        return future

    def _cancelled(self, call: Call) -> None:
        for child in self._children:
            if call.number in child.sent:
                child.process.send([(call.number, "cancel")])  # a plain call goes on until its end, or its limit

    # sending

    def _pump_soon(self) -> None:
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        out: dict[PoolChild, list[tuple[Any, ...]]] = {}
        while self._pending:
            if self._pending[0].future.done():
                self._pending.popleft()  # it was cancelled
                continue
            ahead = self._sizing.ahead(self._pending[0].what)
            free = [c for c in self._children if c.ready and c.queued < ahead and len(c.waiting) < MOST_WAITING]
            if not free:
                break
            child, call = min(free, key=lambda c: (c.queued, len(c.waiting))), self._pending.popleft()
            if not child.sent:
                child.heard_s = time.monotonic()
            child.sent[call.number], call.late_s, call.stack = call, None, ""
            out.setdefault(child, []).append((call.number, call.what, *call.args, call.limit_s))
        for child, messages in out.items():
            child.process.send(messages)
        if self._pending and not any(c.ready for c in self._children) and not any(self._starting()):
            self._start()

    def _heard(self, child: PoolChild, line: bytes) -> None:
        if child not in self._children:
            return  # it was killed, and its calls have failed or were sent again
        try:
            self._take(child, *json.loads(line))
        except (ValueError, TypeError, LookupError, RecursionError):  # fault boundary: the bytes of a child
            self._nonsense(child, line)

    def _nonsense(self, child: PoolChild, line: bytes) -> None:
        """Environments can reach the link: one that forks answers a call twice."""
        why = "its process sent what is not an answer to a call; does it fork?"
        print(f"environment {self.name}: {why} It said {line[:200]!r}", file=sys.stderr, flush=True)
        for call in child.sent.values():
            call.fail(EnvFailed(f"environment {self.name}: {why} ({call.name} was under way)", why))
        if not child.ready:
            self._cannot(WindfallError(why, where=f"environment {self.name}", fix="Build it without a fork."))
        self._kill(child)

    def _take(self, child: PoolChild, number: int, what: str, *rest: Any) -> None:
        """Raises one of the errors of `_heard`, with nothing changed, where this is no answer to a call."""
        child.heard_s = time.monotonic()
        if what == "ready":
            self._ready(child, *rest)
        elif what == "refused":
            what, where, fix = rest
            self._kill(child)
            self._cannot(WindfallError(what, where=where or f"environment {self.name}", fix=fix))
        elif what == "waits":
            child.waiting.add(child.sent[number].number)
        elif what == "late":
            child.sent[number].late_s, child.sent[number].stack = child.heard_s, str(rest[0])
        elif what == "verdict":
            child.sent[number].verdict = Feedback(reward=rest[0])
        else:
            call, (took_s, slept_s, *said) = child.sent[number], rest
            value = answer(what, call.what, said)
            if not call.future.cancelled():  # it may not even have begun
                self._sizing.learn(call.what, float(took_s), float(slept_s))
            del child.sent[number]
            child.waiting.discard(number)
            if isinstance(value, EnvFailed):
                call.fail(value)
            else:
                call.succeed(value)
        if self._pending:
            self._pump_soon()

    # children

    def _starting(self) -> list[PoolChild]:
        return [c for c in self._children if not c.ready]

    def _start(self) -> None:
        child = PoolChild(time.monotonic())
        child.process = ChildProcess(
            strict=self._strict, heard=lambda line: self._heard(child, line),
            ended=lambda *end: self._ended(child, *end),
        )  # fmt: skip
        self._children.append(child)
        child.process.send([self._order])

    def _ready(self, child: PoolChild, name: str) -> None:
        child.ready, self._sizing.start_s = True, time.monotonic() - child.born_s
        self.name = name
        assert self._built is not None
        if not self._built.done():
            self._built.set_result(None)

    def _cannot(self, error: WindfallError) -> None:
        """A child could not be built."""
        if any(c.ready for c in self._children):
            self._sizing.most = len(self._children)  # the others go on, and no more are tried
            return
        self._broken = error
        assert self._built is not None
        if not self._built.done():
            self._built.set_exception(error)
        while self._pending:
            self._pending.popleft().fail(error)

    def _kill(self, child: PoolChild, blamed: Sequence[Call] = ()) -> None:
        """End a child; those of its calls that are to blame waited too long, the others are sent again."""
        if child not in self._children:
            return
        self._children.remove(child)
        self._again([call for call in child.sent.values() if call not in blamed])

        async def kill() -> None:
            stack = ""
            try:
                stack = await child.process.last_words() if blamed else ""
            finally:
                for call in blamed:
                    call.fail(waited(call.name, call.limit_s, call.stack or stack))
                await child.process.kill()

        self._aside(kill())
        self._pump_soon()

    def _aside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._killing.add(task)
        task.add_done_callback(self._killing.discard)

    def _ended(self, child: PoolChild, code: int, number: int, stack: str) -> None:
        """It has ended by itself, or something has killed it."""
        if child not in self._children:
            return
        self._children.remove(child)
        how = exited(code)
        if not child.ready:
            what = f"the process that builds it {how} after {time.monotonic() - child.born_s:.1f} s"
            self._cannot(WindfallError(what, where=f"environment {self.name}", fix=stack))
        call = child.sent.pop(number, None)
        if call is not None and call.verdict is not None and code == -limits.OVER:
            call.succeed(call.verdict)
        elif call is not None:
            call.fail(EnvFailed(f"the process that ran {call.name} {how}", f"the process {how}", stack))
        for other in child.sent.values():
            other.moves += 1
            if other.moves > MOST_MOVES:
                what = f"{other.moves} processes ended under {other.name}; the last {how}"
                other.fail(EnvFailed(what, how, stack, final=True))
        self._again(list(child.sent.values()))
        self._pump_soon()

    def _again(self, calls: list[Call]) -> None:
        self._pending.extendleft(reversed([call for call in calls if not call.future.done()]))

    # limits and size

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            for child in list(self._children):
                if child.ready:
                    self._look(child, now)
                elif now - child.born_s > self._build_s:
                    self._children.remove(child)
                    self._aside(self._too_slow(child))
            self._grow(now)

    def _watched(self, task: asyncio.Task[None]) -> None:
        """A fault of our own: whoever waits must not wait for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            for call in [*self._pending, *(call for child in self._children for call in child.sent.values())]:
                call.fail(RuntimeError(f"the pool of environments failed: {error!r}"))
            raise error

    def _look(self, child: PoolChild, now: float) -> None:
        board = child.process.board()
        seen, child.board = board == child.board, board
        call = child.sent.get(board[0])
        if call is not None:
            if seen and now - board[1] > call.limit_s:  # seen twice: it is not half written
                self._kill(child, [call])
        elif child.sent and now - child.heard_s > max(c.limit_s for c in child.sent.values()) + SILENT_S:
            self._kill(child, list(child.sent.values()))
        if late := [c for c in child.sent.values() if c.late_s is not None and now - c.late_s > SILENT_S]:
            self._kill(child, late)

    async def _too_slow(self, child: PoolChild) -> None:
        stack = await child.process.last_words()
        what = f"waited {self._build_s:g} s for it to be imported and built"
        self._cannot(WindfallError(what, where=f"environment {self.name}", fix=f"It was here:\n{stack}"))
        await child.process.kill()

    def _grow(self, now: float) -> None:
        if self._pending and not self._starting():
            running_s = max((now - since for number, since in (c.board for c in self._children) if number), default=0.0)
            what, pending = self._pending[0].what, len(self._pending)
            for _ in range(self._sizing.more(what, pending, len(self._children), running_s)):
                self._start()


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
