"""The delta of two versions in one process, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from windfall.weights.buffers import Buffer
from windfall.weights.delta import MAX_RATIO, part
from windfall.weights.manifest import Manifest
from windfall.weights.publishing import row_writer
from windfall.weights.publishing.plan import Piece


def encode(
    old: Any, new: Any, manifest: Manifest, *, max_ratio: float = MAX_RATIO, where: str = "cpu", pack: bool = False
) -> bytes | None:
    """The blob that turns `old` into `new`, or None if it would exceed `max_ratio` of the full copy."""
    new = np.frombuffer(new, np.uint8)
    sources = {}
    for e in manifest.ranges():
        raw = torch.from_numpy(new[e.offset : e.offset + e.nbytes].copy())
        sources[Piece(e, e.offset, e.offset + e.nbytes)] = raw.view(getattr(torch, e.dtype)).to(where)
    before, after = Buffer(manifest.nbytes), Buffer(manifest.nbytes)
    before.data[:] = np.frombuffer(old, np.uint8)
    changes = row_writer.write(after, sources, manifest.bounds(), old=before, differences=pack)
    assert (after.data == new).all()
    before.close()
    after.close()
    if changes is None:
        return None
    blob = b"".join(part(changes, pack))
    return blob if len(blob) <= max_ratio * manifest.nbytes else None
