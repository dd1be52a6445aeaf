"""The model of a trainer with several ranks.

    all weights are trained   split with FSDP2: every rank holds some rows of every weight, in float32 as the masters
    adapters are trained      every rank holds all adapters. The frozen base is whole on every rank if it fits
                              (state_layout.py), otherwise split with FSDP2 in the compute dtype

A layer that is split is gathered in the compute dtype when it runs, forward and backward. FSDP2 sums gradients over the
ranks in float32 whenever a layer has run backward; those of adapters are summed once per update (optimizer.py). All are
divided once, by the optimizer. Rules:

- every decoder layer is a group of its own; the rest (embedding, last norm, head) belongs to the root, so that weights
  which are tied across them stay in one group;
- reductions are sums. FSDP2 divides by the number of ranks by default, but not with gloo, and reports no error;
- a model is built without values and filled from rank 0, tensor by tensor: no rank but the first ever holds more than
  one whole layer, unless the base is whole.

`RankRows` is what the rest of the program sees of a weight: the rows of this rank, and where they belong. An unsharded
tensor is one shard with all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from windfall.models import attention
from windfall.trainer.model.logprobs import PolicyModule
from windfall.trainer.model.lora import is_adapter
from windfall.trainer.ranks.ranks import TrainerRanks
from windfall.weights.publishing.publish import RankRows


def sharded_policy(
    config: Any,
    source: Mapping[str, Tensor] | None,
    ranks: TrainerRanks,
    *,
    dtype: torch.dtype,
    trained: bool = True,
    whole_base: bool = False,
    prepare: Callable[[Any], None] = lambda model: None,
) -> PolicyModule:
    """The model of a configuration, split over the ranks, computing in `dtype`. Rank 0 passes its tensors. `prepare`
    may change the module before it is split, for example add adapters. Adapters and weights that are not trained are
    stored in the compute dtype, too. `whole_base`: nothing is split; for adapters."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32 if trained else dtype, attn_implementation=attention.NAME
        )
    prepare(model.eval().requires_grad_(trained))
    for name, p in model.named_parameters():
        if p.is_floating_point() and (is_adapter(name) or not p.requires_grad):
            p.data = p.to(dtype)
    policy = PolicyModule(model, dtype=dtype, device=torch.device(ranks.device))
    if whole_base:
        _allocate(policy, ranks.device)
    else:
        _split(policy, decoder_layers(model), ranks, dtype=dtype)
    fill(model, source, ranks)
    return policy


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """The layers that are gathered one at a time."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found: list[torch.nn.Module] = list(getattr(model.get_decoder(), "layers", ()))
    return found or [m for m in model.modules() if type(m).__name__ in names]


def _split(root: torch.nn.Module, layers: Any, ranks: TrainerRanks, *, dtype: torch.dtype) -> None:
    """Give an empty model memory and split it over the ranks, in place: layer after layer, so that no more than one is
    whole at a time. Adapters are not split. `layers` are the decoder layers within `root`; `dtype` is the one to
    compute in."""
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": ranks.mesh(), "mp_policy": precision}
    for module in (*layers, root):
        _allocate(module, ranks.device)
        adapters = {p for name, p in module.named_parameters() if is_adapter(name)}
        fully_shard(module, ignored_params=adapters, **options)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _allocate(module: torch.nn.Module, device: str) -> None:
    """Replace every tensor without memory by an uninitialized one. Tied parameters stay tied, unlike in `to_empty`."""
    made: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None and p.is_meta:
                if id(p) not in made:
                    made[id(p)] = torch.nn.Parameter(torch.empty_like(p, device=device), requires_grad=p.requires_grad)
                part._parameters[name] = made[id(p)]
        for name, b in part._buffers.items():
            if b is not None and b.is_meta:
                part._buffers[name] = torch.empty_like(b, device=device)


def fill(model: Any, source: Mapping[str, Tensor] | None, ranks: TrainerRanks) -> None:
    """Copy all parameters and buffers from rank 0, which passes them as `source`; the other ranks pass None."""
    for name, target in (*model.named_parameters(), *model.named_buffers()):
        whole = torch.empty(target.shape, dtype=target.dtype, device=ranks.device)
        if source is not None:
            whole.copy_(source[name])
        ranks.broadcast_tensor(whole)
        with torch.no_grad():
            rows(target).copy_(whole[slice_of(target)] if target.dim() else whole)


def is_sharded(t: Tensor) -> bool:
    return isinstance(t, DTensor)


def rows(t: Tensor) -> Tensor:
    """The rows of a tensor that this rank holds, without a copy."""
    return t.to_local().detach() if isinstance(t, DTensor) else t.detach()


def as_shard(t: Tensor, local: Tensor | None = None) -> RankRows:
    """`t` as a shard; `local` are the same rows of another tensor, such as a moment of the optimizer."""
    local = rows(t) if local is None else local
    return RankRows(local=local, shape=(*t.shape[:1], *local.shape[1:]), first_row=slice_of(t).start)


def slice_of(t: Tensor) -> slice:
    """The rows of a tensor that this rank holds."""
    if not isinstance(t, DTensor):
        return slice(0, t.shape[0] if t.dim() else None)
    return _share(len(t), t.device_mesh.get_local_rank(), t.device_mesh.size())


def to_publish(tensors: Mapping[str, Tensor], ranks: Any) -> dict[str, Tensor | RankRows]:
    """The part of these tensors that this rank publishes. Of a tensor that all ranks hold, it is the part that it would
    hold if the tensor were split."""
    out: dict[str, Tensor | RankRows] = {}
    for name, t in tensors.items():
        if is_sharded(t):
            out[name] = as_shard(t)
        elif ranks.size > 1 and t.dim():
            mine = _share(len(t), ranks.rank, ranks.size)
            out[name] = RankRows(local=t.detach()[mine], shape=tuple(t.shape), first_row=mine.start)
        else:
            out[name] = t
    return out


def _share(count: int, rank: int, ranks: int) -> slice:
    """The rows of a rank: FSDP2 gives every rank the same number, and the last ones fewer."""
    each = -(-count // ranks)
    first = min(rank * each, count)
    return slice(first, min(first + each, count))
