"""What a backward pass needs to find again, and how much of it to keep. Pure: bytes in, a choice out.

A layer can keep ALL that its backward pass needs; or all but the wide activations of its MLP (LIGHT), which is one
matrix product more; or nothing but its input (LEAST), which is the whole forward pass of the layer again. Bytes kept by
LIGHT save more work each than those that ALL keeps beyond it, so every layer is LIGHT before any is ALL.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST, LIGHT, ALL = range(3)
SPARE = 0.85
"""The part of the free memory that may be used: what allocators lose between pieces is in the rest."""
WORKING = 2
"""What a layer needs while it computes its gradients, in times of what ALL keeps."""
SMALL_PACK, LARGE_PACK = 8192, 32_768
"""Tokens: below the first a GPU waits for memory, above the second nothing is gained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBytes:
    """Kept per token and layer, by level."""

    least: int
    light: int
    all: int


def layer_bytes(
    *, hidden: int, intermediate: int, heads: int, kv_heads: int, head: int, value_bytes: int
) -> LayerBytes:
    """
    >>> layer_bytes(hidden=1024, intermediate=3072, heads=16, kv_heads=8, head=128, value_bytes=2)
    LayerBytes(least=2048, light=16448, all=28736)
    """
    least = hidden * value_bytes
    # The input, what attention added to it, its joint projection, its output, and a float32 per head.
    light = (2 * hidden + (2 * heads + 2 * kv_heads) * head) * value_bytes + 4 * heads
    return LayerBytes(least=least, light=light, all=light + 2 * intermediate * value_bytes)


def levels(free_bytes: float, tokens: int, layers: int, each: LayerBytes) -> list[int]:
    """What every layer should keep of a pack of `tokens`.

    >>> each = LayerBytes(least=1, light=5, all=10)
    >>> [levels(free, 1, 4, each) for free in (1000, 71, 55, 0)]
    [[2, 2, 2, 2], [2, 2, 2, 2], [2, 1, 1, 1], [0, 0, 0, 0]]
    """
    left = SPARE * free_bytes / tokens - WORKING * each.all - layers * each.least
    light = _fit(left, layers, each.light - each.least)
    whole = _fit(left - light * (each.light - each.least), light, each.all - each.light)
    return [ALL] * whole + [LIGHT] * (light - whole) + [LEAST] * (layers - light)


def pack_tokens(free_bytes: float, layers: int, each: LayerBytes, longest: int) -> int:
    """Tokens to take through the model at once: as many as need no work done twice, within what is any use; fewer only
    where even inputs alone would not fit. A response is never cut."""
    free = max(0.0, SPARE * free_bytes)
    comfortable = int(free / ((layers + WORKING) * each.all))
    possible = int(free / (layers * each.least + WORKING * each.all))
    return max(1, longest, min(max(comfortable, SMALL_PACK), possible, LARGE_PACK))


def _fit(left: float, most: int, each: int) -> int:
    return max(0, min(most, int(left // each)))
