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
from typing import Annotated, Any

from msgspec import Meta, Struct

from windfall.controller.gateway.protocol import MAX_ECHO, NEUTRAL, NO_EFFECT, ApiError, checked
from windfall.errors import nearest
from windfall.types import Sampling

BOTH = frozenset({
    "model", "stream", "stream_options", "n", "stop", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "top_k", "seed", "logprobs", "ignore_eos", "min_tokens", "return_token_ids",
})  # fmt: skip
"""Fields that are honored in chats and completions."""
CHAT = BOTH | {"messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"}
COMPLETIONS = BOTH | {"prompt", "echo", "suffix", "best_of"}
RESERVED = frozenset({
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize",
    "padding", "continue_final_message", "truncation", "max_length", "tokenizer_kwargs", "self",
})  # fmt: skip
"""Arguments of transformers' `apply_chat_template` that are not variables of the template."""
GREEDY_BELOW = 1e-5
"""A temperature below this is greedy. Logits divided by a tiny number would be infinite."""


class ServeStreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Adds random text against those who watch the sizes of packets; without it, nothing is missing."""


class ServeFields(Struct):
    """What a request says beside the fields that gateway/protocol.py reads."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    stream_options: ServeStreamOptions | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    """Variables for the chat template, such as {"enable_thinking": false}."""

    @property
    def sampling(self) -> Sampling:
        """
        >>> ServeFields(temperature=0.0, top_k=-1).sampling
        Sampling(temperature=0.0, top_p=1.0, top_k=0)
        """
        temperature = 1.0 if self.temperature is None else self.temperature
        return Sampling(
            temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
            top_p=self.top_p or 1.0,
            top_k=max(0, self.top_k or 0),
        )


class ServeChatFields(ServeFields):
    logprobs: bool | None = None


class ServeTextFields(ServeFields):
    logprobs: bool | Annotated[int, Meta(ge=0, le=1)] | None = None
    """The engine knows the log-prob of the sampled token only, so 1 gives the same as 0: `top_logprobs` is null."""


def read(body: Mapping[str, Any], *, chat: bool) -> ServeFields:
    """Raises ApiError if a field of a request is unknown, or would have to be ignored."""
    known = (CHAT if chat else COMPLETIONS) | NO_EFFECT | NEUTRAL.keys()
    for name, value in body.items():
        if name not in known:
            short = name[:MAX_ECHO]
            what = f"unknown field {short!r}. {nearest(short, known)}"
            raise ApiError(400, what, code="unknown_parameter", param=short)
        if name in NEUTRAL and value is not None and value not in NEUTRAL[name]:
            raise ApiError(400, f"{name} is not supported", param=name)
    fields = checked(body, ServeChatFields if chat else ServeTextFields)
    if fields.stream_options is not None and not body.get("stream"):
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    # Load generators send `min_tokens` beside `ignore_eos`, where it has no effect.
    if fields.min_tokens and not (
        fields.ignore_eos and not body.get("stop") and isinstance(most, int) and fields.min_tokens <= most
    ):
        what = "min_tokens is supported only with ignore_eos, without stop, and up to max_tokens"
        raise ApiError(400, what, param="min_tokens")
    choice = body.get("tool_choice")
    if chat and choice not in (None, "none") and not (choice == "auto" and body.get("tools")):
        what = 'tool_choice must be "none", or "auto" with tools: forcing a tool call needs constrained decoding'
        raise ApiError(400, what, param="tool_choice")
    for name in fields.chat_template_kwargs or ():
        if name in RESERVED or name.startswith("return_"):  # a client must not replace the template
            param = f"chat_template_kwargs.{name[:MAX_ECHO]}"
            raise ApiError(400, "this is not a variable that a request may set", param=param)
    return fields


def choice_seed(seed: int | None, number: int) -> int:
    """The seed of one of several choices: `number` counts those of one prompt. With a seed of the request it is always
    the same, and choice 0 is the answer that the request has without `n`. Without one it is random.

    A sum of seed and number would give requests with neighboring seeds the same choices.
    """
    if seed is None:
        return secrets.randbits(63)
    seed %= 1 << 64
    if number == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest())
