"""Everything that a controller has for agents, with real workers on the tiny model, in one process: rollout, dispatch,
journal, gateway and the processes of agents."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.engines.small_models import engine as new_engine
from tests.support.fleets.samplers import EOS, TOKENIZER, voice
from windfall.controller.gateway.agents import AgentRuns
from windfall.controller.gateway.dispatch_sampler import DispatchSampler
from windfall.controller.gateway.server import Gateway
from windfall.controller.ledger.journal import Journal
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.rollout.stream import Rollout
from windfall.controller.workers.versions import Offer
from windfall.envs.agents.launcher import AgentLauncher, AgentProgram
from windfall.envs.hosting import Numbered
from windfall.envs.in_process import InProcess
from windfall.events.log import EventLog
from windfall.models import attention
from windfall.models.load import load
from windfall.models.text import Text
from windfall.processes.output_log import OutputFile
from windfall.recipe.sections import Recipe, RolloutSection
from windfall.run.commands.in_process import in_process_worker, weights_already_loaded
from windfall.types import Chunk, Request, Response, Sampling

Made = dict[tuple[int, int], tuple[int, float]]


class Recording:
    """An engine that records what it sampled: by seed and position, the token and its log-prob."""

    def __init__(self, engine: Any, made: Made, times: Counter[tuple[int, int]]) -> None:
        self._engine, self._made, self._times = engine, made, times
        self._requests: dict[str, Request] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __len__(self) -> int:
        return len(self._engine)

    def add(self, request: Request) -> None:
        self._requests[request.id] = request
        self._engine.add(request)

    def step(self) -> list[Chunk]:
        chunks = self._engine.step()
        for c in chunks:
            for n, (token, logprob) in enumerate(zip(c.tokens, c.logprobs, strict=True)):
                key = self._requests[c.id].seed, c.position + n
                self._made[key] = (token, logprob)
                self._times[key] += 1
        return chunks


@cache
def model() -> Any:
    torch.set_num_threads(1)
    made = load("tiny", dtype="float32", device="cpu")
    made.set_attn_implementation(attention.NAME)
    return made


@dataclass(kw_only=True)
class Scene:
    folder: Path
    program: AgentProgram
    tasks: tuple[int, ...] = (0, 1)
    size: int = 2
    env: Any = field(default_factory=Numbered)
    options: dict[str, Any] = field(default_factory=dict)
    """Of the recipe's [rollout] section."""
    limits: dict[str, Any] = field(default_factory=dict)
    graded: bool = False
    context: int = 512
    during: Callable[[Scene], Any] | None = None
    """Runs beside the rollout."""
    made: Made = field(default_factory=dict)
    times: Counter[tuple[int, int]] = field(default_factory=Counter)
    responses: dict[str, Response] = field(default_factory=dict)
    runs: AgentRuns = field(init=False)
    dispatch: Dispatch = field(init=False)
    rollout: Rollout = field(init=False)

    def roll(self) -> dict[str, Response]:
        """Roll out all tasks. The journal in the folder is continued."""
        asyncio.run(asyncio.wait_for(self._roll(), 240))
        return self.responses

    async def _roll(self) -> None:
        self.folder.mkdir(exist_ok=True)
        events = EventLog(self.folder / "events.jsonl")
        journal = Journal(self.folder / "journal", "settings")
        past = journal.open(0)
        self.dispatch = dispatch = Dispatch(events=events, vocabulary=99, journal=journal)
        dispatch.set_offer(Offer(version=0, digest="d0"))
        options = RolloutSection(**{"max_tokens": 200, **self.options})
        host = InProcess(self.env)
        text = Text(TOKENIZER)
        self.rollout = Rollout(dispatch, host, {"": text}, Recipe(rollout=options), seed=7, events=events)
        self.rollout.history = past
        sampler = DispatchSampler(dispatch, model="tiny", stop={"": frozenset([EOS])})
        gateway = Gateway(sampler, {"": voice(self.context)})
        port = await gateway.listen("127.0.0.1", 0, "")
        limits = {"concurrency": 3, "time_limit_s": 30.0, "restart": True, "failed_reward": "missing"}
        limits |= self.limits
        engines = {n: Recording(new_engine(model(), deterministic=True), self.made, self.times) for n in "ab"}
        workers = [in_process_worker(dispatch, e, 8, name=n, pull=weights_already_loaded) for n, e in engines.items()]
        watching = asyncio.create_task(dispatch.watch())
        async with AgentLauncher(self.program) as launcher:
            self.runs = self.rollout.sessions = AgentRuns(
                gateway=gateway, sampler=sampler, launcher=launcher, options=options,
                limits=SimpleNamespace(**limits), url=f"http://127.0.0.1:{port}/v1",
                graded=self.graded, log=OutputFile(str(self.folder / "agents.log"), 1 << 20),
            )  # fmt: skip
            for worker in workers:
                await worker.__aenter__()
            beside = asyncio.create_task(self.during(self)) if self.during else None
            try:
                async for group in self.rollout.groups(self.tasks, size=self.size, sampling=lambda policy: Sampling()):
                    self.responses.update({r.id: r for r in group.responses})
                if beside is not None:
                    await beside
            finally:
                for worker in workers:
                    await worker.__aexit__(None, None, None)
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                await gateway.stop_listening()
                journal.close()
                events.close()
        dispatch.ledger.check()
        assert not dispatch.ledger.entries, "every segment was closed"
        assert not gateway._sessions, "every key has expired"

    def check_tokens(self, *others: Made) -> int:
        """Every token to train on is what an engine sampled for its segment. Returns the number of tokens."""
        from windfall.controller.ledger.episode import segment_seed
        from windfall.controller.rollout.stream import seed_of

        count, made = 0, {k: v for part in (*others, self.made) for k, v in part.items()}
        for r in self.responses.values():
            for segment in r.segments:
                task, _, rest = segment.id.partition("/")
                sibling, _, number = rest.partition("+")
                seed = segment_seed(seed_of(7, int(task), int(sibling)), int(number or 0))
                for at, (token, logprob, own) in enumerate(
                    zip(segment.tokens, segment.logprobs, segment.sampled, strict=True)
                ):
                    if own:
                        assert made[seed, at][0] == token
                        assert abs(made[seed, at][1] - logprob) < 1e-5
                        count += 1
        return count
