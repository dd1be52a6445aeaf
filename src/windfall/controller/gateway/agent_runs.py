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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakValueDictionary

from windfall.backoff import delay_s
from windfall.controller.gateway.agent_log import AgentLog
from windfall.controller.gateway.dispatch_sampler import DispatchSampler
from windfall.controller.gateway.server import Gateway
from windfall.controller.gateway.session import GatewaySession
from windfall.controller.ledger.journal import Journal
from windfall.controller.rollout.env_failures import OUT_OF_TOKENS
from windfall.controller.rollout.session_stream import SessionEnd, SessionOrder, SessionStream
from windfall.controller.rollout.stream import Rollout
from windfall.envs.agents.agent_exit import AgentExit
from windfall.envs.agents.launcher import AgentLauncher
from windfall.envs.base import HELD_OUT
from windfall.envs.failures import EnvFailed
from windfall.recipe.sections import RolloutSection
from windfall.types import Response, Turn

CHECK_S = 0.25
"""Seconds between checks of an agent's time limit."""
NO_REWARD = EnvFailed(
    "the agent ended without a reward: it must return a number, print one as its last line, or post it to /v1/reward",
    "no reward", final=True,
)  # fmt: skip


class Limits(Protocol):
    """The limits of agents in the recipe; recipe.env_sections.AgentLimits has them."""

    concurrency: int
    time_limit_s: float
    restart: bool
    failed_reward: Any


@dataclass(kw_only=True)
class AgentRuns:
    """Makes the responses of a run whose environment is an agent (controller.rollout.stream.Sessions)."""

    gateway: Gateway
    sampler: DispatchSampler
    launcher: AgentLauncher
    options: RolloutSection
    limits: Limits
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

    def stream(self, rollout: Rollout, **options: Any) -> SessionStream:
        return SessionStream(rollout, self._open, **options)

    def _open(self, order: SessionOrder) -> AgentRun | Response:
        response = self.sampler.open(
            order.id, order.seed, sampling=order.sampling, version=order.version, past=order.past,
            on_version_gone=order.version_gone,
        )  # fmt: skip
        return AgentRun(self, order) if response is None else response


class AgentRun:
    """One agent: all its tries, until there is a response (controller.rollout.session_stream.OpenSession)."""

    def __init__(self, runs: AgentRuns, order: SessionOrder) -> None:
        self._runs, self._order, self._withdrawn = runs, order, False
        self.session: GatewaySession | None = None
        """The session of the current try."""
        self._scores: tuple[tuple[str, float], ...] = ()
        """The parts of the reward, if a grader gave several."""

    def oldest_version(self) -> int | None:
        return self._runs.sampler.oldest_version(self._order.id)

    def sampled(self) -> int:
        return self._runs.sampler.sampled(self._order.id)[0]

    def has_begun(self) -> bool:
        return self.session is not None or self._runs.sampler.has_tokens(self._order.id)

    def withdraw(self) -> None:
        self._withdrawn = True
        if self.session is not None:
            self._runs.gateway.expire(self.session, "the run does not need it any more")
        self._runs.sampler.withdraw(self._order.id)

    async def run(self) -> SessionEnd:
        runs = self._runs
        try:
            async with runs.slots(self._order.version):
                runs.running.add(self)
                try:
                    reward, error = await self._reward()
                finally:
                    runs.running.discard(self)
        except BaseException:  # canceled, or a bug: the ledger must not keep the segments
            if not self._withdrawn:
                self.withdraw()
            raise
        id = self._order.id
        lengths, (_, restored) = runs.sampler.lengths(id), runs.sampler.sampled(id)
        response = replace(runs.sampler.close(id, reward), scores=self._scores)
        if runs.journal is not None:
            runs.journal.write_grade(id, reward, None, "" if error is None else error.error, lengths)
        return SessionEnd(response=response, restored=restored, error=error)

    async def _reward(self) -> tuple[float | None, EnvFailed | None]:
        """Try until the agent ends with a reward, or too often without one."""
        runs, limits, error, ran_out = self._runs, self._runs.limits, NO_REWARD, False
        if not limits.restart and runs.sampler.has_tokens(self._order.id):
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
                    runs.log.write(self._order.id, error)
            if error.final or ran_out or number == tries:
                break
            await asyncio.sleep(delay_s(number - 1, first_s=0.1))
            runs.sampler.rewind(self._order.id)
        worth = runs.options.out_of_tokens if ran_out else limits.failed_reward
        if worth != "missing":
            return float(worth), None
        return None, OUT_OF_TOKENS if ran_out else error

    async def _try(self) -> float:
        """Start the agent once. Returns its reward. Raises EnvFailed."""
        runs = self._runs
        session = self.session = runs.gateway.open(
            self._order.id, max_tokens=runs.options.max_tokens, turn_tokens=runs.options.turn_tokens
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
            "OPENAI_BASE_URL": self._runs.url, "OPENAI_API_KEY": session.key, "OPENAI_MODEL": self._runs.sampler.model,
        }  # fmt: skip
        try:
            return await self._runs.launcher.run(self._task(), variables, kill)
        finally:
            watching.cancel()

    async def _watch(self, session: GatewaySession, kill: asyncio.Future[str]) -> None:
        """Have the agent killed when its own time is over the limit."""
        loop, limit_s = asyncio.get_running_loop(), self._runs.limits.time_limit_s
        await self._runs.launcher.ready()
        began_s = loop.time()
        while loop.time() - began_s - session.waited_s(loop.time()) < limit_s:
            await asyncio.sleep(min(CHECK_S, limit_s))
        if not kill.done():
            kill.set_result(f"took longer than {limit_s:g} s of its own time (env.time_limit_s)")

    def _task(self) -> Mapping[str, Any]:
        index, task = self._order.index, self._order.task
        held_out = index >= HELD_OUT
        number = index - HELD_OUT if held_out else index
        sibling = int(self._order.id.rpartition("/")[2])
        prompt = task.prompt if isinstance(task.prompt, str) else [dict(message) for message in task.prompt]
        return {"id": task.id, "index": number, "held_out": held_out, "sibling": sibling, "prompt": prompt}

    async def _grade(self, exit: AgentExit) -> float:
        graded = await self._order.grade([Turn(text=exit.text)])
        if graded.feedback is None:
            raise EnvFailed(graded.error, graded.cause, graded.traceback, final=True)
        if graded.feedback.reward is None:
            what = "the environment of [env.tasks] asked for another turn, so it cannot grade an agent"
            raise EnvFailed(what, "no verdict", final=True)
        self._scores = graded.feedback.scores
        return graded.feedback.reward
