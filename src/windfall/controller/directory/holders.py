"""Who has which bytes of which file, who is reading them, and who can reach whom. Pure.

    holder      a worker, a machine of the trainer, or a bucket; also a worker that only reads
    reading     one reader of one file: what it needs, how much of it it has, and from where it gets the rest

Rules:
- A reader of a file is a source of all of it: its own readers get each byte as soon as it is verified (they *follow*
  it). What a holder has already can be read whatever it reads itself, so that is no following.
- A reader follows nobody that follows it, directly or over others, and nobody whose own bytes have no source.
- A worker can be reached if its own address is the one that the controller sees, or if the reader is seen at the same
  address (one NAT), or on the same machine. Reports override this.
- A reader gets no worker again that it has reported as unreachable or wrong. After such reports from two machines no
  reader gets it, until it joins again. The trainer and the bucket it gets again if there is no other source: they are
  trusted, and a firewall is told from a bad moment by trying.
- A reader that has reported three sources or files of the bucket as wrong is not believed any more: its own memory is
  the likelier cause.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from windfall.link.messages import FileRef, Ranges
from windfall.weights.ranges import normal, subtract

WHOLE: Ranges = ((0, 1 << 62),)
"""All of a file, whatever its size: a holder may join before the size is known."""
BELIEVED_REPORTS = 2
"""Different sources that a reader may report as wrong before it is not believed."""
ENOUGH_MACHINES = 2
"""Machines whose readers must report a source before no reader gets it."""

NO_WORKER = "#"
"""First character of the ids of the trainer's machines and of the bucket, before their locations. No worker's id begins
with it (link/gate.py)."""

PeerUse = Literal["all", "machine", "none"]
"""Which workers may be sources: all, those on the reader's machine, or none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightHolder:
    id: str
    kind: Literal["trainer", "peer", "bucket"]
    location: str = ""
    """URL of its weight server. Empty: it only reads."""
    region: str = ""
    """Empty: not known."""
    machine: str = ""
    """Empty: not known, and shared with no other holder."""
    seen: str = ""
    """Its address as the controller sees it; the same for all addresses of loopback."""
    own: str = ""
    """Its address as it knows it."""
    loopback: bool = False
    """Its weight server is reached only from its machine."""

    def shares_machine(self, other: WeightHolder) -> bool:
        """A worker's machine is what it claims: the controller must also see both workers at the same address."""
        if not self.machine or self.machine != other.machine:
            return False
        workers = self.kind == other.kind == "peer"
        return not workers or self.seen == other.seen

    def across(self, other: WeightHolder) -> bool:
        """Whether a wide link, which costs money, is known to be between them."""
        known = bool(self.region and other.region)
        return known and self.region != other.region and not self.shares_machine(other)


class Part(NamedTuple):
    start: int
    stop: int
    source: str
    """Id of a holder."""


@dataclass(slots=True)
class Reading:
    need: Ranges
    """What it lacked when it began, or when it last asked. It knows itself what it has got since."""
    parts: tuple[Part, ...] = ()
    """Where it gets what it needs. Empty: no source is known, or it needs nothing."""
    avoid: set[str] = field(default_factory=set)
    """Sources that stalled or did not have the file. It gets them only if there is no other."""
    importing: bool = False
    """It reads from another region."""

    @property
    def sources(self) -> list[str]:
        return list(dict.fromkeys(part.source for part in self.parts))

    @property
    def unfed(self) -> bool:
        """It needs something, and has no source for it."""
        return bool(self.need) and not self.parts


