"""What a worker is given: the version it works with, and its responses as messages. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from windfall.ledger.ledger import LedgerEntry
from windfall.link import messages as m

ASSIGN_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """The version that work is given out with, and where workers get it."""

    version: int
    digest: str
    url: str


def frames(entries: list[LedgerEntry]) -> Iterator[tuple[m.Work, ...]]:
    """Work in frames that are well within what a link takes, however long the prompts are."""
    frame: list[m.Work] = []
    size = 0
    for work in map(_work, entries):
        if frame and size + len(work.prompt) > ASSIGN_BYTES:
            yield tuple(frame)
            frame, size = [], 0
        frame.append(work)
        size += len(work.prompt)
    yield tuple(frame)


def _work(entry: LedgerEntry) -> m.Work:
    """As Episode.request() has it, but in bytes at once: a response that moves may be long."""
    e = entry.episode
    made = len(e.tokens)
    return m.Work(
        handle=entry.handle, prompt=array("I", e.prompt).tobytes() + e.tokens.tobytes(), position=made, seed=e.seed,
        max_tokens=e.max_tokens - made, sampling=e.sampling, stop=tuple(e.stop),
    )  # fmt: skip
