"""Whole runs whose workers use vLLM: controller, trainer and workers in their own processes, with small models."""

from __future__ import annotations

import asyncio
import importlib.resources
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engines import vllm_case
from tests.support.runs.tinker_run import TinkerRun
from windfall.algorithms.given import Loss
from windfall.client import Client
from windfall.errors import WindfallError
from windfall.events.log import read
from windfall.training import Adam, given

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


SERVER = """
[run]
name = "tinker"
folder = "{folder}"
threads = 1
device = "cpu"
[rollout]
max_tokens = 64
[engine]
name = "vllm"
"""


@pytest.mark.timeout(280)
def test_clients_of_a_server_sample_from_their_adapters(tmp_path: Path) -> None:
    async def loop(url: str, key: str) -> None:
        async with Client(url, key) as client:
            with pytest.raises(WindfallError, match="vLLM, which holds no adapters of the head"):
                await client.create(rank=4, unembed=True)
            policy, loss = await client.create(rank=4), Loss(name="cross_entropy")
            for step in range(2):
                found = await policy.sample([5, 9, 11, 4], 4, id=f"{step}/sample", max_tokens=12)
                samples = [
                    given([*r.prompt, *r.tokens], range(4, 4 + len(r.tokens)), [1.0] * len(r.tokens)) for r in found
                ]
                scored = await policy.forward(samples, loss, id=f"{step}/forward")
                for r, sample in zip(found, scored, strict=True):
                    np.testing.assert_allclose(r.logprobs, np.asarray(sample.old), atol=1e-3)
                await policy.forward_backward(samples, loss, id=f"{step}/gradient")
                await policy.optim_step(adam=Adam(lr=0.05), id=f"{step}/step")
                await policy.publish(id=f"{step}/publish")

    options = ("--model", str(model_folder("llama", tmp_path)), "--rank", "4", "--models", "1", "--samplers", "2")
    with TinkerRun(tmp_path, *options, recipe=SERVER) as run:
        asyncio.run(asyncio.wait_for(loop(run.url, run.key), 240))
        (ready, *_) = [e for e in read(tmp_path / "tinker" / "events.jsonl") if e["name"] == "worker_ready"]
        assert ready["engine"].startswith("vllm ")
        assert run.stop() == 0
