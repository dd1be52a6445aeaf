"""The gateway over plain HTTP: parallel calls, streams that break off, and requests that no client of OpenAI sends."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tests.support.fleets.samplers import TOKENIZER, Scripted, close, run, serving
from windfall.controller.gateway import protocol
from windfall.controller.gateway.chunks import GrowingText
from windfall.controller.gateway.session import Progress, SampledTurn, TokenLimits, TurnRequest
from windfall.errors import WindfallError

USER = {"role": "user", "content": "What is 3+4?"}


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


class Api:
    """The HTTP API of one session."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str) -> None:
        self._http, self._url, self._headers = http, url, {"Authorization": f"Bearer {key}"}

    def open(self, path: str, body: Any) -> Any:
        return self._http.post(f"{self._url}/{path}", json=body, headers=self._headers)

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        async with self.open(path, body) as got:
            return got.status, await got.json()

    async def chat(self, *messages: Any, **more: Any) -> tuple[int, Any]:
        return await self.post("chat/completions", messages=list(messages) or [USER], **more)

    async def stream(self, path: str, until: int | None = None, **body: Any) -> list[Any]:
        """The chunks of a stream, which is closed after `until` of them."""
        found: list[Any] = []
        async with self.open(path, {**body, "stream": True}) as got:
            assert got.status == 200
            async for line in got.content:
                if line.startswith(b"data: "):
                    found.append(line[6:].strip() if b"[DONE]" in line else json.loads(line[6:]))
                if len(found) == until:
                    got.close()
                    break
        return found


@asynccontextmanager
async def talking(sampler: Any, max_tokens: int = 100, turn_tokens: int = 0) -> Any:
    async with serving(sampler) as (gateway, url), aiohttp.ClientSession() as http:
        session = gateway.open("7/0", {"": TokenLimits(max_tokens, turn_tokens)})
        yield gateway, session, Api(http, url, session.key)


def texts(chunks: list[Any]) -> list[str]:
    choices = [c["choices"][0] for c in chunks if isinstance(c, dict) and c.get("choices")]
    return [t for c in choices if (t := c.get("delta", {}).get("content") or c.get("text"))]


# Token ids.


def test_ids_outside_the_vocabulary_are_refused() -> None:
    async def main() -> None:
        sampler = Scripted("ok")
        async with talking(sampler) as (_, session, api):
            for id in (99, 1_000_000, 10**30):
                status, answer = await api.post("completions", prompt=[5, 6, id])
                assert (status, "below 99" in answer["error"]["message"]) == (400, True)
            assert (await api.post("completions", prompt=[5, 6, 98]))[0] == 200
            assert (len(sampler.requests), session.calls) == (1, 1)

    run(main)


def test_empty_prompt_is_refused() -> None:
    async def main() -> None:
        async with talking(Scripted("ok")) as (_, session, api):
            session.voices[""].chat._more["chat_template"] = "{{ '' }}"
            status, answer = await api.chat()
            assert (status, answer["error"]["message"]) == (400, "the prompt is empty")

    run(main)


# Budgets.


def test_parallel_calls_without_a_limit_wait_for_each_other() -> None:
    async def main() -> None:
        async with talking(Scripted("one", "two", "three", step_s=0.01), max_tokens=20) as (_, session, api):
            questions = [{"role": "user", "content": f"{n}+1="} for n in range(3)]
            answers = await asyncio.gather(*(api.chat(q) for q in questions))
            assert [status for status, _ in answers] == [200, 200, 200]
            assert {a["choices"][0]["message"]["content"] for _, a in answers} == {"one", "two", "three"}
            assert not session.ran_out

    run(main)


@pytest.mark.parametrize("asked", [{"max_tokens": 5}, {}])
def test_parallel_calls_with_limits_run_at_the_same_time(asked: dict[str, int]) -> None:
    """The limit is that of the call or that of the recipe."""

    async def main() -> None:
        sampler = Scripted(*["x" * 30] * 5, step_s=0.02)
        async with talking(sampler, max_tokens=17, turn_tokens=0 if asked else 5) as (_, session, api):
            questions = [{"role": "user", "content": f"{n}+1="} for n in range(5)]
            calls = [asyncio.create_task(api.chat(q, **asked)) for q in questions]
            while len(sampler.requests) < 3:
                await asyncio.sleep(0.001)
            assert not any(call.done() for call in calls)
            answers = [await call for call in calls]
            used = sorted(a["usage"]["completion_tokens"] for s, a in answers if s == 200)
            assert used == [2, 5, 5, 5], "the fourth has the rest, and the last one is refused"
            assert [a["error"]["code"] for s, a in answers if s == 400] == ["context_length_exceeded"]
            assert session.ran_out

    run(main)


