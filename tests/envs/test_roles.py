"""Environments with several roles: in this process, in child processes and on servers, with and without sessions. A
task names who begins, feedback names who speaks next, and every role has its own reward."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.envs.remote.test_env_servers import TOKEN, listening
from tests.programs.debate import ORDER, Debate, DebateSessions
from windfall.envs.base import EnvHost
from windfall.envs.failures import EnvFailed, feedback_fault, task_fault
from windfall.envs.grade import grade, trial
from windfall.envs.in_process import InProcess
from windfall.envs.process_pool.pool import EnvPool
from windfall.envs.remote.client import EnvServers
from windfall.envs.remote.server import EnvService
from windfall.envs.remote.settings import settings_of
from windfall.envs.sessions import Stateful
from windfall.recipe.env_sections import CustomEnv
from windfall.types import Feedback, Task, Turn


@contextlib.asynccontextmanager
async def hosted(place: str, factory: type, folder: Path) -> AsyncIterator[EnvHost]:
    keys: dict[str, Any] = {"name": "custom", "factory": f"tests.programs.debate:{factory.__name__}"}
    if place == "process":
        yield InProcess(Stateful(factory()) if factory is DebateSessions else factory())
        return
    async with EnvPool(CustomEnv(**keys), 0, max_calls=4) as pool:
        await pool.ready()
        if place == "pool":
            yield pool
            return
        (folder / "token").write_text(TOKEN)
        service = EnvService(pool, settings_of(CustomEnv(**keys), 0, None), TOKEN, timeout_s=30.0)
        async with listening(service.attend) as port:
            remote = CustomEnv(**keys, servers=[f"127.0.0.1:{port}"], servers_token=folder / "token")
            async with EnvServers(remote, 0) as servers:
                await servers.ready()
                yield servers


@pytest.mark.parametrize("factory", [Debate, DebateSessions])
@pytest.mark.parametrize("place", ["process", "pool", "server"])
def test_roles_and_rewards_arrive(place: str, factory: type, tmp_path: Path) -> None:
    async def main() -> None:
        async with hosted(place, factory, tmp_path) as host:
            task, turns = await host.task(7, 10.0), list[Turn]()
            assert (task.id, task.role) == ("debate/7", ORDER[0])
            feedback, role = Feedback(), task.role
            for text in ("a", "bb", "ccc", "dddd"):
                assert role == ORDER[len(turns)]
                graded = await grade(host, 7, task, [*turns, Turn(text=text, role=role)], timeout_s=10.0)
                assert graded.feedback is not None, graded.failure
                feedback = graded.feedback
                turns.append(Turn(text=text, observation=feedback.observation, role=role))
                role = feedback.role or role
            assert feedback == Feedback(rewards={"policy:pro": 1.0, "policy:con": 2.0}, reward=-1.0)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_trial_speaks_in_the_role_that_begins() -> None:
    _, what = asyncio.run(trial(InProcess(Debate()), 5.0))
    assert "an observation of" in what


def test_replay_that_asks_another_role_is_refused() -> None:
    """A session that was lost is replayed. Who speaks must be the same."""
    turns = [Turn(text="a", observation="1 said a", role=ORDER[0]), Turn(text="b", role="policy:judge")]
    with pytest.raises(EnvFailed, match="role 'policy:con' instead of 'policy:judge'"):
        asyncio.run(Stateful(DebateSessions()).feedback(Debate().task(0), turns))


@pytest.mark.parametrize(
    ("feedback", "why"),
    [
        (Feedback(rewards={"solver": float("nan")}), "the reward of 'solver' is nan"),
        (Feedback(rewards={"solver": "1"}), "the reward of 'solver' is a str"),  # type: ignore[dict-item]
        (Feedback(rewards=[("solver", 1.0)]), "its rewards are a list"),  # type: ignore[arg-type]
        (Feedback(rewards={3: 1.0}), "a role of its rewards is a int"),  # type: ignore[dict-item]
        (Feedback(observation="x", role=None), "its role is a NoneType"),  # type: ignore[arg-type]
        (Feedback(observation="x", role="r" * 300), "its role has more than"),
        (Feedback(role="solver"), "neither a reward nor an observation"),
    ],
)
def test_wrong_roles_and_rewards_are_named(feedback: Feedback, why: str) -> None:
    assert why in feedback_fault(feedback)


def test_roles_of_valid_values() -> None:
    assert not feedback_fault(Feedback(rewards={"solver": 1}))
    assert "its role is a int" in task_fault(Task(id="1", prompt="x", role=3))  # type: ignore[arg-type]
