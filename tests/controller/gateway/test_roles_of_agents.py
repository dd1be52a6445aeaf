"""Agents with several roles: `session.sample` and OpenAI's client with `model`, one conversation and one reward for
each role, and the same response if the agent or the controller ends in the middle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.fleets.agent_controller import Scene
from tests.support.fleets.samplers import Scripted, close, openai_client, run, serving
from windfall.controller.gateway.session import TokenLimits
from windfall.envs.agents.launcher import AgentExit, AgentProgram
from windfall.envs.failures import EnvFailed

LIMITS = {"solver": TokenLimits(100), "verifier": TokenLimits(5)}


def argues(**options: Any) -> AgentProgram:
    return AgentProgram(function="agent_programs:argues", options=options)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    scene = Scene(folder=tmp_path_factory.mktemp("calm"), program=argues(), tasks=(0,))
    scene.roll()
    return scene


def test_every_role_has_its_conversation_and_its_reward(calm: Scene) -> None:
    assert sorted(calm.responses) == ["0/0", "0/1"]
    for id, response in calm.responses.items():
        assert [(s.id, s.role, s.turns) for s in response.more] == [(f"{id}+1", ":con", 2)]
        pro, con = response.of("")
        assert (pro.role, pro.turns, con.role, con.turns) == (":pro", 2, ":con", 2)
        assert dict(response.rewards) == {":pro": pro.reward, ":con": con.reward}
    assert calm.check_tokens() == sum(r.sampled_count for r in calm.responses.values())
    assert calm.rollout.failures.missing == 0


def test_posted_rewards_of_roles_stand_beside_the_returned_reward(tmp_path: Path) -> None:
    program = AgentProgram(function="agent_programs:posts_and_returns")
    for response in Scene(folder=tmp_path, program=program, tasks=(0,)).roll().values():
        assert {part.role: part.reward for part in response.of("")} == {":pro": 0.75, ":con": 0.5}


def test_agent_that_ends_in_the_middle_gets_the_same_turns(calm: Scene, tmp_path: Path) -> None:
    scene = Scene(folder=tmp_path, program=argues(folder=str(tmp_path)), tasks=(0,))
    assert scene.roll() == calm.responses
    assert (scene.runs.started, max(scene.times.values())) == (4, 1)


def test_next_controller_has_all_of_it(calm: Scene) -> None:
    again = Scene(folder=calm.folder, program=argues(), tasks=(0,))
    assert again.roll() == calm.responses
    assert (again.runs.started, again.made) == (0, {})


def test_next_controller_continues_in_the_middle(calm: Scene, tmp_path: Path) -> None:
    """Whatever part of the journal is left: turns in it are not sampled again, and the response is the same."""
    data = (calm.folder / "journal" / "000000.wal").read_bytes()
    for share in (0.2, 0.5, 0.8):
        folder = tmp_path / str(share)
        (folder / "journal").mkdir(parents=True)
        (folder / "journal" / "000000.wal").write_bytes(data[: int(share * len(data))])
        scene = Scene(folder=folder, program=argues(), tasks=(0,))
        assert scene.roll() == calm.responses
        assert len(scene.made) < len(calm.made)


def test_model_names_the_role() -> None:
    pytest.importorskip("openai", reason="the gateway is tested with OpenAI's client")

    async def main() -> None:
        sampler = Scripted("four", "no", "7", "a long verdict")
        async with serving(sampler, "solver", "verifier") as (gateway, url):
            session = gateway.open("7/0", LIMITS)
            api = openai_client(url, session)
            assert [model.id async for model in api.models.list()] == ["solver", "verifier"]
            messages: list[Any] = [{"role": "user", "content": "3+4="}]
            for model in ("solver", "verifier", "solver:again"):
                answer = await api.chat.completions.create(model=model, messages=messages)
                assert answer.model == model
            with pytest.raises(Exception, match="there is no model 'gpt'; the policies of this run are: solver, ver"):
                await api.chat.completions.create(model="gpt", messages=messages)
            more = [*messages, {"role": "assistant", "content": "no"}, {"role": "user", "content": "sure?"}]
            answer = await api.chat.completions.create(model="verifier", messages=more)
            assert answer.choices[0].finish_reason == "length", "the verifier has used 3 of its 5 tokens"
            segments = await close(gateway, session)
            assert [(s.role, len(s.keys)) for s in segments] == [("solver", 2), ("verifier", 4), ("solver:again", 2)]
            assert [request.role for request in sampler.requests] == ["solver", "verifier", "solver:again", "verifier"]

    run(main)


def test_model_is_ignored_without_policies_unless_it_is_a_label() -> None:
    pytest.importorskip("openai", reason="the gateway is tested with OpenAI's client")

    async def main() -> None:
        sampler = Scripted("1", "2")
        async with serving(sampler) as (gateway, url):
            session = gateway.open("7/0", {"": TokenLimits(100)})
            api = openai_client(url, session)
            for model in ("gpt:4", ":black"):
                await api.chat.completions.create(model=model, messages=[{"role": "user", "content": "3+4="}])
            assert [request.role for request in sampler.requests] == ["", ":black"]
            await gateway.close(session)

    run(main)


def test_rewards_that_are_posted_or_returned() -> None:
    import aiohttp

    async def main() -> None:
        async with serving(Scripted(), "solver") as (gateway, url), aiohttp.ClientSession() as http:
            session = gateway.open("7/0", LIMITS)
            headers = {"Authorization": f"Bearer {session.key}"}
            for body, status in (({"rewards": {"solver": 1}}, 200), ({}, 400), ({"rewards": {"solver": 1e10}}, 400)):
                async with http.post(f"{url}/reward", json=body, headers=headers) as got:
                    assert got.status == status
            assert (session.reward, session.rewards) == (None, {"solver": 1.0})
            await gateway.close(session)

    run(main)
    assert AgentExit(code=0, value={"rewards": {"solver": True}, "reward": 0}).rewards == {"solver": 1.0}
    assert AgentExit(code=0, value=0.5).rewards == {}
    with pytest.raises(EnvFailed, match="the reward of 'solver' is a str"):
        _ = AgentExit(code=0, value={"rewards": {"solver": "good"}}).rewards
