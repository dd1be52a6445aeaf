"""Whole runs with agents, as a user starts them: processes are killed, and a policy learns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from windfall.controller.ledger.journal_format import read_records
from windfall.events.log import read
from windfall.models import load

GATEWAY_TESTS = Path(__file__).parents[1] / "programs"
RECIPE = """
[run]
name = "agents"
steps = 3
deterministic = true
threads = 1
[env]
name = "agent"
function = "agent_programs:talk"
options = { folder = "notes", pause_s = 0.15 }
[rollout]
groups = 2
group_size = 3
max_tokens = 80
[train]
lr = 1e-3
[eval]
tasks = 2
[fleet]
local = false
workers = 2
"""


TOOL_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}> {% endif %}"
)
ASYNCHRONOUS = (
    RECIPE.replace("deterministic = true\n", "")
    .replace("steps = 3", "steps = 5")
    .replace("[rollout]", "[rollout]\nstaleness = 2")
)


def calls_a_tool(folder: Path) -> Path:
    """Write a model whose every turn is `[f(a=N)]` with a random digit N: the next token follows from the last one."""
    model, tokenizer = load.load("tiny", dtype="float32", device="cpu"), load.load_tokenizer("tiny")
    model.config.tie_word_embeddings = False
    next_token = torch.zeros(model.config.vocab_size, model.config.hidden_size)
    digits = tokenizer.encode("123456789", add_special_tokens=False)
    first, *rest = tokenizer.encode(" [f(a=", add_special_tokens=False)
    close, bracket = tokenizer.encode(")]", add_special_tokens=False)
    for last, new in zip((first, *rest[:-1]), rest, strict=True):
        next_token[new, last] = 2.0
    next_token[digits, rest[-1]] = next_token[close, digits] = 2.0
    next_token[bracket, close] = next_token[tokenizer.eos_token_id, bracket] = 2.0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(float("norm" in name))  # layers add nothing
        embeddings = model.get_input_embeddings().weight
        embeddings.copy_(torch.eye(*embeddings.shape))
        model.lm_head.weight = torch.nn.Parameter(next_token)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


WORKERS_COME_AND_GO = (
    "--set", "fleet.workers=1", "--set", "trace.nodes=2", "--set", "trace.mean_up_s=3", "--set", "trace.mean_down_s=2",
)  # fmt: skip


def train(folder: Path, recipe: str, *, kill: bool = False, more: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Run a recipe to its end, and return its events. `kill`: kill an agent and the controller in mid-session,
    twice."""
    (folder / "notes").mkdir(parents=True)
    (folder / "recipe.toml").write_text(recipe)
    path = os.pathsep.join([str(GATEWAY_TESTS), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "windfall.run.cli", "train", "recipe.toml", *more]
    with (folder / "out").open("w") as out, subprocess.Popen(
        command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT
    ) as process:  # fmt: skip
        try:
            if kill:
                kill_in_mid_session(folder)
            assert process.wait(600) == 0, (folder / "out").read_text()
        finally:
            process.kill()
    return [dict(e) for e in read(folder / "runs" / "agents" / "events.jsonl")]


def kill_in_mid_session(folder: Path) -> None:
    run, notes = folder / "runs" / "agents", folder / "notes"
    for _ in range(2):
        begun = len(turns(notes)) if notes.is_dir() else 0
        wait_for(lambda: len(turns(notes)) >= begun + 8)  # noqa: B023
        agents = sorted({int(line.split()[0]) for line in turns(notes)})
        pid = json.loads((run / "address.json").read_text())["pid"]
        for agent in agents[-1:]:
            try_kill(agent)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not any(Path(f"/proc/{agent}").exists() for agent in agents))  # noqa: B023


def try_kill(pid: int) -> None:
    if Path(f"/proc/{pid}").exists():
        os.kill(pid, signal.SIGKILL)


def turns(notes: Path) -> list[str]:
    return [line for file in notes.iterdir() for line in file.read_text().splitlines()]


def wait_for(holds: Any) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["talk", "uses_tools"])
def test_killed_controllers_workers_and_agents_change_nothing(tmp_path: Path, agent: str) -> None:
    """Also if turns are tool calls: they are parsed again from the journal's tokens, with the same ids."""
    recipe = RECIPE.replace(":talk", f":{agent}")
    if agent == "uses_tools":
        recipe += (
            f'[model]\npath = "{calls_a_tool(tmp_path / "model")}"\n[chat]\ntemplate = {json.dumps(TOOL_TEMPLATE)}\n'
        )
    calm = train(tmp_path / "calm", recipe)
    killed = train(tmp_path / "killed", recipe, kill=True, more=WORKERS_COME_AND_GO)
    for events in (calm, killed):
        steps = [e for e in events if e["kind"] == "scalar" and e["name"] == "step"]
        assert [e["step"] for e in steps] == [1, 2, 3]
        assert not any(e["missing"] for e in steps)
    assert sum(e["name"] == "resumed" for e in killed) >= 2
    assert any(e["name"] == "worker_lost" for e in killed)
    kept = ("reward", "lengths", "grad_norm", "trained", "mean_length", "entropy")
    figures = [
        [[e[k] for k in kept] for e in events if e["kind"] == "scalar" and e["name"] == "step"]
        for events in (calm, killed)
    ]
    assert figures[0] == figures[1], "the same tokens were trained, each once"
    assert sum(e.get("restored", 0) for e in killed if e["kind"] == "scalar") > 0
    assert list((tmp_path / "killed" / "runs" / "agents" / "journal").iterdir())
    for file in (tmp_path / "killed" / "runs" / "agents" / "journal").iterdir():
        assert list(read_records(file))


@pytest.mark.slow
def test_asynchronous_run_with_kills(tmp_path: Path) -> None:
    """Controller, agents and workers are killed while responses of several versions are in progress."""
    events = train(tmp_path, ASYNCHRONOUS, kill=True, more=WORKERS_COME_AND_GO)
    steps = [e for e in events if e["kind"] == "scalar" and e["name"] == "step"]
    assert [e["step"] for e in steps] == [1, 2, 3, 4, 5]
    assert sum(e["name"] == "resumed" for e in events) >= 2
    trained = [task for e in steps for task in e["tasks"] if task not in e["replaced"]]
    assert len(trained) == len(set(trained)), "a task was trained on twice"
    assert not any(e["missing"] for e in steps)
    assert max(e["staleness_max"] for e in steps) <= 2
    assert all(sum(e["staleness_counts"]) == e["responses"] for e in steps)
    assert max(e["engine_gap_max"] for e in steps) < 1e-3, "a token has the log-prob of another version"


LEARNING = """
[run]
name = "agents"
steps = 20
threads = 1
[env]
name = "agent"
function = "agent_programs:sums"
concurrency = 16
[chat]
template = "{% for m in messages %}{{ m.content }}{% endfor %}"
[rollout]
groups = 8
group_size = 8
max_tokens = 32
[train]
lr = 1e-3
schedule = "linear"
[eval]
tasks = 64
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_agent_with_several_turns_learns(tmp_path: Path, seed: int) -> None:
    events = train(tmp_path, LEARNING, more=("--set", f"run.seed={seed}"))
    before, after = (e["reward"] for e in events if e["kind"] == "scalar" and e["name"] == "eval")
    assert after > before + 0.15, (before, after)
