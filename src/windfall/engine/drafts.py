"""Drafted tokens: what a response is expected to say next, found in its own text and those of its group. Pure: numpy.

A response follows a place in a text: an index before which the text agrees with the end of the response's own text.
What comes next there is expected next here. A step computes several rows of a response: its newest token, and the
expected tokens. Each row samples the token at its position as if the rows before it were right. So the tokens up to and
including the first that was not expected are those that would have been sampled one by one (`verify`):

    >>> verify([5, 6, 9, 3], expected=[5, 6, 7, 3], left=100, stop=())
    (3, 2)

A place is followed as long as it is right: a run. Then another one is searched for: the longest agreement, of LEAST to
MOST tokens; among equals, the one after which more tokens are known (up to KNOWN); among these, the last one. `runs`
counts how long places were followed, with any number of rows: draft_length.py decides by it. A search takes time of the
host, so the caller may leave it out: then the response is not followed, and nothing is counted until it is again.

The texts of a group form a family. All texts together have at most `max_tokens` tokens: beyond that, the family that
was used least recently is forgotten as a whole. A response whose text was forgotten drafts nothing. Texts of running
responses are copied only when their family is searched.

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


def count_run(runs: Any, run: int, count: int, goes_on: bool) -> int:
    """The length of a run after a step that gave `count` tokens. `goes_on`: all of them were expected, and the response
    has not ended. Otherwise the run has ended and is counted in `runs`: the last token counts as one that was not
    expected, also if the response ended with it. A run that reaches the last entry is counted, too; what follows is
    another one."""
    longest = len(runs) - 1
    run += count
    if goes_on and run < longest:
        return run
    runs[longest if goes_on else min(run - 1, longest)] += 1
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
    live: Sequence[int] | None  # all tokens of a response that is generated here, which grow; None: of any other
    length: int = 0  # tokens that were copied
    place: Match | None = None
    run: int = 0


class _Family:
    """The texts of a group, one row each."""

    def __init__(self) -> None:
        self.texts: dict[str, _Text] = {}  # by id of the response, oldest first
        self.tokens = np.full((1, 64), _EMPTY, np.int32)
        self.lengths = np.zeros(1, np.int64)
        self.counted = 0  # values of `tokens` that Drafts has counted

    def add(self, id: str, first: int, live: Sequence[int] | None) -> _Text:
        """A new, empty text."""
        old = self.texts.pop(id, None)
        if old is None and len(self.texts) >= FAMILY:
            ended = next((key for key, text in self.texts.items() if text.live is None), None)
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
        self.lengths[text.row] = text.length = max(text.length, end)

    def copy_live(self) -> None:
        """Copy what running responses have said since the last copy."""
        for text in self.texts.values():
            if text.live is not None and len(text.live) > text.length:
                self.write(text, text.length, text.live[text.length :])

    def newest(self, text: _Text) -> np.ndarray:
        """The last tokens of a text, as many as are compared."""
        end = text.length
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
        self.following: set[str] = set()
        """Responses that follow a place: for them, `expected` need not search."""
        self._max_tokens = max_tokens
        self._families: OrderedDict[str, _Family] = OrderedDict()  # by group, least recently used first
        self._live: dict[str, str] = {}  # from the responses that are generated here to their groups
        self._size = 0  # tokens that all families have room for

    def begin(self, group: str, id: str, tokens: Sequence[int], position: int) -> None:
        """A response is generated here from now on. `tokens`: all that is known of it, its prompt included. The caller
        adds every new token until `end`; the next one has index `position` in the response."""
        self.end(id)
        self._live[id] = group = group or id
        self._family(group).add(id, len(tokens) - position, tokens)

    def expected(self, id: str, most: int, *, search: bool = True) -> list[int] | None:
        """The tokens that are expected next, as far as they are known, at most this number. None: the response is not
        followed, because its text was forgotten, or because it has no place and `search` is off."""
        group = self._live.get(id)
        if group is None:
            return None
        family = self._families[group]
        text = family.texts[id]
        if text.place is None and not search:
            return None
        if text.place is None or text.place.at + most > family.lengths[text.place.row]:
            family.copy_live()
            self._fit(group)
        if id not in self._live:
            return None
        if text.place is None:
            text.place = longest_match(family.tokens, family.lengths, family.newest(text))
            if text.place is None:
                return []
            self.following.add(id)
        _, row, at = text.place
        return family.tokens[row, at : min(at + most, int(family.lengths[row]))].tolist()

    def advance(self, id: str, count: int, *, goes_on: bool) -> None:
        """A response that was followed got `count` tokens. `goes_on`: all of them were expected, and it has not
        ended."""
        if id not in self._live:
            return
        text = self._families[self._live[id]].texts[id]
        text.run = count_run(self.runs, text.run, count, goes_on)
        if goes_on and text.place is not None:
            text.place = text.place._replace(at=text.place.at + count)
        else:
            self._lose_place(id, text)

    def leave(self, id: str) -> None:
        """A response got a token without being followed: after a prefill. It has no place until the next search."""
        if id in self.following:
            self._lose_place(id, self._families[self._live[id]].texts[id])

    def end(self, id: str) -> None:
        """The response is not generated here any more. Its text stays as long as there is room."""
        group = self._live.pop(id, None)
        if group is not None:
            family = self._families[group]
            text = family.texts[id]
            self._lose_place(id, text)
            if text.live is not None:
                family.write(text, text.length, text.live[text.length :])
            text.live = None
            self._fit(group)

    def remember(self, group: str, id: str, position: int, tokens: Sequence[int]) -> None:
        """Tokens of a response of this group that was generated elsewhere; the first is at `position`. Tokens after a
        gap are ignored."""
        if id in self._live:
            return
        known = self._families[group].texts.get(id) if group in self._families else None
        if known is None and position == 0:
            known = self._family(group).add(id, 0, None)
        if known is not None and known.first + position <= known.length:
            self._families[group].write(known, known.first + position, tokens)
            self._fit(group)

    def _family(self, group: str) -> _Family:
        family = self._families.get(group)
        if family is None:
            family = self._families[group] = _Family()
        return family

    def _lose_place(self, id: str, text: _Text) -> None:
        text.place, text.run = None, 0
        self.following.discard(id)

    def _fit(self, group: str) -> None:
        """This family was used and has grown. Forget others until the rest fits."""
        family = self._families[group]
        self._families.move_to_end(group)
        self._size += family.tokens.size - family.counted
        family.counted = family.tokens.size
        while self._size > self._max_tokens:
            forgotten, family = self._families.popitem(last=False)
            self._size -= family.counted
            for id in [id for id, group in self._live.items() if group == forgotten]:
                del self._live[id]
                self.following.discard(id)

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
        assert self._size == sum(f.counted for f in self._families.values()), "the size is wrong"
        assert self._size <= self._max_tokens, "the texts have too many tokens"
        for family in self._families.values():
            rows = [t.row for t in family.texts.values()]
            assert sorted(rows) == list(range(len(rows))), "a row is lost, or two texts have it"
            assert all((family.tokens[r, : family.lengths[r]] >= 0).all() for r in rows), "a text has a gap"
            assert all(family.lengths[t.row] == t.length for t in family.texts.values()), "two lengths of a text differ"
        live = {id: group for group, f in self._families.items() for id, t in f.texts.items() if t.live is not None}
        assert live == self._live, "a response has no text, or a text has no response"
        followed = {id for f in self._families.values() for id, t in f.texts.items() if t.place is not None}
        assert followed == self.following, "the responses that follow a place are others"
