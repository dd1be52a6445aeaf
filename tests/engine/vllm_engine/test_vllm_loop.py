"""Whole runs whose workers use vLLM: controller, trainer and workers in their own processes, with small models."""

from __future__ import annotations

import importlib.resources
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import vllm_case
from windfall.events.log import read

STEPS = 2
CLI = [sys.executable, "-c", "from windfall.run.cli import main; main()"]
RECIPE = """
[run]
name = "loop"
folder = "{folder}"
steps = {steps}
threads = 1
[model]
path = "{model}"
[env]
name = "arithmetic"
[rollout]
groups = 4
group_size = 4
max_tokens = 48
[train]
lr = 1e-4
[eval]
tasks = 0
[engine]
name = "{engine}"
[fleet]
local = false
workers = 1
"""


def model_folder(name: str, folder: Path) -> Path:
    """A random model of this shape with the tokenizer of the tiny model."""
    tiny = Path(str(importlib.resources.files("windfall.models").joinpath("base_models/tiny")))
    torch.manual_seed(3)
    model = vllm_case.MODELS[name]()
    model.resize_token_embeddings(99)
    out = folder / name
    model.save_pretrained(out)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(tiny / file, out)
    return out


def train(folder: Path, **values: Any) -> subprocess.Popen[str]:
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(**{"folder": folder, "steps": STEPS, "engine": "vllm", **values}))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*CLI, "train", str(recipe)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    return [e for e in read(folder / "loop" / "events.jsonl") if e["name"] == name]


@pytest.mark.timeout(280)
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gemma3", "phi3"])
def test_whole_run_on_a_vllm_worker(tmp_path: Path, name: str) -> None:
    run = train(tmp_path, model=model_folder(name, tmp_path))
    said, _ = run.communicate(timeout=270)
    logs = "\n".join(p.read_text()[-3000:] for p in (tmp_path / "loop").rglob("*.log")) if run.returncode else ""
    assert run.returncode == 0, f"{said}\n{logs}"
    (ready,) = [e for e in events(tmp_path, "worker_ready") if e["version"] == 0]
    assert ready["engine"].startswith("vllm ")
    assert ready["exact"]
    steps = events(tmp_path, "step")
    assert len(steps) == STEPS
    for e in steps:
        assert e["engine_gaps"].keys() == {"vllm"}
        assert e["engine_gap"] < 1e-4
        assert e["lost_tokens"] == 0
