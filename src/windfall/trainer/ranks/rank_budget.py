"""What one rank of the trainer needs: bytes of GPU memory, and bytes sent per pack. Pure arithmetic, before anything is
started. P is the number of parameters, N the number of ranks, `w` the bytes of a value in the compute dtype.

Memory of a rank (bytes), with full training:

    state         16 P / N               float32: weight, gradient and two moments of Adam, all sharded; state_layout.py
                                         says how much of it may be in host memory, and what one rank alone needs
    reference     w P / N                only with a KL penalty, in the compute dtype
    root          2 w R + 4 R            embedding, head and last norm (R parameters) are gathered for a whole pack; at
                                         its end their gradient is reduced in float32
    layers        2 w L + (w + 4) L      the layer (L parameters) at work and the next one, and the gradient of one
    activations   tokens of a pack x bytes kept per token (activation_memory.py)

One rank gathers nothing, unless FSDP2 splits over it (train.rendezvous): then it copies as above. Adapters: each rank
has the state of all of them. The frozen weights need w P / N and are gathered as above, without gradients; or they are
whole on every rank (w P), and nothing is gathered.

Communication of a rank (bytes sent), per pack: every weight is gathered for the forward and again for the backward
pass, and its gradient is summed in float32:

    (2 w + 4) P (N - 1) / N

A split frozen base sends 2 w P (N - 1) / N. The gradients of adapters are summed once per update, which is not counted.

With context parallelism, C ranks share a pack, so a rank has activations of 1/C of its tokens. Attention (of H heads,
and K key/value heads, of size D) then sends, per token of a rank and layer: queries, keys, values and the output in the
forward pass; in the backward pass again, with their gradients. K is the number after repetition (ulysses.py):

    6 w (H + K) D (C - 1) / C
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from windfall.trainer.model.activation_memory import LayerBytes, layer_bytes
from windfall.trainer.ranks.state_layout import StateLayout

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_KEYS = ("num_experts_per_tok", "moe_topk", "moe_k")
EXPERT_SIZE_KEYS = ("moe_intermediate_size", "expert_ffn_hidden_size")
"""Names in config.json of the number of experts, of those that compute a token, and of the size of one."""
SIZES = ("num_attention_heads", "hidden_size", "num_hidden_layers", "vocab_size")
"""Attributes that a configuration of transformers has even if its config.json has other names for them."""
REDUCED_BYTES = 4
"""Gradients are summed in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a Llama-like decoder that determine its memory. Norms and biases are left out. If there are experts,
    all layers count as having them, and no expert as computing every token."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    tied: bool = False
    experts: int = 0
    """How many a layer has; 0 if it has none. `intermediate` is that of all experts that compute a token."""
    chosen: int = 0
    """Experts that compute a token."""

    @staticmethod
    def of(config: Mapping[str, Any]) -> ModelShape:
        """The sizes in the fields of a model's config.json. Raises KeyError for a model without them."""
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        intermediate = config.get("intermediate_size") or 4 * hidden
        first = lambda keys: next((n for key in keys if isinstance(n := config.get(key), int) and n), 0)  # noqa: E731
        experts = first(EXPERT_KEYS)
        chosen = (first(CHOSEN_KEYS) or experts) if experts else 0
        return ModelShape(
            hidden=hidden,
            intermediate=chosen * (first(EXPERT_SIZE_KEYS) or intermediate) if experts else intermediate,
            experts=experts,
            chosen=chosen,
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head=config.get("head_dim") or hidden // heads,
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    @staticmethod
    def of_model(model: Any) -> ModelShape:
        """The sizes of a model of transformers."""
        config = model.config
        return ModelShape.of(config.to_dict() | {name: getattr(config, name) for name in SIZES})

    @property
    def layer_parameters(self) -> int:
        return self._active_of_layer + self._idle_of_layer

    @property
    def _active_of_layer(self) -> int:
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head
        return attention + 3 * self.hidden * self.intermediate + self.experts * self.hidden

    @property
    def _idle_of_layer(self) -> int:
        """Parameters of experts that do not compute a token."""
        return 3 * self.hidden * self.intermediate // self.chosen * (self.experts - self.chosen) if self.experts else 0

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

    @property
    def active_parameters(self) -> int:
        """Those that compute a token.

        >>> shape = ModelShape(hidden=2048, intermediate=8 * 768, layers=48, heads=32, kv_heads=4, head=128,
        ...                    vocabulary=151_936, experts=128, chosen=8)
        >>> round(shape.parameters / 1e9, 1), round(shape.active_parameters / 1e9, 1)
        (30.5, 3.4)
        """
        return self.parameters - self.layers * self._idle_of_layer

    def kept(self, value_bytes: int) -> LayerBytes:
        return layer_bytes(
            hidden=self.hidden,
            intermediate=self.intermediate,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head=self.head,
            value_bytes=value_bytes,
            chosen=self.chosen,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBudget:
    """Bytes of one rank."""

    layout: StateLayout
    reference: float
    gathered: float
    """Weights and gradients that are whole for a moment."""
    least_activations: float
    """Activations of a pack if every layer keeps only its input."""
    all_activations: float
    """Activations of a pack if nothing is computed twice."""
    sent_per_pack: float

    @property
    def fixed(self) -> float:
        """On the GPU, whatever the activations need."""
        return self.gathered + self.layout.gpu_bytes + self.reference


def rank_budget(
    shape: ModelShape,
    ranks: int,
    *,
    pack_tokens: int,
    value_bytes: int = 2,
    kl: bool = False,
    adapter_parameters: int = 0,
    whole_base: bool = False,
    context: int = 1,
    sharded: bool = False,
) -> RankBudget:
    """With all state on the GPU. `adapter_parameters`: 0 for full training. `whole_base`: the frozen weights are whole
    on every rank. `context`: ranks that compute a pack together. `sharded`: even one rank is split by FSDP2.

    >>> shape = ModelShape(hidden=8, intermediate=16, layers=2, heads=2, kv_heads=1, head=4, vocabulary=100, tied=True)
    >>> alone, two = (rank_budget(shape, 4, pack_tokens=8, context=context) for context in (1, 2))
    >>> round(alone.layout.gpu_bytes) == 16 * shape.parameters / 4
    True
    >>> alone.all_activations / two.all_activations, two.sent_per_pack - alone.sent_per_pack
    (2.0, 768.0)
    """
    p, layer, root = shape.parameters, shape.layer_parameters, shape.root_parameters
    reduced = REDUCED_BYTES
    split = (sharded or ranks > 1) and not whole_base
    gathered, sent = value_bytes * (root + 2 * layer), 2 * value_bytes * p
    if not adapter_parameters:  # no gradient of a frozen weight
        gathered += (value_bytes + reduced) * (root + layer)
        sent += reduced * p
    kept = shape.kept(value_bytes)
    working, tokens = 2 * kept.all, pack_tokens / context
    exchanged = 6 * value_bytes * (shape.heads + math.lcm(shape.kv_heads, context)) * shape.head
    trained, frozen = (adapter_parameters, p) if adapter_parameters else (p, 0)
    return RankBudget(
        layout=StateLayout(trained=trained, frozen=frozen, value_bytes=value_bytes, ranks=ranks, sharded=split),
        reference=value_bytes * p / ranks if kl and not adapter_parameters else 0.0,  # with adapters: the same weights
        gathered=gathered if split else 0.0,
        least_activations=tokens * (shape.layers * kept.least + working),
        all_activations=tokens * (shape.layers * kept.all + working),
        sent_per_pack=sent * split * (ranks - 1) / ranks + tokens * shape.layers * exchanged * (context - 1) / context,
    )
