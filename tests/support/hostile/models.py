"""Small models of hostile architectures, which windfall must compute exactly like transformers, or refuse.

`ARCHITECTURES` has the expected result of the self-test for each. `folder` saves one to disk like a user's model;
`edited` saves the demo's model with changed files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model_families import LONGROPE, configuration

from windfall.models import load


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """`engine` and `trainer`: expected text of the refusal; None if the model is computed correctly."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    longest: int = 100
    engine: str | None = None
    trainer: str | None = None

    def config(self) -> Any:
        return configuration(self.kind, {**SMALL.get(self.kind, {}), **self.fields})


SHAPE = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SMALL: dict[str, dict[str, Any]] = {
    "afmoe": {**SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "bloom": {"vocab_size": 160, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "deepseek_v3": {**SHAPE, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 16,
                    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
                    "v_head_dim": 24},
    "diffllama": SHAPE,
    "doge": SHAPE,
    "gemma2": {**SHAPE, "head_dim": 16, "attn_logit_softcapping": None},
    "gptj": {"vocab_size": 160, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 16},
    "granite": SHAPE,
    "jamba": {**SHAPE, "num_experts": 4, "mamba_dt_rank": 4, "attn_layer_period": 4, "attn_layer_offset": 2},
    "jetmoe": {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
               "kv_channels": 16, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama": SHAPE,
    "mixtral": {**SHAPE, **EXPERTS},
    "opt": {"vocab_size": 160, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
            "word_embed_proj_dim": 64, "max_position_embeddings": 256},
    "phi3": {**SHAPE, "hidden_size": 384, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    "phimoe": {**SHAPE, **EXPERTS},
    "recurrent_gemma": {**SHAPE, "num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 32,
                        "head_dim": 16},
}  # fmt: skip
LONG = {"rope_parameters": LONGROPE, "max_position_embeddings": 131072}

ARCHITECTURES = {
    # Right: what the head, the cache or the layers do beyond Llama is done by windfall, too.
    "llama": Architecture(kind="llama"),
    "a final cap": Architecture(kind="gemma2", fields={"final_logit_softcapping": 30.0}),
    "a logit scale near 1": Architecture(kind="granite", fields={"logits_scaling": 1.1}),
    "two attentions in a layer": Architecture(kind="diffllama"),
    "a cache of another shape": Architecture(kind="jetmoe"),
    "latent attention": Architecture(kind="deepseek_v3"),
    "a contiguous output": Architecture(kind="afmoe"),
    "a router that draws numbers in training": Architecture(kind="phimoe"),
    "longrope, short sequences": Architecture(kind="phi3", fields=LONG, longest=4096),
    # Refused.
    "longrope": Architecture(kind="phi3", fields=LONG, longest=8192, engine="nats", trainer="nats"),
    "a mask of its own": Architecture(kind="doge", engine="attention_mask", trainer="attention_mask"),
    "a cap in attention": Architecture(
        kind="gemma2", fields={"attn_logit_softcapping": 50.0}, engine="softcap", trainer="softcap"
    ),
    "attention of its own": Architecture(kind="bloom", engine="nats", trainer="nats"),
    "attention that cannot be named": Architecture(kind="gptj", engine="windfall", trainer="windfall"),
    "states that no cache keeps": Architecture(kind="jamba", engine="nats", trainer="nats"),
    "a recurrence": Architecture(kind="recurrent_gemma", engine="nats", trainer="differ"),
    "dropout in its layers": Architecture(kind="opt", fields={"dropout": 0.3}, trainer="gradient"),
}


def folder(kind: str, out: Path) -> Path:
    """A random model as a folder in Hugging Face format, with the demo's tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(configuration(kind, SMALL[kind])).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(load.TINY / name, out / name)
    return out


def edited(out: Path, change: Callable[[dict[str, Any]], object], **fields: Any) -> Path:
    """The demo's model, with `change` applied to its tensors and `fields` to its configuration."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(load.TINY, out)
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | fields))
    return out
