"""Whole runs in which not every role is trained: self-play, an older self as the opponent and a frozen reference, asked
by an environment, by an agent with the OpenAI client and by an agent with a session."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.programs import ask_roles
from tests.support.runs.policy_runs import WORKERS_COME_AND_GO, checkpoint_files, events, finish, steps
from windfall import run_folder as folders
from windfall.engine.torch.engine import TorchEngine
from windfall.models import load
from windfall.types import Request, Sampling

ROLES = ["player:white", "player:black", "old", "reference"]
RECIPE = """
[policies.player]
lora = { rank = 4 }
[policies.old]
copy_of = "player"
every = 2
rollout = { top_k = 1 }
[policies.reference]
frozen = true
rollout = { top_k = 1 }
[rollout]
groups = 3
group_size = 4
max_tokens = 48
[checkpoint]
every = 1
keep = 9
"""
ENVIRONMENT = """
[env]
name = "custom"
factory = "tests.programs.ask_roles:AskRoles"
"""
AGENT = """
[env]
name = "agent"
function = "tests.programs.ask_roles:FUNCTION"
isolation = "off"
"""


def run_with(
    folder: Path, env: str, *changes: str, kills: Sequence[tuple[int, str]] = ()
) -> tuple[Path, list[dict[str, str]]]:
    """A finished run, and what all roles said in it."""
    notes = folder.with_name(f"{folder.name}.jsonl")
    given = f"options = {{ roles = {json.dumps(ROLES)}, notes = {json.dumps(str(notes))} }}\n"
    run = finish(folder, RECIPE + env + given, "run.steps=4", "eval.tasks=3", "train.lr=0.05", *changes, kills=kills)
    return run, [json.loads(line) for line in notes.read_text().splitlines()]


def greedy(model: str, prompts: set[str], limit: int) -> dict[str, str]:
    """What a model answers to each prompt at temperature 0."""
    tokenizer = load.load_tokenizer(model)
    engine = TorchEngine(load.load(model, dtype="float32", device="cpu"), kv_tokens=4096, max_running=64)
    stop = frozenset([tokenizer.eos_token_id])
    tokens: dict[str, list[int]] = {prompt: [] for prompt in prompts}
    for prompt in prompts:
        ids = tuple(tokenizer.encode(prompt, add_special_tokens=False))
        engine.add(
            Request(id=prompt, prompt=ids, seed=0, max_tokens=limit, sampling=Sampling(temperature=0.0), stop=stop)
        )
    while len(engine):
        for chunk in engine.step():
            tokens[chunk.id] += chunk.tokens
    return {prompt: tokenizer.decode(ids, skip_special_tokens=True) for prompt, ids in tokens.items()}


def who_said(line: dict[str, str], answers: dict[int, dict[str, str]]) -> int | None:
    """The first version that gives this answer, which may have been cut short."""
    text = line["text"]
    return next((n for n, found in answers.items() if text and found[line["prompt"]].startswith(text)), None)


def check(run: Path, said: list[dict[str, str]], limit: int) -> None:
    assert steps(run) == [("player", n) for n in (1, 2, 3, 4)]
    assert {line["role"] for line in said} == set(ROLES)
    # The reference says what the base says, always. The older self is renewed after steps 2 and 4: it says so in the
    # evaluation and the 12 responses of steps 1 and 2, of steps 3 and 4, and in the last evaluation.
    prompts = {line["prompt"] for line in said}
    checkpoints = {n: folders.policy_folder(run, "old") / "checkpoints" / f"step-{n:06d}" for n in (2, 4)}
    models = {0: "tiny", **checkpoints}
    answers = {n: greedy(str(model), prompts, limit) for n, model in models.items()}
    versions = {role: [who_said(line, answers) for line in said if line["role"] == role] for role in ROLES[2:]}
    assert versions == {"reference": [0] * 54, "old": [0] * 27 + [2] * 24 + [4] * 3}
    for n, folder in checkpoints.items():
        own, original = (
            load_file(folders.policy_folder(run, name) / "checkpoints" / folder.name / "adapter_model.safetensors")
            for name in ("old", "player")
        )
        assert all((t == original[name]).all() for name, t in own.items()), n
    # Each color has a reward of its own.
    scores = [e for e in events(run, "eval") if e["kind"] == "scalar"]
    assert [(e["policy"], e["step"], e["graded"], e["responses"]) for e in scores] == [
        ("player", n, 6, 6) for n in (0, 4)
    ]
    assert all(set(e["roles"]) == {"player:white", "player:black"} for e in scores)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_self_play_against_an_older_self_and_a_reference(tmp_path: Path) -> None:
    check(*run_with(tmp_path / "a", ENVIRONMENT), limit=48)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("function", ["with_openai", "with_session"])
def test_agents_ask_for_roles(tmp_path: Path, function: str) -> None:
    check(*run_with(tmp_path / "a", AGENT.replace("FUNCTION", function)), limit=ask_roles.LIMIT)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_do_not_change_the_opponents(tmp_path: Path) -> None:
    (plain, _), (killed, _) = (
        run_with(tmp_path / "a", ENVIRONMENT, "checkpoint.every=3"),
        run_with(tmp_path / "b", ENVIRONMENT, "checkpoint.every=3", *WORKERS_COME_AND_GO,
                 kills=[(2, "player"), (4, "controller")]),
    )  # fmt: skip
    for name in ("player", "old"):
        assert checkpoint_files(plain, name, 4) == checkpoint_files(killed, name, 4)
