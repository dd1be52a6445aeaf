"""The text of tokens that arrive one after another, decoded in pieces: the time per token does not grow with the text.

A tokenizer may decode a token differently behind another one, and a character may consist of several tokens. So each
piece is decoded together with the piece before it, and only what it adds is new. Text that ends in an incomplete
character is held back until the character is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
"""What a tokenizer decodes an incomplete character to."""
MAX_HELD = 8
"""Tokens that are held back at most: a character has up to four bytes, and more tokens than this are none."""


class IncrementalText:
    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._before = self._read = 0
        """`_before` to `_read`: the last piece that was decoded."""
        self.text = ""
        """The text that is certain."""
        self.held = ""
        """Text behind it that may still change."""

    def extend(self, tokens: Sequence[int]) -> str:
        """Decode what is new in `tokens`, which begin with those of the calls before. Returns the certain text."""
        count = len(tokens)
        if count <= self._read:
            return self.text
        known = self._decode(tokens[self._before : self._read]) if self._read > self._before else ""
        both = self._decode(tokens[self._before :])
        if not both.startswith(known):  # the tokenizer changes earlier text
            self.text, self._before, self._read, known, both = "", 0, 0, "", self._decode(tokens)
        new = both[len(known) :]
        end, certain = count, new
        while certain.endswith(UNFINISHED) and end > self._read and count - end < MAX_HELD:
            end -= 1
            certain = self._decode(tokens[self._before : end])[len(known) :] if end > self._read else ""
        if certain.endswith(UNFINISHED):  # these bytes are no character
            end, certain = count, new
        self.held = new[len(certain) :]
        if end > self._read:
            self.text += certain
            self._before, self._read = self._read, end
        return self.text
