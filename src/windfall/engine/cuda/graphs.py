"""One decode step as a CUDA graph, for every size of batch that is needed.

A step is asked for by its kind: how many rows, whether somebody cuts the distribution, into how many parts contexts
are split, and the same of families of rows. Each is captured when it is first needed, and replayed from then on: the
host's time for a step is that of one call. All graphs share one pool of memory, because they run one after the other.

Rules:
- a captured step reads and writes the same addresses for ever: it is dropped when one of them changes;
- before the capture the step runs once with rows that are nobody's, so that every kernel is there and nothing changes;
- without a GPU the step is simply called.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)


def batch_for(rows: int) -> int:
    """The size of batch that takes so many rows.

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
    cut: bool
    splits: int
    families: int = 0
    """Room for so many; 0: the step knows of none."""
    shares: int = 1
    """Into how many parts the contexts of families are cut."""


class Graphs:
    def __init__(self, step: Callable[[GraphKey, bool], None], device: torch.device) -> None:
        """`step(kind, dry)` runs one step on the current stream. Dry: with rows that are nobody's."""
        self._step, self._device = step, device
        self._made: dict[GraphKey, Any] = {}
        self._memory: Any = None
        self._side: Any = None
        """The stream that captures; one for all, because cuBLAS takes memory for every stream it is used on."""

    def __len__(self) -> int:
        return len(self._made)

    def run(self, kind: GraphKey, times: int) -> None:
        if self._device.type != "cuda":
            for _ in range(times):
                self._step(kind, False)
            return
        self.prepare(kind)
        graph = self._made[kind]
        for _ in range(times):
            graph.replay()

    def prepare(self, kind: GraphKey) -> None:
        """Capture it now, if it was not."""
        if self._device.type != "cuda" or kind in self._made:
            return
        self._step(kind, True)
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        side = self._side = self._side or torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side), _nothing_collected():
            # Other threads (that which pulls weights, say) go on calling CUDA meanwhile.
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                self._step(kind, False)
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(side)
        self._made[kind] = graph

    def drop(self) -> None:
        """The addresses have changed."""
        self._made.clear()
        self._memory = None


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """A graph that nobody needs any more must not be freed during a capture: that would break it off."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
