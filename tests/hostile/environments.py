"""Environments that misbehave in every way that a user's own code can. A test names one by `factory(Class)`.

Most behave correctly before task `from_task`, so that a run passes its trial call and meets the fault later.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from windfall.types import Feedback, Task, Turn


def factory(env: type) -> str:
    return f"hostile.environments:{env.__name__}"


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
        for fd in range(3, 64):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    os.write(fd, turns[-1].text.encode() + b"\n")
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
