"""The chosen experts of every token in the KV cache, beside its keys and values: a token that is found in the prefix
cache has those that its keys and values were computed with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch

from windfall.models.experts import ExpertReader, dtype_of, largest


class ExpertCache:
    def __init__(self, reader: ExpertReader, pages: int, page_size: int) -> None:
        self._reader = reader
        self._pages, self._size = pages, page_size
        self._rows = np.zeros((0, 0, 0), dtype_of(largest(reader.layers)))
        """(tokens of the KV cache, layers, chosen)"""

    @classmethod
    def of(cls, model: Any, pages: int, page_size: int) -> Self | None:
        """None if the model has no experts whose choice can be read."""
        reader = ExpertReader(model)
        return cls(reader, pages, page_size) if reader.layers and reader.works(model) else None

    @contextmanager
    def recording(self, slots: Sequence[int]) -> Iterator[None]:
        """Within: one pass of the model. `slots`: where its rows are in the KV cache."""
        with self._reader.reading() as found:
            yield
        chosen = torch.stack(found, 1).cpu().numpy()
        if not len(self._rows):
            self._rows = np.zeros((self._pages * self._size, *chosen.shape[1:]), self._rows.dtype)
        self._rows[slots] = chosen

    def of_tokens(self, pages: Sequence[int], span: range) -> bytes:
        """Those of the tokens with these indices, in a sequence that has these pages."""
        at = np.arange(span.start, span.stop)
        return self._rows[np.asarray(pages, np.int64)[at // self._size] * self._size + at % self._size].tobytes()
