"""Recipes with agents: what is refused before anything starts, and what it says."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleets.samplers import TOKENIZER
from windfall.controller.gateway import agents
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.rollout.stream import Rollout
from windfall.envs import held_out, prompt_lengths
from windfall.envs.base import HELD_OUT
from windfall.envs.hosting import Numbered, evaluation_data, recipe_host
from windfall.envs.in_process import InProcess
from windfall.errors import WindfallError
from windfall.events.log import EventLog
from windfall.models import tokenizer
from windfall.models.load import TINY
from windfall.models.text import Text
from windfall.recipe.changes import token_settings
from windfall.recipe.env_sections import AgentEnv
from windfall.recipe.file import load_recipe, parse_recipe
from windfall.recipe.sections import Recipe
from windfall.run import recipe_check, resume_check, start
from windfall.run_folder import with_absolute_paths
from windfall.types import Turn


def recipe(**env: Any) -> Recipe:
    return parse_recipe({"env": {"name": "agent", **env}}, "recipe.toml")


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({}, "set either command or function"),
        ({"command": "a", "function": "b:c"}, "set either command or function"),
        ({"command": "a", "reward": "grader"}, "needs a section [env.tasks]"),
        ({"function": "no colon"}, "env.function"),
        ({"command": "a", "memory_mb": 20}, "at least 128"),
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
        ({"command": "x", "concurrency": 10**9}, "agents at once need"),
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
    r = recipe(command="python x.py", context=300, tasks={"name": "dataset", "path": "rows.jsonl"})
    assert prompt_lengths.context_of(r, 512) == 300
    assert prompt_lengths.context_of(recipe(command="x"), 512) == 512
    with pytest.raises(WindfallError, match=r"env\.context: context = 300 tokens, but the model's context is 256"):
        prompt_lengths.context_of(r, 256)
    assert prompt_lengths.agent_prompts(r, 512) == [300 - r.rollout.max_tokens]
    absolute = with_absolute_paths(r).env
    assert isinstance(absolute, AgentEnv)
    assert absolute.tasks is not None
    assert absolute.tasks.path == tmp_path / "rows.jsonl"  # type: ignore[union-attr]
    program = agents.program(absolute, tmp_path / "runs")
    assert program.command == ["python", "x.py"]
    assert (program.directory, program.hidden) == (str(tmp_path), [str(tmp_path / "runs")])
    monkeypatch.chdir("/")
    assert with_absolute_paths(with_absolute_paths(r).model_copy(update={"env": absolute})).env == absolute


REWARDS = """
def brevity(completions, **columns):
    return [1.0 / (1 + len(text)) for text in completions]


