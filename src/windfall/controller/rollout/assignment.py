"""What is sent to a worker: its responses as messages. Pure.

An exact engine samples a token by (seed, position), so a response keeps its seed wherever it continues. An engine that
is not exact restarts its random numbers for every request, so with the same seed it would reuse those of the first
tokens. Therefore it gets a fresh seed for every continuation, derived from (seed, position).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import xxhash

from windfall.controller.ledger.ledger import LedgerEntry
from windfall.link import messages as m

FRAME_BYTES = 1 << 20
"""A frame of work ends before its prompts exceed this many bytes. A single longer prompt gets its own frame."""


def work_frames(entries: Sequence[LedgerEntry], *, exact: bool = True) -> Iterator[tuple[m.Work, ...]]:
    """Split work into frames that are well within a link's limit, no matter how long the prompts are. `exact`: the
    worker's engine is."""
    frame: list[m.Work] = []
    size = 0
    for work in (_work(entry, exact) for entry in entries):
        if frame and size + len(work.prompt) > FRAME_BYTES:
            yield tuple(frame)
            frame, size = [], 0
        frame.append(work)
        size += len(work.prompt)
    yield tuple(frame)


def fresh_seed(seed: int, position: int) -> int:
    """The seed with which an engine that is not exact continues a response at `position`.

    >>> fresh_seed(7, 0), fresh_seed(7, 40) != fresh_seed(7, 41)
    (7, True)
    """
    return xxhash.xxh3_64_intdigest(f"{seed}@{position}".encode()) if position else seed


def _work(entry: LedgerEntry, exact: bool) -> m.Work:
    """A response to begin or to continue. Its tokens are copied as bytes, because a response that moves may be long."""
    e = entry.episode
    position = len(e.tokens)
    seed = e.seed if exact else fresh_seed(e.seed, position)
    return m.Work(
        handle=entry.handle,
        prompt=array("I", e.prompt).tobytes() + e.tokens.tobytes(),
        position=position,
        seed=seed,
        max_tokens=e.end - position,
        sampling=e.sampling,
        stop=tuple(e.stop),
        group=e.group,
        policy=e.policy,
        experts_known=len(e.prompt) + e.experts_end,
    )
