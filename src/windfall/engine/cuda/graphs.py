"""What the engine runs as CUDA graphs: one decode step, or one prefill.

A graph is identified by its key, which has everything that is not data. A decode step: the number of responses, whether
any of them uses top-k or top-p, the number of splits of a context, the number of prefix groups, the number of splits of
a prefix, and the rows of every response. A prefill: its rows, and how attention divides them; then its tokens are
sampled in a graph of their own. Each graph is captured when it is first needed, and replayed from then on: it costs the
host one call. All graphs of one `Graphs` share one memory pool, because they run one after the other.

Rules:
- a captured pass always reads and writes the same addresses: graphs are dropped when an address changes;
- before the capture, the pass runs once with padding rows, so that every kernel is compiled and no state changes;
- without a GPU the pass is simply called.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)


def batch_for(rows: int) -> int:
    """The smallest batch size with room for this number of rows.

    >>> [batch_for(n) for n in (1, 3, 20, 64, 65, 200, 257, 600)]
    [1, 4, 24, 64, 96, 224, 320, 640]
    """
    for size in SIZES:
        if rows <= size:
            return size
    step = 32 if rows <= 256 else 64
    return -(-rows // step) * step


class GraphKey(NamedTuple):
    batch: int
    truncate: bool
    splits: int
    prefix_groups: int = 0  # upper limit for the prefix groups of the step; 0 disables them
    prefix_splits: int = 1  # upper limit for the splits of a shared prefix
    width: int = 1  # rows of every response: its newest token, and the tokens that were drafted after it


class PrefillKey(NamedTuple):
    rows: int
    tile: int  # upper limit for the queries of a tile
    tiles: int  # upper limit for the number of tiles


class SampleKey(NamedTuple):
    """The tokens after a prefill."""

    batch: int
    truncate: bool


def prefill_rows(rows: int) -> int:
    """The smallest size of a prefill with room for this number of rows: four sizes between two powers of two.

    >>> [prefill_rows(n) for n in (1, 16, 17, 64, 65, 100, 130, 512, 600, 1100, 2048)]
    [16, 16, 32, 64, 80, 112, 160, 512, 640, 1280, 2048]
    """
    step = max(16, (1 << max(0, rows - 1).bit_length()) // 8)
    return -(-rows // step) * step


Key = TypeVar("Key", GraphKey, PrefillKey, SampleKey)


class Graphs(Generic[Key]):
    def __init__(self, run_pass: Callable[[Key, bool], None], device: torch.device) -> None:
        """`run_pass(key, dry)` runs one pass on the current stream. `dry`: with padding rows only."""
        self._pass = run_pass
        self._device = device
        self._captured: dict[Key, Any] = {}
        self._memory: Any = None
        self._side: Any = None  # the stream for all captures: cuBLAS allocates memory for every stream it is used on

    def __len__(self) -> int:
        return len(self._captured)

    def run(self, key: Key, times: int = 1) -> None:
        if self._device.type != "cuda":
            for _ in range(times):
                self._pass(key, False)
            return
        self.prepare(key)
        graph = self._captured[key]
        for _ in range(times):
            graph.replay()

    def prepare(self, key: Key) -> None:
        """Capture the graph unless that was done before."""
        if self._device.type != "cuda" or key in self._captured:
            return
        self._pass(key, True)
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        side = self._side = self._side or torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side), _garbage_collection_off():
            # Other threads (the one that pulls weights, for example) continue to call CUDA meanwhile.
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                self._pass(key, False)
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(side)
        self._captured[key] = graph

    def drop(self) -> None:
        """Forget all graphs, because addresses have changed."""
        self._captured.clear()
        self._memory = None


@contextlib.contextmanager
def _garbage_collection_off() -> Iterator[None]:
    """An unused graph must not be freed during a capture: that would abort the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
