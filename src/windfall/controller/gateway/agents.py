"""Runs agents: one session of the gateway and one process for every response.

    wait for a slot ──▶ open a session ──▶ start the agent ──▶ it calls the gateway ──▶ it ends ──▶ reward
                              ▲                                                           │
                              └───── it failed: start it again, with the same turns ◀─────┘

Rules:
- The rewards are what the agent returned or printed, else what it posted, or the verdict of a grader: one for the
  response, or one for each role that spoke. If there is none,
  or the agent fails every try or makes no call, the reward is missing, never zero, unless the recipe says what a
  failure is worth.
- An agent that fails after it ran out of tokens has the reward `rollout.out_of_tokens`.
- The time limit counts the agent's own time: neither waiting for a slot nor waiting for the policy.
- The end of a session is in the journal before its response is handed out: after a restart nothing of it is sampled
  again. A session that has not ended is started again, and calls with the same ids get the journal's tokens.
- An agent that is started again after it ended differently may take another course: what it does not ask for again is
  not part of the response.
- The gateway listens on this machine only, where the agents run.

AgentService has what a controller needs for a recipe whose environment is an agent:

    AgentService ─┬─ AgentLauncher   starts agents          from the start of the controller
                  └─ Gateway         on a port of its own   once a trainer has written the tokenizer
"""

from __future__ import annotations

import asyncio
import os
import resource
import shlex
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from windfall.backoff import delay_s
from windfall.controller.gateway.dispatch_sampler import DispatchSampler
from windfall.controller.gateway.server import Gateway
from windfall.controller.gateway.session import GatewaySession, TokenLimits
from windfall.controller.gateway.voice import Voice
from windfall.controller.ledger.journal_format import History
from windfall.controller.rollout.grading import OUT_OF_TOKENS
from windfall.controller.rollout.stream import OpenGroup, Rollout, Stream
from windfall.envs.agents.launcher import AgentExit, AgentLauncher, AgentProgram
from windfall.envs.base import HELD_OUT, EnvHost
from windfall.envs.failures import EnvFailed
from windfall.envs.grade import Graded
from windfall.envs.prompt_lengths import context_of, is_agent
from windfall.errors import WindfallError
from windfall.events.log import EventLog
from windfall.models.chat import Chat
from windfall.processes.output_log import OutputFile
from windfall.recipe.env_sections import AgentEnv, AgentLimits
from windfall.recipe.sections import Recipe, RolloutSection
from windfall.types import Feedback, Response, Task, Turn

