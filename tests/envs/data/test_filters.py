from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windfall.envs.data.filters import Filter
from windfall.errors import WindfallError

ROW = {"level": "hard", "n": 4, "text": "Hello", "tags": ["a", "b"], "meta": {"ok": True}, "empty": None}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("level == 'hard' and n > 3", True),
        ("level == 'easy' or n >= 5", False),
        ("not (level != 'hard')", True),
        ("2 < n < 5", True),
        ("2 < n < 4", False),
        ("level in ['hard', 'harder']", True),
        ("'a' in tags and 'c' not in tags", True),
        ("'ell' in text", True),
        ("len(text) == 5 and lower(text) == 'hello'", True),
        ("meta['ok']", True),
        ("empty is None and missing is None", True),
        ("n > -1", True),
        ("float('2.5') < n", True),
    ],
)
def test_rows_are_kept(text: str, kept: bool) -> None:
    assert Filter(text)(ROW) is kept


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')", "().__class__", "text.upper()", "(lambda: 1)()", "[x for x in tags]",
        "open('/etc/passwd')", "f'{level}'", "n ** 9 ** 9", "'a' * 10", "exec('1')", "len(text, 1)", "len(*tags)", "",
        "n >", "n = 3", "level == 'a'; 1", "print(1)", "tags[0:1]", "(y := 3)", "x" * 3000, "b'x' == level",
        "(" * 500 + "n" + ")" * 500,
    ],
)  # fmt: skip
def test_everything_else_is_refused(text: str) -> None:
    with pytest.raises(WindfallError, match="is not a filter"):
        Filter(text)


def test_a_value_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"empty = 'None'.*not supported"):
        Filter("empty > 3")(ROW)


@given(st.text(alphabet="abn()[]'\"=<>!0123 .,+*-_", max_size=40))
def test_any_text_is_a_filter_or_refused(text: str) -> None:
    try:
        keep = Filter(text)
    except WindfallError:
        return
    row: dict[str, Any] = {"a": 1, "b": "x", "n": [1]}
    with contextlib.suppress(ValueError):  # it does not fit this row
        assert keep(row) in (True, False)
