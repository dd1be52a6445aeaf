"""Imported by multiprocessing's fork server before it forks: what the processes of tests need, once for all of them.

A process that imports pytest, aiohttp and windfall itself needs more CPU time for that than most tests need.
"""

from __future__ import annotations

import gc
import importlib

MODULES = (
    "aiohttp.web", "pytest", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torch.profiler", *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3", "qwen3_moe")),
    "tests.support.ranks.rank_processes", "tests.support.weights.weight_writers", "windfall.algorithms",
    "windfall.models.load",
    "windfall.processes.fork_server", "tests.support.import_server", "windfall.trainer.process",
    "windfall.weights.publishing.publish", "windfall.weights.pulling.pull", "windfall.weights.serve",
)  # fmt: skip

for name in MODULES:
    importlib.import_module(name)
gc.collect()
gc.freeze()  # no forked process looks for garbage among the imported libraries
