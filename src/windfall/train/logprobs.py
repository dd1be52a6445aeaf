"""Log-probs of given tokens under a module, without ever holding the logits of a whole batch.

Only the positions that predict a target go through the output head, a chunk at a time; a chunk's logits are thrown away
and computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from windfall.engine.attention import Packed
from windfall.errors import WindfallError
from windfall.train.sample import Sample

CHUNK_LOGITS = 2**23
"""Logits held at once: 32 MiB in float32."""


def logprobs(model: Any, samples: Sequence[Sample], temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of all targets, sample after sample, in float32."""
    device = model.device
    lengths = [len(s.ids) for s in samples]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    ids = torch.tensor([t for s in samples for t in s.ids], device=device)
    positions = torch.tensor([p for n in lengths for p in range(n)], device=device)
    rows = torch.tensor([b + t - 1 for b, s in zip(starts, samples, strict=True) for t in s.targets], device=device)
    hidden = model.base_model(
        input_ids=ids[None], position_ids=positions[None], use_cache=False, batch=Packed.of(lengths, device)
    ).last_hidden_state[0]
    hidden, targets = hidden.index_select(0, rows), ids.index_select(0, rows + 1)
    head = model.get_output_embeddings()
    size = max(1, CHUNK_LOGITS // head.weight.shape[0])
    parts = [
        checkpoint(_of_chunk, head, hidden[i : i + size], targets[i : i + size], temperature, use_reentrant=False)
        for i in range(0, len(rows), size)
    ]
    logp, entropy = zip(*parts, strict=True)  # pyright: ignore[reportArgumentType]
    return torch.cat(logp), torch.cat(entropy)


def _of_chunk(head: Any, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    logp = torch.log_softmax(logits, -1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, targets[:, None])[:, 0], entropy


@torch.no_grad()
def check_model(model: Any) -> None:
    """Find out now, with two short sequences, not by training on wrong log-probs: a model whose rows see each other
    other than through attention, that drops out in training, or that does more between hidden states and logits than
    one linear map."""
    name, fix = type(model).__name__, "Llama, Qwen, Mistral and SmolLM shapes can be used."
    try:
        alone = [_hidden(model, [ids]) for ids in ((2, 3, 4, 5), (5, 4, 3))]
        together = _hidden(model, [(2, 3, 4, 5), (5, 4, 3)])
        model.train()
        training = _hidden(model, [(2, 3, 4, 5), (5, 4, 3)])
    except RuntimeError as e:
        raise WindfallError(f"{name} does not fit windfall's attention: {e}", where="model.path", fix=fix) from e
    finally:
        model.eval()
    ids, positions = (torch.tensor([x], device=model.device) for x in ((2, 3, 4, 5), (0, 1, 2, 3)))
    whole = model(input_ids=ids, position_ids=positions, use_cache=False, batch=Packed.of([4], model.device)).logits[0]
    checks = {
        "mixes sequences other than by attention": (torch.cat(alone), together),
        "has dropout, which makes training differ from rollout": (together, training),
        "scales or caps its logits after the output head": (model.get_output_embeddings()(alone[0]), whole),
    }
    for what, (a, b) in checks.items():
        # Rounding may differ by shape (bfloat16: by percents); these faults are of the size of the values themselves.
        if (a.float() - b.float()).norm() > 0.1 * b.float().norm():
            raise WindfallError(f"{name} {what}", where="model.path", fix=fix)


def _hidden(model: Any, sequences: Sequence[Sequence[int]]) -> Tensor:
    lengths = [len(s) for s in sequences]
    ids = torch.tensor([[t for s in sequences for t in s]], device=model.device)
    positions = torch.tensor([[p for n in lengths for p in range(n)]], device=model.device)
    batch = Packed.of(lengths, model.device)
    return model.base_model(input_ids=ids, position_ids=positions, use_cache=False, batch=batch).last_hidden_state[0]
