"""Pages of the KV cache in host memory: runs the copies that `SavedKV` plans, and measures them.

A chunk has pages one after another, each with the keys and values of all layers. Chunks are allocated when they are
first needed, page-locked on a machine with a GPU, and kept until `free`: locking memory takes longer than a copy.
Everything runs on the stream that is current at the time of the call, which is that of the launches.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from windfall.engine.cuda.ready_weights import lock_pages
from windfall.engine.cuda.state import KVPool
from windfall.engine.saved_kv import PageCopy


class HostPages:
    def __init__(self, pool: KVPool, chunk_pages: int) -> None:
        self._pool = pool
        self._chunk_pages = chunk_pages
        self._chunks: dict[int, Tensor] = {}
        self._timed: list[tuple[int, Any, Any]] = []  # bytes, and the time before and after their copies

    @torch.inference_mode()
    def run(self, copies: Sequence[PageCopy]) -> None:
        if not copies:
            return
        assert self._pool.data is not None
        pool = self._pool.data.view(torch.int32).movedim(2, 0)  # pages first; the same bytes in every dtype
        for chunk in {c.chunk for c in copies} - self._chunks.keys():
            self._chunks[chunk] = torch.empty((self._chunk_pages, *pool.shape[1:]), dtype=pool.dtype)
            if pool.is_cuda:
                lock_pages(self._chunks[chunk])
        began, copied_bytes = self._now(), 0
        for c in copies:
            host = self._chunks[c.chunk][c.first : c.first + len(c.pages)]
            pages = torch.tensor(c.pages).to(pool.device, non_blocking=True)
            if c.save:
                host.copy_(pool.index_select(0, pages), non_blocking=True)
            else:
                pool.index_copy_(0, pages, host.to(pool.device, non_blocking=True))
            copied_bytes += host.nbytes
        self._timed.append((copied_bytes, began, self._now()))

    def measured(self) -> Iterator[tuple[int, float]]:
        """Bytes and seconds of the copies that have ended since the last call."""
        while self._timed:
            copied_bytes, began, ended = self._timed[0]
            if isinstance(ended, torch.cuda.Event) and not ended.query():
                return
            del self._timed[0]
            yield copied_bytes, ended - began if isinstance(ended, float) else began.elapsed_time(ended) / 1000

    def free(self) -> None:
        """Return the memory to the machine. The contents are lost."""
        if self._timed and isinstance(ended := self._timed[-1][2], torch.cuda.Event):
            ended.synchronize()
        self._chunks.clear()

    def _now(self) -> Any:
        """A time on the stream."""
        if not self._pool.device.startswith("cuda"):
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
