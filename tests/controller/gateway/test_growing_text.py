"""Text decoded in pieces is the text decoded at once, for every tokenizer here and any split."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from windfall.controller.gateway.chunks import MAX_HELD, UNFINISHED, GrowingText
from windfall.models import tokenizer as tokenizers
from windfall.models.load import TINY

TOKENIZER = tokenizers.load(TINY)


def of_bytes(ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(ids).decode(errors="replace")


def of_words(ids: Sequence[int]) -> str:
    """A tokenizer that puts spaces between words, as those with a vocabulary of words do."""
    return " ".join(f"w{n}" for n in ids)


def pieces(ids: list[int], cuts: list[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    text = GrowingText(decode)
    return [text.grow(ids, end) for end in [*sorted({c for c in cuts if c < len(ids)}), len(ids)]]


@given(st.text(max_size=40), st.lists(st.integers(1, 120)))
def test_characters_of_several_tokens(text: str, cuts: list[int]) -> None:
    text = text.replace(UNFINISHED, "")
    found = pieces(list(text.encode()), cuts, of_bytes)
    assert "".join(found) == text
    assert not any(UNFINISHED in piece for piece in found)


@given(st.lists(st.integers(0, 999), min_size=1, max_size=60), st.lists(st.integers(1, 60)))
def test_words_with_spaces_between_them(ids: list[int], cuts: list[int]) -> None:
    assert "".join(pieces(ids, cuts, of_words)) == of_words(ids)


@given(st.lists(st.integers(0, 90), min_size=1, max_size=60), st.lists(st.integers(1, 60)))
def test_the_tiny_tokenizer(ids: list[int], cuts: list[int]) -> None:
    def decode(part: Sequence[int]) -> str:
        return TOKENIZER.decode(list(part), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    assert "".join(pieces(ids, cuts, decode)) == decode(ids)


def test_bytes_that_are_not_a_character_are_not_held_back_for_ever() -> None:
    text, ids = GrowingText(of_bytes), [0xFF] * 100
    sent = "".join(text.grow(ids, n + 1) for n in range(100))
    assert len(sent) >= 100 - MAX_HELD


def test_the_time_per_token_does_not_grow() -> None:
    decoded = 0

    def decode(part: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(part)
        return of_words(part)

    text, ids = GrowingText(decode), list(range(4000))
    for n in range(4000):
        text.grow(ids, n + 1)
    assert decoded < 5 * 4000
