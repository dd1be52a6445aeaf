"""Runs agents: one session of the gateway and one process for every response.

    wait for a slot ──▶ open a session ──▶ start the agent ──▶ it calls the gateway ──▶ it ends ──▶ reward
                              ▲                                                           │
                              └───── it failed: start it again, with the same turns ◀─────┘

Rules:
- The reward is what the agent returned or printed, else what it posted, or the verdict of a grader. If there is none,
  or the agent fails every try, the reward is missing, never zero, unless the recipe says what a failure is worth.
- An agent that fails after it ran out of tokens has the reward `rollout.out_of_tokens`.
- The time limit counts the agent's own time: neither waiting for a slot nor waiting for the policy.
- The end of a session is in the journal before its response is handed out: after a restart nothing of it is sampled
  again. A session that has not ended is started again, and calls with the same ids get the journal's tokens.
- An agent that is started again after it ended differently may take another course: what it does not ask for again is
  not part of the response.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from windfall.backoff import delay_s
from windfall.controller.gateway.dispatch_sampler import DispatchSampler
from windfall.controller.gateway.server import Gateway
from windfall.controller.gateway.session import GatewaySession
from windfall.controller.ledger.journal import Journal
from windfall.controller.ledger.journal_reader import History
from windfall.controller.rollout.env_failures import OUT_OF_TOKENS
from windfall.controller.rollout.stream import OpenGroup, Rollout, Stream
from windfall.envs.agents.launcher import AgentExit, AgentLauncher
from windfall.envs.base import HELD_OUT
from windfall.envs.failures import EnvFailed
from windfall.envs.grade import Graded
from windfall.processes.output_log import OutputFile
from windfall.recipe.env_sections import AgentLimits
from windfall.recipe.sections import RolloutSection
from windfall.types import Response, Task, Turn

LOG_BYTES = 1 << 20
CHECK_S = 0.25
"""Seconds between checks of an agent's time limit."""
NO_REWARD = EnvFailed(
    "the agent ended without a reward: it must return a number, print one as its last line, or post it to /v1/reward",
    "no reward",
    final=True,
)


