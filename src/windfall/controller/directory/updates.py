"""Which files bring a reader to the wanted weights in the least time. Pure.

Every file is a step from some weights to others:

    a full copy        from nothing             to its own digest
    a delta            from `before`            to `after`
    an adapter         from its base, `before`  to its own digest

    Example: a worker holds version 3. Known are a copy of version 5 (16 GB) and the deltas 3 to 4 and 4 to 5 (0.5 GB
    each). At 0.1 GB/s the deltas take 10 s, and the copy 160 s. At 10 GB/s the copy takes 1.6 s; the deltas 0.1 s, but
    applying them takes 4 s: the worker reads the copy.

Deltas are chained, not composed: a chain needs no work per pair of versions, and readers share its files.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable

from windfall.link.messages import FileRef


def result(file: FileRef) -> str:
    """The digest of the weights that a reader has after it has read the file."""
    return file.after or file.digest


def plan(
    held: Collection[str], wanted: str, files: Iterable[FileRef], *, bytes_per_s: float, apply_s: float
) -> tuple[FileRef, ...] | None:
    """The files to read, in order, for a reader that has all weights in `held`; None if no files lead to `wanted`.
    `apply_s`: what applying deltas takes, however many (the copy is verified once, after the last)."""
    steps: dict[str, list[FileRef]] = {}
    for file in sorted(files, key=lambda f: f.digest):
        steps.setdefault(file.before, []).append(file)
    # A state is (weights, whether a delta was applied); the path breaks ties, so that equal inputs give equal plans.
    queue: list[tuple[float, tuple[str, ...], str, bool]] = [(0.0, (), digest, False) for digest in {"", *held}]
    heapq.heapify(queue)
    by_digest = {file.digest: file for found in steps.values() for file in found}
    visited: set[tuple[str, bool]] = set()
    while queue:
        cost_s, path, digest, applied = heapq.heappop(queue)
        if digest == wanted:
            return tuple(by_digest[name] for name in path)
        if (digest, applied) in visited:
            continue
        visited.add((digest, applied))
        for file in steps.get(digest, ()):
            delta = bool(file.after)
            more_s = file.nbytes / bytes_per_s + (apply_s if delta and not applied else 0.0)
            heapq.heappush(queue, (cost_s + more_s, (*path, file.digest), result(file), applied or delta))
    return None
