"""The host's copy of the device's state, as one row of int32 words: what it changes here is sent in one small copy.

The device begins with the same words at the same places, with `State` as views of them (`device.py`). Tokens, lengths
and what else changes with every token changes there alone: here are the values that the host gave last, and which of
them have not been sent. Pure: numpy, no tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from windfall.types import Request

ALIGN = 128
"""Every section begins at a multiple of so many words, as if it were an allocation of its own."""


class Words:
    def __init__(self, *, slots: int, pages_each: int, batch: int, stops: int) -> None:
        self.slots, self.pages_each, self.stops = slots, pages_each, stops
        s = slots + 1  # the last is nobody's
        self.sizes = {
            "last": s, "length": s, "left": s, "position": s, "seed": 2 * s, "temperature": s, "top_k": s, "top_p": s,
            "stop": s * stops, "table": s * pages_each, "rows": batch, "turn": 2, "shared": batch,
            "family_first": batch, "family_count": batch, "family_tokens": batch,
        }  # fmt: skip
        self.at: dict[str, int] = {}
        total = 0
        for name, size in self.sizes.items():
            self.at[name] = total
            total += -(-size // ALIGN) * ALIGN
        self.data = np.zeros(total, np.int32)
        for name in ("temperature", "top_p"):
            self._section(name)[:] = np.float32(1).view(np.int32)
        self._section("stop")[:] = -1
        self._section("rows")[:] = slots
        self._changed: list[tuple[int, int]] = []

    def begin(self, slot: int, request: Request, *, length: int, left: int, position: int) -> None:
        """A response gets a slot. `length`: the place in its sequence of the last token that is given."""
        how, at = request.sampling, self.at
        seed = np.array([request.seed & 0xFFFFFFFFFFFFFFFF], np.uint64).view(np.int32)
        cuts = np.array([how.temperature, how.top_p], np.float32).view(np.int32)
        self._put(at["length"] + slot, length)
        self._put(at["left"] + slot, left)
        self._put(at["position"] + slot, position)
        self._put(at["seed"] + 2 * slot, seed)
        self._put(at["temperature"] + slot, cuts[0])
        self._put(at["top_k"] + slot, min(how.top_k, 2**31 - 1))
        self._put(at["top_p"] + slot, cuts[1])
        self._put(at["stop"] + slot * self.stops, self._stops(request.stop))

    def pages(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """These are pages `first`, `first + 1`, ... of the response in this slot."""
        self._put(self.at["table"] + slot * self.pages_each + first, pages)

    def tables(self, slots: np.ndarray, columns: int) -> np.ndarray:
        """The first pages of the responses in these slots, a row for each. What comes after their last is anything."""
        return self._section("table").reshape(-1, self.pages_each)[:, :columns][slots]

    def rows(self, slots: np.ndarray, batch: int) -> None:
        """Which slots take part in the next steps, filled up to `batch` with nobody's."""
        now = np.full(batch, self.slots, np.int32)
        now[: len(slots)] = slots
        self._replace("rows", now)

    def families(self, families: np.ndarray, batch: int, room: int) -> None:
        """Which of those rows are families: (first row, rows, shared tokens) of each, filled up to `room` with none."""
        first, count, tokens = families.T
        shared = np.zeros(batch, np.int32)
        shared[np.repeat(first - (np.cumsum(count) - count), count) + np.arange(count.sum())] = np.repeat(tokens, count)
        self._replace("shared", shared)
        for name, column in (("family_first", first), ("family_count", count), ("family_tokens", tokens)):
            now = np.zeros(room, np.int32)
            now[: len(column)] = column
            self._replace(name, now)

    def turn(self, row: int) -> None:
        """Where the next step's tokens go."""
        self._put(self.at["turn"], (row, 0))

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """Places and values of all that was changed since the last time. A place may come twice, with one value."""
        if not self._changed:
            return np.zeros(0, np.int32), np.zeros(0, np.int32)
        start, count = np.array(self._changed, np.int64).T
        self._changed = []
        ends = np.cumsum(count)
        places = np.repeat(start - (ends - count), count) + np.arange(ends[-1])
        return places.astype(np.int32), self.data[places]

    def _replace(self, name: str, now: np.ndarray) -> None:
        """What a section begins with, if that is new."""
        if not np.array_equal(self._section(name)[: len(now)], now):
            self._put(self.at[name], now)

    def _put(self, start: int, values: int | np.integer | np.ndarray | Sequence[int]) -> None:
        count = 1 if isinstance(values, int | np.integer) else len(values)
        self.data[start : start + count] = values
        if count:
            self._changed.append((start, count))

    def _stops(self, stop: Collection[int]) -> np.ndarray:
        """As many as there is room for; the host looks for the others."""
        out = np.full(self.stops, -1, np.int32)
        fit = [t for t in stop if 0 <= t < 2**31][: self.stops]
        out[: len(fit)] = fit
        return out

    def _section(self, name: str) -> np.ndarray:
        return self.data[self.at[name] : self.at[name] + self.sizes[name]]
