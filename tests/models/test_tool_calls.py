"""Tool calls in sampled text: what is a call, and what stays text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windfall.models.tool_calls import ParsedTurn, ToolCall, parse

ADD = ToolCall(name="add", arguments='{"a": 1, "b": "x"}')
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>',
    "hermes, arguments as text": '<tool_call>{"name": "add", "arguments": '
    '"{\\"a\\": 1, \\"b\\": \\"x\\"}"}</tool_call>',
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>"
    "<arg_value>x</arg_value>\n</tool_call>",
    "xml": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n</function>\n"
    "</tool_call>",
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": "x"}}]',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1, "b": "x"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "pythonic, marked": "<|tool_call_start|>[add(a=1, b='x')]<|tool_call_end|>",
    "llama, marked": '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": "x"}}',
}
ALONE = {
    "llama": '{"name": "add", "parameters": {"a": 1, "b": "x"}}',
    "pythonic": "[add(a=1, b='x')]",
}


@pytest.mark.parametrize("name", [*WRITTEN, *ALONE])
def test_formats(name: str) -> None:
    assert parse((WRITTEN | ALONE)[name], {"add"}) == ParsedTurn(content="", tool_calls=(ADD,))


@pytest.mark.parametrize("name", list(WRITTEN))
def test_text_before_a_call_is_content(name: str) -> None:
    assert parse(f"I add. {WRITTEN[name]}", {"add"}) == ParsedTurn(content="I add. ", tool_calls=(ADD,))


@pytest.mark.parametrize("name", [*WRITTEN, *ALONE])
def test_what_is_no_valid_call_stays_text(name: str) -> None:
    text = (WRITTEN | ALONE)[name]
    damaged = text[1:] if name in ("glm", "xml") else text.replace("1", "{")  # in these two, any value is text
    for wrong in (text[:-4], f"{text} and more", text.replace("add", "sub"), damaged):
        assert parse(wrong, {"add"}) == ParsedTurn(content=wrong)
    assert parse(text, ()) == ParsedTurn(content=text)


def test_several_calls() -> None:
    both = parse(WRITTEN["hermes"] + "\n" + WRITTEN["hermes"], {"add"})
    assert both.tool_calls == (ADD, ADD)
    one_bad = WRITTEN["hermes"] + "<tool_call>{</tool_call>"
    assert parse(one_bad, {"add"}).content == one_bad


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists), max_size=3))
def test_arguments_are_not_changed(arguments: dict[str, object]) -> None:
    text = json.dumps({"name": "add", "arguments": arguments}).replace("<", "\\u003c")
    (call,) = parse(f"<tool_call>{text}</tool_call>", {"add"}).tool_calls
    assert json.loads(call.arguments) == arguments


@given(st.text(st.sampled_from('<>[]{}()"=\\/ \n') | st.sampled_from("tool_calladd1:,"), max_size=60))
def test_any_text_is_parsed_without_an_error(text: str) -> None:
    parsed = parse(f"<tool_call>{text}", {"add"})
    assert parsed.tool_calls or parsed.content == f"<tool_call>{text}"
    parse(text, {"add"})
