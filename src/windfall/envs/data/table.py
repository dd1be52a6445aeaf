"""The rows of a data set as tasks: every row is checked once, and the error names its file, its row and its column.

JSONL is read with the standard library, parquet with pyarrow (the extra `data`).
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from hashlib import blake2b
from pathlib import Path
from typing import Any

from windfall.envs.data.files import find
from windfall.envs.scoring.extract import is_words
from windfall.errors import WindfallError, install_command, nearest
from windfall.types import Prompt, prompt_key

BATCH_ROWS = 1024
_LFS_POINTER = b"version https://git-lfs"
SHOWN_CHARS = 120
ROLES = ("prompt", "answer")
"""What `columns` can map to a column of the data. Reward functions get every column under its own name, too."""


@dataclass(frozen=True, slots=True)
class TableRow:
    prompt: Prompt
    answer: str
    """Empty if the data set has no such column."""
    line: int
    file: Path = Path()
    columns: Mapping[str, Any] = field(default_factory=dict)
    """All columns by name, except for the prompt: what reward functions get."""

    @property
    def key(self) -> int:
        """A hash of the prompt from 0 up to 2^64. Rows with the same prompt have the same key."""
        return int.from_bytes(blake2b(b" ".join(prompt_key(self.prompt).split()), digest_size=8).digest(), "big")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSource:
    """Where the rows of a data set come from. The fields are keys of the recipe."""

    path: Path
    split: str | None = None
    subset: str | None = None
    section: str = "env"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFormat:
    """How a row becomes a task. The fields are keys of the recipe."""

    columns: Mapping[str, str] = field(default_factory=dict)
    system_prompt: str | None = None
    instruction: str | None = None
    answer_after: str | None = None
    answer_needed: bool = True
    """Every row must have an answer that a built-in grader can compare with."""
    mathematics: bool = False
    """The grader "math" compares the answers."""


def read_table(source: DataSource, form: RowFormat) -> list[TableRow]:
    found = find(source.path, source.split, source.subset, key=source.section)
    rows = [(file, number, row) for file in found.files for number, row in read_rows(file)]
    if not rows:
        raise WindfallError("the data set is empty", where=str(source.path), fix="Give a data set that has rows.")
    part = found.part(len(rows))
    if not part:
        what = f"{source.section}.split = {source.split!r} leaves none of the {len(rows)} rows"
        raise WindfallError(what, where=str(source.path), fix="Choose a larger part of the split.")
    return [_table_row(*rows[n], form) for n in part]


def place(file: Path, number: int) -> str:
    """Names a row in messages: the line of a text file, or the row of a table.

    >>> place(Path("a.jsonl"), 3), place(Path("b.parquet"), 3)
    ('a.jsonl:3', 'b.parquet row 3')
    """
    return f"{file} row {number}" if file.suffix == ".parquet" else f"{file}:{number}"


def read_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with file.open("rb") as opened:
            start = opened.read(64)
        if start.startswith(_LFS_POINTER):
            fix = "Fetch the file itself: git lfs pull"
            raise WindfallError("this is a pointer of Git LFS, not the data", where=str(file), fix=fix)
        if start.startswith(b"PAR1") or file.suffix == ".parquet":
            yield from _table_rows(file)
        else:
            yield from _json_rows(file)
    except FileNotFoundError as e:
        raise WindfallError("no such file", where=str(file), fix="Give a JSONL or parquet file.") from e
    except OSError as e:
        raise WindfallError(f"cannot read it: {e.strerror or e}", where=str(file), fix="Make it readable.") from e


def _json_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, _parse_line(line, place(file, number))


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except UnicodeDecodeError as e:
        fix = "Save the file as UTF-8, not compressed: one JSON object per line."
        raise WindfallError(f"the line is not UTF-8: {e}", where=where, fix=fix) from None
    except json.JSONDecodeError as e:
        fix = "Every line must be one JSON object."
        raise WindfallError(f"the line is not JSON: {e}", where=where, fix=fix) from None
    except RecursionError:
        fix = "Every line must be one flat JSON object."
        raise WindfallError("the JSON is nested too deeply", where=where, fix=fix) from None
    if not isinstance(row, dict):
        fix = "Every line must be one JSON object."
        raise WindfallError(f"the line is a JSON {type(row).__name__}", where=where, fix=fix)
    return row


def _table_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    pyarrow, number = _pyarrow(file), 0
    try:
        with contextlib.closing(importlib.import_module("pyarrow.parquet").ParquetFile(file)) as table:
            names = table.schema_arrow.names
            if len(set(names)) < len(names):
                raise WindfallError("two columns have the same name", where=str(file), fix="Rename one of them.")
            for batch in table.iter_batches(batch_size=BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except pyarrow.ArrowException as e:
        after = f" after row {number}" if number else ""
        fix = "Write the file again, or download it again."
        raise WindfallError(f"the file is damaged{after}: {e}", where=str(file), fix=fix) from e


def _pyarrow(file: Path) -> Any:
    try:
        return importlib.import_module("pyarrow")
    except ImportError as e:
        fix = f"Install it: {install_command('data')}"
        raise WindfallError("pyarrow is not installed", where=str(file), fix=fix) from e


def _table_row(file: Path, number: int, row: dict[str, Any], form: RowFormat) -> TableRow:
    where = place(file, number)
    prompt_name, answer_name = (form.columns.get(role, role) for role in ROLES)
    prompt = _prompt(_column(row, "prompt", prompt_name, where), prompt_name, where, form)
    answer = ""
    if form.answer_needed or row.get(answer_name) is not None:
        answer = _answer(_column(row, "answer", answer_name, where), answer_name, where, form)
    columns = {name: value for name, value in row.items() if name != prompt_name}
    if answer_name in row:
        columns["answer"] = answer if isinstance(row[answer_name], str) else row[answer_name]
    return TableRow(prompt, answer, number, file, columns)


def _column(row: Mapping[str, Any], role: str, name: str, where: str) -> Any:
    if name in row:
        return row[name]
    guess = nearest(name, row) or "The row is empty."
    fix = f'{guess} Set env.columns = {{ {role} = "NAME" }} to the name of the column that holds it.'
    raise WindfallError(f"there is no column '{name}'", where=where, fix=fix)


def _prompt(value: Any, name: str, where: str, form: RowFormat) -> Prompt:
    if isinstance(value, list):
        # A table gives every message all fields that any message has.
        messages = [{k: v for k, v in m.items() if v is not None} if isinstance(m, dict) else m for m in value]
        _check_messages(messages, name, where)
    elif isinstance(value, str) and value:
        messages = [{"role": "user", "content": value}]
    else:
        fix = 'It must be text, or a list of messages such as {"role": "user", "content": "..."}.'
        raise WindfallError(f"column '{name}' is {_shown(value)}", where=where, fix=fix)
    if form.instruction:
        messages[-1]["content"] = f"{messages[-1]['content']}\n{form.instruction}"
    if form.system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": form.system_prompt})
    return messages[0]["content"] if isinstance(value, str) and not form.system_prompt else messages


def _answer(value: Any, name: str, where: str, form: RowFormat) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        if not form.answer_needed:
            return ""
        fix = "It must be text or a number. Without the graders 'math' and 'exact', any value will do."
        raise WindfallError(f"column '{name}' is {_shown(value)}", where=where, fix=fix)
    text = f"{Decimal(repr(value)):f}" if isinstance(value, float) else str(value)  # 0.00001, not 1e-05
    if form.answer_after:
        _before, found, text = text.rpartition(form.answer_after)
        if not found:
            fix = "Correct the row, leave it out, or change env.answer_after."
            raise WindfallError(f"column '{name}' has no {form.answer_after!r}: {_shown(value)}", where=where, fix=fix)
    if form.answer_needed and not text.strip():
        raise WindfallError(f"column '{name}' is {_shown(value)}", where=where, fix="Give the right answer.")
    if form.mathematics and is_words(text):
        fix = 'Set env.rewards = ["exact"] to compare text, or correct or remove the row.'
        raise WindfallError(f"column '{name}' is {_shown(value)}: words, not mathematics", where=where, fix=fix)
    return text.strip()


def _check_messages(messages: list[Any], name: str, where: str) -> None:
    """Raise unless this is a conversation that the policy can continue."""
    fix = 'Every message must be an object with text as "role" and "content".'
    if not messages:
        raise WindfallError(f"'{name}' is an empty list", where=where, fix=fix)
    for n, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise WindfallError(f"'{name}[{n}]' is {_shown(message)}", where=where, fix=fix)
    if messages[-1]["role"] == "assistant":
        fix = "End with the message that the policy must answer; the right answer belongs in the answer field."
        raise WindfallError(f"the last message of '{name}' is from the assistant", where=where, fix=fix)


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):  # a value that JSON does not have, such as a date
        text = json.dumps(str(value))
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def labels(rows: Sequence[TableRow]) -> list[str]:
    return sorted({name for row in rows[:100] for name in row.columns})
