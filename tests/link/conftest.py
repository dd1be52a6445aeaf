"""Links of every kind for the contract, and a door with a worker inside that must not notice who knocks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from windfall.link import auth, listener
from windfall.link import messages as m
from windfall.link.base import Link
from windfall.link.gate import Gate, Terms
from windfall.link.memory import pair
from windfall.link.socket import Dialler, Port, Route, SocketLink

RUN, TOKEN, MODEL = "demo", "a-token-for-the-tests-of-links", "model-1"
SECRET = "a-secret-that-only-the-trainer-has"
ANY = m.FromWorker | m.ToWorker


def engine() -> m.EngineSpec:
    return m.EngineSpec(
        model_config="{}", dtype="float32", kv_tokens=64, page_size=8, max_running=4, max_rows=64, deterministic=True,
        longest=32, wanted=4,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def _memory() -> AsyncIterator[tuple[Link, Link]]:
    yield pair()


@contextlib.asynccontextmanager
async def _dialled() -> AsyncIterator[tuple[SocketLink, SocketLink]]:
    """Over a real port; the first of the two is the one that dialled."""
    came: asyncio.Future[SocketLink] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def attend(link: SocketLink) -> None:
        link.proved()  # the contract is for those who are known
        came.set_result(link)
        await over.wait()

    port = Port("127.0.0.1", 0, {"/worker": Route(receives=ANY, most_bytes=1 << 20, attend=attend)}, None)
    await port.open()
    dialler = Dialler(f"http://127.0.0.1:{port.port}", "/worker", ANY, ssl=None, most=1 << 20)
    try:
        yield await dialler.dial(), await came
    finally:
        over.set()
        await dialler.close()
        await port.close()


@contextlib.asynccontextmanager
async def _accepted() -> AsyncIterator[tuple[SocketLink, SocketLink]]:
    async with _dialled() as (ours, theirs):
        yield theirs, ours


@pytest.fixture(params=[_memory, _dialled, _accepted], ids=["memory", "dialled", "accepted"])
def links(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """Two ends of a link, as an async context. The contract is tested from the first one's side."""
    return request.param


@pytest.fixture
def sockets() -> Callable[[], Any]:
    return _dialled


class Door:
    """A gate on a real port. What it logs is in `logged`, what those inside say in `heard`."""

    def __init__(
        self, most_workers: int = 8, log: Callable[..., None] | None = None, most_bytes: int = 1 << 16, **strangers: Any
    ) -> None:
        """`strangers`: what is allowed them, for listening.Door."""
        self._most_bytes, self._door = most_bytes, listener.Door(**strangers)
        self.logged: list[dict[str, Any]] = []
        self.heard: dict[str, list[Any]] = {}
        self.inside: dict[str, Link] = {}
        self.gate = Gate(RUN, TOKEN, log=log or self._log, most_workers=most_workers, trainer_secret=SECRET)
        self.gate.terms = Terms(model=MODEL, engine=engine(), heartbeat_s=1.0, stalled_s=60.0)

    def _log(self, name: str, **fields: Any) -> None:
        assert name == "refused"
        self.logged.append(fields)

    async def attend(self, link: Link, hello: m.Hello) -> None:
        self.inside[hello.name] = link
        said = self.heard.setdefault(hello.name, [])
        while True:
            said.append(await link.receive())

    async def attend_trainer(self, link: Link, hello: m.TrainerHello) -> None:
        self.inside["trainer"] = link
        while True:
            self.heard.setdefault("trainer", []).append(await link.receive())

    @contextlib.asynccontextmanager
    async def open(self, ssl: Any = None) -> AsyncIterator[Door]:
        routes = {
            "/worker": Route(
                receives=m.FromWorker, most_bytes=self._most_bytes,
                attend=lambda link: self.gate.worker(link, self.attend),
            ),
            "/trainer": Route(
                receives=m.FromTrainer, most_bytes=self._most_bytes, here_only=True,
                attend=lambda link: self.gate.trainer(link, self.attend_trainer),
            ),
        }  # fmt: skip
        port = Port("127.0.0.1", 0, routes, ssl, self._door)
        await port.open()
        self.url = f"{'https' if ssl else 'http'}://127.0.0.1:{port.port}"
        self._dialler = Dialler(self.url, "/worker", m.ToWorker, ssl=None)
        try:
            async with aiohttp.ClientSession() as self.session, asyncio.timeout(20):
                yield self
        finally:
            await self._dialler.close()
            await port.close()

    async def dial(self) -> tuple[SocketLink, m.Challenge]:
        """A new link, and what it is asked."""
        link = await self._dialler.dial()
        challenge = await link.receive()
        assert isinstance(challenge, m.Challenge)
        assert (challenge.run, challenge.protocol) == (RUN, m.PROTOCOL)
        return link, challenge

    def hello(self, challenge: m.Challenge, token: str = TOKEN, **fields: Any) -> m.Hello:
        """A right answer to the challenge, but for what `fields` say."""
        nonce = auth.nonce()
        proof = auth.proof(token, "hello", challenge.run, challenge.nonce, nonce)
        return m.Hello(**{"protocol": m.PROTOCOL, "nonce": nonce, "proof": proof, "name": "w"} | fields)

    async def join(self, name: str, **fields: Any) -> SocketLink:
        link, challenge = await self.dial()
        await link.send(self.hello(challenge, name=name, **fields))
        welcome = await link.receive()
        assert isinstance(welcome, m.Welcome), welcome
        return link

    @contextlib.asynccontextmanager
    async def undisturbed(self) -> AsyncIterator[None]:
        """A good worker talks in both directions all the while; all of it arrives, in order."""
        link = await self.join("good")
        sent = 0

        async def talk() -> None:
            nonlocal sent
            while True:
                await link.send(m.Stats(running=0, made=sent, steps=0, idle_s=0.0))
                sent += 1
                await asyncio.sleep(0.002)

        talking = asyncio.create_task(talk())
        try:
            yield
        finally:
            talking.cancel()
            await asyncio.gather(talking, return_exceptions=True)
        await link.send(m.Left(why="enough"))
        async with asyncio.timeout(5):
            while not self.heard["good"] or not isinstance(self.heard["good"][-1], m.Left):
                await asyncio.sleep(0.005)
        assert [s.made for s in self.heard["good"][:-1]] == list(range(sent))
        assert sent > 0
        await self.inside["good"].send(m.Cancel(handles=(1,)))
        assert await link.receive() == m.Cancel(handles=(1,))
        await link.close()


@pytest.fixture
def door() -> type[Door]:
    return Door