class AgentLog:
    """The output of failing agents in the run's folder: agents.log, and before it agents.log.1, each of limited
    size."""

    def __init__(self, path: Path) -> None:
        self._file = OutputFile(str(path), LOG_BYTES)

    def write(self, response: str, error: EnvFailed) -> None:
        """Append what the agent printed last. A disk that is full does not end the run."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        text = f"--- {when} UTC, response {response}: {error.error}\n{error.traceback.rstrip()}\n"
        self._file.write(text.encode(errors="replace"))


@dataclass(kw_only=True)
class AgentRuns:
    """Makes the responses of a run whose environment is an agent (controller.rollout.stream.Sessions)."""

    gateway: Gateway
    sampler: DispatchSampler
    launcher: AgentLauncher
    options: RolloutSection
    limits: AgentLimits
    url: str
    """Address of the gateway, as agents see it."""
    graded: bool = False
    """The environment that gives the tasks also grades the answers."""
    journal: Journal | None = None
    log: AgentLog | None = None
    """Where the output of failing agents goes."""

    def __post_init__(self) -> None:
        self._slots: WeakValueDictionary[int | None, asyncio.Semaphore] = WeakValueDictionary()
        """By evaluated version, as long as an agent uses them."""
        self._training_slots = self.slots(None)
        self.running: set[AgentRun] = set()
        self.started = self.failed = 0
        """Number of agents that were started, and of those that failed."""

    def slots(self, version: int | None) -> asyncio.Semaphore:
        """Places for agents. An evaluation alongside training has its own: agents of the training may wait for a worker
        that keeps the evaluated version, and the evaluation must not wait for them."""
        slots = self._slots.get(version)
        if slots is None:
            slots = self._slots[version] = asyncio.Semaphore(self.limits.concurrency)
        return slots

    def stream(self, rollout: Rollout, **options: Any) -> AgentStream:
        return AgentStream(rollout, self, **options)


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentEnded:
    """How the session of an agent ended. Its reward is missing if `error` says why."""

    response: Response
    restored: int
    """Number of its sampled tokens that came from the journal."""
    error: EnvFailed | None


class AgentStream(Stream):
    """A stream whose responses are made by agents, and not by one episode each.

    An agent decides itself when it asks for turns. The stream starts one for every response of a group, waits for its
    end, and drops it if it becomes too old. The rest is as in stream.py: every session that is opened is handed out
    exactly once, in its group, or dropped."""

    def __init__(self, rollout: Rollout, runs: AgentRuns, **options: Any) -> None:
        """`options`: those of Stream."""
        super().__init__(rollout, **options)
        self._runs = runs
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._segments: dict[str, list[str]] = {}
        """By response: the ids of its segments in the journal."""
        for id in rollout.history:
            self._segments.setdefault(id.partition("+")[0], []).append(id)

    def _prompt(self, task: Task) -> tuple[int, ...]:
        return ()  # every call of the agent has its own prompt

    def _open_response(self, id: str, group: OpenGroup, prompt: tuple[int, ...]) -> None:
        response = self._runs.sampler.open(
            id,
            self._seed(id),
            sampling=self._sampling,
            version=self._version,
            past=self._past(id),
            on_version_gone=partial(self.version_gone, id),
        )
        if response is not None:  # the journal has all of it
            self._live[id] = (None, group)
            self._restored[id] = response.sampled_count
            self._finish(response)
            return
        grade = partial(self._rollout.grader.grade, id, group.index, group.task, counted=self._counted)
        agent = AgentRun(runs=self._runs, id=id, index=group.index, task=group.task, version=self._version, grade=grade)
        self._live[id] = (agent, group)
        self._tasks[id] = self._in_background(self._run_agent(agent))

    def _past(self, id: str) -> History:
        """Take what the journal has of this response: its segments 0, 1, 2, ... Numbers may be missing."""
        history = self._rollout.history
        return {segment: history.pop(segment) for segment in self._segments.pop(id, ()) if segment in history}

    async def _run_agent(self, agent: AgentRun) -> None:
        try:
            self.inbox.put_nowait(await agent.run())
        except Exception as e:  # fault boundary: the error is raised in run()
            self.inbox.put_nowait(e)

    def _handle(self, message: Any) -> None:
        if not isinstance(message, AgentEnded):
            super()._handle(message)
        elif (id := message.response.id) in self._live:  # otherwise it was dropped meanwhile
            self._tasks.pop(id, None)
            if message.error is not None:
                self._rollout.failures.miss(id, message.error)
            self._restored[id] = message.restored
            self._finish(message.response)

    def _oldest_version(self, id: str) -> int | None:
        return self._runs.sampler.oldest_version(id)

    def _sampled(self, id: str) -> int:
        return self._runs.sampler.sampled(id)[0]

    def _has_begun(self, id: str) -> bool:
        agent, _ = self._live[id]
        return agent.session is not None or self._runs.sampler.has_tokens(id)

    def _withdraw(self, ids: Sequence[str]) -> None:
        for id in ids:
            agent, _ = self._live[id]
            if id in self._tasks:
                agent.withdraw()
                self._tasks.pop(id).cancel()


@dataclass(kw_only=True, eq=False)
class AgentRun:
    """One agent: all its tries, until there is a response."""

    runs: AgentRuns
    id: str
    """The id of its response."""
    index: int
    """Number of the task."""
    task: Task
    version: int | None
    """Every token must come from this version; None: from any version in the version window."""
    grade: Callable[[Sequence[Turn]], Awaitable[Graded]]
    """Asks the environment of the task for its verdict."""
    session: GatewaySession | None = None
    """The session of the current try."""
    _withdrawn: bool = False
    _scores: tuple[tuple[str, float], ...] = ()
    """The parts of the reward, if a grader gave several."""

    def withdraw(self) -> None:
        """The run no longer needs the response: nothing more is sampled for it."""
        self._withdrawn = True
        if self.session is not None:
            self.runs.gateway.expire(self.session, "the run does not need it any more")
        self.runs.sampler.withdraw(self.id)

    async def run(self) -> AgentEnded:
        """Run the agent to its end. Canceling this ends it early."""
        runs = self.runs
        try:
            async with runs.slots(self.version):
                runs.running.add(self)
                try:
                    reward, error = await self._reward()
                finally:
                    runs.running.discard(self)
        except BaseException:  # canceled, or a bug: the ledger must not keep the segments
            if not self._withdrawn:
                self.withdraw()
            raise
        lengths, (_, restored) = runs.sampler.lengths(self.id), runs.sampler.sampled(self.id)
        response = replace(runs.sampler.close(self.id, reward), scores=self._scores)
        if runs.journal is not None:
            runs.journal.write_grade(self.id, reward, None, "" if error is None else error.error, lengths)
        return AgentEnded(response=response, restored=restored, error=error)

    async def _reward(self) -> tuple[float | None, EnvFailed | None]:
        """Try until the agent ends with a reward, or too often without one."""
        runs, limits, error, ran_out = self.runs, self.runs.limits, NO_REWARD, False
        if not limits.restart and runs.sampler.has_tokens(self.id):
            lost = (
                "the agent was interrupted when the controller or the trainer was restarted, and env.restart is false"
            )
            return None, EnvFailed(lost, "an agent that cannot be started again", final=True)
        tries = runs.options.reward_tries if limits.restart else 1
        for number in range(1, tries + 1):
            try:
                return await self._try(), None
            except EnvFailed as e:
                runs.failed += 1
                error = replace(e, error=f"{e.error} (try {number} of {tries})")
                ran_out = self.session is not None and self.session.ran_out
                if runs.log is not None:
                    runs.log.write(self.id, error)
            if error.final or ran_out or number == tries:
                break
            await asyncio.sleep(delay_s(number - 1, first_s=0.1))
            runs.sampler.rewind(self.id)
        worth = runs.options.out_of_tokens if ran_out else limits.failed_reward
        if worth != "missing":
            return float(worth), None
        return None, OUT_OF_TOKENS if ran_out else error

    async def _try(self) -> float:
        """Start the agent once. Returns its reward. Raises EnvFailed."""
        runs = self.runs
        session = self.session = runs.gateway.open(
            self.id, max_tokens=runs.options.max_tokens, turn_tokens=runs.options.turn_tokens
        )
        runs.started += 1
        try:
            exit = await self._start(session)
            failure = exit.failure
            runs.gateway.expire(session, "the agent ended" if failure is None else failure.error)
        finally:
            await runs.gateway.close(session)
        if failure is not None:
            raise failure
        if runs.graded:
            return await self._grade(exit)
        reward = exit.reward if exit.reward is not None else session.reward
        if reward is None:
            raise replace(NO_REWARD, traceback=exit.output)
        return reward

    async def _start(self, session: GatewaySession) -> AgentExit:
        kill: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        watching = asyncio.create_task(self._watch(session, kill))
        variables = {
            "OPENAI_BASE_URL": self.runs.url,
            "OPENAI_API_KEY": session.key,
            "OPENAI_MODEL": self.runs.sampler.model,
        }
        try:
            return await self.runs.launcher.run(self._task(), variables, kill)
        finally:
            watching.cancel()

    async def _watch(self, session: GatewaySession, kill: asyncio.Future[str]) -> None:
        """Have the agent killed when its own time is over the limit."""
        loop, limit_s = asyncio.get_running_loop(), self.runs.limits.time_limit_s
        await self.runs.launcher.ready()
        began_s = loop.time()
        while loop.time() - began_s - session.waited_s(loop.time()) < limit_s:
            await asyncio.sleep(min(CHECK_S, limit_s))
        if not kill.done():
            kill.set_result(f"took longer than {limit_s:g} s of its own time (env.time_limit_s)")

    def _task(self) -> Mapping[str, Any]:
        index, task = self.index, self.task
        held_out = index >= HELD_OUT
        number = index - HELD_OUT if held_out else index
        sibling = int(self.id.rpartition("/")[2])
        prompt = task.prompt if isinstance(task.prompt, str) else [dict(message) for message in task.prompt]
        return {"id": task.id, "index": number, "held_out": held_out, "sibling": sibling, "prompt": prompt}

    async def _grade(self, exit: AgentExit) -> float:
        graded = await self.grade([Turn(text=exit.text)])
        if graded.feedback is None:
            assert graded.failure is not None
            raise replace(graded.failure, final=True)
        if graded.feedback.reward is None:
            what = "the environment of [env.tasks] asked for another turn, so it cannot grade an agent"
            raise EnvFailed(what, "no verdict", final=True)
        self._scores = graded.feedback.scores
        return graded.feedback.reward
