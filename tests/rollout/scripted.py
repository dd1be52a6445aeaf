"""An engine that says what it is told to, words that are their own token ids, and the environment around them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from windfall.config import Rollout as Options
from windfall.events import EventLog
from windfall.rollout.manager import Rollout
from windfall.types import Chunk, Feedback, Finish, Request, Sampling, Task, Turn

STOP = 0


class Words:
    """One character, one id; a stop token is not part of what was said."""

    stop = frozenset({STOP})

    def prompt(self, words: str) -> tuple[int, ...]:
        return tuple(map(ord, words))

    observation = prompt

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids if i != STOP)


class Scripted:
    """Keeps to the Engine seam. `script(request)` is all that a request will get if nothing cuts it."""

    def __init__(self, script: Callable[[Request], str], longest: int = 10**9) -> None:
        self.version = 0
        self.longest = longest
        """Prompt and response together: an engine may have a limit of its own."""
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
        self.requests.append(request)
        self._running[request.id] = (request, [*map(ord, self._script(request)), STOP][::-1])

    def cancel(self, id: str) -> None:
        if self._running.pop(id, None):
            self.cancelled.append(id)

    def step(self) -> list[Chunk]:
        chunks = [self._next(request, left) for request, left in list(self._running.values())]
        self.stepped()
        return chunks

    def _next(self, request: Request, left: list[int]) -> Chunk:
        made = len(self._script(request)) + 1 - len(left)
        token = left.pop()
        limit = min(request.max_tokens, self.longest - len(request.prompt))
        finish: Finish | None = "stop" if token == STOP else "length" if made + 1 == limit else None
        if finish:
            del self._running[request.id]
        return Chunk(
            id=request.id, position=request.position + made, tokens=(token,), logprobs=(-token / 256,),
            version=self.version, finish=finish,
        )  # fmt: skip

    def swap(self, version: int, weights: Mapping[str, Any] | None = None) -> None:
        self.version = version


class Asks:
    """Task number n asks "n="; what the environment says to an episode is up to `judge`."""

    def __init__(self, judge: Callable[[Task, Sequence[Turn]], Awaitable[Feedback]]) -> None:
        self.heard: list[tuple[str, tuple[Turn, ...]]] = []
        self._judge = judge

    def task(self, index: int) -> Task:
        return Task(id=f"n/{index}", prompt=f"{index}=", answer=index)

    async def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        self.heard.append((task.id, tuple(turns)))
        return await self._judge(task, turns)


@asynccontextmanager
async def rolling(engine: Any, env: Asks, folder: Path, **options: Any) -> AsyncIterator[tuple[Rollout, asyncio.Event]]:
    """A Rollout over these, and the event that stops it."""
    events, stop = EventLog(folder / "events.jsonl"), asyncio.Event()
    with ThreadPoolExecutor(1) as threads:
        options = {"max_tokens": 100, "reward_tries": 1, "reward_timeout_s": 20.0} | options
        text: Any = Words()
        yield Rollout(engine, env, text, Options(**options), seed=3, events=events, threads=threads, stop=stop), stop
    events.close()


def run(engine: Any, env: Asks, folder: Path, *, tasks: Sequence[int], size: int = 1, in_order: bool = False,
        **options: Any) -> tuple[list[Any], Rollout]:  # fmt: skip
    async def all_groups() -> tuple[list[Any], Rollout]:
        async with rolling(engine, env, folder, **options) as (rollout, _):
            groups = rollout.groups(tasks, size=size, sampling=Sampling(top_k=9), in_order=in_order)
            return [g async for g in groups], rollout

    return asyncio.run(all_groups())
