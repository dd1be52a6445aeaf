"""Recipes with agents: what is refused before anything starts, and what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from windfall import config
from windfall.errors import WindfallError
from windfall.launch import agents
from windfall.run_folder import with_absolute_paths


def recipe(**env: Any) -> config.Recipe:
    return config.parse({"env": {"name": "agent", **env}}, "recipe.toml")


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({}, "set either command or function"),
        ({"command": "a", "function": "b:c"}, "set either command or function"),
        ({"command": "a", "reward": "grader"}, "needs a section [env.tasks]"),
        ({"function": "no colon"}, "env.function"),
    ],
)
def test_invalid_sections(env: dict[str, Any], said: str) -> None:
    with pytest.raises(WindfallError) as e:
        recipe(**env)
    assert said in str(e.value)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"command": "no-such-program --fast"}, "there is no program 'no-such-program'"),
        ({"function": "no_such_module:run"}, "there is no module 'no_such_module'"),
        ({"function": "agent_programs:tlak"}, "there is no 'tlak' in agent_programs"),
    ],
)
def test_agent_that_cannot_be_started(env: dict[str, Any], said: str) -> None:
    with pytest.raises(WindfallError) as e:
        agents.check(recipe(**env))
    assert said in str(e.value)
    assert e.value.fix


def test_context_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    r = recipe(command="python x.py", context=300, tasks={"name": "jsonl", "path": "rows.jsonl"})
    assert agents.context_of(r, 512) == 300
    assert agents.context_of(recipe(command="x"), 512) == 512
    assert agents.prompts(r, 512) == [300 - r.rollout.max_tokens]
    absolute = with_absolute_paths(r).env
    assert isinstance(absolute, config.AgentEnv)
    assert absolute.tasks is not None
    assert absolute.tasks.path == tmp_path / "rows.jsonl"  # type: ignore[union-attr]
    assert agents.program(absolute).command == ["python", "x.py"]


def test_run_without_a_gateway(tmp_path: Path) -> None:
    with pytest.raises(WindfallError, match="no gateway"):
        agents.address(tmp_path)
