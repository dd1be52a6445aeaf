"""Builds the engine that an EngineSpec describes, from the model's configuration. The weights are pulled later.

On a GPU, `GraphEngine` runs the models that `windfall.engine.cuda` supports. `TorchEngine` runs all other models, and
everything on a CPU. A worker's `GraphEngine` does not need transformers, which takes seconds to import: if the
configuration is sufficient, nothing here imports it.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from windfall.devices import choose_matmul_library, gpu_memory_lock
from windfall.engine.selftest import shrink, verdict
from windfall.errors import WindfallError
from windfall.free_memory import free_bytes
from windfall.link.messages import EngineSpec, LoadTimes
from windfall.models import load
from windfall.weights.adapter_folder import EMBEDDING
from windfall.weights.merged import WEIGHT, is_repeated

_building = threading.Lock()
"""While one thread builds a model without random weights, another must not: transformers replaces functions of torch,
and two threads that do so at the same time leave them replaced."""

FP8_CAPABILITY = (8, 9)
"""Least compute capability (Ada, Hopper) of GPUs that convert fp8 in hardware."""


def build_model(spec: EngineSpec, device: str) -> Any:
    """Build a module without meaningful weights. If `GraphEngine` will run it, only the weight skeleton is built."""
    import torch

    fields = json.loads(spec.model_config)
    if device.startswith("cuda") and cuda_engine_disabled(spec) is None:
        from windfall.engine.cuda import skeleton

        why = skeleton.unsupported_reason(fields)
        if why is None:
            return skeleton.ModelSkeleton(fields, dtype=getattr(torch, spec.dtype), device=device)
        print(f"building the model with transformers, which takes longer: {why}", file=sys.stderr, flush=True)
    return build_full_model(fields, spec.dtype, device)


def build_full_model(fields: dict[str, Any], dtype: str, device: str) -> Any:
    """Build transformers' module. No time is spent on random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    from windfall.models import attention

    how: dict[str, Any] = {"dtype": getattr(torch, dtype), "attn_implementation": attention.NAME}
    try:
        with _building, no_init_weights(), torch.device(device):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), **how)
        model.tie_weights()
    except ValueError as e:
        fix = "Install the version of transformers that the run uses."
        raise WindfallError(f"the run's model cannot be built here: {e}", fix=fix) from e
    except Exception as e:  # fault boundary: model code may raise anything
        raise load.unsupported(e, "model.path") from e
    return model.to(device).eval()


def model_bytes(fields: dict[str, Any], dtype: str) -> int:
    """Bytes that the weights of this model take. Allocates nothing."""
    return sum(p.numel() * p.element_size() for p in build_full_model(fields, dtype, "meta").parameters())


def token_bytes(model: Any, kv_dtype: str = "auto") -> int:
    """Bytes of KV cache per token. `kv_dtype`: as in EngineSpec."""
    from windfall.engine.cuda import skeleton

    config, item_bytes = model.config, 1 if kv_dtype == "fp8" else model.dtype.itemsize
    if isinstance(model, skeleton.ModelSkeleton):
        return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * item_bytes
    from windfall.models.attention import cache_shapes

    return sum(s.elements for s in cache_shapes(model)) * item_bytes


def adapter_bytes(spec: EngineSpec, shapes: Mapping[str, Sequence[int]], item_bytes: int) -> int:
    """Bytes that the adapters of the spec take beside a model with these weights, if they change all matrices of its
    decoder layers, the head and the embeddings."""
    from windfall.engine.cuda.adapters import padded_rank

    sizes = sum(sum(shape) for name, shape in shapes.items() if len(shape) == 2 and is_repeated(name))
    sizes += sum(2 * sum(shape) for name, shape in shapes.items() if name.endswith(EMBEDDING + WEIGHT))
    return spec.adapters * padded_rank(spec.adapter_rank) * sizes * item_bytes


