"""How a task becomes a graded group:

    1. draw       open            ask the environment for the tasks
    2. open       _open_group     open one episode per response; restore its tokens from the journal
    3. generate   (dispatch)      workers generate until a turn ends
    4. grade      _grade_turn     ask the environment about the turn
    5. settle     _settle_turn    an observation opens the next turn (back to 3); a reward finishes the response
    6. hand out   _hand_out       pass on every group whose responses are all finished

A Stream lives as long as its owner wants groups: tasks are opened at any time, and groups are handed out as they
complete. Every event arrives in one inbox, as a function to call, so that all of this runs in one place, one event at a
time:

    Stream.run()   waits for: its inbox   filled by: the environment (tasks, grades), dispatch (ended turns), a stop,
                                                     an error

Rules: every episode that is opened is handed out exactly once, in its group, or dropped because it is too old. A group
is handed out when all its responses are finished or dropped. A reward that could not be determined is missing (None),
never zero. A response that runs out of tokens has the reward that its environment gives to what it has, or else
`rollout.out_of_tokens`. Tokens that are in the journal are not generated again. A task that the environment cannot
produce, or whose prompt leaves no room for a response, is skipped and counts as drawn.

Roles: a response has one conversation for each role that speaks in it, and each is an episode (a segment of the
response). The first one begins with the task's prompt, every other one with the first observation for its role. One
role speaks at a time; the episodes of the others wait, as during grading. `rollout.max_tokens` limits each
conversation, with all observations in it, also the one that begins it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import xxhash

from windfall.controller.ledger.episode import Episode, segment_id, segment_seed, smallest
from windfall.controller.ledger.journal_format import History, TokenRun, TurnGraded
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.rollout.grading import OUT_OF_TOKENS, EnvFailures, Grader, Grading
from windfall.controller.rollout.stop_strings import StopStrings
from windfall.envs.base import EnvHost
from windfall.envs.failures import EnvFailed
from windfall.envs.grade import Graded
from windfall.errors import WindfallError
from windfall.events.log import EventLog
from windfall.models.text import Text
from windfall.recipe.sections import Recipe
from windfall.types import Feedback, Group, Prompt, Response, Sampling, Task, Turn, policy_of

STOP_POLL_S = 0.05
"""Least seconds between looks for stop strings. A worker generates for up to this time after one."""


class Stopped(Exception):
    """The run was asked to stop."""


@dataclass(slots=True)
class OpenGroup:
    """A group of a stream that is not complete yet."""

    index: int
    task: Task
    size: int
    responses: dict[int, Response] = field(default_factory=dict)
    """Finished responses, by sibling number."""
    dropped: int = 0
    """Responses that are too old."""

    @property
    def complete(self) -> bool:
        return len(self.responses) + self.dropped == self.size


@dataclass(slots=True)
class OpenResponse:
    """A response that is being generated."""

    id: str
    current: Episode
    """The conversation of the role that speaks, or that spoke last."""
    episodes: dict[str, Episode]
    """By role, in the order in which their conversations began."""
    turns: list[Turn] = field(default_factory=list)
    """Those of all roles."""

    @property
    def ids(self) -> list[str]:
        """Those of its episodes."""
        return [episode.id for episode in self.episodes.values()]

    def close(self, reward: float | None, rewards: Mapping[str, float] | None = None) -> Response:
        """The finished response, with a segment for each role."""
        roles = [turn.role for turn in self.turns]
        first, *more = (episode.close(reward, roles.count(role)) for role, episode in self.episodes.items())
        named = tuple((role, float(value)) for role, value in (rewards or {}).items())
        return replace(first, more=tuple(more), turns=len(self.turns), rewards=named)


def seed_of(run_seed: int, task: int, sibling: int) -> int:
    """Every response of a run has its own seed, the same whenever and wherever it is generated."""
    return xxhash.xxh3_64_intdigest(f"{run_seed}/{task}/{sibling}".encode())


class Rollout:
    """What all streams of a run share: the environment, the text, the journal's history, counters, failures."""

    def __init__(
        self,
        dispatch: Dispatch,
        env: EnvHost,
        texts: Mapping[str, Text],
        recipe: Recipe,
        *,
        seed: int,
        events: EventLog,
    ) -> None:
        """`texts`: by policy."""
        names = recipe.names()
        self.dispatch = dispatch
        self.env = env
        self.texts = texts
        self.lead = names[0]
        """The role that begins if a task names none."""
        self.trained = set(filter(recipe.is_trained, names))
        self.options = recipe.rollout
        self.policy_options = {name: recipe.of(name).rollout for name in names}
        """The same section as each policy sees it."""
        self.seed = seed
        self.contexts: dict[str, int | None] = {}
        """By policy: its model's context length in tokens, the limit for a prompt and its response together."""
        self.history: History = {}
        """The journal's history of responses that have not been opened yet."""
        self.sampled_tokens = self.restored_tokens = 0
        """Tokens sampled in finished responses since the last reset, and how many of them the journal had."""
        self.grading = Grading(lambda: asdict(env.load()))
        self.sessions: Sessions | None = None
        """What opens the sessions of agents; None if the environment answers turns itself."""
        self.streams: set[Stream] = set()
        self.on_finished: Callable[[Task, Response], None] = lambda task, response: None
        """Called with every finished response of training."""
        self.stopped = False
        self.failures = EnvFailures(env.name, events)
        self.grader = Grader(env, self.options, self.grading, self.failures)
        dispatch.on_failure = self.interrupt

    def sampling(self, policy: str) -> Sampling:
        """How training samples the tokens of this policy."""
        return self.policy_options[policy].sampling()

    def reset_counters(self) -> None:
        """Start counting anew, at the beginning of a step or an evaluation."""
        self.sampled_tokens = self.restored_tokens = 0
        self.grading.reset()
        self.failures.reset()

    def forget_history(self, needed: Callable[[int], bool]) -> None:
        """Keep the journal's history of tasks that are still needed. Ids of an evaluation have a scope, and stay."""
        self.history = {id: past for id, past in self.history.items() if ":" in id or needed(int(id.partition("/")[0]))}

    def interrupt(self, error: BaseException | None = None, scope: str | None = None) -> None:
        """Raise the error at once in every stream, or in those of this scope. Without an error: raise Stopped, also in
        every later stream."""
        self.stopped |= error is None
        for stream in [s for s in self.streams if scope in (None, s.scope)]:
            stream.inbox.put_nowait(error or Stopped())

    def stream(self, **options: Any) -> Stream:
        """A new stream with these options of Stream."""
        if self.sessions is not None:
            return self.sessions.stream(self, **options)
        return Stream(self, **options)

    async def groups(self, tasks: Sequence[int], **options: Any) -> AsyncGenerator[Group]:
        """Yield the groups of these task numbers as they complete. `options`: those of Stream."""
        arrived: asyncio.Queue[Group | int | BaseException] = asyncio.Queue()
        stream = self.stream(on_group=arrived.put_nowait, on_skipped=arrived.put_nowait, **options)
        running = asyncio.create_task(stream.run())

        def forward_error(ended: asyncio.Task[None]) -> None:
            if not ended.cancelled() and (error := ended.exception()) is not None:
                arrived.put_nowait(error)

        running.add_done_callback(forward_error)
        try:
            stream.open(tasks)
            for _ in tasks:
                match await arrived.get():
                    case Group() as group:
                        yield group
                    case BaseException() as error:
                        raise error
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


