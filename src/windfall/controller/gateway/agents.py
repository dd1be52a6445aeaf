"""What a controller needs for a recipe whose environment is an agent: the process that starts agents, and the gateway.

    AgentService ─┬─ AgentLauncher   starts agents                         from the start of the controller
                  └─ Gateway         on a port of its own, in gateway.json   once a trainer has written the tokenizer

The gateway listens on this machine only, where the agents run.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shlex
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from windfall import run_folder as folders
from windfall.controller.gateway.agent_runs import AgentLog, AgentRuns
from windfall.controller.gateway.dispatch_sampler import DispatchSampler
from windfall.controller.gateway.server import Gateway
from windfall.controller.ledger.journal import Journal
from windfall.controller.rollout.stream import Rollout
from windfall.envs.agents.launcher import AgentLauncher, AgentProgram
from windfall.envs.base import EnvHost
from windfall.envs.prompt_lengths import context_of, is_agent
from windfall.errors import WindfallError
from windfall.events.log import EventLog
from windfall.models.chat import Chat
from windfall.recipe.env_sections import AgentEnv, AgentLimits
from windfall.recipe.sections import Recipe

HOST = "127.0.0.1"
FILE = "gateway.json"
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
    """Renders the messages of agents as the recipe's [chat] section says."""
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

    def __init__(self, recipe: Recipe, folder: Path, events: EventLog, journal: Journal | None, env: EnvHost) -> None:
        self._recipe = recipe
        self._folder = folder
        self._events = events
        self._journal = journal
        self._env = env
        self.launcher = AgentLauncher(program(recipe.env, folder)) if is_agent(recipe) else None  # type: ignore[arg-type]
        self.runs: AgentRuns | None = None
        self._gateway: Gateway | None = None

    async def __aenter__(self) -> Self:
        if self.launcher is not None:
            await self.launcher.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._gateway is not None:
            await self._gateway.stop_listening()
            with suppress(OSError):
                (self._folder / FILE).unlink()
        if self.launcher is not None:
            await self.launcher.__aexit__(*error)

    async def open(self, rollout: Rollout, tokenizer: Any, model_context: int | None) -> None:
        """Start the gateway, and have the rollout's responses made by agents."""
        if self.launcher is None:
            return
        env, recipe = self._recipe.env, self._recipe
        assert isinstance(env, AgentLimits)
        await self.launcher.ready()
        if env.isolation != "off" and not self.launcher.hides_files:
            self._events.instant("agents_not_isolated", why=NOT_HIDDEN)
        check_grader(recipe, self._env)
        stop = rollout.text.stop
        sampler = DispatchSampler(
            rollout.dispatch,
            model=recipe.run.name,
            context=context_of(recipe, model_context),
            sampling=recipe.rollout.sampling(),
            stop=stop,
        )
        gateway = Gateway(sampler, tokenizer, chat(recipe, tokenizer, stop), stop)
        url = await self._listen(gateway, env.port)
        self.runs = AgentRuns(
            gateway=gateway,
            sampler=sampler,
            launcher=self.launcher,
            options=recipe.rollout,
            limits=env,
            url=url,
            graded=isinstance(env, AgentEnv) and env.reward == "grader",
            journal=self._journal,
            log=AgentLog(self._folder / "agents.log"),
        )
        rollout.sessions = self.runs

    def counters(self) -> dict[str, int]:
        """Fields of a step's event: agents that were started and that failed since the last call."""
        if self.runs is None:
            return {}
        counted = {"agents_started": self.runs.started, "agents_failed": self.runs.failed}
        self.runs.started = self.runs.failed = 0
        return counted

    async def _listen(self, gateway: Gateway, port: int) -> str:
        self._gateway = gateway
        port = await gateway.listen(HOST, port, "Set env.port to another port, or to 0 for any free one.")
        url = f"http://{HOST}:{port}/v1"
        folders.replace(self._folder / FILE, json.dumps({"url": url, "pid": os.getpid()}))
        self._events.instant("gateway", url=url)
        return url


def address(folder: Path) -> str:
    """The address of the gateway of a run. Raises WindfallError if there is none."""
    folders.recipe_file(folder)
    found = folders.read_json(folder / FILE) or {}
    if "url" not in found:
        fix = 'Start the run. A gateway is started if the recipe has [env] name = "agent".'
        raise WindfallError("this run has no gateway now", where=str(folder), fix=fix)
    return str(found["url"])
