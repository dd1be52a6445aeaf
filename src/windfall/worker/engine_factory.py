"""From what the controller says to an engine. The model is built from its configuration; its weights are pulled.

On a GPU, models that `windfall.engine.cuda` knows are run by `GraphEngine`; all others, and everything on a CPU, by
`TorchEngine`. A worker's `GraphEngine` needs no transformers, which takes seconds to import: where the configuration
says all there is to know, nothing here imports it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from typing import Any

from windfall.devices import choose_matmul_library, gpu_memory_lock
from windfall.errors import WindfallError
from windfall.free_memory import free_bytes
from windfall.link.messages import EngineSpec, LoadTimes
from windfall.models import load
from windfall.selftest import shrink, verdict


def model_for(spec: EngineSpec, device: str) -> Any:
    """A module with weights that mean nothing yet: for a GPU, if that is enough, their places alone."""
    import torch

    fields = json.loads(spec.model_config)
    if device.startswith("cuda") and unwanted(spec) is None:
        from windfall.engine.cuda import skeleton

        why = skeleton.unsupported_reason(fields)
        if why is None:
            return skeleton.ModelSkeleton(fields, dtype=getattr(torch, spec.dtype), device=device)
        print(f"transformers builds the model, which takes a while: {why}", file=sys.stderr, flush=True)
    return whole(fields, spec.dtype, device)


def whole(fields: dict[str, Any], dtype: str, device: str) -> Any:
    """The transformers module."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from windfall.engine.torch import attention

    how: dict[str, Any] = {"dtype": getattr(torch, dtype), "attn_implementation": attention.NAME}
    try:
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        model = hollow(config, device, **how)
        if model is None:
            with torch.device(device):
                model = AutoModelForCausalLM.from_config(config, **how)
    except ValueError as e:
        raise WindfallError(f"the run's model cannot be built here: {e}", fix="Install the run's transformers.") from e
    except Exception as e:  # fault boundary: model code of any kind
        raise load.unsupported(e, "model.path") from e
    return model.to(device).eval()


