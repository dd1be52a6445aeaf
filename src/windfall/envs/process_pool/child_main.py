"""The program of a child process that holds one environment and answers its parent's calls (child_process.py, pool.py).

    socket ──▶ read ──▶ one asyncio task per call ──▶ environment ──▶ socket

Calls begin in the order in which they arrive. A plain function blocks this process until it returns. An `async def`
that waits lets the next call begin, and the parent gets a message. The parent can read which call is running
(running_call.py).

The environment has an empty standard input, and prints to the log of its reaper (reaper.py). It may fork: a copy
of this process ends when it returns from the call. If a call closes or replaces the socket, this process ends at once,
so that the parent can tell which call it was. This is not a sandbox: an environment may do everything that its user may
do.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import json
import mmap
import os
import signal
import socket
import sys
import zlib
from typing import Any

from windfall import envs
from windfall.envs import failures, user_code
from windfall.envs.failures import EnvFailed
from windfall.envs.process_pool import limits
from windfall.envs.process_pool.running_call import LAYOUT, LINK_LOST, RunningCall, TrackedCoroutine
from windfall.errors import WindfallError
from windfall.types import Feedback, Prompt, Task, Turn, prompt_key

TASKS_KEPT = 4096
"""Number of recent tasks that are kept, so that their feedback need not build them again."""


def main() -> None:
    link, record, trace = map(int, sys.argv[1:4])
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    # On this signal and in a crash, the process writes its stack, even while C code holds the interpreter's lock.
    faulthandler.register(signal.SIGUSR1, file=trace, all_threads=True)
    faulthandler.enable(file=trace)
    asyncio.run(ChildProgram(socket.socket(fileno=link), RunningCall(mmap.mmap(record, LAYOUT.size))).run())


class ChildProgram:
    def __init__(self, link: socket.socket, running_call: RunningCall) -> None:
        self._link = link
        self._running_call = running_call
        self._partial_line = b""
        self._pid = os.getpid()
        self._socket = os.fstat(link.fileno())
        self._env: Any = None
        self._name = ""
        self._tasks: dict[int, Task] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._ending: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        limits.announce = self._announce
        asyncio.get_running_loop().add_reader(self._link, self._readable)
        await asyncio.Event().wait()

    def _readable(self) -> None:
        data = self._link.recv(1 << 18)
        if not data:
            os._exit(0)  # the parent is gone
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            number, what, *args = json.loads(line)
            if what == "build":
                self._build(*args)
            elif what == "end session":
                history = tuple((text, seen) for text, seen in args[1])
                closing = asyncio.get_running_loop().create_task(self._env.end_session(args[0], history))
                self._closing.add(closing)  # asyncio itself keeps no reference
                closing.add_done_callback(self._closing.discard)
            elif what == "end":
                self._ending = asyncio.get_running_loop().create_task(self._end())
            elif what == "cancel" and number in self._running:
                self._running[number].cancel()
            elif what != "cancel":
                self._begin(number, what, args)

    async def _end(self) -> None:
        """The run is over: close the sessions that wait for a turn, and exit."""
        try:
            await self._env.close()
        finally:
            os._exit(0)

    def check(self) -> None:
        """End this process if it is a copy that the environment has forked, or if it has lost its link."""
        if os.getpid() != self._pid:
            os._exit(0)
        try:
            same = os.path.samestat(os.fstat(self._link.fileno()), self._socket)
        except OSError:
            same = False
        if not same:
            os._exit(LINK_LOST)

    def send(self, *message: Any) -> None:
        self.check()
        self._link.sendall(json.dumps(message).encode() + b"\n")

    def _announce(self, verdict: Feedback) -> None:
        self.send(self._running_call.number, "verdict", verdict.reward, verdict.scores)

    def _build(self, section: dict[str, Any], seed: int, strict: bool) -> None:
        memory_mb = section.pop("memory_mb", 0)
        if strict or memory_mb:
            limits.limit_memory(memory_mb << 20 or limits.MEMORY_BYTES)
        try:
            env: Any = envs.build(section, seed)
            self._env = env
            stateful = bool(getattr(env, "stateful", False))
            self._name = env.name if stateful else type(env).__name__
            traits = (bool(getattr(env, "needs_tokens", False)), bool(getattr(env, "replayable", True)))
        except WindfallError as e:
            self.send(0, "refused", e.what, e.where, e.fix)
        except BaseException as e:  # fault boundary: an environment is foreign code
            error = user_code.error("building it", e)
            self.send(0, "refused", error.what, error.where, error.fix)
        else:
            self.send(0, "ready", self._name, stateful, *traits)

    def _begin(self, number: int, what: str, args: list[Any]) -> None:
        loop, limit_s = asyncio.get_running_loop(), args.pop()
        step = TrackedCoroutine(number, limit_s, self._running_call, self.send, self.check)
        step.inner = self._answer(step, what, args)
        step.task = self._running[number] = loop.create_task(step)
        step.task.add_done_callback(lambda _: self._over(step))

    def _over(self, step: TrackedCoroutine) -> None:
        del self._running[step.number]
        if not step.answered:  # it was canceled before it began
            self.send(step.number, "failed", 0.0, 0.0, "canceled", "canceled", "")

    async def _answer(self, step: TrackedCoroutine, what: str, args: list[Any]) -> None:
        name = f"{self._name}.task({args[0]})" if what == "task" else f"{self._name}.feedback of task '{args[1]}'"
        failed = None
        try:
            value = await (self._task(args[0]) if what == "task" else self._feedback(name, *args))
            self.send(step.number, "value", *step.used(), *value)
        except asyncio.CancelledError as e:
            failed = failures.exception_failure(name, e)
            failed = failures.timeout_failure(name, step.limit_s, failed.traceback) if step.late else failed
        except EnvFailed as e:
            failed = e
        except BaseException as e:  # fault boundary: an environment is foreign code
            failed = failures.exception_failure(name, e)
        step.answered = True
        if failed is not None:
            self.send(step.number, "failed", *step.used(), failed.error, failed.cause, failed.traceback, failed.final)

    async def _task(self, index: int) -> tuple[str, Prompt]:
        task = self._env.task(index)
        if inspect.isawaitable(task):
            task = await task
        if fault := failures.task_fault(task):
            raise failures.invalid_value(f"{self._name}.task({index})", fault)
        while len(self._tasks) >= TASKS_KEPT:
            del self._tasks[next(iter(self._tasks))]
        self._tasks[index] = task
        return task.id, task.prompt

    async def _feedback(self, name: str, index: int, id: str, prompt_crc: int, turns: list[Any]) -> tuple[Any, ...]:
        if index not in self._tasks:  # built by another process, or by this one long ago: build it again
            await self._task(index)
        task = self._tasks[index]
        if zlib.crc32(prompt_key(task.prompt)) != prompt_crc:
            raise failures.invalid_value(
                f"{self._name}.task({index})",
                f"its prompt differs from the first time, so '{id}' cannot be judged; "
                "the same number must always give the same task",
            )
        given = [Turn(text=text, observation=seen, tokens=tuple(*tokens)) for text, seen, *tokens in turns]
        feedback = self._env.feedback(task, given)
        if inspect.isawaitable(feedback):
            feedback = await feedback
        if fault := failures.feedback_fault(feedback):
            raise failures.invalid_value(name, fault)
        reward = None if feedback.reward is None else float(feedback.reward)
        return reward, feedback.observation, *([feedback.scores] if feedback.scores else [])
