"""One long response: tokens/s, and the GPU memory as predicted before training and as measured.

    python benchmarks/train/long_context.py                        8B with adapters, 32k and 64k tokens, on one GPU
    python benchmarks/train/long_context.py --device cpu --model tiny --tokens 300      to test this program

The layers keep what fits. "kept" says how many keep all activations, all but the wide ones of the MLP, and only their
input. "recompute" lets all of them keep only their input, as train.checkpoint_activations = true does. Random weights
in the shapes of Qwen3. An update is one response, forward, backward and Adam.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from benchmarks.train.random_model import random_samples
from benchmarks.train.whole_weights import ALL, clean, model_of
from windfall import algorithms
from windfall.free_memory import free_bytes
from windfall.recipe.file import parse_recipe
from windfall.recipe.lora import Lora
from windfall.trainer.memory_plan import plan_memory
from windfall.trainer.model import lora
from windfall.trainer.model.activation_memory import ALL as ALL_KEPT
from windfall.trainer.model.activation_memory import LEAST, LIGHT
from windfall.trainer.trainer import TorchTrainer, peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--model", choices=list(ALL), default="8B")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32_768, 65_536])
    parser.add_argument("--all-weights", action="store_true", help="Train all weights instead of adapters.")
    parser.add_argument("--steps", type=int, default=1, help="Timed updates, after one that is not.")
    parser.add_argument("--seconds", type=float, default=600.0, help="No row begins later.")
    args = parser.parse_args()
    began_s = time.monotonic()
    columns = ("tok/s", "predicted", "peak GB", "kept")
    print(f"{'model':<7}{'tokens':>8} {'layers':<11}" + "".join(f"{c:>12}" for c in columns), flush=True)
    for tokens in args.tokens:
        for recompute in (False, True):
            head = f"{args.model:<7}{tokens:>8} {'recompute' if recompute else 'what fits':<11}"
            if time.monotonic() - began_s > args.seconds:
                print(f"{head}  no time", flush=True)
                continue
            try:
                print(head + row(args, tokens, recompute=recompute), flush=True)
            except Exception as e:  # the other rows are still worth having
                print(f"{head}  {type(e).__name__}: {e}"[:300], flush=True)
            clean(args.device)


def row(args: Any, tokens: int, *, recompute: bool) -> str:
    train: dict[str, Any] = {"engine_gap_limit": 1e9, "engine_gap_alarm": 1e9, "lr": 1e-6}
    train |= {"checkpoint_activations": True} if recompute else {}
    train |= {} if args.all_weights else {"lora": {"rank": 16}}
    recipe = parse_recipe({"train": train, "fleet": {"local": False}}, where="benchmark")
    on_gpu = args.device == "cuda"
    model = model_of(args.model, args.device, torch.bfloat16 if on_gpu else torch.float32)
    free, total = (free_bytes("cuda"), torch.cuda.mem_get_info()[1]) if on_gpu else (64e9, 64e9)
    plan = plan_memory(recipe, model, tokens, free=free, total=total, host=free_bytes())
    if not args.all_weights:
        lora.attach(model, Lora(rank=16), base="none", seed=0)
    share = plan.layout.host_share
    trainer = TorchTrainer(model, algorithms.make("dr_grpo"), recipe, micro_tokens=plan.pack_tokens, host_share=share)
    body = trainer.learner.policy.body
    kept = body.levels(tokens, trainer.device) if body is not None else []
    samples, took_s, peak = random_samples([tokens], ALL[args.model]["vocab_size"]), 0.0, 0
    peak_bytes(trainer.device)
    for step in range(args.steps + 1):
        began_s = time.perf_counter()
        trainer.forward_backward(samples)
        report = trainer.optim_step()
        assert not report.skipped, report
        took_s += (time.perf_counter() - began_s) * (step > 0)
        peak = max(peak, report.peak_bytes)
    predicted = "-" if recompute else f"{plan.peak_bytes / 1e9:.1f}"
    levels = "/".join(str(kept.count(level)) for level in (ALL_KEPT, LIGHT, LEAST)) if kept else "-"
    return f"{tokens * args.steps / took_s:>12,.0f}{predicted:>12}{peak / 1e9:>12.1f}{levels:>12}"


if __name__ == "__main__":
    main()
