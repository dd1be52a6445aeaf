"""The trainer's side of its link: whom it obeys, whom it does not, and how it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from windfall.errors import WindfallError
from windfall.link import auth
from windfall.link import messages as m
from windfall.link.base import LinkClosed
from windfall.link.gate import Gate
from windfall.link.memory import MemoryLink, pair
from windfall.train import agent as hosts
from windfall.train.agent import TrainerHost
from windfall.train.checkpoint import CheckpointState

SECRET = "the-secret-of-the-trainer"
ENGINE = m.EngineSpec(
    model_config="{}", dtype="float32", kv_tokens=0, page_size=16, max_running=0, max_rows=64, deterministic=True,
    longest=8, wanted=1,
)  # fmt: skip
Play = Callable[[MemoryLink], Awaitable[None]]


class Dials:
    """In place of a port: each dial is answered by the next in the row; the last one, ever again."""

    url = ""

    def __init__(self, *plays: Play) -> None:
        self.plays, self.dials = list(plays), 0
        self._tasks: list[asyncio.Task[None]] = []

    async def dial(self, timeout_s: float) -> MemoryLink:
        play = self.plays[min(self.dials, len(self.plays) - 1)]
        self.dials += 1
        if play is gone:
            raise LinkClosed("nobody answers")
        ours, theirs = pair("trainer", "controller")
        self._tasks.append(asyncio.ensure_future(play(theirs)))
        return ours


class Saved:
    """A trainer that is never asked for more than to save."""

    def __init__(self) -> None:
        self.saves = 0

    def begin(self) -> None:
        pass


def hello(**fields: Any) -> m.TrainerHello:
    return m.TrainerHello(micro_tokens=1, model="m", engine=ENGINE, url="http://_:1", facts={}, **fields)


def live(*plays: Play, patience_s: float = 0.3) -> tuple[int, Dials, Saved, list[str]]:
    dials, trainer, said = Dials(*plays), Saved(), list[str]()

    def save(state: CheckpointState) -> str:
        trainer.saves += 1
        return "there"

    async def run() -> int:
        any_trainer: Any = trainer
        any_dialler: Any = dials
        host = TrainerHost(
            trainer=any_trainer, state=CheckpointState(step=2, next_task=4), secret=SECRET, dialler=any_dialler, hello=hello,
            publish=lambda version: SimpleNamespace(version=version, digest="d"), save=save, address=lambda: "x",
            patience_s=patience_s, again_s=0.01, say=said.append,
        )  # fmt: skip
        return await host.run()

    return asyncio.run(asyncio.wait_for(run(), 10)), dials, trainer, said


async def orders(link: MemoryLink) -> None:
    await link.send(m.Save())
    await link.receive()
    await link.close("enough")


def controller(secret: str = SECRET, run: str = "run") -> Play:
    """A real gate, and behind it somebody who says Save."""

    async def play(link: MemoryLink) -> None:
        async def attend(link: Any, hello: m.TrainerHello) -> None:
            assert (hello.step, hello.version) == (2, 2)
            await orders(link)

        gate = Gate(run, "t" * 20, log=lambda *_, **__: None, most_workers=1, trainer_secret=secret)
        await gate.trainer(link, attend)

    return play


def impostor(said: str = "trainer welcome", secret: str = "a guess") -> Play:
    """Lets everybody in, and gives orders."""

    async def play(link: MemoryLink) -> None:
        nonce = auth.nonce()
        await link.send(m.Challenge(protocol=m.PROTOCOL, run="run", nonce=nonce))
        hello: Any = await link.receive()
        proof = hello.proof if said == "echo" else auth.proof(secret, said, "run", nonce, hello.nonce)
        await link.send(m.TrainerWelcome(proof=proof))
        await orders(link)

    return play


async def no_proof(link: MemoryLink) -> None:
    """As a controller was before it had to prove itself."""
    await link.send(m.Challenge(protocol=m.PROTOCOL, run="run", nonce=auth.nonce()))
    await link.receive()
    await orders(link)


async def gone(link: MemoryLink) -> None:
    """Nobody is there."""


async def silent(link: MemoryLink) -> None:
    await asyncio.sleep(60)


async def half(link: MemoryLink) -> None:
    await link.send(m.Challenge(protocol=m.PROTOCOL, run="run", nonce=auth.nonce()))
    await asyncio.sleep(60)


async def full(link: MemoryLink) -> None:
    await link.send(m.Challenge(protocol=m.PROTOCOL, run="run", nonce=auth.nonce()))
    await link.receive()
    await link.send(m.Refused(why="later\n" * 100, again=True))


def test_it_obeys_the_controller_of_its_run() -> None:
    code, dials, trainer, said = live(controller(), controller(), gone)
    assert code == 1
    assert trainer.saves == 2
    assert dials.dials > 3
    assert "waited 0.3 s for the run's controller" in said[-1]


@pytest.mark.parametrize(
    "play", [impostor(), impostor("trainer", SECRET), impostor("echo"), no_proof],
    ids=["does not know the secret", "has a proof for something else", "sends its own proof back", "proves nothing"],
)  # fmt: skip
def test_it_obeys_nobody_else_and_goes_on_looking(play: Play) -> None:
    started = time.monotonic()
    code, dials, trainer, said = live(play)
    assert (code, trainer.saves) == (1, 0)
    assert time.monotonic() - started < 5, "whoever answers must not keep it for ever"
    assert dials.dials > 1
    assert len([line for line in said if "secret" in line]) == 1, said
    _, _, trainer, _ = live(play, controller(), gone)
    assert trainer.saves > 0


@pytest.mark.parametrize("play", [silent, half])
def test_who_says_nothing_does_not_end_it(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "SHAKE_S", 0.05)
    code, _, trainer, said = live(play, controller(), gone)
    assert code == 1
    assert trainer.saves > 0
    assert any("waited 0.05 s for its TrainerWelcome" in line for line in said)


def test_refused_it_says_why_and_ends_with_2() -> None:
    code, dials, trainer, said = live(controller("another secret"), patience_s=60.0)
    assert (code, trainer.saves, dials.dials) == (2, 0, hosts.REFUSALS)
    assert any("refused: wrong token" in line for line in said)
    assert not any(SECRET in line for line in said)


def test_refused_once_by_another_run_at_the_old_port_it_finds_its_own() -> None:
    code, _, trainer, _ = live(controller("another secret"), controller(), gone)
    assert (code, trainer.saves > 0) == (1, True)


def test_told_to_come_again_it_does() -> None:
    code, dials, _, said = live(full)
    assert code == 1
    assert dials.dials > hosts.REFUSALS
    assert all(len(line) < 300 and "\n" not in line for line in said)


def test_the_module_is_free_while_a_version_is_hashed_and_room_is_made_before_training() -> None:
    """Work holds the lock; a publish may let go of it early, and no other work begins before it has ended."""
    seen: list[Any] = []
    trainer: Any = SimpleNamespace(begin=lambda: None, finish=lambda: seen.append(("finish", host.lock.locked())))

    def publish(version: int) -> Any:
        seen.append(("copying", host.lock.locked()))
        host.let_go()
        host.let_go()  # once is enough, twice does no harm
        seen.append(("hashing", host.lock.locked()))
        with host.lock:  # so does the engine, meanwhile
            pass
        return SimpleNamespace(version=version, digest="d")

    async def play(link: MemoryLink) -> None:
        async def attend(link: Any, hello: m.TrainerHello) -> None:
            await link.send(m.Update(step=None, next_task=None))
            assert isinstance(await link.receive(), m.Failed)
            await link.close("enough")

        gate = Gate("run", "t" * 20, log=lambda *_, **__: None, most_workers=1, trainer_secret=SECRET)
        await gate.trainer(link, attend)

    async def run() -> None:
        await host.run()

    dials: Any = Dials(play, gone)
    host = TrainerHost(
        trainer=trainer, state=CheckpointState(step=2, next_task=4), secret=SECRET, dialler=dials, hello=hello, publish=publish,
        save=lambda state: "", address=lambda: "x", patience_s=0.3, again_s=0.01, say=lambda line: None,
    )  # fmt: skip
    host.make_room = lambda: seen.append(("room", host.lock.locked()))
    with pytest.raises(TypeError):  # a finish without a report ends the process
        asyncio.run(asyncio.wait_for(run(), 10))
    assert seen == [("copying", True), ("hashing", False), ("room", True), ("finish", True)]
    assert not host.lock.locked()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError("no room for\nthe gradient"), m.Failed(error="MemoryError: no room for")),
        (WindfallError("too far apart", fix="Do it."), m.Failed(error="too far apart\nDo it.", final=True)),
    ],
)
def test_what_work_raises_is_told_and_ends_the_process(error: Exception, told: m.Failed) -> None:
    heard: list[object] = []

    async def attend(link: Any, hello: m.TrainerHello) -> None:
        await link.send(m.Update(step=3, next_task=5))
        heard.append(await link.receive())

    async def play(link: MemoryLink) -> None:
        gate = Gate("run", "t" * 20, log=lambda *_, **__: None, most_workers=1, trainer_secret=SECRET)
        await gate.trainer(link, attend)

    def finish(self: Saved) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saved, "finish", finish, raising=False)
        with pytest.raises(type(error)):
            live(play)
    assert heard == [told]
