"""Links of every kind for the contract tests, and a gate on a real port with a connected worker that other peers must
not disturb."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from tests.support import quiet_loop
from windfall.link import auth, listener
from windfall.link import messages as m
from windfall.link.base import Link
from windfall.link.gate import Gate, Terms
from windfall.link.memory import pair
from windfall.link.socket import Dialer, Port, Route, SocketLink

RUN, TOKEN, MODEL = "demo", "a-token-for-the-tests-of-links", "model-1"
SECRET = "a-secret-that-only-the-trainer-has"
ANY = m.FromWorker | m.ToWorker


@pytest.fixture(autouse=True)
def clock_that_waits_for_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends of every link are in one event loop, which `asyncio.run` of the tests makes."""
    monkeypatch.setattr(asyncio, "run", quiet_loop.run)


def engine() -> m.EngineSpec:
    return m.EngineSpec(
        model_config="{}", dtype="float32", kv_tokens=64, page_size=8, max_running=4, max_rows=64, deterministic=True,
        longest=32, wanted=4,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def _memory() -> AsyncIterator[tuple[Link, Link]]:
    yield pair()


@contextlib.asynccontextmanager
async def _dialed() -> AsyncIterator[tuple[SocketLink, SocketLink]]:
    """Over a real port; the first of the two is the dialing end."""
    accepted: asyncio.Future[SocketLink] = asyncio.get_running_loop().create_future()
    finished = asyncio.Event()

    async def serve(link: SocketLink) -> None:
        link.authenticated()  # the contract holds for authenticated peers
        accepted.set_result(link)
        await finished.wait()

    port = Port("127.0.0.1", 0, {"/worker": Route(receives=ANY, max_frame_bytes=1 << 20, handler=serve)}, None)
    await port.open()
    dialer = Dialer(f"http://127.0.0.1:{port.port}", "/worker", ANY, ssl=None, max_frame_bytes=1 << 20)
    try:
        yield await dialer.dial(), await accepted
    finally:
        finished.set()
        await dialer.close()
        await port.close()


@contextlib.asynccontextmanager
async def _accepted() -> AsyncIterator[tuple[SocketLink, SocketLink]]:
    async with _dialed() as (ours, theirs):
        yield theirs, ours


@pytest.fixture(params=[_memory, _dialed, _accepted], ids=["memory", "dialed", "accepted"])
def links(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """An async context with the two ends of a link. The contract is tested on the first one."""
    return request.param


@pytest.fixture
def sockets() -> Callable[[], Any]:
    return _dialed


class OpenGate:
    """A gate on a real port. `logged` has the refusals that it logs, `received` the messages of accepted peers."""

    def __init__(
        self,
        max_workers: int = 8,
        log: Callable[..., None] | None = None,
        max_frame_bytes: int = 1 << 16,
        borrows: bool = True,
        **limits: Any,
    ) -> None:
        """`limits` are the options of a listener.Listener."""
        self._max_frame_bytes, self._listener = max_frame_bytes, listener.Listener(**limits)
        self.logged: list[dict[str, Any]] = []
        self.received: dict[str, list[Any]] = {}
        self.links: dict[str, Link] = {}
        self.gate = Gate(
            RUN, TOKEN, log=log or self._log, max_workers=max_workers, trainer_secret=SECRET, borrows=borrows
        )  # fmt: skip
        self.gate.terms = {"": Terms(model=MODEL, engine=engine(), heartbeat_s=1.0, stalled_s=60.0)}

    def _log(self, name: str, **fields: Any) -> None:
        assert name == "refused"
        self.logged.append(fields)

    async def serve(self, link: Link, hello: m.Hello, base: str) -> None:
        self.links[hello.name] = link
        messages = self.received.setdefault(hello.name, [])
        while True:
            messages.append(await link.receive())

    async def serve_trainer(self, link: Link, hello: m.TrainerHello) -> None:
        self.links["trainer"] = link
        while True:
            self.received.setdefault("trainer", []).append(await link.receive())

    @contextlib.asynccontextmanager
    async def open(self, ssl: Any = None) -> AsyncIterator[OpenGate]:
        routes = {
            "/worker": Route(
                receives=m.FromWorker, max_frame_bytes=self._max_frame_bytes,
                handler=lambda link: self.gate.worker(link, self.serve),
            ),
            "/trainer": Route(
                receives=m.FromTrainer, max_frame_bytes=self._max_frame_bytes, same_machine_only=True,
                handler=lambda link: self.gate.trainer(link, self.serve_trainer),
            ),
        }  # fmt: skip
        port = Port("127.0.0.1", 0, routes, ssl, self._listener)
        await port.open()
        self.url = f"{'https' if ssl else 'http'}://127.0.0.1:{port.port}"
        self._dialer = Dialer(self.url, "/worker", m.ToWorker, ssl=None)
        try:
            async with aiohttp.ClientSession() as self.session, asyncio.timeout(20):
                yield self
        finally:
            await self._dialer.close()
            await port.close()

    async def dial(self) -> tuple[SocketLink, m.Challenge]:
        """A new link and its challenge."""
        link = await self._dialer.dial()
        challenge = await link.receive()
        assert isinstance(challenge, m.Challenge)
        assert (challenge.run, challenge.protocol) == (RUN, m.PROTOCOL)
        return link, challenge

    def hello(self, challenge: m.Challenge, token: str = TOKEN, **fields: Any) -> m.Hello:
        """A correct answer to the challenge, except for `fields`."""
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
        """An accepted worker sends all the while; every message arrives, in order, in both directions."""
        link = await self.join("good")
        sent = 0

        async def send_stats() -> None:
            nonlocal sent
            while True:
                await link.send(m.Stats(running=0, made=sent, steps=0, idle_s=0.0))
                sent += 1
                await asyncio.sleep(0.02)

        sending = asyncio.create_task(send_stats())
        try:
            yield
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        await link.send(m.Left(why="enough"))
        async with asyncio.timeout(5):
            while not self.received["good"] or not isinstance(self.received["good"][-1], m.Left):
                await asyncio.sleep(0.005)
        assert [s.made for s in self.received["good"][:-1]] == list(range(sent))
        assert sent > 0
        await self.links["good"].send(m.Cancel(handles=(1,)))
        assert await link.receive() == m.Cancel(handles=(1,))
        await link.close()


@pytest.fixture
def open_gate() -> type[OpenGate]:
    return OpenGate
