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
def check_head(model: Any) -> None:
    """Some models do more between hidden states and logits than one linear map. Find that out now, not by training on
    wrong log-probs."""
    ids = torch.arange(2, 6, device=model.device)[None]
    positions = torch.arange(4, device=model.device)[None]
    batch = Packed.of([4], model.device)
    hidden = model.base_model(input_ids=ids, position_ids=positions, use_cache=False, batch=batch).last_hidden_state
    whole = model(input_ids=ids, position_ids=positions, use_cache=False, batch=batch).logits
    if not torch.allclose(model.get_output_embeddings()(hidden).float(), whole.float(), rtol=1e-3, atol=1e-3):
        raise WindfallError(
            f"{type(model).__name__} scales or caps its logits after the output head, which training cannot follow",
            where="model.path",
            fix="Use a model whose logits are its output head's (Llama, Qwen, Mistral and SmolLM shapes).",
        )
