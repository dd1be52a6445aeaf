"""Which GPU of this machine each worker uses, and how much of its memory. Pure.

A worker gets the GPU with the fewest processes of the run, the trainer's included; among equals, the one with the
lowest number. When a worker ends, its place is free again.
"""

from __future__ import annotations

from collections import Counter

from windfall.defaults import KV_SHARE

MIN_SHARE = 0.01
"""Smallest share that a worker accepts."""


class GpuAssignment:
    def __init__(self, gpus: int, *, trainer: int = 1, workers: int = 0) -> None:
        """`trainer`: number of GPUs that the trainer uses, from the first one on. `workers`: how many workers are
        expected; those that will share a GPU get equal parts of its memory, in whichever order they start."""
        self._gpus, self._trainer = gpus, range(min(trainer, gpus))
        self._workers: dict[str, int] = {}
        self._expected: Counter[int] = Counter()
        for _ in range(workers if gpus else 0):
            self._expected[self._emptiest(self._expected)] += 1

    def assign(self, worker: str) -> int | None:
        """The GPU for this worker; None if there is no GPU.

        >>> gpus = GpuAssignment(3, trainer=1)
        >>> [gpus.assign(name) for name in ("w1", "w2", "w3", "w4")]
        [1, 2, 0, 1]
        >>> gpus.release("w2"); gpus.assign("w5")
        2
        """
        if not self._gpus:
            return None
        self._workers[worker] = self._emptiest(Counter(self._workers.values()))
        return self._workers[worker]

    def release(self, worker: str) -> None:
        self._workers.pop(worker, None)

    def memory_share(self, worker: str) -> float:
        """The share of its device's free memory that this worker may use for its KV cache.

        >>> gpus = GpuAssignment(2, workers=3)
        >>> [(gpus.assign(name), gpus.memory_share(name)) for name in ("w1", "w2", "w3")]
        [(1, 0.2), (0, 0.4), (1, 0.2)]
        """
        gpu = self._workers.get(worker)
        if gpu is None:
            return KV_SHARE
        sharing = max(self._expected[gpu], list(self._workers.values()).count(gpu))
        return max(MIN_SHARE, KV_SHARE / sharing)

    def _emptiest(self, workers: Counter[int]) -> int:
        return min(range(self._gpus), key=lambda gpu: workers[gpu] + (gpu in self._trainer))
