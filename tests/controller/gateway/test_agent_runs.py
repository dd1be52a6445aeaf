"""Agents in processes of their own: what is trained is what the engines sampled, whatever is killed in mid-session."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleets.agent_controller import Scene
from tests.support.fleets.samplers import TOKENIZER
from windfall.envs.agents.launcher import AgentProgram
from windfall.envs.arithmetic import Arithmetic
from windfall.events.log import read
from windfall.types import Feedback, Response, Task, Turn


def function(name: str, **options: Any) -> AgentProgram:
    return AgentProgram(function=f"agent_programs:{name}", options=options)


def content(responses: dict[str, Response]) -> Any:
    """What is trained on, without the name of the engine."""
    return {id: [(s.id, s.prompt, s.tokens, s.sampled, s.reward) for s in r.segments] for id, r in responses.items()}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A run in which nothing is lost."""
    scene = Scene(folder=tmp_path_factory.mktemp("calm"), program=function("talk"))
    scene.roll()
    return scene


def test_tokens_are_those_of_the_engines(calm: Scene) -> None:
    assert sorted(calm.responses) == ["0/0", "0/1", "1/0", "1/1"]
    for id, r in calm.responses.items():
        assert [s.id for s in r.segments] == [id, f"{id}+1"]
        assert len({s.reward for s in r.segments}) == 1
        assert r.reward is not None
        assert (r.turns, r.agent) == (4, True), "of both segments"
        assert r.finish == r.more[-1].finish
        assert r.sampled_count < r.length, "observations are masked"
    assert calm.check_tokens() == sum(r.sampled_count for r in calm.responses.values())
    assert max(calm.times.values()) == 1
    assert calm.runs.started == 4


