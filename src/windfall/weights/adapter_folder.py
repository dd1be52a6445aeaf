"""LoRA adapters in the format of Hugging Face PEFT: read and write a folder.

    adapter_config.json          rank, alpha, the adapted layers, the name of the base model
    adapter_model.safetensors    base_model.model.LAYER.lora_A.weight (rank x inputs), ...lora_B.weight (outputs x rank)
                                 of embeddings: ...lora_embedding_A (rank x tokens), ...lora_embedding_B (size x rank)
    windfall/state.json          only in checkpoints of windfall: name and digest of the base model, and more

PEFT multiplies the two matrices of an embedding the other way round than those of a linear layer. In windfall the
matrices of every weight W are A and B with W + scale * B A, whatever the layer, so here those of embeddings are
transposed and change places. If the head or the embeddings are adapted, PEFT also writes their weights without the
adapter (LAYER.base_layer.weight). They must be those of the base; windfall does not write them.

The package peft is not needed. Which layers are adapted is read from the names of the tensors, not from
`target_modules`, which may be a pattern. A key of the configuration is refused by its name if it makes the adapter
compute anything but a product of two matrices for a layer (DoRA, biases, whole modules), or gives some layers
another rank. `lora_dropout` is ignored: it applies only to training with PEFT.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from windfall.errors import WindfallError
from windfall.weights.merged import LORA_A, LORA_B, WEIGHT
from windfall.weights.one_copy import copy_together

if TYPE_CHECKING:
    import torch

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
STATE = "windfall/state.json"
PREFIX = "base_model.model."
EMBEDDING = "embed_tokens"
"""The last part of the name of a model's embedding of tokens."""
EMBEDDING_A, EMBEDDING_B, BASE_WEIGHT = ".lora_embedding_A", ".lora_embedding_B", ".base_layer.weight"
MATRICES = (LORA_A, LORA_B, EMBEDDING_A, EMBEDDING_B)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "alora_invocation_tokens": (None, []), "alpha_pattern": (None, {}), "bias": (None, "none"),
    "fan_in_fan_out": (None, False), "layer_replication": (None, []), "lora_bias": (None, False),
    "modules_to_save": (None, []), "rank_pattern": (None, {}), "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}), "use_bdlora": (None, False, {}), "use_dora": (None, False),
    "use_qalora": (None, False),
}  # fmt: skip
"""Keys of the configuration that change the computation, with the values that do not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    rank: int
    alpha: float
    base: str
    """Name of the base model: a folder or a hub id. May be empty."""
    targets: tuple[str, ...] = ()
    """Adapted layers, by their full names or the last parts; only for other programs that read the folder."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterBase:
    """The model that the adapter in a checkpoint was trained with."""

    path: str
    """Its name in the recipe."""
    dtype: str
    """The dtype in which the run computes, and in which the digest was computed."""
    digest: str
    """Digest of its weights, see `base_digest`."""


