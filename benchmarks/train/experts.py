"""A model with experts in the trainer: grouped matrix products beside a loop over experts, and what routing replay does
to the gap between engine and trainer in bfloat16.

    python benchmarks/train/experts.py                  four layers of Qwen3-30B-A3B on one GPU
    python benchmarks/train/experts.py --device cpu     a tiny model, to test this program

First it compares gradients of both ways in float32. "x" is relative to the loop, with the same weights and samples (48
samples of 512 to 2,048 tokens per update, random weights). The gap is the mean difference of log-probs between
TorchEngine, which generated the tokens, and the trainer, which scores them with the engine's experts or with its own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig

from benchmarks.train.random_model import random_model
from benchmarks.train.scale import make_samples
from benchmarks.train.whole_weights import clean
from windfall import algorithms
from windfall.engine.torch.engine import TorchEngine
from windfall.models import experts
from windfall.models.experts import ExpertReader
from windfall.recipe.file import parse_recipe
from windfall.recipe.lora import Lora
from windfall.trainer.model import lora
from windfall.trainer.model.gradients import Gradients, trained
from windfall.trainer.model.logprobs import Learner, pack_experts
from windfall.trainer.trainer import TorchTrainer
from windfall.training import Sample
from windfall.types import Request, Sampling

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "intermediate_size": 48,
    },
    "30B-A3B": {
        "vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "intermediate_size": 6144, "norm_topk_prob": True,
    },
}  # fmt: skip
SHAPES["30B-A3B/12"] = SHAPES["30B-A3B"] | {"num_hidden_layers": 4}
"""It has the whole embedding and head."""
WAYS = {"grouped": "grouped_mm", "loop": "eager"}
MICRO_TOKENS = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--steps", type=int, default=2, help="Timed updates, after one that is not.")
    parser.add_argument("--seconds", type=float, default=1e9, help="Begin no row after this time.")
    args = parser.parse_args()
    began_s, name = time.perf_counter(), "tiny" if args.device == "cpu" else "30B-A3B/12"
    rows = [("gradients", lambda: check(args.device)), ("gap", lambda: gap(name, args.device))]
    rows += [
        (f"{what}, {way}", lambda what=what, way=way: speed(name, what, way, args))
        for what in ("adapters", "all weights")
        for way in WAYS
    ]
    for title, row in rows:
        if time.perf_counter() - began_s > args.seconds:
            continue
        try:
            line = row()
        except Exception as e:  # the other rows follow
            line = f"{type(e).__name__}: {e}".replace("\n", " ")[:300]
        clean(args.device)
        print(f"{name:<12}{title:<22}{line}", flush=True)
    print(f"{time.perf_counter() - began_s:.0f} s in all")


def make_model(name: str, device: str, dtype: torch.dtype, **fields: Any) -> Any:
    """With random weights. `fields` of its configuration replace those of the shape."""
    shape = SHAPES[name] | {"max_position_embeddings": 4096, "tie_word_embeddings": False} | fields
    return random_model(Qwen3MoeConfig(**shape), device, dtype)


def check(device: str) -> str:
    """Gradients of a small model in float32."""
    samples, found = make_samples("tiny"), []
    for way in WAYS.values():
        model = make_model("tiny", device, torch.float32)
        model.config._experts_implementation = way
        learner = Learner(model, Gradients(trained(model)), say=lambda line: None)
        rng = np.random.default_rng(0)
        learner.learn(samples, 1.0, lambda a, b, logp, entropy, rng=rng: rng.normal(size=len(logp)))
        found.append({n: p.grad for n, p in model.named_parameters()})
    difference = max(float((found[0][n] - g).norm() / g.norm()) for n, g in found[1].items())
    assert difference < 1e-4, difference
    return f"of grouped products differ from those of the loop by {difference:.1g} of their size (float32)"


def speed(name: str, what: str, way: str, args: Any) -> str:
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = make_model(name, args.device, dtype)
    model.config._experts_implementation = WAYS[way]
    train: dict[str, Any] = {"engine_gap_limit": 1e9, "engine_gap_alarm": 1e9, "lr": 1e-6}
    recipe = parse_recipe({"train": train | ({"lora": {"rank": 16}} if what == "adapters" else {})}, where="benchmark")
    if what == "adapters":
        lora.attach(model, Lora(rank=16), base="none", seed=0)
    trainer = TorchTrainer(model, algorithms.make("dr_grpo"), recipe, micro_tokens=MICRO_TOKENS)
    samples, peak, began_s = make_samples("tiny" if name == "tiny" else "0.6B"), 0, 0.0
    for step in range(args.steps + 1):
        if step == 1:
            began_s = time.perf_counter()
        trainer.forward_backward(samples)
        report = trainer.optim_step()
        assert not report.skipped
        peak = max(peak, report.peak_bytes)
    took_s = (time.perf_counter() - began_s) / args.steps
    return f"{sum(len(s.ids) for s in samples) / took_s:>10,.0f} tok/s{peak / 1e9:>8.1f} GB"


def gap(name: str, device: str, responses: int = 48, tokens: int = 128) -> str:
    """Of tokens that an engine has just generated with the same weights."""
    model = make_model(name, device, torch.bfloat16)
    with torch.no_grad():
        for p in model.lm_head.parameters():  # a distribution as narrow as that of a trained model
            p.mul_(4.0)
    samples = generated(model, responses, tokens)
    learner, reader = Learner(model, say=lambda line: None), ExpertReader(model)
    rows = pack_experts(samples, learner.policy.replay)
    assert rows is not None, "the engine or the trainer does not find the experts of this model"
    behavior = np.concatenate([s.behavior for s in samples])
    given = experts.known(experts.on_device(rows, model.device)).transpose(0, 1)
    gaps, chosen = [], []
    for replay in (True, False):
        with reader.reading() as found:
            logp, entropy = learner.score(samples, 1.0, replay=replay)
        gaps.append(float(np.abs(logp.double().cpu().numpy() - behavior).mean()))
        chosen.append(torch.stack(found).sort(-1).values)
    known = (given >= 0).all(-1)
    other = (chosen[1] != given.sort(-1).values).any(-1) & known
    assert torch.equal(chosen[0][known], given.sort(-1).values[known]), "replay uses the engine's experts"
    return (
        f"{gaps[0]:.2g} nats with replay, {gaps[1]:.2g} without, where {float(other.any(0).float().mean()):.1%} of the "
        f"tokens have another expert in a layer; entropy {float(entropy.mean()):.2f}"
    )


def generated(model: Any, responses: int, tokens: int) -> list[Sample]:
    """Responses with their experts."""
    engine = TorchEngine(model, kv_tokens=2 * responses * (tokens + 64), max_running=responses, experts=True)
    rng, size = np.random.default_rng(0), model.config.vocab_size
    prompts = {str(i): tuple(rng.integers(3, size, 32).tolist()) for i in range(responses)}
    for i, (id, prompt) in enumerate(prompts.items()):
        engine.add(
            Request(id=id, prompt=prompt, seed=i, max_tokens=tokens, sampling=Sampling(temperature=1.0), group=id)
        )
    chunks: dict[str, list[Any]] = {id: [] for id in prompts}
    while len(engine):
        for chunk in engine.step():
            chunks[chunk.id].append(chunk)
    engine.close()
    return [_sample(prompt, chunks[id]) for id, prompt in prompts.items()]


def _sample(prompt: tuple[int, ...], chunks: Sequence[Any]) -> Sample:
    new = [t for c in chunks for t in c.tokens]
    return Sample(
        ids=(*prompt, *new), targets=tuple(range(len(prompt), len(prompt) + len(new))),
        behavior=np.array([x for c in chunks for x in c.logprobs]), advantage=1.0, limit=4096,
        experts=b"".join(c.experts for c in chunks),
    )  # fmt: skip


if __name__ == "__main__":
    main()
