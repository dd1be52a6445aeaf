"""What one rank of the trainer needs: bytes of GPU memory, and bytes sent per pack. Pure arithmetic, before anything is
started. P is the number of parameters, N the number of ranks, `w` the bytes of a value in the compute dtype.

Memory of a rank (bytes), with full training:

    state         16 P / N               float32: weight, gradient and two moments of Adam, all sharded
    reference     w P / N                only with a KL penalty, in the compute dtype
    root          2 w R + 4 R            embedding, head and last norm (R parameters) are gathered for a whole pack; at
                                         its end their gradient is reduced in float32
    layers        2 w L + (w + 4) L      the layer (L parameters) at work and the next one, and the gradient of one
    activations   tokens of a pack x bytes kept per token (activation_memory.py)

`train.offload` moves state and reference to the host. Adapters: the frozen weights need w P / N, and only the adapters
have a state.

Communication of a rank (bytes sent), per pack: every weight is gathered for the forward and again for the backward
pass, and its gradient is summed in float32:

    (2 w + 4) P (N - 1) / N

With context parallelism, C ranks share a pack, so a rank has activations of 1/C of its tokens. Attention (of H heads,
and K key/value heads, of size D) then sends, per token of a rank and layer: queries, keys, values and the output in the
forward pass; in the backward pass again, with their gradients. K is the number after repetition (ulysses.py):

    6 w (H + K) D (C - 1) / C
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from windfall.trainer.model.activation_memory import LayerBytes, layer_bytes

STATE_BYTES = 16
"""Float32 weight, gradient, and two moments."""
REDUCED_BYTES = 4
"""Gradients are summed in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a Llama-like decoder that determine its memory. Norms and biases are left out."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    tied: bool = False

    @property
    def layer_parameters(self) -> int:
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head
        return attention + 3 * self.hidden * self.intermediate

    @property
    def root_parameters(self) -> int:
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """
        >>> ModelShape(hidden=4096, intermediate=12_288, layers=36, heads=32, kv_heads=8, head=128,
        ...            vocabulary=151_936).parameters
        8190427136
        """
        return self.layers * self.layer_parameters + self.root_parameters

    def kept(self, value_bytes: int) -> LayerBytes:
        return layer_bytes(
            hidden=self.hidden,
            intermediate=self.intermediate,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head=self.head,
            value_bytes=value_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBudget:
    """Bytes of one rank."""

    state: float
    """On the host with `offload`, otherwise on the GPU."""
    reference: float
    gathered: float
    """Weights and gradients that are whole for a moment."""
    least_activations: float
    """Activations of a pack if every layer keeps only its input."""
    all_activations: float
    """Activations of a pack if nothing is computed twice."""
    sent_per_pack: float
    offload: bool = False

    @property
    def fixed(self) -> float:
        """On the GPU, whatever the activations need."""
        return self.gathered + (0.0 if self.offload else self.state + self.reference)

    def fits(self, gpu_bytes: float) -> bool:
        """Whether it fits at all, with every layer computed twice."""
        return self.fixed + self.least_activations <= gpu_bytes


def state_bytes(parameters: int, ranks: int, *, value_bytes: int, adapter_parameters: int = 0) -> float:
    """A rank's part of the weights, and of the gradients and moments of those that are trained."""
    if adapter_parameters:
        return (value_bytes * parameters + STATE_BYTES * adapter_parameters) / ranks
    return STATE_BYTES * parameters / ranks


def reference_bytes(parameters: int, ranks: int, *, value_bytes: int, kl: bool, adapter_parameters: int = 0) -> float:
    """A rank's part of the reference. With adapters, that is the model without them."""
    return value_bytes * parameters / ranks if kl and not adapter_parameters else 0.0


def rank_budget(
    shape: ModelShape,
    ranks: int,
    *,
    pack_tokens: int,
    value_bytes: int = 2,
    kl: bool = False,
    offload: bool = False,
    adapter_parameters: int = 0,
    context: int = 1,
) -> RankBudget:
    """`adapter_parameters`: 0 for full training. `context`: ranks that compute a pack together.

    >>> shape = ModelShape(hidden=8, intermediate=16, layers=2, heads=2, kv_heads=1, head=4, vocabulary=100, tied=True)
    >>> alone, two = (rank_budget(shape, 4, pack_tokens=8, context=context) for context in (1, 2))
    >>> round(alone.state) == 16 * shape.parameters / 4
    True
    >>> alone.all_activations / two.all_activations, two.sent_per_pack - alone.sent_per_pack
    (2.0, 768.0)
    """
    p, layer, root = shape.parameters, shape.layer_parameters, shape.root_parameters
    sizes = {"value_bytes": value_bytes, "adapter_parameters": adapter_parameters}
    reduced = REDUCED_BYTES
    gradient_root, gradient_layer = (value_bytes + reduced) * root, (value_bytes + reduced) * layer
    sent = (2 * value_bytes + reduced) * p
    if adapter_parameters:  # no gradient of a frozen weight
        gradient_root = gradient_layer = (value_bytes + reduced) * adapter_parameters / shape.layers
        sent = 2 * value_bytes * (p + adapter_parameters) + reduced * adapter_parameters
    kept = shape.kept(value_bytes)
    working, tokens = 2 * kept.all, pack_tokens / context
    exchanged = 6 * value_bytes * (shape.heads + math.lcm(shape.kv_heads, context)) * shape.head
    return RankBudget(
        state=state_bytes(p, ranks, **sizes),
        reference=reference_bytes(p, ranks, kl=kl, **sizes),
        gathered=value_bytes * (root + 2 * layer) + gradient_layer + gradient_root,
        least_activations=tokens * (shape.layers * kept.least + working),
        all_activations=tokens * (shape.layers * kept.all + working),
        sent_per_pack=sent * (ranks - 1) / ranks + tokens * shape.layers * exchanged * (context - 1) / context,
        offload=offload,
    )
