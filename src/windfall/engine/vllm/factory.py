"""Builds the vLLM engine that an EngineSpec describes: how many responses, and how much memory for the KV cache.

The worker's share of memory is a share of what is free beside the weights, as for windfall's engines. vLLM allocates
the weights itself, so their size is computed from the configuration and subtracted first. The KV cache then gets a
fixed number of bytes, and vLLM measures nothing: several workers can share a GPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windfall.devices import gpu_memory_lock
from windfall.engine.factory import adapter_bytes, check_kv_dtype, engine_sizes
from windfall.engine.vllm import installed
from windfall.errors import WindfallError
from windfall.free_memory import free_bytes
from windfall.link.messages import EngineSpec, LoadTimes

if TYPE_CHECKING:
    from windfall.engine.vllm.checkpoint import WeightShapes
    from windfall.engine.vllm.engine import VllmEngine

EXTENSION = "windfall.engine.vllm.extension.Extension"
MIN_BLOCKS = 4
"""The KV cache has at least this many blocks: vLLM keeps one free, and prefill needs one more than the tokens."""
GRAPH_ROWS = 512
"""vLLM captures graphs for batches of up to this many rows unless it is told to go further."""
RECORDER = ("AuxOutput", "outed-experts", "outed_experts")
"""Words of vLLM's errors where it cannot record the experts of tokens: with its first model runner from 0.32 on, and
with its second one before."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


def build(
    spec: EngineSpec,
    device: str,
    *,
    share: float = 0.4,
    tensor_parallel: int = 1,
    version: int = 0,
    own_sampler: bool = True,
    eager: bool = False,
) -> tuple[VllmEngine, int, LoadTimes]:
    """Build the engine. Returns it, its number of slots, and how long that took. Its weights are set by a swap. For
    `own_sampler` see VllmEngine. `eager`: capture no graphs."""
    began_s = time.monotonic()
    installed.check(device)
    installed.prepare()
    from windfall.engine.vllm import adapters
    from windfall.engine.vllm.checkpoint import WeightShapes
    from windfall.engine.vllm.engine import VllmEngine
    from windfall.engine.vllm.sampling import NO_DRAFTS

    if spec.speculation != "off":
        print(f"vLLM drafts no tokens: {NO_DRAFTS}", file=sys.stderr, flush=True)
    if spec.deterministic:
        what = "run.deterministic needs windfall's engine: vLLM's results depend on the batch"
        raise WindfallError(what, where="engine.name", fix="Use engine.name = 'windfall'.")
    check_kv_dtype(spec, device)
    shapes = WeightShapes(json.loads(spec.model_config))
    token_bytes = cache_bytes(shapes.config, "float8" if spec.kv_dtype == "fp8" else spec.dtype, tensor_parallel)
    weights = shapes.parameters * ITEM_BYTES[spec.dtype] // tensor_parallel
    weights += adapter_bytes(spec, shapes.shapes, ITEM_BYTES[spec.dtype])
    on_cpu = device == "cpu"
    with gpu_memory_lock(device):
        free = free_bytes(device)
        # All ranks have the same share of every token, so the sizes of one rank are those of all.
        running, kv_tokens = engine_sizes(spec, token_bytes, device, share * max(0.0, 1 - weights / max(free, 1)))
        options: dict[str, Any] = {
            "dtype": spec.dtype,
            "kv_cache_memory_bytes": max(kv_tokens, MIN_BLOCKS * (128 if on_cpu else 16)) * token_bytes,
            "max_num_seqs": running,
            "max_num_batched_tokens": max(spec.max_rows, running),
            "enforce_eager": eager or on_cpu,
            "tensor_parallel_size": tensor_parallel,
            **({"kv_cache_dtype": "fp8"} if spec.kv_dtype == "fp8" else {}),
            **(adapters.options(spec.adapters, spec.adapter_rank) if spec.adapters else {}),
        }
        if not on_cpu:
            options["gpu_memory_utilization"] = _gpu_share(weights + kv_tokens * token_bytes)
        if running > GRAPH_ROWS and not options["enforce_eager"]:
            options["max_cudagraph_capture_size"] = running
        if tensor_parallel > 1:
            options["distributed_executor_backend"] = "mp"
        experts = spec.experts and bool(shapes.experts)
        try:
            vllm = _start(spec, shapes, {**options, **({"enable_return_routed_experts": True} if experts else {})})
        except WindfallError as e:
            if not experts or not any(word in e.what for word in RECORDER):
                raise
            print(f"vLLM does not record the experts of tokens here: {e.what}", file=sys.stderr, flush=True)
            experts, vllm = False, _start(spec, shapes, options)
    engine = VllmEngine(
        vllm,
        shapes,
        version=version,
        own_sampler=own_sampler,
        tensor_parallel=tensor_parallel,
        adapters=spec.adapters,
        adapter_rank=spec.adapter_rank,
        experts=experts,
    )
    if spec.kv_dtype == "fp8":
        engine.capabilities = replace(engine.capabilities, kv_dtype="fp8")
    try:
        for wanted in spec.samplings:
            engine.check_sampling(wanted, where="rollout or eval")
        if engine.limit < spec.longest:
            what = f"vLLM has room for sequences of {engine.limit} tokens; one response may have {spec.longest}"
            fix = "Raise fleet.worker_memory or --memory, or lower rollout.max_tokens."
            raise WindfallError(what, where="fleet.worker_memory", fix=fix)
    except WindfallError:
        engine.close()
        raise
    return engine, running, LoadTimes(build_s=time.monotonic() - began_s)


def _start(spec: EngineSpec, shapes: WeightShapes, options: dict[str, Any]) -> Any:
    """Build vLLM's own engine with random weights."""
    from vllm import EngineArgs, LLMEngine  # pyright: ignore
    from vllm.compilation import monitor  # pyright: ignore

    # An earlier engine of this process may have left graph capture switched off: model runner V1 switches it on and
    # off around its own capture, and V2 relies on it being on.
    monitor.set_cudagraph_capturing_enabled(True)
    fields = json.loads(spec.model_config)
    fields["architectures"] = fields.get("architectures") or [shapes.architecture]  # vLLM needs the name
    with tempfile.TemporaryDirectory(prefix="windfall-vllm-", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        try:
            arguments = EngineArgs(
                model=folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                generation_config="vllm",
                seed=0,
                logprobs_mode="processed_logprobs",
                worker_extension_cls=EXTENSION,
                disable_log_stats=True,
                max_model_len=-1,
                **options,
            )
            return LLMEngine.from_engine_args(arguments)
        except (ValueError, RuntimeError, NotImplementedError) as e:
            lines = str(e).strip().splitlines() or [type(e).__name__]
            why = next((line.strip() for line in lines if "Value error, " in line), lines[0])
            fix = "Use engine.name = 'windfall', or lower engine.kv_tokens if memory is short."
            raise WindfallError(f"vLLM cannot run this model: {why}", where="engine.name", fix=fix) from e


def cache_bytes(config: Any, dtype: str, tensor_parallel: int = 1) -> int:
    """Bytes of KV cache per token on each rank, if every layer caches keys and values of the same size. `dtype`: of the
    cache. With more ranks than heads, several ranks hold the same head."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * max(1, heads // tensor_parallel) * size * ITEM_BYTES[dtype]


def _gpu_share(needed: int) -> float:
    """The share of the GPU's memory that these bytes are. vLLM does not start if less than this is free."""
    import torch

    return min(0.95, max(0.01, round(needed / torch.cuda.mem_get_info()[1], 3)))
