"""Which fields a serving request may have, and how they want its tokens sampled. Plain data in and out.

Rules:
- A field that would change the answer is honored or refused with status 400, never ignored. A value that has no effect
  (`NEUTRAL`) and null are accepted.
- A field that cannot change the answer is accepted (`NO_EFFECT`).
- A field that is not known is refused, with the nearest known name: it may be a misspelled one.
- A tool cannot be forced: `tool_choice` "required" and a named tool are refused. A promise that the answer is a call of
  a certain tool needs decoding that is constrained by a grammar, as vLLM, SGLang and llama.cpp have it, and windfall's
  engines sample from the model's distribution only. To offer the tools and hope would break the promise silently.
- No value of any field may raise an error other than ApiError: all requests share an engine.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from windfall.controller.gateway.protocol import MAX_ECHO, ApiError
from windfall.errors import nearest
from windfall.types import Sampling

BOTH = frozenset({
    "model", "stream", "stream_options", "n", "stop", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "top_k", "seed", "logprobs", "ignore_eos", "min_tokens", "return_token_ids",
})  # fmt: skip
"""Fields that are honored in chats and completions."""
CHAT = BOTH | {"messages", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs", "chat_template_kwargs"}
COMPLETIONS = BOTH | {"prompt", "echo", "suffix", "best_of"}
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
    "skip_special_tokens": (False,), "truncate_prompt_tokens": (), "thinking_token_budget": (),
}  # fmt: skip
"""Fields that are not supported, and the values that have no effect."""
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
"""`include_obfuscation` adds random text against those who watch the sizes of packets; without it, nothing is missing.
"""
RESERVED = frozenset({
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize",
    "padding", "continue_final_message", "truncation", "max_length", "tokenizer_kwargs", "self",
})  # fmt: skip
"""Arguments of transformers' `apply_chat_template` that are not variables of the template."""
MAX_LOGPROBS = 1
"""Upper limit for `logprobs` of a completion. The engine knows the log-prob of the sampled token only, so 1 gives the
same as 0: `top_logprobs` is null."""
MAX_SEED = 1 << 63
GREEDY_BELOW = 1e-5
"""A temperature below this is greedy. Logits divided by a tiny number would be infinite."""


def check(body: Mapping[str, Any], *, chat: bool) -> None:
    """Raise ApiError if a field of a request is unknown, or would have to be ignored."""
    known = (CHAT if chat else COMPLETIONS) | NO_EFFECT | NEUTRAL.keys()
    for name, value in body.items():
        if name not in known:
            short = name[:MAX_ECHO]
            what = f"unknown field {short!r}. {nearest(short, known)}"
            raise ApiError(400, what, code="unknown_parameter", param=short)
        if name in NEUTRAL and value is not None and value not in NEUTRAL[name]:
            raise ApiError(400, f"{name} is not supported", param=name)
    _check_min_tokens(body)
    _check_logprobs(body, chat=chat)
    _check_stream_options(body)
    if chat:
        _check_tool_choice(body)
        template_variables(body)


def _check_min_tokens(body: Mapping[str, Any]) -> None:
    """Load generators send `min_tokens` beside `ignore_eos`, where it has no effect."""
    least, most = body.get("min_tokens"), body.get("max_completion_tokens") or body.get("max_tokens")
    if least in (None, 0):
        return
    if type(least) is not int or least < 0:
        raise ApiError(400, "min_tokens must be an integer, at least 0", param="min_tokens")
    if body.get("ignore_eos") is not True or body.get("stop") or not isinstance(most, int) or least > most:
        what = "min_tokens is supported only with ignore_eos, without stop, and up to max_tokens"
        raise ApiError(400, what, param="min_tokens")


def _check_logprobs(body: Mapping[str, Any], *, chat: bool) -> None:
    given = body.get("logprobs")
    if chat:
        if given is not None and not isinstance(given, bool):
            raise ApiError(400, "logprobs must be true or false", param="logprobs")
        if body.get("top_logprobs") not in (None, 0):
            what = "top_logprobs is not available; logprobs of the sampled tokens are"
            raise ApiError(400, what, param="top_logprobs")
    elif given is not None and (not isinstance(given, int) or not 0 <= given <= MAX_LOGPROBS):
        what = f"logprobs must be between 0 and {MAX_LOGPROBS}: log-probs of tokens that were not sampled are not known"
        raise ApiError(400, what, param="logprobs")