def test_limit_of_a_turn() -> None:
    async def main() -> None:
        async with talking(Scripted("x" * 30, "y" * 30), turn_tokens=7) as (_, _, api):
            for asked, used in ((None, 7), (3, 3)):
                _, answer = await api.chat(max_tokens=asked)
                assert answer["usage"]["completion_tokens"] == used
                assert answer["choices"][0]["finish_reason"] == "length"

    run(main)


def test_a_session_that_is_answered_again_has_not_run_out() -> None:
    async def main() -> None:
        async with talking(Scripted("ok")) as (_, session, api):
            status, _ = await api.post("completions", prompt=[5] * 5000)
            assert (status, session.ran_out) == (400, True)
            assert (await api.chat())[0] == 200
            assert not session.ran_out

    run(main)


# Long prompts.


def test_long_text_is_refused_before_it_is_tokenized() -> None:
    async def main() -> None:
        async with talking(Scripted()) as (_, session, api):
            long, began_s = "a1" * 500_000, time.process_time()
            for path, body in (
                ("chat/completions", {"messages": [{"role": "user", "content": long}]}),
                ("completions", {"prompt": long}),
            ):
                status, answer = await api.post(path, **body)
                assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert time.process_time() - began_s < 2
            assert session.ran_out
            status, answer = await api.post("completions", prompt="a" * (9 << 20))
            assert (status, answer["error"]["type"]) == (413, "invalid_request_error")

    run(main)


def test_the_event_loop_runs_while_a_prompt_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, go_on = TOKENIZER.encode, threading.Event()

    def slow(text: str, add_special_tokens: bool = True) -> list[int]:
        if "slow" in text:
            assert go_on.wait(30), "the event loop has not run meanwhile"
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(TOKENIZER, "encode", slow)

    async def main() -> None:
        async with talking(Scripted("ok")) as (_, _, api):
            call = asyncio.create_task(api.chat({"role": "user", "content": "slow"}))
            for _ in range(10):
                await asyncio.sleep(0.01)
            assert not call.done()
            go_on.set()
            assert (await call)[0] == 200

    run(main)


# Streams.


def test_a_stream_is_delivered_with_its_last_chunk_and_by_a_call_that_continues_it() -> None:
    async def main() -> None:
        sampler = Scripted("11", "22", "33", step_s=0.01)
        async with talking(sampler) as (gateway, session, api):
            chunks = await api.stream("chat/completions", messages=[USER], until=2)  # its client has "1" and closes
            assert texts(chunks) == ["1"]
            while not sampler.turns:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            messages = [USER]
            for answer in ("11", "22"):  # it knows the answer all the same
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "more"}]
                assert (await api.chat(*messages))[0] == 200
            (segment,) = await close(gateway, session)
            last = sampler.requests[-1].prompt + sampler.turns[-1].tokens
            assert (segment.ids, sum(len(turn.tokens) for turn in sampler.turns)) == (last, 9)
            assert sampler.retracted == []

    run(main)


@pytest.mark.parametrize("finished", [True, False])
def test_a_stream_that_is_closed_in_the_middle_is_not_trained(finished: bool) -> None:
    async def main() -> None:
        sampler = Scripted("12345678", step_s=0.01 if finished else 0.05)
        async with talking(sampler) as (gateway, session, api):
            chunks = await api.stream("chat/completions", messages=[USER], until=4)
            assert texts(chunks) == ["1", "2", "3"]
            while finished and not sampler.turns:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.03)
            await gateway.close(session)
            assert sampler.retracted == ([0] if finished else [])

    run(main)


def test_the_start_of_a_stop_string_is_not_streamed() -> None:
    async def main() -> None:
        async with talking(Scripted("Observation: y", step_s=0.002)) as (_, _, api):
            chunks = await api.stream("chat/completions", messages=[USER], stop=["Observation:"])
            assert texts(chunks) == []
            assert chunks[-1] == b"[DONE]"

    run(main)


class Failing(Scripted):
    async def sample(self, request: TurnRequest, progress: Progress) -> SampledTurn:
        for token in ids("123"):
            progress([token], [-1.0])
            await asyncio.sleep(0.02)
        raise WindfallError("no worker is left", where="a test")


def test_an_error_within_a_stream_is_an_event_of_it() -> None:
    async def main() -> None:
        async with talking(Failing()) as (_, _, api):
            chunks = await api.stream("chat/completions", messages=[USER])
            assert texts(chunks) == ["1", "2", "3"]
            assert chunks[-1]["error"]["type"] == "server_error"
            assert "no worker is left" in chunks[-1]["error"]["message"]
            assert (await api.chat())[0] == 503

    run(main)


