"""The assumptions of rlboost_table.py: models and machines by published figures, lengths, prices, and the spot market.

The times of a machine follow from its memory bandwidth and FLOP/s, each at an assumed share of the peak, and from the
model's shape (roofline). One number is fitted: `slower` multiplies every time, so that co-located training of the 8B
model reaches CO_LOCATED_8B tokens per second. Nothing is fitted to the paper's results for harvesting.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from windfall.providers import trace
from windfall.providers.trace_formats import Change
from windfall.recipe.file import parse_recipe
from windfall.recipe.sections import Recipe

CO_LOCATED_8B = 10_000.0
"""Tokens per second on 8 H100: RLBoost's artifact, "about 10K"."""
GROUPS, SIBLINGS = 128, 8
TRAINER_USD_PER_H, INSTANCE_USD_PER_H = 83.79, 5.32
"""Prices of 8 H100 on demand and of 2 H100 on a spot market, from RLBoost."""
H100_BYTES_PER_S, H100_FLOP_PER_S = 3.35e12, 989e12
"""H100 SXM, bfloat16 without sparsity: NVIDIA's data sheet."""
H100_BYTES = 80e9
PASSES = 5
"""Cost of a trained token in forward passes: old log-probs 1, forward 1, recomputation in the backward pass 1, backward
2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    name: str
    parameters: float
    layers: int
    heads: int
    trainer_gpus: int
    kv_heads: int = 8
    head: int = 128

    @property
    def weights_bytes(self) -> float:
        return 2 * self.parameters

    @property
    def kv_bytes(self) -> float:
        """KV-cache bytes per token."""
        return 2 * 2 * self.layers * self.kv_heads * self.head


MODELS = {
    "8B": Model(name="8B", parameters=8.2e9, layers=36, heads=32, trainer_gpus=8),
    "14B": Model(name="14B", parameters=14.8e9, layers=40, heads=40, trainer_gpus=8),
    "32B": Model(name="32B", parameters=32.8e9, layers=64, heads=64, trainer_gpus=16),
}
"""Qwen3's published shapes; the number of trainer GPUs is the paper's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumptions:
    """Values that neither the paper nor a data sheet gives."""

    memory: float = 0.7
    """Share of the memory bandwidth that decoding reaches."""
    decode: float = 0.5
    """Share of peak FLOP/s that decoding and prefill reach."""
    train: float = 0.4
    """Share of peak FLOP/s that training reaches."""
    median_tokens: float = 4000.0
    sigma: float = 0.7
    alike: float = 0.5
    prompt_tokens: int = 256
    boot_s: float = 60.0
    """Seconds until an instance's worker dials in. It pulls weights after that."""
    update_s: float = 5.0
    """Seconds of an optimizer update with the copy of the weights, for 8B. Other models scale with the parameters per
    GPU."""
    kv_share: float = 0.85
    """Share of the memory left by the weights that holds the KV cache."""
    trainer_kv: float = 1.0
    """KV cache of the trainer's engines, as a share of what engines on as many GPUs of their own have. Below 1, the
    training state stays on the GPUs while they generate."""
    slower: float = 1.0
    """The fitted factor."""


DESCRIPTIONS = {
    "memory": "memory bandwidth reached in decoding, share of peak",
    "decode": "FLOP/s reached in decoding and prefill, share of peak",
    "train": "FLOP/s reached in training, share of peak",
    "median_tokens": "median response (log-normal, truncated at the limit)",
    "sigma": "spread of the logarithm of lengths",
    "alike": "correlation of lengths within a group",
    "prompt_tokens": "tokens of a prompt",
    "boot_s": "seconds until an instance's worker dials in",
    "update_s": "seconds of an update of 8B, publishing included",
    "kv_share": "share of free GPU memory that holds KV cache",
    "trainer_kv": "KV cache of the trainer's engines, share",
}


def engine(model: Model, a: Assumptions, gpus: int) -> dict[str, float]:
    """Several engines of 2 GPUs each (tensor parallel), modeled as one. A response runs in one of them, so its time per
    step is divided by their number; the time to read the weights is not."""
    engines = gpus / 2
    memory, flops = 2 * H100_BYTES_PER_S * a.memory, 2 * H100_FLOP_PER_S * a.decode
    token_s = 2 * model.parameters / flops
    times = {
        "fixed_s": model.weights_bytes / memory, "each_s": token_s / engines,
        "context_s": model.kv_bytes / memory / engines, "prefill_s": token_s / engines,
    }  # fmt: skip
    return {name: s * a.slower for name, s in times.items()}


