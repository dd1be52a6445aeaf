"""The layers of a model whose tokens are computed by a few of many experts, and which experts they chose.

transformers calls a module of experts with the hidden states, the chosen experts of each token, and their weights. That
is where the choice is read. It is replaced where it is made: in the `torch.topk` over the scores of all experts, within
the block around that module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from windfall.chosen_experts import item_bytes
from windfall.errors import WindfallError
from windfall.models.attention import ShapeRecorder

_OF_EXPERTS = ("num_experts", "has_gate", "is_transposed")
"""What transformers, since 5.17, gives a module whose experts it may compute in different ways."""


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    block: nn.Module
    """Chooses experts for each token, and calls them."""
    module: nn.Module
    """The experts."""
    count: int
    index: int
    """The number of the decoder layer."""


def dtype_of(experts: int) -> Any:
    """Type of an expert's number, if a layer has this many."""
    return np.uint8 if item_bytes(experts) == 1 else np.uint16


def largest(layers: list[ExpertLayer]) -> int:
    """Experts to choose from in a layer: the most, if layers differ."""
    return max(layer.count for layer in layers)


def numbers(data: bytes, tokens: int, layers: list[ExpertLayer]) -> np.ndarray:
    """Chosen experts (chosen_experts.py) as (tokens, layers, chosen); the largest number is an unknown one. Raises
    WindfallError for those of another model."""
    experts = largest(layers)
    dtype = np.dtype(dtype_of(experts))
    if not data or len(data) % (tokens * len(layers) * dtype.itemsize):
        what = f"{len(data)} bytes cannot be the chosen experts of {tokens} tokens in {len(layers)} layers"
        raise WindfallError(what, fix="A worker runs another model, or another version of windfall.")
    found = np.frombuffer(data, dtype).reshape(tokens, len(layers), -1)
    if (beyond := int((found + 1).max(initial=0))) > experts:  # the largest number plus 1 is 0
        what = f"expert {beyond - 1} was chosen, but a layer has only {experts}"
        raise WindfallError(what, fix="A worker runs another model, or another version of windfall.")
    return found


def on_device(rows: np.ndarray, device: torch.device) -> Tensor:
    """What `numbers` returns, for `known`. It stays narrow: as int64 it would be 8 times as much to copy."""
    # torch has few operations for uint16. As int16, the largest number is -1, and no model has 32,768 experts.
    narrow = torch.from_numpy(rows if rows.dtype == np.uint8 else rows.view(np.int16))
    return narrow.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else narrow


def known(narrow: Tensor) -> Tensor:
    """Numbers of experts in int64; -1 is an unknown one.

    >>> for dtype in (np.uint8, np.uint16):
    ...     print(known(on_device(np.array([0, 200, np.iinfo(dtype).max], dtype), torch.device("cpu"))).tolist())
    [0, 200, -1]
    [0, 200, -1]
    """
    wide = narrow.long()
    return wide.masked_fill(wide == 255, -1) if narrow.dtype == torch.uint8 else wide


def loads(narrow: Tensor, experts: int) -> np.ndarray:
    """How many tokens each expert computes, as (layers, experts), from what `on_device` returns."""
    each = [torch.bincount(known(layer).flatten() + 1, minlength=experts + 1) for layer in narrow.unbind(1)]
    return torch.stack(each)[:, 1:].cpu().numpy()


def expert_layers(model: nn.Module) -> list[ExpertLayer]:
    """The layers whose choice of experts can be read, in order. Empty for dense models, and for models that call their
    experts in another way."""
    names = dict(model.named_modules())
    return [
        ExpertLayer(
            names[name.rpartition(".")[0]],
            module,
            count=int(module.num_experts),  # pyright: ignore
            index=next((int(part) for part in name.split(".") if part.isdigit()), 0),
        )
        for name, module in names.items()
        if hasattr(type(module), "forward") and all(hasattr(module, name) for name in _OF_EXPERTS)
    ]


class ExpertReader:
    """Reads the chosen experts of every pass through a model that runs within `reading`."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = expert_layers(model)
        self._found: list[Tensor] | None = None
        for layer in self.layers:
            layer.module.register_forward_pre_hook(self._read, with_kwargs=True)

    def _read(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._found is not None:
            self._found.append(kwargs["top_k_index"] if "top_k_index" in kwargs else args[1])

    @torch.no_grad()
    def works(self, model: Any) -> bool:
        """Whether every layer can be read, in order. Found by running one token."""
        zero = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        with self.reading() as found:
            model(input_ids=zero, position_ids=zero, use_cache=False, batch=ShapeRecorder())
        return len(found) == len(self.layers) > 0 and len({choice.shape for choice in found}) == 1

    @contextmanager
    def reading(self) -> Iterator[list[Tensor]]:
        """Within: a list that gets the choice of each layer, (tokens, chosen), in order."""
        self._found = found = []
        try:
            yield found
        finally:
            self._found = None


class ExpertReplay:
    """Lets the tokens of a pass be computed by given experts. The weight of each is what the model's own router
    computes for it, so the router is trained. Nothing happens outside `replaying`."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = expert_layers(model)
        self._given: Tensor | None = None
        self._modes: list[_GivenChoice] = []
        """Modes of the blocks that run now: at most one, but recomputation happens within the backward pass."""
        for n, layer in enumerate(self.layers):
            layer.block.register_forward_pre_hook(self._enter(n, layer.count))
            layer.block.register_forward_hook(self._leave, always_call=True)
            layer.module.register_forward_pre_hook(self._check, with_kwargs=True)

    @contextmanager
    def replaying(self, given: Tensor | None) -> Iterator[None]:
        """`given`: what `on_device` returns; the router chooses where it is unknown. None: it always does. Backward
        passes that compute activations again must be within, too."""
        self._given = given
        try:
            yield
        finally:
            self._given = None

    def _enter(self, n: int, count: int) -> Any:
        def enter(block: nn.Module, args: Any) -> None:
            if self._given is not None:
                mode = _GivenChoice(known(self._given[:, n]), count)
                mode.__enter__()
                self._modes.append(mode)

        return enter

    def _leave(self, block: nn.Module, args: Any, output: Any) -> None:
        if self._modes:
            self._modes.pop().__exit__(None, None, None)

    def _check(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._modes:
            return
        index = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        made = self._modes[-1].made
        if made is None or made.data_ptr() != index.data_ptr():
            what = f"{type(module).__name__} gets experts that no torch.topk has chosen, so they cannot be replayed"
            raise WindfallError(what, where="train.replay_routing", fix="Set train.replay_routing = false.")


class _GivenChoice(TorchFunctionMode):
    def __init__(self, given: Tensor, count: int) -> None:
        super().__init__()
        self._given, self._count = given, count
        self.made: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return out
        scores, (tokens, chosen) = args[0] if args else kwargs["input"], self._given.shape
        if scores.shape[-1] != self._count or scores.numel() != tokens * self._count or out[1].shape[-1] != chosen:
            return out  # it chooses something else, such as groups of experts
        given = self._given.view(out[1].shape)
        self.made = torch.where(given < 0, out[1], given)
        return torch.return_types.topk((scores.gather(-1, self.made), self.made))