LOG_BYTES = 1 << 20
CHECK_S = 0.25
"""Seconds between checks of an agent's time limit."""
NO_REWARD = EnvFailed(
    "the agent ended without a reward: it must return a number, print one as its last line, or post it to /v1/reward",
    "no reward",
    final=True,
)
NO_CALL = EnvFailed(
    "the agent ended with a reward and without a call to the policy, so there is nothing to train on: it must use "
    "OPENAI_BASE_URL and OPENAI_API_KEY of its environment",
    "no call",
    final=True,
)


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
    graded: bool
    """The environment that gives the tasks also grades the answers."""
    log: OutputFile
    """The output of failing agents: agents.log, and before it agents.log.1."""

    def __post_init__(self) -> None:
        # An evaluation alongside training has slots of its own: agents of the training may wait for a worker that keeps
        # the evaluated version, and the evaluation must not wait for them.
        self.training_slots = asyncio.Semaphore(self.limits.concurrency)
        self.evaluation_slots = asyncio.Semaphore(self.limits.concurrency)
        self.started = self.failed = 0
        """Number of agents that were started, and of those that failed."""

    def write_log(self, response: str, error: EnvFailed) -> None:
        """Append what a failing agent printed last. A disk that is full does not end the run."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        text = f"--- {when} UTC, response {response}: {error.error}\n{error.traceback.rstrip()}\n"
        self.log.write(text.encode(errors="replace"))

    def stream(self, rollout: Rollout, **options: Any) -> AgentStream:
        return AgentStream(rollout, self, **options)


class AgentStream(Stream):
    """A stream whose responses are made by agents, and not by one episode each.

    An agent decides itself when it asks for turns. The stream starts one for every response of a group, waits for its
    end, and drops it if it becomes too old. The rest is as in stream.py: every session that is opened is handed out
    exactly once, in its group, or dropped."""

    def __init__(self, rollout: Rollout, runs: AgentRuns, **options: Any) -> None:
        """`options`: those of Stream."""
        super().__init__(rollout, **options)
        self._runs = runs
        self._limits = {
            policy: TokenLimits(options.max_tokens, options.turn_tokens)
            for policy, options in rollout.policy_options.items()
        }
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
            versions=self._versions,
            past=self._past(id),
        )
        if response is not None:  # the journal has all of it
            self._live[id] = (None, group)
            self._agent_ended(response, None)
            return
        grade = partial(self._rollout.grader.grade, id, group.index, group.task, counted=self._counted)
        slots = self._runs.training_slots if self._counted else self._runs.evaluation_slots
        agent = AgentRun(
            runs=self._runs, id=id, index=group.index, task=group.task, slots=slots, limits=self._limits, grade=grade
        )
        self._live[id] = (agent, group)
        self._tasks[id] = self._in_background(self._run_agent(agent))

    def _past(self, id: str) -> History:
        """Take what the journal has of this response: its segments 0, 1, 2, ... Numbers may be missing."""
        history = self._rollout.history
        return {segment: history.pop(segment) for segment in self._segments.pop(id, ()) if segment in history}

    async def _run_agent(self, agent: AgentRun) -> None:
        try:
            ended = await agent.run()
        except Exception as e:  # fault boundary: the error is raised in run()
            self.inbox.put_nowait(e)
        else:
            self.inbox.put_nowait(partial(self._agent_ended, *ended))

    def _agent_ended(self, response: Response, error: EnvFailed | None) -> None:
        if response.id not in self._live:  # it was dropped meanwhile
            return
        self._tasks.pop(response.id, None)
        if error is not None:
            self._rollout.failures.miss(response.id, error, counted=self._counted)
        # Tokens of the journal have no worker.
        workers = [run for segment in response.segments for run in segment.workers]
        self._restored[response.id] = sum(count for worker, count in workers if not worker)
        self._finish(response)

    def _oldest_versions(self, id: str) -> dict[str, int]:
        return self._runs.sampler.oldest_versions(id)

    def _sampled(self, id: str) -> int:
        return self._runs.sampler.sampled(id)

    def _has_begun(self, id: str, policy: str) -> bool:
        """Whether the agent has begun, and may call any policy."""
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
    slots: asyncio.Semaphore
    """Limits how many agents run at once."""
    limits: Mapping[str, TokenLimits]
    """By policy."""
    grade: Callable[[Sequence[Turn]], Awaitable[Graded]]
    """Asks the environment of the task for its verdict."""
    session: GatewaySession | None = None
    """The session of the current try."""

    def withdraw(self) -> None:
        """The run no longer needs the response: nothing more is sampled for it."""
        if self.session is not None:
            self.runs.gateway.expire(self.session, "the run does not need it any more")
        self.runs.sampler.withdraw(self.id)

    async def run(self) -> tuple[Response, EnvFailed | None]:
        """Run the agent to its end. Returns its response, and why it has no reward. Canceling this ends it early."""
        runs = self.runs
        try:
            async with self.slots:
                verdict, error = await self._verdict()
        except BaseException:  # canceled, or a bug: the ledger must not keep the segments
            self.withdraw()
            raise
        why = "" if error is None else error.error
        rewards = tuple((role, float(reward)) for role, reward in verdict.rewards.items())
        return replace(runs.sampler.close(self.id, verdict.reward, why, rewards), scores=verdict.scores), error

    async def _verdict(self) -> tuple[Feedback, EnvFailed | None]:
        """Try until the agent ends with a reward, or too often without one. Returns its rewards, or why it has none."""
        runs, limits, error, ran_out = self.runs, self.runs.limits, NO_REWARD, False
        if not limits.restart and runs.sampler.has_tokens(self.id):
            what = "the controller or the trainer was restarted while the agent ran, and env.restart is false"
            return Feedback(), EnvFailed(what, "an agent that cannot be started again", final=True)
        tries = runs.options.reward_tries if limits.restart else 1
        for number in range(1, tries + 1):
            try:
                return await self._try(), None
            except EnvFailed as e:
                runs.failed += 1
                error = replace(e, error=f"{e.error} (try {number} of {tries})")
                ran_out = self.session is not None and self.session.ran_out
                runs.write_log(self.id, error)
            if error.final or ran_out or number == tries:
                break
            await asyncio.sleep(delay_s(number - 1, first_s=0.1))
            runs.sampler.rewind(self.id)
        worth = runs.options.out_of_tokens if ran_out else limits.failed_reward
        if worth != "missing":
            return Feedback(reward=float(worth)), None
        return Feedback(), OUT_OF_TOKENS if ran_out else error

    async def _try(self) -> Feedback:
        """Start the agent once. Returns its rewards. Raises EnvFailed."""
        runs = self.runs
        session = self.session = runs.gateway.open(self.id, self.limits)
        runs.started += 1
        try:
            exit = await self._start(session)
            failure = exit.failure
            runs.gateway.expire(session, "the agent ended" if failure is None else failure.error)
        finally:
            await runs.gateway.close(session)
        if failure is not None:
            raise failure
        if not session.calls:
            raise replace(NO_CALL, traceback=exit.output)
        if runs.graded:
            return await self._grade(exit)
        reward = session.reward if exit.reward is None else exit.reward
        verdict = Feedback(reward=reward, rewards={**session.rewards, **exit.rewards})
        if verdict.reward is None and not verdict.rewards:
            raise replace(NO_REWARD, traceback=exit.output)
        return verdict

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

    async def _grade(self, exit: AgentExit) -> Feedback:
        graded = await self.grade([Turn(text=exit.text)])
        if graded.feedback is None:
            assert graded.failure is not None
            raise replace(graded.failure, final=True)
        if graded.feedback.reward is None and not graded.feedback.rewards:
            what = "the environment of [env.tasks] asked for another turn, so it cannot grade an agent"
            raise EnvFailed(what, "no verdict", final=True)
        return graded.feedback


# The service.

HOST = "127.0.0.1"
FILES_PER_AGENT = 3
"""Open files of the controller for each agent: that of its process, and its connections to the gateway."""
OTHER_FILES = 64
PLAIN = (
    "{% for m in messages %}{{ m.content or '' }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Chat template for a model without one, or if chat.enabled is false: texts one after the other."""


