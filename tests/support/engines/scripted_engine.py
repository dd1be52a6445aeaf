"""An engine that generates a given text, and an environment whose feedback a test decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.engines.hashing_engine import STOP, CharacterText
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.rollout.stream import Rollout, seed_of
from windfall.controller.workers.versions import Offer
from windfall.engine.base import Engine
from windfall.envs.in_process import InProcess
from windfall.events.log import EventLog
from windfall.recipe.sections import Recipe
from windfall.recipe.sections import RolloutSection as Options
from windfall.run.commands.in_process import in_process_worker
from windfall.types import Chunk, Feedback, Finish, Request, Sampling, Task, Turn

SEED = 3
NAMES = {seed_of(SEED, task, sibling): f"{task}/{sibling}" for task in range(100) for sibling in range(8)}
"""Response ids by seed. A worker knows a response only by its handle; a script needs its id."""


class Scripted(Engine):
    """Implements Engine. `script(request)` is the whole text of a request, unless it is cut off. Requests carry the ids
    of their responses here."""

    def __init__(self, script: Callable[[Request], str]) -> None:
        self.version = 0
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self.stepped: Callable[[], object] = lambda: None
        """Called at the end of every step, in the engine's thread."""
        self._script = script
        self._running: dict[str, tuple[Request, list[int]]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def add(self, request: Request) -> None:
        assert request.id not in self._running, f"{request.id} was added twice"
        handle, request = request.id, replace(request, id=NAMES.get(request.seed, request.id))
        self.requests.append(request)
        self._running[handle] = (request, [*map(ord, self._script(request)), STOP][::-1])

    def cancel(self, id: str) -> None:
        running = self._running.pop(id, None)
        if running:
            self.cancelled.append(running[0].id)

    def step(self) -> list[Chunk]:
        chunks = [self._next(handle, request, left) for handle, (request, left) in list(self._running.items())]
        self.stepped()
        return chunks

    def _next(self, handle: str, request: Request, left: list[int]) -> Chunk:
        made = len(self._script(request)) + 1 - len(left)
        token = left.pop()
        finish: Finish | None = "stop" if token == STOP else "length" if made + 1 == request.max_tokens else None
        if finish:
            del self._running[handle]
        return Chunk(
            id=handle, position=request.position + made, tokens=(token,), logprobs=(-token / 256,),
            version=self.version, finish=finish,
        )  # fmt: skip

    def swap(self, version: int, weights: Mapping[str, Any] | None = None, *, policy: str = "") -> None:
        self.version = version


class Asks:
    """An environment: task n asks "n="; `judge` decides the feedback."""

    def __init__(self, judge: Callable[[Task, Sequence[Turn]], Awaitable[Feedback]]) -> None:
        self.heard: list[tuple[str, tuple[Turn, ...]]] = []
        """(task id, turns) of every request for feedback."""
        self._judge = judge

    def task(self, index: int) -> Task:
        return Task(id=f"n/{index}", prompt=f"{index}=", answer=index)

    async def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        self.heard.append((task.id, tuple(turns)))
        return await self._judge(task, turns)


@asynccontextmanager
async def rolling(engine: Any, env: Asks, folder: Path, **options: Any) -> AsyncIterator[Rollout]:
    """A Rollout with this engine and environment, and a single worker in this process."""
    events = EventLog(folder / "events.jsonl")
    dispatch = Dispatch(events=events)
    options = {"max_tokens": 100, "reward_tries": 1, "reward_timeout_s": 20.0} | options
    text: Any = CharacterText()
    rollout = Rollout(
        dispatch, InProcess(env), {"": text}, Recipe(rollout=Options(**options)), seed=SEED, events=events
    )
    async with in_process_worker(dispatch, engine, slots=256, on_failure=rollout.interrupt):
        dispatch.set_offer(Offer(version=engine.version, digest="as it is"))
        watching = asyncio.create_task(dispatch.watch())
        yield rollout
        watching.cancel()
        dispatch.ledger.check()
        dispatch.members.check()
    events.close()


def run(engine: Any, env: Asks, folder: Path, *, tasks: Sequence[int], size: int = 1,
        **options: Any) -> tuple[list[Any], Rollout]:  # fmt: skip
    async def all_groups() -> tuple[list[Any], Rollout]:
        async with rolling(engine, env, folder, **options) as rollout:
            groups = rollout.groups(tasks, size=size, sampling=lambda policy: Sampling(top_k=9))
            return [g async for g in groups], rollout

    return asyncio.run(all_groups())
