"""Runs an environment in child processes: its code never runs on our event loop, and calls that hang are killed.

    task, feedback ──▶ pending ──▶ the child with the shortest queue ──▶ value or failure
                          ▲                     │
                          └── a child ended ────┘   calls that were not the cause are sent again

- A time limit counts from when a call begins to run, which the child records (running_call.py). Over the limit, an
  `async def` that waits is canceled. A call that blocks is killed with its child, and the failure contains its stack.
- A child runs one plain call at a time. sizing.py decides when another child is useful.
- If the environment has sessions, a turn goes to the child that has its session. If that child has ended, it goes to
  any child, which replays the session (sessions/stateful.py).
- A call ends with a value, a failure, or the error that says why the environment cannot be built.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Coroutine, Sequence
from typing import Any, Self

from windfall import envs
from windfall.envs.base import HostLoad
from windfall.envs.failures import EnvFailed, timeout_failure
from windfall.envs.process_pool import limits
from windfall.envs.process_pool.calls import Call, PoolChild, parse_answer
from windfall.envs.process_pool.child_process import ChildProcess
from windfall.envs.process_pool.sizing import MAX_CHILDREN, Sizing
from windfall.errors import WindfallError, describe_exit
from windfall.types import Feedback, Task, Turn, prompt_key

BUILD_S = 300.0
"""Time limit for importing and building an environment (seconds)."""
QUIET_S = 5.0
"""A message is printed if the build takes longer than this (seconds)."""
CHECK_S = 0.1
"""Seconds between checks of the children."""
SILENT_S = 5.0
"""A child is killed this many seconds after the limit of a call if it neither runs a call nor answers, or if the call
continues after it was canceled."""
CLOSE_S = 5.0
"""Seconds that the sessions of an environment may take to close when the run ends."""
MAX_WAITING = 1024
"""Maximum number of waiting `async def` calls in one child."""
MAX_HOMES = 1 << 16
"""Number of sessions whose child is remembered. A turn of an older session goes to any child."""
MAX_MOVES = 5
"""Number of children that may end during a call for an unknown reason before the call fails."""


class EnvPool:
    """An EnvHost. Used as `async with`; `ready` waits until the environment is built."""

    def __init__(
        self, section: Any, seed: int, *, build_s: float = BUILD_S, evaluation: dict[str, Any] | None = None,
        processes: int = 0,
    ) -> None:  # fmt: skip
        """`section` is an env section of windfall.config. For `evaluation` and `processes` see hosting.py."""
        options: dict[str, Any] = envs.section_dict(section) | ({"evaluation": evaluation} if evaluation else {})
        self.name = options.get("factory", options["name"])
        self._strict = not envs.runs_user_code(options)
        self.needs_tokens = False
        """Turns must come with their token ids."""
        self._build_message, self._build_s = (0, "build", options, seed, self._strict), build_s
        self._children: list[PoolChild] = []
        self._pending: deque[Call] = deque()
        self._next_number = 1
        self._stateful = False
        self._homes: OrderedDict[tuple[Any, ...], list[PoolChild]] = OrderedDict()
        """By task and turns so far: the children that have a session with them."""
        self._sending_soon = False
        self._sizing = Sizing(cores=available_cores(), limit=processes or MAX_CHILDREN)
        self._broken: WindfallError | None = None
        self._built: asyncio.Future[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._killing: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        self._built = asyncio.get_running_loop().create_future()
        self._start()
        self._watching = asyncio.create_task(self._watch())
        self._watching.add_done_callback(self._watch_ended)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._watching is not None
        self._watching.cancel()
        for call in [*self._pending, *(call for child in self._children for call in child.sent.values())]:
            call.future.cancel()
        self._pending.clear()
        children, self._children = self._children, []
        if self._stateful:
            await asyncio.gather(*(child.process.end(CLOSE_S) for child in children if child.ready))
        await asyncio.gather(*(child.process.kill() for child in children))
        await asyncio.gather(self._watching, *self._killing, return_exceptions=True)

    def load(self) -> HostLoad:
        begun = sum(1 for c in self._children if c.sent and c.queued)
        queued = len(self._pending) + sum(c.queued for c in self._children) - begun
        return HostLoad(processes=len(self._children), limit=self._sizing.limit, queued=queued)

    async def ready(self) -> None:
        assert self._built is not None, "enter the pool with `async with` first"
        await asyncio.wait([self._built], timeout=QUIET_S)
        if not self._built.done():
            line = f"building environment {self.name}; waiting up to {self._build_s:g} s"
            print(line, file=sys.stderr, flush=True)
        await asyncio.shield(self._built)

    def task(self, index: int, timeout_s: float) -> asyncio.Future[Task]:
        return self._call("task", (index,), timeout_s, f"{self.name}.task({index})")

    async def feedback(self, index: int, task: Task, turns: Sequence[Turn], timeout_s: float) -> Feedback:
        args = (index, task.id, zlib.crc32(prompt_key(task.prompt)), [self._plain(t) for t in turns])
        session = (index, *((t.text, t.observation) for t in turns[:-1])) if self._stateful and len(turns) > 1 else ()
        return await self._call("feedback", args, timeout_s, f"{self.name}.feedback of task '{task.id}'", session)

    def end_session(self, index: int, task: Task, turns: Sequence[Turn]) -> None:
        history = [(t.text, t.observation) for t in turns]
        if self._stateful and (child := self._pop_home((index, *history))) is not None:
            child.process.send([(0, "end session", task.id, history)])

    def _plain(self, turn: Turn) -> tuple[Any, ...]:
        return (turn.text, turn.observation, turn.tokens) if self.needs_tokens else (turn.text, turn.observation)

    def _call(
        self, what: str, args: tuple[Any, ...], limit_s: float, name: str, session: tuple[Any, ...] = ()
    ) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        call = Call(
            number=self._next_number, what=what, args=args, limit_s=limit_s, name=name, future=future, session=session
        )
        self._next_number += 1
        future.add_done_callback(lambda future: self._on_cancel(call) if future.cancelled() else None)
        if self._broken is not None:
            call.fail(self._broken)
            return future
        self._pending.append(call)
        self._send_soon()
        return future

    def _on_cancel(self, call: Call) -> None:
        for child in self._children:
            if call.number in child.sent:
                child.process.send([(call.number, "cancel")])  # a plain call continues until its end or its limit

    # Sending calls and handling answers.

    def _send_soon(self) -> None:
        if not self._sending_soon:
            self._sending_soon = True
            asyncio.get_running_loop().call_soon(self._send_pending)

    def _send_pending(self) -> None:
        self._sending_soon = False
        out: dict[PoolChild, list[tuple[Any, ...]]] = {}
        while self._pending:
            if self._pending[0].future.done():
                self._pending.popleft()  # it was canceled
                continue
            child = self._home(self._pending[0]) or self._free_child(self._pending[0].what)
            if child is None:
                break
            call = self._pending.popleft()
            if not child.sent:
                child.last_message_s = time.monotonic()
            child.sent[call.number], call.late_s, call.stack = call, None, ""
            out.setdefault(child, []).append((call.number, call.what, *call.args, call.limit_s))
        for child, messages in out.items():
            child.process.send(messages)
        if self._pending and not any(c.ready for c in self._children) and not any(self._starting()):
            self._start()

    def _free_child(self, what: str) -> PoolChild | None:
        """The child with the shortest queue among those that can take this call."""
        limit = self._sizing.queue_limit(what)
        free = [c for c in self._children if c.ready and c.queued < limit and len(c.waiting) < MAX_WAITING]
        return min(free, key=lambda c: (c.queued, len(c.waiting)), default=None)

    def _home(self, call: Call) -> PoolChild | None:
        """The child that has the session of this call, as far as it is known and still there."""
        return self._pop_home(call.session)

    def _pop_home(self, session: tuple[Any, ...]) -> PoolChild | None:
        homes = self._homes.get(session, [])
        child = homes.pop() if homes else None
        if not homes:
            self._homes.pop(session, None)
        return child if child in self._children else None

    def _remember_home(self, child: PoolChild, call: Call, value: object) -> None:
        """The session of an answered call waits in this child for its next turn."""
        if self._stateful and isinstance(value, Feedback) and value.observation is not None:
            before, last = call.args[3][:-1], call.args[3][-1][0]
            key = (call.args[0], *before, (last, value.observation))
            self._homes.setdefault(key, []).append(child)
            if len(self._homes) > MAX_HOMES:
                self._homes.popitem(last=False)

    def _handle_line(self, child: PoolChild, line: bytes) -> None:
        if child not in self._children:
            return  # it was killed, and its calls have failed or were sent again
        try:
            self._handle_message(child, *json.loads(line))
        except (ValueError, TypeError, LookupError, RecursionError):  # fault boundary: the bytes of a child
            self._handle_invalid_line(child, line)

    def _handle_invalid_line(self, child: PoolChild, line: bytes) -> None:
        """An environment can write to the link: if it forks, a call may be answered twice."""
        why = "its process sent a message that is not an answer to a call; does it fork?"
        print(f"environment {self.name}: {why} It sent {line[:200]!r}", file=sys.stderr, flush=True)
        for call in child.sent.values():
            call.fail(EnvFailed(f"environment {self.name}: {why} ({call.name} was in progress)", why))
        if not child.ready:
            self._build_failed(WindfallError(why, where=f"environment {self.name}", fix="Build it without a fork."))
        self._kill(child)

    def _handle_message(self, child: PoolChild, number: int, what: str, *rest: Any) -> None:
        """If this is not a valid message, raises an error that `_handle_line` catches, and changes nothing."""
        child.last_message_s = time.monotonic()
        if what == "ready":
            self._child_ready(child, *rest)
        elif what == "refused":
            what, where, fix = rest
            self._kill(child)
            self._build_failed(WindfallError(what, where=where or f"environment {self.name}", fix=fix))
        elif what == "waits":
            child.waiting.add(child.sent[number].number)
        elif what == "late":
            child.sent[number].late_s, child.sent[number].stack = child.last_message_s, str(rest[0])
        elif what == "verdict":
            child.sent[number].verdict = Feedback(reward=rest[0], scores=tuple((n, s) for n, s in rest[1]))
        else:
            call, (took_s, slept_s, *fields) = child.sent[number], rest
            value = parse_answer(what, call.what, fields)
            if not call.future.cancelled():  # a canceled call may not even have begun
                self._sizing.learn(call.what, float(took_s), float(slept_s))
            del child.sent[number]
            child.waiting.discard(number)
            if isinstance(value, EnvFailed):
                call.fail(value)
            else:
                self._remember_home(child, call, value)
                call.succeed(value)
        if self._pending:
            self._send_soon()

    # Starting and ending children.

    def _starting(self) -> list[PoolChild]:
        return [c for c in self._children if not c.ready]

    def _start(self) -> None:
        child = PoolChild(time.monotonic())
        child.process = ChildProcess(
            strict=self._strict, on_line=lambda line: self._handle_line(child, line),
            on_end=lambda *end: self._child_ended(child, *end),
        )  # fmt: skip
        self._children.append(child)
        child.process.send([self._build_message])

    def _child_ready(self, child: PoolChild, name: str, stateful: bool, needs_tokens: bool) -> None:
        self._stateful, self.needs_tokens = stateful is True, needs_tokens is True
        child.ready, self._sizing.start_s = True, time.monotonic() - child.born_s
        self.name = name
        assert self._built is not None
        if not self._built.done():
            self._built.set_result(None)

    def _build_failed(self, error: WindfallError) -> None:
        """A child could not build the environment."""
        if any(c.ready for c in self._children):
            self._sizing.limit = len(self._children)  # the others continue, and no more are started
            return
        self._broken = error
        assert self._built is not None
        if not self._built.done():
            self._built.set_exception(error)
        while self._pending:
            self._pending.popleft().fail(error)

    def _kill(self, child: PoolChild, blamed: Sequence[Call] = ()) -> None:
        """Kill a child. The blamed calls fail, because they took too long; its other calls are sent again."""
        if child not in self._children:
            return
        self._children.remove(child)
        self._send_again([call for call in child.sent.values() if call not in blamed])

        async def kill() -> None:
            stack = ""
            try:
                stack = await child.process.dump_stack() if blamed else ""
            finally:
                for call in blamed:
                    call.fail(timeout_failure(call.name, call.limit_s, call.stack or stack))
                await child.process.kill()

        self._run_in_background(kill())
        self._send_soon()

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._killing.add(task)
        task.add_done_callback(self._killing.discard)

    def _child_ended(self, child: PoolChild, code: int, number: int, stack: str) -> None:
        """A child has ended by itself, or something has killed it."""
        if child not in self._children:
            return
        self._children.remove(child)
        how = describe_exit(code)
        if not child.ready:
            what = f"the process that builds it {how} after {time.monotonic() - child.born_s:.1f} s"
            self._build_failed(WindfallError(what, where=f"environment {self.name}", fix=stack))
        call = child.sent.pop(number, None)
        if call is not None and call.verdict is not None and code == -limits.OVER:
            call.succeed(call.verdict)
        elif call is not None:
            call.fail(EnvFailed(f"the process that ran {call.name} {how}", f"the process {how}", stack))
        for other in child.sent.values():
            other.moves += 1
            if other.moves > MAX_MOVES:
                what = f"{other.moves} processes ended during {other.name}; the last {how}"
                other.fail(EnvFailed(what, how, stack, final=True))
        self._send_again(list(child.sent.values()))
        self._send_soon()

    def _send_again(self, calls: list[Call]) -> None:
        self._pending.extendleft(reversed([call for call in calls if not call.future.done()]))

    # Time limits and the number of children.

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            now = time.monotonic()
            for child in list(self._children):
                if child.ready:
                    self._check_limits(child, now)
                elif now - child.born_s > self._build_s:
                    self._children.remove(child)
                    self._run_in_background(self._give_up_build(child))
            self._grow(now)

    def _watch_ended(self, task: asyncio.Task[None]) -> None:
        """If the watch fails because of a bug in windfall, all calls must fail: they must not wait forever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            for call in [*self._pending, *(call for child in self._children for call in child.sent.values())]:
                call.fail(RuntimeError(f"the pool of environments failed: {error!r}"))
            raise error

    def _check_limits(self, child: PoolChild, now: float) -> None:
        running = child.process.running_call()
        unchanged, child.running_call = running == child.running_call, running
        call = child.sent.get(running[0])
        if call is not None:
            if unchanged and now - running[1] > call.limit_s:  # read twice, so it is not half written
                self._kill(child, [call])
        elif child.sent and now - child.last_message_s > max(c.limit_s for c in child.sent.values()) + SILENT_S:
            self._kill(child, list(child.sent.values()))
        if late := [c for c in child.sent.values() if c.late_s is not None and now - c.late_s > SILENT_S]:
            self._kill(child, late)

    async def _give_up_build(self, child: PoolChild) -> None:
        stack = await child.process.dump_stack()
        what = f"waited {self._build_s:g} s for it to be imported and built"
        self._build_failed(WindfallError(what, where=f"environment {self.name}", fix=f"Its stack:\n{stack}"))
        await child.process.kill()

    def _grow(self, now: float) -> None:
        if self._pending and not self._starting():
            running_s = max(
                (now - since for number, since in (c.running_call for c in self._children) if number), default=0.0
            )
            what, pending = self._pending[0].what, len(self._pending)
            for _ in range(self._sizing.children_to_start(what, pending, len(self._children), running_s)):
                self._start()


def available_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
