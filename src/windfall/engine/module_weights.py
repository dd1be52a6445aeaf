"""The weights of a module: copied into it, shared with another one, joined so that one matrix product computes several
layers, and freed."""

from __future__ import annotations

import contextlib
import copy
import ctypes
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from windfall.errors import WindfallError
from windfall.weights.merged import MergedWeights


def check_weights(
    version: int, weights: Mapping[str, Any], shapes: Mapping[str, torch.Size], tied: Iterable[str]
) -> None:
    """Raise WindfallError unless these are the weights of a model. `tied`: those that others stand for."""
    unknown, missing = weights.keys() - shapes.keys(), shapes.keys() - weights.keys() - set(tied)
    if unknown or missing:
        names, how = sorted(unknown or missing), "unknown" if unknown else "missing"
        what = f"{len(names)} tensors such as {names[0]!r} are {how}"
        raise WindfallError(f"version {version} does not fit the model: {what}")
    shape = weights.shape if isinstance(weights, MergedWeights) else lambda name: weights[name].shape
    wrong = [name for name in weights if shape(name) != shapes[name]]
    if wrong:
        raise WindfallError(f"version {version} does not fit the model: {wrong[0]!r} has the wrong shape")


@torch.no_grad()
def copy_weights(model: Any, version: int, weights: Mapping[str, Tensor]) -> None:
    """Copy all weights into the module's own storage, or none of them if any does not fit. Merged weights are computed
    one by one, and are never all in memory."""
    own = model.state_dict()
    known = {own[name].data_ptr() for name in weights if name in own}
    tied = {name for name in own.keys() - weights.keys() if own[name].data_ptr() in known}
    check_weights(version, weights, {name: tensor.shape for name, tensor in own.items()}, tied)
    if isinstance(weights, MergedWeights):
        _check_untied(version, weights, own)
    for name in weights:
        if isinstance(weights, MergedWeights):
            weights.copy_into(name, own[name])
        else:
            own[name].copy_(weights[name])


def _check_untied(version: int, weights: MergedWeights, own: Mapping[str, Tensor]) -> None:
    """Raise WindfallError if an adapter would change two weights that are one tensor in the module."""
    at = {name: tensor.data_ptr() for name, tensor in own.items() if name in weights.base and tensor.numel()}
    for name in weights.pairs:
        both = [other for other, address in at.items() if address == at[name]]
        if len(both) > 1:
            what = f"version {version} has an adapter of {name!r}, which is one tensor with the engine's other weights"
            raise WindfallError(what, where=", ".join(both), fix="Build the engine with tie_word_embeddings = false.")


def copy_tree(model: Any) -> Any:
    """A tree of modules of its own that shares all parameters and buffers with the model: a layer that is replaced in
    one of them stays in the other."""
    return copy.deepcopy(model, {id(t): t for t in chain(model.parameters(), model.buffers())})


def replace_linear(tree: Any, name: str, kind: type[nn.Linear], weight: nn.Parameter | None = None) -> None:
    """Put a linear layer of this kind in the place of another one, with its bias, and with its weight or the given
    one."""
    parent, _, last = name.rpartition(".")
    old = tree.get_submodule(name)
    new = kind(old.in_features, old.out_features, bias=False, device="meta")
    new.weight = old.weight if weight is None else weight
    new.register_parameter("bias", old.bias)
    setattr(tree.get_submodule(parent), last, new)


def join(parts: Sequence[Tensor]) -> Tensor:
    """Join the weights of layers that read the same input into one tensor. The parts stay the same objects and become
    adjacent views of it: a write to one is seen by the other. They are copied only if they are not adjacent yet."""
    joined = adjacent(parts)
    if joined is None:
        joined = torch.cat([p.data for p in parts])
        for p, view in zip(parts, joined.split([len(p) for p in parts]), strict=True):
            p.data = view
    return joined


def adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """One tensor that covers all parts (matrices or vectors), or None if they are not adjacent in one storage."""
    first, address = parts[0], parts[0].data_ptr()
    for p in parts:
        here = p.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and p.data_ptr() == address
        if not here or not p.is_contiguous() or p.dtype != first.dtype or p.shape[1:] != first.shape[1:]:
            return None
        address += p.numel() * p.element_size()
    shape = (sum(len(p) for p in parts), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())


class WeightMemory:
    """The memory of a module's weights, which can be given back to the device and taken again.

    The tensors stay the same objects: their storage is resized to nothing and back. Views of it, such as joined
    weights, follow. The contents are lost, and addresses may change: swap the weights afterwards."""

    def __init__(self, model: Any) -> None:
        """Take all weights of the module's state dict. No weight may get other storage from now on."""
        storages = [tensor.untyped_storage() for tensor in model.state_dict().values()]
        self._storages = {s.data_ptr(): s for s in storages if s.nbytes()}  # tied and joined weights share one
        self._sizes = {address: s.nbytes() for address, s in self._storages.items()}
        self._on_gpu = any(s.device.type == "cuda" for s in storages)
        self.freed = False

    @property
    def nbytes(self) -> int:
        return sum(self._sizes.values())

    def free(self) -> None:
        for storage in self._storages.values():
            storage.resize_(0)
        self.freed = True
        return_freed_memory(on_gpu=self._on_gpu)

    def allocate(self) -> None:
        """Allocate the memory, uninitialized, unless it is allocated already."""
        if self.freed:
            for address, storage in self._storages.items():
                storage.resize_(self._sizes[address])
            self.freed = False


def return_freed_memory(*, on_gpu: bool) -> None:
    """Give memory that this process has freed back to the device, so that other processes can use it."""
    if on_gpu:
        torch.cuda.empty_cache()
    else:
        with contextlib.suppress(AttributeError):  # not glibc, which would keep the pages for later
            ctypes.CDLL(None).malloc_trim(0)