def engine_sizes(spec: EngineSpec, token_bytes: int, device: str, share: float, reserved: int = 0) -> tuple[int, int]:
    """(responses decoded at once, tokens in the KV cache): what the spec says, or else what fits into this machine's
    memory. `share` is the share of the free memory that the KV cache may use, without `reserved` bytes of it."""
    running = spec.max_running or min(1024 if device.startswith("cuda") else 256, spec.wanted)
    if spec.kv_tokens:
        return running, spec.kv_tokens
    free = max(0, free_bytes(device) - reserved)
    fits = min(max(2, running) * spec.longest, int(free * share) // token_bytes)
    if fits < spec.longest:
        raise WindfallError(
            f"the KV cache may use {share:.0%} of the {free / 2**30:.1f} GiB that are free on {device}, which is room "
            f"for {fits} tokens; one response may have {spec.longest}",
            where="fleet.worker_memory",
            fix="Raise it, run fewer workers on this machine, or lower rollout.max_tokens.",
        )
    return running, fits


def build_engine(spec: EngineSpec, device: str, *, model: Any = None, share: float = 0.4) -> tuple[Any, int]:
    """Build an engine that uses at most `share` of the free memory. Returns it and its number of slots. If a `model` is
    given, no other code may use it meanwhile, because a GPU engine changes the layout of its weights."""
    return build_engine_timed(spec, device, model=model, share=share)[:2]


def build_engine_timed(
    spec: EngineSpec, device: str, *, model: Any = None, share: float = 0.4
) -> tuple[Any, int, LoadTimes]:
    """Like `build_engine`, but also returns how long the parts took."""
    import torch

    try:
        return _build_engine(spec, device, model, share)
    except torch.OutOfMemoryError as e:
        why = str(e).partition(". ")[0]
        fix = "Run fewer workers on this GPU, or lower fleet.worker_memory or engine.kv_tokens."
        raise WindfallError(f"not enough memory for the engine: {why}", where=device, fix=fix) from e


def _build_engine(spec: EngineSpec, device: str, model: Any, share: float) -> tuple[Any, int, LoadTimes]:
    began_s = time.monotonic()
    check_kv_dtype(spec, device)
    model = build_model(spec, device) if model is None else model
    self_test(spec, device, model)
    if device == "cpu":
        choose_matmul_library()
    # Only one process at a time may measure the free memory and allocate its share.
    with gpu_memory_lock(device):
        reserved = adapter_bytes(spec, {n: p.shape for n, p in model.named_parameters()}, model.dtype.itemsize)
        running, kv_tokens = engine_sizes(spec, token_bytes(model, spec.kv_dtype), device, share, reserved)
        engine = make_engine(
            spec,
            device,
            model,
            kv_tokens=kv_tokens,
            page_size=spec.page_size,
            max_running=running,
            max_rows=spec.max_rows,
        )
    # The self-test is valid up to this length; a later prompt may be longer than those that the run has seen.
    engine.limit = min(engine.limit, shrink.fixed_rope_tokens(json.loads(spec.model_config)) or engine.limit)
    built_s = time.monotonic()
    engine.warm(1, running, longest=spec.longest)
    return engine, running, LoadTimes(build_s=built_s - began_s, warm_s=time.monotonic() - built_s)


def make_engine(spec: EngineSpec, device: str, model: Any, **how: Any) -> Any:
    """GraphEngine on a GPU that can run this model with it, otherwise TorchEngine."""
    how |= {"adapters": spec.adapters, "adapter_rank": spec.adapter_rank}
    if device.startswith("cuda"):
        why = cuda_engine_refusal(spec, model)
        if why is None:
            import torch

            from windfall.engine.cuda.engine import GraphEngine

            # `spec.longest` covers only the first tasks: tables have room for as much as cache and model allow.
            positions = getattr(model.config, "max_position_embeddings", None) or how["kv_tokens"]
            return GraphEngine(
                model,
                **how,
                longest=min(how["kv_tokens"], max(positions, 2 * spec.longest)),
                speculation=spec.speculation != "off",
                text_tokens=spec.longest,
                kv_dtype=torch.float8_e4m3fn if spec.kv_dtype == "fp8" else None,
            )
        if spec.kv_dtype == "fp8":
            raise no_fp8(f"windfall's GPU engine cannot run this model ({why}), and plain torch has no fp8 cache")
        print(f"using the slower engine for this model: {why}", file=sys.stderr, flush=True)
    from windfall.engine.torch.engine import TorchEngine

    speculation = spec.speculation != "off"
    return TorchEngine(model, **how, deterministic=spec.deterministic, speculation=speculation, experts=spec.experts)


def check_kv_dtype(spec: EngineSpec, device: str) -> None:
    """Raise WindfallError if the spec asks for a KV cache in fp8 that this device cannot have."""
    if spec.kv_dtype != "fp8":
        return
    if spec.deterministic:
        raise no_fp8("run.deterministic is set, which needs plain torch")
    if not device.startswith("cuda"):
        raise no_fp8(f"it needs a GPU, and this worker runs on {device}")
    import torch

    have = torch.cuda.get_device_capability(device)
    if have < FP8_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        need, has = (".".join(map(str, version)) for version in (FP8_CAPABILITY, have))
        raise no_fp8(f"it needs a GPU of compute capability {need} or higher, and {name} has {has}")


def no_fp8(why: str) -> WindfallError:
    what = f"the KV cache cannot be in fp8 here: {why}"
    return WindfallError(what, where="engine.kv_dtype", fix="Set engine.kv_dtype = 'auto', or use other GPUs.")


def self_test(spec: EngineSpec, device: str, model: Any) -> str:
    """Raise WindfallError unless the engine for this model and device computes the same as transformers (see selftest).
    Returns a record for the workers: those with the same code and device need not repeat the test. The test is about
    the model: it drafts nothing, and its KV cache has the dtype of the model."""
    tested = msgspec.structs.replace(spec, speculation="off", kv_dtype="auto")
    if spec.adapters:
        tested = msgspec.structs.replace(tested, adapters=verdict.ADAPTERS, adapter_rank=verdict.ADAPTER_RANK)
    return verdict.check_engine(
        json.loads(spec.model_config),
        functools.partial(make_engine, tested, device),
        device=device,
        longest=spec.longest,
        deterministic=spec.deterministic,
        names=model.state_dict(),
        adapters=spec.adapters > 0,
        checked=spec.checked,
    )


def cuda_engine_refusal(spec: EngineSpec, model: Any) -> str | None:
    """Why the GPU engine cannot run this model, or None if it can."""
    from windfall.engine.cuda.decoder import unsupported_reason

    return cuda_engine_disabled(spec) or unsupported_reason(model)


def cuda_engine_disabled(spec: EngineSpec) -> str | None:
    """Why the GPU engine must not run any model with this spec, or None if it may."""
    if spec.deterministic:
        return "run.deterministic is set"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None
