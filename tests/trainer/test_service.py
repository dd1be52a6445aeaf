"""The trainer's service: which controllers it accepts requests from, and when it exits."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from windfall.errors import WindfallError
from windfall.link import auth, handshake
from windfall.link import messages as m
from windfall.link.base import LinkClosed
from windfall.link.gate import Gate
from windfall.link.memory import MemoryLink, pair
from windfall.trainer.service import MAX_REFUSALS, OwnEngine, TrainerService
from windfall.training import CheckpointState, Report

SECRET = "the-secret-of-the-trainer"
ENGINE = m.EngineSpec(
    model_config="{}", dtype="float32", kv_tokens=0, page_size=16, max_running=0, max_rows=64, deterministic=True,
    longest=8, wanted=1,
)  # fmt: skip
Play = Callable[[MemoryLink], Awaitable[None]]


class Dials:
    """Replaces a Dialer: each dial is answered by the next of `plays`; the last one is repeated."""

    url = ""

    def __init__(self, *plays: Play) -> None:
        self.plays, self.dials = list(plays), 0
        self._tasks: list[asyncio.Task[None]] = []

    async def dial(self, timeout_s: float) -> MemoryLink:
        play = self.plays[min(self.dials, len(self.plays) - 1)]
        self.dials += 1
        if play is gone:
            raise LinkClosed("no answer")
        ours, theirs = pair("trainer", "controller")
        self._tasks.append(asyncio.ensure_future(play(theirs)))
        return ours


class SavingTrainer:
    """A trainer that only receives Save requests."""

    def __init__(self) -> None:
        self.saves = 0

    def zero_grad(self) -> None:
        pass


def hello(**fields: Any) -> m.TrainerHello:
    return m.TrainerHello(micro_tokens=1, model="m", engine=ENGINE, facts={}, **fields)


def run_service(*plays: Play, patience_s: float = 0.3, **fields: Any) -> tuple[int, Dials, SavingTrainer, list[str]]:
    dials, trainer, lines = Dials(*plays), SavingTrainer(), list[str]()

    def save(state: CheckpointState) -> str:
        trainer.saves += 1
        return "there"

    async def run() -> int:
        any_trainer: Any = trainer
        any_dialer: Any = dials
        service = TrainerService(
            trainer=any_trainer, state=CheckpointState(step=2, next_task=4), secret=SECRET, dialer=any_dialer,
            hello=hello, publish=lambda version, *_: SimpleNamespace(version=version, digest="d"), save=save,
            address=lambda: "x", patience_s=patience_s, retry_s=0.01, say=lines.append, **fields,
        )  # fmt: skip
        return await service.run()

    return asyncio.run(asyncio.wait_for(run(), 240)), dials, trainer, lines


CALLS = itertools.count()


async def request_save(link: MemoryLink) -> None:
    await link.send(m.Save(id=f"save {next(CALLS)}"))
    await link.receive()
    await link.close("enough")


def controller(secret: str = SECRET, run: str = "run") -> Play:
    """A real gate, and a controller that sends Save."""

    async def play(link: MemoryLink) -> None:
        async def serve(link: Any, hello: m.TrainerHello) -> None:
            assert (hello.step, hello.version) == (2, 2)
            await request_save(link)

        gate = Gate(run, "t" * 20, log=lambda *_, **__: None, max_workers=1, trainer_secret=secret)
        await gate.trainer(link, serve)

    return play


def impostor(purpose: str = "trainer welcome", secret: str = "a guess") -> Play:
    """Accepts every trainer, and sends requests."""

    async def play(link: MemoryLink) -> None:
        nonce = auth.nonce()
        await link.send(m.Challenge(protocol=m.PROTOCOL, run="run", nonce=nonce))
        hello: Any = await link.receive()
        proof = hello.proof if purpose == "echo" else auth.proof(secret, purpose, "run", nonce, hello.nonce)
        await link.send(m.TrainerWelcome(proof=proof))
        await request_save(link)

    return play


async def no_proof(link: MemoryLink) -> None:
    """Sends requests without a TrainerWelcome."""
    await link.send(m.Challenge(protocol=m.PROTOCOL, run="run", nonce=auth.nonce()))
    await link.receive()
    await request_save(link)


async def gone(link: MemoryLink) -> None:
    """No process listens."""


async def silent(link: MemoryLink) -> None:
    await asyncio.sleep(60)


async def silent_after_challenge(link: MemoryLink) -> None:
    await link.send(m.Challenge(protocol=m.PROTOCOL, run="run", nonce=auth.nonce()))
    await asyncio.sleep(60)


async def refuses_for_now(link: MemoryLink) -> None:
    await link.send(m.Challenge(protocol=m.PROTOCOL, run="run", nonce=auth.nonce()))
    await link.receive()
    await link.send(m.Refused(why="later\n" * 100, again=True))


def test_accepts_requests_from_the_controller_of_its_run() -> None:
    code, dials, trainer, lines = run_service(controller(), controller(), gone)
    assert code == 1
    assert trainer.saves == 2
    assert dials.dials > 3
    assert "waited 0.3 s for the run's controller" in lines[-1]


@pytest.mark.parametrize(
    "play", [impostor(), impostor("trainer", SECRET), impostor("echo"), no_proof],
    ids=["does not know the secret", "has a proof for something else", "sends its own proof back", "proves nothing"],
)  # fmt: skip
def test_ignores_other_controllers_and_keeps_dialing(play: Play) -> None:
    started = time.monotonic()
    code, dials, trainer, lines = run_service(play)
    assert (code, trainer.saves) == (1, 0)
    assert time.monotonic() - started < 30, "an impostor must not occupy it for ever"
    assert dials.dials > 1
    assert len([line for line in lines if "secret" in line]) == 1, lines
    _, _, trainer, _ = run_service(play, controller(), gone)
    assert trainer.saves > 0


@pytest.mark.parametrize("play", [silent, silent_after_challenge])
def test_silent_controller_does_not_end_it(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "TIMEOUT_S", 0.05)
    code, _, trainer, lines = run_service(play, controller(), gone)
    assert code == 1
    assert trainer.saves > 0
    assert any("waited 0.05 s for a TrainerWelcome" in line for line in lines)


def test_refused_agent_logs_the_reason_and_exits_with_2() -> None:
    code, dials, trainer, lines = run_service(controller("another secret"), patience_s=60.0)
    assert (code, trainer.saves, dials.dials) == (2, 0, MAX_REFUSALS)
    assert any("refused: wrong token" in line for line in lines)
    assert not any(SECRET in line for line in lines)


def test_one_refusal_by_another_run_at_the_old_port_is_survived() -> None:
    code, _, trainer, _ = run_service(controller("another secret"), controller(), gone)
    assert (code, trainer.saves > 0) == (1, True)


def test_retries_when_asked_to() -> None:
    code, dials, _, lines = run_service(refuses_for_now, patience_s=1.5)
    assert code == 1
    assert MAX_REFUSALS < dials.dials < 30, "it backs off; otherwise there would be 150"
    assert all(len(line) < 300 and "\n" not in line for line in lines)


def test_module_is_free_during_hashing_and_memory_is_freed_before_training() -> None:
    """Work holds the lock; a publish may release it early, and no other work begins before the publish has ended."""
    seen: list[Any] = []

    class Engine(OwnEngine):
        def note(self, what: str) -> None:
            seen.append((what, not self.turn.acquire_for_engine(0)))
            if not seen[-1][1]:
                self.turn.release()

    engine = Engine()
    shared: Any = SimpleNamespace(make_room=lambda: engine.note("room"), invalidate=lambda: engine.note("invalidate"))
    engine.engine = shared
    trainer: Any = SimpleNamespace(zero_grad=lambda: None, optim_step=lambda adam: engine.note("optim_step"))

    def publish(version: int, *_: Any) -> Any:
        engine.note("copying")
        engine.release()
        engine.release()  # a second call has no effect
        engine.note("hashing")
        return SimpleNamespace(version=version, digest="d")

    async def play(link: MemoryLink) -> None:
        async def serve(link: Any, hello: m.TrainerHello) -> None:
            await link.send(m.OptimStep(id="1"))
            assert isinstance(await link.receive(), m.Failed)
            await link.close("enough")

        gate = Gate("run", "t" * 20, log=lambda *_, **__: None, max_workers=1, trainer_secret=SECRET)
        await gate.trainer(link, serve)

    async def run() -> None:
        await service.run()

    dials: Any = Dials(play, gone)
    service = TrainerService(
        trainer=trainer, state=CheckpointState(step=2, next_task=4), secret=SECRET, dialer=dials, hello=hello,
        publish=publish, save=lambda state: "", address=lambda: "x", patience_s=0.3, retry_s=0.01,
        say=lambda line: None, engine=engine,
    )  # fmt: skip
    with pytest.raises(TypeError):  # an update without a report raises
        asyncio.run(asyncio.wait_for(run(), 240))
    after = [("room", True), ("invalidate", True), ("optim_step", True)]
    assert seen == [("copying", True), ("hashing", False), *after]
    assert engine.turn.acquire_for_engine(0)


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (MemoryError("no room for\nthe gradient"), m.Failed(error="MemoryError: no room for")),
        (WindfallError("too far apart", fix="Do it."), m.Failed(error="too far apart\nDo it.", final=True)),
    ],
)
def test_error_in_work_is_reported_and_ends_the_process(error: Exception, reported: m.Failed) -> None:
    received: list[object] = []

    async def serve(link: Any, hello: m.TrainerHello) -> None:
        await link.send(m.OptimStep(id="1", step=3, next_task=5))
        received.append(await link.receive())

    async def play(link: MemoryLink) -> None:
        gate = Gate("run", "t" * 20, log=lambda *_, **__: None, max_workers=1, trainer_secret=SECRET)
        await gate.trainer(link, serve)

    def optim_step(self: SavingTrainer, adam: Any) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavingTrainer, "optim_step", optim_step, raising=False)
        with pytest.raises(type(error)):
            run_service(play)
    assert received == [reported]


def test_damaged_files_are_uploaded_again_without_an_answer() -> None:
    received: list[object] = []
    wanted: list[tuple[str, ...]] = []

    async def serve(link: Any, hello: m.TrainerHello) -> None:
        await link.send(m.UploadAgain(files=("a", "b")))
        await link.send(m.Save(id="1"))
        received.append(await link.receive())
        await link.close("enough")

    async def play(link: MemoryLink) -> None:
        gate = Gate("run", "t" * 20, log=lambda *_, **__: None, max_workers=1, trainer_secret=SECRET)
        await gate.trainer(link, serve)

    run_service(play, gone, upload_again=wanted.append)
    assert wanted == [("a", "b")]
    assert received == [m.Saved(path="there")]


class CountingTrainer:
    """A trainer that counts what it performs."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def zero_grad(self) -> None:
        self.done.append("drop")

    def forward_backward(self, samples: Any, loss: Any) -> list[Any]:
        self.done.append("gradient")
        return []

    def optim_step(self, adam: Any) -> Report:
        self.done.append("update")
        return Report(tokens=1, responses=1)


