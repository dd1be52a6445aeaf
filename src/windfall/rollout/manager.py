"""From tasks to graded groups: opens episodes, hands them to workers, asks the environment, hands out complete groups.

    tasks ──▶ episodes ──▶ dispatch ──▶ finished turn ──▶ grade ──▶ next turn, or response ──▶ group complete
                  ▲                                          │
                  └────────────── observation ───────────────┘

    groups()       waits for: its inbox       filled by: dispatch (a turn ended), a grade, a stop, a failure

Rules: every episode opened comes out exactly once, in its group; a group comes out when all its responses have; a
reward that could not be had is missing (None), never zero. What the journal knows of a response is not made again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from windfall.config import Rollout as Options
from windfall.envs.base import Env
from windfall.envs.grade import Graded, grade
from windfall.errors import WindfallError
from windfall.events import EventLog
from windfall.rollout.dispatch import Dispatch
from windfall.rollout.episode import Episode
from windfall.rollout.journal import Judged, Past, Stretch
from windfall.rollout.recover import wanted
from windfall.text import Text
from windfall.types import Feedback, Group, Response, Sampling, Task, Turn


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


class Rollout:
    def __init__(
        self, dispatch: Dispatch, env: Env, text: Text, options: Options, *, seed: int, events: EventLog
    ) -> None:
        self.dispatch, self.env, self.text, self.options = dispatch, env, text, options
        self.past: Past = {}
        """What the journal knows of responses that have not been opened yet."""
        self.made = self.restored = self.missing = self.graded = 0
        """Tokens of the responses that came out; how many of them the journal had; responses without a reward; turns
        that were graded."""
        self.grading_s = 0.0
        """Of these."""
        self._seed, self._events = seed, events
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._whole: list[_Open] = []
        """Groups that have all their responses, and have not come out yet."""
        self._stopped = False

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
        live: dict[str, tuple[Episode, _Open]] = {}
        grading: set[asyncio.Task[None]] = set()
        ready: dict[int, Group] = {}
        order = deque(tasks)
        self._inbox, self._whole = asyncio.Queue(), []
        self.dispatch.listen(
            lambda id: self._inbox.put_nowait(id),
            lambda id, why: self.interrupt(WindfallError(why, where=f"response {id}")),
        )
        try:
            for rank, index in enumerate(tasks):
                group = _Open(index, rank, self.env.task(index), size)
                for sibling in range(size):
                    episode = self._episode(group.task, index, sibling, sampling, scope)
                    live[episode.id] = (episode, group)
                    self._begin(episode, group, live, grading)
            while True:
                for done in sorted(self._whole, key=lambda group: group.rank):
                    rows = tuple(done.responses[i] for i in range(size))
                    ready[done.index] = Group(index=done.index, task=done.task, responses=rows)
                self._whole.clear()
                if ready and self.dispatch.journal is not None:
                    self.dispatch.journal.flush()  # whoever gets a group may build on it
                while ready and (not in_order or order[0] in ready):
                    yield ready.pop(order.popleft() if in_order else next(iter(ready)))
                if not live:
                    return
                self._take(await self._inbox.get(), live, grading)
                while not self._inbox.empty():
                    self._take(self._inbox.get_nowait(), live, grading)
        finally:
            self.dispatch.withdraw(list(live))
            self.dispatch.giving.done_with(f"{scope}{index}" for index in tasks)
            for task in grading:
                task.cancel()
            await asyncio.gather(*grading, return_exceptions=True)

    def _begin(self, episode: Episode, group: _Open, live: dict, grading: set) -> None:
        """Put in what the journal knows, then go on from there."""
        over = None
        for event in self.past.pop(episode.id, ()):
            if isinstance(event, Stretch):
                new = len(episode.tokens) - event.position
                if new < 0:
                    break  # a file was damaged: what comes after the gap is made again
                episode.take(len(episode.tokens), event.tokens[new:], event.logprobs[new:], event.version, event.finish)
                over = None
            else:
                self._close_turn(episode)
                over = self._settle(episode, _graded(event))
        self.restored += sum(count for version, count in episode.runs if version >= 0)
        if over is not None:
            self._out(over, live)
            return
        self.dispatch.open(episode)
        if episode.finish is not None:
            self._turn(episode, group, grading)

    def _take(self, news: Any, live: dict, grading: set) -> None:
        """A turn that ended (its id), what came of one (with the episode), or the end of it all."""
        if isinstance(news, BaseException):
            raise news
        if isinstance(news, str):
            episode, group = live[news]
            self._turn(episode, group, grading)
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
        self._out(response, live)

    def _out(self, response: Response, live: dict) -> None:
        episode, group = live.pop(response.id)
        self.made += response.made
        group.responses[_sibling(episode)] = response
        if len(group.responses) == group.size:
            self._whole.append(group)

    def _turn(self, episode: Episode, group: _Open, grading: set) -> None:
        self._close_turn(episode)

        async def ask() -> None:
            o, inbox, loop = self.options, self._inbox, asyncio.get_running_loop()
            began_s = loop.time()
            graded = await grade(
                self.env, group.task, episode.turns, tries=o.reward_tries, timeout_s=o.reward_timeout_s
            )
            self.graded, self.grading_s = self.graded + 1, self.grading_s + loop.time() - began_s
            inbox.put_nowait((episode, graded))

        task = asyncio.create_task(ask())
        grading.add(task)
        task.add_done_callback(grading.discard)

    def _close_turn(self, episode: Episode) -> None:
        episode.turns.append(Turn(text=self.text.decode(episode.turn_tokens)))

    def _settle(self, episode: Episode, graded: Graded) -> Response | None:
        """The response, or None when the episode goes on with another turn."""
        feedback = graded.feedback
        if feedback is None:
            return self._missing(episode, graded.error)
        if feedback.observation is None:
            return episode.close(feedback.reward)
        episode.turns[-1] = Turn(text=episode.turns[-1].text, observation=feedback.observation)
        cut = episode.finish == "length"
        if cut or not episode.observe(self.text.observation(feedback.observation)):
            # It ran out of tokens before the environment came to a verdict, and nobody else may make one up.
            return self._missing(episode, "out of tokens before the episode ended")
        return None

    def _missing(self, episode: Episode, error: str) -> Response:
        self.missing += 1
        self._events.instant("reward_missing", response=episode.id, error=error)
        return episode.close(None)

    def _episode(self, task: Task, index: int, sibling: int, sampling: Sampling, scope: str) -> Episode:
        return Episode(
            id=f"{scope}{index}/{sibling}", prompt=self.text.prompt(task.prompt),
            seed=seed_of(self._seed, index, sibling), max_tokens=self.options.max_tokens, sampling=sampling,
            stop=self.text.stop,
        )  # fmt: skip


def _sibling(episode: Episode) -> int:
    return int(episode.id.rpartition("/")[2])


def _graded(event: Judged) -> Graded:
    if event.reward is None and event.observation is None:
        return Graded(feedback=None, tries=0, error=event.error)
    return Graded(feedback=Feedback(reward=event.reward, observation=event.observation), tries=0)