def test_command_is_as_good_as_a_function(calm: Scene, tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "programs" / "agent_programs.py"
    scene = Scene(folder=tmp_path, program=AgentProgram(command=[sys.executable, str(path)]), tasks=(1,), size=1)
    assert content(scene.roll()) == {"1/0": content(calm.responses)["1/0"]}


def test_killed_agent_is_started_again_and_gets_the_same_turns(calm: Scene, tmp_path: Path) -> None:
    scene = Scene(folder=tmp_path, program=function("dies_once", folder=str(tmp_path)), tasks=(1,))
    scene.roll()
    assert content(scene.responses) == {id: c for id, c in content(calm.responses).items() if id[0] == "1"}
    assert max(scene.times.values()) == 1, "no turn was sampled twice"
    assert (scene.runs.started, scene.runs.failed) == (4, 2)
    scene.check_tokens()


def test_killed_agent_server(calm: Scene, tmp_path: Path) -> None:
    """Every agent that was running is started again by another server, and gets the turns that it had."""

    async def kill(scene: Scene) -> None:
        while scene.dispatch.ledger.counts.accepted < 40:
            await asyncio.sleep(0.001)
        server = scene.runs.launcher.pid
        assert server is not None
        os.kill(server, signal.SIGKILL)

    scene = Scene(folder=tmp_path / "again", program=function("talk"), during=kill)
    assert content(scene.roll()) == content(calm.responses), "the same tokens are trained, each once"
    assert scene.runs.failed > 0
    assert "the process that starts agents was lost" in (tmp_path / "again" / "agents.log").read_text()
    scene.check_tokens()
    once = Scene(folder=tmp_path / "once", program=function("talk"), during=kill, limits={"restart": False})
    rewards = {r.id: r.reward for r in once.roll().values()}
    lost = [id for id, reward in rewards.items() if reward is None]
    assert lost
    assert len(lost) == once.runs.failed, "missing, never zero"
    assert all(reward == calm.responses[id].reward for id, reward in rewards.items() if reward is not None)
    assert any(
        "was lost" in e["error"] for e in read(tmp_path / "once" / "events.jsonl") if e["name"] == "reward_missing"
    )


def test_lost_worker(calm: Scene, tmp_path: Path) -> None:
    async def lose(scene: Scene) -> None:
        while scene.dispatch.ledger.counts.accepted < 20 or not scene.dispatch.ledger.running("a"):
            await asyncio.sleep(0.001)
        scene.dispatch._lose("a", "the test takes it away")

    scene = Scene(folder=tmp_path, program=function("talk"), during=lose)
    assert content(scene.roll()) == content(calm.responses)
    assert scene.dispatch.ledger.counts.moved > 0
    scene.check_tokens()


@pytest.mark.slow
def test_killed_controller(calm: Scene, tmp_path: Path) -> None:
    """The journal as it is on disk, in the middle or at the end, is all that the next controller has."""
    first, copies = tmp_path / "first", [tmp_path / f"copy{n}" for n in range(1)]
    moments = [70]

    async def copy(scene: Scene) -> None:
        for moment, to in zip(moments, copies, strict=True):
            while scene.dispatch.ledger.counts.accepted < moment:
                await asyncio.sleep(0.001)
            shutil.copytree(first / "journal", to / "journal")

    one = Scene(folder=first, program=function("talk"), during=copy)
    assert content(one.roll()) == content(calm.responses)
    for folder in [*copies, first]:
        again = Scene(folder=folder, program=function("talk"))
        again.roll()
        assert content(again.responses) == content(calm.responses)
        again.check_tokens(one.made)
        restored = again.rollout.restored_tokens
        assert restored + len(again.made) == calm.rollout.sampled_tokens, "nothing is sampled twice"
        assert folder == first or restored > 0
    assert not again.made, "the journal has everything"
    assert again.runs.started == 0


def test_controller_killed_and_agent_takes_another_course(calm: Scene, tmp_path: Path) -> None:
    """An agent that asks something else after the restart gets a fresh sample; what it does not ask for is not used."""
    one = Scene(folder=tmp_path, program=function("fails", how="raise"), tasks=(0,), options={"reward_tries": 1})
    assert [r.reward for r in one.roll().values()] == [None, None]
    again = Scene(folder=tmp_path, program=function("talk"), tasks=(0,))
    again.roll()
    for id, r in again.responses.items():
        assert r.reward is not None
        assert [s.id for s in r.more] == [f"{id}+2"]
        assert [s.prompt for s in r.segments] == [s.prompt for s in calm.responses[id].segments]
    assert again.rollout.restored_tokens == 0
    assert max(again.times.values()) == 1


def test_agent_that_must_not_be_started_again(tmp_path: Path) -> None:
    one = Scene(folder=tmp_path, program=function("fails", how="raise"), tasks=(1,), limits={"restart": False})
    one.roll()
    assert one.runs.started == 2, "one try each"
    again = Scene(folder=tmp_path, program=function("talk"), tasks=(1,), limits={"restart": False})
    assert [r.reward for r in again.roll().values()] == [None, None]
    assert again.runs.started == 0


def test_reward_of_a_post_and_of_a_grader(tmp_path: Path) -> None:
    posted = Scene(folder=tmp_path / "posted", program=function("posts"), tasks=(0,))
    assert [r.reward for r in posted.roll().values()] == [0.25, 0.25]
    env = Arithmetic(mean_steps=0.1)
    graded = Scene(folder=tmp_path / "graded", program=function("answers"), env=env, graded=True, tasks=(0, 1, 2))
    rewards = {r.id: r.reward for r in graded.roll().values()}
    for id, r in graded.responses.items():
        text = TOKENIZER.decode(r.tokens, skip_special_tokens=True)
        right = text.rpartition("#")[2] == str(env.task(int(id[0])).answer) and "#" in text
        assert rewards[id] == float(right)
    assert len(graded.rollout.grading._times_s) == len(rewards), "every verdict is counted, and nothing else"
    assert len(posted.rollout.grading._times_s) == 0


class TwoScores:
    """An Env whose first try always fails."""

    def __init__(self) -> None:
        self.tries = 0

    def task(self, index: int) -> Task:
        return Task(id=f"{index}", prompt="1+1=")

    def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        self.tries += 1
        if self.tries == 1:
            raise RuntimeError("not yet")
        return Feedback(reward=1.5, scores=(("form", 1.0), ("tone", 0.5)))


def test_grader_of_agents_is_visible(tmp_path: Path) -> None:
    scene = Scene(folder=tmp_path, program=function("answers"), env=TwoScores(), graded=True, tasks=(0,), size=1)
    (response,) = scene.roll().values()
    assert (response.reward, response.scores) == (1.5, (("form", 1.0), ("tone", 0.5)))
    described = scene.rollout.grading.describe()
    assert (described["grader_errors"], described["rewards_retried"]) == (1, 1)
    assert scene.runs.failed == 0, "the agent itself did not fail"


def test_evaluation_does_not_wait_for_places_of_the_training(tmp_path: Path) -> None:
    """Agents of the training may wait for the worker that keeps the evaluated version."""

    async def take_all(scene: Scene) -> None:
        for _ in range(3):
            await scene.runs.evaluation_slots.acquire()

    scene = Scene(folder=tmp_path, program=function("posts"), tasks=(0,), limits={"concurrency": 3}, during=take_all)
    assert [r.reward for r in scene.roll().values()] == [0.25, 0.25]


@pytest.mark.parametrize(
    ("how", "limits", "said"),
    [
        ("raise", {}, "RuntimeError: no such tool"),
        ("nothing", {}, "without a reward"),
        ("sleep", {"time_limit_s": 3.0}, "longer than 3 s of its own time"),
    ],
)
def test_failing_agent_is_visible_and_missing(tmp_path: Path, how: str, limits: dict[str, Any], said: str) -> None:
    scene = Scene(
        folder=tmp_path, program=function("fails", how=how), tasks=(0,), size=1, limits=limits,
        options={"reward_tries": 1},
    )  # fmt: skip
    (response,) = scene.roll().values()
    assert response.reward is None
    assert response.sampled_count > 0
    event = next(e for e in read(tmp_path / "events.jsonl") if e["name"] == "reward_missing")
    assert said in event["error"]
    log = (tmp_path / "agents.log").read_text()
    assert f"about to fail: {how}" in log
    assert said in log
    left = subprocess.run(["pgrep", "-f", "sleep 987"], capture_output=True, text=True).stdout.split()
    assert not left, "what the agent started is killed with it"


def test_agent_that_makes_no_call_has_no_reward(tmp_path: Path) -> None:
    scene = Scene(folder=tmp_path, program=function("calls_nothing"), tasks=(0,), size=1)
    assert [r.reward for r in scene.roll().values()] == [None]
    assert scene.runs.started == 1, "another try would not call it either"
    event = next(e for e in read(tmp_path / "events.jsonl") if e["name"] == "reward_missing")
    assert "OPENAI_BASE_URL" in event["error"]


def test_limits_and_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDFALL_TOKEN", "hush")
    scene = Scene(folder=tmp_path / "a", program=function("fails", how="secrets"), tasks=(0,), size=1)
    assert [r.reward for r in scene.roll().values()] == [1.0]
    program = AgentProgram(function="agent_programs:fails", options={"how": "memory"}, memory_mb=2048)
    small = Scene(folder=tmp_path / "b", program=program, tasks=(0,), size=1, limits={"failed_reward": -1.0},
                  options={"reward_tries": 1})  # fmt: skip
    assert [r.reward for r in small.roll().values()] == [-1.0]
    assert "MemoryError" in (tmp_path / "b" / "agents.log").read_text()
    rambling = Scene(folder=tmp_path / "c", program=function("fails", how="ramble"), tasks=(0,), size=1,
                     options={"max_tokens": 40, "out_of_tokens": 0.125})  # fmt: skip
    (response,) = rambling.roll().values()
    assert response.reward == 0.125, "it is graded on what it has"
    assert response.sampled_count <= 40
    assert len(response.segments) > 1
    assert rambling.runs.started == 1


def test_call_with_ids_that_the_model_does_not_have_is_refused_and_harms_nothing_else(tmp_path: Path) -> None:
    scene = Scene(folder=tmp_path, program=function("wrong_ids"), tasks=(0,))
    assert {r.reward for r in scene.roll().values()} == {1.0}
    assert not any(e["name"] == "work_rejected" for e in read(tmp_path / "events.jsonl"))


@pytest.mark.parametrize("turn_tokens", [0, 3])
def test_parallel_calls_share_the_tokens_of_their_session(tmp_path: Path, turn_tokens: int) -> None:
    options = {"max_tokens": 40, "turn_tokens": turn_tokens}
    scene = Scene(folder=tmp_path, program=function("parallel"), tasks=(0,), options=options)
    for response in scene.roll().values():
        assert response.reward == 1.0
        lengths = [sum(s.sampled) for s in response.segments]
        assert len(lengths) == 3
        assert max(lengths) <= 3 if turn_tokens else max(lengths) > 3
    scene.check_tokens()


def test_stream_that_is_closed_in_the_middle_is_not_trained(tmp_path: Path) -> None:
    """Also after a restart: the journal has the end of the session, so nothing is sampled again."""
    scene = Scene(folder=tmp_path, program=function("stops_reading"), tasks=(0,))
    scene.roll()
    assert {(r.reward, r.sampled_count) for r in scene.responses.values()} == {(0.5, 0)}
    again = Scene(folder=tmp_path, program=function("stops_reading"), tasks=(0,))
    assert content(again.roll()) == content(scene.responses)
    assert (again.runs.started, again.made) == (0, {})
