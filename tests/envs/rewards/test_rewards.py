"""Reward functions as TRL has them: what they get, what they may return, and how several are added up."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from windfall.envs.dataset import Dataset
from windfall.envs.failures import EnvFailed
from windfall.envs.process_pool.pool import EnvPool
from windfall.errors import WindfallError
from windfall.recipe.file import parse_recipe
from windfall.types import Feedback, Turn

FUNCTIONS = """
import asyncio

SEEN = {}

def keeps(prompts, completions, completion_ids, level, **columns):
    SEEN.update(prompts=prompts, completions=completions, completion_ids=completion_ids, level=level, **columns)
    return [1.0]

def length(completions, **kwargs):
    return [float(len(c if isinstance(c, str) else c[0]["content"])) for c in completions]

def only_easy(completions, level):
    return [0.5 if l == 1 else None for l in level]

async def slow(completions, answer, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 if c == a else 0.0 for c, a in zip(completions, answer)]

def raises(completions, **kwargs):
    raise RuntimeError("no server")

def two(completions, **kwargs):
    return [1.0, 2.0]

def text(completions, **kwargs):
    return ["1.0x"]

def bare(completions, **kwargs):
    return 1.0

def nan(completions, **kwargs):
    return [float("nan")]

def none(completions, **kwargs):
    return [None]

def tied(completions, trainer_state):
    return [0.0]

def no_completions(prompts):
    return [0.0]

def ids(completion_ids, completions):
    return [float(sum(completion_ids[0]))]

