"""From an engine's chunks to what goes over the link."""

from __future__ import annotations

from array import array

from windfall.link.messages import Tokens
from windfall.types import Chunk


def frame(chunks: list[Chunk]) -> Tokens:
    """What one engine step made, in columns.

    >>> frame([Chunk(id="7", position=3, tokens=(5,), logprobs=(-0.5,), version=2, finish="stop")]).finished
    {0: 'stop'}
    """
    single = all(len(c.tokens) == 1 for c in chunks)
    return Tokens(
        version=chunks[0].version,
        handles=tuple(int(c.id) for c in chunks),
        positions=tuple(c.position for c in chunks),
        counts=() if single else tuple(len(c.tokens) for c in chunks),
        tokens=array("I", (t for c in chunks for t in c.tokens)).tobytes(),
        logprobs=array("f", (x for c in chunks for x in c.logprobs)).tobytes(),
        finished={i: c.finish for i, c in enumerate(chunks) if c.finish},
    )
