"""The architectures of transformers that windfall might run, as configurations, for the table in docs/models.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

NOT_DECODERS = {
    "bart", "beam", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small",
    "blt", "camembert", "cpmant", "data2vec-text", "electra", "emu3", "ernie", "fuyu", "gemma3", "gemma3n",
    "gemma4", "gemma4_assistant", "gemma4_unified", "gemma4_unified_assistant", "git", "got_ocr2", "llama4",
    "marian", "mbart", "megatron-bert", "mllama", "moshi", "moss_transcribe_diarize", "musicgen", "musicgen_melody",
    "mvp", "pegasus", "phi4_multimodal", "plbart", "prophetnet", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "reformer",
    "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "trocr", "whisper", "xlm", "xlm-roberta",
    "xlm-roberta-xl", "xlnet", "xmod",
}  # fmt: skip
"""Encoders, encoder-decoder models, and multimodal models, whose text part has its own model type."""

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096,
    "short_factor": [1.0 + 0.02 * i for i in range(48)], "long_factor": [1.0 + 1.3 * i for i in range(48)],
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
VARIANTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "gemma2, no cap in attention": ("gemma2", {"attn_logit_softcapping": None}, 100),
    "gemma2, small final cap": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": 5.0}, 100),
    "granite, logits / 1.1": ("granite", {"logits_scaling": 1.1}, 100),
    "granite, logits / 16": ("granite", {"logits_scaling": 16.0, "embedding_multiplier": 12.0}, 100),
    "lfm2, convolutions": ("lfm2", {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8}, 100),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}, 100),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}, 100),
    "mistral, no window": ("mistral", {"sliding_window": None}, 100),
    "mixtral, window": ("mixtral", {"sliding_window": 4096}, 100),
    "nemotron, 8 key heads": ("nemotron", {"num_key_value_heads": 8}, 100),
    "opt, no dropout": ("opt", {"dropout": 0.0, "attention_dropout": 0.0}, 100),
    "phi3, longrope, within 4096": (
        "phi3", {"rope_parameters": LONGROPE, "max_position_embeddings": 131072}, 4096
    ),
    "phi3, longrope, beyond 4096": (
        "phi3", {"rope_parameters": LONGROPE, "max_position_embeddings": 131072}, 8192
    ),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 8}, 100),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2}, 100),
    "qwen3, yarn": ("qwen3", {"rope_parameters": YARN, "max_position_embeddings": 131072}, 100),
}  # fmt: skip
"""Name to model type, the fields that differ from the defaults, and the longest sequence of the run in tokens."""


def families() -> Iterator[tuple[str, str, dict[str, Any], int]]:
    """Name, model type, fields and longest sequence of every decoder with its default configuration, then variants."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        if kind not in NOT_DECODERS:
            yield kind, kind, {}, 100
    for name, (kind, fields, longest) in VARIANTS.items():
        yield name, kind, fields, longest


def configuration(kind: str, fields: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[kind](**fields)
