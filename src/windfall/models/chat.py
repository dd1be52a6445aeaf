"""Renders conversations of the OpenAI API to token ids: a whole prompt, or only what follows a turn that was sampled.

The ids of a turn that the policy sampled are never made again from its text. `Chat.continuation` computes what must
follow them when new messages arrive:

    ... <|im_start|>assistant\\n  SAMPLED IDS <|im_end|>  \\n<|im_start|>tool\\n42<|im_end|>\\n<|im_start|>assistant\\n
                                 ─────────────────────── ──────────────────────────────────────────────────────────
                                 sampled, kept as it is   the continuation: rendered with a mark in place of the turn

Rules:
- A prompt is rendered exactly as transformers renders it. The arguments of tool calls are objects, as templates expect;
  if a template cannot render objects, they are JSON text.
- The stop token that ended the turn is not repeated. If a template would write another end than the one that was
  sampled, or writes the end of a turn differently once a message follows, there is no continuation (None), and the
  caller renders the whole conversation.
- A text that is certainly too long for the context (`max_chars`) is refused before it is tokenized, which takes seconds
  for every million characters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from windfall.errors import WindfallError

Message = Mapping[str, Any]
_MARK = "\u2402turn\u2403"
_FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template raises: its own errors, and those of its expressions for messages that it does not expect."""


class PromptTooLong(WindfallError):
    """A text has more characters than the context could have."""


