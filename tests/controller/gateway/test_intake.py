"""Bodies that are large, slow, endless or compressed, and what is not HTTP: no session holds up another one."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.support.fleets.samplers import Scripted, run, voice
from windfall.controller.gateway import intake
from windfall.controller.gateway.intake import IntakeLimits
from windfall.controller.gateway.server import Gateway
from windfall.controller.gateway.session import TokenLimits

CALL = {"prompt": [5, 6], "max_tokens": 3}
LIMITS = IntakeLimits.for_context(4096)
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Site:
    """A gateway, and a session that behaves well."""

    def __init__(self, gateway: Gateway, port: int, http: aiohttp.ClientSession) -> None:
        self.gateway, self.port, self.url, self._http = gateway, port, f"http://127.0.0.1:{port}/v1/completions", http
        self.good, self.bad = (gateway.open(f"{n}/0", {"": TokenLimits(1000)}) for n in range(2))

    async def post(self, data: bytes | dict[str, Any], key: str = "", **headers: str) -> tuple[int, Any]:
        data = json.dumps(data).encode() if isinstance(data, dict) else data
        headers = {"Authorization": f"Bearer {key or self.bad.key}", "Content-Type": "application/json", **headers}
        async with self._http.post(self.url, data=data, headers=headers) as got:
            return got.status, await got.json()

    async def others_are_served(self) -> None:
        assert (await self.post(CALL, self.good.key))[0] == 200

    async def send(self, head: str, body: bytes = b"", key: str | None = None) -> Stream:
        """Begin a request. `head`: its headers, beside the key."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        key = self.bad.key if key is None else key
        start = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n{head}\r\n\r\n"
        writer.write(start.encode() + body)
        await writer.drain()
        return reader, writer


@asynccontextmanager
async def site(limits: IntakeLimits = LIMITS, **options: Any) -> AsyncIterator[Site]:
    gateway = Gateway(Scripted(*["ok"] * 1000), {"": voice(4096)}, limits)
    port = await gateway.listen("127.0.0.1", 0, "", **options)
    try:
        async with aiohttp.ClientSession() as http:
            yield Site(gateway, port, http)
    finally:
        await gateway.stop_listening()


async def answer(stream: Stream) -> tuple[int, Any]:
    """The answer to a request that was begun with `send`."""
    reader, writer = stream
    async with asyncio.timeout(30):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        body = await reader.readexactly(int(length.split()[1]))
    writer.close()
    return int(head.split()[1]), json.loads(body)["error"]


async def until(holds: Any) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.005)


def test_body_with_more_values_than_a_context_holds_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    decode = msgspec.json.decode

    def record(data: bytes, **options: Any) -> Any:
        parsed.append(len(data))
        return decode(data, **options)

    monkeypatch.setattr(msgspec.json, "decode", record)

    async def main() -> None:
        async with site() as s:
            many = b'{"prompt": [' + b"{}," * 300_000 + b"{}]}"
            status, got = await s.post(many)
            assert (status, got["error"]["code"]) == (400, "context_length_exceeded")
            assert s.bad.ran_out, "its reward is that of an agent that has no room left"
            assert parsed == []
            text = json.dumps({"prompt": "x" * 100_000}).encode()  # one value
            status, got = await s.post(text)
            assert (status, got["error"]["code"]) == (400, "context_length_exceeded")
            await s.others_are_served()
        large, small = parsed
        assert large > 100_000 > small

    run(main)


def test_half_sent_bodies_hold_up_no_other_session() -> None:
    async def main() -> None:
        async with site() as s:
            streams = [await s.send("Content-Length: 1000", b'{"prompt": [') for _ in range(150)]
            await until(lambda: s.bad in s.gateway.intake.requests)
            waiting = [asyncio.create_task(answer(stream)) for stream in streams]
            await until(lambda: sum(task.done() for task in waiting) == 150 - LIMITS.client_requests)
            refused = [task.result() for task in waiting if task.done()]
            assert {(status, error["code"]) for status, error in refused} == {(429, "rate_limit_exceeded")}
            await s.others_are_served()
            for _, writer in streams:
                writer.transport.abort()
            for task in waiting:
                task.cancel()
            await until(lambda: s.bad not in s.gateway.intake.requests)
            assert (await s.post(CALL))[0] == 200, "the session itself goes on, too"

    run(main)


