"""What is sent to a worker: the version it works with, and its responses as messages. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from windfall.ledger.ledger import LedgerEntry
from windfall.link import messages as m

FRAME_BYTES = 1 << 20
"""A frame of work ends before its prompts exceed this many bytes. A single longer prompt gets its own frame."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """The version that work is assigned with, and where workers pull it."""

    version: int
    digest: str
    url: str


def work_frames(entries: list[LedgerEntry]) -> Iterator[tuple[m.Work, ...]]:
    """Split work into frames that are well within a link's limit, no matter how long the prompts are."""
    frame: list[m.Work] = []
    size = 0
    for work in map(_work, entries):
        if frame and size + len(work.prompt) > FRAME_BYTES:
            yield tuple(frame)
            frame, size = [], 0
        frame.append(work)
        size += len(work.prompt)
    yield tuple(frame)


def _work(entry: LedgerEntry) -> m.Work:
    """A response to begin or to continue. Its tokens are copied as bytes, because a response that moves may be long."""
    e = entry.episode
    position = len(e.tokens)
    return m.Work(
        handle=entry.handle, prompt=array("I", e.prompt).tobytes() + e.tokens.tobytes(), position=position,
        seed=e.seed, max_tokens=e.max_tokens - position, sampling=e.sampling, stop=tuple(e.stop),
    )  # fmt: skip
