"""The host's copy of the device's state, as one int32 array, so that all changes are sent in one small copy.

The device starts with the same array, and `DeviceState` consists of views of it (`device.py`). Values that change with
every token, such as lengths, are updated on the device alone: this array holds the values that the host wrote last, and
remembers which of them have not been sent. Pure: numpy, no tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from windfall.engine.cuda.texts import NO_ROW, TextRows
from windfall.types import Request

STOPS = 8  # upper limit for the stop tokens of a response that the device checks
ALIGN = 128  # every section starts at a multiple of this many values, like a separate allocation would


class HostState:
    def __init__(self, *, slots: int, pages_each: int, batch: int, texts: TextRows | None = None) -> None:
        """`texts`: where responses have their text, if tokens are drafted."""
        self.slots = slots
        self.texts = texts
        self.pages_each = pages_each
        s = slots + 1  # the last one is the padding slot
        self.sizes = {
            "last": s, "length": s, "left": s, "position": s, "seed": 2 * s, "temperature": s, "top_k": s, "top_p": s,
            "stop": s * STOPS, "table": s * pages_each, "rows": batch, "ring_row": 2, "shared_tokens": batch,
            "group_first": batch, "group_count": batch, "group_tokens": batch, "wanted": batch, "wanted_slots": batch,
            "text_row": s, "text_family": s, "match": 2 * s, "run": s, "search": s, "adapter": s,
        }  # fmt: skip
        self.offsets: dict[str, int] = {}
        total = 0
        for name, size in self.sizes.items():
            self.offsets[name] = total
            total += -(-size // ALIGN) * ALIGN
        self.data = np.zeros(total, np.int32)
        for name in ("temperature", "top_p"):
            self._section(name)[:] = np.float32(1).view(np.int32)
        self._section("stop")[:] = -1
        self._section("adapter")[:] = -1
        self._section("rows")[:] = slots
        self._changed: list[tuple[int, int]] = []

    def assign(
        self, slot: int, request: Request, tokens: Sequence[int], *, left: int, position: int, adapter: int = -1
    ) -> None:
        """Give a slot to a response. `tokens`: its known tokens, prompt included."""
        sampling, at = request.sampling, self.offsets
        seed = np.array([request.seed & 0xFFFFFFFFFFFFFFFF], np.uint64).view(np.int32)
        temperature, top_p = np.array([sampling.temperature, sampling.top_p], np.float32).view(np.int32)
        self._write(at["last"] + slot, tokens[-1])
        self._write(at["length"] + slot, len(tokens) - 1)
        self._write(at["left"] + slot, left)
        self._write(at["position"] + slot, position)
        self._write(at["seed"] + 2 * slot, seed)
        self._write(at["temperature"] + slot, temperature)
        self._write(at["top_k"] + slot, min(sampling.top_k, 2**31 - 1))
        self._write(at["top_p"] + slot, top_p)
        self._write(at["stop"] + slot * STOPS, self._stop_row(request.stop))
        if adapter != self.data[at["adapter"] + slot]:
            self._write(at["adapter"] + slot, adapter)
        self.assign_text(slot, request, tokens)

    def assign_text(self, slot: int, request: Request, tokens: Sequence[int]) -> None:
        """Let the response in this slot have a text with these tokens, if there is a row."""
        at = self.offsets
        row, family = (NO_ROW, NO_ROW) if self.texts is None else self.texts.begin(request, tokens)
        self._write(at["text_row"] + slot, row)
        self._write(at["text_family"] + slot, family)
        self._write(at["match"] + 2 * slot, (0, 0))
        self._write(at["run"] + slot, 0)
        self._write(at["search"] + slot, 0)

    def set_pages(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Set pages `first`, `first + 1`, ... of the response in this slot."""
        self._write(self.offsets["table"] + slot * self.pages_each + first, pages)

    def page_tables(self, slots: np.ndarray, columns: int) -> np.ndarray:
        """The first `columns` page numbers of these slots; undefined after the last page of a response."""
        return self._section("table").reshape(-1, self.pages_each)[:, :columns][slots]

    def set_rows(self, slots: np.ndarray, batch: int) -> None:
        """Set the slots that take part in the next steps, padded to `batch` with the padding slot."""
        new = np.full(batch, self.slots, np.int32)
        new[: len(slots)] = slots
        self._replace("rows", new)

    def set_prefix_groups(self, groups: np.ndarray, batch: int, room: int) -> None:
        """Set the prefix groups of the rows: (first row, row count, shared tokens), padded with zeros to `room`."""
        first, count, tokens = groups.T
        shared = np.zeros(batch, np.int32)
        shared[np.repeat(first - (np.cumsum(count) - count), count) + np.arange(count.sum())] = np.repeat(tokens, count)
        self._replace("shared_tokens", shared)
        for name, column in (("group_first", first), ("group_count", count), ("group_tokens", tokens)):
            new = np.zeros(room, np.int32)
            new[: len(column)] = column
            self._replace(name, new)

    def set_wanted(self, rows: np.ndarray, slots: np.ndarray, batch: int) -> None:
        """Set the rows of the next prefill after which tokens are sampled, and their slots, padded to `batch`."""
        for name, values, padding in (("wanted", rows, 0), ("wanted_slots", slots, self.slots)):
            new = np.full(batch, padding, np.int32)
            new[: len(values)] = values
            self._replace(name, new)

    def set_ring_row(self, row: int) -> None:
        """Set the row of the ring that receives the next tokens."""
        self._write(self.offsets["ring_row"], (row, 0))

    def take_changes(self) -> tuple[np.ndarray, np.ndarray]:
        """Indices and values of all changes since the last call. An index may occur twice, with the same value."""
        if not self._changed:
            return np.zeros(0, np.int32), np.zeros(0, np.int32)
        start, count = np.array(self._changed, np.int64).T
        self._changed = []
        ends = np.cumsum(count)
        indices = np.repeat(start - (ends - count), count) + np.arange(ends[-1])
        return indices.astype(np.int32), self.data[indices]

    def _replace(self, name: str, new: np.ndarray) -> None:
        """Overwrite the beginning of a section if the values differ."""
        if not np.array_equal(self._section(name)[: len(new)], new):
            self._write(self.offsets[name], new)

    def _write(self, start: int, values: int | np.integer | np.ndarray | Sequence[int]) -> None:
        count = 1 if isinstance(values, int | np.integer) else len(values)
        self.data[start : start + count] = values
        if count:
            self._changed.append((start, count))

    def _stop_row(self, stop: Collection[int]) -> np.ndarray:
        """The stop tokens that fit, padded with -1; the host checks for the others."""
        out = np.full(STOPS, -1, np.int32)
        fit = [t for t in stop if 0 <= t < 2**31][:STOPS]
        out[: len(fit)] = fit
        return out

    def _section(self, name: str) -> np.ndarray:
        return self.data[self.offsets[name] : self.offsets[name] + self.sizes[name]]