@pytest.mark.parametrize("head", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
def test_body_that_does_not_arrive_in_time(head: str) -> None:
    async def main() -> None:
        async with site(IntakeLimits.for_context(4096, read_s=0.2)) as s:
            body = b'5\r\n{"pro\r\n' if "chunked" in head else b'{"pro'
            status, error = await answer(await s.send(head, body))
            assert (status, error["code"]) == (408, "timeout")
            assert s.bad not in s.gateway.intake.requests

    run(main)


def test_body_without_an_end_is_refused_at_the_limit() -> None:
    async def main() -> None:
        async with site() as s:
            stream = await s.send("Transfer-Encoding: chunked")
            reading = asyncio.create_task(answer(stream))
            with suppress(ConnectionError):
                while not reading.done():
                    stream[1].write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
                    await stream[1].drain()
            status, error = await reading
            assert (status, error["code"]) == (413, "context_length_exceeded")
            await s.others_are_served()

    run(main)


@pytest.mark.parametrize("head", ["Content-Length: 1000000", "Transfer-Encoding: chunked"])
def test_bytes_of_a_session_and_of_all_are_limited(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of unknown length counts as one of the largest size."""
    monkeypatch.setattr(intake, "CLIENT_BYTES", 5 << 19)
    monkeypatch.setattr(intake, "ALL_BYTES", 7 << 19)

    async def main() -> None:
        async with site() as s:
            streams = [await s.send(head) for _ in range(2)]
            await until(lambda: s.gateway.intake.requests[s.bad] == 2)
            status, error = await answer(await s.send(head))
            assert (status, error["code"]) == (429, "rate_limit_exceeded")
            assert (await s.post(CALL))[0] == 200, "small ones of the same session have room"
            good = await s.send(head, key=s.good.key)
            await until(lambda: s.gateway.intake.requests[s.good] == 1)
            status, error = await answer(await s.send(head, key=s.good.key))
            assert (status, error["code"]) == (429, "rate_limit_exceeded")
            assert "all sessions" in error["message"]
            for _, writer in (*streams, good):
                writer.transport.abort()
            await until(lambda: not +s.gateway.intake.requests)
            assert not +s.gateway.intake.bytes

    run(main)


@pytest.mark.parametrize("expect", ["", "\r\nExpect: 100-continue"])
def test_wrong_key_is_refused_before_the_body_is_read(expect: str) -> None:
    async def main() -> None:
        async with site() as s:
            for length in (1_000_000, 10_000_000):
                reader, writer = await s.send(f"Content-Length: {length}{expect}", key="wrong")
                got = b""
                while b"invalid_api_key" not in got:
                    piece = await asyncio.wait_for(reader.read(4096), 240)
                    assert piece, got
                    got += piece
                assert b" 401 " in got
                writer.close()
            assert s.bad not in s.gateway.intake.requests

    run(main)


def test_compressed_bodies_are_refused() -> None:
    async def main() -> None:
        async with site() as s:
            plain = json.dumps(CALL).encode()
            for name, data in (("gzip", gzip.compress(plain)), ("deflate", b""), ("br", plain), ("gzip, gzip", plain)):
                for key, expected in ((s.bad.key, 415), ("wrong", 401)):
                    got, answered = await s.post(data, key, **{"Content-Encoding": name})
                    assert (got, answered["error"]["type"]) == (expected, "invalid_request_error"), name
            await s.others_are_served()

    run(main)


def test_what_is_not_http_gets_an_error_of_the_api_and_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    lines = (b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03", b"POST / HTTP/9.x", b"nonsense", b"GET /" + b"x" * 20_000)
    wrong = (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5", b"GET / HTTP/1.1\r\n: x")

    async def main() -> None:
        async with site() as s:
            for start in (*lines, *wrong) * 3:
                reader, writer = await asyncio.open_connection("127.0.0.1", s.port)
                writer.write(start + b"\r\n\r\n")
                status, error = await answer((reader, writer))
                assert (status, error["type"]) == (400, "invalid_request_error"), start[:30]
                assert "not HTTP" in error["message"]
            await s.others_are_served()

    with caplog.at_level(logging.INFO):
        run(main)
    logged = [r for r in caplog.records if r.name.startswith(("windfall", "aiohttp"))]
    assert len(logged) == 1
    assert logged[0].exc_info is None
    assert len(logged[0].getMessage()) < 300


def test_connections_of_a_session_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windfall.controller.gateway.server.MAX_CONNECTIONS", 5)

    async def main() -> None:
        async with site() as s:
            ask = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {s.bad.key}\r\n\r\n".encode()
            streams, answers = [], []
            for _ in range(8):
                streams.append(await asyncio.open_connection("127.0.0.1", s.port))
                streams[-1][1].write(ask)
                answers.append(int((await asyncio.wait_for(streams[-1][0].readline(), 240)).split()[1]))
            assert answers == [200] * 5 + [429] * 3
            await s.others_are_served()
            for reader, _ in streams[5:]:
                await asyncio.wait_for(reader.read(), 240)  # they are closed
            for _, writer in streams:
                writer.transport.abort()
            await until(lambda: all(known.is_closing() for known in s.bad._connections))
            assert (await s.post(CALL))[0] == 200

    run(main)


def test_connections_without_a_request_are_closed_and_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr("windfall.controller.gateway.server.MAX_WITHOUT_KEY", 20)
        async with site(head_s=2.0) as s:
            heads = [asyncio.open_connection("127.0.0.1", s.port) for _ in range(60)]
            streams = await asyncio.gather(*heads)
            for _, writer in streams:
                writer.write(b"POST /v1/completions HTTP/1.1\r\nAuthorization: Bear")
            await s.others_are_served()
            for reader, writer in streams:  # those over the limit at once, the others after `head_s`
                with suppress(ConnectionError):
                    assert await asyncio.wait_for(reader.read(), 240) == b""
                writer.close()

    run(main)
