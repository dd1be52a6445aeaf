from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.hostile.datasets import FILES, MATHEMATICS, WORDS, messages
from tests.support.hostile.datasets import write as write_hostile
from windfall.envs.base import HELD_OUT
from windfall.envs.data.table import TableRow
from windfall.envs.dataset import Dataset
from windfall.envs.held_out import describe
from windfall.errors import WindfallError
from windfall.recipe.env_sections import DatasetEnv
from windfall.recipe.file import parse_recipe
from windfall.types import Task, Turn


def write(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "data.jsonl"
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return path


def rows(count: int) -> list[str]:
    return [json.dumps({"prompt": f"say {n}", "answer": n}) for n in range(count)]


def lines(path: Path, scoring: str = "math", **options: Any) -> Dataset:
    return Dataset(path, rewards=[scoring], **options)


def reward(env: Dataset, gold: str, text: str) -> float | None:
    task = Task(id="x", prompt="", answer=TableRow("", gold, 1))
    return asyncio.run(env.feedback(task, [Turn(text=text)])).reward


NEEDS_MATH = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs math_verify")
GOOD = '{"prompt": "1+1=", "answer": "2"}'


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([GOOD, "{"], ["data.jsonl:2", "not JSON"]),
        ([GOOD, "", b'{"prompt": "\xff", "answer": 1}'], ["data.jsonl:3", "not UTF-8"]),
        ([GOOD, "[1]"], ["data.jsonl:2", "a JSON list"]),
        (['{"promt": "1+1=", "answer": "2"}'], ["data.jsonl:1", "no column 'prompt'", "Did you mean 'promt'?"]),
        (['{"prompt": "1+1="}'], ["no column 'answer'", "Known: prompt."]),
        (['{"prompt": 3, "answer": "2"}'], ["'prompt' is 3", "must be text"]),
        (['{"prompt": "1+1=", "answer": null}'], ["'answer' is null"]),
        (['{"prompt": "1+1=", "answer": " "}'], ["'answer' is"]),
        (['{"prompt": "1+1=", "answer": true}'], ["'answer' is true"]),
        ([], ["data.jsonl", "empty"]),
        (["", " "], ["empty"]),
    ],
)
def test_invalid_lines_are_refused(tmp_path: Path, rows: list[str | bytes], says: list[str]) -> None:
    with pytest.raises(WindfallError) as caught:
        lines(write(tmp_path, *rows), scoring="exact")
    for part in says:
        assert part in str(caught.value)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WindfallError, match="no such file"):
        lines(tmp_path / "missing.jsonl", scoring="exact")
    with pytest.raises(WindfallError, match="no data in this folder"):
        lines(tmp_path, scoring="exact")


def test_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WindfallError, match=r"pip install -e '.*\[math\]'"):
        lines(write(tmp_path, GOOD))
    lines(write(tmp_path, GOOD), scoring="exact")  # which needs nothing


def test_every_epoch_has_every_line_once_in_a_new_order(tmp_path: Path) -> None:
    path = write(tmp_path, *rows(30))
    env = lines(path, scoring="exact")
    epochs = [[str(env.task(epoch * 30 + at).prompt) for at in range(30)] for epoch in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    other = lines(path, scoring="exact", seed=1)
    assert [other.task(at).prompt for at in range(30)] != epochs[0]


def test_field_names_can_be_chosen(tmp_path: Path) -> None:
    path = write(tmp_path, '{"question": "1+1=", "result": 2, "more": []}')
    task = lines(path, "exact", columns={"prompt": "question", "answer": "result"}).task(0)
    assert (task.prompt, task.answer.answer) == ("1+1=", "2")


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
        ("3000", r"\boxed{\$3,000}", True),
        ("3000", r"so \$3,000.", True),
        (r"\$3,000", r"\boxed{3000}", True),
        ("7", "no idea", False),
        ("7", "<answer>((((</answer>", False),
    ],
)
def test_math_scoring(tmp_path: Path, gold: str, text: str, right: bool) -> None:
    env = lines(write(tmp_path, GOOD), cpu_s=1.0)
    assert reward(env, gold, text) == float(right)


@NEEDS_MATH
@pytest.mark.parametrize("gold", WORDS)
def test_gold_answer_that_is_words_is_refused_at_the_start(tmp_path: Path, gold: str) -> None:
    path = write(tmp_path, *(json.dumps({"prompt": f"{n}", "answer": a}) for n, a in enumerate(["1/2", gold])))
    with pytest.raises(WindfallError) as caught:
        lines(path)
    assert f"data.jsonl:2: column 'answer' is {json.dumps(gold)}: words, not mathematics" in str(caught.value)
    assert 'env.rewards = ["exact"]' in str(caught.value)
    lines(path, scoring="exact")


@NEEDS_MATH
def test_gold_answer_is_scored_as_right(tmp_path: Path) -> None:
    """However the policy marks it, and also without a mark."""
    path = write(tmp_path, *(json.dumps({"prompt": str(n), "answer": g}) for n, g in enumerate([*MATHEMATICS, "12"])))
    env = lines(path)
    for gold in MATHEMATICS:
        for text in (gold, f"<answer>{gold}</answer>", f"so \\boxed{{{gold}}}"):
            assert reward(env, gold, text) == 1.0, (gold, text)


@NEEDS_MATH
def test_gold_answer_that_cannot_be_read_is_an_error_not_a_zero(tmp_path: Path) -> None:
    env = lines(write(tmp_path, GOOD))
    with pytest.raises(ValueError, match="use the reward 'exact'"):
        reward(env, "$$", "$$")