def test_the_end_of_a_session_ends_its_streams() -> None:
    async def main() -> None:
        async with talking(Scripted("x" * 50, step_s=0.02)) as (gateway, session, api):
            reading = asyncio.create_task(api.stream("completions", prompt=[5], max_tokens=None))
            while not any(flight.tokens for flight in session._in_flight):
                await asyncio.sleep(0.001)
            assert await close(gateway, session) == []
            *_, last = await reading
            assert last["error"]["code"] == "invalid_api_key"
            status, answer = await api.chat()
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")

    run(main)


def test_offsets_of_streamed_tokens_count_from_the_first_one() -> None:
    async def main() -> None:
        async with talking(Scripted("It is 7.", step_s=0.002)) as (_, _, api):
            *chunks, _ = await api.stream("completions", prompt="3+4=", logprobs=0, max_tokens=9)
            choices = [c["choices"][0] for c in chunks if c["choices"][0]["logprobs"]]
            assert len(choices) > 3
            offsets = [n for c in choices for n in c["logprobs"]["text_offset"]]
            texts = [text for c in choices for text in c["logprobs"]["tokens"]]
            assert offsets == [len("".join(texts[:n])) for n in range(len(texts))]

    run(main)


def test_only_new_tokens_are_decoded() -> None:
    decoded: list[int] = []

    def decode(tokens: Any) -> str:
        decoded.append(len(tokens))
        return TOKENIZER.decode(list(tokens))

    text, tokens = GrowingText(decode), ids("1+2=3;" * 50)
    assert "".join(text.grow(tokens, n) or "" for n in range(1, len(tokens) + 1)) == "1+2=3;" * 50
    assert max(decoded) <= 2


# Requests that are wrong or unusual.


def test_malformed_requests_are_refused_in_openais_format() -> None:
    async def main() -> None:
        async with talking(Scripted()) as (_, session, api):
            call = {"role": "assistant", "tool_calls": [{"function": "f"}]}
            for path, body in (
                ("chat/completions", {"messages": [USER, call, USER]}),
                ("chat/completions", {"messages": [{"role": "user", "content": 5}]}),
                ("chat/completions", {"messages": [{"role": "user", "content": {"a": 1}}]}),
                ("completions", {"prompt": ["one", "two"]}), ("completions", {"prompt": [[1], [2]]}),
                ("completions", {"prompt": [""]}), ("completions", {"prompt": 5}),
                ("reward", {"reward": 10**400}), ("reward", {"reward": float("nan")}),
            ):  # fmt: skip
                status, answer = await api.post(path, **body)
                assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), (path, body)
            assert (session.reward, session.calls) == (None, 0)

    run(main)


def test_any_bytes_as_a_key_are_unauthorized() -> None:
    async def main() -> None:
        async with serving(Scripted()) as (_, url):
            host, port = url.split("/")[2].split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer \xff\r\nConnection: close\r\n\r\n"
            )
            answer = await reader.read()
            writer.close()
            assert answer.startswith(b"HTTP/1.1 401")

    run(main)


def test_bugs_are_answered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with talking(Scripted()) as (_, _, api):  # it has no text to answer with
            status, answer = await api.chat()
            assert (status, answer["error"]["type"]) == (500, "server_error")
            assert "IndexError" in answer["error"]["message"]

    run(main)
    assert any(record.levelno == logging.ERROR for record in caplog.records)


def test_clients_that_close_their_connection_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        sampler = Scripted("x" * 40, step_s=0.005)
        async with talking(sampler) as (_, _, api):
            await api.stream("chat/completions", messages=[USER], until=2)
            while not sampler.turns:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)

    run(main)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_a_list_with_one_prompt_is_one_prompt() -> None:
    async def main() -> None:
        sampler = Scripted("a", "b", "c")
        async with talking(sampler) as (_, _, api):
            for prompt in ("3+4=", ["3+4="], [ids("3+4=")]):
                assert (await api.post("completions", prompt=prompt, max_tokens=4))[0] == 200
        assert {r.prompt for r in sampler.requests} == {tuple(ids("3+4="))}

    run(main)


def test_the_same_body_at_another_endpoint_is_another_call() -> None:
    async def main() -> None:
        sampler = Scripted("one", "two", step_s=0.02)
        async with talking(sampler, turn_tokens=9) as (_, _, api):
            body = {"messages": [USER], "prompt": "3+4=", "max_tokens": 9}
            (_, chat), (_, text) = await asyncio.gather(
                api.post("chat/completions", **body), api.post("completions", **body)
            )
            assert (chat["object"], text["object"]) == ("chat.completion", "text_completion")
        assert len(sampler.requests) == 2

    run(main)


def test_text_offsets_take_linear_time() -> None:
    assert protocol.text_logprobs(["ab", "c", "d"], [0.0] * 3)["text_offset"] == [0, 2, 3]
    began_s = time.process_time()
    protocol.text_logprobs(["ab"] * 30_000, [0.0] * 30_000)
    assert time.process_time() - began_s < 2
