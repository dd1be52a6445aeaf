"""From what the controller says to an engine. The model is built from its configuration; its weights are pulled."""

from __future__ import annotations

import json
from typing import Any

from windfall.devices import free_bytes
from windfall.errors import WindfallError
from windfall.link.messages import Engine


def model_for(spec: Engine, device: str) -> Any:
    """The transformers module, with weights that mean nothing yet."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from windfall.engine import attention

    fields = json.loads(spec.model_config)
    try:
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        with torch.device(device):
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, spec.dtype), attn_implementation=attention.NAME
            )
    except (KeyError, ValueError) as e:
        raise WindfallError(f"the run's model cannot be built here: {e}", fix="Install the run's transformers.") from e
    return model.to(device).eval()


def sizes(spec: Engine, config: Any, value_bytes: int, device: str, share: float) -> tuple[int, int]:
    """(responses at once, tokens in the KV cache), from what was asked for or from this machine's memory."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * heads * head * value_bytes
    running = spec.max_running or min(1024 if device == "cuda" else 256, spec.wanted)
    fits = int(free_bytes(device) * share) // token_bytes
    return running, spec.kv_tokens or max(2 * spec.longest, min(running * spec.longest, fits))


def engine_for(
    spec: Engine, device: str, *, model: Any = None, share: float = 0.4, version: int = 0
) -> tuple[Any, int]:
    """An engine on this device that takes at most `share` of its free memory, and how many responses it runs at once.
    `model`: use this one."""
    from windfall.engine.engine import TorchEngine

    model = model_for(spec, device) if model is None else model
    running, kv_tokens = sizes(spec, model.config, model.dtype.itemsize, device, share)
    engine = TorchEngine(
        model, kv_tokens=kv_tokens, page_size=spec.page_size, max_running=running, max_rows=spec.max_rows,
        deterministic=spec.deterministic, version=version,
    )  # fmt: skip
    return engine, running
