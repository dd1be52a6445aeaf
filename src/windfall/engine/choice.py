"""Which engine a worker builds, and why: windfall's own or vLLM. Imports neither torch nor vLLM.

    --engine of the worker, else engine.name of the recipe
        "windfall"  GraphEngine on a GPU if it supports the model, else TorchEngine   (factory.py)
        "vllm"      VllmEngine, or an error that says what is missing                 (vllm/factory.py)
        "auto"      the first that applies:
            --tensor-parallel above 1                        vllm: windfall's engines run on one device
            run.deterministic, or a CPU                      windfall
            a GPU, and windfall's GPU engine runs the model  windfall: it is the fastest
            a GPU, and vLLM is installed                     vllm: windfall would run plain torch
            otherwise                                        windfall

The trainer's own engine shares the trainer's weights, so it is always windfall's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from windfall.engine import factory
from windfall.engine.vllm import installed
from windfall.errors import WindfallError
from windfall.link.messages import EngineSpec

EngineName = Literal["auto", "windfall", "vllm"]


@dataclass(frozen=True, slots=True)
class EngineChoice:
    name: Literal["windfall", "vllm"]
    why: str

    def __str__(self) -> str:
        return f"engine: {self.name} ({self.why})"


def choose(spec: EngineSpec, device: str, *, asked: EngineName = "auto", tensor_parallel: int = 1) -> EngineChoice:
    """`asked`: the worker's own option. Raises WindfallError if the wanted engine cannot do what is asked."""
    wanted, where = (asked, "--engine") if asked != "auto" else (spec.engine, "engine.name")
    if tensor_parallel > 1 and wanted == "windfall":
        what = f"windfall's engine runs on one device, but --tensor-parallel is {tensor_parallel}"
        raise WindfallError(what, where="--tensor-parallel", fix="Use --engine vllm, or one worker for each GPU.")
    if wanted == "windfall":
        return EngineChoice("windfall", f"{where} is 'windfall'")
    if wanted == "vllm" or tensor_parallel > 1:
        if spec.deterministic:
            what = "run.deterministic needs windfall's engine: vLLM's results depend on the batch"
            raise WindfallError(what, where=where, fix="Use engine.name = 'windfall', or turn run.deterministic off.")
        installed.check(device)
        why = f"{where} is 'vllm'" if wanted == "vllm" else f"it spans {tensor_parallel} GPUs"
        return EngineChoice("vllm", why)
    return _automatic(spec, device)


def _automatic(spec: EngineSpec, device: str) -> EngineChoice:
    if spec.deterministic:
        return EngineChoice("windfall", "run.deterministic is set")
    if not device.startswith("cuda"):
        return EngineChoice("windfall", "there is no GPU")
    slow = factory.cuda_engine_disabled(spec) or _unsupported(spec)
    if slow is None:
        return EngineChoice("windfall", "its GPU engine runs this model")
    missing = installed.unsupported_reason(device)
    if missing is None:
        return EngineChoice("vllm", f"windfall's GPU engine cannot run this model: {slow}")
    return EngineChoice("windfall", f"plain torch, which is slow: {slow}; {missing}")


def _unsupported(spec: EngineSpec) -> str | None:
    from windfall.engine.cuda import skeleton

    return skeleton.unsupported_reason(json.loads(spec.model_config))
