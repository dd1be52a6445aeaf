"""Environments that misbehave in every way that a user's own code can. A test names one by `factory(Class)`.

Most behave correctly before task `from_task`, so that a run passes its trial call and meets the fault later.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from windfall.types import Feedback, Task, Turn


def factory(env: type) -> str:
    return f"tests.support.hostile.environments:{env.__name__}"


class Sound:
    """Behaves correctly. Its methods are plain functions, and the reward is the length of the text."""

    def __init__(self, seed: int, from_task: int = 0, **options: Any) -> None:
        self.seed, self.from_task, self.options = seed, from_task, options

    def task(self, index: int) -> Task:
        return Task(id=f"hostile/{index}", prompt=f"{index % 90}+1=", answer={index})  # a set cannot be sent as JSON

    def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        (index,) = task.answer
        return Feedback(reward=float(len(turns[-1].text))) if index < self.from_task else self.misbehave(task, turns)

    def misbehave(self, task: Task, turns: Sequence[Turn]) -> Any:
        return Feedback(reward=float(len(turns[-1].text)))


class Awaiting(Sound):
    """Like Sound, with `async def`."""

    async def task(self, index: int) -> Task:  # pyright: ignore[reportIncompatibleMethodOverride]
        await asyncio.sleep(0)
        return super().task(index)

    async def feedback(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, task: Task, turns: Sequence[Turn]
    ) -> Feedback:
        await asyncio.sleep(self.options.get("s", 0.001))
        return super().feedback(task, turns)


class FailsAtFirst(Sound):
    """The first `failures` calls fail, in any process. `file` counts the calls."""

    def misbehave(self, task: Task, turns: Sequence[Turn]) -> Any:
        with open(self.options["file"], "a+") as file:
            file.write(".")
            if file.tell() <= self.options["failures"]:
                raise ConnectionError("the judge is busy")
        return Feedback(reward=0.0)


class Sleeps(Sound):
    """Blocks like `requests` without a timeout."""

    def misbehave(self, task: Task, turns: Sequence[Turn]) -> Any:
        time.sleep(self.options.get("s", 1e6))
        return Feedback(reward=1.0)


class Computes(Sound):
    """Uses `s` seconds of CPU time."""

    def misbehave(self, task: Task, turns: Sequence[Turn]) -> Any:
        until = time.process_time() + self.options["s"]
        while time.process_time() < until:
            pass
        return Feedback(reward=1.0)


class SleepsOnTheLoop(Sleeps):
    """Blocks in an `async def` if the response is "block". Other calls wait without blocking."""

    async def feedback(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, task: Task, turns: Sequence[Turn]
    ) -> Feedback:
        await asyncio.sleep(0.2)
        if turns[-1].text == "block":
            time.sleep(1e6)
        return Feedback(reward=1.0)


class Hangs(Sound):
    """Waits forever in an `async def`."""

    async def feedback(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, task: Task, turns: Sequence[Turn]
    ) -> Feedback:
        if turns[-1].text == "hang":
            await asyncio.Event().wait()
        return Feedback(reward=1.0)


class Stubborn(Sound):
    """Ignores its cancellation and continues to wait."""

    async def feedback(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, task: Task, turns: Sequence[Turn]
    ) -> Feedback:
        while turns[-1].text == "hang":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1e6)
        await asyncio.sleep(0.01)
        return Feedback(reward=1.0)


class HoldsTheLock(Sound):
    """Holds the interpreter's lock, so that no other thread of the process can run."""

    def misbehave(self, task: Task, turns: Sequence[Turn]) -> Any:
        return Feedback(reward=float(9**9**9 > 0))


class BlocksElsewhere(Sound):
    """Blocks the loop outside any call."""

    async def feedback(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, task: Task, turns: Sequence[Turn]
    ) -> Feedback:
        asyncio.get_running_loop().call_later(0.05, time.sleep, 1e6)
        await asyncio.sleep(0.2)
        return Feedback(reward=1.0)


class Raises(Sound):
    def misbehave(self, task: Task, turns: Sequence[Turn]) -> Any:
        return {}[f"no such key: {turns[-1].text}"]


class Leaves(Sound):
    def misbehave(self, task: Task, turns: Sequence[Turn]) -> Any:
        os._exit(3)


class LeavesUnseen(Sound):
    """Its process ends while no call is running."""

    async def feedback(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, task: Task, turns: Sequence[Turn]
    ) -> Feedback:
        asyncio.get_running_loop().call_later(0.01, os._exit, 5)
        await asyncio.sleep(1e6)
        return Feedback(reward=1.0)


class Forks(Sound):
    """Both processes return from the call, so it is answered twice."""

    def misbehave(self, task: Task, turns: Sequence[Turn]) -> Any:
        os.fork()
        return Feedback(reward=1.0)


