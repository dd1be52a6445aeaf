"""Text decoded in pieces is the text decoded at once, for every tokenizer here and any split."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from windfall.gateway.incremental_text import MAX_HELD, UNFINISHED, IncrementalText
from windfall.models import tokenizer as tokenizers
from windfall.models.load import TINY

TOKENIZER = tokenizers.load(TINY)


def of_bytes(ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(ids).decode(errors="replace")


def of_words(ids: Sequence[int]) -> str:
    """A tokenizer that puts spaces between words, as those with a vocabulary of words do."""
    return " ".join(f"w{n}" for n in ids)


def pieces(ids: list[int], cuts: list[int], decode: object) -> list[str]:
    text = IncrementalText(decode)  # pyright: ignore[reportArgumentType]
    out: list[str] = []
    for end in [*sorted({c for c in cuts if c < len(ids)}), len(ids)]:
        out.append(text.extend(ids[:end]) + text.held)
    return out


@given(st.text(max_size=40), st.lists(st.integers(1, 120)))
def test_characters_of_several_tokens(text: str, cuts: list[int]) -> None:
    ids = list(text.encode())
    if ids:
        assert pieces(ids, cuts, of_bytes)[-1] == text


@given(st.text(max_size=40), st.lists(st.integers(1, 120)))
def test_certain_text_never_changes(text: str, cuts: list[int]) -> None:
    decoded, sent = IncrementalText(of_bytes), ""
    ids = list(text.encode())
    for end in [*sorted({c for c in cuts if c < len(ids)}), len(ids)]:
        certain = decoded.extend(ids[:end])
        assert certain.startswith(sent)
        assert not certain.endswith(UNFINISHED) or UNFINISHED in text
        sent = certain


@given(st.lists(st.integers(0, 999), min_size=1, max_size=60), st.lists(st.integers(1, 60)))
def test_words_with_spaces_between_them(ids: list[int], cuts: list[int]) -> None:
    assert pieces(ids, cuts, of_words)[-1] == of_words(ids)


@given(st.lists(st.integers(0, 90), min_size=1, max_size=60), st.lists(st.integers(1, 60)))
def test_the_tiny_tokenizer(ids: list[int], cuts: list[int]) -> None:
    def decode(part: Sequence[int]) -> str:
        return TOKENIZER.decode(list(part), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    assert pieces(ids, cuts, decode)[-1] == decode(ids)


def test_bytes_that_are_no_character_are_not_held_back_for_ever() -> None:
    text, ids = IncrementalText(of_bytes), list[int]()
    for _ in range(100):
        ids.append(0xFF)
        text.extend(ids)
    assert len(text.text) >= 100 - MAX_HELD


def test_the_time_per_token_does_not_grow() -> None:
    decoded = 0

    def decode(part: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(part)
        return of_words(part)

    text, ids = IncrementalText(decode), list[int]()
    for n in range(4000):
        ids.append(n)
        text.extend(ids)
    assert decoded < 5 * 4000
