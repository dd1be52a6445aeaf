"""Every field of a request is honored or refused: the fields of OpenAI's client, and those that vLLM's server has."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest

from tests.support.servers.serving import TEMPLATE, TOKENIZER, run, serving
from windfall.controller.gateway.protocol import ApiError
from windfall.controller.gateway.voice import Voice
from windfall.models.chat import Chat
from windfall.serve import request_fields
from windfall.serve.request_fields import read as check

ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLS = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def refused(body: dict[str, Any], *, chat: bool = True) -> str | None:
    with pytest.raises(ApiError) as caught:
        check(body, chat=chat)
    assert caught.value.status == 400
    return caught.value.param


@pytest.mark.parametrize("chat", [True, False])
def test_values_without_effect_are_accepted_and_others_are_refused(chat: bool) -> None:
    for name, neutral in request_fields.NEUTRAL.items():
        for value in (None, *neutral):
            check({name: value}, chat=chat)
        assert refused({name: {"another": "value"}}, chat=chat) == name
    for name in request_fields.NO_EFFECT:
        check({name: "anything"}, chat=chat)


@pytest.mark.parametrize(
    "body",
    [
        {"tool_choice": "required", "tools": [ADD]},
        {"tool_choice": {"type": "function", "function": {"name": "add"}}, "tools": [ADD]},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}, "tools": [ADD]},
        {"tool_choice": "sometimes", "tools": [ADD]}, {"tool_choice": 3, "tools": [ADD]},
        {"tool_choice": "auto"}, {"tool_choice": "required", "tools": []},
    ],
)  # fmt: skip
def test_a_tool_cannot_be_forced(body: dict[str, Any]) -> None:
    assert refused(body) == "tool_choice"
    check({**body, "tool_choice": "none"}, chat=True)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logprobs": 2}, "logprobs"), ({"logprobs": "1"}, "logprobs"), ({"logprobs": -1}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"), ({"stream_options": 1}, "stream_options"),
        ({"stream": True, "stream_options": [1]}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"min_tokens": 4, "max_tokens": 8}, "min_tokens"), ({"min_tokens": "4"}, "min_tokens"),
        ({"min_tokens": 4, "max_tokens": 3, "ignore_eos": True}, "min_tokens"),
        ({"min_tokens": 4, "max_tokens": 8, "ignore_eos": True, "stop": "a"}, "min_tokens"),
        ({"messages": []}, "messages"), ({"temprature": 1}, "temprature"), ({"tools": [ADD]}, "tools"),
    ],
)  # fmt: skip
def test_fields_of_completions_are_checked(body: dict[str, Any], param: str) -> None:
    assert refused(body, chat=False) == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logprobs": 1}, "logprobs"), ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
        ({"prompt": "3+4="}, "prompt"), ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": {"thinking": {"a": 1}}}, "chat_template_kwargs[...]"),
    ],
)  # fmt: skip
def test_fields_of_chats_are_checked(body: dict[str, Any], param: str) -> None:
    assert refused(body) == param


def test_an_unknown_field_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ApiError, match="Did you mean 'temperature'"):
        check({"temprature": 1}, chat=True)
    with pytest.raises(ApiError) as caught:
        check({"x" * 10_000: 1}, chat=True)
    assert len(str(caught.value)) < 2000


def test_requests_of_load_generators_are_accepted() -> None:
    """Their bodies in 2026: `vllm bench serve`, guidellm, genai-perf."""
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    vllm = {"model": "tiny", "max_tokens": 9, "repetition_penalty": 1.0, "logprobs": None, "ignore_eos": True, **usage}
    check({**vllm, "prompt": "3+4="}, chat=False)
    guidellm = {"model": "tiny", "max_tokens": 9, "stop": None, "ignore_eos": True, **usage}
    guidellm["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    check({**guidellm, "prompt": "3+4="}, chat=False)
    check({**guidellm, "messages": [], "max_completion_tokens": 9}, chat=True)
    check({"messages": [], "max_tokens": 9, "min_tokens": 9, "ignore_eos": True, "stream": True}, chat=True)


def test_all_fields_of_openais_client_are_known() -> None:
    pytest.importorskip("openai")
    from openai.types import completion_create_params as texts
    from openai.types.chat import completion_create_params as chats

    for types, chat in ((chats, True), (texts, False)):
        for name in get_type_hints(types.CompletionCreateParamsBase):
            check({name: None}, chat=chat)


def test_openais_client_gets_what_it_asks_for_or_an_error() -> None:
    openai = pytest.importorskip("openai")

    async def main() -> None:
        async with serving() as s:
            api = openai.AsyncOpenAI(base_url=f"{s.url}/v1", api_key="none", max_retries=0)
            ask: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "3+4="}]}
            accepted = await api.chat.completions.create(
                **ask, max_completion_tokens=5, n=2, seed=1, user="me", metadata={"a": "b"}, presence_penalty=0,
                frequency_penalty=0.0, logit_bias={}, response_format={"type": "text"}, stop=["\n\n", "zzz"],
                logprobs=True, top_logprobs=0, store=False, tools=[ADD], tool_choice="auto",
                parallel_tool_calls=True, extra_body={"ignore_eos": True},
            )  # fmt: skip
            assert [len(c.logprobs.content) for c in accepted.choices] == [5, 5]
            for wrong in (
                {"presence_penalty": 0.5}, {"frequency_penalty": 1}, {"logit_bias": {"5": 10}}, {"store": True},
                {"response_format": {"type": "json_object"}}, {"top_logprobs": 2, "logprobs": True},
                {"tools": [ADD], "tool_choice": "required"}, {"reasoning_effort": "low"},
                {"functions": [ADD["function"]]}, {"modalities": ["text", "audio"]},
            ):  # fmt: skip
                with pytest.raises(openai.BadRequestError) as caught:
                    await api.chat.completions.create(**ask, max_tokens=5, **wrong)
                assert caught.value.param in wrong
            texts = await api.completions.create(
                model="tiny", prompt=["3+4=", "5+5="], max_tokens=4, n=2, best_of=2, echo=False, suffix="",
                logprobs=0, extra_body={"ignore_eos": True},
            )  # fmt: skip
            assert [len(c.logprobs.token_logprobs) for c in texts.choices] == [4] * 4
            assert texts.usage.completion_tokens == 16
            for wrong in ({"echo": True}, {"suffix": "end"}, {"best_of": 3}, {"logprobs": 5}):
                with pytest.raises(openai.BadRequestError) as caught:
                    await api.completions.create(model="tiny", prompt="3+4=", **wrong)
                assert [caught.value.param] == list(wrong)
            stream = await api.completions.create(
                model="tiny", prompt="3+4=", n=2, max_tokens=4, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            assert {c.choices[0].index for c in chunks[:-1]} == {0, 1}
            assert chunks[-1].usage.prompt_tokens == len(TOKENIZER.encode("3+4="))
            await api.close()

    run(main)


def test_parallel_tool_calls_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Voice.decode
    monkeypatch.setattr(Voice, "decode", lambda self, ids: CALLS + CALLS if len(ids) > 1 else decode(self, ids))

    async def main() -> None:
        async with serving() as s:
            ask: dict[str, Any] = {"messages": [{"role": "user", "content": "3+4="}], "tools": [ADD], "max_tokens": 4}
            for parallel, count in ((None, 2), (True, 2), (False, 1)):
                body = {**ask, "parallel_tool_calls": parallel, "ignore_eos": True}
                _, whole = await s.post("/v1/chat/completions", body)
                assert len(whole["choices"][0]["message"]["tool_calls"]) == count
                events = await s.stream("/v1/chat/completions", body)
                calls = [e["choices"][0]["delta"].get("tool_calls") for e in events[:-1]]
                assert [len(c) for c in calls if c] == [count]
            _, whole = await s.post("/v1/chat/completions", {**ask, "n": 2, "ignore_eos": True})
            made = [call["id"] for c in whole["choices"] for call in c["message"]["tool_calls"]]
            assert len(set(made)) == 4, "ids of calls are unique in an answer"

    run(main)


def test_tools_that_the_model_would_not_see_are_refused() -> None:
    async def main() -> None:
        async with serving() as s:
            ask = {"messages": [{"role": "user", "content": "3+4="}], "tools": [ADD], "max_tokens": 1}
            assert (await s.post("/v1/chat/completions", ask))[0] == 200
            without_tools = "{% for m in messages %}{{ m.content }}{% endfor %}"
            s.api.voices[""].chat = Chat(TOKENIZER, s.api.voices[""].stop, template=without_tools)
            status, refused = await s.post("/v1/chat/completions", {**ask, "n": 2})
            assert (status, refused["error"]["param"]) == (400, "tools")
            assert (await s.post("/v1/chat/completions", {**ask, "tool_choice": "none"}))[0] == 200

    run(main)


def test_variables_of_the_chat_template() -> None:
    async def main() -> None:
        async with serving() as s:
            template = TEMPLATE + "{% if thinking is defined and not thinking %}no{% endif %}"
            s.api.voices[""].chat = Chat(TOKENIZER, s.api.voices[""].stop, template=template)
            ask = {"messages": [{"role": "user", "content": "3+4="}], "max_tokens": 1, "return_token_ids": True}
            _, plain = await s.post("/v1/chat/completions", ask)
            _, other = await s.post("/v1/chat/completions", {**ask, "chat_template_kwargs": {"thinking": False}})
            assert other["prompt_token_ids"] == [*plain["prompt_token_ids"], *TOKENIZER.encode("no")]
            _, after = await s.post("/v1/chat/completions", ask)
            assert after["prompt_token_ids"] == plain["prompt_token_ids"], "they are those of one request"

    run(main)
