"""Rows of a JSONL file, read and checked once. For files in another format, the error gives a command to convert it."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from windfall.errors import WindfallError, nearest
from windfall.types import Prompt, prompt_key

_PANDAS = "import pandas, sys; pandas.read_parquet(sys.argv[1]).to_json(sys.argv[2], orient='records', lines=True)"
_LINES = "import json, sys; [print(json.dumps(row)) for row in json.load(sys.stdin)]"
_FORMATS = {
    b"PAR1": ("a parquet file", f'python -c "{_PANDAS}" {{0}} {{1}}'),
    b"\x1f\x8b": ("compressed with gzip", "gunzip -c {0} > {1}"),
    b"(\xb5/\xfd": ("compressed with zstd", "zstd -dc {0} > {1}"),
    b"\xfd7zXZ": ("compressed with xz", "xz -dc {0} > {1}"),
    b"BZh": ("compressed with bzip2", "bunzip2 -c {0} > {1}"),
    b"PK\x03\x04": ("a zip archive", "unzip -p {0} > {1}"),
    b"[": ("one JSON array, not a JSON object per line", f'python -c "{_LINES}" < {{0}} > {{1}}'),
}
"""The first bytes of a file, its format, and a command that converts it to JSONL."""
_COMPRESSED = {".gz", ".zst", ".xz", ".bz2", ".zip"}


@dataclass(frozen=True, slots=True)
class DataRow:
    prompt: Prompt
    answer: str
    line: int

    @property
    def key(self) -> int:
        """A hash of the prompt from 0 up to 2^64. Rows with the same prompt have the same key."""
        return int.from_bytes(blake2b(b" ".join(prompt_key(self.prompt).split()), digest_size=8).digest(), "big")


def read(path: Path, prompt_field: str, answer_field: str) -> list[DataRow]:
    if not path.is_file():
        what = "this is not a file" if path.exists() else "no such file"
        raise WindfallError(what, where=str(path), fix="Give the path of a JSONL file.")
    rows: list[DataRow] = []
    try:
        with path.open("rb") as file:
            refuse_other_formats(path, file.read(64))
            file.seek(0)
            for number, line in enumerate(file, start=1):
                if line.strip():
                    rows.append(_row(line, f"{path}:{number}", number, prompt_field, answer_field))
    except OSError as e:
        raise WindfallError(f"cannot read it: {e.strerror or e}", where=str(path), fix="Make it readable.") from e
    if not rows:
        raise WindfallError("the file is empty", where=str(path), fix="Write one JSON object per line.")
    return rows


def refuse_other_formats(path: Path, start: bytes) -> None:
    start = start.lstrip() if start.lstrip().startswith(b"[") else start
    for magic, (what, command) in _FORMATS.items():
        if start.startswith(magic):
            stem = path.with_suffix("") if path.suffix in _COMPRESSED else path
            target = stem if stem != path and stem.suffix == ".jsonl" else stem.with_suffix(".jsonl")
            if target == path:
                target = path.with_name(f"{path.stem}-lines.jsonl")
            fix = "Convert it: " + command.format(*(shlex.quote(str(p)) for p in (path, target)))
            raise WindfallError(f"this is {what}", where=str(path), fix=fix)


def _row(line: bytes, where: str, number: int, prompt_field: str, answer_field: str) -> DataRow:
    row = parse_line(line, where)
    prompt, answer = (_field(row, name, where) for name in (prompt_field, answer_field))
    if isinstance(prompt, list):
        check_messages(prompt, prompt_field, where)
    elif not isinstance(prompt, str) or not prompt:
        fix = 'It must be text, or a list of messages such as {"role": "user", "content": "..."}.'
        raise WindfallError(f"'{prompt_field}' is {shorten(prompt)}", where=where, fix=fix)
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        raise WindfallError(f"'{answer_field}' is {shorten(answer)}", where=where, fix="It must be text or a number.")
    return DataRow(prompt, str(answer).strip(), number)


def check_messages(messages: list[Any], name: str, where: str) -> None:
    """Raise unless this is a conversation that the policy can continue."""
    fix = 'Every message must be an object with text as "role" and "content".'
    if not messages:
        raise WindfallError(f"'{name}' is an empty list", where=where, fix=fix)
    for n, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise WindfallError(f"'{name}[{n}]' is {shorten(message)}", where=where, fix=fix)
    if messages[-1]["role"] == "assistant":
        fix = "End with the message that the policy must answer; the right answer belongs in the answer field."
        raise WindfallError(f"the last message of '{name}' is from the assistant", where=where, fix=fix)


def parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except UnicodeDecodeError as e:
        raise WindfallError(f"the line is not UTF-8: {e}", where=where, fix="Save the file as UTF-8.") from None
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


def _field(row: dict[str, Any], name: str, where: str) -> Any:
    if name not in row:
        fix = nearest(name, row) or "The object is empty."
        raise WindfallError(f"there is no field '{name}'", where=where, fix=fix)
    return row[name]


def shorten(value: Any, limit: int = 120) -> str:
    text = json.dumps(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
