"""What it takes to bring adapters into slots and out of them: milliseconds of each verb of a slot.

    python benchmarks/train/slots.py                                    the tiny model on this CPU
    python benchmarks/train/slots.py --device cuda --shape 0.6B         random weights of this shape

Controller, trainer and a worker are in one process, with links in memory, as in tests/trainer/test_slot_run.py. The
samples are sequences of random tokens. Adapters are on all linear layers of the decoder layers; then on these and the
head.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` and `tests` are found

from benchmarks.train.scale import SHAPES
from tests.support.runs.slot_run import SlotRun, slot_run  # pyright: ignore[reportMissingImports]
from windfall.algorithms.given import Loss
from windfall.models import load
from windfall.training import Adam, AdapterSpec, Sample, given

RECIPE = """
[run]
name = "slots"
device = "{device}"
[model]
path = "{model}"
[rollout]
groups = 2
group_size = 2
max_tokens = {tokens}
[policies]
base = {{ frozen = true }}
t0 = {{ slot = "train", lora = {{ rank = {rank} }} }}
s0 = {{ slot = "sample", lora = {{ rank = {rank} }} }}
"""
CROSS_ENTROPY, ADAM = Loss(name="cross_entropy"), Adam(lr=1e-4)
TARGETS: tuple[tuple[str, ...], ...] = ((), ("self_attn", "mlp", "lm_head"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="Random weights of this shape. Default: the tiny model.")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="Tokens of each sample.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if options.device == "cuda" else None) as folder:
        asyncio.run(measure(Path(folder), options))


async def measure(folder: Path, options: argparse.Namespace) -> None:
    model = "tiny" if options.shape is None else random_model(folder / "model", options.shape)
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    text = RECIPE.format(device=options.device, model=model, tokens=4 * options.tokens, rank=options.rank)
    async with slot_run(folder, text, device=options.device, dtype=dtype) as run:
        samples = draw(options.samples, options.tokens)
        for version, targets in enumerate(TARGETS, 1):
            await verbs(
                run, folder / str(version), AdapterSpec(rank=options.rank, alpha=32.0, targets=targets), samples
            )


async def verbs(run: SlotRun, folder: Path, spec: AdapterSpec, samples: list[Sample]) -> None:
    train, sample = run.trainer("t0"), run.trainer("s0")
    folder.mkdir()
    whole, bare, version = str(folder / "whole"), str(folder / "bare"), int(folder.name)
    loaded = await timed("a new adapter", lambda: train.load_adapter(spec, id=""))
    print(f"  {loaded.parameters:,} parameters on {', '.join(loaded.spec.targets)}")
    await train.forward_backward(samples, CROSS_ENTROPY, id="")
    await train.optim_step(adam=ADAM, id="")
    tokens = sum(len(s.ids) for s in samples)
    await timed(f"forward_backward, {tokens} tokens", lambda: train.forward_backward(samples, CROSS_ENTROPY, id=""), 3)
    await timed("optim_step", lambda: train.optim_step(adam=ADAM, id=""))
    await timed("save with optimizer", lambda: train.save_adapter(whole, optimizer=True, id=""))
    await timed("save", lambda: train.save_adapter(bare, id=""))
    await timed("load with optimizer", lambda: train.load_adapter(path=whole, optimizer=True, id=""), 3)
    await timed("load", lambda: train.load_adapter(path=bare, id=""), 3)
    await timed("load into a slot to sample from", lambda: sample.load_adapter(path=bare, id=""))
    await timed("publish", lambda: run.offer("s0", version))
    prompts = [s.ids[:10] for s in samples[:8]]
    await timed("16 tokens of 8 responses, with the swap", lambda: run.sample("s0", prompts, 16))
    scored = [s.ids for s in samples[:8]]
    await timed(f"score {sum(map(len, scored))} tokens, top 20", lambda: sample.score(scored, 20, id=""))


async def timed(what: str, work: Callable[[], Awaitable[Any]], times: int = 1) -> Any:
    began_s, result = time.perf_counter(), None
    for _ in range(times):
        result = await work()
    print(f"{what:45} {1000 * (time.perf_counter() - began_s) / times:8.1f} ms", flush=True)
    return result


def draw(count: int, tokens: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    return [given(rng.integers(3, 60, tokens).tolist(), range(1, tokens), [1.0] * (tokens - 1)) for _ in range(count)]


def random_model(folder: Path, shape: str) -> str:
    """A model with random weights and the tokenizer of the tiny one. Returns its folder."""
    torch.manual_seed(0)
    config = Qwen3Config(**SHAPES[shape], max_position_embeddings=4096)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    load.load_tokenizer("tiny").save_pretrained(folder)
    return str(folder)


if __name__ == "__main__":
    main()