NUMBER = 3
"""

ENDLESS = "<answer>" + "1+" * 20_000 + "1</answer>"


def data(folder: Path, **row: Any) -> Path:
    (folder / "rewards.py").write_text(FUNCTIONS)
    rows = [{"prompt": "7*8=", "answer": "56", "level": 1} | row, {"prompt": "1+1=", "answer": "2", "level": 2}]
    path = folder / "sums.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def make(folder: Path, *functions: str, weights: tuple[float, ...] = (), **options: Any) -> Dataset:
    specs = [f if f in ("math", "exact") else f"{folder / 'rewards.py'}:{f}" for f in functions]
    return Dataset(options.pop("path", None) or data(folder), rewards=specs, reward_weights=weights, **options)


def grade(env: Dataset, text: str, level: int = 1, tokens: tuple[int, ...] = ()) -> Feedback:
    task = next(t for n in range(2) if (t := env.task(n)).answer.columns["level"] == level)
    return asyncio.run(env.feedback(task, [Turn(text=text, tokens=tokens)]))


def test_rewards_are_weighted_and_kept_by_name(tmp_path: Path) -> None:
    env = make(tmp_path, "exact", "length", "only_easy", "slow", weights=(1.0, 0.1, 2.0, 4.0))
    right = grade(env, "56")
    assert dict(right.scores) == {"exact": 1.0, "length": 2.0, "only_easy": 0.5, "slow": 1.0}
    assert right.reward == pytest.approx(1.0 + 0.2 + 1.0 + 4.0)
    other = grade(env, "2", level=2)  # None adds nothing
    assert dict(other.scores) == {"exact": 1.0, "length": 1.0, "slow": 1.0}
    assert other.reward == pytest.approx(1.0 + 0.1 + 4.0)


def test_functions_get_what_trl_gives_them(tmp_path: Path) -> None:
    env = make(tmp_path, "keeps", system_prompt="Think.")
    assert env.needs_tokens
    grade(env, "5", tokens=(7, 9))
    seen = env._rewards._functions["keeps"].call.__globals__["SEEN"]  # type: ignore[attr-defined]
    assert seen == {
        "prompts": [[{"role": "system", "content": "Think."}, {"role": "user", "content": "7*8="}]],
        "completions": [[{"role": "assistant", "content": "5"}]],
        "completion_ids": [[7, 9]],
        "level": [1],
        "answer": ["56"],
    }
    assert not make(tmp_path, "length").needs_tokens


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("two", "'two' must return a list with one number or None per completion; it returned 2 for one"),
        ("text", "it returned a str in the list"),
        ("bare", "it returned a float"),
        ("nan", "it returned nan"),
        ("raises", "no server"),
    ],
)
def test_what_is_not_one_number_is_an_error(tmp_path: Path, function: str, says: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=says):
        grade(make(tmp_path, "exact", function), "56")


def test_a_response_that_nothing_scores_has_no_reward(tmp_path: Path) -> None:
    with pytest.raises(EnvFailed, match="all returned None"):
        grade(make(tmp_path, "none"), "56")
    assert grade(make(tmp_path, "none", "exact"), "56").reward == 1.0


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("tied", "needs 'trainer_state', which is not a column of the data"),
        ("no_completions", "has no parameter 'completions'"),
        ("lenght", "Did you mean 'length'?"),
        ("NUMBER", "is not a function"),
    ],
)
def test_functions_that_cannot_be_called_are_refused(tmp_path: Path, function: str, says: str) -> None:
    with pytest.raises(WindfallError) as caught:
        make(tmp_path, function)
    assert says in str(caught.value)


@pytest.mark.parametrize("name", ["prompts", "completions", "completion_ids"])
def test_a_column_that_no_function_would_get_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(WindfallError, match=f"has a column '{name}', which no function would get"):
        make(tmp_path, "length", path=data(tmp_path, **{name: 1}))
    assert grade(make(tmp_path, "exact", path=data(tmp_path, **{name: 1})), "56").reward == 1.0


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    path = data(tmp_path)
    with pytest.raises(WindfallError, match="no such file"):
        Dataset(path, rewards=[f"{tmp_path}/other.py:f"])
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(WindfallError, match=r"broken.py:1: .*syntax error"):
        Dataset(path, rewards=[f"{tmp_path}/broken.py:f"])
    with pytest.raises(WindfallError, match="there is no module 'nowhere'"):
        Dataset(path, rewards=["nowhere.rewards:f"])


def test_functions_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    path = data(tmp_path)
    (tmp_path / "more.py").write_text("def length(completions, **kwargs):\n    return [-1.0]\n")
    specs = [f"{tmp_path}/rewards.py:length", f"{tmp_path}/more.py:length"]
    assert dict(grade(Dataset(path, rewards=specs), "56").scores) == dict(zip(specs, (2.0, -1.0), strict=True))


@pytest.mark.parametrize("name", ["exact", "math"])
def test_a_function_with_the_name_of_a_grader_is_called_itself(tmp_path: Path, name: str) -> None:
    path, own = data(tmp_path), tmp_path / "own.py"
    own.write_text(f"def {name}(completions, **kwargs):\n    return [-1.0]\n")
    spec = f"{own}:{name}"
    assert dict(grade(Dataset(path, rewards=[spec]), "56").scores) == {spec: -1.0}
    assert dict(grade(Dataset(path, rewards=["exact", spec]), "56").scores) == {"exact": 1.0, spec: -1.0}


def test_in_a_child_process(tmp_path: Path) -> None:
    """Scores and token ids cross the link, and the kernel's end of a long comparison keeps the other scores."""
    pytest.importorskip("math_verify")
    data(tmp_path)
    path = tmp_path / "one.jsonl"
    path.write_text('{"prompt": "7*8=", "answer": "56", "level": 1}\n')
    rewards = [f"{tmp_path / 'rewards.py'}:{f}" for f in ("ids", "only_easy")]
    options = {"path": str(path), "rewards": [*rewards, "math"], "reward_weights": [1.0, 1.0, 10.0], "cpu_s": 1.0}
    named = {"name": "custom", "factory": "windfall.envs.dataset:Dataset", "options": options}

    async def main() -> None:
        async with EnvPool(parse_recipe({"env": named}, where="test").env, 0) as pool:
            await pool.ready()
            assert pool.needs_tokens
            task = await pool.task(0, 20.0)
            found = await pool.feedback(0, task, [Turn(text="56", tokens=(3, 4))], 20.0)
            assert dict(found.scores) == {"ids": 7.0, "only_easy": 0.5, "math": 1.0}
            assert found.reward == 17.5
            first = pool.places[0]
            late = await pool.feedback(0, task, [Turn(text=ENDLESS, tokens=(3,))], 60.0)
            assert dict(late.scores) == {"ids": 3.0, "only_easy": 0.5, "math": 0.0}
            assert late.reward == 3.5
            assert first not in pool.places  # the kernel has ended it

    asyncio.run(main())


def test_recipes_with_wrong_rewards_are_refused() -> None:
    for wrong, says in (
        ({"rewards": ["maths"]}, "rewards"),
        ({"rewards": []}, "rewards"),
        ({"rewards": ["math"], "reward_weights": [1.0, 2.0]}, "2 numbers for 1 rewards"),
        ({"rewards": ["exact", "exact"]}, "named twice"),
        ({"columns": {"prompts": "x"}}, "columns"),
    ):
        with pytest.raises(WindfallError, match=says):
            parse_recipe({"env": {"name": "dataset", "path": "a.jsonl"} | wrong}, where="test")
