"""The trainer's agent and its own engine in one process, as the trainer process wires them: a real model, two links in
memory. No token is generated with weights that belong to no version, whatever happens to the trainer's link."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.support.engines.continuation import Token, change, check_continuation, versions
from tests.support.engines.small_models import engine
from tests.support.fleets.listening_controller import SPEC
from windfall.engine.engine_thread import EngineThread
from windfall.link import handshake
from windfall.link import messages as m
from windfall.link.memory import MemoryLink, pair
from windfall.recipe.sections import Recipe
from windfall.run import local_worker
from windfall.run.local_worker import LocalWorker
from windfall.trainer.own_engine.trainer_engine import TrainerEngine, TrainerWeights
from windfall.trainer.ranks.rank_place import RankPlace
from windfall.trainer.service import EngineTerms, TrainerService
from windfall.training import CheckpointState, Report
from windfall.types import Request, Sampling
from windfall.worker.worker_link import PulledWeights, WorkerLink

WAIT_S = 60.0
REQUEST = Request(id="1", prompt=(5, 9, 13), seed=7, max_tokens=400)


@pytest.fixture(scope="module")
def model() -> Any:
    return versions("llama", 1)[0]


class Trainer:
    """Changes the module in every update, and records the weights of every version that is published."""

    def __init__(self, model: Any) -> None:
        self.model, self.updates, self.published = model, 0, dict[int, Any]()
        self.skips = False

    def zero_grad(self) -> None:
        pass

    def optim_step(self, adam: Any = None) -> Report:
        self.updates += 1
        if not self.skips:
            change(self.model, seed=self.updates)
        time.sleep(0.02)
        return Report(
            tokens=1, responses=1, grad_norm=1.0, lr=0.1, entropy=0.0, engine_gap=0.0, engine_gap_max=0.0, clipped=0.0,
            kl=0.0, skipped=self.skips,
        )  # fmt: skip

    def publish(self, version: int, keep: Any = (), pack: bool = False) -> Any:
        self.published[version] = copy.deepcopy(self.model)
        return SimpleNamespace(version=version, digest=f"d{version}")


class Process:
    """The trainer process, and the controller's ends of its two links."""

    def __init__(self, model: Any) -> None:
        self.trainer = Trainer(copy.deepcopy(model))
        self.links: asyncio.Queue[MemoryLink] = asyncio.Queue()
        any_trainer: Any = self.trainer
        any_dialer: Any = SimpleNamespace(url="", dial=self._dial)
        self.agent = TrainerService(
            trainer=any_trainer, state=CheckpointState(step=0, next_task=0), secret="s", dialer=any_dialer,
            hello=lambda **fields: SimpleNamespace(**fields), publish=self.trainer.publish, save=lambda state: "",
            address=lambda: "x", retry_s=0.01, patience_s=5.0, say=lambda line: None,
        )  # fmt: skip
        self.shared = TrainerEngine(
            engine(self.trainer.model, deterministic=True),
            self.agent.engine.turn,
            published=lambda: self.agent.manifest,
        )
        self.agent.engine.engine = self.shared
        self.host = EngineThread(self.shared, 4)
        self.local, theirs = pair("controller", "local")
        weights = TrainerWeights(lambda: self.agent.manifest)

        def pull(load: m.Load, give_up: Any) -> PulledWeights:
            return weights.pull(load)

        self.session = WorkerLink(theirs, self.host, pull, heartbeat_s=0.05, stalled_s=2.0)
        self.made: list[Token] = []
        self.replies: list[tuple[str, int]] = []
        self.link: Any = None

    async def _dial(self, timeout_s: float) -> MemoryLink:
        ours, theirs = pair("controller", "trainer")
        self.links.put_nowait(ours)
        return theirs

    async def connect(self) -> None:
        """Accept the trainer, like the controller."""
        self.link = await asyncio.wait_for(self.links.get(), WAIT_S)

    async def update(self, version: int | None, *, publish: bool = True) -> None:
        """Make an update. With a version, it is the last one of its step, which is published."""
        await self._ask(m.OptimStep(id=f"update {self.trainer.updates}", step=version), m.Optimized)
        if version is not None and publish:
            await self._ask(m.Publish(id=f"publish {version}"), m.PublishedVersion)

    async def _ask(self, verb: object, answer: type) -> None:
        await self.link.send(verb)
        assert isinstance(await asyncio.wait_for(self.link.receive(), WAIT_S), answer)

    async def load(self, version: int) -> None:
        await self.local.send(m.Load(version=version, digest=f"d{version}"))

    async def read(self) -> None:
        while True:
            match message := await self.local.receive():
                case m.Tokens():
                    [token], [logprob] = m.columns(message)
                    assert message.positions == (len(self.made),)
                    self.made.append(Token(token, logprob, message.version))
                case m.Loaded() | m.LoadFailed():
                    self.replies.append((type(message).__name__, message.version))
                case _:
                    assert isinstance(message, m.Stats)

    async def until(self, holds: Callable[[], object], what: str) -> None:
        end = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < end, f"waited {WAIT_S:g} s until {what}"
            await asyncio.sleep(0.001)

    async def more(self, count: int) -> None:
        at = len(self.made)
        await self.until(lambda: len(self.made) >= at + count, f"{count} more tokens")

    async def silent(self) -> None:
        """Nothing is generated any more, except frames that are on their way."""
        at, end = -1, time.monotonic() + WAIT_S
        while len(self.made) != at:
            assert time.monotonic() < end, "it still generates"
            at = len(self.made)
            await asyncio.sleep(0.1)
        assert self.host.stats().idle_s == 0.0

    def check(self) -> None:
        check_continuation(
            REQUEST, self.made, lambda v: engine(copy.deepcopy(self.trainer.published[v]), deterministic=True)
        )


