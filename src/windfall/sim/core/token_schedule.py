"""What is true of simulated responses whoever makes them: how long each gets, and how far it is in real tokens.

A simulated token stands for `granule` real ones. The ledger knows of whole granules only; the rest is remembered here,
so that a response that moves goes on where it was, to the token, as it would in earnest.
"""

from __future__ import annotations

from array import array
from typing import Protocol

import xxhash

from windfall.link.messages import Work
from windfall.sim.machines.decode import FILLER, DecodeRow, simulated

TAGS = 1 << 31
FIRST_TAG = 16


class Drawn(Protocol):
    """Lengths: a function of a response's seed and its group."""

    def of(self, seed: int, group: int = 0) -> int: ...


class TokenSchedule:
    def __init__(self, lengths: Drawn, *, granule: int, prompt_tokens: int, max_tokens: int) -> None:
        """`prompt_tokens`, `max_tokens`: real ones."""
        self.granule, self.marks = granule, False
        self._lengths, self._prompt, self._most = lengths, prompt_tokens, max_tokens
        self._made: dict[int, int] = {}
        self._length: dict[int, int] = {}
        self.real_tokens = 0
        """Of the responses that have ended."""

    def row(self, work: Work) -> tuple[DecodeRow, int]:
        """What an engine starts from, and the group whose prompt it is."""
        g = self.granule
        prompt = array("I", work.prompt)
        asked = array("I", [id for id in prompt[: len(prompt) - work.position] if id != FILLER])
        group = xxhash.xxh3_64_intdigest(asked.tobytes())  # the same whatever a simulated token stands for
        drawn = self._lengths.of(work.seed, group)
        known, ahead = self._made.get(work.seed, 0), work.seed % g
        told = min((known + ahead) // g, simulated(min(drawn, self._most), g) - 1)
        made = known if told == work.position else work.position * g
        tag = FIRST_TAG + work.seed % TAGS
        row = DecodeRow(
            handle=work.handle, seed=work.seed, tag=tag, prompt=self._prompt, made=made,
            length=min(drawn, self._most), cut=drawn >= self._most, sent=work.position, ahead=ahead,
        )  # fmt: skip
        return row, group

    def left(self, row: DecodeRow) -> None:
        """It has stopped here, unfinished."""
        self._made[row.seed] = row.made

    def ended(self, row: DecodeRow) -> None:
        self._made.pop(row.seed, None)
        if row.tag not in self._length:  # else its end was lost on the way, and was made again
            self._length[row.tag] = row.length
            self.real_tokens += row.length

    def length(self, tag: int) -> int:
        """Real tokens of a response that has ended."""
        return self._length[tag]

    def forget(self, tag: int) -> None:
        self._length.pop(tag, None)
