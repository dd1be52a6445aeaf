"""The delta of two versions in one process and one pass: what several ranks and devices must produce together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from windfall.weights import delta
from windfall.weights.delta import MAX_RATIO, DeltaBlocks, EncodedBlocks
from windfall.weights.manifest import Manifest


def encode(
    old: Any,
    new: Any,
    manifest: Manifest,
    *,
    max_ratio: float = MAX_RATIO,
    map_: Callable[..., Iterable[EncodedBlocks]] = map,
) -> bytes | None:
    """The blob that turns `old` into `new`, or None if it would exceed `max_ratio` of the full copy."""
    old, new = np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)
    blocks = DeltaBlocks(manifest.ranges())
    sample = delta.sampled(range(len(blocks)), len(blocks))
    if sample:
        found = delta.encode_blocks(old, new, blocks, sample)
        if blocks.size(found.rows) > max_ratio * sum(blocks[i].stop - blocks[i].start for i in sample):
            return None
    parts = list(map_(lambda run: delta.encode_blocks(old, new, blocks, run), delta.runs(range(len(blocks)))))
    if sum(blocks.size(part.rows) for part in parts) > max_ratio * manifest.nbytes:
        return None
    head, nbytes, places = delta.arrange([part.rows for part in parts], blocks)
    blob = np.zeros(nbytes, np.uint8)
    blob[: len(head)] = np.frombuffer(head, np.uint8)
    for part, place in zip(parts, places, strict=True):
        for at, data in place.writes(part):
            blob[at : at + len(data)] = np.frombuffer(data, np.uint8)
    return blob.tobytes()
