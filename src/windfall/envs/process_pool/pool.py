"""Runs an environment in child processes: its code never runs on our event loop, and calls that hang are killed.

- A time limit counts from when a call begins to run, which the child records (protocol.py). Over the limit, an
  `async def` that waits is canceled. A call that blocks is killed with its child, and the failure contains its stack.
- A child runs one plain call at a time. Another child is started if the waiting calls take longer than its start.
- If a child ends and it is known which call was running, that call fails. Otherwise all calls that had begun there are
  suspects: they are sent again, each time with fewer other calls in the same child, and at last alone. So a call fails
  for what it did, and not for what another one did.
- A child that is killed while it builds the environment is started again, a few times.
- What the environment prints goes to a log of limited size (processes/output_log.py).
- A call ends with a value, a failure, or the error that says why the environment cannot be built.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Self

from windfall import envs
from windfall.envs.base import HostLoad
from windfall.envs.calls import CallHost, EnvCall, parse_answer
from windfall.envs.failures import EnvFailed, timeout_failure
from windfall.envs.process_pool import limits, protocol
from windfall.envs.process_pool.child_process import ChildProcess
from windfall.errors import WindfallError, describe_exit
from windfall.types import Feedback

BUILD_S = 300.0
QUIET_S = 5.0
"""A message is printed if the build takes longer than this (seconds)."""
CHECK_S = 0.1
SILENT_S = 5.0
"""A child is killed this many seconds after the limit of a call if it neither runs a call nor answers, or if the call
continues after it was canceled."""
CLOSE_S = 5.0
"""Seconds that the sessions of an environment may take to close when the run ends."""
MAX_KILLED_BUILDS = 3
"""Number of children in a row that may be killed while they build the environment."""
KILLED = (-signal.SIGKILL, -signal.SIGTERM)
"""How a process ends that was not at fault. The system also kills a process that takes too much memory."""
MAX_CHILDREN = 32
MIN_CHILDREN = 8
"""Default limit for the children of a user's environment on a machine with fewer cores: its calls may wait for a
server. Windfall's own environments compute, and get one child per core."""
AHEAD_S = 0.01
"""Seconds of work that are queued at a child in advance. More would wait there while other children are idle."""
MIN_START_S = 1.0
NEW_WEIGHT = 0.1