VERBS = (
    m.ForwardBackward(id="1", samples=()), m.OptimStep(id="2", step=3, next_task=5),
    m.Publish(id="3", keep=("a", "b"), pack=True), m.Save(id="4"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("before", "again"),
    [
        (1, ["drop", "gradient", "update", "publish 3", "save"]),  # a gradient that no update has used is lost
        (2, ["save"]),
        (3, ["save"]),
        (4, []),
    ],
)
@pytest.mark.parametrize("answered", [True, False])
def test_calls_repeated_after_a_lost_link_are_performed_once(before: int, again: list[str], answered: bool) -> None:
    """The link is lost after this many calls, maybe before the last of them is answered."""
    trainer: Any = CountingTrainer()
    answers: list[list[object]] = [[], []]

    async def first(link: Any, hello: m.TrainerHello) -> None:
        for n, verb in enumerate(VERBS[:before], 1):
            await link.send(verb)
            if answered or n < before:
                answers[0].append(await link.receive())
        while trainer.done[-1:] != [("gradient", "update", "publish 3", "save")[before - 1]]:
            await asyncio.sleep(0.001)
        await link.close("lost")

    async def second(link: Any, hello: m.TrainerHello) -> None:
        trainer.done.append("-")
        for verb in VERBS:
            await link.send(verb)
            answers[1].append(await link.receive())
        await link.close("enough")

    def gate(serve: Any) -> Play:
        made = Gate("run", "t" * 20, log=lambda *_, **__: None, max_workers=1, trainer_secret=SECRET)
        return lambda link: made.trainer(link, serve)

    def publish(version: int, order: m.Publish) -> Any:
        trainer.done.append(f"publish {version}")
        assert (order.keep, order.pack) == ((("a", "b"), True) if version == 3 and before != 2 else ((), False))
        return SimpleNamespace(version=version, digest="d")

    async def run() -> None:
        dials: Any = Dials(gate(first), gate(second), gone)
        await TrainerService(
            trainer=trainer, state=CheckpointState(step=2, next_task=4), secret=SECRET, dialer=dials, hello=hello,
            publish=publish, save=lambda state: trainer.done.append("save") or "there", address=lambda: "x",
            patience_s=0.3, retry_s=0.01, say=lambda line: None,
        ).run()  # fmt: skip

    asyncio.run(asyncio.wait_for(run(), 240))
    performed = trainer.done[trainer.done.index("-") + 1 :]
    assert [x for x in performed if x != "drop"] == [x for x in again if x != "drop"]
    assert trainer.done.count("publish 3") == trainer.done.count("update") == 1
    assert answers[1][: len(answers[0])] == answers[0] or before == 1
    assert [type(x).__name__ for x in answers[1]] == ["GradientAdded", "Optimized", "PublishedVersion", "Saved"]
