"""What one step of a run asks for: responses with log-normal lengths, and the model they come from. Pure.

The length of a response is min(X, max_tokens) with a log-normal X, as in the simulator, so the moments are exact.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from statistics import NormalDist

from windfall.errors import WindfallError, nearest
from windfall.trainer.ranks.rank_budget import ModelShape
from windfall.trainer.ranks.state_layout import MOMENT_BYTES, Offload

VALUE_BYTES = 2
"""Bytes of a weight and of a KV value: bfloat16."""


def _shape(
    hidden: int, intermediate: int, layers: int, heads: int, kv: int, vocabulary: int, tied: bool, head: int = 128
) -> ModelShape:
    return ModelShape(
        hidden=hidden, intermediate=intermediate, layers=layers, heads=heads, kv_heads=kv, head=head,
        vocabulary=vocabulary, tied=tied,
    )  # fmt: skip


MODELS: dict[str, ModelShape] = {
    "Qwen3-0.6B": _shape(1024, 3072, 28, 16, 8, 151_936, True),
    "Qwen3-1.7B": _shape(2048, 6144, 28, 16, 8, 151_936, True),
    "Qwen3-4B": _shape(2560, 9728, 36, 32, 8, 151_936, True),
    "Qwen3-8B": _shape(4096, 12_288, 36, 32, 8, 151_936, False),
    "Qwen3-14B": _shape(5120, 17_408, 40, 40, 8, 151_936, False),
    "Qwen3-32B": _shape(5120, 25_600, 64, 64, 8, 151_936, False),
    "Qwen3-30B-A3B": replace(_shape(2048, 8 * 768, 48, 32, 4, 151_936, False), experts=128, chosen=8),
    "R1-Distill-Qwen-1.5B": _shape(1536, 8960, 28, 12, 2, 151_936, False),
    "R1-Distill-Qwen-7B": _shape(3584, 18_944, 28, 28, 4, 152_064, False),
    "R1-Distill-Qwen-14B": _shape(5120, 13_824, 48, 40, 8, 152_064, False),
    "Qwen2.5-0.5B": _shape(896, 4864, 24, 14, 2, 151_936, True, 64),
    "Qwen2.5-1.5B": _shape(1536, 8960, 28, 12, 2, 151_936, True),
    "Qwen2.5-3B": _shape(2048, 11_008, 36, 16, 2, 151_936, True),
    "Qwen2.5-7B": _shape(3584, 18_944, 28, 28, 4, 152_064, False),
    "Qwen2.5-14B": _shape(5120, 13_824, 48, 40, 8, 152_064, False),
    "Qwen2.5-32B": _shape(5120, 27_648, 64, 40, 8, 152_064, False),
    "Qwen2.5-72B": _shape(8192, 29_568, 80, 64, 8, 152_064, False),
    "SmolLM2-135M": _shape(576, 1536, 30, 9, 3, 49_152, True, 64),
    "Llama-3.2-1B": _shape(2048, 8192, 16, 32, 8, 128_256, True, 64),
    "Llama-3.2-3B": _shape(3072, 8192, 28, 24, 8, 128_256, True),
    "Llama-3.1-8B": _shape(4096, 14_336, 32, 32, 8, 128_256, False),
    "Llama-3.1-70B": _shape(8192, 28_672, 80, 64, 8, 128_256, False),
    "Llama-3.3-70B-Instruct": _shape(8192, 28_672, 80, 64, 8, 128_256, False),
}
"""From the models' config.json on the Hugging Face hub."""


def model(name: str) -> tuple[str, ModelShape]:
    """The model of this name. A size such as "8B" means the first model of that size; variants such as "-Instruct" have
    the sizes of their base.

    >>> model("8b")[0], model("Qwen/Qwen3-8B")[1].kv_heads, model("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B")[0]
    ('Qwen3-8B', 8, 'R1-Distill-Qwen-7B')
    >>> model("70B")[0], model("meta-llama/Llama-3.1-8B-Instruct")[0], model("Qwen/Qwen3-4B-Instruct-2507")[0]
    ('Llama-3.1-70B', 'Llama-3.1-8B', 'Qwen3-4B')
    """
    wanted = _plain(name.rpartition("/")[2])
    for known, shape in MODELS.items():
        if wanted in (_plain(known), _plain(known).rpartition("-")[2]):
            return known, shape
    close = nearest(name, MODELS)
    known = f"Known: {', '.join(MODELS)}."
    fix = (
        f"{close if close.startswith('Did') else ''} {known} Or give a folder with a config.json, or a recipe with one."
    )
    raise WindfallError(f"the sizes of model {name!r} are not known", where="model", fix=fix.strip())