def hollow(config: Any, device: str, **how: Any) -> Any:
    """The module without the time it takes to give it random weights; None if it computes anything but the rotary
    frequencies when it is made, since that would be lost, too."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, **how)
    rotary = getattr(getattr(model, "model", None), "rotary_emb", None)
    known = {f"model.rotary_emb.{name}" for name, _ in rotary.named_buffers()} if rotary is not None else set()
    if {name for name, _ in model.named_buffers()} != known:
        return None
    model.to_empty(device=device)
    model.tie_weights()  # each of the tied ones got memory of its own
    if rotary is not None:
        model.model.rotary_emb = type(rotary)(config=model.config).to(device)
    return model


def token_bytes(model: Any) -> int:
    """What the KV cache holds of one token."""
    from windfall.engine.cuda import skeleton

    config = model.config
    if isinstance(model, skeleton.ModelSkeleton):
        return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    from windfall.engine.torch.attention import cache_shapes

    return sum(s.elements for s in cache_shapes(model)) * model.dtype.itemsize


def sizes(spec: EngineSpec, token_bytes: int, device: str, share: float) -> tuple[int, int]:
    """(responses at once, tokens in the KV cache), from what was asked for or from this machine's memory."""
    running = spec.max_running or min(1024 if device.startswith("cuda") else 256, spec.wanted)
    if spec.kv_tokens:
        return running, spec.kv_tokens
    free = free_bytes(device)
    fits = min(max(2, running) * spec.longest, int(free * share) // token_bytes)
    if fits < spec.longest:
        raise WindfallError(
            f"the KV cache may have {share:.0%} of the {free / 2**30:.1f} GiB that are free on {device}, which is room "
            f"for {fits} tokens; one response may have {spec.longest}", where="fleet.worker_memory",
            fix="Raise it, run fewer workers on this machine, or lower rollout.max_tokens.",
        )  # fmt: skip
    return running, fits


def engine_for(
    spec: EngineSpec, device: str, *, model: Any = None, share: float = 0.4, version: int = 0
) -> tuple[Any, int]:
    """An engine on this device that takes at most `share` of its free memory, and how many responses it runs at once.
    `model`: use this one. Nobody else may use it meanwhile: a GPU engine lays its weights out anew."""
    return timed(spec, device, model=model, share=share, version=version)[:2]


def timed(
    spec: EngineSpec, device: str, *, model: Any = None, share: float = 0.4, version: int = 0
) -> tuple[Any, int, LoadTimes]:
    """The same, and how long its parts took."""
    import torch

    try:
        return _timed(spec, device, model, share, version)
    except torch.OutOfMemoryError as e:
        said = str(e).partition(". ")[0]
        fix = "Run fewer workers on this GPU, or lower fleet.worker_memory or engine.kv_tokens."
        raise WindfallError(f"not enough memory for the engine: {said}", where=device, fix=fix) from e


def _timed(spec: EngineSpec, device: str, given: Any, share: float, version: int) -> tuple[Any, int, LoadTimes]:
    began_s = time.monotonic()
    model = model_for(spec, device) if given is None else given
    check(spec, device, model)
    why = "it is not a GPU" if not device.startswith("cuda") else unfit(spec, model)
    if device == "cpu":
        choose_matmul_library(model, deterministic=spec.deterministic)
    # One at a time looks how much is free, and takes its part of it.
    with gpu_memory_lock(device):
        running, kv_tokens = sizes(spec, token_bytes(model), device, share)
        how: dict[str, Any] = {
            "kv_tokens": kv_tokens, "page_size": spec.page_size, "max_running": running, "max_rows": spec.max_rows,
            "version": version,
        }  # fmt: skip
        engine = _graph_engine(spec, model, how) if why is None else None
    if engine is not None:
        built_s = time.monotonic()
        why = _warmed(engine, running, spec.longest)
        if why is None:
            return engine, running, LoadTimes(build_s=built_s - began_s, warm_s=time.monotonic() - built_s)
        engine.sleep()
        del engine
        model = whole(json.loads(spec.model_config), spec.dtype, device) if given is None else given
    from windfall.engine.torch.engine import TorchEngine

    if device.startswith("cuda"):
        print(f"the slower engine runs this model: {why}", file=sys.stderr, flush=True)
    slower = TorchEngine(model, **how, deterministic=spec.deterministic)
    # What was tested holds up to there; a later prompt may be longer than those that the run has seen.
    slower.limit = min(slower.limit, shrink.fixed_rope_tokens(json.loads(spec.model_config)) or slower.limit)
    return slower, running, LoadTimes(build_s=time.monotonic() - began_s)


def check(spec: EngineSpec, device: str, model: Any) -> str:
    """Raise WindfallError unless the engine that runs this model here computes what transformers computes: see
    selftest. Returns what to tell workers, who need not find it out again where they have the same code and device."""

    def make(small: Any, **how: Any) -> Any:
        if device.startswith("cuda") and unfit(spec, small) is None:
            from windfall.engine.cuda.engine import GraphEngine

            return GraphEngine(small, **how)
        from windfall.engine.torch.engine import TorchEngine

        return TorchEngine(small, **how, deterministic=spec.deterministic)

    return verdict.check_engine(
        json.loads(spec.model_config), make, device=device, longest=spec.longest, deterministic=spec.deterministic,
        names=model.state_dict(), checked=spec.checked,
    )  # fmt: skip


def _graph_engine(spec: EngineSpec, model: Any, how: dict[str, Any]) -> Any:
    from windfall.engine.cuda.engine import GraphEngine

    # What is known of the longest is from the first tasks; the tables have room for whatever cache and model do.
    positions = getattr(model.config, "max_position_embeddings", None) or how["kv_tokens"]
    return GraphEngine(model, **how, longest=min(how["kv_tokens"], max(positions, 2 * spec.longest)))


def _warmed(engine: Any, running: int, longest: int) -> str | None:
    """None; or why its kernels cannot run here."""
    from triton.runtime.errors import OutOfResources  # pyright: ignore[reportMissingImports]

    try:
        engine.warm(1, running, longest=longest)
    except OutOfResources as e:
        return f"a kernel does not fit this GPU ({e})"
    return None


def unfit(spec: EngineSpec, model: Any) -> str | None:
    """Why the GPU engine cannot run it; None: it can."""
    from windfall.engine.cuda.decoder import unsupported_reason

    return unwanted(spec) or unsupported_reason(model)


def unwanted(spec: EngineSpec) -> str | None:
    """Why the GPU engine is not to run this, whatever the model."""
    if spec.deterministic:
        return "run.deterministic asks for the same bits"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None