class Chat:
    def __init__(
        self,
        tokenizer: Any,
        stop: frozenset[int],
        *,
        template: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """`stop`: the token ids that end a turn. `template` replaces the model's chat template, and `arguments` are
        variables for it, such as {"enable_thinking": False}."""
        self.tokenizer, self.stop = tokenizer, stop
        self._more: dict[str, Any] = dict(arguments or {})
        if template is not None:
            self._more["chat_template"] = template
        self.max_chars: int | None = None
        """Largest number of characters of a text to tokenize. None: no limit."""
        if template is None and not getattr(tokenizer, "chat_template", None):
            what = "the model's tokenizer has no chat template, and messages were sent"
            raise WindfallError(what, where="chat", fix="Set a chat template, or send plain text to /v1/completions.")

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> tuple[int, ...]:
        """The ids of a whole conversation, up to the start of the policy's turn."""
        return self._encode(self.render(messages, tools))

    def render(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> str:
        """The text of a whole conversation, up to the start of the policy's turn."""
        normal = [normalize(message) for message in messages]
        try:
            return self._render(normal, tools, generate=True)
        except _FAILURES as e:
            what = f"the chat template cannot render these messages: {e}"
            roles = ", ".join(str(message.get("role")) for message in messages) or "none"
            raise WindfallError(what, where="messages", fix=f"The roles were: {roles}.") from e

    def continuation(
        self, known: Sequence[Message], new: Sequence[Message], tools: Sequence[Message] | None, ended_with: int | None
    ) -> tuple[int, ...] | None:
        """The ids that follow a sampled turn: its end as far as it was not sampled, the new messages, and the start of
        the next turn. The last message of `known` is the turn. `ended_with`: its stop token, None if it was cut off.
        None: this template does not allow a continuation here."""
        before, turn = [normalize(m) for m in known[:-1]], normalize(known[-1])
        after = [normalize(m) for m in new]
        plain = {key: value for key, value in turn.items() if key in ("role", "content")}
        try:
            end = _after_mark(self._render([*before, {**plain, "content": _MARK}], tools))
            tail = self._tail(before, turn, after, tools)
        except _FAILURES:
            return None
        if end is None or tail is None:
            return None
        ids = self._encode(end + tail)
        if ended_with is None:
            return ids
        if ids[:1] == (ended_with,):
            return ids[1:]
        return ids if not end and not self.stop.intersection(ids[:1]) and not self._starts_special(ids) else None

    def turns(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None
    ) -> list[tuple[tuple[int, ...], bool]]:
        """A whole conversation in stretches of ids, up to the last turn of the assistant. True: such a turn as a policy
        would sample it, with the token that ends it."""
        normal, done, carried = [normalize(message) for message in messages], "", ()
        eos = self.tokenizer.eos_token_id
        last = () if eos is None else (eos,)  # some templates do not write the end of a turn, but a policy samples it
        out: list[tuple[tuple[int, ...], bool]] = []
        for n, message in enumerate(normal):
            if message["role"] != "assistant":
                continue
            try:
                before, through = self._render(normal[:n], tools, True), self._render(normal[: n + 1], tools)
            except _FAILURES as e:
                raise WindfallError(f"the chat template cannot render these messages: {e}", where="messages") from e
            if not before.startswith(done) or not through.startswith(before):
                what = "the chat template changes what precedes a turn of the assistant when messages follow"
                raise WindfallError(what, where="messages", fix="Give each turn as a row with prompt and completion.")
            ids, turn = (*carried, *self._encode(before[len(done) :])), self._encode(through[len(before) :])
            end = next((i for i, id in enumerate(turn) if id in self.stop), None)
            carried = () if end is None else turn[end + 1 :]
            out += [(ids, False), ((*turn, *last) if end is None else turn[: end + 1], True)]
            done = through
        return out

    def _tail(
        self, before: list[dict[str, Any]], turn: dict[str, Any], after: list[dict[str, Any]], tools: Any
    ) -> str | None:
        marked = {**turn, "content": _MARK}
        without, whole = self._render([*before, marked], tools), self._render([*before, marked, *after], tools, True)
        if _MARK in without and _MARK in whole:  # templates may change what is before the mark once a message follows
            without, whole = str(_after_mark(without)), str(_after_mark(whole))
        return whole[len(without) :] if whole.startswith(without) else None

    def _starts_special(self, ids: tuple[int, ...]) -> bool:
        """The first id is a special token: text of a template that a sampled end cannot stand before."""
        return bool(ids) and not self.tokenizer.decode(list(ids[:1]), skip_special_tokens=True)

    def _render(self, messages: list[dict[str, Any]], tools: Any, generate: bool = False) -> str:
        given = {"tools": tools or None, "tokenize": False, "add_generation_prompt": generate, **self._more}
        try:
            return self.tokenizer.apply_chat_template(messages, **given)
        except _FAILURES:
            if not any(message.get("tool_calls") for message in messages):
                raise
            return self.tokenizer.apply_chat_template([_with_text_arguments(m) for m in messages], **given)

    def _encode(self, text: str) -> tuple[int, ...]:
        check_length(text, self.max_chars)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, with special tokens: tool calls are written with them. The stop token at the end is
        left out."""
        if ids and ids[-1] in self.stop:
            ids = ids[:-1]
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def check_length(text: str, max_chars: int | None) -> None:
    if max_chars is not None and len(text) > max_chars:
        what = f"the prompt has {len(text)} characters; no prompt of more than {max_chars} fits into the context"
        raise PromptTooLong(what, where="messages", fix="Send less.")


def most_chars(tokenizer: Any, tokens: int) -> int:
    """The most characters that this number of tokens can stand for."""
    return tokens * max(map(len, tokenizer.get_vocab()))


def _after_mark(text: str) -> str | None:
    _, found, after = text.rpartition(_MARK)
    return after if found else None


def normalize(message: Message) -> dict[str, Any]:
    """A message as templates expect it: text as one string, the arguments of tool calls as objects, no empty fields.

    >>> normalize({"role": "user", "content": [{"type": "text", "text": "a"}], "name": None})
    {'role': 'user', 'content': 'a'}
    """
    out = {key: value for key, value in message.items() if value is not None and key != "content"}
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
            raise WindfallError("a message has content that is not text", where="messages", fix="Send text only.")
        content = "".join(map(str, texts))
    if "tool_calls" in out:
        out["tool_calls"] = [_with_object_arguments(call) for call in out["tool_calls"]]
        if not out["tool_calls"]:
            del out["tool_calls"]
    return {
        "role": out.pop("role", ""),
        "content": content if content is not None or "tool_calls" in out else "",
        **out,
    }


def _with_object_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        text = function["arguments"]
        text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": calls}
