"""Converts an environment's text to token ids and back: with the tokenizer's chat template, or else as plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from windfall.errors import WindfallError
from windfall.models.chat import Chat
from windfall.types import Prompt

_MARK = "\u2402reply\u2403"


class Text:
    def __init__(
        self,
        tokenizer: Any,
        extra_stops: Sequence[int] = (),
        *,
        template: str | None = None,
        enabled: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """`template` replaces the tokenizer's chat template; `arguments` are variables for it. `enabled`: use it."""
        self._tokenizer = tokenizer
        self._enabled = enabled
        eos = tokenizer.eos_token_id
        self.stop: frozenset[int] = frozenset([*([] if eos is None else [eos]), *extra_stops])
        self._chat: Chat | None = None
        if enabled and (template or getattr(tokenizer, "chat_template", None)):
            self._chat = Chat(tokenizer, self.stop, template=template or None, arguments=arguments)

    def prompt(self, prompt: Prompt) -> tuple[int, ...]:
        """The ids of a task's prompt, up to the start of the policy's answer. A plain string is one user message."""
        if self._chat is not None:
            return self._chat.prompt([_message("user", prompt)] if isinstance(prompt, str) else prompt)
        if isinstance(prompt, str):
            return tuple(self._tokenizer.encode(prompt))
        why = "the model's tokenizer has no chat template" if self._enabled else "chat.enabled is false"
        fix = "Set chat.template, or make every prompt text without env.system_prompt."
        raise WindfallError(f"a prompt is a list of messages, but {why}", where="env", fix=fix)

    def turns(
        self, prompt: Prompt, completion: str | None = None, tools: Sequence[Any] | None = None
    ) -> list[tuple[tuple[int, ...], bool]]:
        """A conversation with given completions, in stretches of ids; True: the ids of a completion, with the token
        that ends its turn. Without `completion`, every turn of the assistant in `prompt` is one."""
        if self._chat is None:
            eos = self._tokenizer.eos_token_id
            end = () if eos is None else (eos,)
            return [(self.prompt(prompt), False), ((*self._encode(completion or ""), *end), True)]
        messages = [_message("user", prompt)] if isinstance(prompt, str) else list(prompt)
        if completion is None:
            return self._chat.turns(messages, tools)
        found = self._chat.turns([*messages, _message("assistant", completion)], tools)
        return [(ids, trained and n == len(found) - 1) for n, (ids, trained) in enumerate(found)]

    def observation(self, text: str, *, last: int | None = None) -> tuple[int, ...]:
        """The ids after a turn: the environment's text and the start of the next turn. `last`: the last token of the
        turn; None: a stop token. If it ends turns in the template, the observation does not repeat it."""
        if self._chat is None:
            return self._encode(text)
        said = [_message("user", "."), _message("assistant", _MARK), _message("user", text)]
        ids = self._encode(self._chat.render(said).rpartition(_MARK)[2])
        ended = self.stop if last is None or last in self.stop else {last}
        return ids[1:] if ids and ids[0] in ended else ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of these ids. `special`: also that of special tokens, such as "<|im_end|>"."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
