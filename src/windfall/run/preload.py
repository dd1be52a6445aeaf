"""What the fork server does before it forks: as much of the start of a worker and a trainer as needs no device.

A list of modules to import is not enough. Libraries import much of what they need on first use, and what they need
depends on the model: transformers has one file per architecture. So the fork server builds the run's model on the
`meta` device, where tensors have shapes but no values, so the size of the model costs neither memory nor time.

Rules, because a fork follows:
- Nothing is computed, differentiated or encoded here: oneDNN, autograd and tokenizers start threads, and a forked
  process that uses them would wait forever for threads that it does not have.
- The model is not called: on the meta device of a torch with CUDA, that may create a CUDA context, which a forked
  process cannot use.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import traceback
from pathlib import Path

import torch

from windfall import algorithms
from windfall import run_folder as folders
from windfall.engine import factory
from windfall.models import load
from windfall.recipe.file import load_recipe
from windfall.trainer import checkpoint

LAZY_MODULES = (
    "windfall.engine.torch.engine",
    "windfall.engine.torch.runner",
    "windfall.worker.process",
    "windfall.trainer.process",
    "windfall.trainer.trainer",
    "windfall.weights.publishing.row_writer",
    "windfall.weights.publishing.publish",
    "windfall.weights.serve",
)
"""Modules that windfall imports inside functions."""
GPU_MODULES = ("windfall.engine.cuda.engine", "windfall.engine.cuda.kernels", "windfall.trainer.kernels")


def preload_run(folder: str) -> None:
    """Import and build what the run in this folder needs. A failure here only makes processes start more slowly: they
    report what is wrong with a model or a recipe themselves, and more clearly."""
    import_modules()
    try:
        recipe = load_recipe(Path(folder) / "recipe.toml")
        for name in recipe.names():
            view = recipe.of(name)
            algorithms.make(view.algorithm.name, **view.algorithm.options)
        for base in recipe.bases():
            found = checkpoint.list_checkpoints(folders.policy_folder(Path(folder), base) / "checkpoints")
            where = found[-1] if found else Path(load.resolve(recipe.of(base).model.path))
            if (where / "config.json").is_file():  # otherwise it is downloaded or converted first
                build_empty(where)
    except Exception:  # fault boundary: see above
        traceback.print_exc()


def preload_runs(folder: str) -> None:
    """The same for all runs in this folder, which may be empty."""
    import_modules()
    for recipe in Path(folder).glob("*/recipe.toml"):
        preload_run(str(recipe.parent))


def import_modules() -> None:
    on_gpu = torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
    for name in (*LAZY_MODULES, *(GPU_MODULES if on_gpu else ())):
        importlib.import_module(name)


def build_empty(where: Path) -> None:
    """Build the model in this folder without its weights, and load its tokenizer."""
    factory.build_full_model(json.loads((where / "config.json").read_text()), "float32", "meta")
    load.load_tokenizer(str(where))
