"""Drafted tokens: what a response is expected to say next, found in its own text and those of its group. Pure: numpy.

A response follows a place in a text: an index before which the text agrees with the end of the response's own text.
What comes next there is expected next here. A step computes several rows of a response: its newest token, and the
expected tokens. Each row samples the token at its position as if the rows before it were right. So the tokens up to and
including the first that was not expected are those that would have been sampled one by one (`verify`):

    >>> verify([5, 6, 9, 3], expected=[5, 6, 7, 3], left=100, stop=())
    (3, 2)

A place is followed as long as it is right: a run. Then another one is searched for: the longest agreement, of LEAST to
MOST tokens; among equals, the one after which more tokens are known (up to KNOWN); among these, the last one. `runs`
counts how long places were followed, with any number of rows: draft_length.py decides by it.

The texts of a group form a family. All texts together have at most `max_tokens` tokens: beyond that, the family that
was used least recently is forgotten as a whole. A response whose text was forgotten drafts nothing.

The GPU engine does the same on the device: cuda/kernels/drafts.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

LEAST, MOST = 3, 16
"""Tokens that must agree, and that are compared."""
KNOWN = 15
"""Tokens after a place that count when places are compared."""
RUNS = 64
"""Length of `runs`: the last entry has all longer runs, too."""
FAMILY = 16
"""Texts of a group that are kept beside those of running responses; further texts replace the oldest."""
MAX_TOKENS = 1 << 24
"""Upper limit for the tokens of all texts together: 64 MiB."""
_EMPTY = -1


def verify(drawn: Sequence[int], expected: Sequence[int], left: int, stop: Collection[int]) -> tuple[int, int]:
    """How many of the drawn tokens count, and how many were expected before the first that was not. `left`: tokens that
    the response may still generate."""
    right = 0
    while right < min(len(drawn), len(expected), left) and drawn[right] == expected[right]:
        right += 1
    count = max(0, min(right + 1, len(drawn), left))
    return next((n + 1 for n in range(count) if drawn[n] in stop), count), right


def count_run(runs: Any, run: int, right: int, rows: int) -> int:
    """The length of a run after a step in which `right` of `rows` tokens were expected. If it has ended, it is counted
    in `runs`. A run that reaches the last entry is counted, too; what follows is another one."""
    longest = len(runs) - 1
    run += right
    if right == rows and run < longest:
        return run
    runs[min(run, longest)] += 1
    return 0


class Match(NamedTuple):
    """A place: index `at` of text `row`. The `agreed` tokens before it are the newest ones of a response."""

    agreed: int
    row: int
    at: int


def longest_match(texts: np.ndarray, lengths: np.ndarray, own: np.ndarray) -> Match | None:
    """The place to follow, in the first `lengths[n]` tokens of each row of `texts`, after the tokens `own`."""
    flat, size = texts.reshape(-1), texts.shape[1]
    last = np.flatnonzero(flat == own[-1])
    row = last // size
    before = last - row * size  # tokens before this one
    inside = (before >= LEAST - 1) & (before + 1 < lengths[row])
    last, before, agreed = last[inside], before[inside], 1
    for n in range(1, min(MOST, len(own))):
        same = (before >= n) & (flat[np.maximum(last - n, 0)] == own[-1 - n])
        if not same.any():
            break
        last, before, agreed = last[same], before[same], n + 1
    if agreed < LEAST or not len(last):
        return None
    known = np.minimum(lengths[last // size] - before - 1, KNOWN)
    best = last[known == known.max()][-1]
    return Match(agreed, int(best // size), int(best % size) + 1)


@dataclass(slots=True, eq=False)
class _Text:
    row: int
    first: int  # index of the response's first token: the prompt is before it
    live: bool  # whether its response is generated here
    place: Match | None = None
    run: int = 0


class _Family:
    """The texts of a group, one row each."""

    def __init__(self) -> None:
        self.texts: dict[str, _Text] = {}  # by id of the response, oldest first
        self.tokens = np.full((1, 64), _EMPTY, np.int32)
        self.lengths = np.zeros(1, np.int64)
        self.counted = 0  # values of `tokens` that Drafts has counted

    def add(self, id: str, first: int, *, live: bool) -> _Text:
        """A new, empty text."""
        old = self.texts.pop(id, None)
        if old is None and len(self.texts) >= FAMILY:
            ended = next((key for key, text in self.texts.items() if not text.live), None)
            old = None if ended is None else self.texts.pop(ended)
        row = len(self.texts) if old is None else old.row
        self._reserve(row + 1, 0)
        self.tokens[row] = _EMPTY
        self.lengths[row] = 0
        text = self.texts[id] = _Text(row, first, live)
        return text

    def write(self, text: _Text, index: int, tokens: Sequence[int]) -> None:
        """Set the tokens of a text from `index` on, which is at most its length."""
        end = index + len(tokens)
        self._reserve(0, end)
        self.tokens[text.row, index:end] = tokens
        self.lengths[text.row] = max(self.lengths[text.row], end)

    def newest(self, text: _Text) -> np.ndarray:
        """The last tokens of a text, as many as are compared."""
        end = self.lengths[text.row]
        return self.tokens[text.row, max(0, end - MOST) : end]

    def _reserve(self, rows: int, length: int) -> None:
        have = self.tokens.shape
        need = tuple(max(2 * n, least) if least > n else n for n, least in zip(have, (rows, length), strict=True))
        if need != have:
            larger = np.full(need, _EMPTY, np.int32)
            larger[: have[0], : have[1]] = self.tokens
            self.tokens = larger
            self.lengths = np.pad(self.lengths, (0, need[0] - have[0]))


class Drafts:
    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self.runs = np.zeros(RUNS, np.int64)
        """How often a place was followed for 0, 1, 2, ... tokens."""
        self._max_tokens = max_tokens
        self._families: OrderedDict[str, _Family] = OrderedDict()  # by group, least recently used first
        self._live: dict[str, str] = {}  # from the responses that are generated here to their groups
        self._size = 0  # tokens that all families have room for

    def begin(self, group: str, id: str, tokens: Sequence[int], position: int) -> None:
        """A response is generated here from now on. `tokens`: what is known of it, its prompt included; the next token
        has index `position` in the response."""
        self.end(id)
        self._live[id] = group = group or id
        text = self._family(group).add(id, len(tokens) - position, live=True)
        self._write(group, text, 0, tokens)

    def expected(self, id: str, most: int) -> list[int]:
        """The tokens that are expected next, as far as they are known, at most this number."""
        if id not in self._live:
            return []
        family = self._families[self._live[id]]
        text = family.texts[id]
        if text.place is None:
            text.place = longest_match(family.tokens, family.lengths, family.newest(text))
        if text.place is None:
            return []
        _, row, at = text.place
        return family.tokens[row, at : min(at + most, family.lengths[row])].tolist()

    def extend(self, id: str, tokens: Sequence[int], right: int = 0, rows: int = 0) -> None:
        """Tokens that a response got. `rows`: how many it had in the step, of which `right` sampled what was expected;
        0: the step was a prefill, which follows nothing."""
        if id not in self._live:
            return
        group = self._live[id]
        family = self._families[group]
        text = family.texts[id]
        if rows:
            text.run = count_run(self.runs, text.run, right, rows)
        goes_on = 0 < right == rows
        text.place = text.place._replace(at=text.place.at + rows) if text.place and goes_on else None
        self._write(group, text, int(family.lengths[text.row]), tokens)

    def end(self, id: str) -> None:
        """The response is not generated here any more. Its text stays as long as there is room."""
        group = self._live.pop(id, None)
        if group is not None:
            self._families[group].texts[id].live = False

    def remember(self, group: str, id: str, position: int, tokens: Sequence[int]) -> None:
        """Tokens of a response of this group that was generated elsewhere; the first is at `position`. Tokens after a
        gap are ignored."""
        if id in self._live:
            return
        known = self._families[group].texts.get(id) if group in self._families else None
        if known is None and position == 0:
            known = self._family(group).add(id, 0, live=False)
        if known is not None and known.first + position <= self._families[group].lengths[known.row]:
            self._write(group, known, known.first + position, tokens)

    def _family(self, group: str) -> _Family:
        family = self._families.get(group)
        if family is None:
            family = self._families[group] = _Family()
        return family

    def _write(self, group: str, text: _Text, index: int, tokens: Sequence[int]) -> None:
        """Write to a text, then forget families until the others fit."""
        family = self._families[group]
        family.write(text, index, tokens)
        self._families.move_to_end(group)
        self._size += family.tokens.size - family.counted
        family.counted = family.tokens.size
        while self._size > self._max_tokens:
            forgotten, family = self._families.popitem(last=False)
            self._size -= family.tokens.size
            for id in [id for id, group in self._live.items() if group == forgotten]:
                del self._live[id]

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
        assert self._size == sum(f.tokens.size for f in self._families.values()), "the size is wrong"
        assert self._size <= self._max_tokens, "the texts have too many tokens"
        for family in self._families.values():
            rows = [t.row for t in family.texts.values()]
            assert sorted(rows) == list(range(len(rows))), "a row is lost, or two texts have it"
            assert all((family.tokens[r, : family.lengths[r]] >= 0).all() for r in rows), "a text has a gap"
        live = {id: group for group, f in self._families.items() for id, t in f.texts.items() if t.live}
        assert live == self._live, "a response has no text, or a text has no response"
