"""Builds the vLLM engine that an EngineSpec describes: how many responses, and how much memory for the KV cache.

The worker's share of memory is a share of what is free beside the weights, as for windfall's engines. vLLM allocates
the weights itself, so their size is computed from the configuration and subtracted first. The KV cache then gets a
fixed number of bytes, and vLLM measures nothing: several workers can share a GPU.
"""

from __future__ import annotations

import json
import time
from typing import Any

from windfall.devices import gpu_memory_lock
from windfall.engine.factory import engine_sizes
from windfall.engine.vllm import installed
from windfall.errors import WindfallError
from windfall.free_memory import free_bytes
from windfall.link.messages import EngineSpec, LoadTimes

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def build(
    spec: EngineSpec, device: str, *, share: float = 0.4, tensor_parallel: int = 1, version: int = 0, **options: Any
) -> tuple[Any, int, LoadTimes]:
    """Build the engine. Returns it, its number of slots, and how long that took. Its weights are set by a swap."""
    began_s = time.monotonic()
    installed.check(device)
    installed.prepare()
    from windfall.engine.vllm.checkpoint import WeightShapes
    from windfall.engine.vllm.engine import VllmEngine

    if spec.deterministic:
        what = "run.deterministic needs windfall's engine: vLLM's results depend on the batch"
        raise WindfallError(what, where="engine.name", fix="Use engine.name = 'windfall'.")
    fields = json.loads(spec.model_config)
    shapes = WeightShapes(fields)
    token_bytes = cache_bytes(shapes.config, spec.dtype, tensor_parallel)
    weights = shapes.parameters * ITEM_BYTES[spec.dtype] // tensor_parallel
    with gpu_memory_lock(device):
        free = free_bytes(device)
        # All ranks have the same share of every token, so the sizes of one rank are those of all.
        running, kv_tokens = engine_sizes(spec, token_bytes, device, share * max(0.0, 1 - weights / max(free, 1)))
        engine = VllmEngine(
            fields,
            dtype=spec.dtype,
            device=device,
            kv_tokens=kv_tokens,
            max_running=running,
            max_rows=spec.max_rows,
            token_bytes=token_bytes,
            tensor_parallel=tensor_parallel,
            version=version,
            shapes=shapes,
            gpu_share=_gpu_share(device, weights + kv_tokens * token_bytes),
            **options,
        )
    try:
        for wanted in spec.samplings:
            engine.check_sampling(wanted, where="rollout or eval")
    except WindfallError:
        engine.close()
        raise
    if engine.limit < spec.longest:
        engine.close()
        what = f"vLLM has room for sequences of {engine.limit} tokens; one response may have {spec.longest}"
        fix = "Raise fleet.worker_memory or --memory, or lower rollout.max_tokens."
        raise WindfallError(what, where="fleet.worker_memory", fix=fix)
    return engine, running, LoadTimes(build_s=time.monotonic() - began_s)


def cache_bytes(config: Any, dtype: str, tensor_parallel: int = 1) -> int:
    """Bytes of KV cache per token on each rank, if every layer caches keys and values of the same size. With more ranks
    than heads, several ranks hold the same head."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * max(1, heads // tensor_parallel) * size * ITEM_BYTES[dtype]


def _gpu_share(device: str, needed: int) -> float:
    """The share of the GPU's memory that these bytes are. vLLM does not start if less than this is free."""
    if not device.startswith("cuda"):
        return 0.9
    import torch

    return min(0.95, max(0.01, round(needed / torch.cuda.mem_get_info()[1], 3)))
