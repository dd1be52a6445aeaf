from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from windfall.envs.jsonl import JsonLines
from windfall.errors import WindfallError
from windfall.types import Task, Turn


def write(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "data.jsonl"
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return path


def rows(count: int) -> list[str]:
    return [json.dumps({"prompt": f"say {n}", "answer": n}) for n in range(count)]


NEEDS_MATH = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs math_verify")
GOOD = '{"prompt": "1+1=", "answer": "2"}'


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([GOOD, "{"], ["data.jsonl:2", "not JSON"]),
        ([GOOD, "", b'{"prompt": "\xff", "answer": 1}'], ["data.jsonl:3", "not UTF-8"]),
        (["[1]"], ["data.jsonl:1", "a JSON list"]),
        (['{"promt": "1+1=", "answer": "2"}'], ["data.jsonl:1", "no field 'prompt'", "Did you mean 'promt'?"]),
        (['{"prompt": "1+1="}'], ["no field 'answer'", "Known: prompt."]),
        (['{"prompt": 3, "answer": "2"}'], ["'prompt' is 3", "must be text"]),
        (['{"prompt": "1+1=", "answer": null}'], ["'answer' is null"]),
        (['{"prompt": "1+1=", "answer": " "}'], ["'answer' is"]),
        (['{"prompt": "1+1=", "answer": true}'], ["'answer' is true"]),
        ([], ["data.jsonl", "empty"]),
        (["", " "], ["empty"]),
    ],
)
def test_refusals(tmp_path: Path, lines: list[str | bytes], says: list[str]) -> None:
    with pytest.raises(WindfallError) as caught:
        JsonLines(write(tmp_path, *lines), scoring="exact")
    for part in says:
        assert part in str(caught.value)


def test_refuses_what_is_no_file_and_unknown_scoring(tmp_path: Path) -> None:
    with pytest.raises(WindfallError, match="no such file"):
        JsonLines(tmp_path / "missing.jsonl", scoring="exact")
    with pytest.raises(WindfallError, match="not a file"):
        JsonLines(tmp_path, scoring="exact")
    with pytest.raises(WindfallError, match="Did you mean 'math'"):
        JsonLines(write(tmp_path, GOOD), scoring="maths")  # type: ignore[arg-type]


def test_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WindfallError, match=r"pip install 'windfall\[math\]'"):
        JsonLines(write(tmp_path, GOOD))
    JsonLines(write(tmp_path, GOOD), scoring="exact")  # which needs nothing


def test_every_epoch_has_every_line_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path, *rows(30))
    env = JsonLines(path, scoring="exact")
    epochs = [[env.task(epoch * 30 + at).prompt for at in range(30)] for epoch in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    other = JsonLines(path, scoring="exact", seed=1)
    assert [other.task(at).prompt for at in range(30)] != epochs[0]


def test_fields_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, '{"question": "1+1=", "result": 2, "more": []}')
    task = JsonLines(path, "question", "result", "exact").task(0)
    assert (task.prompt, task.answer) == ("1+1=", "2")


@NEEDS_MATH
@pytest.mark.parametrize(
    ("gold", "text", "right"),
    [
        ("1/2", r"so \boxed{0.5}", True),
        ("1/2", r"so $\frac{2}{4}$", True),
        ("1/2", "<answer>0.5</answer>", True),
        ("1/2", "it is 0.5", True),
        ("1/2", "it is 0.6", False),
        (r"\frac{1}{2}", "<answer>1/2</answer>", True),
        ("2x+5", r"\boxed{5+2x}", True),
        ("2x+5", r"\boxed{2}", False),
        ("$x^2$", r"\boxed{x \cdot x}", True),
        ("3000", "in all 3,000", True),
        ("7", "no idea", False),
        ("7", "<answer>((((</answer>", False),
    ],
)
def test_math(tmp_path: Path, gold: str, text: str, right: bool) -> None:
    env = JsonLines(write(tmp_path, GOOD), cpu_s=1.0)
    task = Task(id="x", prompt="", answer=gold)
    assert env.feedback(task, [Turn(text=text)]).reward == float(right)


@NEEDS_MATH
def test_a_gold_answer_that_is_no_mathematics_is_an_error_not_a_zero(tmp_path: Path) -> None:
    env = JsonLines(write(tmp_path, GOOD))
    with pytest.raises(ValueError, match="use scoring 'exact'"):
        env.feedback(Task(id="x", prompt="", answer="$$"), [Turn(text="$$")])
