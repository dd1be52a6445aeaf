"""The OpenAI API on the wire: checks requests, and builds answers, chunks and errors. Plain data in and out.

Rules:
- How tokens are sampled is the recipe's decision: temperature, top_p, penalties and seeds of a request have no effect.
- Tools are offered with `tool_choice` "auto", and with "required" or a named tool too: the policy is never forced,
  because that would change the distribution that is trained. With "none" they are left out.
- The types of all fields are those of the structures below. Other fields have no effect; those that would change the
  answer of another server are named (`without_effect`).
- What cannot be answered truthfully is refused with status 400: `n` above 1, `top_logprobs` above 0, `echo`, `suffix`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from windfall.models.tool_calls import ParsedTurn

MAX_STOP = 16
"""Largest number of stop strings of a request."""
UNFINISHED = "\ufffd"
"""What a tokenizer decodes an incomplete character to."""
MAX_ECHO = 100
"""Characters of a client's text that an error repeats at most."""
USED = frozenset({
    "model", "messages", "prompt", "tools", "n", "max_tokens", "max_completion_tokens", "stop", "stream",
    "stream_options", "logprobs", "return_token_ids", "echo", "suffix", "best_of",
})  # fmt: skip
"""Fields that agents get an answer to."""
NO_EFFECT = frozenset({
    "user", "metadata", "safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "prediction", "priority", "request_id",
})  # fmt: skip
"""Fields that say who asks, or how to be faster: they do not change the answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},),
    "min_p": (0,), "use_beam_search": (False,), "response_format": ({"type": "text"},), "stop_token_ids": ([],),
    "bad_words": ([],), "allowed_token_ids": ([],), "structured_outputs": (), "guided_json": (), "guided_regex": (),
    "guided_choice": (), "guided_grammar": (), "length_penalty": (1,), "prompt_logprobs": (0,), "functions": ([],),
    "function_call": ("none",), "modalities": (["text"],), "audio": (), "store": (False,), "reasoning_effort": (),
    "verbosity": ("medium",), "web_search_options": (), "moderation": (), "chat_template": (), "documents": ([],),
    "add_generation_prompt": (True,), "continue_final_message": (False,), "include_stop_str_in_output": (False,),
    "skip_special_tokens": (False,), "truncate_prompt_tokens": (), "thinking_token_budget": (), "top_logprobs": (0,),
}  # fmt: skip
"""Fields that are not supported, and the values that have no effect."""
StopString = Annotated[str, Meta(min_length=1)]
"""An empty one would end every answer before its first token."""
T = TypeVar("T")


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


# Requests.


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CallFields(msgspec.Struct):
    """The fields of a call that say how it is answered."""

    n: Annotated[int, Meta(ge=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | int | None = None
    return_token_ids: bool | None = None


class ToolCallFields(msgspec.Struct):
    function: dict[str, Any] = {}


class MessageFields(msgspec.Struct):
    role: str
    content: str | list[Any] | None = None
    tool_calls: list[ToolCallFields] | None = None


class FunctionFields(msgspec.Struct):
    name: str


class ToolFields(msgspec.Struct):
    function: FunctionFields


class ChatFields(msgspec.Struct):
    messages: Annotated[list[MessageFields], Meta(min_length=1)]
    tools: list[ToolFields] | None = None


class RewardFields(msgspec.Struct):
    reward: float | None = None
    rewards: dict[str, float] = {}


class PromptFields(msgspec.Struct):
    prompt: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]


def checked(body: Mapping[str, Any], kind: type[T]) -> T:
    """The fields of a body as this structure. Raises ApiError."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as e:
        what, _, param = str(e).partition(" - at `$.")
        what, param = what[: 2 * MAX_ECHO], param.rstrip("`")
        raise ApiError(400, f"{param}: {what}" if param else what, param=param or None) from None


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
    fields = checked(body, CallFields)
    n = fields.n or 1
    if n > most:
        raise ApiError(400, f"n must be at most {most}", param="n")
    if chat and body.get("top_logprobs"):
        raise ApiError(400, "top_logprobs is not available; logprobs of the sampled tokens are", param="top_logprobs")
    for name, without_effect in (("echo", False), ("suffix", ""), ("best_of", n)):
        if not chat and body.get(name) not in (None, without_effect):
            raise ApiError(400, f"{name} is not supported", param=name)
    limit = fields.max_completion_tokens or fields.max_tokens
    if limit is None and not chat and "max_tokens" not in body:
        limit = 16  # OpenAI's default; null means no limit
    wanted = fields.stream_options or StreamOptions()
    return CallOptions(
        max_tokens=limit,
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        stream=fields.stream is True,
        include_usage=wanted.include_usage is True,
        usage_in_chunks=wanted.include_usage is wanted.continuous_usage_stats is True,
        n=n,
        logprobs=fields.logprobs is True or (not chat and type(fields.logprobs) is int),
        return_token_ids=fields.return_token_ids is True,
    )


def without_effect(body: Mapping[str, Any]) -> set[str]:
    """The fields of an agent's call that would change the answer of another server, and do not change this one.

    >>> sorted(without_effect({"messages": [], "user": "a", "seed": 3, "tool_choice": "auto", "logit_bias": {}}))
    ['seed']
    """
    neutral = NEUTRAL | {"tool_choice": ("auto", "none"), "parallel_tool_calls": (True,)}
    unused = ((name, value) for name, value in body.items() if name not in USED and name not in NO_EFFECT)
    return {name[:MAX_ECHO] for name, value in unused if value is not None and value not in neutral.get(name, ())}


def chat(body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The messages and the tools of a chat."""
    fields = checked(body, ChatFields)
    return body["messages"], body["tools"] if fields.tools and body.get("tool_choice") != "none" else None


def prompts(value: Any, most: int = 1) -> list[str | list[int]]:
    """The prompts of a completion: one, or a list of at most `most`. Each is text, or token ids.

    >>> prompts("a"), prompts([5, 6]), prompts(["a", [5, 6]], 2)
    (['a'], [[5, 6]], ['a', [5, 6]])
    """
    several = isinstance(value, list) and any(isinstance(prompt, str | list) for prompt in value)
    found = value if several else [value]
    if len(found) > most:
        raise ApiError(400, f"there are {len(found)} prompts, and a call has at most {most}", param="prompt")
    return [p if isinstance(p, str) and p else checked({"prompt": p}, PromptFields).prompt for p in found]


def reward(body: Mapping[str, Any], largest: float) -> tuple[float | None, dict[str, float]]:
    """The reward of a session, and its rewards by role."""
    fields = checked(body, RewardFields)
    values = [*([] if fields.reward is None else [fields.reward]), *fields.rewards.values()]
    if not values:
        raise ApiError(400, "the body has neither `reward` nor `rewards`", param="reward")
    if not all(abs(value) <= largest for value in values):  # also NaN
        raise ApiError(400, f"the magnitude of reward must be at most {largest:g}", param="reward")
    return fields.reward, fields.rewards


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