class EnvPool(CallHost[ChildProcess]):
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
    ) -> None:
        """`section` is an env section of windfall.recipe. `evaluation`: a separate data set for the evaluation.
        `processes`: upper limit for child processes; 0 chooses it. `max_calls`: upper limit for calls that have begun.
        `output`: file for what the environment prints; None shows a little of it on standard error."""
        options: dict[str, Any] = envs.section_dict(section) | ({"evaluation": evaluation} if evaluation else {})
        super().__init__(options.get("factory", options["name"]), getattr(section, "max_sessions", sys.maxsize))
        self._strict = not envs.runs_user_code(options)
        self._output = output
        self._killed_builds = 0
        self.max_calls = max_calls
        self._build_message = protocol.BuildEnv(section=options, seed=seed, strict=self._strict)
        self._build_s = build_s
        cores = len(os.sched_getaffinity(0))
        self.limit = processes or min(MAX_CHILDREN, cores if self._strict else max(MIN_CHILDREN, cores))
        self._start_s = MIN_START_S
        self._took_s: dict[type, float] = {}
        """By kind of call: mean of the seconds for which it blocks its child."""
        self._broken: WindfallError | None = None
        self._built: asyncio.Future[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._killing: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        self._built = asyncio.get_running_loop().create_future()
        self._start()
        self._watching = asyncio.create_task(self._watch())
        self._watching.add_done_callback(self._task_ended)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._watching is not None
        self._watching.cancel()
        self._cancel_all()
        children, self.places = self.places, []
        if self.stateful:
            await asyncio.gather(*(child.end(CLOSE_S) for child in children if child.ready))
        await asyncio.gather(*(child.kill() for child in children))
        await asyncio.gather(self._watching, *self._killing, return_exceptions=True)

    def load(self) -> HostLoad:
        begun = sum(1 for c in self.places if c.queued)
        queued = len(self._queued()) + sum(c.queued for c in self.places) - begun
        return HostLoad(processes=len(self.places), limit=self.limit, queued=queued)

    async def ready(self) -> None:
        assert self._built is not None, "enter the pool with `async with` first"
        await asyncio.wait([self._built], timeout=QUIET_S)
        if not self._built.done():
            line = f"building environment {self.name}; waiting up to {self._build_s:g} s"
            print(line, file=sys.stderr, flush=True)
        await asyncio.shield(self._built)

    # Sending calls and handling answers.

    def _enqueue(self, call: EnvCall, *, first: bool = False) -> None:
        if self._broken is not None:
            call.fail(self._broken)
        else:
            super()._enqueue(call, first=first)

    def _may_send(self) -> bool:
        return sum(len(child.sent) for child in self.places) < self.max_calls

    def _choose(self, call: EnvCall) -> ChildProcess | None:
        """The child with the shortest queue among those that can take this call."""
        limit = 1 + int(AHEAD_S / max(1e-4, self._took_s.get(type(call.message), 2 * AHEAD_S)))
        free = [child for child in self.places if child.ready and child.queued < limit and child.has_room(call)]
        return min(free, key=lambda child: (child.queued, len(child.waiting)), default=None)

    def _send(self, call: EnvCall, place: ChildProcess) -> None:
        if not place.sent:
            place.last_message_s = time.monotonic()
        if call.moves:
            place.moved.add(call.number)
        super()._send(call, place)

    def _handle_line(self, child: ChildProcess, line: bytes) -> None:
        if child not in self.places:
            return  # it was killed, and its calls have failed or were sent again
        try:
            self._handle_message(child, protocol.decode_answer(line))
        except (ValueError, LookupError, RecursionError):  # fault boundary: the bytes of a child
            self._handle_invalid_line(child, line)

    def _handle_invalid_line(self, child: ChildProcess, line: bytes) -> None:
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
            self._suspect(suspects, "processes ended", "wrote something that is not an answer")
        self._kill(child)

    def _handle_message(self, child: ChildProcess, message: protocol.FromChild) -> None:
        """If this is not a valid message, raises an error that `_handle_line` catches, and changes nothing."""
        now_s = time.monotonic()
        busy_s, child.last_message_s = now_s - child.last_message_s, now_s
        match message:
            case protocol.EnvBuilt():
                self._child_ready(child, message)
            case protocol.EnvRefused():
                self._kill(child)
                where = message.where or f"environment {self.name}"
                self._build_failed(WindfallError(message.what, where=where, fix=message.fix))
            case protocol.CallWaits():
                child.waiting.add(child.sent[message.number].number)
                self._dispatch_soon()
            case protocol.CallLate():
                child.sent[message.number].late_s = now_s
                child.sent[message.number].stack = message.stack
            case protocol.CallVerdict():
                child.sent[message.number].verdict = Feedback(reward=message.reward, scores=message.scores)
            case _:
                call = child.sent[message.number]
                value = parse_answer(call, message)
                if not call.future.cancelled():  # a canceled call may not even have begun
                    self._learn(call, 0.0 if call.number in child.waiting else min(busy_s, now_s - call.sent_s))
                child.waiting.discard(call.number)
                self._answered(child, call, value)

    def _learn(self, call: EnvCall, blocked_s: float) -> None:
        kind = type(call.message)
        self._took_s[kind] = (1 - NEW_WEIGHT) * self._took_s.get(kind, blocked_s) + NEW_WEIGHT * blocked_s

    # Starting and ending children.

    def _start(self) -> None:
        child = ChildProcess(
            strict=self._strict, on_line=self._handle_line, on_end=self._child_ended, output=self._output
        )
        self.places.append(child)
        child.send(self._build_message)

    def _child_ready(self, child: ChildProcess, built: protocol.EnvBuilt) -> None:
        self.name = built.name
        self.stateful = built.stateful
        self.needs_tokens = built.needs_tokens
        self.sessions.replayable = built.replayable
        child.ready = True
        self._start_s = max(MIN_START_S, time.monotonic() - child.born_s)
        self._killed_builds = 0
        assert self._built is not None
        if not self._built.done():
            self._built.set_result(None)
        self._dispatch_soon()

    def _build_failed(self, error: WindfallError) -> None:
        if any(c.ready for c in self.places):
            self.limit = len(self.places)  # the others continue, and no more are started
            return
        self._broken = error
        assert self._built is not None
        if not self._built.done():
            self._built.set_exception(error)
        for call in self._clear_queues():
            call.fail(error)

    def _kill(self, child: ChildProcess, overdue: Sequence[EnvCall] = ()) -> None:
        """Kill a child. The overdue calls fail, because they took too long; its other calls are sent again."""
        if child not in self.places:
            return
        for call in overdue:
            del child.sent[call.number]
        self.places.remove(child)
        self._lose(child)

        async def kill() -> None:
            stack = ""
            try:
                stack = await child.dump_stack() if overdue else ""
            finally:
                for call in overdue:
                    call.fail(timeout_failure(call.name, call.message.limit_s, call.stack or stack))
                await child.kill()

        self._run_in_background(kill())

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._killing.add(task)
        task.add_done_callback(self._killing.discard)

    def _child_ended(self, child: ChildProcess, code: int, number: int, stack: str) -> None:
        if child not in self.places:
            return
        self.places.remove(child)
        how = "closed the connection to windfall" if code == protocol.LINK_LOST else describe_exit(code)
        if not child.ready:
            self._build_ended(child, code, how, stack)
        call = child.sent.pop(number, None)
        if call is not None and call.verdict is not None and code == -limits.OVER:
            call.succeed(call.verdict)
        elif call is not None and code == protocol.LINK_LOST:
            what = f"{call.name} closed or replaced files of its process that it has not opened"
            call.fail(EnvFailed(what, f"the process {how}", stack))
        elif call is not None:
            call.fail(EnvFailed(f"the process that ran {call.name} {how}", f"the process {how}", stack))
        else:
            self._suspect(child.begun, "processes ended", how, stack)
        self._lose(child)

    def _build_ended(self, child: ChildProcess, code: int, how: str, stack: str) -> None:
        """A child has ended before it was ready. If it was killed, another one is started (`_grow`)."""
        self._killed_builds += 1
        if code in KILLED and self._killed_builds <= MAX_KILLED_BUILDS:
            line = f"environment {self.name}: the process that builds it {how}; another one is started"
            print(line, file=sys.stderr, flush=True)
            return
        times = f" ({self._killed_builds} times in a row)" if self._killed_builds > 1 else ""
        what = f"the process that builds it {how} after {time.monotonic() - child.born_s:.1f} s{times}"
        self._build_failed(WindfallError(what, where=f"environment {self.name}", fix=stack))

    # Time limits and the number of children.

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            now_s = time.monotonic()
            for child in list(self.places):
                if child.ready:
                    self._check_limits(child, now_s)
                elif now_s - child.born_s > self._build_s:
                    self.places.remove(child)
                    self._run_in_background(self._give_up_build(child))
            self._close_old_sessions()
            self._grow(now_s)

    def _check_limits(self, child: ChildProcess, now_s: float) -> None:
        running = child.running_call()
        unchanged, child.seen_running = running == child.seen_running, running
        call = child.sent.get(running[0])
        if call is not None:
            if unchanged and now_s - running[1] > call.message.limit_s:  # read twice, so it is not half written
                self._kill(child, [call])
        elif child.sent:
            limit_s = max(call.message.limit_s for call in child.sent.values())
            if now_s - child.last_message_s > limit_s + SILENT_S:
                self._kill(child, list(child.sent.values()))
        if late := [c for c in child.sent.values() if c.late_s is not None and now_s - c.late_s > SILENT_S]:
            self._kill(child, late)

    async def _give_up_build(self, child: ChildProcess) -> None:
        stack = await child.dump_stack()
        what = f"waited {self._build_s:g} s for it to be imported and built"
        self._build_failed(WindfallError(what, where=f"environment {self.name}", fix=f"Its stack:\n{stack}"))
        await child.kill()

    def _grow(self, now_s: float) -> None:
        """Start children for calls that would wait longer for the others than a start takes, and always one."""
        if not self.places and self._broken is None:
            self._start()
        if not all(child.ready for child in self.places):
            return
        has_room = self.sessions.has_room(self._busy())
        waiting = [*self._turns, *(self._opening if has_room else ()), *self._pending]
        running_s = max(
            (now_s - since_s for number, since_s in (c.seen_running for c in self.places) if number), default=0
        )
        mean_s = self._took_s.get(type(waiting[0].message), 0.0) if waiting else 0.0
        work_s = len(waiting) * max(mean_s, running_s if running_s > self._start_s else 0.0)
        count = len(self.places)
        for _ in range(min(int(work_s / self._start_s), self.limit - count, max(2, count))):
            self._start()
