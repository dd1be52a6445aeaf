"""From tasks to graded groups: opens episodes, feeds the engine, asks the environment, hands out complete groups.

    tasks ──▶ episodes ──▶ engine.step ──▶ finished turn ──▶ grade ──▶ next turn, or response ──▶ group complete
                  ▲                                             │
                  └────────────── observation ──────────────────┘

Rules: every episode opened comes out exactly once, in its group; a group comes out when all its responses have; a
reward that could not be had is missing (None), never zero. The engine is stepped in a thread of its own, so that a slow
reward is waited for while tokens are being made.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import xxhash

from windfall.config import Rollout as Options
from windfall.engine.base import Engine
from windfall.envs.base import Env
from windfall.envs.grade import Graded, grade
from windfall.events import EventLog
from windfall.rollout.episode import Episode
from windfall.text import Text
from windfall.types import Group, Response, Sampling, Task, Turn


class Stopped(Exception):
    """Somebody asked the run to stop."""


def seed_of(run_seed: int, task: int, sibling: int) -> int:
    """Every response of a run has its own seed, the same whenever and wherever it is made."""
    return xxhash.xxh3_64_intdigest(f"{run_seed}/{task}/{sibling}".encode())


@dataclass(slots=True)
class _Open:
    """A group that is not complete yet."""

    index: int
    task: Task
    responses: dict[int, Response] = field(default_factory=dict)
    size: int = 1


class Rollout:
    def __init__(
        self,
        engine: Engine,
        env: Env,
        text: Text,
        options: Options,
        *,
        seed: int,
        events: EventLog,
        threads: Executor,
        stop: asyncio.Event,
    ) -> None:
        self.engine, self.env, self.text, self.options = engine, env, text, options
        self._seed, self._events, self._threads, self._stop = seed, events, threads, stop
        self.made = self.missing = 0

    async def groups(
        self, tasks: Sequence[int], *, size: int, sampling: Sampling, in_order: bool = False
    ) -> AsyncIterator[Group]:
        """The groups of these task numbers as they complete; `in_order`: in the order of `tasks`."""
        opened, episodes = {}, {}
        grading: dict[asyncio.Task[Graded], tuple[Episode, int]] = {}
        ready: dict[int, Group] = {}
        order = list(tasks)
        try:
            for index in tasks:
                opened[index] = _Open(index, self.env.task(index), size=size)
                for sibling in range(size):
                    episode = self._episode(opened[index].task, index, sibling, sampling)
                    episodes[episode.id] = (episode, index)
                    self.engine.add(episode.request())
            while episodes:
                await self._advance(episodes, grading, opened)
                for index in [i for i, o in opened.items() if len(o.responses) == o.size]:
                    done = opened.pop(index)
                    rows = tuple(done.responses[i] for i in range(size))
                    ready[index] = Group(index=index, task=done.task, responses=rows)
                while ready and (not in_order or order[0] in ready):
                    index = order[0] if in_order else next(iter(ready))
                    order.remove(index)
                    yield ready.pop(index)
        finally:
            for id in episodes:
                self.engine.cancel(id)
            for waiting in grading:
                waiting.cancel()
            await asyncio.gather(*grading, return_exceptions=True)

    async def _advance(self, episodes: dict, grading: dict, opened: dict) -> None:
        """One engine step if there is anything to make, else wait for a reward; then take in what has been graded."""
        if self._stop.is_set():
            raise Stopped
        if len(self.engine):
            loop = asyncio.get_running_loop()
            for chunk in await loop.run_in_executor(self._threads, self.engine.step):
                episode, index = episodes[chunk.id]
                episode.take(chunk)
                self.made += len(chunk.tokens)
                if chunk.finish:
                    episode.turns.append(Turn(text=self.text.decode(episode.turn_tokens)))
                    grading[asyncio.create_task(self._grade(opened[index].task, episode))] = (episode, index)
            await asyncio.sleep(0)  # let rewards that need no waiting finish now
        else:
            stop = asyncio.ensure_future(self._stop.wait())
            await asyncio.wait([*grading, stop], return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if self._stop.is_set():
                raise Stopped
        for task in [t for t in grading if t.done()]:
            episode, index = grading.pop(task)
            response = self._settle(episode, task.result())
            if response is None:
                self.engine.add(episode.request())
            else:
                del episodes[episode.id]
                opened[index].responses[int(episode.id.rpartition("/")[2])] = response

    async def _grade(self, task: Task, episode: Episode) -> Graded:
        o = self.options
        return await grade(self.env, task, episode.turns, tries=o.reward_tries, timeout_s=o.reward_timeout_s)

    def _settle(self, episode: Episode, graded: Graded) -> Response | None:
        """The response, or None when the episode goes on with another turn."""
        feedback = graded.feedback
        if feedback is None:
            self.missing += 1
            self._events.instant("reward_missing", response=episode.id, error=graded.error)
            return episode.close(None)
        if feedback.observation is None:
            return episode.close(feedback.reward)
        episode.turns[-1] = Turn(text=episode.turns[-1].text, observation=feedback.observation)
        cut = episode.finish == "length"
        if cut or not episode.observe(self.text.observation(feedback.observation)):
            # It ran out of tokens before the environment came to a verdict, and nobody else may make one up.
            self.missing += 1
            self._events.instant("reward_missing", response=episode.id, error="out of tokens before the episode ended")
            return episode.close(None)
        return None

    def _episode(self, task: Task, index: int, sibling: int, sampling: Sampling) -> Episode:
        return Episode(
            id=f"{index}/{sibling}", prompt=self.text.prompt(task.prompt), seed=seed_of(self._seed, index, sibling),
            max_tokens=self.options.max_tokens, sampling=sampling, stop=self.text.stop,
        )  # fmt: skip
