"""From tasks to graded groups: opens episodes, hands them to workers, asks the environment, hands out complete groups.

    tasks ──▶ episodes ──▶ dispatch ──▶ finished turn ──▶ grade ──▶ next turn, or response ──▶ group complete
                  ▲                                          │
                  └────────────── observation ───────────────┘

    groups()       waits for: its inbox       filled by: the environment (tasks, grades), dispatch, a stop, a failure

Rules: every episode opened comes out exactly once, in its group; a group comes out when all its responses have; a
reward that could not be had is missing (None), never zero. What the journal knows of a response is not made again.
A task that the environment cannot make, or whose prompt leaves no room for a response, is skipped, and counts as drawn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from windfall.config import RolloutSection as Options
from windfall.envs.base import EnvHost
from windfall.envs.failures import EnvFailed
from windfall.envs.grade import Graded, grade
from windfall.errors import WindfallError
from windfall.events.log import EventLog
from windfall.ledger.episode import Episode
from windfall.ledger.journal import Judged, Past, Stretch
from windfall.ledger.recovery import wanted
from windfall.models.text import Text
from windfall.rollout.dispatch import Dispatch
from windfall.rollout.env_failures import OUT_OF_TOKENS, EnvFailures
from windfall.types import Feedback, Group, Response, Sampling, Task, Turn

TOGETHER_S = 0.2
"""Tasks are opened together, as work is given out better if all of it is known. Slow ones are waited for this long."""


class Stopped(Exception):
    """Somebody asked the run to stop."""


def seed_of(run_seed: int, task: int, sibling: int) -> int:
    """Every response of a run has its own seed, the same whenever and wherever it is made."""
    return xxhash.xxh3_64_intdigest(f"{run_seed}/{task}/{sibling}".encode())


@dataclass(slots=True)
class _Open:
    """A group that is not complete yet."""

    index: int
    rank: int
    """Where it stands among the tasks that were asked for."""
    task: Task
    size: int
    responses: dict[int, Response] = field(default_factory=dict)


@dataclass(slots=True)
class _Round:
    """One call of groups()."""

    size: int
    sampling: Sampling
    scope: str
    order: deque[int]
    """Tasks whose groups have not come out yet."""
    drawing: dict[int, asyncio.Future[Task]] = field(default_factory=dict)
    """Asked for, by task number."""
    ranks: dict[int, int] = field(default_factory=dict)
    live: dict[str, tuple[Episode, _Open]] = field(default_factory=dict)
    grading: set[asyncio.Task[None]] = field(default_factory=set)


class Rollout:
    def __init__(
        self, dispatch: Dispatch, env: EnvHost, text: Text, options: Options, *, seed: int, events: EventLog
    ) -> None:
        self.dispatch, self.env, self.text, self.options = dispatch, env, text, options
        self.context: int | None = None
        """Most tokens of prompt and response together that the model takes."""
        self.past: Past = {}
        """What the journal knows of responses that have not been opened yet."""
        self.made = self.restored = self.graded = 0
        """Tokens of the responses that came out; how many of them the journal had; turns that were graded."""
        self.grading_s = 0.0
        """Of these."""
        self._seed, self._events = seed, events
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._whole: list[_Open] = []
        """Groups that have all their responses, and have not come out yet."""
        self._stopped = False
        self.failures = EnvFailures(env.name, events)
        dispatch.on_failure = self.interrupt

    def reset_counters(self) -> None:
        """A step begins."""
        self.made = self.restored = self.graded = 0
        self.grading_s = 0.0
        self.failures.reset()

    def remember(self, past: Past, next_task: int) -> None:
        """What the journal knows, less the tasks of steps that are trained: nobody will ask for those."""
        self.past = {id: said for id, said in past.items() if wanted(id, next_task)}

    def interrupt(self, error: BaseException | None = None) -> None:
        """Whoever waits for groups gets this error at once; none: Stopped, and so does everyone after."""
        self._stopped |= error is None
        self._inbox.put_nowait(error or Stopped())

    async def groups(
        self, tasks: Sequence[int], *, size: int, sampling: Sampling, in_order: bool = False, scope: str = ""
    ) -> AsyncGenerator[Group]:
        """The groups of these task numbers as they complete; `in_order`: in the order of `tasks`. `scope` begins the
        ids and ends with a colon, where the same task is rolled out more than once in a run."""
        if self._stopped:
            raise Stopped
        now = _Round(size, sampling, scope, deque(tasks), ranks={index: rank for rank, index in enumerate(tasks)})
        ready: dict[int, Group] = {}
        self._inbox, self._whole = asyncio.Queue(), []
        self.dispatch.listen(
            lambda id: self._inbox.put_nowait(id),
            lambda id, why: self.interrupt(WindfallError(why, where=f"response {id}")),
        )
        try:
            await self._draw(tasks, now)
            while True:
                for done in sorted(self._whole, key=lambda group: group.rank):
                    rows = tuple(done.responses[i] for i in range(size))
                    ready[done.index] = Group(index=done.index, task=done.task, responses=rows)
                self._whole.clear()
                if ready and self.dispatch.journal is not None:
                    self.dispatch.journal.flush()  # whoever gets a group may build on it
                while ready and (not in_order or now.order[0] in ready):
                    yield ready.pop(now.order.popleft() if in_order else next(iter(ready)))
                if not now.live and not now.drawing:
                    return
                self._take(await self._inbox.get(), now)
                while not self._inbox.empty():
                    self._take(self._inbox.get_nowait(), now)
        finally:
            for future in now.drawing.values():
                future.cancel()
            self.dispatch.withdraw(list(now.live))
            self.dispatch.placement.done_with(f"{scope}{index}" for index in tasks)
            for task in now.grading:
                task.cancel()
            await asyncio.gather(*now.grading, return_exceptions=True)

    # tasks

    async def _draw(self, tasks: Sequence[int], now: _Round) -> None:
        """Ask for all tasks, and open those that come soon."""
        inbox = self._inbox
        for index in tasks:
            future = self.env.task(index, self.options.reward_timeout_s)
            if future.done():
                self._drawn(index, future, now)
            else:
                now.drawing[index] = future
        if now.drawing:
            await asyncio.wait(now.drawing.values(), timeout=TOGETHER_S)
        for index, future in list(now.drawing.items()):
            if future.done():
                self._drawn(index, now.drawing.pop(index), now)
            else:
                future.add_done_callback(lambda _, index=index: inbox.put_nowait(index))

    def _drawn(self, index: int, future: asyncio.Future[Task], now: _Round) -> None:
        """A task was made, or was not."""
        try:
            task = future.result()
            prompt = self.text.prompt(task.prompt)
            if not prompt:
                raise EnvFailed(f"the prompt of task '{task.id}' is empty", "an empty prompt")
            if self.context and len(prompt) + self.options.max_tokens > self.context:
                raise EnvFailed(
                    f"the prompt of task '{task.id}' has {len(prompt)} tokens; with rollout.max_tokens = "
                    f"{self.options.max_tokens} that exceeds the model's context of {self.context}",
                    "a prompt that is too long",
                )
        except EnvFailed as e:
            self.failures.skip(index, e)
            now.order.remove(index)
            return
        self.failures.usable()
        group = _Open(index, now.ranks[index], task, now.size)
        for sibling in range(now.size):
            episode = self._episode(prompt, index, sibling, now)
            now.live[episode.id] = (episode, group)
            self._begin(episode, group, now)

    # responses

    def _begin(self, episode: Episode, group: _Open, now: _Round) -> None:
        """Put in what the journal knows, then go on from there."""
        over = None
        for event in self.past.pop(episode.id, ()):
            if isinstance(event, Stretch):
                new = len(episode.tokens) - event.position
                if new < 0:
                    break  # a file was damaged: what comes after the gap is made again
                episode.take(len(episode.tokens), event.tokens[new:], event.logprobs[new:], event.version, event.finish)
                over = None
            elif event.reward is None and event.observation is None:
                continue  # the reward was missing: the environment may be able to say by now
            else:
                self._close_turn(episode)
                over = self._settle(episode, _graded(event))
        self.restored += sum(count for version, count in episode.runs if version >= 0)
        if over is not None:
            self._out(over, now)
            return
        self.dispatch.open(episode)
        if episode.finish is not None:
            self._turn(episode, group, now)

    def _take(self, news: Any, now: _Round) -> None:
        """A task that was made (its number), a turn that ended (its id), what came of one (with the episode), or an
        error that ends it all."""
        if isinstance(news, BaseException):
            raise news
        if isinstance(news, int):
            self._drawn(news, now.drawing.pop(news), now)
            return
        if isinstance(news, str):
            self._turn(*now.live[news], now)
            return
        episode, graded = news
        feedback = graded.feedback or Feedback()
        if self.dispatch.journal is not None:
            self.dispatch.journal.judged(episode.id, feedback.reward, feedback.observation, graded.error)
        response = self._settle(episode, graded)
        if response is None:
            self.dispatch.go_on(episode.id)
            return
        self.dispatch.close(episode.id)
        self._out(response, now)

    def _out(self, response: Response, now: _Round) -> None:
        episode, group = now.live.pop(response.id)
        self.made += response.made
        group.responses[_sibling(episode)] = response
        if len(group.responses) == group.size:
            self._whole.append(group)

    def _turn(self, episode: Episode, group: _Open, now: _Round) -> None:
        self._close_turn(episode)

        async def ask() -> None:
            o, inbox, loop = self.options, self._inbox, asyncio.get_running_loop()
            began_s = loop.time()
            try:
                graded = await grade(
                    self.env, group.index, group.task, episode.turns, tries=o.reward_tries,
                    timeout_s=o.reward_timeout_s,
                )  # fmt: skip
            except Exception as e:  # fault boundary: whoever waits for groups must hear of it
                inbox.put_nowait(e)
                return
            self.graded, self.grading_s = self.graded + 1, self.grading_s + loop.time() - began_s
            inbox.put_nowait((episode, graded))

        task = asyncio.create_task(ask())
        now.grading.add(task)
        task.add_done_callback(now.grading.discard)

    def _close_turn(self, episode: Episode) -> None:
        episode.turns.append(Turn(text=self.text.decode(episode.turn_tokens)))

    def _settle(self, episode: Episode, graded: Graded) -> Response | None:
        """The response, or None when the episode goes on with another turn."""
        feedback = graded.feedback
        if feedback is None:
            return self._missing(episode, EnvFailed(graded.error, graded.cause, graded.traceback))
        if feedback.observation is None:
            return episode.close(feedback.reward)
        episode.turns[-1] = Turn(text=episode.turns[-1].text, observation=feedback.observation)
        cut = episode.finish == "length"
        if not cut and episode.observe(self.text.observation(feedback.observation)):
            return None
        if feedback.reward is not None:
            return episode.close(feedback.reward)
        return self._missing(episode, OUT_OF_TOKENS)

    def _missing(self, episode: Episode, e: EnvFailed) -> Response:
        self.failures.miss(episode.id, e)
        return episode.close(None)

    def _episode(self, prompt: tuple[int, ...], index: int, sibling: int, now: _Round) -> Episode:
        return Episode(
            id=f"{now.scope}{index}/{sibling}", prompt=prompt, seed=seed_of(self._seed, index, sibling),
            max_tokens=self.options.max_tokens, sampling=now.sampling, stop=self.text.stop,
        )  # fmt: skip


def _sibling(episode: Episode) -> int:
    return int(episode.id.rpartition("/")[2])


def _graded(event: Judged) -> Graded:
    return Graded(feedback=Feedback(reward=event.reward, observation=event.observation), tries=0)
