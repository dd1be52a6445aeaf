"""Where a response ends, and whether a frame says so: a finish where there is none, or none where there is one, is a
worker's mistake, not a token's. Pure.
"""

from __future__ import annotations

from array import array

from windfall.ledger.episode import Episode
from windfall.link.messages import Tokens


class Malformed(ValueError):
    """A worker sent what no right worker sends. Nothing of that frame was taken."""


def check(episode: Episode, frame: Tokens, row: int, tokens: array[int], at: int) -> None:
    """`at`: where the tokens after this row begin."""
    count = frame.counts[row] if frame.counts else 1
    end, said = frame.positions[row] + count, frame.finished.get(row)
    if count > 1 and not episode.stop.isdisjoint(tokens[at - count : at - 1]):
        raise Malformed(f"{episode.id}: tokens after its stop token")
    if end > episode.max_tokens:
        raise Malformed(f"{episode.id}: {end} tokens, {episode.max_tokens} are allowed")
    right = "stop" if tokens[at - 1] in episode.stop else "length" if end == episode.max_tokens else None
    if said != right:
        raise Malformed(f"{episode.id}: finish {said!r} after {end} tokens, not {right!r}")
