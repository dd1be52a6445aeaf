"""Training and publishing on a GPU, compared with plain implementations: one table each, in about a minute.

    python benchmarks/train/gpu.py                 random weights in the shapes of Qwen3 0.6B and 8B (--layers of it)

A step is the gradient of all tokens and one update of the weights. The plain loop uses the module of transformers with
its own attention, logits of the whole batch, cross entropy and the AdamW of torch, all in bfloat16; uneven lengths are
padded. windfall's step has float32 masters, weights every token by the algorithm, and reports entropies. Share of peak:
6 times the weights of the matrix products times the tokens, plus the products of attention, over 990 TFLOP/s.
benchmarks/train/scale.py measures a step under FSDP2, and prints device times by kernel.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config

from benchmarks.train.random_model import random_model, random_samples
from windfall import algorithms
from windfall.models.attention import NAME
from windfall.recipe.file import parse_recipe
from windfall.trainer.model.activation_memory import LEAST
from windfall.trainer.trainer import TorchTrainer
from windfall.weights.publishing.publish import Publisher

PEAK = 990e12
SMALL: dict[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip
LARGE: dict[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip


def model_of(shape: dict[str, Any], attention: str) -> Any:
    return random_model(Qwen3Config(**shape, max_position_embeddings=40_960), "cuda", torch.bfloat16, attention)


def flops(model: Any, lengths: list[int]) -> float:
    c = model.config
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    if not c.tie_word_embeddings:
        weights -= c.vocab_size * c.hidden_size  # an embedding is a lookup, not a product
    pairs = sum(n * n for n in lengths)
    return 6 * weights * sum(lengths) + 6 * pairs * c.num_attention_heads * c.head_dim * c.num_hidden_layers


def timed(work: Callable[[], Any], repeats: int, warm: int = 2) -> float:
    seconds = []
    for i in range(warm + repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if i >= warm:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def line(name: str, model: Any, lengths: list[int], step_s: float, note: str = "") -> float:
    rate = sum(lengths) / step_s
    share = flops(model, lengths) / step_s / PEAK
    top = torch.cuda.max_memory_allocated() / 1e9
    print(f"{name:<58}{step_s * 1e3:>8.1f} ms{rate:>10,.0f} tok/s{share:>7.1%}{top:>7.0f} GB  {note}", flush=True)
    return rate


def plain(shape: dict[str, Any], lengths: list[int], name: str, *, rows: int = 8) -> float:
    """The plain loop on padded batches of `rows` sequences, longest first."""
    model = model_of(shape, "sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    batches = []
    for i in range(0, len(lengths), rows):
        some = sorted(lengths, reverse=True)[i : i + rows]
        ids = torch.randint(3, 150_000, (len(some), some[0]), device="cuda")
        inside = torch.arange(some[0], device="cuda")[None] < torch.tensor(some, device="cuda")[:, None]
        batches.append((ids, inside if min(some) < some[0] else None))

    def step() -> None:
        for ids, inside in batches:
            logits = model(ids, attention_mask=inside).logits[:, :-1]
            labels = ids[:, 1:] if inside is None else ids[:, 1:].masked_fill(~inside[:, 1:], -100)
            loss = cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.cuda.reset_peak_memory_stats()
    return line(name, model, lengths, timed(step, 3, warm=1))


def trainer_of(shape: dict[str, Any], micro_tokens: int) -> TorchTrainer:
    recipe = parse_recipe({"train": {"lr": 1e-6, "engine_gap_limit": 99.0}}, where="benchmark")
    return TorchTrainer(model_of(shape, NAME), algorithms.make("grpo"), recipe, micro_tokens=micro_tokens)


def ours(t: TorchTrainer, lengths: list[int], name: str, *, repeats: int = 4) -> float:
    made = random_samples(lengths, SMALL["vocab_size"])

    def step() -> None:
        t.forward_backward(made)
        t.optim_step()

    torch.cuda.reset_peak_memory_stats()
    step_s = timed(step, repeats)
    body = t.learner.policy.body
    if body is None:
        return line(name, t.model, lengths, step_s)
    levels = body.levels(min(t.micro_tokens, sum(lengths)), t.model.device)
    return line(name, t.model, lengths, step_s, f"layers keep {sorted(set(levels))}")


def train(layers: int) -> None:
    even = [1024] * 8
    rng = random.Random(0)
    uneven = [min(2048, 128 + int(rng.expovariate(1 / 472))) for _ in range(64)]
    print(f"{'training':<58}{'a step':>11}{'':>16}{'of peak':>7}{'memory':>9}")
    base = plain(SMALL, even, "0.6B, 8 x 1024: plain loop")
    free()
    t = trainer_of(SMALL, 32_768)
    one = ours(t, even, "0.6B, 8 x 1024: windfall")
    ours(t, [1024] * 64, "0.6B, 64 x 1024: windfall", repeats=2)
    many = ours(t, uneven, f"0.6B, 64 x 128..2048 ({sum(uneven):,} tokens): windfall", repeats=2)
    t.learner.policy.body = None
    ours(t, even, "0.6B, 8 x 1024: windfall on transformers' layers", repeats=2)
    del t
    free()
    padded = plain(SMALL, uneven, "0.6B, the same: plain loop, padded")
    free()
    print(f"  times the plain loop: {one / base:.1f} (8 x 1024), {many / padded:.1f} (uneven lengths)")
    t = trainer_of({**LARGE, "num_hidden_layers": layers}, 32_768)
    ours(t, even, f"8B shape, {layers} layers, 8 x 1024: windfall", repeats=2)
    ours(t, [1024] * 32, f"8B shape, {layers} layers, 32 x 1024: windfall", repeats=2)
    t.learner.use_own_layers(keep=LEAST)
    ours(t, even, f"8B shape, {layers} layers, 8 x 1024: everything computed again", repeats=1)
    del t
    free()


def published(name: str, tensors: dict[str, torch.Tensor]) -> None:
    """Time the fourth and the fifth version, when all buffers exist."""
    nbytes = sum(t.numel() * t.element_size() for t in tensors.values())
    p, rows = Publisher(), []
    first_s = 0.0
    for version in range(5):
        torch.manual_seed(version)
        for t in tensors.values():  # 3 % of the weights change their sign
            flat = t.view(-1)
            for piece in flat.split(1 << 27):
                piece.mul_(1 - 2 * (torch.rand(len(piece), device="cuda") < 0.03))
        torch.cuda.synchronize()
        started, free_s = time.perf_counter(), []
        p.publish(version, tensors, copied=lambda s=started, out=free_s: out.append(time.perf_counter() - s))
        whole_s = time.perf_counter() - started
        first_s = first_s or whole_s
        rows.append((whole_s, free_s[0]))
    whole_s, free_s = (min(x) for x in zip(*rows[3:], strict=True))
    delta = p.delta and p.delta.manifest
    size = f"{delta.nbytes / nbytes:.1%}" if delta else "none"
    print(
        f"{name:<28}{whole_s * 1e3:>9.0f} ms{nbytes / whole_s / 1e9:>7.1f} GB/s{free_s * 1e3:>9.0f} ms{first_s:>8.1f} s"
        f"  delta {size}", flush=True
    )  # fmt: skip
    p.close()


def bus(nbytes: int) -> None:
    """Time a plain copy into pinned memory, 1 GiB at a time."""
    source, target = torch.randn(1 << 28, device="cuda"), torch.empty(1 << 28, pin_memory=True)
    copy_s = timed(lambda: target.copy_(source, non_blocking=True), 5)
    rate = (1 << 30) / copy_s
    print(f"{'plain pinned copy':<28}{nbytes / rate * 1e3:>9.0f} ms{rate / 1e9:>7.1f} GB/s")


def publishing(layers: int) -> None:
    head = f"{'publishing':<28}{'until it can be pulled':>27}{'copied':>11}{'first':>10}"
    for name, shape in (("0.6B", SMALL), ("8B", {**LARGE, "num_hidden_layers": layers})):
        tensors = {n: p.data for n, p in model_of(shape, NAME).named_parameters()}
        nbytes = sum(t.numel() * t.element_size() for t in tensors.values())
        print(f"{head}   {name}: {nbytes / 1e9:.1f} GB")
        bus(nbytes)
        published(name, tensors)
        del tensors
        free()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16, help="number of layers of the 8B shape in training")
    parser.add_argument("--only", choices=("train", "publish"))
    args = parser.parse_args()
    began = time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if args.only != "publish":
        train(args.layers)
    if args.only != "train":
        publishing(36)
    print(f"{time.perf_counter() - began:.0f} s")
