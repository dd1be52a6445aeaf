"""What one step of a run asks for: responses with log-normal lengths, and the model they come from. Pure.

The length of a response is min(X, max_tokens) with a log-normal X, as in the simulator, so the moments are exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from windfall.errors import WindfallError, nearest
from windfall.train.rank_budget import ModelShape

VALUE_BYTES = 2
"""Bytes of a weight and of a KV value: bfloat16."""


def _qwen(hidden: int, intermediate: int, layers: int, heads: int, kv: int, vocabulary: int, tied: bool) -> ModelShape:
    return ModelShape(
        hidden=hidden, intermediate=intermediate, layers=layers, heads=heads, kv_heads=kv, head=128,
        vocabulary=vocabulary, tied=tied,
    )  # fmt: skip


MODELS: dict[str, ModelShape] = {
    "Qwen3-0.6B": _qwen(1024, 3072, 28, 16, 8, 151_936, True),
    "Qwen3-1.7B": _qwen(2048, 6144, 28, 16, 8, 151_936, True),
    "Qwen3-4B": _qwen(2560, 9728, 36, 32, 8, 151_936, True),
    "Qwen3-8B": _qwen(4096, 12_288, 36, 32, 8, 151_936, False),
    "Qwen3-14B": _qwen(5120, 17_408, 40, 40, 8, 151_936, False),
    "Qwen3-32B": _qwen(5120, 25_600, 64, 64, 8, 151_936, False),
    "R1-Distill-Qwen-1.5B": _qwen(1536, 8960, 28, 12, 2, 151_936, False),
    "R1-Distill-Qwen-7B": _qwen(3584, 18_944, 28, 28, 4, 152_064, False),
    "R1-Distill-Qwen-14B": _qwen(5120, 13_824, 48, 40, 8, 152_064, False),
}
"""From the models' config.json on the Hugging Face hub."""


def model(name: str) -> tuple[str, ModelShape]:
    """The model of this name. A size such as "8B" means the first model of that size.

    >>> model("8b")[0], model("Qwen/Qwen3-8B")[1].kv_heads, model("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B")[0]
    ('Qwen3-8B', 8, 'R1-Distill-Qwen-7B')
    """
    wanted = name.rpartition("/")[2].lower().removeprefix("deepseek-")
    for known, shape in MODELS.items():
        if wanted in (known.lower(), known.lower().rpartition("-")[2]):
            return known, shape
    fix = f"{nearest(name, MODELS)} Or give a recipe whose model is a folder with a config.json."
    raise WindfallError(f"the sizes of model {name!r} are not known", where="model", fix=fix)


def hub_id(name: str) -> str:
    """Where a model of the table is on the Hugging Face hub; other names are paths already.

    >>> hub_id("Qwen3-8B"), hub_id("R1-Distill-Qwen-7B"), hub_id("tiny")
    ('Qwen/Qwen3-8B', 'deepseek-ai/DeepSeek-R1-Distill-Qwen-7B', 'tiny')
    """
    if name not in MODELS:
        return name
    return f"Qwen/{name}" if name.startswith("Qwen") else f"deepseek-ai/DeepSeek-{name}"


def kv_bytes(shape: ModelShape) -> int:
    """Bytes of one token in the KV cache."""
    return 2 * shape.layers * shape.kv_heads * shape.head * VALUE_BYTES


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
    offload: bool = False
    adapter_parameters: int = 0
    minibatches: int = 1

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
        return self.responses * self.mean_tokens

    @property
    def weights_bytes(self) -> float:
        return VALUE_BYTES * self.shape.parameters

    @property
    def update_bytes(self) -> float:
        """Bytes that are published and pulled per step: all weights, or the adapters."""
        return VALUE_BYTES * (self.adapter_parameters or self.shape.parameters)
