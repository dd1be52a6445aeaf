"""The length of every simulated response and its progress in real tokens, independent of the worker that generates it.

A simulated token stands for `granule` real tokens. The ledger counts whole granules only. The remainder is kept here,
so that a response that moves to another worker continues at the exact token, as a real one would.
"""

from __future__ import annotations

from array import array
from typing import Protocol

import xxhash

from windfall.link.messages import Work
from windfall.sim.machines.decode import FILLER, DecodeRow, simulated


def id_token_of(seed: int) -> int:
    """The first token of the response with this seed. It identifies the response."""
    return 16 + seed % (1 << 31)


class LengthDistribution(Protocol):
    """Draws the length of a response from its seed and group."""

    def draw(self, seed: int, group: int = 0) -> int: ...


class TokenSchedule:
    def __init__(self, lengths: LengthDistribution, *, granule: int, prompt_tokens: int, max_tokens: int) -> None:
        """`prompt_tokens` and `max_tokens` are in real tokens."""
        self.granule = granule
        self.distinct_tokens = False
        """Every token depends on its response and position, so that chaos can check it."""
        self._lengths, self._prompt_tokens, self._max_tokens = lengths, prompt_tokens, max_tokens
        self._generated: dict[int, int] = {}
        """By seed, for unfinished responses that no worker holds: real tokens generated so far."""
        self._finished_lengths: dict[int, int] = {}
        self.real_tokens = 0
        """Real tokens of all finished responses."""

    def row(self, work: Work) -> tuple[DecodeRow, int]:
        """The row that an engine starts from, and the group that the prompt belongs to."""
        g = self.granule
        prompt_and_sent = array("I", work.prompt)
        prompt = prompt_and_sent[: len(prompt_and_sent) - work.position]
        number = array("I", [id for id in prompt if id != FILLER])  # the padding depends on the granule
        group = xxhash.xxh3_64_intdigest(number.tobytes())
        drawn = self._lengths.draw(work.seed, group)
        known, early = self._generated.get(work.seed, 0), work.seed % g
        sent = min((known + early) // g, simulated(min(drawn, self._max_tokens), g) - 1)
        row = DecodeRow(
            handle=work.handle, seed=work.seed, id_token=id_token_of(work.seed), prompt=self._prompt_tokens,
            generated=known if sent == work.position else work.position * g, length=min(drawn, self._max_tokens),
            cut=drawn >= self._max_tokens, sent=work.position, early=early,
        )  # fmt: skip
        return row, group

    def stopped(self, row: DecodeRow) -> None:
        """Keep the progress of a response that an engine dropped before its end."""
        self._generated[row.seed] = row.generated

    def finished(self, row: DecodeRow) -> None:
        self._generated.pop(row.seed, None)
        if row.id_token not in self._finished_lengths:  # else its last frame was lost and it finishes a second time
            self._finished_lengths[row.id_token] = row.length
            self.real_tokens += row.length

    def length(self, id_token: int) -> int:
        """Real tokens of a finished response."""
        return self._finished_lengths[id_token]
