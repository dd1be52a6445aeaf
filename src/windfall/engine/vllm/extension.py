"""What windfall adds to vLLM's worker class. It runs in every rank; `collective_rpc` calls its methods by name.

vLLM makes `Extension` a base class of its worker (`worker_extension_cls`) and refuses an attribute that the worker has
already, so every name begins with `windfall_`.

Loading in place: `model.load_weights` copies into the parameters, which CUDA graphs refer to. That suffices for dense
models on a GPU. Where vLLM changes the layout of weights after it has loaded them (experts; everything on a CPU, whose
matrices are packed and whose parameters are then empty), its layer-wise reload does both again, layer by layer.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from windfall.engine.vllm.checkpoint import to_checkpoint
from windfall.engine.vllm.sampling import WindfallSampler
from windfall.processes.parent_death import die_with_parent
from windfall.weights.shared import SharedTensors


class Extension:
    model_runner: Any

    def windfall_prepare(self, engine_pid: int, own_sampler: bool) -> dict[str, Any]:
        """Called once after the start. Returns facts about this rank."""
        if os.getpid() != engine_pid:
            die_with_parent(engine_pid, signal.SIGKILL)
        runner = self.model_runner
        v2 = runner_is_v2(runner)
        installed = own_sampler and not v2 and _can_replace_sampler(runner)
        if installed:
            runner.sampler = WindfallSampler(runner)
        return {"pid": os.getpid(), "v2": v2, "own_sampler": installed}

    def windfall_load(self, weights: SharedTensors | Mapping[str, Any]) -> list[str]:
        """Copy the weights into the model. Returns the names of parameters that got none."""
        from vllm.config import set_current_vllm_config  # pyright: ignore

        runner = self.model_runner
        model = runner.get_model() if hasattr(runner, "get_model") else runner.model
        found = weights.tensors() if isinstance(weights, SharedTensors) else _each(weights)
        on_gpu = next(model.parameters()).device.type == "cuda"
        given = to_checkpoint(_to_gpu(found) if on_gpu else found)
        missing: set[str] = set()
        with torch.no_grad(), set_current_vllm_config(runner.vllm_config), _unwrapped(model):
            if on_gpu and not _has_experts(model):
                loaded = model.load_weights(given)
                missing = {name for name, _ in model.named_parameters()} - loaded if loaded else set()
            else:
                runner.reload_weights(weights_iterator=given)
        if on_gpu:
            torch.cuda.synchronize()  # the buffer may be overwritten after this
        else:
            _pack_experts(model)
        return sorted(missing)


@contextlib.contextmanager
def _unwrapped(model: Any) -> Iterator[None]:
    """With adapters, vLLM wraps layers: a weight then has another name than in a checkpoint. Within this context, the
    wrapped layers are in the place of their wrappers."""
    wrapped = [(name, m) for name, m in model.named_modules(remove_duplicate=False) if hasattr(m, "base_layer")]
    places = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], m) for name, m in wrapped]
    for parent, last, layer in places:
        parent._modules[last] = layer.base_layer
    try:
        yield
    finally:
        for parent, last, layer in places:
            parent._modules[last] = layer


def runner_is_v2(runner: Any) -> bool:
    """Whether this is vLLM's model runner V2, which draws by (seed, position)."""
    return any("vllm.v1.worker.gpu.model_runner" in base.__module__ for base in type(runner).__mro__)


def _can_replace_sampler(runner: Any) -> bool:
    return all(hasattr(runner, name) for name in ("sampler", "input_batch", "requests", "optimistic_seq_lens_cpu"))


def _has_experts(model: Any) -> bool:
    return any("MoE" in type(module).__name__ for module in model.modules())


def _pack_experts(model: Any) -> None:
    """Pack the experts for the CPU's kernels. vLLM 0.32 does so only when it loads them for the first time: after a
    reload it would compute with matrices in the wrong layout, and report nothing."""
    for module in model.modules():
        experts = getattr(getattr(getattr(module, "quant_method", None), "moe_kernel", None), "fused_experts", None)
        if experts is not None:
            experts.process_weights_after_loading(module)


def _each(weights: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in weights:
        yield name, weights[name]


def _to_gpu(weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """One tensor after the other, copied to the GPU as a whole: experts are then split there."""
    for name, tensor in weights:
        yield name, tensor.cuda(non_blocking=True)