def trainer(model: Model, a: Assumptions, mean_tokens: float) -> dict[str, float]:
    attention = 4 * model.layers * model.heads * model.head * (a.prompt_tokens + mean_tokens / 2)
    flops = PASSES * (2 * model.parameters + attention)
    trained_s = flops / (model.trainer_gpus * H100_FLOP_PER_S * a.train) * (1 + a.prompt_tokens / mean_tokens)
    per_gpu = model.parameters / model.trainer_gpus / (MODELS["8B"].parameters / 8)
    return {
        **engine(model, a, model.trainer_gpus), "train_s": trained_s * a.slower, "update_s": a.update_s * per_gpu,
    }  # fmt: skip


def mean_tokens(a: Assumptions, most: int, draws: int = 20_000) -> float:
    draw = random.Random(0)
    return sum(min(most, a.median_tokens * draw.lognormvariate(0, a.sigma)) for _ in range(draws)) / draws


def slots(model: Model, a: Assumptions, gpus: int) -> int:
    """Number of responses whose KV cache fits. Of responses that start together, a share is left after k tokens, each
    with a context of k."""
    free = gpus * H100_BYTES - gpus / 2 * model.weights_bytes
    left = (NormalDist().cdf(-math.log(k / a.median_tokens) / a.sigma) * k for k in range(100, 14_000, 100))
    return max(1, int(free * a.kv_share / (model.kv_bytes * (a.prompt_tokens + max(left)))))


def recipe(model: Model, a: Assumptions, *, max_tokens: int = 14_000, granule: int = 256, **sections: Any) -> Recipe:
    """The recipe of the run. `sections` override single keys."""
    mean = mean_tokens(a, max_tokens)
    keys_by_section: dict[str, dict[str, Any]] = {
        "run": {"name": f"rlboost-{model.name}", "steps": 10_000},
        "rollout": {"groups": GROUPS, "group_size": SIBLINGS, "max_tokens": max_tokens},
        "train": {"micro_tokens": round(16 * mean)},
        "eval": {"tasks": 0}, "checkpoint": {"every": 10_000},
        "fleet": {
            "trainer_price_usd_per_h": TRAINER_USD_PER_H * model.trainer_gpus / 8, "kind": "spot",
            "price_usd_per_h": INSTANCE_USD_PER_H,
        },
        "trace": {"price_usd_per_h": INSTANCE_USD_PER_H},
        "sim": {
            "trainer": trainer(model, a, mean), "worker": engine(model, a, 2),
            "trainer_slots": min(GROUPS * SIBLINGS, round(a.trainer_kv * slots(model, a, model.trainer_gpus))),
            "worker_slots": slots(model, a, 2), "boot_s": a.boot_s, "weights_bytes": model.weights_bytes,
            "egress_bytes_per_s": 25e9, "ingress_bytes_per_s": 6.25e9, "prompt_tokens": a.prompt_tokens,
            "median_tokens": a.median_tokens, "sigma": a.sigma, "alike": a.alike, "granule": granule,
        },
    }  # fmt: skip
    for name, keys in sections.items():
        keys_by_section.setdefault(name, {}).update(keys)
    return parse_recipe(keys_by_section, where=model.name)


def useful_instances(model: Model, a: Assumptions, max_tokens: int = 14_000) -> int:
    """RLBoost's bound N_prem with our figures: the number of instances that generate as fast as the trainer trains."""
    mean = mean_tokens(a, max_tokens)
    w, t = engine(model, a, 2), trainer(model, a, mean)
    room = slots(model, a, 2)
    for count in range(1, 65):
        batch = min(room, GROUPS * SIBLINGS / count)
        step_s = w["fixed_s"] + batch * (w["each_s"] + w["context_s"] * (a.prompt_tokens + mean / 2))
        if count * batch / step_s * t["train_s"] >= 1:
            return count
    return 64


# the market


def sample_nodes(changes: Sequence[Change], share: float = 0.5, seed: int = 0) -> list[Change]:
    """A random share of the instances in a trace."""
    names = sorted({c.node for c in changes})
    chosen = set(random.Random(seed).sample(names, round(share * len(names))))
    return [c for c in changes if c.node in chosen]


WINDOWS = {"A": 2 * 3600.0, "B": 6 * 3600.0, "C": 9 * 3600.0}
"""Start of the three segments in Bamboo's trace, in seconds, from high to low availability."""
WINDOW_S = 2 * 3600.0


def market(path: Path | None, share: float = 0.5) -> tuple[dict[str, list[Change]], str]:
    """The three segments, and a description of their origin."""
    if path is None:
        full = trace.synthetic(nodes=28, mean_up_s=6500, mean_down_s=7500, seconds=11.4 * 3600, seed=7)
        origin = "generated (28 nodes, up 6,500 s, down 7,500 s on average: about half of Bamboo's p3 nodes and losses)"
    else:
        full, origin = sample_nodes(trace.read(path), share), f"{path.name}, {share:.0%} of its nodes"
    return {name: trace.window(full, start_s, WINDOW_S) for name, start_s in WINDOWS.items()}, origin
