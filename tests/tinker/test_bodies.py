"""Bodies of requests: within limits, decompressed, and counted until they are answered."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.test_utils import make_mocked_request

from windfall.tinker.calls import Refusal
from windfall.tinker.wire import bodies
from windfall.tinker.wire.bodies import BodyReader


class Sent:
    """A request with this body."""

    def __init__(self, data: bytes, encoding: str = "", *, declared: bool = True, never: bool = False) -> None:
        headers = {"Content-Encoding": encoding} if encoding else {}
        headers |= {"Content-Length": str(len(data))} if declared else {}
        self.inner = make_mocked_request("POST", "/", headers=headers)
        self._data, self._never = data, never

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def content(self) -> Sent:
        return self

    async def iter_any(self) -> AsyncIterator[bytes]:
        for byte in self._data:
            yield bytes([byte])
        if self._never:
            await asyncio.Event().wait()


async def received(own: BodyReader, request: Any) -> bytes:
    async with own.receive(request, "alice", bytes) as body:
        return body


def status(own: BodyReader, request: Any) -> int:
    with pytest.raises(Refusal) as caught:
        asyncio.run(received(own, request))
    return caught.value.status


def test_a_compressed_body_is_decompressed_up_to_the_limit() -> None:
    zstd = bodies.zstd() or pytest.skip("backports.zstd is not installed")
    plain = bytes(range(256)) * 64
    packed = zstd.compress(plain)
    assert asyncio.run(received(BodyReader(body_bytes=1 << 20), Sent(packed, "zstd"))) == plain
    assert status(BodyReader(body_bytes=1 << 10), Sent(packed, "zstd")) == 413
    assert status(BodyReader(), Sent(packed[:-3], "zstd")) == 400
    assert status(BodyReader(), Sent(plain, "zstd")) == 400


def test_other_bodies_are_refused() -> None:
    assert asyncio.run(received(BodyReader(), Sent(b"{}"))) == b"{}"
    assert status(BodyReader(), Sent(b"{}", "gzip")) == 415
    assert status(BodyReader(body_bytes=1), Sent(b"{}")) == 413
    assert status(BodyReader(read_s=0.01), Sent(b"{}", never=True)) == 408


def test_bodies_in_flight_have_a_limit_and_are_forgotten_at_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "ACCOUNT_BYTES", 5)

    async def scenario() -> None:
        own = BodyReader()
        async with own.receive(Sent(b"abc"), "alice", bytes):  # pyright: ignore[reportArgumentType]
            with pytest.raises(Refusal, match="try again later"):
                await received(own, Sent(b"abc"))
            async with own.receive(Sent(b"abc"), "bob", bytes):  # pyright: ignore[reportArgumentType]
                pass
        assert await received(own, Sent(b"abc")) == b"abc"
        with pytest.raises(Refusal):
            await received(own, Sent(b"{}", "gzip"))
        assert await received(own, Sent(b"abcde")) == b"abcde"

    asyncio.run(scenario())


def test_bodies_that_arrive_slowly_take_the_room_of_what_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "ALL_BYTES", 12)

    async def scenario() -> None:
        own = BodyReader(body_bytes=10)
        slow = [asyncio.create_task(received(own, Sent(b"", "zstd", never=True))) for _ in range(50)]
        slow += [asyncio.create_task(received(own, Sent(b"ab", never=True))) for _ in range(4)]
        await asyncio.sleep(0)
        assert await received(own, Sent(b"abcd")) == b"abcd"
        with pytest.raises(Refusal, match="try again later"):
            await received(own, Sent(b"abcde"))
        with pytest.raises(Refusal, match="try again later"):
            await received(own, Sent(b"abcde", declared=False))
        with pytest.raises(Refusal, match="larger than"):
            await received(BodyReader(body_bytes=4), Sent(b"abcde", declared=False))
        for task in slow:
            task.cancel()
        await asyncio.wait(slow)
        assert not own._bytes

    asyncio.run(scenario())


def test_requests_without_a_body_take_no_room_and_others_only_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    zstd = bodies.zstd() or pytest.skip("backports.zstd is not installed")
    monkeypatch.setattr(bodies, "ACCOUNT_BYTES", 12)

    async def scenario() -> None:
        own = BodyReader(body_bytes=10)
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(100):
                waits: Any = make_mocked_request("GET", "/", payload=EMPTY_PAYLOAD)
                assert await stack.enter_async_context(own.receive(waits, "alice", bytes)) == b""
            for _ in range(3):
                packed: Any = Sent(zstd.compress(b"a"), "zstd")
                assert await stack.enter_async_context(own.receive(packed, "alice", bytes)) == b"a"

    asyncio.run(scenario())


def test_large_bodies_are_decoded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "LARGE_BYTES", 3)

    async def decoded_in(own: BodyReader, request: Any) -> threading.Thread:
        async with own.receive(request, "alice", lambda body: threading.current_thread()) as found:
            return found

    async def scenario() -> None:
        own, here = BodyReader(), threading.current_thread()
        assert await decoded_in(own, Sent(b"ab")) is here
        large = {await decoded_in(own, Sent(b"abc")) for _ in range(4)}
        assert len(large) == 1  # in the order in which they arrived
        assert here not in large
        own.close()

    asyncio.run(scenario())
