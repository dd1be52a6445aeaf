"""Decides how many activations each layer keeps for the backward pass. Pure: bytes in, a choice out.

A layer can keep ALL activations that its backward pass needs; or all except the wide activations of its MLP (LIGHT),
which costs one more matrix product; or only its input (LEAST), which costs a second forward pass of the layer. A byte
kept by LIGHT saves more work than a byte that ALL keeps in addition, so every layer is LIGHT before any is ALL.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST, LIGHT, ALL = range(3)
MAX_MEMORY_SHARE = 0.85
"""Share of the free memory that may be used. The rest covers fragmentation of the allocator."""
WORKING = 2
"""Memory that a layer needs while it computes its gradients, as a multiple of what ALL keeps."""
SMALL_PACK, LARGE_PACK = 8192, 32_768
"""Tokens in a pack. A GPU is limited by memory bandwidth below the first; more than the second gains nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBytes:
    """Bytes kept per token and layer, by level."""

    least: int
    light: int
    all: int


def layer_bytes(
    *, hidden: int, intermediate: int, heads: int, kv_heads: int, head: int, value_bytes: int, chosen: int = 0
) -> LayerBytes:
    """Bytes kept per token of one layer, from the sizes of the model. `chosen`: experts that compute a token.

    >>> layer_bytes(hidden=1024, intermediate=3072, heads=16, kv_heads=8, head=128, value_bytes=2)
    LayerBytes(least=2048, light=16448, all=28736)
    """
    least = hidden * value_bytes
    # The input, the residual after attention, the joint projection, the attention output, and a float32 per head.
    light = (2 * hidden + (2 * heads + 2 * kv_heads) * head) * value_bytes + 4 * heads
    # Each chosen expert has a copy of the token, its output, that times its weight, and that in the order of tokens;
    # gate and up, the activated gate, and the product. Layers of transformers keep all of it.
    mlp = 2 * intermediate if not chosen else 4 * chosen * hidden + 4 * intermediate
    return LayerBytes(least=least, light=light, all=light + mlp * value_bytes)


def levels(free_bytes: float, tokens: int, layers: int, each: LayerBytes) -> list[int]:
    """The level of every layer for a pack of `tokens`.

    >>> each = LayerBytes(least=1, light=5, all=10)
    >>> [levels(free, 1, 4, each) for free in (1000, 71, 55, 0)]
    [[2, 2, 2, 2], [2, 2, 2, 2], [2, 1, 1, 1], [0, 0, 0, 0]]
    """
    left = MAX_MEMORY_SHARE * free_bytes / tokens - WORKING * each.all - layers * each.least
    light = _fit(left, layers, each.light - each.least)
    all_ = _fit(left - light * (each.light - each.least), light, each.all - each.light)
    return [ALL] * all_ + [LIGHT] * (light - all_) + [LEAST] * (layers - light)


def pack_tokens(free_bytes: float, layers: int, each: LayerBytes, longest: int) -> int:
    """Tokens in one pack: as many as fit without recomputation, between SMALL_PACK and LARGE_PACK; fewer only if even
    the inputs alone would not fit. A response is never split, so a pack holds at least `longest` tokens."""
    free = max(0.0, MAX_MEMORY_SHARE * free_bytes)
    comfortable = int(free / ((layers + WORKING) * each.all))
    possible = int(free / (layers * each.least + WORKING * each.all))
    return max(1, longest, min(max(comfortable, SMALL_PACK), possible, LARGE_PACK))


def needed_bytes(tokens: int, layers: int, each: LayerBytes, *, least: bool = False) -> float:
    """Free memory with which a pack of `tokens` computes nothing twice, or with `least` can be computed at all.

    >>> each = LayerBytes(least=1, light=5, all=10)
    >>> levels(needed_bytes(7, 4, each), 7, 4, each), levels(needed_bytes(7, 4, each, least=True), 7, 4, each)
    ([2, 2, 2, 2], [0, 0, 0, 0])
    """
    return tokens * (layers * (each.least if least else each.all) + WORKING * each.all) / MAX_MEMORY_SHARE


def _fit(left: float, most: int, each: int) -> int:
    return max(0, min(most, int(left // each)))