def _check_stream_options(body: Mapping[str, Any]) -> None:
    given = body.get("stream_options")
    if given is None:
        return
    if not body.get("stream"):
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    if not isinstance(given, Mapping):
        raise ApiError(400, "stream_options must be an object", param="stream_options")
    for name, value in given.items():
        param = f"stream_options.{name[:MAX_ECHO]}"
        if name not in STREAM_OPTIONS:
            raise ApiError(400, f"unknown field. {nearest(name[:MAX_ECHO], STREAM_OPTIONS)}", param=param)
        if value is not None and not isinstance(value, bool):
            raise ApiError(400, f"{name} must be true or false", param=param)


def _check_tool_choice(body: Mapping[str, Any]) -> None:
    choice, tools = body.get("tool_choice"), body.get("tools")
    if choice in (None, "none"):
        return
    if not tools:
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    if choice == "auto":
        return
    if choice == "required" or (isinstance(choice, Mapping) and choice.get("type") in ("function", "allowed_tools")):
        what = (
            'this server cannot force a tool call, which needs constrained decoding; use tool_choice "auto" or "none"'
        )
        raise ApiError(400, what, param="tool_choice")
    raise ApiError(400, 'tool_choice must be "auto" or "none"', param="tool_choice")


def template_variables(body: Mapping[str, Any]) -> dict[str, Any]:
    """Variables for the chat template, such as {"enable_thinking": false}. Names that mean something to the renderer
    are refused: a client must not replace the template."""
    given = body.get("chat_template_kwargs")
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ApiError(400, "chat_template_kwargs must be an object", param="chat_template_kwargs")
    for name, value in given.items():
        param = f"chat_template_kwargs.{name[:MAX_ECHO]}"
        if name in RESERVED or name.startswith("return_"):
            raise ApiError(400, "this is not a variable that a request may set", param=param)
        if not isinstance(value, str | int | float | None):
            raise ApiError(400, "a variable must be text, a number, true or false", param=param)
    return dict(given)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    sampling: Sampling
    seed: int | None
    ignore_eos: bool


def sampling_options(body: Mapping[str, Any]) -> SamplingOptions:
    """The options of a request.

    >>> sampling_options({"temperature": 0, "seed": 7}).sampling
    Sampling(temperature=0.0, top_p=1.0, top_k=0)
    """
    top_k = _number(body, "top_k", 0, -1, 1 << 31)
    seed = body.get("seed")
    if seed is not None and (type(seed) is not int or not -MAX_SEED <= seed < MAX_SEED):
        raise ApiError(400, "seed must be an integer of 64 bits", param="seed")
    ignore_eos = body.get("ignore_eos")
    if ignore_eos not in (None, True, False):
        raise ApiError(400, "ignore_eos must be true or false", param="ignore_eos")
    top_p = _number(body, "top_p", 1.0, 0.0, 1.0)
    if top_p == 0.0:
        raise ApiError(400, "top_p must be above 0", param="top_p")
    temperature = _number(body, "temperature", 1.0, 0.0, 100.0)
    temperature = temperature if temperature >= GREEDY_BELOW else 0.0
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=max(0, int(top_k)))
    return SamplingOptions(
        sampling=sampling, seed=None if seed is None else seed % (1 << 64), ignore_eos=bool(ignore_eos)
    )


def choice_seed(seed: int | None, number: int) -> int:
    """The seed of one of several choices: `number` counts those of one prompt. With a seed of the request it is always
    the same, and choice 0 is the answer that the request has without `n`. Without one it is random.

    A sum of seed and number would give requests with neighboring seeds the same choices.
    """
    if seed is None:
        return secrets.randbits(63)
    if number == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest())


def _number(body: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ApiError(400, f"{name} must be a number", param=name)
    if not least <= value <= most:  # also NaN
        raise ApiError(400, f"{name} must be between {least:g} and {most:g}", param=name)
    return float(value)
