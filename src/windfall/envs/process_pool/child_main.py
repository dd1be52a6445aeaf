"""The program of a child process that holds one environment and answers its parent's calls (`process`, `pool`).

    socket ──▶ read ──▶ one asyncio task per call ──▶ environment ──▶ socket

Calls begin in the order in which they arrive. A plain function blocks this process until it returns; an `async def`
that waits lets the next call begin, and the parent is told so. Whose code is running stands on the board (`board`),
which the parent reads.

The environment sees an empty standard input, and prints to the log of the process that started us. This is not a
sandbox: an environment may do what its user may do.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import json
import mmap
import os
import select
import signal
import socket
import sys
import zlib
from typing import Any

from windfall import envs
from windfall.envs.failures import EnvFailed, feedback_fault, garbage, raised, task_fault, waited
from windfall.envs.process_pool import limits
from windfall.envs.process_pool.board import LAYOUT, Board, Stepped
from windfall.errors import WindfallError
from windfall.fleet.parent_death import die_with_parent
from windfall.types import Feedback, Prompt, Task, Turn, prompt_key

TASKS_KEPT = 4096


def main() -> None:
    parent, link, board, trace = map(int, sys.argv[1:5])
    if sys.platform == "linux":  # elsewhere the end of the link has to do
        die_with_parent(parent, signal.SIGKILL)
        leave_nothing_behind(link, board, trace)
    os.dup2(2, 1)  # what the environment prints goes to the log
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    # On this signal, and when it crashes, the process writes its stack, even while C code holds the interpreter's lock.
    faulthandler.register(signal.SIGUSR1, file=trace, all_threads=True)
    faulthandler.enable(file=trace)
    asyncio.run(ChildProgram(socket.socket(fileno=link), Board(mmap.mmap(board, LAYOUT.size))).run())


def leave_nothing_behind(*held: int) -> None:
    """A process of its own that waits for our end, however it comes, and then kills our group: all that the environment
    started. It is nobody's child, so that an environment that waits for its children does not meet it."""
    try:
        us = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):  # a kernel before 5.3: the parent kills the group, unless it is killed itself
        return
    if middle := os.fork():
        os.waitpid(middle, 0)
        os.close(us)
        return
    if os.fork() == 0:
        for fd in held:
            os.close(fd)  # above all the link, whose end would not be seen
        end = select.poll()
        end.register(us, select.POLLIN)
        end.poll()
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


class ChildProgram:
    def __init__(self, link: socket.socket, board: Board) -> None:
        self._link, self._board, self._read = link, board, b""
        self._env: Any = None
        self._name = ""
        self._tasks: dict[int, Task] = {}
        self._running: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        limits.announce = self._announce
        asyncio.get_running_loop().add_reader(self._link, self._readable)
        await asyncio.Event().wait()

    def _readable(self) -> None:
        data = self._link.recv(1 << 18)
        if not data:
            os._exit(0)  # nobody is left to answer
        *lines, self._read = (self._read + data).split(b"\n")
        for line in lines:
            number, what, *args = json.loads(line)
            if what == "build":
                self._build(*args)
            elif what == "cancel" and number in self._running:
                self._running[number].cancel()
            elif what != "cancel":
                self._begin(number, what, args)

    def tell(self, *message: Any) -> None:
        self._link.sendall(json.dumps(message).encode() + b"\n")

    def _announce(self, verdict: Feedback) -> None:
        self.tell(self._board.number, "verdict", verdict.reward)

    # the environment

    def _build(self, section: dict[str, Any], seed: int, strict: bool) -> None:
        if strict:
            limits.limit_memory()
        try:
            self._env = envs.build(section, seed)
        except WindfallError as e:
            self.tell(0, "refused", e.what, e.where, e.fix)
            return
        self._name = type(self._env).__name__
        self.tell(0, "ready", self._name)

    def _begin(self, number: int, what: str, args: list[Any]) -> None:
        loop, limit_s = asyncio.get_running_loop(), args.pop()
        step = Stepped(number, limit_s, self._board, self.tell)
        step.inner = self._answer(step, what, args)
        step.task = self._running[number] = loop.create_task(step)
        step.task.add_done_callback(lambda _: self._over(step))

    def _over(self, step: Stepped) -> None:
        del self._running[step.number]
        if not step.answered:  # it was cancelled before it began
            self.tell(step.number, "failed", 0.0, 0.0, "cancelled", "cancelled", "")

    async def _answer(self, step: Stepped, what: str, args: list[Any]) -> None:
        name = f"{self._name}.task({args[0]})" if what == "task" else f"{self._name}.feedback of task '{args[1]}'"
        failed = None
        try:
            value = await (self._task(args[0]) if what == "task" else self._feedback(name, *args))
            self.tell(step.number, "value", *step.used(), *value)
        except asyncio.CancelledError as e:
            failed = raised(name, e)
            failed = waited(name, step.limit_s, failed.traceback) if step.late else failed
        except EnvFailed as e:
            failed = e
        except (Exception, SystemExit, KeyboardInterrupt) as e:  # fault boundary: an environment is anybody's code
            failed = raised(name, e)
        step.answered = True
        if failed is not None:
            self.tell(step.number, "failed", *step.used(), failed.error, failed.cause, failed.traceback)

    async def _task(self, index: int) -> tuple[str, Prompt]:
        made = self._env.task(index)
        if inspect.isawaitable(made):
            made = await made
        if fault := task_fault(made):
            raise garbage(f"{self._name}.task({index})", fault)
        while len(self._tasks) >= TASKS_KEPT:
            del self._tasks[next(iter(self._tasks))]
        self._tasks[index] = made
        return made.id, made.prompt

    async def _feedback(self, name: str, index: int, id: str, prompt: int, turns: list[Any]) -> tuple[Any, Any]:
        if index not in self._tasks:  # another process made it, or this one long ago: the same number, the same task
            await self._task(index)
        task = self._tasks[index]
        if zlib.crc32(prompt_key(task.prompt)) != prompt:
            raise garbage(
                f"{self._name}.task({index})",
                f"its prompt was another one when it was made first, so '{id}' cannot be judged; "
                "the same number must always give the same task",
            )
        said = self._env.feedback(task, [Turn(text=text, observation=observation) for text, observation in turns])
        if inspect.isawaitable(said):
            said = await said
        if fault := feedback_fault(said):
            raise garbage(name, fault)
        return None if said.reward is None else float(said.reward), said.observation