class Sessions(Protocol):
    """Responses that a session makes and not one episode. controller.gateway.agents.AgentRuns implements it."""

    def stream(self, rollout: Rollout, **options: Any) -> Stream: ...


class Stream:
    def __init__(
        self,
        rollout: Rollout,
        *,
        size: int,
        sampling: Callable[[str], Sampling],
        on_group: Callable[[Group], None],
        on_skipped: Callable[[int], None],
        on_too_old: Callable[[int, int], None] = lambda index, tokens: None,
        is_wanted: Callable[[int, Task], bool] = lambda index, task: True,
        scope: str = "",
        versions: Mapping[str, int] | None = None,
        counted: bool = True,
        restored_only: bool = False,
    ) -> None:
        """`size`: responses per task. `sampling`: by policy. `on_group`: called with every complete group.
        `on_skipped`: called with every task that the environment cannot produce. `on_too_old`: called for every
        response that `expire` drops, with its task and its number of sampled tokens. `is_wanted`: called with every
        task that was drawn; if it returns False, the task is forgotten. `scope`: a prefix of the response ids that
        ends with a colon, needed if the same task is rolled out more than once in a run. `versions`: by
        policy, the version that all its tokens must come from; those of other policies come from any version in the
        version window. `counted`: tokens, turns and failures count in the totals of a step; those of an evaluation do
        not. `restored_only`: drop the responses that the journal does not have whole."""
        self._rollout = rollout
        self._dispatch = rollout.dispatch
        self._size = size
        self._sampling = sampling
        self._on_group = on_group
        self._on_skipped = on_skipped
        self._on_too_old = on_too_old
        self._is_wanted = is_wanted
        self.scope = scope
        self._versions = versions or {}
        self._counted = counted
        self._restored_only = restored_only
        self._oldest: Mapping[str, int] = {}
        """By policy: tokens of an older version are too old."""
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        """Functions to call, an exception that ends the stream, and messages of a subclass."""
        self._drawing: dict[int, asyncio.Future[Task]] = {}
        """Tasks that were requested from the environment and are not open yet."""
        self._live: dict[str, tuple[Any, OpenGroup]] = {}
        """Open responses by id: an OpenResponse, or what a subclass opens for them."""
        self._restored: dict[str, int] = {}
        """By open response: number of its tokens that came from the journal."""
        self._background: set[asyncio.Task[None]] = set()
        """Calls to the environment that are in progress."""
        self._completed: list[OpenGroup] = []
        """Groups that were completed since groups were last handed out."""
        self._ended = False
        self._stops = {
            policy: StopStrings(rollout.options.stop, partial(text.decode, special=True))
            for policy, text in rollout.texts.items()
            if rollout.options.stop
        }
        """By policy."""
        rollout.streams.add(self)

    async def run(self) -> None:
        """Handle what arrives, until canceled. Raises the error that ends the stream."""
        try:
            if self._rollout.stopped:
                raise Stopped
            if self._stops:
                self._in_background(self._watch_stops())
            while True:
                self._hand_out()
                self._handle(await self.inbox.get())
                while not self.inbox.empty():
                    self._handle(self.inbox.get_nowait())
        finally:
            self._ended = True
            self._rollout.streams.discard(self)
            for future in self._drawing.values():
                future.cancel()
            self._withdraw(list(self._live))
            for _, group in self._live.values():
                self._forget(group.index)
            self._live.clear()
            for task in self._background:
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)

    def _handle(self, message: Callable[[], None] | BaseException) -> None:
        if isinstance(message, BaseException):
            raise message
        message()

    # What happens to a response (dispatch.ResponseOwner).

    def turn_ended(self, id: str) -> None:
        self.inbox.put_nowait(partial(self._grade_turn, id.partition("+")[0]))

    def rejected(self, id: str, why: str) -> None:
        self.inbox.put_nowait(WindfallError(why, where=f"response {id}"))

    def _hand_out(self) -> None:
        completed, self._completed = self._completed, []
        if completed and self._dispatch.journal is not None:
            self._dispatch.journal.flush()  # the owner may depend on what is in a group
        for group in sorted(completed, key=lambda g: g.index):
            responses = tuple(response for _, response in sorted(group.responses.items()))
            self._on_group(Group(index=group.index, task=group.task, responses=responses))

    def _forget(self, index: int) -> None:
        self._dispatch.group_done(f"{self.scope}{index}", self._size)

    # Responses that became too old.

    def expire(self, oldest: Mapping[str, int]) -> None:
        """Drop the open responses that no policy can be trained on any more, because each one that has tokens in them
        has one of a version that is older than `oldest`. This also holds for what the journal has of responses that are
        opened later. Policies that `oldest` does not name are not trained."""
        self._oldest = oldest
        self._drop_too_old(list(self._live))

    def _drop_too_old(self, ids: Sequence[str]) -> None:
        self.drop([id for id in ids if self._is_too_old(self._oldest_versions(id))])

    def _is_too_old(self, versions: Mapping[str, int]) -> bool:
        trained = [(version, self._oldest[policy]) for policy, version in versions.items() if policy in self._oldest]
        return bool(trained) and all(version < oldest for version, oldest in trained)

    # What a subclass with other kinds of responses replaces.

    def _oldest_versions(self, id: str) -> dict[str, int]:
        """By policy: the oldest version among its tokens."""
        response, _ = self._live[id]
        oldest = self._dispatch.ledger.oldest_version
        return smallest((episode.policy, oldest(episode.id)) for episode in response.episodes.values())

    def _sampled(self, id: str) -> int:
        response, _ = self._live[id]
        return sum(map(self._dispatch.ledger.sampled, response.ids))

    def _has_begun(self, id: str, policy: str) -> bool:
        response, _ = self._live[id]
        return any(
            episode.tokens or self._dispatch.ledger.entries[episode.id].state != "queued"
            for episode in response.episodes.values()
            if episode.policy == policy
        )

    def _withdraw(self, ids: Sequence[str]) -> None:
        self._end_sessions(*ids)
        self._dispatch.withdraw([segment for id in ids for segment in self._live[id][0].ids])

    def not_begun(self, policy: str = "") -> list[int]:
        """The open tasks of which this policy has generated nothing, and nothing is assigned to a worker yet."""
        begun = {id.rpartition("/")[0] for id in self._rollout.history}  # the journal has a part of it
        open_groups = {group.index: group for _, group in self._live.values()}
        for id, (_, group) in self._live.items():
            spoke = any(policy_of(s.role) == policy for r in group.responses.values() for s in r.segments)
            if spoke or group.dropped or self._has_begun(id, policy):
                begun.add(f"{self.scope}{group.index}")
        return [index for index in (*self._drawing, *open_groups) if f"{self.scope}{index}" not in begun]

    def drop(self, ids: Sequence[str]) -> None:
        sampled = {id: self._sampled(id) for id in ids}
        self._withdraw(ids)
        for id in ids:
            group = self._forget_response(id)
            group.dropped += 1
            self._rollout.restored_tokens += self._restored.pop(id, 0) * self._counted
            self._on_too_old(group.index, sampled[id])
            self._complete(group)
        self._wake()

    def _forget_response(self, id: str) -> OpenGroup:
        response, group = self._live.pop(id)
        if self._stops:
            for episode in response.episodes.values():
                self._stops[episode.policy].forget(episode.id)
        return group

    def _wake(self) -> None:
        """Have run() hand out groups that were completed from outside, for example from the journal."""
        if self._completed:
            self.inbox.put_nowait(lambda: None)

    # 1. Draw tasks.

    def open(self, tasks: Sequence[int]) -> None:
        """Ask for these tasks, and open their groups as they arrive. Does nothing once the stream has ended: its owner
        learns that when it next looks for groups."""
        if self._ended:
            return
        for index in tasks:
            future = self._rollout.env.task(index, self._rollout.options.reward_timeout_s)
            if future.done():
                self._open_group(index, future)
            else:
                self._drawing[index] = future
                future.add_done_callback(partial(self._task_drawn, index))
        self._wake()

    def _task_drawn(self, index: int, drawn: asyncio.Future[Task]) -> None:
        if not self._ended:
            self.inbox.put_nowait(partial(self._open_group, index, drawn))

    def _in_background(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # 2. Open the episodes of a task.

    def _open_group(self, index: int, drawn: asyncio.Future[Task]) -> None:
        """Open a group, or skip its task if the environment failed or the prompt does not fit."""
        self._drawing.pop(index, None)
        try:
            task = drawn.result()
            prompt = self._prompt(task)
        except EnvFailed as e:
            self._rollout.failures.skip(index, e, counted=self._counted)
            self._on_skipped(index)
            return
        self._rollout.failures.usable()
        if not self._is_wanted(index, task):
            return
        group = OpenGroup(index, task, self._size)
        for sibling in range(self._size):
            self._open_response(f"{self.scope}{index}/{sibling}", group, prompt)
        live = [id for n in range(self._size) if (id := f"{self.scope}{index}/{n}") in self._live]
        if self._restored_only:
            self.drop(live)
        else:
            self._drop_too_old(live)

    def _open_response(self, id: str, group: OpenGroup, prompt: tuple[int, ...]) -> None:
        """Restore the response from the journal, then continue from there."""
        role = group.task.role or self._rollout.lead
        first = self._episode(id, role, 0, prompt, self._rollout.policy_options[policy_of(role)].max_tokens)
        response = OpenResponse(id=id, current=first, episodes={role: first})
        self._live[id] = (response, group)
        finished = self._restore(response)
        runs = [run for episode in response.episodes.values() for run in episode.version_runs]
        self._restored[id] = sum(count for version, count in runs if version >= 0)
        if finished is not None:
            self._finish(finished)
            return
        for episode in response.episodes.values():
            self._dispatch.open(episode, self)
        if response.current.finish is not None:
            self._grade_turn(id)

    def _episode(self, id: str, role: str, segment: int, prompt: tuple[int, ...], max_tokens: int) -> Episode:
        """The conversation of a role. `segment`: its number within the response."""
        policy = policy_of(role)
        return Episode(
            id=segment_id(id, segment),
            prompt=prompt,
            seed=segment_seed(self._seed(id), segment),
            max_tokens=max_tokens,
            sampling=self._sampling(policy),
            stop=self._rollout.texts[policy].stop,
            role=role,
            version=self._versions.get(policy),
            max_turn=self._rollout.policy_options[policy].turn_tokens,
        )

    def _seed(self, id: str) -> int:
        index, _, sibling = id.rpartition(":")[2].partition("/")
        return seed_of(self._rollout.seed, int(index), int(sibling))

    def _prompt(self, task: Task) -> tuple[int, ...]:
        """The ids of the prompt. Raises EnvFailed if it cannot be used."""
        role = task.role or self._rollout.lead
        prompt, policy = self._opening(role, task.prompt, f"the prompt of task '{task.id}'"), policy_of(role)
        context, max_tokens = self._rollout.contexts.get(policy), self._rollout.policy_options[policy].max_tokens
        if context and len(prompt) + max_tokens > context:
            raise EnvFailed(
                f"the prompt of task '{task.id}' has {len(prompt)} tokens; with rollout.max_tokens = {max_tokens} that "
                f"exceeds the model's context of {context}",
                "a prompt that is too long",
            )
        return prompt

    def _opening(self, role: str, prompt: Prompt, what: str) -> tuple[int, ...]:
        """The ids that begin the conversation of a role. Raises EnvFailed if they are none, or no policy has it."""
        if policy_of(role) not in self._rollout.texts:
            known = ", ".join(filter(None, self._rollout.texts)) or "the recipe has no [policies]"
            why = f"{what} cannot be used: no policy speaks in the role {role!r} ({known})"
            raise EnvFailed(why, "an unknown role", final=True)
        if not (ids := self._rollout.texts[policy_of(role)].prompt(prompt)):
            raise EnvFailed(f"{what} is empty", "an empty prompt", final=True)
        return ids

    def _restore(self, response: OpenResponse) -> Response | None:
        """Replay the journal's history of all conversations. Returns the response if it was finished."""
        finished, history = None, self._rollout.history
        past: dict[str, deque[Any]] = {}
        while True:
            episode = response.current
            events = past.setdefault(episode.id, deque(history.pop(episode.id, ())))
            if not events:
                break
            event = events.popleft()
            if isinstance(event, TokenRun):
                if self._stops and episode.finish is not None:
                    continue  # generated after a stop string, and discarded
                new = len(episode.tokens) - event.position
                if new < 0:
                    break  # a file was damaged: what comes after the gap is generated again
                episode.take(len(episode.tokens), event.tokens[new:], event.logprobs[new:], event.version, event.finish)
                if event.experts is not None:
                    episode.take_experts(event.experts.start, event.experts.data, event.experts.width)
                if end := self._turn_end(episode, whole=True):
                    episode.cut(end)
                    episode.finish = "stop"
                finished = None
            elif episode.finish is None or not isinstance(event, TurnGraded):
                break  # a file was damaged: the turn that was graded is incomplete
            elif event.reward is None and event.observation is None and not event.rewards:
                continue  # the reward was missing: the environment may be able to grade the turn by now
            else:
                self._record_turn(response)
                feedback = Feedback(
                    reward=event.reward, observation=event.observation, role=event.role, rewards=dict(event.rewards)
                )
                finished = self._apply_feedback(response, Graded(feedback=feedback, tries=0))
                if finished is not None:
                    break
        segment = len(response.episodes)
        while history.pop(segment_id(response.id, segment), None):  # a damaged part led to them
            segment += 1
        return finished

    # 3. End a turn at a stop string.

    async def _watch_stops(self) -> None:
        loop, spent_s = asyncio.get_running_loop(), 0.0
        try:
            while True:
                await asyncio.sleep(max(STOP_POLL_S, 10 * spent_s))  # with many responses: a tenth of the time
                began_s = loop.time()
                for id, (response, _) in self._live.items():
                    if response.current.finish is None and self._cut_at_stop(response.current):
                        self.turn_ended(id)
                spent_s = loop.time() - began_s
        except Exception as e:  # fault boundary: the error is raised in run()
            self.inbox.put_nowait(e)

    def _cut_at_stop(self, episode: Episode, *, whole: bool = False) -> bool:
        end = self._turn_end(episode, whole=whole)
        if end is not None:
            self._dispatch.cut(episode.id, end)
        return end is not None

    def _turn_end(self, episode: Episode, *, whole: bool) -> int | None:
        """Where a stop string ends the turn."""
        if not self._stops:
            return None
        return self._stops[episode.policy].end(episode.id, episode.tokens, episode.turn_start, whole=whole)

    # 4. Grade an ended turn.

    def _grade_turn(self, id: str) -> None:
        if id not in self._live:  # it was dropped meanwhile
            return
        response, group = self._live[id]
        self._cut_at_stop(response.current, whole=True)
        self._record_turn(response)

        async def ask_environment() -> None:
            try:
                graded = await self._rollout.grader.grade(
                    id, group.index, group.task, response.turns, counted=self._counted
                )
            except Exception as e:  # fault boundary: the error is raised in run()
                self.inbox.put_nowait(e)
            else:
                self.inbox.put_nowait(partial(self._settle_turn, response, graded))

        self._in_background(ask_environment())

    def _record_turn(self, response: OpenResponse) -> None:
        episode = response.current
        tokens = episode.turn_tokens
        ids = tuple(tokens) if self._rollout.env.needs_tokens else ()
        text = self._rollout.texts[episode.policy].decode(tokens)
        response.turns.append(Turn(text=text, tokens=ids, role=episode.role))

    # 5. Open the next turn, or finish the response.

    def _settle_turn(self, response: OpenResponse, graded: Graded) -> None:
        if response.id not in self._live:  # it was dropped meanwhile
            return
        feedback = graded.feedback or Feedback()
        error = "" if graded.feedback or graded.failure is None else graded.failure.error
        spoke = response.current
        finished = self._apply_feedback(response, graded)
        if self._dispatch.journal is not None:
            # The reward to train on: out of tokens, a response has one that the environment did not give.
            reward = feedback.reward if finished is None else finished.reward
            record = TurnGraded(
                id=spoke.id, reward=reward, observation=feedback.observation, error=error, role=feedback.role,
                rewards=() if finished is None else finished.rewards,
            )  # fmt: skip
            self._dispatch.journal.write_grade(record)
        if finished is not None:
            for id in response.ids:
                self._dispatch.close(id)
            self._finish(finished)
        elif response.current.id in self._dispatch.ledger.entries:
            self._dispatch.next_turn(response.current.id)
        else:
            self._dispatch.open(response.current, self)

    def _apply_feedback(self, response: OpenResponse, graded: Graded) -> Response | None:
        """Return the finished response, or None if it continues with another turn."""
        feedback = graded.feedback
        if feedback is None:
            assert graded.failure is not None
            return self._missing(response, graded.failure)
        if feedback.observation is None:
            return replace(response.close(feedback.reward, feedback.rewards), scores=feedback.scores)
        said = response.turns[-1]
        response.turns[-1] = Turn(text=said.text, observation=feedback.observation, role=said.role)
        failure = OUT_OF_TOKENS
        try:
            if self._continue(response, feedback.role or said.role, feedback.observation):
                return None
        except EnvFailed as e:
            failure = e
        self._end_sessions(response.id)
        worth = feedback.reward if feedback.reward is not None else self._rollout.options.out_of_tokens
        if failure is not OUT_OF_TOKENS or (worth == "missing" and not feedback.rewards):
            return self._missing(response, failure)
        return response.close(None if worth == "missing" else float(worth), feedback.rewards)

    def _continue(self, response: OpenResponse, role: str, observation: str) -> bool:
        """Give an observation to the role that speaks next. False: its conversation has no room for an answer. Raises
        EnvFailed if it cannot be asked."""
        if (episode := response.episodes.get(role)) is not None:
            response.current, codec = episode, self._rollout.texts[episode.policy]
            return episode.observe(codec.observation(observation, last=episode.tokens[-1]))
        prompt = self._opening(role, observation, f"the first observation for the role {role!r}")
        room = self._rollout.policy_options[policy_of(role)].max_tokens - len(prompt)
        if room > 0:
            response.current = self._episode(response.id, role, len(response.episodes), prompt, room)
            response.episodes[role] = response.current
        return room > 0

    def _end_sessions(self, *ids: str) -> None:  # no further turn follows
        for response, group in (self._live[id] for id in ids):
            self._rollout.env.end_session(group.index, group.task, response.turns)

    def _missing(self, response: OpenResponse, e: EnvFailed) -> Response:
        """Finish a response without a reward."""
        self._rollout.failures.miss(response.id, e, counted=self._counted)
        return response.close(None)

    def _finish(self, response: Response) -> None:
        """Add a finished response to its group."""
        group = self._forget_response(response.id)
        self._count_missing(response)
        restored = self._restored.pop(response.id, 0)
        if self._counted:
            self._rollout.sampled_tokens += response.sampled_count
            self._rollout.restored_tokens += restored
            if not self.scope:
                self._rollout.on_finished(group.task, response)
        group.responses[int(response.id.rpartition("/")[2])] = response
        self._complete(group)

    def _count_missing(self, response: Response) -> None:
        """Count the roles that are trained and have no reward, if others have one."""
        if not response.rewards or response.reward is not None:
            return
        known = dict(response.rewards)
        for role in dict.fromkeys(segment.role for segment in response.segments):
            if role not in known and policy_of(role) in self._rollout.trained:
                what = f"the role {role!r} spoke and has no reward; there are rewards for {', '.join(known)}"
                self._rollout.failures.miss(
                    response.id, EnvFailed(what, f"no reward for {role}"), counted=self._counted
                )

    def _complete(self, group: OpenGroup) -> None:
        if group.complete:
            self._forget(group.index)
            self._completed.append(group)
