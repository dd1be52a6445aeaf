"""Files of random bytes that a process holds, for tests of buckets."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from windfall.weights import manifest
from windfall.weights.buffers import Buffer
from windfall.weights.held_files import HeldFile

CHUNK, PART = 1 << 12, 1 << 14


def held(
    nbytes: int = 5 * PART + 77,
    *,
    seed: int = 0,
    cuts: tuple[int, ...] = (),
    kind: type = HeldFile,
    change: tuple[str, str] = ("", ""),
) -> HeldFile:
    """`cuts`: as in a manifest. `change`: before and after, of a delta. `kind`: a subclass of HeldFile."""
    buffer = Buffer(nbytes)
    buffer.data[:] = np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8)
    hashes = [manifest.hash_chunk(buffer.data[a:b]) for a, b in pairwise(manifest.chunk_bounds(nbytes, CHUNK, cuts))]
    entry = manifest.TensorEntry(name="w", dtype="uint8", shape=(nbytes,), offset=0, nbytes=nbytes)
    made = manifest.make(
        nbytes=nbytes,
        chunk_bytes=CHUNK,
        cuts=cuts,
        chunks=b"".join(h[0] for h in hashes),
        seals=b"".join(h[1] for h in hashes),
        entries=() if change[0] else (entry,),
        version=-1 if change[0] else seed,
        before=change[0],
        after=change[1],
    )
    return kind(made, buffer, filled=True)
