"""The agents with tools, and the solver and verifier on a data set: what they ask, and what is rewarded."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples import tool_agents
from examples.math_solver_verifier import SolverVerifier, verdict
from windfall.envs.base import HELD_OUT
from windfall.types import Turn

CONTEXT = {"title": ["Paris", "Bonn"], "sentences": [["The capital of France.", " It is large."], ["A small city."]]}


@pytest.fixture
def questions(tmp_path: Path) -> tool_agents.Questions:
    import pyarrow
    from pyarrow import parquet

    for split in ("train", "validation"):
        rows = [
            {"id": f"{split}{n}", "question": "Which capital?", "answer": "Paris", "context": CONTEXT} for n in range(5)
        ]
        parquet.write_table(
            pyarrow.Table.from_pylist(rows), tmp_path / f"{split}-00000-of-00001.parquet", row_group_size=2
        )
    return tool_agents.Questions(path=str(tmp_path))


def test_every_question_is_asked_and_evaluation_has_its_own(questions: tool_agents.Questions) -> None:
    assert {questions.task(n).id.split("/")[0] for n in range(5)} == {f"train{n}" for n in range(5)}
    held_out = questions.task(HELD_OUT + 6)
    assert held_out.id.startswith("validation1/")
    for text, reward in (("I searched.\nThe Paris.", 1.0), ("Paris\nor Bonn", 0.0), ("", 0.0)):
        assert questions.feedback(held_out, [Turn(text=text)]).reward == reward


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file train-"):
        tool_agents.Questions(path=str(tmp_path))


class Policy:
    """Calls the tool once, then answers with what the tool said."""

    def __init__(self, arguments: str) -> None:
        self.arguments = arguments
        self.chat = SimpleNamespace(completions=self)

    def create(self, *, messages: list[Any], tools: list[Any], **_: Any) -> Any:
        name = tools[0]["function"]["name"]
        call = SimpleNamespace(id="1", function=SimpleNamespace(name=name, arguments=self.arguments))
        said = messages[-1]["content"] if messages[-1]["role"] == "tool" else None
        reply = SimpleNamespace(
            content=said, tool_calls=None if said else [call], model_dump=lambda **_: {"role": "assistant"}
        )
        return SimpleNamespace(choices=[SimpleNamespace(message=reply)])


def test_agents_use_their_tools(monkeypatch: pytest.MonkeyPatch, questions: tool_agents.Questions) -> None:
    monkeypatch.setenv("OPENAI_MODEL", "m")
    policy = Policy('{"expression": "(17 + 5) * 3,000"}')
    monkeypatch.setattr(tool_agents, "OpenAI", lambda **_: policy)
    assert tool_agents.calculating({"prompt": "How many?"}) == "66000"
    for arguments, answer in (('{"expression": "9**9"}', "error: only numbers"), ("{", "error: "), ("[]", "error: ")):
        policy.arguments = arguments
        assert tool_agents.calculating({"prompt": "How many?"}).startswith(answer)
    policy.arguments = json.dumps({"query": "the capital of France"})
    assert tool_agents.searching({"prompt": questions.task(0).prompt}).startswith("Paris: The capital of France. It is")


def test_verifier_is_rewarded_for_a_true_verdict(tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_text('{"prompt": "3+4?", "answer": "7"}\n')
    env = SolverVerifier(path=str(tmp_path / "sums.jsonl"), rewards=["exact"])
    task = env.task(0)
    assert task.role == "solver"
    asked = asyncio.run(env.feedback(task, [Turn(text="8", role="solver")]))
    assert (asked.role, asked.rewards) == ("verifier", {"solver": 0.0})
    assert "Question: 3+4?\n\nSolution: 8" in str(asked.observation)
    turns = [
        Turn(text="8", observation=asked.observation, role="solver"),
        Turn(text="It is **Wrong**.", role="verifier"),
    ]
    assert asyncio.run(env.feedback(task, turns)).rewards == {"solver": 0.0, "verifier": 1.0}
    assert [verdict(text) for text in ("right or wrong: right", "no idea")] == [True, None]
