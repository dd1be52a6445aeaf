"""The adapters of policies as vLLM reads them: a folder in PEFT format for every version, in shared memory if there is
some, so that all ranks can read it.

vLLM knows an adapter by a number and a name, and its prefix cache by the name. So every version of a policy is a new
adapter; the one before it is removed when no request uses it any more. vLLM may read a folder again at any time (it
keeps only as many adapters as it was told), so a folder stays as long as its adapter.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from windfall.errors import WindfallError
from windfall.weights import adapter_folder
from windfall.weights.adapter_folder import AdapterConfig
from windfall.weights.merged import LORA_A, LORA_B, WEIGHT, MergedWeights, is_repeated

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `max_lora_rank` that vLLM accepts."""
SHARED_MEMORY = "/dev/shm"


def options(adapters: int, rank: int) -> dict[str, Any]:
    """Arguments of vLLM's engine. While a version takes the place of another, both are held."""
    fits = next((n for n in RANKS if n >= rank), None)
    if fits is None:
        what = f"vLLM holds adapters of a rank up to {RANKS[-1]}, and the run has one of {rank}"
        raise WindfallError(what, where="lora.rank", fix="Use engine.name = 'windfall', or a lower rank.")
    return {"enable_lora": True, "max_loras": adapters, "max_cpu_loras": adapters + 1, "max_lora_rank": fits}


class AdapterFolders:
    def __init__(self) -> None:
        where = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
        self._root = tempfile.TemporaryDirectory(prefix="windfall-adapters-", dir=where, ignore_cleanup_errors=True)
        self._count = 0
        self._old: list[Any] = []
        self.requests: dict[str, Any] = {}
        """vLLM's request of each policy that has an adapter."""

    def replace(self, vllm: Any, policy: str, weights: MergedWeights, policies: Collection[str]) -> None:
        """Load the adapter of a policy, one of these `policies`, which have adapters from now on. Raises WindfallError,
        and changes nothing, if vLLM refuses it."""
        new = {policy: self._load(vllm, policy, weights)} if weights.pairs else {}
        kept = {name: lora for name, lora in self.requests.items() if name in policies and name != policy}
        self._old += [lora for name, lora in self.requests.items() if name not in kept]
        self.requests = kept | new

    def _load(self, vllm: Any, policy: str, weights: MergedWeights) -> Any:
        from vllm.lora.request import LoRARequest  # pyright: ignore

        ends = [name.removesuffix(WEIGHT) for name in weights.pairs if not is_repeated(name)]
        if ends:
            what = f"vLLM holds no adapter of {ends[0]!r} beside those of other policies"
            fix = "Use engine.name = 'windfall', or adapters of the decoder layers."
            raise WindfallError(what, where=f"policy {policy!r}", fix=fix)
        self._count += 1
        folder = Path(self._root.name) / str(self._count)
        layers = {name.removesuffix(WEIGHT): pair for name, pair in weights.pairs.items()}
        tensors = {name + LORA_A: a for name, (a, _) in layers.items()}
        tensors |= {name + LORA_B: b for name, (_, b) in layers.items()}
        targets = tuple(sorted({layer.rpartition(".")[2] for layer in layers}))
        config = AdapterConfig(rank=weights.rank, alpha=weights.scale * weights.rank, base="", targets=targets)
        adapter_folder.write(folder, config, tensors)
        request = LoRARequest(f"{policy}-{self._count}", self._count, str(folder))
        try:
            vllm.add_lora(request)
        except (ValueError, RuntimeError) as e:
            shutil.rmtree(folder, ignore_errors=True)
            why = str(e).strip().partition("\n")[0] or type(e).__name__
            raise WindfallError(f"vLLM cannot load this adapter: {why}", where=f"policy {policy!r}") from e
        return request

    def forget_old(self, vllm: Any) -> None:
        """Remove adapters that were replaced. No request uses them any more."""
        for request in self._old:
            vllm.remove_lora(request.lora_int_id)
            shutil.rmtree(request.lora_path, ignore_errors=True)
        self._old = []

    def close(self) -> None:
        self._root.cleanup()
