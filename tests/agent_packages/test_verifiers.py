"""An environment of the verifiers package, unmodified, as the environment of a run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from agent_scene import Scene

from windfall import config
from windfall.config.env_sections import VerifiersEnv
from windfall.envs.agents.launcher import AgentLauncher
from windfall.errors import WindfallError
from windfall.launch.agents import program

ARGS = {"gym": "chain_sum", "num_train_examples": 6, "num_eval_examples": 2, "system_prompt": "Add."}


def section(id: str = "verifiers.envs.integrations.reasoninggym_env:ReasoningGymEnv") -> VerifiersEnv:
    env = config.parse({"env": {"name": "verifiers", "id": id, "args": ARGS, "memory_mb": 0}}, "test").env
    assert isinstance(env, VerifiersEnv)
    return env


def needs_verifiers() -> None:
    vf = pytest.importorskip("verifiers", reason="make test-agents installs it")
    if not hasattr(vf, "load_environment"):
        pytest.skip("this is another generation of verifiers")


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