@pytest.mark.parametrize("kind", list(FILES))
def test_file_in_another_format_is_refused_with_a_fix(tmp_path: Path, kind: str) -> None:
    with pytest.raises(WindfallError) as caught:
        lines(write_hostile(tmp_path, kind), scoring="exact")
    for part in FILES[kind][2]:
        assert part in str(caught.value)


def test_prompt_can_be_a_conversation(tmp_path: Path) -> None:
    said = messages(("system", "Be brief."), ("user", "1+1="))
    path = write(tmp_path, json.dumps({"prompt": said, "answer": 2}))
    task = lines(path, scoring="exact").task(0)
    assert task.prompt == said
    assert asyncio.run(lines(path, scoring="exact").feedback(task, [Turn(text="2")])).reward == 1.0


def section(path: Path, scoring: str = "math", **keys: Any) -> DatasetEnv:
    env = {"name": "dataset", "path": str(path), "rewards": [scoring]} | keys
    parsed = parse_recipe({"env": env}, where="test").env
    assert isinstance(parsed, DatasetEnv)
    return parsed


def prompts(env: Dataset, first: int, count: int) -> list[Any]:
    return [env.task(first + n).prompt for n in range(count)]


def test_held_out_rows_are_never_trained_on(tmp_path: Path) -> None:
    path = write(tmp_path, *rows(200), *rows(50))
    env = lines(path, scoring="exact", held_out=0.2)
    on = describe(section(path, scoring="exact", held_out=0.2), 1000)
    held_out = prompts(env, HELD_OUT, on.tasks)
    assert len(set(held_out)) == on.tasks, "no prompt counts twice, though a quarter of the rows is there twice"
    assert 20 <= on.tasks <= 60
    trained = prompts(env, 0, 250 - on.tasks)
    assert not set(trained) & set(held_out)
    assert set(trained) | set(held_out) == {f"say {n}" for n in range(200)}
    assert on.description == f"{on.tasks} held-out rows of data.jsonl"
    assert "each is used once" in on.warnings[0]
    assert (
        describe(section(path, scoring="exact", held_out=0.2), 10).description
        == f"10 of {on.tasks} held-out rows of data.jsonl"
    )


def test_split_of_a_row_does_not_change_when_rows_are_added(tmp_path: Path) -> None:
    before = lines(write(tmp_path, *rows(100)), scoring="exact", held_out=0.2)
    count = describe(section(tmp_path / "data.jsonl", held_out=0.2, scoring="exact"), 1000).tasks
    held_out = set(prompts(before, HELD_OUT, count))
    more = lines(write(tmp_path, *reversed(rows(300))), scoring="exact", held_out=0.2, seed=9)
    assert not held_out & set(prompts(more, 0, 250))
    wider = lines(tmp_path / "data.jsonl", scoring="exact", held_out=0.4)
    assert held_out <= set(prompts(wider, HELD_OUT, 300)), "a larger share adds to it"


def test_separate_evaluation_file(tmp_path: Path) -> None:
    path = write(tmp_path, *rows(20))
    own = tmp_path / "test.jsonl"
    own.write_text("".join(json.dumps({"prompt": f"ask {n}", "answer": n}) + "\n" for n in range(8)))
    env = lines(path, scoring="exact", evaluation={"path": own})
    assert set(prompts(env, HELD_OUT, 8)) == {f"ask {n}" for n in range(8)}
    assert set(prompts(env, 0, 20)) == {f"say {n}" for n in range(20)}
    assert env.task(HELD_OUT).id.startswith("test.jsonl:")
    on = describe(section(path, "exact"), 8, {"path": str(own)})
    assert (on.tasks, on.description, on.warnings) == (8, "8 rows of test.jsonl", ())
    own.write_text(own.read_text() + rows(1)[0] + "\n")
    on = describe(section(path, "exact"), 64, {"path": str(own)})
    assert on.description == "9 rows of test.jsonl (1 of the 9 are also trained on)"
    assert any("1 of 9 prompts of test.jsonl are also in data.jsonl" in warning for warning in on.warnings)


def test_evaluation_on_training_rows_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path, *rows(20), *rows(20))
    on = describe(section(path, scoring="exact"), 64)
    assert (on.tasks, on.description) == (20, "20 training rows of data.jsonl (no held-out set given)")
    assert "eval.path" in on.warnings[-1]
    env = lines(path, scoring="exact")
    assert len(set(prompts(env, HELD_OUT, 20))) == 20


def test_impossible_splits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WindfallError, match="leaves none of the 1 different prompts"):
        lines(write(tmp_path, GOOD, GOOD), scoring="exact", held_out=0.5)
    with pytest.raises(WindfallError, match="no such file"):
        lines(write(tmp_path, GOOD), scoring="exact", evaluation={"path": tmp_path / "missing.jsonl"})


def test_eval_prints_what_it_was_measured_on(windfall: Any, here: Path) -> None:
    (here / "r.toml").write_text(
        '[run]\ndevice = "cpu"\nthreads = 1\n[env]\nname = "dataset"\npath = "data.jsonl"\nrewards = ["exact"]\n'
        "[rollout]\nmax_tokens = 4\n"
    )
    write(here, *(json.dumps({"prompt": f"{n}+1=", "answer": n + 1}) for n in range(40)))
    code, out, err = windfall("eval", "tiny", "--recipe", "r.toml", "--tasks", "2")
    assert code == 0
    assert "on 2 of 40 training rows of data.jsonl (no held-out set given)" in out
    assert "says nothing about new tasks" in err
    code, out, err = windfall("eval", "tiny", "--recipe", "r.toml", "--set", "env.held_out=0.1")
    count = describe(section(here / "data.jsonl", held_out=0.1, scoring="exact"), 99).tasks
    assert code == 0
    assert f"on {count} held-out rows of data.jsonl" in out
    assert "each is used once" in err
