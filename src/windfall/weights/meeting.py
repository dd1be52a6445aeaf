"""How the ranks of a trainer publish together: in steps that all of them begin and end at the same time.

In every step each rank does its own work, then all exchange their results. If the work fails on one rank, the step
raises on all of them, so that no rank waits for one that gave up. If a rank dies or hangs, the exchange fails at the
time limit of `PublishRanks.all_gather`; the error names the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

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
        """The values of all ranks, on every rank. Values are bytes. Raises after a time limit."""
        ...


class OneRank:
    """A process that publishes alone."""

    rank, size = 0, 1

    def all_gather(self, value: Any) -> list[Any]:
        return [value]


class _Failure(msgspec.Struct, array_like=True):
    what: str
    where: str = ""
    fix: str = ""
    known: bool = False  # a WindfallError


class Meeting:
    def __init__(self, ranks: PublishRanks, subject: str) -> None:
        """`subject`: what is published, for errors."""
        self.ranks, self.subject = ranks, subject

    def step(self, doing: str, work: Callable[[], T], kind: type[T] | Any) -> list[T]:
        """Do this rank's work. Returns the results of all ranks, which are of type `kind`."""
        if self.ranks.size == 1:
            return [work()]
        error, failure, result = None, None, b""
        try:
            result = msgspec.msgpack.encode(work())
        except Exception as e:  # told to the other ranks, then raised again
            error = e
            failure = _Failure(e.what, e.where, e.fix, True) if isinstance(e, WindfallError) else _Failure(last_line(e))
        try:
            answers = self.ranks.all_gather(msgspec.msgpack.encode((result, failure)))
        except Exception as e:  # of any kind: the implementation belongs to the caller
            if error is not None:
                raise error from e
            what = f"{self.subject}: rank {self.ranks.rank} waited for the other ranks to {doing}"
            raise PublishFailed(f"{what}: {last_line(e)}") from e
        if error is not None:
            raise error
        decoded = [msgspec.msgpack.decode(a, type=tuple[bytes, _Failure | None]) for a in answers]
        for rank, (_, failed) in enumerate(decoded):
            if failed is not None and failed.known:
                raise WindfallError(failed.what, where=f"{failed.where} (rank {rank})", fix=failed.fix)
            if failed is not None:
                raise PublishFailed(f"{self.subject}: rank {rank} failed to {doing}: {failed.what}")
        return [msgspec.msgpack.decode(value, type=kind) for value, _ in decoded]
