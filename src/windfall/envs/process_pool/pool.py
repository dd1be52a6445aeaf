"""Runs an environment in child processes: its code never runs on our event loop, and calls that hang are killed.

    task, feedback ──▶ pending ──▶ the child with the shortest queue ──▶ value or failure
                          ▲                     │
                          └── a child ended ────┘   calls that were not the cause are sent again

- A time limit counts from when a call begins to run, which the child records (running_call.py). Over the limit, an
  `async def` that waits is canceled. A call that blocks is killed with its child, and the failure contains its stack.
- A child runs one plain call at a time. sizing.py decides when another child is useful.
- If the environment has sessions, a turn goes to the child that has its session. If that child has ended, it goes to
  any child, which replays the session (sessions/stateful.py). At most `max_sessions` are open in all children
  together; calls that would open another one wait (sessions/open_sessions.py).
- If a child ends and it is known which call was running, that call fails. Otherwise all calls that had begun there are
  suspects: they are sent again, each time with fewer other calls in the same child, and at last alone. So a call fails
  for what it did, and not for what another one did.
- A child that is killed while it builds the environment is started again, a few times.
- What the environment prints goes to a log of limited size (processes/output_log.py).
- A call ends with a value, a failure, or the error that says why the environment cannot be built.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Self

from windfall import backoff, envs
from windfall.envs.base import HostLoad
from windfall.envs.failures import EnvFailed, timeout_failure
from windfall.envs.process_pool import limits
from windfall.envs.process_pool.calls import MAX_WAITING, EnvCall, PoolChild, QueueingHost, parse_answer
from windfall.envs.process_pool.child_process import ChildProcess
from windfall.envs.process_pool.running_call import LINK_LOST
from windfall.envs.process_pool.sizing import MAX_CHILDREN, Sizing
from windfall.envs.sessions.open_sessions import Key, OpenSessions
from windfall.errors import WindfallError, describe_exit
from windfall.processes.output_log import LogGrowth
from windfall.types import Feedback

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
MAX_MOVES = 5
"""Number of children that may end during a call for an unknown reason before the call fails. By then it is alone."""
MAX_KILLED_BUILDS = 3
"""Number of children in a row that may be killed while they build the environment."""
KILLED = (-signal.SIGKILL, -signal.SIGTERM)
"""How a process ends that was not at fault. The system also kills a process that takes too much memory."""
RESTART_S = 0.5
"""Seconds until a child is started again that was killed while it built the environment; then twice that, and so on."""


class EnvPool(QueueingHost[EnvCall]):
    """An EnvHost. Used as `async with`; `ready` waits until the environment is built."""

    def __init__(
        self,
        section: Any,
        seed: int,
        *,
        build_s: float = BUILD_S,
        evaluation: dict[str, Any] | None = None,
        processes: int = 0,
        max_calls: int = sys.maxsize,
        output: Path | None = None,
        log: Callable[..., None] = lambda name, **fields: None,
    ) -> None:
        """`section` is an env section of windfall.recipe. `evaluation`: a separate data set for the evaluation.
        `processes`: upper limit for child processes; 0 chooses it. `max_calls`: upper limit for calls that have begun.
        `output`: file for what the environment prints; None shows a little of it on standard error. `log` gets the name
        and the fields of an event."""
        options: dict[str, Any] = envs.section_dict(section) | ({"evaluation": evaluation} if evaluation else {})
        super().__init__(options.get("factory", options["name"]), EnvCall)
        self._strict = not envs.runs_user_code(options)
        self._output = output
        self._log = log
        self._growth = LogGrowth(output)
        self._killed_builds = 0
        self.max_calls = max_calls
        self._build_message = (0, "build", options, seed, self._strict)
        self._build_s = build_s
        self._children: list[PoolChild] = []
        self.sessions: OpenSessions[PoolChild] = OpenSessions(getattr(section, "max_sessions", sys.maxsize))
        self._sending_soon = False
        self._sizing = Sizing(cores=available_cores(), limit=processes or MAX_CHILDREN)
        self._broken: WindfallError | None = None
        self._built: asyncio.Future[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._killing: set[asyncio.Task[Any]] = set()
        self._restarting: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._built = asyncio.get_running_loop().create_future()
        self._start()
        self._watching = asyncio.create_task(self._watch())
        self._watching.add_done_callback(self._task_ended)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._watching is not None
        self._watching.cancel()
        if self._restarting is not None:
            self._restarting.cancel()
        self._cancel_all()
        children, self._children = self._children, []
        if self.stateful:
            await asyncio.gather(*(child.process.end(CLOSE_S) for child in children if child.ready))
        await asyncio.gather(*(child.process.kill() for child in children))
        await asyncio.gather(self._watching, *self._killing, return_exceptions=True)

    def load(self) -> HostLoad:
        begun = sum(1 for c in self._children if c.sent and c.queued)
        queued = len(self._pending) + len(self._opening) + sum(c.queued for c in self._children) - begun
        return HostLoad(processes=len(self._children), limit=self._sizing.limit, queued=queued)

    async def ready(self) -> None:
        assert self._built is not None, "enter the pool with `async with` first"
        await asyncio.wait([self._built], timeout=QUIET_S)
        if not self._built.done():
            line = f"building environment {self.name}; waiting up to {self._build_s:g} s"
            print(line, file=sys.stderr, flush=True)
        await asyncio.shield(self._built)

    def end(self, key: Key) -> None:
        if self.stateful and (child := self.sessions.take(key)) is not None:
            self._close_session(key, child)

    def _close_session(self, key: Key, child: PoolChild) -> None:
        child.process.send([(0, "end session", key[0], key[1:])])
        self._send_soon()

    def _enqueue(self, call: EnvCall) -> None:
        if self._broken is not None:
            call.fail(self._broken)
            return
        self._pending.append(call)
        self._send_soon()

    def _cancel(self, call: EnvCall) -> None:
        for child in self._children:
            if call.number in child.sent:
                child.process.send([(call.number, "cancel")])  # a plain call continues until its end or its limit

    def _sent_calls(self) -> list[EnvCall]:
        return [call for child in self._children for call in child.sent.values()]

    # Sending calls and handling answers.

    def _send_soon(self) -> None:
        if not self._sending_soon:
            self._sending_soon = True
            asyncio.get_running_loop().call_soon(self._send_pending)

    def _send_pending(self) -> None:
        self._sending_soon = False
        out: dict[PoolChild, list[tuple[Any, ...]]] = {}
        while (queue := self._next_queue()) and sum(len(c.sent) for c in self._children) < self.max_calls:
            call = queue[0]
            if call.future.done():
                queue.popleft()  # it was canceled
                continue
            child = self._home(call)
            if child is None and self._steps(call) and not self.sessions.has_room(self._busy()):
                self._opening.append(queue.popleft())
                continue
            child = child or self._free_child(call)
            if child is None:
                break
            queue.popleft()
            if not child.sent:
                child.last_message_s = time.monotonic()
            child.room = min(child.room, call.room)
            child.sent[call.number], call.late_s, call.stack = call, None, ""
            child.stepping += self._steps(call)
            call.begin()
            out.setdefault(child, []).append((call.number, call.what, *call.args, call.limit_s))
        for child, messages in out.items():
            child.process.send(messages)
        waiting = self._pending or self._opening
        if waiting and not self._children and not self._restarting:
            self._start()

    def _next_queue(self) -> deque[EnvCall]:
        """The calls that come next: those that waited for room for a session, once there is some."""
        return self._opening if self._opening and self.sessions.has_room(self._busy()) else self._pending

    def _free_child(self, call: EnvCall) -> PoolChild | None:
        """The child with the shortest queue among those that can take this call."""
        limit, room = self._sizing.queue_limit(call.what), call.room
        free = [
            c for c in self._children
            if c.ready and c.queued < limit and len(c.waiting) < MAX_WAITING and len(c.sent) < min(c.room, room)
        ]  # fmt: skip
        return min(free, key=lambda c: (c.queued, len(c.waiting)), default=None)

    def _busy(self) -> int:
        """Number of sessions that make a step now."""
        return sum(child.stepping for child in self._children)

    def _home(self, call: EnvCall) -> PoolChild | None:
        """The child that has the session of this call, as far as it is known and still there."""
        if not self._steps(call) or len(call.args[3]) < 2:
            return None
        return self.sessions.take(call.session)

    def _keep_session(self, child: PoolChild, call: EnvCall, value: object) -> None:
        """The session of an answered call waits in this child for its next turn."""
        if self._steps(call) and (key := call.session_after(value)) is not None:
            if call.future.cancelled():
                self._close_session(key, child)
            else:
                self.sessions.keep(key, child)

    def _handle_line(self, child: PoolChild, line: bytes) -> None:
        if child not in self._children:
            return  # it was killed, and its calls have failed or were sent again
        try:
            self._handle_message(child, *json.loads(line))
        except (ValueError, TypeError, LookupError, RecursionError):  # fault boundary: the bytes of a child
            self._handle_invalid_line(child, line)

    def _handle_invalid_line(self, child: PoolChild, line: bytes) -> None:
        """An environment can write to the link. The call that is running must have done it, unless others wait."""
        how = "wrote something to the connection of its process that is not an answer to a call"
        print(f"environment {self.name} {how}: {line[:200]!r}", file=sys.stderr, flush=True)
        suspects = child.begun
        if not child.ready:
            fix = "Do not write to open file descriptors that the environment has not opened."
            self._build_failed(WindfallError(f"it {how}", where=f"environment {self.name}", fix=fix))
        elif len(suspects) == 1:
            suspects[0].fail(EnvFailed(f"{suspects[0].name} {how}", how))
        else:
            self._suspect(suspects, "wrote something that is not an answer")
        self._kill(child)

    def _suspect(self, calls: Sequence[EnvCall], how: str, stack: str = "") -> None:
        """One of these calls may have ended its process. A call fails if it was there each time, and at last alone."""
        for call in calls:
            call.moves += 1
            if call.moves > MAX_MOVES:
                what = f"{call.moves} processes ended during {call.name}; the last {how}"
                call.fail(EnvFailed(what, how, stack, final=True))

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
            child.sent[number].late_s = child.last_message_s
            child.sent[number].stack = str(rest[0])
        elif what == "verdict":
            child.sent[number].verdict = Feedback(reward=rest[0], scores=tuple((n, s) for n, s in rest[1]))
        else:
            call, (took_s, slept_s, *fields) = child.sent[number], rest
            value = parse_answer(what, call.what, fields)
            if not call.future.cancelled():  # a canceled call may not even have begun
                self._sizing.learn(call.what, float(took_s), float(slept_s))
            child.remove(call)
            child.stepping -= self._steps(call)
            if isinstance(value, EnvFailed):
                call.fail(value)
            else:
                self._keep_session(child, call, value)
                call.succeed(value)
        if self._pending or self._opening:
            self._send_soon()

    # Starting and ending children.

    def _starting(self) -> list[PoolChild]:
        return [c for c in self._children if not c.ready]

    def _start(self) -> None:
        child = PoolChild(time.monotonic())
        child.process = ChildProcess(
            strict=self._strict,
            on_line=lambda line: self._handle_line(child, line),
            on_end=lambda *end: self._child_ended(child, *end),
            output=self._output,
        )
        self._children.append(child)
        child.process.send([self._build_message])

    def _child_ready(self, child: PoolChild, name: str, stateful: bool, needs_tokens: bool, replayable: bool) -> None:
        self.stateful = stateful is True
        self.needs_tokens = needs_tokens is True
        self.sessions.replayable = replayable is True
        child.ready = True
        self._sizing.start_s = time.monotonic() - child.born_s
        self._killed_builds = 0
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
        for call in [*self._pending, *self._opening]:
            call.fail(error)
        self._pending.clear()
        self._opening.clear()

    def _kill(self, child: PoolChild, overdue: Sequence[EnvCall] = ()) -> None:
        """Kill a child. The overdue calls fail, because they took too long; its other calls are sent again."""
        if child not in self._children:
            return
        self._remove(child)
        self._send_again([call for call in child.sent.values() if call not in overdue])

        async def kill() -> None:
            stack = ""
            try:
                stack = await child.process.dump_stack() if overdue else ""
            finally:
                for call in overdue:
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
        self._remove(child)
        how = "closed the connection to windfall" if code == LINK_LOST else describe_exit(code)
        if not child.ready:
            self._build_ended(child, code, how, stack)
        call = child.sent.pop(number, None)
        if call is not None and call.verdict is not None and code == -limits.OVER:
            call.succeed(call.verdict)
        elif call is not None and code == LINK_LOST:
            what = f"{call.name} closed or replaced files of its process that it has not opened"
            call.fail(EnvFailed(what, f"the process {how}", stack))
        elif call is not None:
            call.fail(EnvFailed(f"the process that ran {call.name} {how}", f"the process {how}", stack))
        else:
            self._suspect(child.begun, how, stack)
        self._send_again(list(child.sent.values()))
        self._send_soon()

    def _build_ended(self, child: PoolChild, code: int, how: str, stack: str) -> None:
        """A child has ended before it was ready. If it was killed, another one is started after a while."""
        self._killed_builds += 1
        if code in KILLED and self._killed_builds <= MAX_KILLED_BUILDS:
            wait_s = backoff.delay_s(self._killed_builds - 1, first_s=RESTART_S)
            line = f"environment {self.name}: the process that builds it {how}; restarting it in {wait_s:g} s"
            print(line, file=sys.stderr, flush=True)
            if not self._children and self._restarting is None:
                self._restarting = asyncio.get_running_loop().call_later(wait_s, self._restart)
            return
        times = f" ({self._killed_builds} times in a row)" if self._killed_builds > 1 else ""
        what = f"the process that builds it {how} after {time.monotonic() - child.born_s:.1f} s{times}"
        self._build_failed(WindfallError(what, where=f"environment {self.name}", fix=stack))

    def _restart(self) -> None:
        self._restarting = None
        if not self._children:
            self._start()

    def _remove(self, child: PoolChild) -> None:
        self._children.remove(child)
        self.sessions.drop(child)

    def _send_again(self, calls: list[EnvCall]) -> None:
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
            self._close_sessions()
            self._grow(now)
            if self._growth.begins():
                self._log("env_output", env=self.name, log=str(self._output))

    def _close_sessions(self) -> None:
        """Close sessions whose next turn does not come, and one that can be replayed if a call waits for its room."""
        while found := self.sessions.expire() or (self.sessions.make_room(self._busy()) if self._opening else None):
            self._close_session(*found)

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
        if (queue := self._next_queue()) and not self._starting():
            running_s = max(
                (now - since for number, since in (c.running_call for c in self._children) if number), default=0.0
            )
            what, pending = queue[0].what, len(queue)
            for _ in range(self._sizing.children_to_start(what, pending, len(self._children), running_s)):
                self._start()


def available_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
