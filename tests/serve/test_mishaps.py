"""What goes wrong for users of the server: addresses, bodies, clients that vanish, runs that cannot be reached."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest

from tests.support.fleets.lenders import Weights, lending
from tests.support.fleets.listening_controller import TOKEN
from tests.support.servers.serving import new_host, run, serving, until
from windfall.controller.workers.members import WorkerState
from windfall.errors import WindfallError
from windfall.serve.lender import Lender
from windfall.serve.process import ServeOptions, check_address, main

JSON = {"Content-Type": "application/json"}


def test_an_address_that_cannot_be_used_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(WindfallError, match=f"127.0.0.1:{port}: cannot listen: Address already in use") as caught:
            check_address("127.0.0.1", port)
        assert "--port" in caught.value.fix
    check_address("127.0.0.1", port)
    check_address("127.0.0.1", 0)
    check_address("localhost", 0)
    for host in ("192.0.2.7", "no-such-host.invalid"):  # for documentation: no machine has this address
        with pytest.raises(WindfallError, match=host) as caught:
            check_address(host, port)
        assert "--host" in caught.value.fix


def test_the_port_is_checked_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = ServeOptions(model="/no/such/model", port=taken.getsockname()[1])
        with pytest.raises(WindfallError, match="Address already in use"):
            main(options)


@pytest.mark.parametrize("lend", ["10.0.0.5:8765", "http://", "https://:8765", "http://a:port", "ftp://a"])
def test_a_wrong_address_of_a_run_is_refused(lend: str) -> None:
    with pytest.raises(WindfallError, match="not the address of a controller"):
        main(ServeOptions(model="tiny", lend=lend, token="run.token"))


def test_bodies_that_are_too_large_or_cannot_be_read() -> None:
    async def main() -> None:
        async with serving() as s:
            async with s.http.post(s.url + "/v1/completions", data=b"x" * (10 << 20), headers=JSON) as answer:
                assert answer.status == 413
                assert "larger than 1048576 bytes" in (await answer.json())["error"]["message"]
            for body in (b"", b"[]", b"{", b'{"prompt": "3"}}', b"\xff\xfe", b"[" * 100_000):
                async with s.http.post(s.url + "/v1/completions", data=body, headers=JSON) as answer:
                    error = (await answer.json())["error"]
                    assert (answer.status, error["type"]) == (400, "invalid_request_error"), body[:20]
                    assert len(error["message"]) < 300
            await s.complete(max_tokens=2)

    run(main)


@pytest.mark.parametrize("encoding", ["br", "gzip", "gzip, br"])
def test_an_encoding_is_refused(encoding: str) -> None:
    async def main() -> None:
        async with serving(api_key="secret") as s:
            for key, status in (("secret", 415), ("wrong", 401)):
                headers = {**JSON, "Content-Encoding": encoding, "Authorization": f"Bearer {key}"}
                async with s.http.post(s.url + "/v1/completions", data=b"x" * 100, headers=headers) as answer:
                    assert (answer.status, (await answer.json())["error"]["type"]) == (status, "invalid_request_error")

    run(main)


def test_what_is_not_http_gets_an_error_of_the_api(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serving() as s:
            for _ in range(5):
                reader, writer = await asyncio.open_connection("127.0.0.1", int(s.url.rpartition(":")[2]))
                writer.write(b"this is not HTTP\r\n\r\n")
                answer = await asyncio.wait_for(reader.read(), 240)
                assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
                writer.close()
            await s.complete(max_tokens=2)

    run(main)
    logged = [r for r in caplog.records if r.name.startswith(("windfall", "aiohttp"))]
    assert [r.exc_info for r in logged] == [None], "one line for all of them"


def test_hostile_bodies_leave_other_requests_alone() -> None:
    """Bodies with too many values, and half of a body on more connections than requests are served."""

    async def main() -> None:
        async with serving(max_requests=8, read_s=1.0) as s:
            many = b'{"prompt": [' + b"{}," * 300_000 + b"{}]}"
            async with s.http.post(s.url + "/v1/completions", data=many, headers=JSON) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (400, "context_length_exceeded")
            port = int(s.url.rpartition(":")[2])
            streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
            for _, writer in streams:
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{")
            lines = [await asyncio.wait_for(reader.readline(), 240) for reader, _ in streams]
            assert sorted(int(line.split()[1]) for line in lines) == [408] * 8 + [429] * 4
            for _, writer in streams:
                writer.close()
            await s.complete(max_tokens=2)
            assert not +s.api.intake.requests

    run(main)


def test_a_client_that_hangs_up_in_the_middle_of_a_stream() -> None:
    async def main() -> None:
        async with serving() as s:
            body = {"prompt": "3+4=", "max_tokens": 240, "ignore_eos": True, "stream": True, "n": 3}
            async with s.http.post(s.url + "/v1/completions", json=body) as stream:
                await stream.content.readline()
                await until(lambda: s.host.requests == 3, "all choices run")
                stream.close()
            await until(lambda: s.host.requests == 0, "all choices are canceled")
            assert s.host.engine.kv.pages.held_blocks == 0, "their memory is free"
            assert s.api._in_flight == 0
            generated = s.host.metrics.generated_tokens
            assert generated < 3 * 240
            await s.complete(max_tokens=2)

    run(main)


def test_a_run_that_cannot_be_reached_is_reported_once() -> None:
    async def main() -> None:
        said: list[str] = []
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = unused.getsockname()[1]
        async with serving(new_host()) as s:
            lender = Lender(
                s.host, f"http://127.0.0.1:{port}", lambda: TOKEN, name="lender", device="cpu",
                puller=lambda token: Weights(), say=said.append,
            )  # fmt: skip
            task = asyncio.create_task(lender.run())
            await until(lambda: said, "it says that there is no link")
            await asyncio.sleep(1.0)  # several attempts
            assert len(said) == 1
            assert said[0].count(f"127.0.0.1:{port}") >= 1
            assert said[0].endswith("; reconnecting"), said
            await s.complete(max_tokens=2)
            lender.leave("the test ends")
            await asyncio.wait_for(task, 240)

    run(main)


def test_a_corrected_token_is_used_by_the_next_attempt(tmp_path: Path) -> None:
    async def main() -> None:
        tokens = ["1" * 43]
        async with lending(tmp_path, token=lambda: tokens[-1]) as s:
            s.lender.refused_s = 0.5
            await until(lambda: any("the next attempt is in 0.5 s" in line for line in s.said), "it is refused")
            tokens.append(TOKEN)
            await until(lambda: s.site.state("lender") is WorkerState.READY, "it has joined")

    run(main)
