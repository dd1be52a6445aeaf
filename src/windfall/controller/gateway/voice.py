"""How one policy reads and writes text: its tokenizer, chat template and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from windfall.models.chat import Chat, check_length, most_chars


@dataclass(slots=True)
class Voice:
    tokenizer: Any
    chat: Chat | None
    """None for a model without a chat template."""
    stop: frozenset[int]
    """Token ids that end a turn."""
    context: int
    """Largest number of tokens of prompt and turn together."""
    max_chars: int = 0
    """Upper limit for the characters of a prompt. 0: as the context needs them."""

    def __post_init__(self) -> None:
        self.max_chars = self.max_chars or most_chars(self.tokenizer, self.context)
        if self.chat is not None:
            self.chat.max_chars = self.max_chars

    def decode(self, ids: Sequence[int]) -> str:
        ids = ids[:-1] if ids and ids[-1] in self.stop else ids
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        return [self.tokenizer.decode([id], skip_special_tokens=False) for id in ids]

    def ids(self, prompt: str | Sequence[int]) -> Sequence[int]:
        """The ids of a prompt that is text, or ids already."""
        if not isinstance(prompt, str):
            return prompt
        check_length(prompt, self.max_chars)
        return self.tokenizer.encode(prompt)