class Scribbles(Sound):
    """Writes to every open socket."""

    def misbehave(self, task: Task, turns: Sequence[Turn]) -> Any:
        data = (turns[-1].text + self.options.get("end", "\n")).encode() * self.options.get("times", 1)
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    os.write(fd, data)
        return Feedback(reward=1.0)


class ScribblesOnce(Scribbles):
    """Writes to every open socket, unless the text is "fine"."""

    def misbehave(self, task: Task, turns: Sequence[Turn]) -> Any:
        return Feedback(reward=1.0) if turns[-1].text == "fine" else super().misbehave(task, turns)


class ClosesFiles(Sound):
    """Closes all files of its process on the text "close", and replaces them on "replace". On "standard", it closes
    standard input, output and error only."""

    def misbehave(self, task: Task, turns: Sequence[Turn]) -> Any:
        if turns[-1].text == "standard":
            os.closerange(0, 3)
        if turns[-1].text in ("close", "replace"):
            os.closerange(0, 1024)
        if turns[-1].text == "replace":
            for _ in range(64):
                os.open(os.devnull, os.O_RDWR)
        return Feedback(reward=1.0)


class AwaitsAndHarms(Sound):
    """Calls wait together. On the text "scribble" or "leave", one harms the process while the others wait."""

    async def feedback(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, task: Task, turns: Sequence[Turn]
    ) -> Feedback:
        await asyncio.sleep(0.1 if turns[-1].text in ("scribble", "leave") else 0.5)
        if turns[-1].text == "scribble":
            Scribbles.misbehave(self, task, turns)  # pyright: ignore[reportArgumentType]
            await asyncio.sleep(1e6)
        if turns[-1].text == "leave":
            asyncio.get_running_loop().call_soon(os._exit, 5)
            await asyncio.sleep(1e6)
        return Feedback(reward=1.0)


class OwnError(BaseException):
    """Like the errors of some libraries that must not be caught by `except Exception`."""


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class RaisesStrangely(Sound):
    def misbehave(self, task: Task, turns: Sequence[Turn]) -> Any:
        match turns[-1].text:
            case "own":
                raise OwnError("mine")
            case "unprintable":
                raise UnprintableError
            case "canceled":
                raise asyncio.CancelledError
            case "closed":
                raise GeneratorExit
            case "stop":
                raise StopIteration("no more rows")
            case "surrogate":
                raise ValueError("\ud800")


class RaisesStrangelyLater(RaisesStrangely):
    async def feedback(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, task: Task, turns: Sequence[Turn]
    ) -> Feedback:
        await asyncio.sleep(0)
        return self.misbehave(task, turns)


class EatsMemory(Sound):
    """Uses `mb` of memory, and keeps it."""

    def misbehave(self, task: Task, turns: Sequence[Turn]) -> Any:
        eaten = bytearray(b"x") * (self.options["mb"] << 20)
        time.sleep(600.0)
        return Feedback(reward=float(len(eaten)))


class StartsPrograms(Sound):
    """Starts `count` programs that are no children of its session, and appends their pids to `file`."""

    def misbehave(self, task: Task, turns: Sequence[Turn]) -> Any:
        started = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(self.options["count"])]
        with open(self.options["file"], "a") as file:
            file.writelines(f"{program.pid}\n" for program in started)
        time.sleep(600.0)
        return Feedback(reward=1.0)


class LeavesProcesses(Sound):
    """Leaves processes behind in every way, and appends their pids to `file`. `wait_s`: the call lasts so long."""

    def misbehave(self, task: Task, turns: Sequence[Turn]) -> Any:
        for _ in range(self.options.get("count", 3)):
            self._fork(os.setsid)
            self._fork(lambda: None)
            self._fork(self._daemonize)
            self._fork(lambda: (os.setsid(), os.closerange(0, 1024)))
        print(self.options.get("says", ""))
        time.sleep(self.options.get("wait_s", 0.0))
        return Feedback(reward=1.0)

    def _fork(self, prepare: Callable[[], object]) -> None:
        """Start a process that ignores signals, holds all files of this one, and never ends."""
        if os.fork():
            return
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        prepare()
        with open(self.options["file"], "a") as file:
            file.write(f"{os.getpid()}\n")
        while True:
            time.sleep(60.0)

    def _daemonize(self) -> None:
        os.setsid()
        if os.fork():
            os._exit(0)