def read_base(folder: Path) -> AdapterBase | None:
    """The base model of the adapter in a checkpoint; None for an adapter that is not a checkpoint of windfall."""
    try:
        return AdapterBase(**json.loads((folder / STATE).read_text())["base"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def is_adapter(folder: Path) -> bool:
    """Whether this folder holds an adapter, not a model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def read_config(folder: Path) -> AdapterConfig:
    path = folder / CONFIG
    if not path.is_file():
        fix = "Give a folder that PEFT's save_pretrained has written, or a checkpoint of a run with [train.lora]."
        raise WindfallError(f"no adapter: this folder has no {CONFIG}", where=str(folder), fix=fix)
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        kind, rank, alpha = fields.get("peft_type"), fields.get("r"), fields.get("lora_alpha")
        if kind != "LORA":
            raise WindfallError(f"peft_type = {kind!r} is not supported", where=str(path), fix="Use a LoRA adapter.")
        if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not 0 < alpha < math.inf:
            raise WindfallError(f"r = {rank!r} and lora_alpha = {alpha!r} must be above zero", where=str(path))
    except (OSError, ValueError, AttributeError, RecursionError) as e:
        raise WindfallError(f"cannot be read: {type(e).__name__}: {e}", where=str(path)) from e
    odd = [key for key, values in NEUTRAL.items() if fields.get(key) not in values]
    if odd:
        what = f"{odd[0]} = {fields[odd[0]]!r} is not supported"
        raise WindfallError(what, where=str(path), fix="Use a plain LoRA adapter: one rank, no biases, no modules.")
    if fields.get("use_rslora"):  # the same adapter with the usual scale of alpha / rank
        alpha = alpha * math.sqrt(rank)
    targets = fields.get("target_modules")
    return AdapterConfig(
        rank=rank,
        alpha=float(alpha),
        base=str(fields.get("base_model_name_or_path") or ""),
        targets=tuple(sorted(map(str, targets))) if isinstance(targets, list) else (),
    )


def check_asked(folder: Path, config: AdapterConfig, *, rank: int | None, alpha: float | None) -> None:
    """Refuse an adapter in this folder that does not have the rank and the alpha that the recipe asks for, if any."""
    for key, asked, has in (("rank", rank, config.rank), ("alpha", alpha, config.alpha)):
        if asked is not None and asked != has:
            what = f"train.lora.{key} is {asked:g}, but this adapter has {key} {has:g}"
            fix = f"Remove train.lora.{key} from the recipe to use that of the adapter."
            raise WindfallError(what, where=str(folder), fix=fix)


def layers(folder: Path) -> set[str]:
    """The names of the layers that the adapter changes."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(folder / TENSORS), "pt") as file:
            names = [name.removeprefix(PREFIX) for name in file.keys()]  # noqa: SIM118
    except (OSError, SafetensorError) as e:
        raise WindfallError(f"cannot be read: {e}", where=str(folder / TENSORS)) from e
    return {name.removesuffix(ending) for name in names for ending in MATRICES if name.endswith(ending)}


def read_tensors(folder: Path, base: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as LAYER.lora_A.weight and LAYER.lora_B.weight. `base`: the weights of the base model."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / TENSORS
    if not path.is_file():
        fix = "Save the adapter with safe_serialization=True: windfall reads no pickled files."
        raise WindfallError("the file is missing", where=str(path), fix=fix)
    try:
        tensors = load_file(str(path))
    except (OSError, SafetensorError) as e:
        raise WindfallError(f"cannot be read: {e}", where=str(path), fix="Restore the file from a copy.") from e
    out: dict[str, torch.Tensor] = {}
    for name, t in ((name.removeprefix(PREFIX), t) for name, t in tensors.items()):
        if name.endswith(BASE_WEIGHT):
            _check_equal(name.removesuffix(BASE_WEIGHT) + WEIGHT, t, base, path)
        elif name.endswith(EMBEDDING_A):
            out[name.removesuffix(EMBEDDING_A) + LORA_B] = t.T
        elif name.endswith(EMBEDDING_B):
            out[name.removesuffix(EMBEDDING_B) + LORA_A] = t.T
        else:
            out[name] = t
    odd = next((name for name in out if not name.endswith((LORA_A, LORA_B))), None)
    if odd is not None or not out:
        what = f"the tensor {odd!r} is not a LoRA matrix of a layer" if odd else "there are no LoRA matrices"
        raise WindfallError(what, where=str(path), fix="Use a plain LoRA adapter.")
    return out


def _check_equal(name: str, saved: torch.Tensor, base: Mapping[str, torch.Tensor], path: Path) -> None:
    """Refuse a weight that was saved with the adapter and is not that of the base. One of both may be rounded."""
    own = base[name].detach().cpu() if name in base else saved.new_empty(0)
    alike = saved.shape == own.shape and (
        bool((saved.to(own.dtype) == own).all()) or bool((own.to(saved.dtype) == saved).all())
    )
    if not alike:
        what = f"the adapter comes with another {name!r} than its base has"
        raise WindfallError(what, where=str(path), fix="Use the base model of this adapter, unchanged.")


def write(folder: Path, config: AdapterConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write both files. `tensors`: named as `read_tensors` returns them."""
    from safetensors.torch import save_file

    alpha = int(config.alpha) if config.alpha == int(config.alpha) else config.alpha
    fields = {
        "base_model_name_or_path": config.base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": config.rank,
        "target_modules": list(config.targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(fields, indent=2, sort_keys=True), encoding="utf-8")
    named = dict(map(_as_peft, tensors, copy_together(list(tensors.values()), "cpu")))
    save_file(named, str(folder / TENSORS), metadata={"format": "pt"})


def _as_peft(name: str, t: torch.Tensor) -> tuple[str, torch.Tensor]:
    layer = name.removesuffix(LORA_A).removesuffix(LORA_B)
    if layer.rpartition(".")[2] == EMBEDDING:
        name, t = layer + (EMBEDDING_B if name.endswith(LORA_A) else EMBEDDING_A), t.T
    return PREFIX + name, t.contiguous()


def base_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """A digest of names, dtypes, shapes and values of a model's weights."""
    import torch

    state = xxhash.xxh3_128()
    for name, t in sorted(tensors.items()):
        state.update(f"{name} {t.dtype} {tuple(t.shape)}\n".encode())
        state.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return state.hexdigest()


def check_base(folder: Path, base: AdapterBase) -> None:
    """Raise WindfallError if the adapter in this folder was trained with other weights than those of `base`. A digest
    in another dtype cannot be compared, and adapters that windfall did not write have none."""
    before = read_base(folder)
    if before is not None and before.dtype == base.dtype and before.digest != base.digest:
        what = f"the weights of {base.path} are not those that this adapter was trained with"
        raise WindfallError(what, where=str(folder), fix="Restore the base model as it was.")
