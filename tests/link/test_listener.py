"""The limits of an unauthenticated peer (time, connections, bytes), while an accepted worker must not be disturbed.

Not covered: the number of concurrent TLS handshakes (each one has a timeout).
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import subprocess
import sys
import time
from typing import Any

import msgspec
import pytest
from aiohttp import WSMsgType

from tests.support import quiet_loop
from windfall.link import auth, listener
from windfall.link import messages as m
from windfall.link import socket as sockets_module
from windfall.link.base import MAX_QUOTED_CHARS, FrameTooLarge, LinkClosed
from windfall.types import Lease

OpenGate = Any
UPGRADE = (
    b"GET /worker HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(open_gate: OpenGate, request: bytes = b"") -> Stream:
    host, port = open_gate.url.partition("//")[2].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    return reader, writer


async def seconds_until_closed(stream: Stream, within_s: float) -> float:
    """Seconds until the other side closes the connection."""
    started = quiet_loop.now_s()
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(within_s):
            while await stream[0].read(1 << 16):
                pass
    stream[1].transport.abort()
    return quiet_loop.now_s() - started


@pytest.mark.parametrize(
    "request_bytes",
    [b"", b"GET /worker HTTP/1.1\r\nHo", UPGRADE, b"GET /worker HTTP/1.1\r\nHost: x\r\n\r\n"],
    ids=["nothing", "half a request", "an upgrade and no Hello", "a plain request"],
)
def test_unauthenticated_peer_is_disconnected_in_time(open_gate: OpenGate, request_bytes: bytes) -> None:
    async def run() -> None:
        async with open_gate(auth_timeout_s=0.3).open() as d, d.undisturbed():
            took_s = await seconds_until_closed(await connect(d, request_bytes), within_s=5.0)
            assert 0.2 < took_s < 2.0
        assert d.gate.workers == 0

    asyncio.run(run())


def test_authenticated_worker_stays_connected(open_gate: OpenGate) -> None:
    async def run() -> None:
        async with open_gate(auth_timeout_s=0.2).open() as d, d.undisturbed():
            await asyncio.sleep(0.5)

    asyncio.run(run())


def test_oldest_unauthenticated_connection_makes_room(open_gate: OpenGate) -> None:
    async def run() -> None:
        async with open_gate(max_unauthenticated=4).open() as d, d.undisturbed():
            connections = [await connect(d) for _ in range(4)]
            await asyncio.sleep(0.05)
            await (await d.join("fifth")).close()
            assert await seconds_until_closed(connections[0], 5.0) < 1.0
            for reader, _ in connections[1:]:
                assert not reader.at_eof()
            for _, writer in connections:
                writer.transport.abort()

    asyncio.run(run())


class FakeTransport(asyncio.Transport):
    """A connection from the given address."""

    def __init__(self, address: str) -> None:
        super().__init__({"peername": (address, 1)})
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


def test_many_connections_from_one_address_keep_no_other_peer_out() -> None:
    async def run() -> None:
        limited = listener.Listener(max_unauthenticated=4)
        transports = [
            FakeTransport(a) for a in ("10.0.0.1", "10.0.0.9", "10.0.0.9", "10.0.0.9", "10.0.0.9", "10.0.0.2")
        ]
        for transport in transports:
            listener._UnauthenticatedPeer(limited, asyncio.Protocol()).connection_made(transport)
        assert [t.aborted for t in transports] == [False, True, True, False, False, False]

    asyncio.run(run())


def test_byte_limit_covers_all_frames_together(open_gate: OpenGate) -> None:
    """With a limit for each frame alone, a peer could send forever, or pause within a large frame."""

    async def run() -> None:
        async with open_gate(max_frame_bytes=8 << 20).open() as d, d.undisturbed():
            async with d.session.ws_connect(f"{d.url}/worker") as ws:
                await ws.receive()
                with contextlib.suppress(ConnectionError):
                    for _ in range(20):
                        await ws.ping(b"x" * 120)
                    await ws.send_bytes(b"\0" * (1 << 20))
                answer = await ws.receive()
                assert (answer.type, answer.data) == (WSMsgType.CLOSE, 1009), answer
            await asyncio.sleep(0.05)
            assert [line["why"] for line in d.logged] == ["127.0.0.1: too many bytes before authentication"]

    asyncio.run(run())


def test_incomplete_large_frame_is_not_waited_for(open_gate: OpenGate) -> None:
    async def run() -> None:
        async with open_gate(max_frame_bytes=8 << 20).open() as d, d.undisturbed():
            begun = UPGRADE + b"\x82\xff" + (4 << 20).to_bytes(8, "big") + b"\0\0\0\0"
            stream = await connect(d, begun + b"\0" * (200 << 10))
            assert await seconds_until_closed(stream, 5.0) < 3.0

    asyncio.run(run())


def test_authenticated_peer_may_send_large_frames(open_gate: OpenGate) -> None:
    async def run() -> None:
        async with open_gate(max_frame_bytes=1 << 20).open() as d:
            link = await d.join("large")
            await link.send(m.Left(why="x" * 500_000))
            async with asyncio.timeout(5):
                while not d.received["large"]:
                    await asyncio.sleep(0.005)
            assert len(d.received["large"][0].why) == 500_000
            await link.close()

    asyncio.run(run())


def test_text_from_unauthenticated_peer_is_clipped(open_gate: OpenGate) -> None:
    """Decoding errors quote the frame."""

    async def run() -> None:
        async with open_gate().open() as d, d.undisturbed():
            link, challenge = await d.dial()
            hello = msgspec.msgpack.decode(m.encode(d.hello(challenge, lease=Lease(kind="spot"))))
            at = next(i for i, field in enumerate(hello) if isinstance(field, dict | list))
            lease = {"kind": "k" * 30_000} if isinstance(hello[at], dict) else ["k" * 30_000, *hello[at][1:]]
            hello[at] = lease
            await link._socket.send_bytes(msgspec.msgpack.encode(hello))
            with pytest.raises(LinkClosed):
                await link.receive()
            await link.close()
            link, challenge = await d.dial()
            await link.send(d.hello(challenge, model="m\n" * 10_000, lends=True))
            refused = await link.receive()
            assert len(refused.why) <= MAX_QUOTED_CHARS
            assert "\n" not in refused.why
            await link.close()
            await asyncio.sleep(0.05)
            assert len(d.logged) == 2
            assert all(len(line["why"]) <= MAX_QUOTED_CHARS + 50 for line in d.logged), d.logged

    asyncio.run(run())


def trainer_hello(open_gate: OpenGate, challenge: m.Challenge, secret: str) -> m.TrainerHello:
    nonce = auth.nonce()
    return m.TrainerHello(
        protocol=m.PROTOCOL, nonce=nonce, proof=auth.proof(secret, "trainer", challenge.run, challenge.nonce, nonce),
        step=0, next_task=0, micro_tokens=1, model="x", engine=open_gate.gate.terms[""].engine, version=0, digest="",
        facts={"pid": 1},
    )  # fmt: skip


@pytest.mark.parametrize(("secret", "welcome"), [("a-secret-that-only-the-trainer-has", True), (None, False)])
def test_workers_token_does_not_authenticate_a_trainer(open_gate: OpenGate, secret: str | None, welcome: bool) -> None:
    async def run() -> None:
        async with open_gate().open() as d, d.undisturbed():
            dialer = sockets_module.Dialer(d.url, "/trainer", m.ToTrainer, ssl=None)
            link = await dialer.dial()
            challenge: Any = await link.receive()
            await link.send(trainer_hello(d, challenge, secret or "a-token-for-the-tests-of-links"))
            assert isinstance(await link.receive(), m.TrainerWelcome if welcome else m.Refused)
            assert ("trainer" in d.links) is welcome
            await link.close()
            await dialer.close()

    asyncio.run(run())


def test_trainer_must_be_on_this_machine(open_gate: OpenGate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "is_same_machine", lambda peer, own: False)

    async def run() -> None:
        async with open_gate().open() as d, d.undisturbed():
            dialer = sockets_module.Dialer(d.url, "/trainer", m.ToTrainer, ssl=None)
            with pytest.raises(LinkClosed, match="403"):
                await dialer.dial()
            await dialer.close()

    asyncio.run(run())


def test_port_where_nothing_listens_is_reported_without_tls() -> None:
    async def run() -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{bound.getsockname()[1]}"
            dialer = sockets_module.Dialer(url, "/worker", m.ToWorker, ssl=None)
            with pytest.raises(LinkClosed, match=f"{url}: no connection: ") as refused:
                await dialer.dial()
            assert "ssl" not in str(refused.value)
            await dialer.close()

    asyncio.run(run())


def test_message_over_the_frame_limit_is_not_sent(sockets: Any) -> None:
    async def run() -> None:
        async with sockets() as (ours, theirs):
            for one, other in ((ours, theirs), (theirs, ours)):
                with pytest.raises(
                    FrameTooLarge, match=r"a Left of 1,048,\d+ bytes; a frame must have less than 1,048,576"
                ):
                    await one.send(m.Left(why="x" * (1 << 20)))
                await one.send(m.Left(why="small"))  # the link still works
                assert await other.receive() == m.Left(why="small")

    asyncio.run(run())


FULL = """
import asyncio, resource, sys
from windfall.link import messages as m
from windfall.link.socket import Port, Route
resource.setrlimit(resource.RLIMIT_NOFILE, (40, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
async def main():
    async def serve(link):
        await link.send(m.Drain(why="hello"))
    port = Port("127.0.0.1", 0, {"/worker": Route(receives=m.FromWorker, max_frame_bytes=1 << 16, handler=serve)}, None)
    await port.open()
    print(port.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await port.close()
asyncio.run(main())
"""


def test_port_recovers_from_descriptor_exhaustion_with_a_short_log() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", FULL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        connections = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(100)]
        time.sleep(1.5)
        for connection in connections:
            connection.close()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as late:
            late.sendall(UPGRADE)
            assert late.recv(64).startswith(b"HTTP/1.1 101")
        _, errors = child.communicate("", timeout=120)
    finally:
        child.kill()
        child.wait()
    assert "connections wait" in errors
    assert len(errors.splitlines()) < 5, errors[:2000]


def test_file_limit_is_raised_to_the_maximum() -> None:
    code = (
        "import resource; from windfall.link import listener;"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]; resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard));"
        "print(listener.raise_file_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30).stdout
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = listener.MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, listener.MAX_FILES)
    assert output.split() == [str(wanted)] * 2