class ForksOnAndOn(Sound):
    """Leaves a process that lives for a moment, and is replaced by the next one. `file` gets their pids."""

    def misbehave(self, task: Task, turns: Sequence[Turn]) -> Any:
        if os.fork() == 0:
            os.setsid()
            file = os.open(self.options["file"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            while True:
                os.write(file, f"{os.getpid()}\n".encode())
                if os.fork():
                    os._exit(0)
        return Feedback(reward=1.0)


class Prints(Sound):
    """Prints `count` lines of 100 characters from task `from_task` on."""

    def misbehave(self, task: Task, turns: Sequence[Turn]) -> Any:
        sys.stderr.write("".join(f"line {number:<93}\n" for number in range(self.options["count"])))
        return Feedback(reward=1.0)


class ExitsPolitely(Sound):
    def misbehave(self, task: Task, turns: Sequence[Turn]) -> Any:
        sys.exit("I have had enough")


class Crashes(Sound):
    def misbehave(self, task: Task, turns: Sequence[Turn]) -> Any:
        import ctypes

        ctypes.string_at(0)


class Garbage(Sound):
    def misbehave(self, task: Task, turns: Sequence[Turn]) -> Any:
        return {"none": None, "text": "1.0", "nan": Feedback(reward=float("nan")),
                "vast": Feedback(reward=10**400), "large": Feedback(reward=-1e30), "empty": Feedback(),
                "list": Feedback(observation=["go"]), "half": Feedback(observation="\ud800"),  # pyright: ignore
                "huge": Feedback(observation="x" * (8 << 20))}[turns[-1].text]  # fmt: skip


class Chatty(Sound):
    """Prints megabytes to both streams, and reads the empty standard input."""

    def misbehave(self, task: Task, turns: Sequence[Turn]) -> Any:
        os.write(1, b'[1, "value", 0, 0, 99.0, null]\n' * 20_000)
        print("said on stdout", flush=True)
        print("said on stderr", "y" * (1 << 20), file=sys.stderr)
        return Feedback(reward=float(len(sys.stdin.read())))


class SlowTasks(Sound):
    """Tasks from `from_task` on hang."""

    def task(self, index: int) -> Task:
        if index >= self.from_task:
            time.sleep(1e6)
        return super().task(index)

    def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        return Feedback(reward=1.0)


class BadTasks(SlowTasks):
    """Tasks with a number divisible by `every` raise, or are garbage; from `from_task` on, all tasks do."""

    def task(self, index: int) -> Any:
        if (self.options.get("every") and index % self.options["every"] == 0) or index >= (self.from_task or 1 << 60):
            if self.options.get("garbage"):
                return {"prompt": "no Task"}
            raise LookupError(f"row {index} is broken")
        return Sound.task(self, index)


class LongPrompts(SlowTasks):
    """Every third prompt is longer than any context."""

    def task(self, index: int) -> Task:
        made = Sound.task(self, index)
        return Task(id=made.id, prompt=made.prompt * 2000, answer=made.answer) if index % 3 == 1 else made


class Forgetful(Sound):
    """The same number gives another task in every process."""

    def task(self, index: int) -> Task:
        return Task(id=f"hostile/{index}", prompt=f"{os.getpid()}", answer={index})

    def misbehave(self, task: Task, turns: Sequence[Turn]) -> Any:
        if turns[-1].text == "leave":
            os._exit(0)
        return Feedback(reward=1.0)


class Threads(Sound):
    """Leaves a thread and a child process behind."""

    def misbehave(self, task: Task, turns: Sequence[Turn]) -> Any:
        import subprocess

        threading.Thread(target=time.sleep, args=(1e6,)).start()
        with subprocess.Popen(["sleep", "86399"]) as child:
            print(f"started {child.pid}", flush=True)
        return Feedback(reward=1.0)


class RaisesWhenBuilt(Sound):
    def __init__(self, seed: int) -> None:
        raise ConnectionError("the dataset is away")


class LeavesWhenBuilt(Sound):
    def __init__(self, seed: int) -> None:
        os._exit(7)


class HangsWhenBuilt(Sound):
    def __init__(self, seed: int) -> None:
        time.sleep(1e6)


class EmptyOnly(Sound):
    """Judges an empty response. All others fail while the current folder contains a file called `broken`."""

    def misbehave(self, task: Task, turns: Sequence[Turn]) -> Any:
        if turns[-1].text and os.path.exists("broken"):
            raise ConnectionError(f"no judge for {turns[-1].text!r}")
        return Feedback(reward=float(len(turns[-1].text) % 2))


class SleepsOnWords(Sound):
    """Judges an empty response, and blocks forever on all others."""

    def misbehave(self, task: Task, turns: Sequence[Turn]) -> Any:
        if turns[-1].text:
            time.sleep(1e6)
        return Feedback(reward=0.0)


class NeverDone(Sound):
    """Always asks for another turn, and never returns a reward."""

    def misbehave(self, task: Task, turns: Sequence[Turn]) -> Any:
        return Feedback(observation="+1")
