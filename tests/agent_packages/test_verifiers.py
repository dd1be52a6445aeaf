"""An environment of the verifiers package, unmodified, as the environment of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from examples import verifiers_agent
from tests.support.fleets.agent_controller import Scene
from windfall.controller.gateway.agents import program
from windfall.envs.agents.launcher import AgentLauncher
from windfall.errors import WindfallError
from windfall.recipe.env_sections import AgentEnv
from windfall.recipe.file import parse_recipe

ROOT = Path(__file__).parents[2]
ARGS = {"gym": "chain_sum", "num_train_examples": 6, "num_eval_examples": 2, "system_prompt": "Add."}


def section(id: str = "verifiers.envs.integrations.reasoninggym_env:ReasoningGymEnv") -> AgentEnv:
    options = {"id": id, "args": ARGS}
    given = {"name": "agent", "function": "examples.verifiers_agent:run", "options": options, "memory_mb": 0}
    env = parse_recipe({"env": given}, "test").env
    assert isinstance(env, AgentEnv)
    return env


def needs_verifiers() -> None:
    pytest.importorskip("verifiers", reason="make test-agents installs it")
    try:
        verifiers_agent.check_version()
    except WindfallError as e:
        pytest.skip(e.what)


def test_environment_of_verifiers(tmp_path: Path) -> None:
    needs_verifiers()
    scene = Scene(
        folder=tmp_path, program=program(section()), tasks=(0, 1 << 40), context=4096, options={"max_tokens": 60}
    )
    scene.roll()
    assert [r.reward for r in scene.responses.values()] == [0.0] * 4, (tmp_path / "agents.log").read_text()
    assert scene.check_tokens() > 4
    train, held_out = scene.responses["0/0"].prompt, scene.responses[f"{1 << 40}/0"].prompt
    assert train != held_out


def test_unknown_environment_is_named() -> None:
    needs_verifiers()

    async def main() -> None:
        async with AgentLauncher(program(section("no-such-environment"))) as launcher:
            await launcher.ready()

    with pytest.raises(WindfallError, match="no-such-environment"):
        asyncio.run(main())


def test_example_with_several_turns(
    windfall: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_verifiers()
    monkeypatch.chdir(ROOT)
    recipe = ("--recipe", "recipes/verifiers.toml", "--set", "run.device='cpu'")
    code, out, errors = windfall("eval", "tiny", *recipe, "--tasks", "4", "--show", "4")
    assert code == 0, errors
    assert "on 4 held-out tasks of agent" in out
    assert "rewards missing 0" in out
    assert ";" in out, "the environment's own sampling arguments end a turn with ';'"


def test_other_generation_of_verifiers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "verifiers-0.4.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: verifiers\nVersion: 0.4.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WindfallError, match=r"verifiers 0\.4\.0 is installed.* 0\.1\.5 to 0\.1\.x only") as e:
        verifiers_agent.prepare("any", {})
    assert "verifiers>=0.1.5,<0.2" in e.value.fix