def of_tokens(completions, completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]
"""


def rows(path: Path, *prompts: str) -> str:
    path.write_text("".join(json.dumps({"prompt": p, "answer": "1"}) + "\n" for p in prompts))
    return str(path)


def with_dataset(folder: Path, *rewards: str) -> Recipe:
    (folder / "rewards.py").write_text(REWARDS)
    tasks = {"name": "dataset", "path": rows(folder / "train.jsonl", "a", "b"), "rewards": list(rewards)}
    env = {"name": "agent", "command": "python x.py", "reward": "grader", "tasks": tasks}
    return parse_recipe({"env": env, "eval": {"path": rows(folder / "test.jsonl", "c"), "tasks": 9}}, "recipe.toml")


def test_data_set_gives_tasks_and_grades(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    r = with_absolute_paths(with_dataset(tmp_path, "exact", "rewards.py:brevity"))
    assert r.task_env.rewards == ["exact", f"{tmp_path / 'rewards.py'}:brevity"]  # type: ignore[union-attr]

    async def ask() -> tuple[str, str, tuple[tuple[str, float], ...]]:
        async with recipe_host(r) as host:
            await host.ready()
            task, other = await host.task(0, 30.0), await host.task(HELD_OUT, 30.0)
            feedback = await host.feedback(0, task, [Turn(text="1")], 30.0)
            return str(task.prompt), str(other.prompt), feedback.scores

    trained, evaluated, scores = asyncio.run(ask())
    assert (trained in ("a", "b"), evaluated) == (True, "c")
    assert [score for _, score in scores] == [1.0, 0.5]
    described = held_out.describe(r.env, r.eval.tasks, evaluation_data(r))
    assert (described.tasks, described.description) == (1, "1 rows of test.jsonl")
    assert recipe_check.check(r).startswith("agent: python x.py; environment Dataset: built task")


def test_data_set_of_an_agent_is_compared_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    r = with_dataset(tmp_path, "exact")
    folder = start.new_folder(r)
    resume_check.check_data(r, folder)
    rows(tmp_path / "train.jsonl", "a", "b", "d")
    with pytest.raises(WindfallError, match="the data has changed"):
        resume_check.check_data(r, folder)


def test_data_set_of_an_agent_may_move_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    r = with_dataset(tmp_path, "exact")
    folder = start.new_folder(r)
    moved = (tmp_path / "train.jsonl").rename(tmp_path / "moved.jsonl")
    elsewhere = load_recipe(folder / "recipe.toml", [f"env.tasks.path='{moved}'"])
    (found,) = resume_check.check_changes(elsewhere, folder)
    assert (found.key, found.verdict) == ("env.tasks.path", "free")
    assert token_settings(elsewhere) == token_settings(load_recipe(folder / "recipe.toml"))
    rows(moved, "a", "b", "d")
    with pytest.raises(WindfallError, match=r"moved\.jsonl: 62 bytes before"):
        resume_check.check_changes(elsewhere, folder)
    other = load_recipe(folder / "recipe.toml", ["env.tasks.system_prompt='Be brief.'"])
    with pytest.raises(WindfallError, match=r"env\.tasks\.system_prompt"):
        resume_check.check_changes(other, folder)
    assert token_settings(other) != token_settings(elsewhere)


def test_grader_that_asks_for_tokens_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WindfallError, match="completion_ids") as e:
        recipe_check.check(with_dataset(tmp_path, "rewards.py:of_tokens"))
    assert e.value.where == "env.tasks.rewards"


def test_errors_name_the_agent() -> None:
    assert recipe_host(recipe(command="x")).name == "agent"


def test_chat_section_holds_for_agents() -> None:
    given, stop = tokenizer.load(TINY), frozenset[int]()
    messages = [{"role": "user", "content": "1+"}, {"role": "user", "content": "2="}]

    def shown(**section: Any) -> str:
        r = parse_recipe({"env": {"name": "agent", "command": "x"}, "chat": section}, "recipe.toml")
        return given.decode(list(agents.chat(r, given, stop).prompt(messages)), skip_special_tokens=True)

    assert shown() == "1+2="  # the tiny model has no template
    template = "{% for m in messages %}{{ m.content }}{{ mark }}{% endfor %}"
    assert shown(template=template, arguments={"mark": "3"}) == "1+32=3"
    assert shown(template=template, enabled=False) == "1+2="


def test_stop_strings_are_those_of_the_agent() -> None:
    with pytest.raises(WindfallError, match=r"rollout\.stop"):
        parse_recipe({"env": {"name": "agent", "command": "x"}, "rollout": {"stop": ["."]}}, "recipe.toml")


EVALUATED = """
[run]
threads = 1
[env]
name = "agent"
function = "agent_programs:sums"
[chat]
template = "{% for m in messages %}{{ m.content }}{% endfor %}"
[rollout]
max_tokens = 32
[eval]
pass_at = [1, 2]
"""


def test_evaluation_without_a_run(windfall: Callable[..., tuple[int, str, str]]) -> None:
    Path("agent.toml").write_text(EVALUATED)
    with socket.socket() as taken:  # by the gateway of a run, which eval must not need
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = f"env.port={taken.getsockname()[1]}"
        command = ("eval", "tiny", "--recipe", "agent.toml", "--tasks", "3", "--show", "1", "--set", port)
        code, out, errors = windfall(*command)
    assert (code, errors) == (0, "")
    assert "reward 0." in out
    assert "on 3 held-out tasks of agent" in out
    assert "pass@1" in out
    assert "pass@2" in out
    assert "rewards missing 0" in out
    assert "=" in out.splitlines()[1], "the agent's prompts are shown with what the policy said"
    assert windfall(*command)[1] == out, "the seeds are those of the recipe"


def test_gateway_is_opened_once_and_closed_with_the_service(tmp_path: Path) -> None:
    async def main() -> None:
        given = recipe(command="true", isolation="off")
        events, text = EventLog(tmp_path / "events.jsonl"), Text(TOKENIZER)
        host = InProcess(Numbered())
        rollout = Rollout(Dispatch(events=events), host, {"": text}, given, seed=1, events=events)
        rollout.contexts[""] = 512
        async with agents.AgentService(given, tmp_path, events, host) as service:
            await service.open(rollout, {"": TOKENIZER})
            assert service.runs is not None
            port = int(service.runs.url.split(":")[2].partition("/")[0])
            with pytest.raises(AssertionError, match="would leave the first one listening"):
                await service.open(rollout, {"": TOKENIZER})
            socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))

    asyncio.run(main())


def test_evaluation_of_a_failing_agent(windfall: Callable[..., tuple[int, str, str]]) -> None:
    Path("agent.toml").write_text(EVALUATED)
    program = ("--set", "env.function=agent_programs:fails", "--set", 'env.options={ how = "raise" }')
    code, _, errors = windfall("eval", "tiny", "--recipe", "agent.toml", "--tasks", "1", *program)
    assert code == 2
    assert "no response of 1 held-out tasks got a reward" in errors
    assert "no such tool" in errors
