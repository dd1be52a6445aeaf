"""How a task becomes a graded group:

    1. draw       _draw_tasks     ask the environment for the tasks
    2. open       _open_group     open one episode per response; restore what the journal has of it
    3. generate   (dispatch)      workers generate until a turn ends
    4. grade      _grade_turn     ask the environment about the turn
    5. settle     _settle_turn    an observation opens the next turn (back to 3); a reward finishes the response
    6. hand out   groups          yield every group whose responses are all finished

Whatever happens arrives in one inbox, so that all of this runs in one place, one thing at a time:

    groups()   waits for: its inbox   filled by: the environment (tasks, grades), dispatch (ended turns), a stop, an
                                                 error

Rules: every episode that is opened comes out exactly once, in its group. A group comes out when all its responses are
finished. A reward that could not be determined is missing (None), never zero. What the journal has of a response is not
generated again. A task that the environment cannot produce, or whose prompt leaves no room for a response, is skipped
and counts as drawn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field

import xxhash

from windfall.config import RolloutSection as Options
from windfall.envs.base import EnvHost
from windfall.envs.failures import EnvFailed
from windfall.envs.grade import Graded, grade
from windfall.errors import WindfallError
from windfall.events.log import EventLog
from windfall.ledger.episode import Episode
from windfall.ledger.journal_reader import History, TokenRun
from windfall.ledger.recovery import needed
from windfall.models.text import Text
from windfall.rollout.dispatch import Dispatch
from windfall.rollout.env_failures import OUT_OF_TOKENS, EnvFailures
from windfall.types import Feedback, Group, Response, Sampling, Task, Turn

OPEN_TOGETHER_S = 0.2
"""Seconds to wait for slow tasks before the first groups are opened: placement is better if it knows all the work."""


class Stopped(Exception):
    """The run was asked to stop."""


def seed_of(run_seed: int, task: int, sibling: int) -> int:
    """Every response of a run has its own seed, the same whenever and wherever it is generated."""
    return xxhash.xxh3_64_intdigest(f"{run_seed}/{task}/{sibling}".encode())


@dataclass(slots=True)
class _OpenGroup:
    """A group that is not complete yet."""

    index: int
    rank: int
    """Its place among the requested tasks."""
    task: Task
    size: int
    responses: dict[int, Response] = field(default_factory=dict)
    """Finished responses, by sibling number."""


@dataclass(slots=True, kw_only=True)
class _Round:
    """One call of groups()."""

    size: int
    sampling: Sampling
    in_order: bool
    scope: str
    ranks: dict[int, int]
    """By task: its place among the requested tasks."""
    order: deque[int]
    """Tasks whose groups have not been handed out. Kept up to date only if `in_order`."""
    drawing: dict[int, asyncio.Future[Task]] = field(default_factory=dict)
    """Tasks that the environment was asked for and has not produced yet."""
    live: dict[str, tuple[Episode, _OpenGroup]] = field(default_factory=dict)
    """Open episodes, by response id."""
    grading: set[asyncio.Task[None]] = field(default_factory=set)
    completed: list[_OpenGroup] = field(default_factory=list)
    """Groups that were completed since groups were last handed out."""
    ready: dict[int, Group] = field(default_factory=dict)
    """Complete groups, by task, that have not been handed out yet."""


@dataclass(frozen=True, slots=True)
class _TaskDrawn:
    index: int


@dataclass(frozen=True, slots=True)
class _TurnEnded:
    id: str


@dataclass(frozen=True, slots=True)
class _TurnAnswered:
    episode: Episode
    graded: Graded


_Message = _TaskDrawn | _TurnEnded | _TurnAnswered | BaseException
"""What arrives in the inbox. An exception ends the round."""


class Rollout:
    def __init__(
        self, dispatch: Dispatch, env: EnvHost, text: Text, options: Options, *, seed: int, events: EventLog
    ) -> None:
        self.dispatch, self.env, self.text, self.options = dispatch, env, text, options
        self.context: int | None = None
        """The model's context length in tokens: the limit for a prompt and its response together."""
        self.history: History = {}
        """What the journal has of responses that have not been opened yet."""
        self.sampled_tokens = self.restored_tokens = self.graded_turns = 0
        """Counters since the last reset: tokens sampled in finished responses, tokens restored from the journal, turns
        graded."""
        self.grading_s = 0.0
        """Seconds that grading these turns took in total."""
        self._seed = seed
        self._inbox: asyncio.Queue[_Message] = asyncio.Queue()
        self._stopped = False
        self.failures = EnvFailures(env.name, events)
        dispatch.on_failure = self.interrupt

    def reset_counters(self) -> None:
        """Start counting anew, at the beginning of a step or an evaluation."""
        self.sampled_tokens = self.restored_tokens = self.graded_turns = 0
        self.grading_s = 0.0
        self.failures.reset()

    def load_history(self, history: History, next_task: int) -> None:
        """Use the journal's history, without the tasks of trained steps: those are not requested again."""
        self.history = {id: past for id, past in history.items() if needed(id, next_task)}

    def interrupt(self, error: BaseException | None = None) -> None:
        """Raise the error in groups() at once. Without an error: raise Stopped, now and in every later call."""
        self._stopped |= error is None
        self._inbox.put_nowait(error or Stopped())

    async def groups(
        self, tasks: Sequence[int], *, size: int, sampling: Sampling, in_order: bool = False, scope: str = ""
    ) -> AsyncGenerator[Group]:
        """Yield the groups of these task numbers as they complete; `in_order`: in the order of `tasks`.

        `scope` is a prefix of the response ids that ends with a colon. It is needed if the same task is rolled out more
        than once in a run.
        """
        if self._stopped:
            raise Stopped
        ranks = {index: rank for rank, index in enumerate(tasks)}
        now = _Round(size=size, sampling=sampling, in_order=in_order, scope=scope, ranks=ranks, order=deque(tasks))
        self._inbox = asyncio.Queue()
        self.dispatch.listen(
            lambda id: self._inbox.put_nowait(_TurnEnded(id)),
            lambda id, why: self.interrupt(WindfallError(why, where=f"response {id}")),
        )
        try:
            await self._draw_tasks(tasks, now)
            while True:
                for group in self._hand_out(now):
                    yield group
                if not now.live and not now.drawing:
                    return
                self._handle(await self._inbox.get(), now)
                while not self._inbox.empty():
                    self._handle(self._inbox.get_nowait(), now)
        finally:
            for future in now.drawing.values():
                future.cancel()
            self.dispatch.withdraw(list(now.live))
            self.dispatch.placement.done_with(f"{scope}{index}" for index in tasks)
            for task in now.grading:
                task.cancel()
            await asyncio.gather(*now.grading, return_exceptions=True)

    def _handle(self, message: _Message, now: _Round) -> None:
        match message:
            case BaseException():
                raise message
            case _TaskDrawn(index):
                self._open_group(index, now.drawing.pop(index), now)
            case _TurnEnded(id):
                self._grade_turn(*now.live[id], now)
            case _TurnAnswered(episode, graded):
                self._settle_turn(episode, graded, now)

    def _hand_out(self, now: _Round) -> Iterator[Group]:
        """Yield complete groups; `in_order`: only those before the first incomplete one."""
        for done in sorted(now.completed, key=lambda group: group.rank):
            responses = tuple(done.responses[i] for i in range(now.size))
            now.ready[done.index] = Group(index=done.index, task=done.task, responses=responses)
        now.completed.clear()
        if now.ready and self.dispatch.journal is not None:
            self.dispatch.journal.flush()  # the caller may depend on what is in a group
        while now.ready and (not now.in_order or now.order[0] in now.ready):
            yield now.ready.pop(now.order.popleft() if now.in_order else next(iter(now.ready)))

    # 1. Draw tasks.

    async def _draw_tasks(self, tasks: Sequence[int], now: _Round) -> None:
        """Ask for all tasks, and open the groups of those that arrive within OPEN_TOGETHER_S."""
        inbox = self._inbox
        for index in tasks:
            future = self.env.task(index, self.options.reward_timeout_s)
            if future.done():
                self._open_group(index, future, now)
            else:
                now.drawing[index] = future
        if now.drawing:
            await asyncio.wait(now.drawing.values(), timeout=OPEN_TOGETHER_S)
        for index, future in list(now.drawing.items()):
            if future.done():
                self._open_group(index, now.drawing.pop(index), now)
            else:
                future.add_done_callback(lambda _, index=index: inbox.put_nowait(_TaskDrawn(index)))

    # 2. Open the episodes of a task.

    def _open_group(self, index: int, drawn: asyncio.Future[Task], now: _Round) -> None:
        """Open a group, or skip its task if the environment failed or the prompt does not fit."""
        try:
            task = drawn.result()
            prompt = self.text.prompt(task.prompt)
            self._check_prompt(task, prompt)
        except EnvFailed as e:
            self.failures.skip(index, e)
            now.order.remove(index)
            return
        self.failures.usable()
        group = _OpenGroup(index, now.ranks[index], task, now.size)
        for sibling in range(now.size):
            episode = Episode(
                id=f"{now.scope}{index}/{sibling}", prompt=prompt, seed=seed_of(self._seed, index, sibling),
                max_tokens=self.options.max_tokens, sampling=now.sampling, stop=self.text.stop,
            )  # fmt: skip
            now.live[episode.id] = (episode, group)
            self._open_episode(episode, group, now)

    def _check_prompt(self, task: Task, prompt: tuple[int, ...]) -> None:
        if not prompt:
            raise EnvFailed(f"the prompt of task '{task.id}' is empty", "an empty prompt")
        if self.context and len(prompt) + self.options.max_tokens > self.context:
            raise EnvFailed(
                f"the prompt of task '{task.id}' has {len(prompt)} tokens; with rollout.max_tokens = "
                f"{self.options.max_tokens} that exceeds the model's context of {self.context}",
                "a prompt that is too long",
            )

    def _open_episode(self, episode: Episode, group: _OpenGroup, now: _Round) -> None:
        """Restore what the journal has of the response, then continue from there."""
        finished = self._restore(episode)
        self.restored_tokens += sum(count for version, count in episode.version_runs if version >= 0)
        if finished is not None:
            self._finish(finished, now)
            return
        self.dispatch.open(episode)
        if episode.finish is not None:
            self._grade_turn(episode, group, now)

    def _restore(self, episode: Episode) -> Response | None:
        """Replay the journal's history into the episode. Returns the response if it was finished."""
        finished = None
        for event in self.history.pop(episode.id, ()):
            if isinstance(event, TokenRun):
                new = len(episode.tokens) - event.position
                if new < 0:
                    break  # a file was damaged: what comes after the gap is generated again
                episode.take(len(episode.tokens), event.tokens[new:], event.logprobs[new:], event.version, event.finish)
                finished = None
            elif event.reward is None and event.observation is None:
                continue  # the reward was missing: the environment may be able to grade the turn by now
            else:
                self._record_turn(episode)
                feedback = Feedback(reward=event.reward, observation=event.observation)
                finished = self._apply_feedback(episode, Graded(feedback=feedback, tries=0))
        return finished

    # 4. Grade an ended turn.

    def _grade_turn(self, episode: Episode, group: _OpenGroup, now: _Round) -> None:
        self._record_turn(episode)

        async def ask_environment() -> None:
            o, inbox, loop = self.options, self._inbox, asyncio.get_running_loop()
            began_s = loop.time()
            try:
                graded = await grade(
                    self.env, group.index, group.task, episode.turns, tries=o.reward_tries,
                    timeout_s=o.reward_timeout_s,
                )  # fmt: skip
            except Exception as e:  # fault boundary: the error is raised in groups()
                inbox.put_nowait(e)
                return
            self.graded_turns, self.grading_s = self.graded_turns + 1, self.grading_s + loop.time() - began_s
            inbox.put_nowait(_TurnAnswered(episode, graded))

        task = asyncio.create_task(ask_environment())
        now.grading.add(task)
        task.add_done_callback(now.grading.discard)

    def _record_turn(self, episode: Episode) -> None:
        episode.turns.append(Turn(text=self.text.decode(episode.turn_tokens)))

    # 5. Open the next turn, or finish the response.

    def _settle_turn(self, episode: Episode, graded: Graded, now: _Round) -> None:
        feedback = graded.feedback or Feedback()
        if self.dispatch.journal is not None:
            self.dispatch.journal.write_grade(episode.id, feedback.reward, feedback.observation, graded.error)
        response = self._apply_feedback(episode, graded)
        if response is None:
            self.dispatch.next_turn(episode.id)
            return
        self.dispatch.close(episode.id)
        self._finish(response, now)

    def _apply_feedback(self, episode: Episode, graded: Graded) -> Response | None:
        """Return the finished response, or None if the episode continues with another turn."""
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
        """Finish a response without a reward."""
        self.failures.miss(episode.id, e)
        return episode.close(None)

    def _finish(self, response: Response, now: _Round) -> None:
        """Add a finished response to its group."""
        _, group = now.live.pop(response.id)
        self.sampled_tokens += response.sampled_count
        group.responses[int(response.id.rpartition("/")[2])] = response
        if len(group.responses) == group.size:
            now.completed.append(group)