def program(env: AgentEnv, *hidden: Path) -> AgentProgram:
    """What is started for every response. `hidden`: folders that agents must not read."""
    common = {
        "memory_mb": env.memory_mb,
        "directory": str(env.directory or ""),
        "isolation": env.isolation,
        "hidden": [str(folder.resolve()) for folder in hidden],
    }
    command = shlex.split(env.command or "")
    return AgentProgram(command=command, function=env.function or "", options=env.options, **common)


def check(recipe: Recipe) -> str:
    """Raise WindfallError if the agent cannot be started. Returns a line about it."""
    env = recipe.env
    assert isinstance(env, AgentEnv)
    chosen = program(env)
    _check_files(env)
    if chosen.command:
        name, folder = chosen.command[0], env.directory or Path.cwd()
        if shutil.which(str(folder / name) if os.sep in name else name) is None:
            fix = "Correct the command, or give the full path of the program."
            raise WindfallError(f"there is no program {chosen.command[0]!r}", where="env.command", fix=fix)
        return f"agent: {env.command}"

    async def imported() -> None:
        async with AgentLauncher(chosen) as launcher:
            await launcher.ready()

    asyncio.run(imported())
    return f"agent: {chosen.function} was imported"


def _check_files(env: AgentLimits) -> None:
    """Raise WindfallError if the system allows too few open files. Training and evaluation may run at once."""
    need, limit = OTHER_FILES + 2 * FILES_PER_AGENT * env.concurrency, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if limit != resource.RLIM_INFINITY and need > limit:
        most = max(1, (limit - OTHER_FILES) // (2 * FILES_PER_AGENT))
        what = f"{env.concurrency} agents at once need {need} open files, and the hard limit is {limit}"
        raise WindfallError(what, where="env.concurrency", fix=f"Set it to {most} or less, or raise `ulimit -Hn`.")


def check_grader(recipe: Recipe, tasks: EnvHost) -> None:
    """Raise WindfallError if the environment of [env.tasks] cannot grade an agent. `tasks` has been ready."""
    graded = isinstance(recipe.env, AgentEnv) and recipe.env.reward == "grader"
    if graded and tasks.needs_tokens:
        what = "a reward function asks for completion_ids, but it grades the text that an agent returns"
        raise WindfallError(what, where="env.tasks.rewards", fix="Remove that argument of the function.")


def chat(recipe: Recipe, tokenizer: Any, stop: frozenset[int]) -> Chat:
    """Renders the messages of agents as the [chat] section of a policy's recipe says."""
    section = recipe.chat
    template = section.source() if section.enabled else PLAIN
    if template is None and not getattr(tokenizer, "chat_template", None):
        template = PLAIN
    return Chat(tokenizer, stop, template=template, arguments=section.arguments)


NOT_HIDDEN = (
    "agents can read the files of this run, with its secrets: this system allows no mount namespaces. Give agents a "
    'sandbox of their own, or set env.isolation = "strict" (docs/agents.md)'
)


class AgentService:
    """Used as `async with`. Does nothing if the environment is not an agent."""

    def __init__(self, recipe: Recipe, folder: Path, events: EventLog, env: EnvHost) -> None:
        self._recipe = recipe
        self._folder = folder
        self._events = events
        self._env = env
        self.launcher = AgentLauncher(program(recipe.env, folder)) if is_agent(recipe) else None  # type: ignore[arg-type]
        self.runs: AgentRuns | None = None

    async def __aenter__(self) -> Self:
        if self.launcher is not None:
            await self.launcher.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        if self.runs is not None:
            await self.runs.gateway.stop_listening()
        if self.launcher is not None:
            await self.launcher.__aexit__(*error)

    async def open(self, rollout: Rollout, tokenizers: Mapping[str, Any]) -> None:
        """Start the gateway, and have the rollout's responses made by agents. Call this once. `tokenizers`: by
        policy."""
        if self.launcher is None:
            return
        assert self.runs is None, "a second gateway would leave the first one listening"
        env, recipe = self._recipe.env, self._recipe
        assert isinstance(env, AgentLimits)
        await self.launcher.ready()
        if env.isolation != "off" and not self.launcher.hides_files:
            self._events.instant("agents_not_isolated", why=NOT_HIDDEN)
        check_grader(recipe, self._env)
        voices: dict[str, Voice] = {}
        for name, text in rollout.texts.items():
            own, tokenizer = recipe.of(name), tokenizers[name]
            context = context_of(own, rollout.contexts[name])
            voices[name] = Voice(tokenizer, chat(own, tokenizer, text.stop), text.stop, context)
        stop = {name: voice.stop for name, voice in voices.items()}
        sampler = DispatchSampler(rollout.dispatch, model=rollout.lead or recipe.run.name, stop=stop)
        gateway = Gateway(sampler, voices)
        why = "of the agent's calls has no effect: set [rollout] or [chat] of the recipe instead (docs/agents.md)"
        gateway.on_ignored = lambda field: self._events.instant("chat_warning", why=f"the field {field!r} {why}")
        port = await gateway.listen(HOST, env.port, "Set env.port to another port, or to 0 for any free one.")
        url = f"http://{HOST}:{port}/v1"
        self._events.instant("gateway", url=url)
        self.runs = AgentRuns(
            gateway=gateway,
            sampler=sampler,
            launcher=self.launcher,
            options=recipe.rollout,
            limits=env,
            url=url,
            graded=isinstance(env, AgentEnv) and env.reward == "grader",
            log=OutputFile(str(self._folder / "agents.log"), LOG_BYTES),
        )
        rollout.sessions = self.runs

    def counters(self) -> dict[str, int]:
        """Fields of a step's event: agents that were started and that failed since the last call."""
        if self.runs is None:
            return {}
        counted = {"agents_started": self.runs.started, "agents_failed": self.runs.failed}
        self.runs.started = self.runs.failed = 0
        return counted