def _plain(name: str) -> str:
    """The name without its maker and without the variant at its end."""
    name = name.lower().removeprefix("deepseek-").removeprefix("meta-")
    return re.sub(r"(-instruct|-base|-chat|-it)?(-\d{4})?$", "", name)


def hub_id(name: str) -> str:
    """Where a model of the table is on the Hugging Face hub; other names are paths already.

    >>> hub_id("Qwen3-8B"), hub_id("R1-Distill-Qwen-7B"), hub_id("tiny")
    ('Qwen/Qwen3-8B', 'deepseek-ai/DeepSeek-R1-Distill-Qwen-7B', 'tiny')
    """
    if name not in MODELS:
        return name
    makers = {"Qwen": "Qwen/", "Llama": "meta-llama/", "R1": "deepseek-ai/DeepSeek-"}
    return next(maker + name for start, maker in makers.items() if name.startswith(start))


DELTAS = ((1e-6, 0.025), (1e-5, 0.149))
"""Learning rates, and the measured size of a delta in bfloat16 relative to a full copy: the larger ones of
docs/weights.md, which are those of its smallest model."""
NO_DELTA = 0.9
"""A delta above this share is not sent (weights/delta.py)."""


def delta_share(lr: float) -> float:
    """Size of a delta of all weights in bfloat16, relative to a full copy: a power of the learning rate through the
    two measured points.

    >>> [round(delta_share(lr), 3) for lr in (1e-6, 3e-6, 1e-5, 1e-4)]
    [0.025, 0.059, 0.149, 0.888]
    >>> delta_share(1e-3)
    1.0
    """
    (low, small), (high, large) = DELTAS
    share = small * (max(lr, 1e-12) / low) ** (math.log(large / small) / math.log(high / low))
    return share if share <= NO_DELTA else 1.0


def kv_bytes(shape: ModelShape, value_bytes: int = VALUE_BYTES) -> int:
    """Bytes of one token in a KV cache with values of `value_bytes`."""
    return 2 * shape.layers * shape.kv_heads * shape.head * value_bytes


