"""How the ranks of a trainer publish together: in steps that all of them begin and end at the same time.

In every step each rank does its own work, then all exchange their results. If the work fails on one rank, the step
raises on all of them, so that no rank waits for one that gave up. If a rank dies or hangs, the exchange fails at the
time limit of `PublishRanks.all_gather`; the error names the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from windfall.errors import WindfallError, last_line

T = TypeVar("T")


class PublishFailed(Exception):
    """Another rank failed, or did not answer, so the version is not published. The previous one stays readable."""


class PublishRanks(Protocol):
    """The processes that publish together. All of them must call `publish` in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank. Values can be pickled. Raises after a time limit."""
        ...


class OneRank:
    """A process that publishes alone."""

    rank, size = 0, 1

    def all_gather(self, value: Any) -> list[Any]:
        return [value]


class Meeting:
    def __init__(self, ranks: PublishRanks, subject: str) -> None:
        """`subject`: what is published, for errors."""
        self.ranks, self.subject = ranks, subject

    def step(self, doing: str, work: Callable[[], T]) -> list[T]:
        """Do this rank's work. Returns the results of all ranks."""
        if self.ranks.size == 1:
            return [work()]
        result: Any = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as e:  # told to the other ranks, then raised again
            error = e
        known = (error.what, error.where, error.fix) if isinstance(error, WindfallError) else None
        try:
            answers = self.ranks.all_gather((result, known, last_line(error) if error else ""))
        except Exception as e:  # of any kind: the implementation belongs to the caller
            if error is not None:
                raise error from e
            what = f"{self.subject}: rank {self.ranks.rank} waited for the other ranks to {doing}"
            raise PublishFailed(f"{what}: {last_line(e)}") from e
        if error is not None:
            raise error
        for rank, (_, known, failure) in enumerate(answers):
            if known is not None:
                what, where, fix = known
                raise WindfallError(what, where=f"{where} (rank {rank})", fix=fix)
            if failure:
                raise PublishFailed(f"{self.subject}: rank {rank} failed to {doing}: {failure}")
        return [value for value, _, _ in answers]