@asynccontextmanager
async def process(model: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Process, asyncio.Task[int]]]:
    """A connected trainer at version 0, whose engine generates a response."""

    async def accept(link: Any, role: Any, secret: str, hello: Any) -> None:
        del link, role, secret, hello

    monkeypatch.setattr(handshake, "join", accept)
    p = Process(model)
    p.host.start()
    running = asyncio.create_task(p.agent.run())
    tasks = [asyncio.create_task(p.read()), asyncio.create_task(p.session.serve())]
    try:
        await p.connect()
        await p.load(0)
        r = REQUEST
        work = m.Work(
            handle=1, prompt=r.prompt, position=0, seed=r.seed, max_tokens=r.max_tokens, sampling=Sampling(), stop=()
        )
        await p.local.send(m.Assign(work=(work,)))
        await p.more(3)
        yield p, running
        assert not any(t.done() for t in tasks), "a part has ended"
        assert p.host.failed is None
    finally:
        await p.local.close("over")
        running.cancel()
        for t in tasks:
            t.cancel()
        await asyncio.gather(running, *tasks, return_exceptions=True)
        p.host.cancel([1])
        await asyncio.to_thread(p.host.close, WAIT_S)


@pytest.mark.parametrize("skips", [False, True])
def test_every_token_has_the_version_of_its_weights(model: Any, monkeypatch: pytest.MonkeyPatch, skips: bool) -> None:
    """Two updates per step. A skipped update leaves the weights as they are, but the version is a new one."""

    async def main() -> None:
        async with process(model, monkeypatch) as (p, _):
            p.trainer.skips = skips
            for version in (1, 2, 3):
                await p.update(None)
                await p.silent()
                await p.load(version - 1)  # a late Load: the trainer is past this version
                await p.until(lambda v=version: ("LoadFailed", v - 1) in p.replies, "it is refused")
                await p.update(version)
                assert p.agent.state.step == version
                await p.silent()
                await p.load(version)
                await p.more(5)
                assert p.made[-1].version == version
            p.check()
            assert [r for r in p.replies if r[0] == "Loaded"] == [("Loaded", n) for n in range(4)]

    asyncio.run(main())


def test_link_that_ends_between_two_updates(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights belong to no version: the process exits, and its engine has been silent since the first update."""

    async def main() -> None:
        async with process(model, monkeypatch) as (p, running):
            await p.update(None)
            await p.silent()
            await p.link.close("the controller was killed")
            assert await asyncio.wait_for(running, WAIT_S) == 4
            await p.load(0)
            await p.until(lambda: ("LoadFailed", 0) in p.replies, "no version can be loaded")
            await p.silent()
            p.check()

    asyncio.run(main())


@pytest.mark.parametrize("received", ["published", "updated", ""])
def test_link_that_ends_after_the_last_update(model: Any, monkeypatch: pytest.MonkeyPatch, received: str) -> None:
    """The trainer connects again with the new version; its engine waits for the Load, then goes on."""

    async def main() -> None:
        async with process(model, monkeypatch) as (p, running):
            if received:
                await p.update(1, publish=received == "published")
            else:
                await p.link.send(m.OptimStep(id="1", step=1))
                await p.until(lambda: p.trainer.updates, "the update is under way")
            await p.link.close("the controller was killed")
            await p.connect()
            await p.silent()
            assert not running.done()
            await p.load(1)
            await p.more(5)
            assert (p.made[-1].version, p.agent.state.step) == (1, 1)
            p.check()

    asyncio.run(main())


def test_engine_is_built_again_when_the_run_leaves_fp8(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = {name: msgspec.structs.replace(SPEC, kv_dtype=name) for name in ("fp8", "bf16")}
    built: list[str] = []
    joined = [["fp8", "bf16"], ["bf16"]]  # by client: what each Welcome asks for

    class Client:
        def __init__(self, *_: Any, build: Callable[[m.EngineSpec], Any], **__: Any) -> None:
            self.build = build

        async def run(self) -> int:
            for name in joined.pop(0):
                self.build(spec[name])
            return 0

    ranks = SimpleNamespace(distributed=False, first=True, device="cpu")
    model = SimpleNamespace(merged=lambda: None, model=None)
    part: Any = SimpleNamespace(
        ranks=ranks, place=RankPlace(), recipe=Recipe(), policies={"": SimpleNamespace(weights=model)},
        orders=SimpleNamespace(call=lambda f, *a: f(*a)), state=None,
    )  # fmt: skip
    local = LocalWorker(part)
    part.build_engine = local.build
    monkeypatch.setattr(local_worker, "ControllerClient", Client)

    def build_engine(spec: m.EngineSpec, device: str, **_: Any) -> tuple[Any, int]:
        assert local.engine is None, "the memory of the first one is free"
        built.append(spec.kv_dtype)
        return object(), 4

    monkeypatch.setattr(local_worker, "build_engine", build_engine)

    async def main() -> None:
        connected = asyncio.Event()
        connected.set()

        async def run_in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
            return function(*arguments)

        trainer: Any = SimpleNamespace(connected=connected, manifest=None, run_in_thread=run_in_thread)
        terms = EngineTerms(spec=spec["fp8"], url="http://x", secret="s", weights_key="k", folder=tmp_path)
        await local.run(trainer, terms)

    asyncio.run(main())
    assert (built, joined) == (["fp8", "bf16"], [])
