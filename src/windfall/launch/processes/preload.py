"""What the nursery does before it forks: the start of a worker and of a trainer, as far as it goes without a device.

A list of modules to import is not enough. Libraries import much of what they need on first use, and what that is
depends on the model: transformers has a file per architecture. So the nursery builds the run's model, on the `meta`
device, where tensors have shapes but no numbers: the size of the model costs neither memory nor time.

Rules, because a fork follows:
- nothing is computed, differentiated or encoded here: oneDNN, autograd and tokenizers start threads, and a forked
  process that uses them then waits for ever for threads it does not have;
- the model is not called: on the meta device of a torch with CUDA that may make a CUDA context, which a forked process
  cannot use.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import traceback
from pathlib import Path

import torch

from windfall import algorithms, config
from windfall.models import load
from windfall.train import checkpoint
from windfall.worker import engine_factory

USED_LATER = ("windfall.engine.torch.engine", "windfall.engine.torch.runner", "windfall.launch.processes.worker",
              "windfall.launch.processes.trainer", "windfall.train.trainer", "windfall.weights.device_delta",
              "windfall.weights.publish", "windfall.weights.serve")  # fmt: skip
"""Modules that windfall itself imports in functions."""
USED_ON_A_GPU = ("windfall.engine.cuda.engine", "windfall.engine.cuda.kernels", "windfall.train.kernels")


def rehearse(folder: str) -> None:
    """For the run in this folder. Without it processes start more slowly, and do not fail: what is wrong with a model
    or a recipe, they say better."""
    on_a_gpu = torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
    for name in (*USED_LATER, *(USED_ON_A_GPU if on_a_gpu else ())):
        importlib.import_module(name)
    try:
        recipe = config.load(Path(folder) / "recipe.toml")
        algorithms.make(recipe.algorithm.name, **recipe.algorithm.options)
        found = checkpoint.all_in(Path(folder) / "checkpoints")
        where = found[-1] if found else Path(load.resolve(recipe.model.path))
        if (where / "config.json").is_file():  # else it will be downloaded or converted first
            build_empty(where)
    except Exception:  # fault boundary: see above
        traceback.print_exc()


def build_empty(where: Path) -> None:
    """Build the model in this folder without its weights, and load its tokenizer."""
    engine_factory.build_full_model(json.loads((where / "config.json").read_text()), "float32", "meta")
    load.load_tokenizer(str(where))
