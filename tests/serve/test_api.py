"""The server over plain HTTP and with OpenAI's client: answers, streams, errors, limits, metrics, draining."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.serving import EOS, TOKENIZER, run, serving, tiny, until
from windfall.controller.gateway.voice import Voice
from windfall.engine.torch.engine import TorchEngine
from windfall.errors import WindfallError
from windfall.types import Request, Sampling

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "3+4="}]}


def expected(prompt: str, *, max_tokens: int, seed: int = 0, temperature: float = 0.0) -> list[int]:
    engine = TorchEngine(tiny(), kv_tokens=1024)
    sampling = Sampling(temperature=temperature)
    ids = tuple(TOKENIZER.encode(prompt))
    engine.add(Request(id="0", prompt=ids, seed=seed, max_tokens=max_tokens, sampling=sampling, stop=frozenset([EOS])))
    tokens: list[int] = []
    while len(engine):
        for chunk in engine.step():
            tokens += chunk.tokens
    return tokens


def test_completions_are_those_of_the_engine() -> None:
    async def main() -> None:
        async with serving() as s:
            body = await s.complete(max_tokens=12, temperature=0, return_token_ids=True)
            choice = body["choices"][0]
            assert choice["token_ids"] == expected("3+4=", max_tokens=12)
            assert body["usage"]["completion_tokens"] == len(choice["token_ids"])
            assert choice["finish_reason"] in ("stop", "length")
            seeded = [await s.complete(max_tokens=9, seed=n, return_token_ids=True) for n in (5, 5)]
            want = expected("3+4=", max_tokens=9, seed=5, temperature=1.0)
            assert [b["choices"][0]["token_ids"] for b in seeded] == [want, want]
            many = await asyncio.gather(*(s.complete(f"{n}+{n}=", max_tokens=20, temperature=0) for n in range(12)))
            ids = [b["usage"]["completion_tokens"] for b in many]
            assert ids == [len(expected(f"{n}+{n}=", max_tokens=20)) for n in range(12)]
            assert len({b["id"] for b in many}) == 12
            assert s.host.requests == 0

    run(main)


def test_chat_and_streams() -> None:
    async def main() -> None:
        async with serving() as s:
            options = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
            status, whole = await s.post("/v1/chat/completions", {**CHAT, **options})
            assert status == 200
            message = whole["choices"][0]["message"]
            assert (message["role"], whole["choices"][0]["finish_reason"]) == ("assistant", "length")
            events = await s.stream(
                "/v1/chat/completions", {**CHAT, **options, "stream_options": {"include_usage": True}}
            )
            assert events[-1] == "[DONE]"
            text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events[:-1] if e["choices"])
            assert text == message["content"]
            assert events[-2]["usage"]["completion_tokens"] == 16
            parts = await s.stream("/v1/completions", {"model": "tiny", "prompt": "3+4=", **options})
            whole = await s.complete(**options)
            assert "".join(e["choices"][0]["text"] for e in parts[:-1]) == whole["choices"][0]["text"]
            stop = whole["choices"][0]["text"][3:5]
            cut = await s.complete(**options, stop=[stop])
            assert cut["choices"][0]["text"] == whole["choices"][0]["text"].partition(stop)[0]
            assert cut["choices"][0]["finish_reason"] == "stop"
            await until(lambda: s.host.requests == 0, "the request with the stop string is over")

    run(main)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"), ({"temperature": "hot"}, "temperature"), ({"top_p": 0}, "top_p"),
        ({"n": 129}, "n"), ({"frequency_penalty": 0.5}, "frequency_penalty"), ({"seed": 1.5}, "seed"),
        ({"prompt": [1, 10**9]}, "prompt"), ({"prompt": [5] * 400}, "messages"), ({"prompt": ""}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"), ({"stop": [""]}, "stop[0]"), ({"stop": ""}, "stop"),
        ({"ignore_eos": 3}, "ignore_eos"),
        ({"temperature": 10**400}, "temperature"), ({"top_k": 10**400}, "top_k"), ({"top_p": float("nan")}, None),
        ({"prompt": "\ud800"}, None), ({"model": ["tiny"]}, "model"),
        ({"stop_token_ids": [5]}, "stop_token_ids"),
    ],
)  # fmt: skip
def test_wrong_requests_are_refused_in_openais_format(change: dict[str, Any], param: str | None) -> None:
    async def main() -> None:
        async with serving() as s:
            status, body = await s.post("/v1/completions", {"model": "tiny", "prompt": "3+4=", **change})
            assert (status, body["error"]["type"], body["error"]["param"]) == (400, "invalid_request_error", param)
            assert s.host.requests == 0

    run(main)


def test_no_temperature_ends_the_service() -> None:
    async def main() -> None:
        async with serving() as s:
            for temperature in (1e-40, 1e-300, 1e-4, 100):
                other = asyncio.create_task(s.complete(max_tokens=20, temperature=0, ignore_eos=True))
                answer = await s.complete(max_tokens=5, temperature=temperature, top_p=0.9, logprobs=1)
                assert all(math.isfinite(x) for x in answer["choices"][0]["logprobs"]["token_logprobs"])
                assert (await other)["usage"]["completion_tokens"] == 20

    run(main)


def test_other_errors_and_models() -> None:
    async def main() -> None:
        async with serving(api_key="secret") as s:
            status, body = await s.post("/v1/completions", {"prompt": "3+4="})
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
            host, port = s.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xe9\r\n\r\n")
            assert b" 401 " in await reader.readline(), "a key that is not UTF-8"
            writer.close()
            key = {"Authorization": "Bearer secret"}
            assert (await s.post("/v1/completions", {"prompt": "3+4=", "max_tokens": 2}, headers=key))[0] == 200
            status, body = await s.post("/v1/nothing", {}, headers=key)
            assert (status, body["error"]["type"]) == (404, "invalid_request_error")
            assert (await s.post("/v1/reward", {"reward": 1}, headers=key))[0] == 404, "there are no sessions here"
            status, body = await s.post("/v1/completions", {"model": "other", "prompt": "3+4="}, headers=key)
            assert (status, body["error"]["code"]) == (404, "model_not_found")
            async with s.http.get(s.url + "/v1/models", headers=key) as answer:
                assert [m["id"] for m in (await answer.json())["data"]] == ["tiny"]
            async with s.http.post(s.url + "/v1/completions", data=b"x" * (2 << 20), headers=key) as answer:
                assert answer.status == 413
            assert (await s.get("/health"))[0] == 200
            assert (await s.get("/metrics"))[0] == 200

    run(main)


def test_limits_on_requests_and_a_client_that_goes_away() -> None:
    async def main() -> None:
        async with serving(max_requests=2) as s:
            body = {"prompt": "3+4=", "max_tokens": 240, "ignore_eos": True}
            long = [asyncio.create_task(s.post("/v1/completions", body)) for _ in range(2)]
            await until(lambda: s.host.requests == 2, "both run")
            status, refused = await s.post("/v1/completions", body)
            assert (status, refused["error"]["code"]) == (429, "rate_limit_exceeded")
            for task in long:
                task.cancel()
            await asyncio.gather(*long, return_exceptions=True)
            await until(lambda: s.host.requests == 0, "both are canceled")
            assert s.host.metrics.requests["canceled"] >= 1
            assert s.host.arena.blocks.held("serving") == s.host.engine.kv.pages.owned_blocks
            assert s.host.engine.kv.pages.held_blocks == 0
            await s.complete(max_tokens=2)

    run(main)


def test_a_request_that_takes_too_long_is_ended() -> None:
    async def main() -> None:
        async with serving(request_s=0.05) as s:
            body = {"prompt": "3+4=", "max_tokens": 240, "ignore_eos": True}
            status, answer = await s.post("/v1/completions", body)
            assert (status, answer["error"]["code"]) == (408, "timeout")
            await until(lambda: s.host.requests == 0, "it is canceled")

    run(main)


def test_slow_clients_are_cut_off() -> None:
    async def main() -> None:
        async with serving(read_s=0.1, write_s=0.3) as s:
            host, port = s.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            assert b" 408 " in await asyncio.wait_for(reader.readline(), 240), "the body does not arrive"
            writer.close()
            # A client that asks for much and reads nothing. The buffers of the operating system take a part of it.
            body = json.dumps({"prompt": [5] * 200, "max_tokens": 50, "stream": True, "ignore_eos": True,
                               "return_token_ids": True, "logprobs": 1}).encode()  # fmt: skip
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            reader, writer = await asyncio.open_connection(host, int(port), limit=16)
            writer.transport.pause_reading()  # pyright: ignore[reportAttributeAccessIssue]
            writer.write(head.encode() + body)
            await until(lambda: s.host.metrics.ttft.count > 0, "it runs")
            await until(lambda: s.host.requests == 0, "it has ended or was canceled")
            writer.close()
            assert await s.complete(max_tokens=2)

    run(main)


def test_clients_without_a_key_or_a_whole_request_occupy_nothing() -> None:
    async def main() -> None:
        async with serving(api_key="secret", max_requests=1, head_s=1.0) as s:
            host, port = s.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            silent, half = await asyncio.open_connection(host, int(port))
            half.write(b"POST /v1/completions HTTP/1.1\r\nHos")
            headers = {"Authorization": "Bearer secret"}
            status, body = await s.post("/v1/completions", {"prompt": "3+4=", "max_tokens": 2}, headers=headers)
            assert status == 200, body
            assert b" 401 " in await asyncio.wait_for(reader.readline(), 240)
            assert await asyncio.wait_for(silent.read(), 240) == b"", "half of a head: the connection is closed"
            writer.close()
            half.close()

    run(main)


def test_an_engine_that_fails_answers_all_requests() -> None:
    async def main() -> None:
        async with serving() as s:
            body = {"prompt": "3+4=", "max_tokens": 200, "ignore_eos": True}
            whole = asyncio.create_task(s.post("/v1/completions", body))
            async with s.http.post(s.url + "/v1/completions", json={**body, "stream": True}) as stream:
                await stream.content.readline()

                def broken(*limits: Any) -> Any:
                    raise RuntimeError("the kernel failed")

                s.host.engine.step = broken
                status, answer = await asyncio.wait_for(whole, 240)
                assert (status, answer["error"]["type"]) == (503, "server_error")
                assert "the engine has failed" in (await asyncio.wait_for(stream.content.read(), 240)).decode()
            assert isinstance(s.host.failed, RuntimeError)
            assert (await s.get("/health"))[0] == 503
            assert (await s.post("/v1/completions", body))[0] == 503

    run(main)


def test_a_drain_keeps_its_time_limit() -> None:
    """A stream that takes longer than the drain gets an error, and the server ends."""

    async def main() -> None:
        began_s = 0.0
        async with serving() as s:
            body = {"prompt": "3+4=", "max_tokens": 240, "ignore_eos": True, "stream": True}
            step = s.host.engine.step
            s.host.engine.step = lambda *limits: (time.sleep(0.1), step(*limits))[1]
            async with s.http.post(s.url + "/v1/completions", json=body) as stream:
                await stream.content.readline()
                began_s = time.monotonic()
                assert not await s.api.drain(0.1)
                assert "the server is shutting down" in (await asyncio.wait_for(stream.content.read(), 240)).decode()
        assert time.monotonic() - began_s < 20.0, "all of its tokens take 24 s"

    run(main)


def test_an_error_in_the_middle_of_a_stream_is_sent_in_the_stream() -> None:
    async def main() -> None:
        async with serving() as s:
            body = {"prompt": "3+4=", "max_tokens": 200, "ignore_eos": True, "stream": True}
            async with s.http.post(s.url + "/v1/completions", json=body) as answer:
                assert answer.status == 200
                await answer.content.readline()
                (listener,) = [r.listener for r in s.host._requests.values()]
                listener(WindfallError("the request was dropped"))
                rest = (await answer.content.read()).decode()
            last = json.loads([line for line in rest.splitlines() if line.startswith("data: ")][-1][6:])
            assert last["error"]["type"] == "server_error"
            assert "dropped" in last["error"]["message"]

    run(main)


def check_exposition(text: str) -> None:
    """Every sample belongs to the metric before it, and only counters end with `_total`."""
    name = kind = ""
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:]
            assert name.endswith("_total") == (kind == "counter"), line
        elif not line.startswith("#"):
            found = re.fullmatch(r'([a-z_]+)(\{[a-z]+="[^"]*"\})? (\S+)', line)
            assert found, line
            suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
            assert found[1] in {name + s for s in suffixes}, line
            assert math.isfinite(float(found[3]))


def test_metrics_count_what_was_served() -> None:
    async def main() -> None:
        async with serving() as s:
            for n in range(3):
                await s.complete(max_tokens=8, seed=n, ignore_eos=True)
            assert await s.metric("serve_generated_tokens_total") == 24
            assert await s.metric("serve_ttft_seconds_count") == 3
            assert await s.metric("serve_tpot_seconds_count") == 3
            _, text = await s.get("/metrics")
            assert 'windfall_serve_requests_total{finish="length"} 3' in text
            assert 'windfall_lend_state{state="frozen"} 0' in text
            check_exposition(text)
            times = s.host.serving_time
            assert times._decode.steps + times._prefill.steps >= 20
            assert times.predicted_s == pytest.approx(times.actual_s, rel=0.9)

    run(main)


def test_a_stop_string_is_counted_as_such_even_in_the_last_token() -> None:
    async def main() -> None:
        async with serving() as s:
            options = {"temperature": 0, "ignore_eos": True}
            text = (await s.complete(**options, max_tokens=20))["choices"][0]["text"]
            stop = text[3:5]
            cut = await s.complete(**options, max_tokens=20, stop=stop)
            exact = await s.complete(**options, max_tokens=cut["usage"]["completion_tokens"], stop=stop)
            assert exact["choices"][0] == cut["choices"][0]
            assert exact["choices"][0]["finish_reason"] == "stop"
            await until(lambda: s.host.requests == 0, "all have ended")
            assert "canceled" not in s.host.metrics.requests
            assert s.host.metrics.requests["stop"] >= 1
            assert s.host.metrics.tpot.count == 3

    run(main)


def test_time_to_the_first_token_includes_tokenizing(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = Voice.ids
    monkeypatch.setattr(Voice, "ids", lambda self, prompt: (time.sleep(0.3), ids(self, prompt))[1])

    async def main() -> None:
        async with serving() as s:
            await s.complete(max_tokens=2)
            assert s.host.metrics.ttft.sum > 0.3

    run(main)


def test_draining_ends_what_runs_and_takes_nothing_new() -> None:
    async def main() -> None:
        async with serving() as s:
            body = {"prompt": "3+4=", "max_tokens": 100, "ignore_eos": True}
            task = asyncio.create_task(s.post("/v1/completions", body))
            await until(lambda: s.host.requests, "it runs")
            draining = asyncio.create_task(s.api.drain(20.0))
            await asyncio.sleep(0)
            assert (await s.get("/health"))[0] == 503
            status, refused = await s.post("/v1/completions", body)
            assert (status, refused["error"]["type"]) == (503, "server_error")
            assert (await task)[0] == 200
            assert await draining

    run(main)


def test_openais_client() -> None:
    openai = pytest.importorskip("openai")

    async def main() -> None:
        async with serving() as s, openai.AsyncOpenAI(base_url=f"{s.url}/v1", api_key="none", max_retries=0) as api:
            answer = await api.chat.completions.create(**CHAT, max_tokens=5, seed=1, temperature=0.5, logprobs=True)
            assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens <= 5
            stream = await api.chat.completions.create(**CHAT, max_tokens=5, stream=True)
            assert [c.choices[0].finish_reason async for c in stream][-1] in ("stop", "length")
            with pytest.raises(openai.BadRequestError, match="presence_penalty is not supported"):
                await api.chat.completions.create(**CHAT, presence_penalty=1)

    run(main)


@pytest.mark.slow
def test_command_serves_and_drains(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "windfall.run.cli",
        "serve",
        "tiny",
        "--port",
        "0",
        "--threads",
        "1",
        "--device",
        "cpu",
    ]
    command += ["--kv-tokens", "4096"]
    with (tmp_path / "progress").open("w") as progress:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=progress, text=True, cwd=tmp_path, env=os.environ
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving tiny at http://127.0.0.1:"), line
        said = (tmp_path / "progress").read_text()
        assert (
            said.index("loading tiny") < said.index("comparing the engine with transformers") < said.index("KV cache")
        )
        url = line.split()[3]
        request = urllib.request.Request(
            f"{url}/completions",
            data=b'{"prompt": "3+4=", "max_tokens": 4}',
            headers={"Content-Type": "application/json"},
        )
        assert b"text_completion" in urllib.request.urlopen(request, timeout=60).read()
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 0
        assert process.stdout.read() == "drained\n"
    finally:
        process.kill()
        process.wait()
