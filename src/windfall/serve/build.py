"""Builds the engines of a host: that of serving at the start, and that of the rollout when a run has sent its spec."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from windfall.devices import choose_matmul_library
from windfall.engine import blocks, factory
from windfall.engine.paged import PagedEngine
from windfall.errors import WindfallError
from windfall.free_memory import free_bytes
from windfall.link.messages import EngineSpec
from windfall.serve.host import ROLLOUT, SERVING, Host
from windfall.serve.slo import LEAST_ROWS, Objectives

if TYPE_CHECKING:
    from windfall.engine.cuda.ready_weights import ReadyWeights

EngineKind = Literal["auto", "graph"]
"""`graph`: GraphEngine on every device, for tests without a GPU."""
LENT_SHARE = 0.8
"""Share of the memory that a rollout may use at most: the rest is headroom for serving."""

MODEL_SHARE = 0.8
"""Upper limit for the rollout's weights, as a share of the free memory: serving needs some for its steps, and a machine
without memory ends the service."""

LEAST_BLOCKS = 32
"""Least number of blocks. Fewer blocks are larger: pages of a rollout model with more layers fit into them, too."""


GPU_ROWS = 8192
"""Rows of the largest step of serving on a GPU, if it is fast enough for them (slo.py)."""


def serving_spec(
    model: Any, dtype: str, *, context: int, max_running: int, kv_tokens: int, device: str = "cpu"
) -> EngineSpec:
    return EngineSpec(
        model_config=model.config.to_json_string(use_diff=False),
        dtype=dtype,
        kv_tokens=kv_tokens,
        page_size=16,
        max_running=max_running,
        max_rows=GPU_ROWS if device.startswith("cuda") else LEAST_ROWS,
        deterministic=False,
        longest=context,
        wanted=max_running,
    )


def build_host(
    spec: EngineSpec,
    model: Any,
    device: str,
    objectives: Objectives,
    *,
    share: float = 0.4,
    engine: EngineKind = "auto",
    tell: Callable[[str], None] = lambda line: None,
) -> Host:
    """A host with an engine for serving. `share`: share of the free memory for the KV caches of both tenants, unless
    the spec says how many tokens serving's KV cache has. `tell` is called with what takes time, before it begins."""
    from windfall.engine.torch.arena import Arena

    tell("comparing the engine with transformers on a small model of this kind ...")
    factory.self_test(spec, device, model)
    if device == "cpu":
        choose_matmul_library()
    token_bytes = factory.token_bytes(model)
    running, kv_tokens = factory.engine_sizes(spec, token_bytes, device, share)
    layout = blocks.layout(kv_tokens * token_bytes, spec.page_size * token_bytes, least_blocks=LEAST_BLOCKS)
    arena = Arena(layout, device)
    on_gpu = "; compiling kernels and capturing CUDA graphs" if device.startswith("cuda") else ""
    tell(f"building the engine: a KV cache of {kv_tokens:,} tokens{on_gpu} ...")
    kv = arena.join(SERVING, token_bytes=token_bytes, page_size=spec.page_size, priority=True)
    made = _engine(spec, model, kv, device, running, engine)
    return Host(made, arena, objectives, max_rows=spec.max_rows)


def build_rollout(host: Host, spec: EngineSpec, device: str, *, engine: EngineKind = "auto") -> tuple[Any, int]:
    """The engine of the rollout tenant, and its number of slots. Do not call this in the host's thread. On a GPU, the
    weights are held ready in host memory (`engine.ready_weights`)."""
    host.arena.use_device()
    if spec.engine == "vllm":
        raise WindfallError("a lender runs windfall's engine, and the run asks for vLLM", where="engine.name")
    model, ready = _rollout_model(spec, device, engine)
    factory.self_test(spec, device, model)
    with contextlib.ExitStack() as undo:  # the blocks must be free whatever happens
        token_bytes = factory.token_bytes(model)
        kv = host.call(lambda: host.arena.join(ROLLOUT, token_bytes=token_bytes, page_size=spec.page_size)).result()
        undo.callback(lambda: host.call(kv.leave).result())
        room = int(kv.pages.capacity * LENT_SHARE) * spec.page_size
        if room < spec.longest:
            what = f"the lent KV cache has room for {room} tokens, and one response may have {spec.longest}"
            raise WindfallError(what, where="windfall serve --lend", fix="Raise --memory or --kv-tokens.")
        running = min(spec.max_running or spec.wanted, 256)  # how many fit is reported all the time (capacity.py)
        made = _engine(spec, model, kv, device, running, engine)
        made.limit = min(made.limit, room)
        made.ready_weights = ready
        undo.pop_all()
    return made, running


def _rollout_model(spec: EngineSpec, device: str, engine: EngineKind) -> tuple[Any, ReadyWeights | None]:
    """The run's model without weights, and the host memory from which it gets them (None: it gets them directly)."""
    import torch

    from windfall.engine.cuda import skeleton
    from windfall.engine.cuda.ready_weights import ReadyWeights, weight_bytes

    fields = json.loads(spec.model_config)
    on_gpu = device.startswith("cuda") and factory.cuda_engine_disabled(spec) is None
    if not (on_gpu or engine == "graph") or skeleton.unsupported_reason(fields) is not None:
        check_room(factory.model_bytes(fields, spec.dtype), device)
        return factory.build_full_model(fields, spec.dtype, device), None
    dtype = getattr(torch, spec.dtype)
    nbytes = weight_bytes(fields, dtype)
    check_room(nbytes, "cpu")
    check_room(nbytes, device)
    ready = ReadyWeights(fields, dtype=dtype, device=device)
    return ready.model, ready


def check_room(nbytes: int, device: str) -> None:
    """Raise WindfallError unless the run's weights leave serving enough of the free memory of a device."""
    free = free_bytes(device)
    if nbytes > MODEL_SHARE * free:
        what = f"the run's weights take {nbytes / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free on {device}"
        fix = f"Lower --memory, or lend a larger device: at most {MODEL_SHARE:.0%} may be used."
        raise WindfallError(what, where="windfall serve --lend", fix=fix)


def _engine(spec: EngineSpec, model: Any, kv: Any, device: str, running: int, engine: EngineKind) -> PagedEngine:
    """GraphEngine where it runs this model, with all its graphs; otherwise TorchEngine."""
    on_gpu = device.startswith("cuda") and factory.cuda_engine_refusal(spec, model) is None
    how: dict[str, Any] = {
        "kv_tokens": 0,
        "max_running": running,
        "max_rows": spec.max_rows,
        "kv": kv,
    }
    if on_gpu or engine == "graph":
        from windfall.engine.cuda.engine import GraphEngine
        from windfall.engine.cuda.splits import PrefixSharing

        # Groups of siblings would need graphs of their own, which would be captured while requests wait.
        made = GraphEngine(model, **how, longest=spec.longest, sharing=PrefixSharing(max_rows=0))
        made.warm_sizes(spec.longest)
        return made
    from windfall.engine.torch.engine import TorchEngine

    return TorchEngine(model, **how, deterministic=spec.deterministic)
