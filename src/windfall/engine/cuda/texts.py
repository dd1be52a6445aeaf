"""Which texts the GPU engine drafts from, and where they are on the device. Pure: numpy, no tensors.

Every running response has a row with its text, which the device extends. Rows of finished responses stay until others
need them, least recently used first, so that later siblings can draft from them. `remember` adds texts of siblings that
other workers generated. If all rows belong to running responses, a response that begins has none until one ends. The
rows of one group form a family: drafts of a response come from its own row and those of its family, where the texts of
running responses come first.

The device has one int32 array with three sections: the length of every row, the families, and the tokens. This module
keeps no copy of the tokens: only the changes that were not sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from windfall.engine.drafts import FAMILY, MAX_TOKENS
from windfall.types import Request

NO_ROW = -1
MAX_LENGTH = 1 << 15
"""Upper limit for the length of a row: nothing is drafted for longer responses. With longer rows there would be too few
for all responses and their siblings."""


@dataclass(slots=True, eq=False)
class _Text:
    row: int
    group: str
    first: int  # index of the response's first token: the prompt is before it
    live: bool  # whether its response is running here
    length: int = 0


class TextRows:
    def __init__(self, *, slots: int, length: int) -> None:
        """`length`: room for the tokens of a text and one more. What does not fit is left out."""
        self.length = length
        self.rows = max(1, min(4 * slots, MAX_TOKENS // length))
        self.without: dict[str, None] = {}
        """Running responses that have no row, in the order of arrival."""
        self._free = list(range(self.rows - 1, -1, -1))
        self._live: dict[str, _Text] = {}
        self._ended: OrderedDict[str, _Text] = OrderedDict()  # least recently used first
        self._families: dict[str, tuple[int, list[_Text]]] = {}  # group: index of the family, its texts, oldest first
        self._free_families = list(range(self.rows - 1, -1, -1))
        self._changes: list[tuple[int, np.ndarray]] = [(self.rows, np.full(self.rows * FAMILY, NO_ROW, np.int32))]

    @property
    def size(self) -> int:
        """Values of the device's array."""
        return self.rows * (1 + FAMILY + self.length)

    @property
    def available(self) -> int:
        """Rows that running responses can get."""
        return len(self._free) + len(self._ended)

    def begin(self, request: Request, tokens: Sequence[int]) -> tuple[int, int]:
        """The row and the family of a response that gets a slot; NO_ROW if there is no room for its text."""
        group = request.group or request.id
        text = self._live.get(request.id)
        if text is None or text.length > len(tokens):
            self.end(request.id)
            self._forget(self._ended.pop(request.id, None))
            text = self._add(group, len(request.prompt) - request.position, live=True)
            if text is None:
                self.without[request.id] = None
                return NO_ROW, NO_ROW
            self._live[request.id] = text
            self._write(text, 0, tokens)
        return text.row, self._families[group][0]

    def extended(self, id: str, count: int) -> None:
        """The device has added `count` tokens to the text of a running response, as far as there was room."""
        text = self._live.get(id)
        if text is not None:
            text.length = min(text.length + count, self.length - 1)

    def end(self, id: str) -> None:
        """The response runs no longer. Its text stays as long as there is room."""
        self.without.pop(id, None)
        text = self._live.pop(id, None)
        if text is not None:
            text.live = False
            self._ended[id] = text
            if len(self._families[text.group][1]) > FAMILY:
                self._write_family(text.group)

    def remember(self, group: str, id: str, position: int, tokens: Sequence[int]) -> None:
        """Tokens of a response that runs elsewhere; the first is at `position`. A text with a gap is not extended."""
        if id in self._live:
            return
        text = self._ended.get(id)
        if text is None and position == 0 and (text := self._add(group, 0, live=False)) is not None:
            self._ended[id] = text
        if text is None or text.length < text.first + position:
            return
        self._ended.move_to_end(id)
        self._write(text, text.first + position, tokens)

    def take_changes(self) -> tuple[np.ndarray, np.ndarray]:
        """Indices and values of all changes since the last call, the last one for every index."""
        if not self._changes:
            return np.zeros(0, np.int32), np.zeros(0, np.int32)
        indices = np.concatenate([np.arange(start, start + len(v), dtype=np.int32) for start, v in self._changes])
        values = np.concatenate([v for _, v in self._changes])
        self._changes = []
        # An index may have changed twice, and a copy to the same place twice has no order.
        last = len(indices) - 1 - np.unique(indices[::-1], return_index=True)[1]
        return indices[last], values[last]

    def _add(self, group: str, first: int, *, live: bool) -> _Text | None:
        """A new text, in a row that is free or of a response that ended."""
        while not self._free and self._ended:
            self._forget(self._ended.popitem(last=False)[1])
        if not self._free:
            return None
        text = _Text(self._free.pop(), group, first, live)
        if group not in self._families:
            self._families[group] = self._free_families.pop(), []
        self._families[group][1].append(text)
        self._write_family(group)
        return text

    def _forget(self, text: _Text | None) -> None:
        if text is None:
            return
        self._free.append(text.row)
        index, texts = self._families[text.group]
        texts.remove(text)
        if texts:
            self._write_family(text.group)
        else:
            del self._families[text.group]
            self._free_families.append(index)

    def _write_family(self, group: str) -> None:
        """The newest texts, those of running responses before others."""
        index, texts = self._families[group]
        rows = [t.row for t in sorted(texts, key=lambda text: text.live)[-FAMILY:]]
        self._changes.append((self.rows + index * FAMILY, np.array(rows + [NO_ROW] * (FAMILY - len(rows)), np.int32)))

    def _write(self, text: _Text, position: int, tokens: Sequence[int]) -> None:
        tokens = tokens[: max(0, self.length - 1 - position)]
        start = self.rows * (1 + FAMILY) + text.row * self.length + position
        self._changes.append((start, np.array(tokens, np.int32)))
        text.length = max(text.length, position + len(tokens))
        self._changes.append((text.row, np.array([text.length], np.int32)))

    def check(self) -> None:
        """Raise AssertionError unless every row is free or belongs to one text, and to the family of its group."""
        texts = [*self._live.values(), *self._ended.values()]
        assert sorted([t.row for t in texts] + self._free) == list(range(self.rows)), "a text row is lost or used twice"
        for t in texts:
            assert t in self._families[t.group][1], "a text is not in its family"
        assert sum(len(found) for _, found in self._families.values()) == len(texts), "a family has a text too many"
        used = [index for index, _ in self._families.values()]
        assert sorted(used + self._free_families) == list(range(self.rows)), "a family is lost or used twice"
        assert all(t.live for t in self._live.values()), "a text ended, but its response is running"
        assert not any(t.live for t in self._ended.values()), "a response ended, but its text is live"
        assert not self.without.keys() & self._live.keys(), "a response has a row, and has none"