@dataclass(slots=True)
class KnownFile:
    file: FileRef
    held: dict[str, Ranges] = field(default_factory=dict)
    """By holder. A reader's own ranges from before its reading stay here."""
    readings: dict[str, Reading] = field(default_factory=dict)
    """By reader, in the order in which they began."""
    damaged: bool = False
    """In the bucket, until it is uploaded again."""

    def load(self) -> Counter[str]:
        """By holder: readers whose source it is."""
        return Counter(id for reading in self.readings.values() for id in {part.source for part in reading.parts})

    def lacks(self, id: str) -> Ranges:
        return subtract(normal([(0, self.file.nbytes)]), self.held.get(id, ()))

    def has(self, id: str, start: int, stop: int) -> bool:
        ranges = self.held.get(id, ())
        i = bisect_right(ranges, start, key=lambda piece: piece[0]) - 1
        return i >= 0 and stop <= ranges[i][1]

    def follows(self, reader: str) -> set[str]:
        """The readers of this file that a reader follows."""
        parts = (part for part in self.readings[reader].parts if part.source in self.readings)
        return {part.source for part in parts if not self.has(part.source, part.start, part.stop)}

    def unfit(self) -> set[str]:
        """Who cannot be followed: readers without a source, and their followers. A reader is without a source while one
        is chosen for it, so it never gets one that follows it."""
        unfit = {id for id, reading in self.readings.items() if reading.unfed}
        if not unfit:
            return unfit
        followers: dict[str, list[str]] = {}
        for id in self.readings:
            for source in self.follows(id):
                followers.setdefault(source, []).append(id)
        queue = list(unfit)
        while queue:
            new = [id for id in followers.get(queue.pop(), ()) if id not in unfit]
            unfit.update(new)
            queue += new
        return unfit


class Contacts:
    """All holders, who can reach whom, and who is believed."""

    def __init__(self, peers: PeerUse = "all") -> None:
        self._peers = peers
        self._failed: dict[str, dict[str, str]] = {}
        """By source, then by reader: why it gets the source no more."""
        self._damage: Counter[str] = Counter()
        """By reader: files in the bucket that it has reported as damaged."""
        self.holders: dict[str, WeightHolder] = {}
        self.dropped: set[str] = set()

    def forgive(self, id: str) -> None:
        """Forget what was reported about a holder."""
        self.dropped.discard(id)
        self._failed.pop(id, None)

    def remove(self, id: str) -> None:
        """Forget a holder with what was reported about it and by it."""
        self.holders.pop(id, None)
        self._damage.pop(id, None)
        self.forgive(id)
        for reports in self._failed.values():
            reports.pop(id, None)

    def usable(self, reader: str, source: str) -> bool:
        """Whether the reader may use the source, if that has the bytes."""
        holder, me = self.holders.get(source), self.holders[reader]
        if holder is None or not holder.location or holder is me or source in self.dropped:
            return False
        if holder.kind != "peer":
            return True
        if source in self._failed and reader in self._failed[source]:
            return False
        if me.shares_machine(holder):
            return self._peers != "none"
        return self._peers == "all" and not holder.loopback and (holder.own == holder.seen or holder.seen == me.seen)

    def shunned(self, reader: str) -> set[str]:
        """What the reader has reported as unreachable or wrong."""
        return {source for source, reports in self._failed.items() if reader in reports}

    def report(self, reader: str, source: str, why: Literal["unreachable", "wrong"]) -> bool:
        """Take a report. Whether no reader gets the source any more because of it."""
        self._failed.setdefault(source, {})[reader] = why
        machines = {
            self.holders[id].machine or id
            for id, reported in self._failed[source].items()
            if reported == why and self._believed(id)
        }
        if self.holders[source].kind != "peer" or len(machines) < ENOUGH_MACHINES or source in self.dropped:
            return False
        self.dropped.add(source)
        return True

    def report_damage(self, reader: str) -> bool:
        """Take a report that a file in the bucket is damaged. Whether it is believed."""
        self._damage[reader] += 1
        return self._believed(reader)

    def _believed(self, reader: str) -> bool:
        wrong = sum(reports.get(reader) == "wrong" for reports in self._failed.values())
        return wrong + self._damage[reader] <= BELIEVED_REPORTS