@lru_cache(maxsize=256)
def _moment(median: float, sigma: float, most: int, power: int) -> float:
    """E[min(X, most)^power] of a log-normal X."""
    mu, s, k = math.log(median), sigma, power
    if s == 0:
        return min(median, most) ** k
    normal, cut = NormalDist(), math.log(most)
    below = math.exp(k * mu + k * k * s * s / 2) * normal.cdf((cut - mu - k * s * s) / s)
    return below + most**k * (1 - normal.cdf((cut - mu) / s))


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    shape: ModelShape
    groups: int = 64
    group_size: int = 8
    prompt_tokens: int = 256
    median_tokens: float = 1000.0
    sigma: float = 0.7
    max_tokens: int = 8192
    staleness: int = 1
    reward_s: float = 0.0
    """Seconds to grade a response, which are not hidden behind generation."""
    steps: int = 100
    kl: bool = False
    offload: Offload = "auto"
    moment_bytes: float = MOMENT_BYTES["adamw"]
    adapter_parameters: int = 0
    minibatches: int = 1
    context_parallel: int = 1
    micro_tokens: int = 0
    """Tokens of a pack; 0: as many as fit."""
    delta: float = 1.0
    """Bytes of a pull, as a share of a full copy (`delta_share`)."""
    kv_value_bytes: int = VALUE_BYTES
    """Bytes of a value in the KV cache of a worker (`engine.kv_dtype`)."""
    policy: str = ""
    """The policy whose work it is; of several, the first."""
    share: float = 1.0
    """Conversations per response, on average."""
    trained: bool = True

    @property
    def responses(self) -> int:
        return self.groups * self.group_size

    @property
    def mean_tokens(self) -> float:
        return max(1.0, _moment(self.median_tokens, self.sigma, self.max_tokens, 1))

    @property
    def mean_context(self) -> float:
        """Mean context of a running response: long responses are running for longer.

        >>> shape = MODELS["Qwen3-8B"]
        >>> Workload(shape=shape, sigma=0.0, median_tokens=100, prompt_tokens=10).mean_context
        60.0
        """
        return self.prompt_tokens + _moment(self.median_tokens, self.sigma, self.max_tokens, 2) / (2 * self.mean_tokens)

    @property
    def mean_trained_context(self) -> float:
        """Mean number of tokens that a token of a training batch attends to, prompts included.

        >>> shape = MODELS["Qwen3-8B"]
        >>> Workload(shape=shape, sigma=0.0, median_tokens=100, prompt_tokens=10).mean_trained_context
        55.0
        """
        p, mean = self.prompt_tokens, self.mean_tokens
        squares = p * p + 2 * p * mean + _moment(self.median_tokens, self.sigma, self.max_tokens, 2)
        return squares / (2 * (p + mean))

    @property
    def longest_tokens(self) -> float:
        """Expected length of the longest response of a step (Blom's approximation)."""
        if self.sigma == 0 or self.responses == 1:
            return min(self.median_tokens, self.max_tokens)
        z = NormalDist().inv_cdf((self.responses - 0.375) / (self.responses + 0.25))
        return min(self.max_tokens, self.median_tokens * math.exp(self.sigma * z))

    @property
    def tokens(self) -> float:
        """Response tokens per step."""
        return self.responses * self.share * self.mean_tokens

    @property
    def trained_tokens(self) -> float:
        """Tokens per step that a trainer computes, prompts included."""
        return self.trained * self.responses * self.share * (self.mean_tokens + self.prompt_tokens)

    @property
    def trainer_tokens(self) -> float:
        """Response tokens per step of the trainer that has the most."""
        return self.trained * self.tokens

    @property
    def weights_bytes(self) -> float:
        return VALUE_BYTES * self.shape.parameters

    @property
    def update_bytes(self) -> float:
        """Bytes that are published per step: all weights, or the adapters."""
        return VALUE_BYTES * (self.adapter_parameters or self.shape.parameters)

    @property
    def pull_bytes(self) -> float:
        """Bytes that an engine with the previous version pulls per step."""
        return self.delta * self.update_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedWorkload(Workload):
    """The work of several policies, for a step of the first one. Roles speak one after the other, so a step has as many
    responses at once as with one policy, and each is longer. Fields that are not added up are those of the largest."""

    parts: tuple[Workload, ...]
    one_base: bool
    """All parts are policies on one base: one trainer, and every engine has all of them. Otherwise each part is a base
    with a trainer of its own, the training GPUs are divided equally, and an engine has one of them."""

    @property
    def mean_tokens(self) -> float:
        return sum(part.share * part.mean_tokens for part in self.parts)

    @property
    def mean_context(self) -> float:
        """A role speaks for as long as it has tokens."""
        return sum(part.tokens * part.mean_context for part in self.parts) / self.tokens

    @property
    def mean_trained_context(self) -> float:
        return sum(part.trained_tokens * part.mean_trained_context for part in self.parts) / self.trained_tokens

    @property
    def trained_tokens(self) -> float:
        return sum(part.trained_tokens for part in self.parts)

    @property
    def longest_tokens(self) -> float:
        """The longest conversation of one of them, with those of the others as long as usual."""
        return self.mean_tokens + max(part.longest_tokens - part.share * part.mean_tokens for part in self.parts)

    @property
    def weights_bytes(self) -> float:
        """Memory of an engine for weights: the base, with all adapters beside each other."""
        if self.one_base:
            return VALUE_BYTES * (self.shape.parameters + self.adapter_parameters)
        return max(part.weights_bytes for part in self.parts)

    @property
    def update_bytes(self) -> float:
        """What an engine gets in a step."""
        if self.one_base:
            return VALUE_BYTES * (self.adapter_parameters or self.shape.parameters)
        return max(part.update_bytes for part in self.parts)

    @property
    def trainer_tokens(self) -> float:
        return (sum if self.one_base else max)(part.trainer_tokens for part in self.parts)


def add_up(parts: Sequence[Workload], *, one_base: bool) -> Workload:
    """The work of several policies on one base, or of several bases. One is itself.

    >>> shape = MODELS["Qwen3-8B"]
    >>> one = Workload(shape=shape, sigma=0.0, median_tokens=100, prompt_tokens=10, adapter_parameters=10**7)
    >>> from dataclasses import replace
    >>> both = add_up([replace(one, share=1.5), one], one_base=True)
    >>> both.tokens / one.tokens, both.mean_context == one.mean_context, both.update_bytes / one.update_bytes
    (2.5, True, 2.0)
    """
    first, largest = parts[0], max(parts, key=lambda part: part.shape.parameters)
    if len(parts) == 1 and first.share == 1:
        return first
    own = {f.name: getattr(largest, f.name) for f in fields(Workload)} | {
        "policy": first.policy,
        "share": 1.0,
        "trained": any(part.trained for part in parts),
        "staleness": first.staleness,
        "prompt_tokens": round(sum(part.share * part.prompt_tokens for part in parts)),
        "max_tokens": max(part.max_tokens for part in parts),
        "delta": max(part.delta for part in parts),
        "kl": any(part.kl for part in parts),
    }
    if one_base:
        own["adapter_parameters"] = sum(part.adapter_parameters for part in parts)
    return AddedWorkload(parts=tuple(parts), one_base=one_base, **own)
