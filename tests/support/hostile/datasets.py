"""Files that a user may give as a JSONL file of prompts and answers, and the resulting errors."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

ROW = {"prompt": "1+1=", "answer": "2"}
LINE = json.dumps(ROW).encode()


def messages(*said: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in said]


def _prompt(prompt: object) -> bytes:
    return json.dumps({"prompt": prompt, "answer": "2"}).encode()


FILES: dict[str, tuple[str, bytes, list[str]]] = {
    "a damaged parquet file": (
        "train.parquet", b"PAR1\x15\x04\x15\x10" + b"\x00" * 80 + b"PAR1", ["train.parquet", "cannot read it"],
    ),
    "a compressed file": ("train.jsonl.gz", gzip.compress(LINE), ["train.jsonl.gz:1", "not UTF-8", "not compressed"]),
    "an array": ("train.json", json.dumps([ROW, ROW], indent=1).encode(), ["not JSON", "one JSON object"]),
    "an array on one line": ("train.jsonl", json.dumps([ROW]).encode(), ["a JSON list", "one JSON object"]),
    "another encoding": ("train.jsonl", '{"prompt": "\u00fc"}'.encode("latin-1"), ["train.jsonl:1", "not UTF-8"]),
    "nesting without end": ("train.jsonl", b'{"prompt": ' + b"[" * 100_000, ["train.jsonl:1", "nested too deeply"]),
    "no messages": ("train.jsonl", _prompt([]), ["train.jsonl:1", "'prompt' is an empty list"]),
    "messages of text": ("train.jsonl", _prompt(["hello"]), ["'prompt[0]' is", '"role" and "content"']),
    "a message without a role": ("train.jsonl", _prompt([{"content": "hello"}]), ["'prompt[0]' is"]),
    "a message of parts": (
        "train.jsonl", _prompt([{"role": "user", "content": [{"type": "image", "url": "x"}]}]), ["'prompt[0]' is"],
    ),
    "a conversation that has its answer": (
        "train.jsonl", _prompt(messages(("user", "1+1="), ("assistant", "2"))),
        ["the last message of 'prompt' is from the assistant"],
    ),
}  # fmt: skip
"""For each kind of file: its name, its content, and what the error must contain."""

WORDS = ["Paris", "no solution", "yes"]
"""Gold answers that math-verify would misread."""

MATHEMATICS = [
    "1/2",
    r"\frac{1}{2}",
    "(1,2)",
    "A",
    "x=3",
    "50%",
    "9^{9^{9}}",
    r"\text{no solution}",
    "$18",
    "3,4",
    "1.5e3",
]
"""Gold answers that look odd but are valid."""


def write(folder: Path, kind: str) -> Path:
    name, data, _ = FILES[kind]
    path = folder / name
    path.write_bytes(data)
    return path
