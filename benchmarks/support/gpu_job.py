"""The workloads of benchmarks/engine/gpu.py as plain data: model shapes, requests, and the limits set by memory.

It imports only the standard library, so that every engine's process uses the same prompts and lengths.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from typing import Any

BANDWIDTH_BYTES_PER_S = 4.3e12
"""Measured with a copy on an H200: bytes read plus bytes written."""
PEAK_FLOP_PER_S = 990e12
VALUE_BYTES = 2
LONGEST = 512 + 2048
MAX_ROWS, MEMORY = 8192, 0.88
SECTIONS = ("ready", "rollout", "group", "decode", "prefill", "memory")
"""In the order of measurement: if a run is stopped, it has the most important ones."""

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8,
    "vocab_size": 151_936, "max_position_embeddings": 40_960, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "attention_bias": False, "use_sliding_window": False, "bos_token_id": 151_643,
    "eos_token_id": 151_645, "torch_dtype": "bfloat16",
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {
        **_QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "1.7b": {
        **_QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "8b": {
        **_QWEN3, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    # Qwen3-30B-A3B: 128 experts, 8 of them for each token. windfall's GPU engine does not run it.
    "30b-a3b": {
        **_QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
        "norm_topk_prob": True, "mlp_only_layers": [], "tie_word_embeddings": False,
    },
    "tiny": {
        **_QWEN3, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "bos_token_id": 0, "eos_token_id": 1,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The job of one engine's process. `quick`: fewer and smaller cases."""

    model: str
    device: str = "cuda"
    only: tuple[str, ...] = SECTIONS
    quick: bool = False
    max_rows: int = MAX_ROWS
    """Upper limit for windfall's rows per step."""
    memory: float = MEMORY
    """Share of GPU memory for an engine: for vLLM of all memory, for windfall of the memory that the weights leave."""

    @staticmethod
    def parse(text: str) -> Job:
        fields = json.loads(text)
        return Job(**{**fields, "only": tuple(fields["only"])})

    def text(self) -> str:
        return json.dumps(asdict(self))

    @property
    def config(self) -> dict[str, Any]:
        return dict(SHAPES[self.model])

    @property
    def tiny(self) -> bool:
        return self.model == "tiny"

    @property
    def batches(self) -> tuple[int, ...]:
        return (1, 4) if self.tiny else (1, 64, 256) if self.quick else (1, 16, 64, 256, 512)

    @property
    def rollouts(self) -> tuple[int, ...]:
        return (4, 8) if self.tiny else (64, 256) if self.quick else (64, 256, 1024)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Requests that all start at once: temperature 1, no stop token, each ends after exactly its own length."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def alike(job: Job, count: int, prompt: int, length: int, seed: int) -> Work:
    """`count` requests with different prompts, all of the same length.

    >>> work = alike(Job(model="tiny"), 2, 3, 5, seed=1)
    >>> len(work.prompts[0]), work.lengths, work.prompts == alike(Job(model="tiny"), 2, 3, 5, seed=2).prompts
    (3, [5, 5], False)
    """
    rng = random.Random(f"prompts {seed}")
    vocabulary = job.config["vocab_size"]
    return Work(
        prompts=[[rng.randrange(3, vocabulary) for _ in range(prompt)] for _ in range(count)], lengths=[length] * count
    )


def groups(job: Job, seed: int) -> Work:
    """Groups of 8 with one prompt each. The lengths are the same for every seed: log-normal, up to an upper limit.

    >>> work = groups(Job(model="0.6b"), seed=1)
    >>> len(work.prompts), work.prompts[0] == work.prompts[7], max(work.lengths), round(work.tokens / 512, -2)
    (512, True, 2048, 600.0)
    """
    count, prompt, most = (2, 32, 40) if job.tiny else (16 if job.quick else 64, 512, 2048)
    prompts = alike(job, count, prompt, 0, seed).prompts
    rng = random.Random("lengths")
    scale = most / 2048
    lengths = [max(1, min(most, int(scale * rng.lognormvariate(6.13, 0.8)))) for _ in range(8 * count)]
    return Work(prompts=[prompts[n // 8] for n in range(8 * count)], lengths=lengths)


def weights(config: dict[str, Any], tokens: float = 1.0) -> float:
    """Number of parameters that a step with so many tokens reads: all but the embedding, which is only a lookup. Of the
    experts, those that at least one token is expected to use.

    >>> [round(weights(SHAPES[m]) / 1e9, 2) for m in ("0.6b", "8b", "30b-a3b")]
    [0.6, 7.57, 3.04]
    >>> round(weights(SHAPES["30b-a3b"], 256) / 1e9, 1)
    30.2
    """
    hidden, head, kv = config["hidden_size"], config["head_dim"], config["num_key_value_heads"]
    attention = hidden * head * (2 * config["num_attention_heads"] + 2 * kv)
    width = float(config["intermediate_size"])
    if experts := config.get("num_experts"):
        unused = (1 - config["num_experts_per_tok"] / experts) ** tokens
        width = config["moe_intermediate_size"] * experts * (1 - unused)
    layer = attention + 3 * hidden * width
    return config["num_hidden_layers"] * layer + config["vocab_size"] * hidden


def prefill_flop(config: dict[str, Any], prompt: int) -> float:
    """FLOP of one prompt: products with the layers' weights, causal attention, and the head for the last token alone.

    >>> round(prefill_flop(SHAPES["0.6b"], 1024) / 1e12, 2)
    1.02
    """
    head = config["vocab_size"] * config["hidden_size"]
    pairs = config["num_hidden_layers"] * config["num_attention_heads"] * config["head_dim"] * prompt**2
    return 2.0 * (prompt * (weights(config) - head) + head + pairs)


def kv_bytes(config: dict[str, Any]) -> int:
    """Bytes of the keys and values of one token."""
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * VALUE_BYTES


def floor_ms(config: dict[str, Any], batch: int, context: float) -> float:
    """Milliseconds of a decode step if only memory reads at full bandwidth take time.

    >>> round(floor_ms(SHAPES["0.6b"], 256, 272), 2)
    2.13
    """
    return 1e3 * (weights(config, batch) * VALUE_BYTES + batch * context * kv_bytes(config)) / BANDWIDTH_BYTES_PER_S
