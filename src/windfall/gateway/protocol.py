"""The OpenAI API on the wire: checks requests, and builds answers, chunks and errors. Plain data in and out.

Rules:
- How tokens are sampled is the recipe's decision: temperature, top_p, penalties and seeds of a request are ignored.
- Tools are offered with `tool_choice` "auto", and with "required" or a named tool too: the policy is never forced,
  because that would change the distribution that is trained. With "none" they are left out.
- What cannot be answered truthfully is refused with status 400: `n` above 1, `top_logprobs` above 0, `echo`, `suffix`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from windfall.models.tool_calls import ParsedTurn

MAX_STOP = 16
"""Largest number of stop strings of a request."""


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, kw_only=True, slots=True)
class CallOptions:
    """What a request asks for, beside its prompt."""

    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool


def options(body: Mapping[str, Any], *, chat: bool) -> CallOptions:
    if body.get("n") not in (None, 1):
        raise ApiError(400, "n must be 1: every call is one turn of the session", param="n")
    if chat and body.get("top_logprobs"):
        raise ApiError(400, "top_logprobs is not available; logprobs of the sampled tokens are", param="top_logprobs")
    for name in ("echo", "suffix", "best_of"):
        if not chat and body.get(name) not in (None, False, "", 1):
            raise ApiError(400, f"{name} is not supported", param=name)
    limit = _first(body, "max_completion_tokens", "max_tokens") if chat else body.get("max_tokens", 16)
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ApiError(400, f"max_tokens is {limit!r}; it must be a positive integer", param="max_tokens")
    given = body.get("logprobs")
    stream_options = body.get("stream_options") or {}
    return CallOptions(
        max_tokens=limit, stop=stop_strings(body.get("stop")), stream=_flag(body, "stream"),
        include_usage=isinstance(stream_options, Mapping) and stream_options.get("include_usage") is True,
        logprobs=given is True if chat else given is not None and given is not False,
        return_token_ids=_flag(body, "return_token_ids"),
    )  # fmt: skip


def stop_strings(stop: Any) -> tuple[str, ...]:
    found = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(found, list) or not all(isinstance(s, str) and s for s in found) or len(found) > MAX_STOP:
        raise ApiError(400, f"stop must be text or a list of at most {MAX_STOP} texts", param="stop")
    return tuple(found)


def messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise ApiError(400, "messages must be a list with at least one message", param="messages")
    for n, message in enumerate(given):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(400, f"messages[{n}] must be an object with a role", param=f"messages[{n}]")
        if not isinstance(message.get("content"), str | list | None):
            raise ApiError(400, "content must be text or a list of parts", param=f"messages[{n}].content")
        calls = message.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(map(_is_tool_call, calls))):
            what = "tool_calls must be a list of objects, each with a function that is an object"
            raise ApiError(400, what, param=f"messages[{n}].tool_calls")
    return given


def _is_tool_call(call: Any) -> bool:
    return isinstance(call, dict) and isinstance(call.get("function", {}), dict)


def tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    given = body.get("tools")
    if given is None or given == [] or body.get("tool_choice") == "none":
        return None
    if not isinstance(given, list):
        raise ApiError(400, "tools must be a list", param="tools")
    for n, tool in enumerate(given):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(400, f"tools[{n}] must be a function with a name", param=f"tools[{n}]")
    return given


def tool_names(offered: Sequence[Mapping[str, Any]] | None) -> frozenset[str]:
    return frozenset(tool["function"]["name"] for tool in offered or ())


def one_prompt(value: Any) -> str | list[int]:
    """The prompt of a completion: text, or token ids. A list that holds one prompt is accepted, too."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    return value if isinstance(value, str) and value else prompt_ids(value, "prompt")


def prompt_ids(value: Any, param: str) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(i) is int and i >= 0 for i in value):
        also = "text or " if param == "prompt" else ""
        raise ApiError(400, f"{param} must be {also}a list of token ids: one prompt for each call", param=param)
    return value


def reward(body: Mapping[str, Any], largest: float) -> float:
    value = body.get("reward")
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ApiError(400, "reward must be a number", param="reward")
    if abs(value) > largest:
        raise ApiError(400, f"the magnitude of reward must be at most {largest:g}", param="reward")
    return float(value)


def _first(body: Mapping[str, Any], *names: str) -> Any:
    return next((body[name] for name in names if body.get(name) is not None), None)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value not in (None, True, False):
        raise ApiError(400, f"{name} must be true or false", param=name)
    return value is True


# Answers.


def reply_message(parsed: ParsedTurn, ids: Sequence[str]) -> dict[str, Any]:
    """The assistant's message. `ids`: one id for each tool call."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.tool_calls:
        message["content"] = parsed.content or None
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for id, call in zip(ids, parsed.tool_calls, strict=True)
        ]
    return message


def finish_reason(finish: str, message: Mapping[str, Any] | None = None) -> str:
    return "tool_calls" if finish == "stop" and message and message.get("tool_calls") else finish


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def envelope(kind: str, id: str, model: str) -> dict[str, Any]:
    return {"id": id, "object": kind, "created": int(time.time()), "model": model}


def chat_logprobs(texts: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(texts, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def text_logprobs(texts: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
    offsets = list(accumulate(map(len, texts), initial=0))[:-1]
    none = [None] * len(texts)
    return {"tokens": list(texts), "token_logprobs": list(logprobs), "top_logprobs": none, "text_offset": offsets}
