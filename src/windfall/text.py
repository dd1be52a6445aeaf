"""Between an environment's words and token ids: chat template where the tokenizer has one, plain text where not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_MARK = "\u2402reply\u2403"


class Text:
    def __init__(self, tokenizer: Any, extra_stops: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._chat = bool(getattr(tokenizer, "chat_template", None))
        eos = tokenizer.eos_token_id
        self.stop: frozenset[int] = frozenset([*([] if eos is None else [eos]), *extra_stops])

    def prompt(self, words: str) -> tuple[int, ...]:
        """The ids of a task's prompt, up to where the policy begins to speak."""
        if not self._chat:
            return tuple(self._tokenizer.encode(words))
        return self._encode(self._render([("user", words)]))

    def observation(self, words: str) -> tuple[int, ...]:
        """The ids that follow a turn which ended with a stop token: the environment's words, then the policy's cue."""
        if not self._chat:
            return self._encode(words)
        whole = self._render([("user", "."), ("assistant", _MARK), ("user", words)])
        ids = self._encode(whole.rpartition(_MARK)[2])
        # The template closes the turn with a stop token, which the turn has already.
        return ids[1:] if ids and ids[0] in self.stop else ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _render(self, messages: Sequence[tuple[str, str]]) -> str:
        return self._tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages],
            tokenize=False,
            add_generation_prompt=True,
        )

    def _encode(self, words: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(words, add_special_tokens=False))
