"""The gateway with OpenAI's own client: what a client gets, and what the session's segments hold."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from tests.support.fleets.samplers import EOS, TOKENIZER, OnEngine, Scripted, close, openai_client, run, serving
from windfall.controller.gateway.session import TokenLimits

openai = pytest.importorskip("openai", reason="the gateway is tested with OpenAI's client")

USER = {"role": "user", "content": "What is 3+4?"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = 'Let me see.<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>'


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_chat_of_several_turns_is_one_segment() -> None:
    async def main() -> None:
        sampler = Scripted("It is 7.", "Sure.")
        async with serving(sampler) as (gateway, url):
            session = gateway.open("7/0", {"": TokenLimits(100)})
            api = openai_client(url, session)
            answer = await api.chat.completions.create(
                model="any", messages=[USER], logprobs=True, extra_body={"return_token_ids": True}
            )
            choice = answer.choices[0]
            assert (choice.message.content, choice.finish_reason) == ("It is 7.", "stop")
            assert answer.prompt_token_ids == ids("[user] What is 3+4?<eos>[assistant] ")
            assert choice.token_ids == [*ids("It is 7."), EOS]
            assert [t.logprob for t in choice.logprobs.content] == list(sampler.turns[0].logprobs)
            assert answer.usage.completion_tokens == 9
            messages = [USER, choice.message.model_dump(), {"role": "user", "content": "Sure?"}]
            again = await api.chat.completions.create(model="any", messages=messages)
            assert again.choices[0].message.content == "Sure."
            (segment,) = await close(gateway, session)
        first, second = ([*ids(t), EOS] for t in ("It is 7.", "Sure."))
        between = ids("[user] Sure?<eos>[assistant] ")
        assert segment.tokens == [*first, *between, *second]
        assert [list(turn.tokens) for turn in sampler.turns] == [first, second]
        assert [r.segment for r in sampler.requests] == [0, 0]

    run(main)


def test_streams_have_the_same_content() -> None:
    async def main() -> None:
        text = "It is 7, I think."
        async with serving(Scripted(text, text)) as (gateway, url):
            session = gateway.open("7/0", {"": TokenLimits(100)})
            stream = await openai_client(url, session).chat.completions.create(
                model="any", messages=[USER], stream=True, logprobs=True, stream_options={"include_usage": True},
                extra_body={"return_token_ids": True},
            )  # fmt: skip
            chunks = [chunk async for chunk in stream]
            content = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
            assert len(content) > 5
            assert "".join(content) == text
            assert chunks[0].prompt_token_ids == ids("[user] What is 3+4?<eos>[assistant] ")
            tokens = [t for c in chunks if c.choices for t in getattr(c.choices[0], "token_ids", None) or []]
            assert tokens == [*ids(text), EOS]
            assert chunks[-1].usage.completion_tokens == len(tokens)
            assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
            parts = await openai_client(url, session).completions.create(
                model="any", prompt="3+4=", max_tokens=30, stream=True
            )
            assert "".join([p.choices[0].text async for p in parts]) == text

    run(main)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_go_back_and_forth(stream: bool) -> None:
    async def main() -> None:
        sampler = Scripted(CALL, "It is 7.")
        async with serving(sampler) as (gateway, url):
            session = gateway.open("7/0", {"": TokenLimits(200)})
            api = openai_client(url, session)
            asked: dict[str, Any] = {"model": "any", "messages": [USER], "tools": TOOLS}
            if stream:
                async with api.chat.completions.stream(**asked) as events:
                    answer = await events.get_final_completion()
            else:
                answer = await api.chat.completions.create(**asked)
            (call,) = answer.choices[0].message.tool_calls
            assert answer.choices[0].finish_reason == "tool_calls"
            assert (answer.choices[0].message.content, call.function.name) == ("Let me see.", "add")
            assert call.function.arguments == '{"a": 3}'
            sent_back = {"id": call.id, "type": "function", "function": {"name": "add", "arguments": '{"a":3}'}}
            reply = {"role": "assistant", "content": "Let me see.", "tool_calls": [sent_back]}
            messages = [USER, reply, {"role": "tool", "tool_call_id": call.id, "content": "7"}]
            final = await api.chat.completions.create(model="any", messages=messages, tools=TOOLS)
            assert final.choices[0].message.content == "It is 7."
            (segment,) = await close(gateway, session)
        assert segment.tokens == [*ids(CALL), EOS, *ids("[tool] 7<eos>[assistant] "), *ids("It is 7."), EOS]

    run(main)


def test_fields_of_a_call_that_have_no_effect_are_named_once() -> None:
    async def main() -> None:
        named = list[str]()
        async with serving(Scripted("one", "two")) as (gateway, url):
            gateway.on_ignored = named.append
            api = openai_client(url, gateway.open("7/0", {"": TokenLimits(100)}))
            for temperature in (0.1, 0.2):
                await api.chat.completions.create(
                    model="any", messages=[USER], tools=TOOLS, temperature=temperature, seed=None, max_tokens=9,
                    tool_choice="required", response_format={"type": "text"}, user="me", stop=["x"],
                    extra_body={"chat_template_kwargs": {"think": False}, "temprature": 1},
                )  # fmt: skip
        assert named == ["chat_template_kwargs", "temperature", "temprature", "tool_choice"]

    run(main)


def test_edited_history_is_a_second_segment() -> None:
    async def main() -> None:
        async with serving(Scripted("one", "two")) as (gateway, url):
            session = gateway.open("7/0", {"": TokenLimits(100)})
            api = openai_client(url, session)
            await api.chat.completions.create(model="any", messages=[USER])
            messages = [{"role": "system", "content": "brief"}, USER, {"role": "assistant", "content": "one"}, USER]
            await api.chat.completions.create(model="any", messages=messages)
            segments = await close(gateway, session)
        assert [s.tokens for s in segments] == [[*ids("one"), EOS], [*ids("two"), EOS]]

    run(main)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_turn_and_are_not_returned(stream: bool) -> None:
    async def main() -> None:
        async with serving(Scripted("Thought: x; Observation: y")) as (gateway, url):
            session = gateway.open("7/0", {"": TokenLimits(100)})
            asked: dict[str, Any] = {"model": "any", "messages": [USER], "stop": ["Observation:", "zzz"]}
            api = openai_client(url, session)
            if stream:
                chunks = [c async for c in await api.chat.completions.create(stream=True, **asked)]
                text = "".join(c.choices[0].delta.content or "" for c in chunks)
            else:
                answer = await api.chat.completions.create(**asked)
                text = answer.choices[0].message.content
                assert answer.choices[0].finish_reason == "stop"
            assert text == "Thought: x; "
            (segment,) = await close(gateway, session)
        assert segment.tokens == ids("Thought: x; Observation:")

    run(main)


def test_budgets() -> None:
    async def main() -> None:
        async with serving(Scripted("a" * 50, "b" * 50)) as (gateway, url):
            session = gateway.open("7/0", {"": TokenLimits(12)})
            api = openai_client(url, session)
            cut = await api.chat.completions.create(model="any", messages=[USER], max_tokens=5)
            assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("aaaaa", "length")
            rest = await api.chat.completions.create(model="any", messages=[USER])
            assert rest.choices[0].message.content == "b" * 7
            with pytest.raises(openai.BadRequestError) as refused:
                await api.chat.completions.create(model="any", messages=[USER])
            assert refused.value.code == "context_length_exceeded"
            assert session.ran_out
            assert sum(len(s.tokens) for s in await close(gateway, session)) == 12

    run(main)


def test_a_repeated_call_joins_the_one_in_flight() -> None:
    async def main() -> None:
        sampler = Scripted("It is 7.", "Another.", step_s=0.5)
        async with serving(sampler) as (gateway, url):
            session = gateway.open("7/0", {"": TokenLimits(100)})
            impatient = openai_client(url, session, timeout=1.0, max_retries=5)  # the client gives up and asks again
            answer = await impatient.chat.completions.create(model="any", messages=[USER])
            assert answer.choices[0].message.content == "It is 7."
            assert len(sampler.requests) == 1
            await openai_client(url, session).chat.completions.create(model="any", messages=[USER])
            assert [s.tokens for s in await close(gateway, session)] == [
                [*ids(t), EOS] for t in ("It is 7.", "Another.")
            ]

    run(main)


def test_equal_calls_at_the_same_time_get_samples_of_their_own() -> None:
    async def main() -> None:
        texts = ["It is 7.", "It is 8.", "It is 9."]
        async with serving(Scripted(*texts, step_s=0.5)) as (gateway, url):
            session = gateway.open("7/0", {"": TokenLimits(100)})
            api = openai_client(url, session)
            asked = [api.chat.completions.create(model="any", messages=[USER], max_tokens=20) for _ in texts]
            assert sorted(str(a.choices[0].message.content) for a in await asyncio.gather(*asked)) == texts
            assert sorted(s.tokens for s in await close(gateway, session)) == sorted([*ids(t), EOS] for t in texts)

    run(main)


def test_an_answer_that_no_client_received_is_not_trained() -> None:
    async def main() -> None:
        sampler = Scripted("It is 7.", step_s=0.5)
        async with serving(sampler) as (gateway, url):
            session = gateway.open("7/0", {"": TokenLimits(100)})
            with pytest.raises(openai.APITimeoutError):
                await openai_client(url, session, timeout=1.0).chat.completions.create(model="any", messages=[USER])
            while not sampler.turns:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0)
            await gateway.close(session)
            assert sampler.retracted == [0]

    run(main)


def test_keys_are_bound_to_one_open_session() -> None:
    async def main() -> None:
        async with serving(Scripted("one", "two", step_s=0.05)) as (gateway, url):
            first, second = gateway.open("7/0", {"": TokenLimits(100)}), gateway.open("7/1", {"": TokenLimits(100)})
            assert first.key != second.key
            assert [m.id async for m in openai_client(url, first).models.list()] == ["scripted"]
            await openai_client(url, first).chat.completions.create(model="any", messages=[USER])
            assert (first.calls, second.calls) == (1, 0)
            waiting = asyncio.create_task(
                openai_client(url, second).chat.completions.create(model="any", messages=[USER])
            )
            await asyncio.sleep(0.05)
            for session in (first, second):
                await gateway.close(session)
                with pytest.raises(openai.AuthenticationError):
                    await openai_client(url, session).chat.completions.create(model="any", messages=[USER])
            with pytest.raises(openai.AuthenticationError):
                await waiting
            async with aiohttp.ClientSession() as http, http.get(f"{url}/models") as got:
                assert got.status == 401

    run(main)


def test_errors_are_in_openais_format() -> None:
    async def main() -> None:
        async with serving(Scripted()) as (gateway, url), aiohttp.ClientSession() as http:
            session = gateway.open("7/0", {"": TokenLimits(100)})
            headers = {"Authorization": f"Bearer {session.key}"}
            for path, body, status in (
                ("chat/completions", {"messages": []}, 400), ("chat/completions", {"messages": [1]}, 400),
                ("chat/completions", {"messages": [USER], "n": 2}, 400),
                ("chat/completions", {"messages": [USER], "tools": [{}]}, 400),
                ("chat/completions", {"messages": [USER], "max_tokens": 0}, 400),
                ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400),
                ("chat/completions", [], 400), ("completions", {"prompt": [-1]}, 400),
                ("reward", {"reward": "high"}, 400), ("reward", {"reward": 1e300}, 400), ("other", {}, 404),
            ):  # fmt: skip
                async with http.post(f"{url}/{path}", json=body, headers=headers) as got:
                    assert (got.status, set((await got.json())["error"])) == (
                        status, {"message", "type", "param", "code"}
                    ), path  # fmt: skip
            async with http.post(f"{url}/reward", json={"reward": 0.5}, headers=headers) as got:
                assert got.status == 200
            assert session.reward == 0.5
            assert session.calls == 0

    run(main)


def test_every_token_of_a_session_is_what_the_engine_sampled() -> None:
    """The tiny model on a real engine, with several sessions at once: tokens, text, ids and log-probs agree."""
    import torch

    from tests.support.engines.small_models import engine
    from windfall.models import attention
    from windfall.models.load import load

    torch.set_num_threads(1)
    model = load("tiny", dtype="float32", device="cpu")
    model.set_attn_implementation(attention.NAME)

    async def talk(gateway: Any, url: str, n: int, sampler: OnEngine) -> None:
        session = gateway.open(f"{n}/0", {"": TokenLimits(60)})
        api, messages = openai_client(url, session), [{"role": "user", "content": f"{n}+4="}]
        for _ in range(3):
            answer = await api.chat.completions.create(model="any", messages=messages, max_tokens=12)
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
        (segment,) = await close(gateway, session)
        made = [sampler.turns[session.id, 0, turn] for turn in range(3)]
        for prompt, turn in made:
            assert segment.ids[: len(prompt) + len(turn.tokens)] == prompt + turn.tokens

    async def main() -> None:
        sampler = OnEngine(engine(model))
        async with serving(sampler) as (gateway, url):
            await asyncio.gather(*(talk(gateway, url, n, sampler) for n in range(4)))
            session = gateway.open("9/0", {"": TokenLimits(20)})
            headers = {"Authorization": f"Bearer {session.key}"}
            body = {"prompt": ids("3+4="), "max_tokens": 8, "return_token_ids": True}
            path = f"{url}/completions"
            async with aiohttp.ClientSession(headers=headers) as http, http.post(path, json=body) as got:
                choice = (await got.json())["choices"][0]
            assert tuple(choice["token_ids"]) == sampler.turns["9/0", 0, 0][1].tokens

    run(main)
