"""Whole steps of a run with a large model with experts: adapters are trained with routing replay, and a worker process
with vLLM generates. The weights are random.

    python benchmarks/fleet/experts_step.py                                 Qwen3-30B-A3B on one GPU
    python benchmarks/fleet/experts_step.py --layers 12                     12 of its 48 layers
    python benchmarks/fleet/experts_step.py --shape tiny --device cpu       a tiny model, to test this program
    python benchmarks/fleet/experts_step.py --shape tiny --device cpu --engine windfall

All 48 layers need 62 GB of disk, 141 GB of GPU memory for two copies of the weights (trainer and vLLM), and 140 GB of
host memory for two more: what the trainer publishes, and what the worker has pulled. Prints a row for each step:
seconds, tokens, the gap with replay and without, memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.train.experts import SHAPES, make_model
from windfall.events import log as events
from windfall.models import load
from windfall.recipe.file import load_recipe
from windfall.run.start import new_folder, train

RECIPE = """
[run]
name = "experts"
[env]
name = "custom"
factory = "benchmarks.kills.paced:Digits"
[rollout]
staleness = 0
[train]
lr = 1e-5
micro_tokens = 8192  # the worker needs memory of the same GPU
checkpoint_activations = true
[train.lora]
rank = 16
[eval]
tasks = 0
[fleet]
local = false
workers = 1
worker_memory = 0.1  # share of the memory beside the weights that is for the worker's KV cache
"""


def write_model(folder: Path, args: Any) -> None:
    """With the tokenizer of the model that ships with windfall, which has fewer tokens."""
    fields = {"num_hidden_layers": args.layers} if args.layers else {}
    if args.shape == "tiny":  # vLLM's attention on a CPU needs heads of 32 numbers
        fields |= {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 64}
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    make_model(args.shape, args.device, dtype, **tokens, **fields).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(load.TINY / name, folder)


def row(step: dict[str, Any]) -> str:
    return (
        f"{step['step']:>4}{step['s']:>9.1f}{step['train_s']:>9.1f}{step['trained']:>10,}{step['tok_per_s']:>9,.0f}"
        f"{step['engine_gap']:>10.2g}{step['router_gap']:>10.2g}{step['replayed_experts']:>10.0%}"
        f"{step['peak_bytes'] / 1e9:>9.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shape", choices=list(SHAPES), default="30B-A3B")
    parser.add_argument("--layers", type=int, default=0, help="How many layers the model has, if not all.")
    parser.add_argument("--engine", choices=("vllm", "windfall"), default="vllm")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--groups", type=int, default=16, help="Of 8 responses each.")
    parser.add_argument("--tokens", type=int, default=400, help="Longest response.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        # In a process of its own, because the memory that it needs on the host is not returned before the process ends.
        writer = multiprocessing.get_context("spawn").Process(target=write_model, args=(folder / "model", args))
        writer.start()
        writer.join()
        if writer.exitcode:
            raise SystemExit("the model was not written")
        (folder / "recipe.toml").write_text(RECIPE)
        values = {
            "model.path": folder / "model", "run.folder": folder, "run.steps": args.steps, "run.device": args.device,
            "rollout.groups": args.groups, "rollout.group_size": 8, "rollout.max_tokens": args.tokens,
            "engine.name": args.engine,
            # vLLM for CPUs does not record experts
            "train.replay_routing": "auto" if (args.engine, args.device) == ("vllm", "cpu") else "true",
        }  # fmt: skip
        recipe = load_recipe(folder / "recipe.toml", [f"{key}={value}" for key, value in values.items()])
        run = new_folder(recipe)
        train(recipe, run)
        log = events.read(run / "events.jsonl")
    (ready,) = (e for e in log if e["name"] == "trainer_ready")
    print(f"\n{args.shape}, {args.layers or 'all'} layers, {args.engine}; {ready.get('memory') or 'on a CPU'}")
    heads = ("s", "train s", "trained", "tok/s", "gap", "without", "replayed", "peak GB")
    print("step" + "".join(f"{head:>{width}}" for head, width in zip(heads, (9, 9, 10, 9, 10, 10, 10, 9), strict=True)))
    for step in (e for e in log if e["kind"] == "scalar" and e["name"] == "step"):
        print(row(step), flush=True)


if __name__ == "__main__":
    main()
