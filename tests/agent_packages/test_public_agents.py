"""Public agent packages, unmodified, as agents of a run. `make test-agents` installs them in their own environment.

A scripted policy shows that the packages understand the gateway: their tool loops reach the right answer. With the tiny
model, which knows no tools, they still run to their end, and every trained token is what the engine sampled.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleets.agent_controller import Scene
from tests.support.fleets.samplers import TOKENIZER, Scripted, close, serving
from windfall.controller.gateway.session import TokenLimits
from windfall.envs.agents.launcher import AgentLauncher, AgentProgram

PACKAGES = {"openai_client": "openai", "smolagents_agent": "smolagents", "openai_agents": "agents"}


@pytest.fixture(params=list(PACKAGES))
def program(request: pytest.FixtureRequest) -> AgentProgram:
    pytest.importorskip(PACKAGES[request.param], reason="make test-agents installs it")
    return AgentProgram(function=f"public_agents:{request.param}")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_package_uses_tools_and_finishes(program: AgentProgram) -> None:
    last = call("final_answer", answer="5") if "smol" in program.function else "It is 5."
    policy = Scripted(call("add", a=2, b=3), last)

    async def main() -> None:
        async with serving(policy) as (gateway, url), AgentLauncher(program) as launcher:
            session = gateway.open("0/0", {"": TokenLimits(1000)})
            variables = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": session.key, "OPENAI_MODEL": "scripted"}
            never: Any = asyncio.get_running_loop().create_future()
            exit = await asyncio.wait_for(launcher.run({"index": 0}, variables, never), 240)
            assert (exit.code, exit.value) == (0, 1.0), exit.output
            segments = await close(gateway, session)
        rewrites = "smol" in program.function  # it writes tool calls into its history in its own words
        assert len(segments) == (2 if rewrites else 1)
        for request, turn in zip(policy.requests, policy.turns, strict=True):
            known = request.prompt + turn.tokens
            assert any(s.ids[: len(known)] == known for s in segments)
        assert "5" in TOKENIZER.decode(policy.requests[-1].prompt), "the tool's result"

    asyncio.run(main())


def test_tokens_are_those_of_the_engine(program: AgentProgram, tmp_path: Path) -> None:
    scene = Scene(
        folder=tmp_path, program=program, tasks=(0, 1), size=2, context=4096, options={"max_tokens": 200},
        limits={"failed_reward": 0.0},
    )  # fmt: skip
    scene.roll()
    assert len(scene.responses) == 4
    assert all(r.reward is not None and r.sampled_count for r in scene.responses.values())
    assert scene.check_tokens() == sum(r.sampled_count for r in scene.responses.values())
    assert scene.runs.failed == 0, (tmp_path / "agents.log").read_text()
