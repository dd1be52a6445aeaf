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
UNFINISHED = "\ufffd"
"""What a tokenizer decodes an incomplete character to."""
MAX_ECHO = 100
"""Characters of a client's text that an error repeats at most."""


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

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
    usage_in_chunks: bool
    """Every chunk of a stream has the usage of its choice so far."""
    logprobs: bool
    return_token_ids: bool
    n: int = 1
    """Number of answers to each prompt."""
    one_tool_call: bool = False
    """An answer has at most one tool call; more are left out."""


def options(body: Mapping[str, Any], *, chat: bool, most: int = 1) -> CallOptions:
    """`most`: upper limit for the number of answers."""
    n = 1 if body.get("n") is None else body["n"]
    if type(n) is not int or not 1 <= n <= most:
        raise ApiError(
            400, f"n must be {f'between 1 and {most}' if most > 1 else '1: a call has one answer'}", param="n"
        )
    if chat and body.get("top_logprobs"):
        raise ApiError(400, "top_logprobs is not available; logprobs of the sampled tokens are", param="top_logprobs")
    for name, without_effect in (("echo", False), ("suffix", ""), ("best_of", n)):
        if not chat and body.get(name) not in (None, without_effect):
            raise ApiError(400, f"{name} is not supported", param=name)
    limit = _first(body, "max_completion_tokens", "max_tokens")
    if limit is None and not chat and "max_tokens" not in body:
        limit = 16  # OpenAI's default; null means no limit
    if limit is not None and (type(limit) is not int or limit < 1):
        what = f"max_tokens is {repr(limit)[:MAX_ECHO]}; it must be a positive integer"
        raise ApiError(400, what, param="max_tokens")
    given = body.get("logprobs")
    stream_options = body.get("stream_options")
    stream_options = stream_options if isinstance(stream_options, Mapping) else {}
    return CallOptions(
        max_tokens=limit,
        stop=stop_strings(body.get("stop")),
        stream=_flag(body, "stream"),
        include_usage=stream_options.get("include_usage") is True,
        usage_in_chunks=stream_options.get("include_usage") is stream_options.get("continuous_usage_stats") is True,
        n=n,
        logprobs=given is True if chat else given is not None and given is not False,
        return_token_ids=_flag(body, "return_token_ids"),
    )


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


def prompts(value: Any, most: int = 1) -> list[str | list[int]]:
    """The prompts of a completion: one, or a list of at most `most`. Each is text, or token ids.

    >>> prompts("a"), prompts([5, 6]), prompts(["a", [5, 6]], 2)
    (['a'], [[5, 6]], ['a', [5, 6]])
    """
    several = isinstance(value, list) and any(isinstance(prompt, str | list) for prompt in value)
    found = value if several else [value]
    if len(found) > most:
        what = f"there are {len(found)} prompts, and a call has at most {most}"
        raise ApiError(400, what, param="prompt")
    return [prompt if isinstance(prompt, str) and prompt else prompt_ids(prompt, "prompt") for prompt in found]


def prompt_ids(value: Any, param: str) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(i) is int and i >= 0 for i in value):
        also = "text or " if param == "prompt" else ""
        raise ApiError(400, f"{param} must be {also}a list of token ids, and not empty", param=param)
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
    """The bytes of a token that is only a part of a character are not known from its text: they are null.

    >>> [token["bytes"] for token in chat_logprobs(["é", UNFINISHED], [-0.5, -0.1])["content"]]
    [[195, 169], None]
    """
    content = [
        {
            "token": text,
            "logprob": logprob,
            "bytes": None if UNFINISHED in text else list(text.encode()),
            "top_logprobs": [],
        }
        for text, logprob in zip(texts, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def text_logprobs(texts: Sequence[str], logprobs: Sequence[float], start: int = 0) -> dict[str, Any]:
    """`start`: number of characters before these tokens."""
    offsets = list(accumulate(map(len, texts), initial=start))[:-1]
    none = [None] * len(texts)
    return {"tokens": list(texts), "token_logprobs": list(logprobs), "top_logprobs": none, "text_offset": offsets}
