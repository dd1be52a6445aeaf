"""The program of a child process that holds one environment and answers its parent's calls (child_process.py, pool.py).

    socket ──▶ read ──▶ one asyncio task per call ──▶ environment ──▶ socket

Calls begin in the order in which they arrive. A plain function blocks this process until it returns. An `async def`
that waits lets the next call begin, and the parent gets a message.

The environment has an empty standard input, and prints to the log of its reaper (reaper.py). It may fork: a copy
of this process ends when it returns from the call. If a call closes or replaces the socket, this process ends at once,
so that the parent can tell which call it was. This is not a sandbox: an environment may do everything that its user may
do.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import mmap
import os
import signal
import socket
import sys
import time
import zlib
from collections.abc import Coroutine, Generator
from typing import Any

from windfall import envs
from windfall.envs import failures, user_code
from windfall.envs.calls import answer_message, describe_call
from windfall.envs.failures import EnvFailed
from windfall.envs.process_pool import limits, protocol
from windfall.errors import WindfallError
from windfall.link import env_messages as e
from windfall.link.message_base import Message
from windfall.types import Feedback, Task, Turn, prompt_key

TASKS_KEPT = 4096
"""Number of recent tasks that are kept, so that their feedback need not build them again."""


def main() -> None:
    link, record, trace = map(int, sys.argv[1:4])
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    # On this signal and in a crash, the process writes its stack, even while C code holds the interpreter's lock.
    faulthandler.register(signal.SIGUSR1, file=trace, all_threads=True)
    faulthandler.enable(file=trace)
    asyncio.run(ChildProgram(socket.socket(fileno=link), mmap.mmap(record, protocol.RECORD.size)).run())


class ChildProgram:
    def __init__(self, link: socket.socket, record: mmap.mmap) -> None:
        self._link = link
        self._record = record
        self._partial_line = b""
        self._pid = os.getpid()
        self._socket = os.fstat(link.fileno())
        self._env: Any = None
        self._name = ""
        self._tasks: dict[int, Task] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        limits.announce = self._announce
        asyncio.get_running_loop().add_reader(self._link, self._readable)
        await asyncio.Event().wait()

    def _readable(self) -> None:
        try:
            data = self._link.recv(1 << 18)
        except ConnectionError:  # it left answers unread
            data = b""
        if not data:
            os._exit(0)  # the parent is gone
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            self._handle(protocol.decode_call(line))

    def _handle(self, message: protocol.ToChild) -> None:
        match message:
            case protocol.BuildEnv():
                self._build(message)
            case protocol.EndEnv():
                self._close(self._end())
            case e.EndSession():
                self._close(self._env.end_session((message.id, *message.turns)))
            case e.CancelCall():
                if message.number in self._running:
                    self._running[message.number].cancel()
            case _:
                self._begin(message)

    def _close(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._closing.add(task)  # asyncio itself keeps no reference
        task.add_done_callback(self._closing.discard)

    async def _end(self) -> None:
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
            os._exit(protocol.LINK_LOST)

    def send(self, message: Message) -> None:
        self.check()
        self._link.sendall(protocol.encode(message))

    def _announce(self, verdict: Feedback) -> None:
        number = protocol.RECORD.unpack_from(self._record)[0]
        self.send(protocol.CallVerdict(number=number, reward=verdict.reward or 0.0, scores=verdict.scores))

    def _build(self, message: protocol.BuildEnv) -> None:
        section = dict(message.section)
        memory_mb = section.pop("memory_mb", 0)
        if message.strict or memory_mb:
            limits.limit_memory(memory_mb << 20 or limits.MEMORY_BYTES)
        try:
            env: Any = envs.build(section, message.seed)
            self._env = env
            stateful = bool(getattr(env, "stateful", False))
            self._name = env.name if stateful else type(env).__name__
            tokens, replayable = bool(getattr(env, "needs_tokens", False)), bool(getattr(env, "replayable", True))
        except BaseException as error:  # fault boundary: an environment is foreign code
            refusal = error if isinstance(error, WindfallError) else user_code.error("building it", error)
            self.send(protocol.EnvRefused(what=refusal.what, where=refusal.where, fix=refusal.fix))
        else:
            self.send(protocol.EnvBuilt(name=self._name, stateful=stateful, needs_tokens=tokens, replayable=replayable))

    def _begin(self, message: e.TaskCall | e.FeedbackCall) -> None:
        step = TrackedCall(message, self, self._record)
        step.inner = self._answer(step, message)
        step.task = self._running[message.number] = asyncio.get_running_loop().create_task(step)
        step.task.add_done_callback(lambda _: self._over(step))

    def _over(self, step: TrackedCall) -> None:
        del self._running[step.number]
        if not step.answered:  # it was canceled before it began
            self.send(answer_message(step.number, EnvFailed("canceled", "canceled")))

    async def _answer(self, step: TrackedCall, message: e.TaskCall | e.FeedbackCall) -> None:
        name = describe_call(self._name, message)
        try:
            value = await (self._task(message.index) if isinstance(message, e.TaskCall) else self._feedback(message))
            self.send(answer_message(step.number, value))
            step.answered = True
            return
        except asyncio.CancelledError as error:
            failed = failures.exception_failure(name, error)
            if step.late:
                failed = failures.timeout_failure(name, step.limit_s, failed.traceback)
        except EnvFailed as error:
            failed = error
        except BaseException as error:  # fault boundary: an environment is foreign code
            failed = failures.exception_failure(name, error)
        step.answered = True
        self.send(answer_message(step.number, failed))

    async def _task(self, index: int) -> Task:
        task = self._env.task(index)
        if inspect.isawaitable(task):
            task = await task
        if fault := failures.task_fault(task):
            raise failures.invalid_value(f"{self._name}.task({index})", fault)
        while len(self._tasks) >= TASKS_KEPT:
            del self._tasks[next(iter(self._tasks))]
        self._tasks[index] = task
        return task

    async def _feedback(self, message: e.FeedbackCall) -> Feedback:
        index = message.index
        if index not in self._tasks:  # built by another process, or by this one long ago: build it again
            await self._task(index)
        task = self._tasks[index]
        if zlib.crc32(prompt_key(task.prompt)) != message.prompt_crc:
            fault = (
                f"its prompt differs from the first time, so '{message.id}' cannot be judged; "
                "the same number must always give the same task"
            )
            raise failures.invalid_value(f"{self._name}.task({index})", fault)
        turns = [Turn(text=text, observation=seen, tokens=ids, role=role) for text, seen, ids, role in message.turns]
        feedback = self._env.feedback(task, turns)
        if inspect.isawaitable(feedback):
            feedback = await feedback
        if fault := failures.feedback_fault(feedback):
            raise failures.invalid_value(describe_call(self._name, message), fault)
        return feedback


class TrackedCall(Coroutine[Any, Any, None]):
    """The coroutine of a call. It records when it is running. Its time limit counts from its first step."""

    inner: Coroutine[Any, Any, None]
    task: asyncio.Task[None]

    def __init__(self, message: e.TaskCall | e.FeedbackCall, program: ChildProgram, record: mmap.mmap) -> None:
        self.number = message.number
        self.limit_s = message.limit_s
        self.late = False
        self.answered = False
        self._program = program
        self._record = record
        self._timer: asyncio.TimerHandle | None = None

    def send(self, value: Any) -> Any:
        return self._run(self.inner.send, value)

    def throw(self, *error: Any) -> Any:
        return self._run(self.inner.throw, *error)

    def close(self) -> None:
        self.inner.close()

    def __await__(self) -> Generator[Any, Any, None]:
        raise AssertionError("run as a task")

    def _write(self, number: int) -> float:
        now_s = time.monotonic()
        protocol.RECORD.pack_into(self._record, 0, number, now_s)
        return now_s

    def _run(self, step: Any, *args: Any) -> Any:
        began_s = self._write(self.number)
        try:
            result = step(*args)
        except BaseException:  # the coroutine has ended, by StopIteration or an error: the task handles it
            self._write(0)
            if self._timer is not None:
                self._timer.cancel()
            raise
        self._program.check()
        took_s = self._write(0) - began_s
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, self.limit_s - took_s), self._overdue)
            self._program.send(protocol.CallWaits(number=self.number))
        return result

    def _overdue(self) -> None:
        self.late = True
        self._program.send(protocol.CallLate(number=self.number, stack=failures.coroutine_stack(self.inner)))
        self.task.cancel()
