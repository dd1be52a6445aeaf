"""Chooses the workers that keep a version while training goes on, for evaluation on a fixed version. Pure.

An evaluation during asynchronous training must get all its tokens from one version. So the smallest number of workers
that have enough slots for it keeps that version until the evaluation is over; all others load new versions as they
appear. A lost worker is replaced by another one that holds the version, or that loads it while the trainer still serves
it. If there is none, the evaluation cannot go on.

Rule: a worker that keeps a version is not asked to load another one. The trainer's own engine never keeps one, because
its weights are those of the trainer. Lenders keep one only if there are no other workers: their service may need them
until long after the evaluation should have ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from windfall.controller.scheduling.members import Member, Members, WorkerState
from windfall.types import LOCAL


@dataclass(slots=True, kw_only=True)
class KeptVersion:
    version: int
    digest: str
    responses: int
    """Number of responses to generate with it."""
    workers: set[str] = field(default_factory=set)
    """Ids of the workers that keep it."""


class FixedVersions:
    def __init__(self, members: Members, *, borrowed_max: int = 64) -> None:
        """`borrowed_max`: as in the recipe."""
        self._members, self._borrowed_max = members, borrowed_max
        self._kept: dict[int, KeptVersion] = {}

    def keep(self, version: int, digest: str, responses: int) -> bool:
        """Have workers keep this version, the newest, until `release`. Returns False if there is no worker to do so."""
        if not any(_may_keep(m) for m in self._members.here()):
            return False
        self._kept[version] = KeptVersion(version=version, digest=digest, responses=responses)
        return True

    def release(self, version: int) -> None:
        self._kept.pop(version, None)

    def choose(self) -> None:
        """Choose workers for the versions that have too few. Call this before workers are asked to load versions."""
        others = any(not m.lends and _may_keep(m) for m in self._members.here())
        for kept in self._kept.values():
            holders = {m.id: m for m in self._members.here() if _holds(m, kept)}
            kept.workers &= holders.keys()  # a suspect worker may stay
            able = {id: m.lendable for id, m in holders.items() if id in kept.workers or not m.suspect}
            for worker in sorted(able, key=lambda id: (not holders[id].in_use, -able[id])):
                if holders[worker].lends and (others or len(kept.workers) >= self._borrowed_max):
                    continue
                if sum(able[id] for id in kept.workers) < kept.responses:
                    kept.workers.add(worker)

    def keeps(self, worker: str) -> bool:
        return any(worker in kept.workers for kept in self._kept.values())

    def holders(self, version: int) -> list[Member]:
        """The workers that keep this version and can get work."""
        workers = self._kept[version].workers if version in self._kept else set()
        return [m for m in (self._members.all[id] for id in sorted(workers)) if not m.suspect]

    def wanted(self, newest: int) -> KeptVersion | None:
        """A version that no worker holds or loads, although the trainer still serves it alongside the newest."""
        previous = self._kept.get(newest - 1)
        return previous if previous is not None and not previous.workers and not self._coming(previous) else None

    def is_gone(self, version: int, newest: int) -> bool:
        """Whether no worker will hold this version again."""
        kept = self._kept.get(version)
        if kept is None:
            return version != newest
        return version < newest - 1 and not kept.workers and not self._coming(kept)

    def _coming(self, kept: KeptVersion) -> bool:
        return any(m.loading and m.requested == (kept.version, kept.digest) for m in self._members.here())


def _may_keep(member: Member) -> bool:
    return member.name != LOCAL and member.state is not WorkerState.DRAINING


def _holds(member: Member, kept: KeptVersion) -> bool:
    ready = member.state is WorkerState.READY and not member.loading and member.name != LOCAL
    return ready and (member.version, member.digest) == (kept.version, kept.digest)
