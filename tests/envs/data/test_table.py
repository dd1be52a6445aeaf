"""Rows of every format become the same tasks, and what is wrong is refused with file, row and column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from windfall.envs.data.table import DataSource, RowFormat, TableRow, read_table
from windfall.errors import WindfallError

ROWS: list[dict[str, Any]] = [
    {"question": "2+3?", "solution": "Add them. #### 5", "level": 1},
    {"question": "7*8?", "solution": "Multiply. #### 56", "level": 3},
    {"question": "9-1?", "solution": "Subtract. #### 8", "level": 3},
]
FORM = RowFormat(columns={"prompt": "question", "answer": "solution"}, answer_after="####")


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pa = pytest.importorskip("pyarrow", reason="parquet files need the extra data")
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def read(path: Path, form: RowFormat = FORM, **source: Any) -> list[TableRow]:
    return read_table(DataSource(path=path, **source), form)


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    lines = read(write_jsonl(tmp_path / "a.jsonl", ROWS))
    assert [(row.prompt, row.answer) for row in lines] == [("2+3?", "5"), ("7*8?", "56"), ("9-1?", "8")]
    assert dict(lines[0].columns) == {"solution": "Add them. #### 5", "level": 1, "answer": "5"}
    one = read(write_parquet(tmp_path / "b.parquet", ROWS))
    hub = write_parquet(tmp_path / "hub" / "data" / "test-00000-of-00001.parquet", ROWS).parent.parent
    for other in (one, read(hub, split="test")):
        assert [(row.prompt, row.answer, dict(row.columns)) for row in other] == [
            (row.prompt, row.answer, dict(row.columns)) for row in lines
        ]


def test_parts_of_a_split(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    assert [row.line for row in read(path, split="train[1:]")] == [2, 3]
    with pytest.raises(WindfallError, match=r"'train\[3:\]' leaves none of the 3 rows"):
        read(path, split="train[3:]")


def test_messages_system_prompt_and_instruction(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "?"},
        {"role": "user", "content": "2+2"},
    ]
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "3"}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": p, "answer": 4} for p in ("1+3", chat, own)])
    plain, listed, _ = (row.prompt for row in read(path, RowFormat(instruction="Be brief.")))
    assert plain == "1+3\nBe brief."
    assert [m["content"] for m in listed] == ["Hi", "?", "2+2\nBe brief."]  # type: ignore[index]
    rows = read(path, RowFormat(system_prompt="Think."))
    assert rows[0].prompt == [{"role": "system", "content": "Think."}, {"role": "user", "content": "1+3"}]
    assert [row.prompt[0]["content"] for row in rows[1:]] == ["Think.", "Mine."]  # type: ignore[index]


def test_messages_keep_what_the_chat_template_reads(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    chat = [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "cached": True},
    ]
    (row,) = read(write_jsonl(tmp_path / "a.jsonl", [{"prompt": chat, "answer": 4}]), RowFormat())
    assert row.prompt == chat


def test_functions_get_a_number_as_the_number_that_it_is(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "answer": 1e-5}])
    for compared in (True, False):
        (row,) = read(path, RowFormat(answer_needed=compared))
        assert row.answer == "0.00001"
        assert row.columns["answer"] == 1e-5


def test_tables_fill_messages_with_empty_fields(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "a", "name": None}, {"role": "user", "content": "b", "name": "x"}]}]
    (row,) = read(write_parquet(tmp_path / "a.parquet", rows), RowFormat(answer_needed=False))
    assert row.prompt == [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "name": "x"}]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "a"}, "no column 'answer'"),
        ({"promt": "a", "answer": 1}, "Did you mean 'promt'?"),
        ({"prompt": None, "answer": 1}, "column 'prompt' is null"),
        ({"prompt": [{"role": "user"}], "answer": 1}, "'prompt[0]' is"),
        ({"prompt": "a", "answer": None}, "column 'answer' is null"),
        ({"prompt": "a", "answer": [1]}, "column 'answer' is [1]"),
        ({"prompt": "a", "answer": " "}, "column 'answer' is"),
    ],
)
def test_bad_rows_are_refused(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    good = {"prompt": "x", "answer": "1"}
    with pytest.raises(WindfallError) as caught:
        read(write_jsonl(tmp_path / "a.jsonl", [good, row]), RowFormat())
    assert "a.jsonl:2" in str(caught.value)
    assert says in str(caught.value)
    assert caught.value.fix


def test_rows_of_tables_are_named(tmp_path: Path) -> None:
    rows = [{"prompt": "x", "answer": "1"}, {"prompt": "", "answer": "1"}]
    with pytest.raises(WindfallError, match=r"a.parquet row 2: column 'prompt' is \"\""):
        read(write_parquet(tmp_path / "a.parquet", rows), RowFormat())


def test_missing_mark_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WindfallError, match=r"a.jsonl:1: column 'solution' has no '####'"):
        read(write_jsonl(tmp_path / "a.jsonl", [{"question": "a", "solution": "5"}]))


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(WindfallError, match="git lfs pull"):
        read(path)
    path.write_text('[{"question": "a"}]')
    with pytest.raises(WindfallError, match="a JSON list"):
        read(path)
    table = write_parquet(tmp_path / "b.parquet", ROWS)
    table.write_bytes(table.read_bytes()[:-20])
    with pytest.raises(WindfallError, match=r"b.parquet: the file is damaged"):
        read(table)


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(WindfallError, match=r"pip install -e '.*\[data\]'"):
        read(tmp_path / "a.parquet")
