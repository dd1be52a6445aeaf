"""What a stranger can have of a port, while a good worker inside must not notice: little time, few places, few bytes.

Not covered: how many TLS handshakes are under way at once (each ends in time).
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

from windfall.link import auth, listener
from windfall.link import messages as m
from windfall.link import socket as sockets_module
from windfall.link.base import CLIPPED, LinkClosed, TooLarge
from windfall.types import Lease

Door = Any
UPGRADE = (
    b"GET /worker HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def knock(door: Door, said: bytes = b"") -> Stream:
    host, port = door.url.partition("//")[2].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(said)
    return reader, writer


async def ends(stream: Stream, within_s: float) -> float:
    """When the other side cut it off, in seconds from now."""
    started = time.monotonic()
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(within_s):
            while await stream[0].read(1 << 16):
                pass
    stream[1].transport.abort()
    return time.monotonic() - started


@pytest.mark.parametrize(
    "said",
    [b"", b"GET /worker HTTP/1.1\r\nHo", UPGRADE, b"GET /worker HTTP/1.1\r\nHost: x\r\n\r\n"],
    ids=["nothing", "half a request", "an upgrade and no Hello", "requests that are none of ours"],
)
def test_who_does_not_prove_himself_is_cut_off(door: Door, said: bytes) -> None:
    async def run() -> None:
        async with door(prove_s=0.3).open() as d, d.undisturbed():
            took_s = await ends(await knock(d, said), within_s=5.0)
            assert 0.2 < took_s < 2.0
        assert d.gate.workers == 0

    asyncio.run(run())


def test_a_worker_that_is_known_stays(door: Door) -> None:
    async def run() -> None:
        async with door(prove_s=0.2).open() as d, d.undisturbed():
            await asyncio.sleep(0.5)

    asyncio.run(run())


def test_the_one_who_has_waited_longest_makes_room(door: Door) -> None:
    async def run() -> None:
        async with door(most=4).open() as d, d.undisturbed():
            crowd = [await knock(d) for _ in range(4)]
            await asyncio.sleep(0.05)
            await (await d.join("fifth")).close()
            assert await ends(crowd[0], 5.0) < 1.0
            for reader, _ in crowd[1:]:
                assert not reader.at_eof()
            for _, writer in crowd:
                writer.transport.abort()

    asyncio.run(run())


class Wire(asyncio.Transport):
    """From an address of its own."""

    def __init__(self, address: str) -> None:
        super().__init__({"peername": (address, 1)})
        self.cut = False

    def abort(self) -> None:
        self.cut = True


def test_a_crowd_from_one_address_keeps_nobody_else_out() -> None:
    async def run() -> None:
        door = listener.Door(most=4)
        wires = [Wire(a) for a in ("10.0.0.1", "10.0.0.9", "10.0.0.9", "10.0.0.9", "10.0.0.9", "10.0.0.2")]
        for wire in wires:
            listener._Stranger(door, asyncio.Protocol()).connection_made(wire)
        assert [w.cut for w in wires] == [False, True, True, False, False, False]

    asyncio.run(run())


def test_a_stranger_has_few_bytes_all_frames_together(door: Door) -> None:
    """A limit on each frame alone would let him send without end, or wait on in the middle of a large one."""

    async def run() -> None:
        async with door(most_bytes=8 << 20).open() as d, d.undisturbed():
            async with d.session.ws_connect(f"{d.url}/worker") as ws:
                await ws.receive()
                with contextlib.suppress(ConnectionError):
                    for _ in range(20):
                        await ws.ping(b"x" * 120)
                    await ws.send_bytes(b"\0" * (1 << 20))
                answer = await ws.receive()
                assert (answer.type, answer.data) == (WSMsgType.CLOSE, 1009), answer
            await asyncio.sleep(0.05)
            assert [line["why"] for line in d.logged] == ["127.0.0.1: too many bytes before it has proved itself"]

    asyncio.run(run())


def test_a_large_frame_that_only_begins_is_not_waited_for(door: Door) -> None:
    async def run() -> None:
        async with door(most_bytes=8 << 20).open() as d, d.undisturbed():
            begun = UPGRADE + b"\x82\xff" + (4 << 20).to_bytes(8, "big") + b"\0\0\0\0"
            stream = await knock(d, begun + b"\0" * (200 << 10))
            assert await ends(stream, 5.0) < 3.0

    asyncio.run(run())


def test_who_has_proved_himself_may_send_large_frames(door: Door) -> None:
    async def run() -> None:
        async with door(most_bytes=1 << 20).open() as d:
            link = await d.join("large")
            await link.send(m.Left(why="x" * 500_000))
            async with asyncio.timeout(5):
                while not d.heard["large"]:
                    await asyncio.sleep(0.005)
            assert len(d.heard["large"][0].why) == 500_000
            await link.close()

    asyncio.run(run())


def test_what_a_stranger_says_is_cut_short(door: Door) -> None:
    """Decoding errors quote what was sent."""

    async def run() -> None:
        async with door().open() as d, d.undisturbed():
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
            await link.send(d.hello(challenge, model="m\n" * 10_000))
            refused = await link.receive()
            assert len(refused.why) <= CLIPPED
            assert "\n" not in refused.why
            await link.close()
            await asyncio.sleep(0.05)
            assert len(d.logged) == 2
            assert all(len(line["why"]) <= CLIPPED + 50 for line in d.logged), d.logged

    asyncio.run(run())


def trainer_hello(door: Door, challenge: m.Challenge, secret: str) -> m.TrainerHello:
    nonce = auth.nonce()
    return m.TrainerHello(
        protocol=m.PROTOCOL, nonce=nonce, proof=auth.proof(secret, "trainer", challenge.run, challenge.nonce, nonce),
        step=0, next_task=0, micro_tokens=1, model="x", engine=door.gate.terms.engine, version=0, digest="", url="",
        facts={"pid": 1},
    )  # fmt: skip


@pytest.mark.parametrize(("secret", "welcome"), [("a-secret-that-only-the-trainer-has", True), (None, False)])
def test_who_has_the_workers_token_is_not_let_in_as_the_trainer(door: Door, secret: str | None, welcome: bool) -> None:
    async def run() -> None:
        async with door().open() as d, d.undisturbed():
            dialler = sockets_module.Dialler(d.url, "/trainer", m.ToTrainer, ssl=None)
            link = await dialler.dial()
            challenge: Any = await link.receive()
            await link.send(trainer_hello(d, challenge, secret or "a-token-for-the-tests-of-links"))
            assert isinstance(await link.receive(), m.TrainerWelcome if welcome else m.Refused)
            assert ("trainer" in d.inside) is welcome
            await link.close()
            await dialler.close()

    asyncio.run(run())


def test_the_trainer_is_of_this_machine(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "is_here", lambda peer, own: False)

    async def run() -> None:
        async with door().open() as d, d.undisturbed():
            dialler = sockets_module.Dialler(d.url, "/trainer", m.ToTrainer, ssl=None)
            with pytest.raises(LinkClosed, match="403"):
                await dialler.dial()
            await dialler.close()

    asyncio.run(run())


def test_a_message_that_is_too_large_is_not_sent_and_named(sockets: Any) -> None:
    async def run() -> None:
        async with sockets() as (ours, theirs):
            for one, other in ((ours, theirs), (theirs, ours)):
                with pytest.raises(TooLarge, match=r"a Left of 1,048,\d+ bytes, and a frame has less than 1,048,576"):
                    await one.send(m.Left(why="x" * (1 << 20)))
                await one.send(m.Left(why="small"))  # and the link is as good as before
                assert await other.receive() == m.Left(why="small")

    asyncio.run(run())


FULL = """
import asyncio, resource, sys
from windfall.link import messages as m
from windfall.link.socket import Port, Route
resource.setrlimit(resource.RLIMIT_NOFILE, (40, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
async def main():
    async def attend(link):
        await link.send(m.Drain(why="hello"))
    port = Port("127.0.0.1", 0, {"/worker": Route(receives=m.FromWorker, most_bytes=1 << 16, attend=attend)}, None)
    await port.open()
    print(port.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await port.close()
asyncio.run(main())
"""


def test_without_a_free_descriptor_the_log_stays_short_and_the_port_comes_back() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", FULL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        crowd = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(100)]
        time.sleep(1.5)
        for one in crowd:
            one.close()
        with socket.create_connection(("127.0.0.1", port), timeout=10) as late:
            late.sendall(UPGRADE)
            assert late.recv(64).startswith(b"HTTP/1.1 101")
        _, said = child.communicate("", timeout=20)
    finally:
        child.kill()
        child.wait()
    assert "connections wait" in said
    assert len(said.splitlines()) < 5, said[:2000]


def test_a_process_may_have_all_the_files_that_it_can() -> None:
    code = (
        "import resource; from windfall import listening;"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]; resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard));"
        "print(listening.raise_file_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30).stdout
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = listener.FILES if hard == resource.RLIM_INFINITY else min(hard, listener.FILES)
    assert said.split() == [str(wanted)] * 2
