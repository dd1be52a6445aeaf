"""Parses the tool calls in a turn's sampled text, for the formats of common model families. Pure.

    hermes     <tool_call>{"name": ..., "arguments": {...}}</tool_call>       Qwen, Hermes, SmolLM3, and many others
    glm        <tool_call>NAME <arg_key>K</arg_key><arg_value>V</arg_value>   GLM 4
    xml        <tool_call><function=NAME><parameter=K>V</parameter></function></tool_call>    Qwen coder
    mistral    [TOOL_CALLS][{"name": ..., "arguments": {...}}]
    deepseek   <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME ```json {...} ```<｜tool▁call▁end｜>
    llama      {"name": ..., "parameters": {...}}, alone or after <|python_tag|>
    pythonic   [name(key="value"), ...], alone or in <|tool_call_start|>...<|tool_call_end|>     LFM2, Llama 4

Rules: the parser never repairs and never strips arguments. If one call of a turn is malformed, or calls a tool that was
not offered, the turn has no tool calls and its whole text is its content. The first format that matches wins; the two
formats without marks (llama, pythonic) match only if they are the whole text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedTurn:
    content: str
    """The text before the first tool call; the whole text if there is none."""
    tool_calls: tuple[ToolCall, ...] = ()


class _Malformed(ValueError):
    """The text has the marks of a format, but not its content."""


def parse(text: str, tools: Collection[str] | None) -> ParsedTurn:
    """The content and the tool calls of a turn. `tools`: the names of the offered tools; without any, all is content.
    None: they are not known, and any name is accepted.

    >>> parse('Let me see.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', {"add"}).tool_calls
    (ToolCall(name='add', arguments='{"a": 1}'),)
    >>> parse('<tool_call>{"name": "add"', {"add"}).content
    '<tool_call>{"name": "add"'
    """
    if tools is not None and not tools:
        return ParsedTurn(content=text)
    for mark, read in _FORMATS:
        start = text.find(mark) if mark else 0
        if start < 0:
            continue
        try:
            calls = tuple(read(text[start:]))
        except (_Malformed, ValueError, RecursionError):
            continue
        if calls and (tools is None or all(call.name in tools for call in calls)):
            return ParsedTurn(content=text[:start], tool_calls=calls)
    return ParsedTurn(content=text)


def _blocks(text: str, begin: str, end: str) -> Iterator[str]:
    """The text of each block. Only white space may stand between blocks, and after the last one."""
    rest = text
    while rest.strip():
        rest = rest.lstrip()
        if not rest.startswith(begin):
            raise _Malformed(rest)
        inside, found, rest = rest[len(begin) :].partition(end)
        if not found:
            raise _Malformed(inside)
        yield inside


def _from_object(value: Any, keys: tuple[str, ...] = ("arguments", "parameters")) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise _Malformed(value)
    arguments = next((value[key] for key in keys if key in value), {})
    if isinstance(arguments, str):
        if not isinstance(json.loads(arguments), dict):
            raise _Malformed(arguments)
        return ToolCall(name=value["name"], arguments=arguments)
    if not isinstance(arguments, dict):
        raise _Malformed(arguments)
    return ToolCall(name=value["name"], arguments=_json(arguments))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes(text: str) -> Iterator[ToolCall]:
    for block in _blocks(text, "<tool_call>", "</tool_call>"):
        yield _from_object(json.loads(block))


_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _glm(text: str) -> Iterator[ToolCall]:
    for block in _blocks(text, "<tool_call>", "</tool_call>"):
        name, _, _ = block.partition("<arg_key>")
        pairs, left = _ARGUMENT.findall(block[len(name) :]), _ARGUMENT.sub("", block[len(name) :])
        if left.strip() or not name.strip():
            raise _Malformed(block)
        yield ToolCall(name=name.strip(), arguments=_json({key: _value(value) for key, value in pairs}))


_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _xml(text: str) -> Iterator[ToolCall]:
    for block in _blocks(text, "<tool_call>", "</tool_call>"):
        function = _FUNCTION.fullmatch(block)
        if function is None or _PARAMETER.sub("", function[2]).strip():
            raise _Malformed(block)
        pairs = _PARAMETER.findall(function[2])
        yield ToolCall(name=function[1], arguments=_json({key: _value(value) for key, value in pairs}))


def _value(text: str) -> Any:
    """A value that these formats write as text if it is text, else as JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _mistral(text: str) -> Iterator[ToolCall]:
    calls = json.loads(text.removeprefix("[TOOL_CALLS]"))
    for call in calls if isinstance(calls, list) else [calls]:
        yield _from_object(call)


_DEEPSEEK = re.compile(r"\w*<｜tool▁sep｜>(.+?)\n```json\n(.*)\n```", re.DOTALL)


def _deepseek(text: str) -> Iterator[ToolCall]:
    inside = text.removeprefix("<｜tool▁calls▁begin｜>").partition("<｜tool▁calls▁end｜>")
    if inside[2].strip():
        raise _Malformed(inside[2])
    for block in _blocks(inside[0], "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"):
        match = _DEEPSEEK.fullmatch(block)
        if match is None:
            raise _Malformed(block)
        yield _from_object({"name": match[1], "arguments": match[2]})


def _llama(text: str) -> Iterator[ToolCall]:
    yield _from_object(json.loads(text.removeprefix("<|python_tag|>")), ("parameters", "arguments"))


def _pythonic(text: str) -> Iterator[ToolCall]:
    inside = text.removeprefix("<|tool_call_start|>").strip().removesuffix("<|tool_call_end|>").strip()
    try:
        calls = ast.parse(inside, mode="eval").body
    except (SyntaxError, MemoryError) as e:
        raise _Malformed(inside) from e
    if not isinstance(calls, ast.List):
        raise _Malformed(inside)
    for call in calls.elts:
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name | ast.Attribute):
            raise _Malformed(inside)
        if any(word.arg is None for word in call.keywords):
            raise _Malformed(inside)
        arguments = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        try:
            yield ToolCall(name=ast.unparse(call.func), arguments=_json(arguments))
        except TypeError as e:  # a set, bytes or a complex number
            raise _Malformed(inside) from e


_FORMATS: list[tuple[str, Callable[[str], Iterator[ToolCall]]]] = [
    ("<tool_call>", _hermes),
    ("<tool_call>", _xml),
    ("<tool_call>", _glm),
    ("[TOOL_CALLS]", _mistral),
    ("<｜tool▁calls▁begin｜>", _deepseek),
    ("<|tool_call_start|>", _pythonic),
    ("<|python_tag|>", _llama),
    ("", _llama),
    ("", _pythonic),
]
"""The mark with which the calls of a format begin, and its parser."""
