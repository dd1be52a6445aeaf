"""Adapters (LoRA): the weights of the model stay as they are, and two small matrices per adapted layer are trained.

    y = x @ W.T + scale * (x @ A.T) @ B.T        A: rank x inputs    B: outputs x rank    scale = alpha / rank

`attach` replaces the adapted layers of a module in place. A `LoraLinear` holds the very parameters of the layer that it
replaces, under the same names, so everything that reads weights by name finds the base unchanged. A `LoraEmbedding`
adds to the matrix of the embeddings in the same way: the row of a token is W[token] + scale * B[token] @ A. If head and
embeddings are one matrix in the base, an adapter of one of them has no effect on the other.

Rules:
- a module may have adapters of several policies, on the same layers or on others. The weights of the base exist once.
  `Adapters.use` says whose have an effect; those of the others get no gradient;
- only A and B require gradients. So gradients, optimizer, checkpoints and published versions hold only them;
- A and B have the dtype of the model, like all weights; their float32 masters are in the optimizer (optimizer.py);
- A starts random, and B is zero, unless an existing adapter is loaded: the first version of the run is the base itself.
  The random numbers depend only on the seed and the shapes, not on the device;
- what differs from the recipe or does not fit the model is refused before anything is replaced;
- engines compute with merged matrices (weights/merged.py), or with A and B if they hold several policies: this is the
  same up to rounding.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from windfall.errors import WindfallError
from windfall.recipe.lora import DEFAULT_ALPHA_PER_RANK, DEFAULT_RANK, Lora, choose_layers
from windfall.weights import adapter_folder
from windfall.weights.adapter_folder import EMBEDDING, AdapterConfig
from windfall.weights.merged import WEIGHT, AdapterPair, is_repeated, pairs
from windfall.weights.one_copy import copy_together

MATRICES = ("lora_A", "lora_B")


def parameter(matrix: str, policy: str) -> str:
    """The name of a matrix of an adapter among the parameters of its layer.

    >>> parameter("lora_A", ""), parameter("lora_A", "solver")
    ('lora_A', 'lora_A@solver')
    """
    return f"{matrix}@{policy}" if policy else matrix


def is_adapter(name: str) -> bool:
    """Whether a parameter of the module with this name belongs to an adapter, not to the base."""
    return name.rpartition(".")[2].partition("@")[0] in MATRICES


def base_tensors(model: Any) -> dict[str, Tensor]:
    """The weights of a module without those of adapters."""
    return {name: t for name, t in model.state_dict().items() if not is_adapter(name)}


class ActivePolicy:
    """Which adapters of a module have an effect. All its layers share one."""

    def __init__(self) -> None:
        self.name: str | None = None
        """None: the module computes what the base model computes."""


class LoraLayer(nn.Module):
    """A layer with an adapter for each of some policies. Its own parameters are those of the layer that it replaces,
    frozen."""

    weight: Tensor
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    """Matrices of the only policy of a run without [policies]."""

    def __init__(self, base: nn.Linear | nn.Embedding, active: ActivePolicy) -> None:
        nn.Module.__init__(self)
        self.weight = base.weight
        self.active = active
        self.scales: dict[str, float] = {}
        """By policy: those that have an adapter of this layer."""

    def add(self, policy: str, pair: AdapterPair, scale: float) -> None:
        """Add the adapter of a policy, which must be on the device of the weight and have its dtype."""
        for matrix, values in zip(MATRICES, pair, strict=True):
            self.register_parameter(parameter(matrix, policy), nn.Parameter(values))
        self.scales[policy] = scale

    def remove(self, policy: str) -> None:
        """Remove the adapter of a policy."""
        for matrix in MATRICES:
            delattr(self, parameter(matrix, policy))
        del self.scales[policy]

    def pair(self, policy: str) -> AdapterPair:
        """The matrices of a policy as they are now. FSDP2 replaces them in every pass."""
        return AdapterPair(*(getattr(self, parameter(matrix, policy)) for matrix in MATRICES))

    @property
    def adapter(self) -> tuple[AdapterPair, float] | None:
        """The matrices that have an effect now, and their scale. None: this is the layer of the base model."""
        policy = self.active.name
        return (self.pair(policy), self.scales[policy]) if policy in self.scales else None


class LoraLinear(LoraLayer, nn.Linear):
    def __init__(self, base: nn.Linear, active: ActivePolicy) -> None:
        super().__init__(base, active)
        self.in_features = base.in_features
        self.out_features = base.out_features
        self.register_parameter("bias", base.bias)

    def forward(self, input: Tensor) -> Tensor:
        y = linear(input, self.weight, self.bias)
        if self.adapter is None:
            return y
        (a, b), scale = self.adapter
        return y + scale * linear(linear(input, a), b)


class LoraEmbedding(LoraLayer, nn.Embedding):
    def __init__(self, base: nn.Embedding, active: ActivePolicy) -> None:
        super().__init__(base, active)
        self.num_embeddings = base.num_embeddings
        self.embedding_dim = base.embedding_dim
        self.padding_idx = base.padding_idx

    def forward(self, input: Tensor) -> Tensor:
        x = embedding(input, self.weight, self.padding_idx)
        if self.adapter is None:
            return x
        (a, b), scale = self.adapter
        return x + scale * (embedding(input, b, self.padding_idx) @ a)


def lora_layer(base: nn.Module, active: ActivePolicy) -> LoraLayer:
    """What takes the place of this layer when it gets its first adapter."""
    if isinstance(base, nn.Embedding):
        return LoraEmbedding(base, active)
    assert isinstance(base, nn.Linear)
    return LoraLinear(base, active)


class Adapters:
    """All adapters of a policy in a module. Takes the place of the module where a checkpoint is saved."""

    def __init__(self, model: Any, config: AdapterConfig, layers: Mapping[str, LoraLayer], policy: str = "") -> None:
        self.model = model
        self.config = config
        self.layers = layers
        self.policy = policy

    @property
    def scale(self) -> float:
        return self.config.scale

    def weights(self) -> dict[str, Tensor]:
        """The trained matrices by their names in a module that has only this policy."""
        return {
            f"{n}.{x}": t for n, y in self.layers.items() for x, t in zip(MATRICES, y.pair(self.policy), strict=True)
        }

    def tensors(self) -> dict[str, Tensor]:
        """The trained matrices by the names under which they are published and saved."""
        return {name + WEIGHT: t for name, t in self.weights().items()}

    def save_pretrained(self, folder: Path) -> None:
        """Write the adapter in PEFT format."""
        adapter_folder.write(folder, self.config, self.tensors())

    def copied(self) -> Callable[[Path], None]:
        """Copy the matrices to host memory. What is returned is `save_pretrained` of the copy, in any thread."""
        tensors, config = self.tensors(), self.config
        copies = dict(zip(tensors, copy_together(list(tensors.values()), "cpu"), strict=True))
        return lambda folder: adapter_folder.write(folder, config, copies)

    def freeze(self) -> None:
        """Do not train these adapters."""
        for t in self.weights().values():
            t.requires_grad_(False)

    def remove(self) -> None:
        """Remove these adapters from the module."""
        for layer in self.layers.values():
            layer.remove(self.policy)

    def use(self) -> None:
        """From now on, the module computes with the adapters of this policy."""
        self.active.name = self.policy

    @contextlib.contextmanager
    def switched_off(self) -> Iterator[None]:
        """Within this context, the module computes what the base model computes."""
        before, self.active.name = self.active.name, None
        try:
            yield
        finally:
            self.active.name = before

    @property
    def active(self) -> ActivePolicy:
        return next(iter(self.layers.values())).active


def attach(
    model: Any, section: Lora, *, base: str, seed: int, checkpoint: Path | None = None, policy: str = ""
) -> Adapters:
    """Freeze the model and add adapters: those of the checkpoint or of `section.path`, otherwise new ones. `base` is
    the name of the model, for programs that read the adapter later. Adapters of other policies stay as they are; the
    new ones are in use."""
    available, folder = adaptable_layers(model), checkpoint or section.path
    if folder is not None:
        config, found = _read(model, available, folder)
        _check_recipe(section, config, available, found, folder)
    else:
        rank = section.rank or DEFAULT_RANK
        config = AdapterConfig(rank=rank, alpha=section.alpha or DEFAULT_ALPHA_PER_RANK * rank, base=base)
        found = _new(available, _chosen(available, section), rank, seed)
    config = AdapterConfig(rank=config.rank, alpha=config.alpha, base=base, targets=_shortened(found, available))
    adapted = {name: layer for name, layer in available.items() if isinstance(layer, LoraLayer)}
    active = next((layer.active for layer in adapted.values()), ActivePolicy())
    if not adapted:
        model.requires_grad_(False)
    layers = {name: adapted.get(name) or lora_layer(available[name], active) for name in found}
    some = next(iter(layers.values())).weight
    copies = copy_together([t for pair in found.values() for t in pair], some.device, some.dtype)
    for (name, layer), *pair in zip(layers.items(), copies[::2], copies[1::2], strict=True):
        layer.add(policy, AdapterPair(*pair), config.scale)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, layer)
    adapters = Adapters(model, config, layers, policy)
    adapters.use()
    return adapters


def adaptable_layers(model: Any) -> dict[str, Any]:
    """The layers that can have adapters, by name: the linear layers of the decoder layers, then the head and the
    embeddings of the tokens. Layers that compute anything more, apart from an adapter, are not among them."""
    head, tokens = model.get_output_embeddings(), model.get_input_embeddings()
    named = dict(model.named_modules())
    found = {name: m for name, m in named.items() if type(m) in (nn.Linear, LoraLinear) and is_repeated(name)}
    found |= {name: m for name, m in named.items() if m is head and type(m) in (nn.Linear, LoraLinear)}
    for name, m in named.items():
        plain = type(m) is nn.Embedding and m.max_norm is None and not m.scale_grad_by_freq
        if m is tokens and name.rpartition(".")[2] == EMBEDDING and (plain or type(m) is LoraEmbedding):
            found[name] = m
    return found


def trained_parameters(model: Any, section: Lora | None) -> int:
    """Number of parameters that a run with this section trains, before adapters are attached. For an adapter that is
    not read yet (`section.path`) this is an estimate."""
    if section is None:
        return sum(p.numel() for p in model.parameters())
    available = adaptable_layers(model)
    return sum(sum(available[n].weight.shape) for n in _chosen(available, section)) * (section.rank or DEFAULT_RANK)


def _chosen(available: Iterable[str], section: Lora) -> list[str]:
    """The layers that the section means."""
    linear, others = [n for n in available if is_repeated(n)], [n for n in available if not is_repeated(n)]
    return choose_layers(linear, section.targets, others)


def _new(available: Mapping[str, Any], names: Iterable[str], rank: int, seed: int) -> dict[str, AdapterPair]:
    generator, out = torch.Generator().manual_seed(seed), {}
    for name in names:
        outputs, inputs = available[name].weight.shape
        a = torch.empty(rank, inputs)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)  # like PEFT
        out[name] = AdapterPair(a, torch.zeros(outputs, rank))
    return out


def _read(model: Any, available: Mapping[str, Any], folder: Path) -> tuple[AdapterConfig, dict[str, AdapterPair]]:
    """The adapter in a folder, by layer, checked against the model."""
    config, weights = adapter_folder.read_config(folder), dict(model.named_parameters(remove_duplicate=False))
    tensors, shapes = adapter_folder.read_tensors(folder, weights), {name: t.shape for name, t in weights.items()}
    found = {name.removesuffix(WEIGHT): pair for name, pair in pairs(tensors, shapes, str(folder)).items()}
    for name, pair in found.items():
        if name not in available:
            what = f"an adapter of {name!r} is not supported"
            fix = "Use an adapter of linear layers of the decoder layers, of lm_head or of embed_tokens."
            raise WindfallError(what, where=str(folder), fix=fix)
        if len(pair.a) != config.rank:
            what = f"the adapter of {name!r} has rank {len(pair.a)}, but {adapter_folder.CONFIG} says {config.rank}"
            raise WindfallError(what, where=str(folder), fix="Restore the folder from a copy.")
    return config, {name: found[name] for name in available if name in found}


def _check_recipe(
    section: Lora, config: AdapterConfig, available: Mapping[str, Any], found: Mapping[str, Any], folder: Path
) -> None:
    """Refuse an adapter that is not what the recipe says."""
    adapter_folder.check_asked(folder, config, rank=section.rank, alpha=section.alpha)
    if section.targets != "all" and _chosen(available, section) != list(found):
        what = f"this adapter has other layers than train.lora.targets says: {', '.join(_shortened(found, available))}"
        raise WindfallError(what, where=str(folder), fix="Remove train.lora.targets to use the layers of the adapter.")


def _shortened(names: Mapping[str, Any], available: Mapping[str, Any]) -> tuple[str, ...]:
    """The adapted layers for PEFT: by the last part of their names if these parts mean no other layers."""
    tails = sorted({name.rpartition(".")[2] for name in names})
    meant = {name for name in available if name.rpartition(".")[2] in tails}
    return tuple(tails if meant == set(names) else names)
