"""The directory: it knows who has which bytes of which files, and tells every reader from where to read. Pure.

    load       a worker is to get a version: which files, and a route for each
    ask        a source failed: a new route, from the first missing byte on
    routed     routes that changed because a source left, was dropped or began something else: send them. They have
               all that the reader needed when it began or last asked; it knows what it has got since

The state is soft. Workers say what they hold when they join, and the trainer when it connects; a controller that starts
again builds a directory from that. Times are arguments: same calls, same answers.

Rules (tests/support/fleets/directory_rules.py checks those that a state can show):
 1. The source of a part is usable, and has all of the part or is reading it. The parts of a route have all that its
    reader needs.
 2. No reader follows itself, also not over others.
 3. At most one reader of a region reads a file from outside it, of those that can use each other.
 4. The trainer feeds at most its fan-out and one reader of every other region, if workers can use each other.
 5. A reader that can use sources of all that it needs has a route.
 6. A dropped source gets no reader before it joins again.
 7. `needed` has the newest weights, all that is being read, and each file on the best way of any worker to the newest.
 8. A worker's copy is never counted on: while the trainer is connected, the newest weights have a complete source that
    is no worker.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from windfall.controller.directory import updates
from windfall.controller.directory.holders import (
    NO_WORKER,
    WHOLE,
    Contacts,
    KnownFile,
    Part,
    PeerUse,
    Reading,
    WeightHolder,
)
from windfall.controller.directory.routes import RouteSearch, fan_out
from windfall.controller.directory.traffic import Rates, Traffic, TrafficPrices, mean
from windfall.link import messages as m
from windfall.weights.ranges import intersect, normal, subtract, union

VERIFY_BYTES_PER_S = 4e9
"""First guess of how fast a worker applies deltas to a copy and verifies it, by the size of the copy."""
PACKED = 0.4
"""Size of a packed delta, as a share of a plain one."""
PACK_S_PER_BYTE = 1 / 0.8e9 + 1 / 3.2e9
"""Packing and unpacking with 8 threads."""
NO_ROUTE = m.ReadRoute(sources=(), parts=())


@dataclass(slots=True)
class WeightLoad:
    """What a reader was told to load. A late message about another load changes nothing."""

    wanted: str
    files: tuple[str, ...]
    received: int = 0
    """Bytes, by its last report."""


class Directory:
    def __init__(self, prices: TrafficPrices, *, peers: PeerUse = "all", region: str = "") -> None:
        """`region`: of the trainer and the bucket."""
        self.newest = ""
        self._damaged: list[str] = []
        self.traffic = Traffic()
        """What was transferred of the newest version."""
        self.usd = 0.0
        """What all versions have cost."""
        self._version, self._region = -1, region
        self._trainers = [WeightHolder(id="", kind="trainer", region=region)]
        """Its machines; one that is not known at first."""
        self._prices = prices
        self._contacts = Contacts(peers)
        self._rates = Rates()
        self._verify_bytes_per_s = VERIFY_BYTES_PER_S
        self._files: dict[str, KnownFile] = {}
        """Published by the trainer, or still being read: a worker's word for a file is not enough."""
        self._early: dict[str, list[m.Holding]] = {}
        """What workers hold of other files, until the trainer has published the next ones."""
        self._loads: dict[str, WeightLoad] = {}
        self._copies: dict[str, str] = {}
        """By worker: the weights that it can apply deltas to. It serves them no more once its next load begins."""
        self._routed: dict[tuple[str, str], None] = {}
        self._events: list[tuple[str, dict[str, Any]]] = []
        self._left: dict[str, WeightHolder] = {}
        """Holders that left during this version. Readers still report what they got from them."""

    # Holders

    def knows(self, id: str) -> bool:
        return id in self._contacts.holders

    def join(self, holder: WeightHolder, holds: Sequence[m.Holding] = ()) -> None:
        self.leave(holder.id)
        self._contacts.holders[holder.id] = holder
        self._early[holder.id] = [holding for holding in holds if holding.file.digest not in self._files]
        self._hold(holder.id, holds)
        for holding in holds:
            if not holding.ranges and not holding.file.after:
                self._copies[holder.id] = holding.file.digest

    def _hold(self, id: str, holds: Iterable[m.Holding]) -> None:
        for holding in holds:
            if (known := self._files.get(holding.file.digest)) is not None:
                known.held[id] = normal(holding.ranges) or WHOLE

    def leave(self, id: str) -> None:
        """A worker or a machine of the trainer (by its id) is gone. Its readers get other routes (`routed`)."""
        if not self.knows(id):
            return
        self._left[id] = self._contacts.holders[id]
        self._loads.pop(id, None)
        self._copies.pop(id, None)
        self._early.pop(id, None)
        for known in self._files.values():
            known.held.pop(id, None)
            known.readings.pop(id, None)
        self._contacts.remove(id)
        self._rates.forget(id)
        self._repair([id])
        self.traffic.waiting.discard(id)

    def publish(self, files: m.PublishedFiles, now_s: float) -> None:
        """What the trainer and the bucket hold, all of it. A trainer that connects again says the same, and readers may
        try it again."""
        before = {id for id, holder in self._contacts.holders.items() if holder.kind != "peer"}
        for id in before if files.version <= self._version else ():
            self._contacts.forgive(id)
        self._version = files.version
        listed = {file.digest: file for file in files.files}
        self._files = {name: known for name, known in self._files.items() if name in listed or known.readings}
        for known in self._files.values():
            for id in before:
                known.held.pop(id, None)
        for name, file in listed.items():
            self._files.setdefault(name, KnownFile(file))
        for id, holds in self._early.items():
            self._hold(id, holds)
        self._early = {}
        now = []
        for each in files.holders:
            at, kind = each.location, "bucket" if each.location == files.bucket else "trainer"
            now.append(
                WeightHolder(id=NO_WORKER + at, kind=kind, location=at, region=self._region, machine=each.machine)
            )
            self._contacts.holders[now[-1].id] = now[-1]
            self._hold(now[-1].id, each.holds)
        for id in sorted(before.difference(holder.id for holder in now)):
            self.leave(id)
        self._trainers = [holder for holder in now if holder.kind == "trainer"] or self._trainers
        self._repair([holder.id for holder in now])
        if files.digest != self.newest:
            self.end_version()
            copy = sum(file.nbytes for file in files.files if file.digest == files.digest)
            delta = sum(file.nbytes for file in files.files if file.after == files.digest)
            waiting = {id for id, holder in self._contacts.holders.items() if holder.kind == "peer"}
            self.newest, self._left = files.digest, {}
            self.traffic = Traffic(files.version, copy, delta, now_s, waiting)

    def end_version(self) -> None:
        """The next version comes, or the run ends: write the event of the newest one."""
        if self.traffic.readers:
            self._events.append(("weights", self.traffic.describe()))

    def uploaded(self, file: str, count: int, ranges: m.Ranges = (), *, failed: bool) -> None:
        """The trainer has sent bytes of a file to the bucket, which has these ranges of it; or not, if that failed."""
        self.traffic.bytes["upload"] += count
        if (known := self._files.get(file)) is not None:
            known.damaged &= failed
            whole = normal([(0, known.file.nbytes)])
            buckets = [id for id, holder in self._contacts.holders.items() if holder.kind == "bucket"]
            for id in buckets:
                held = intersect(known.held.pop(id, ()), whole)
                if held := (subtract if failed else union)(held, normal(ranges) or whole):
                    known.held[id] = held
            for reading in known.readings.values() if not failed else ():
                reading.avoid.difference_update(buckets)
            self._repair(buckets)

    # Readers

    def load(self, reader: str, wanted: str) -> tuple[m.FileRoute, ...]:
        """The files that bring the reader to these weights, each with its route. Nothing to read: no files. A file
        without sources: none are known, and the reader is to ask again."""
        self.stopped(reader)
        files = {name: known.file for name, known in self._files.items()}
        while (plan := self._plan(reader, wanted, files.values())) is not None:
            readings = {file.digest: self._find(reader, file.digest) for file in plan}
            unfed = [name for name, reading in readings.items() if reading.unfed]
            if not unfed:
                break
            del files[unfed[0]]
        else:  # no way has sources now: wait for those of the copy
            plan = [self._files[wanted].file] if wanted in self._files else []
            readings = {file.digest: Reading(self._files[wanted].lacks(reader)) for file in plan}
        self._keep_only(reader, {name for file in plan for name in _names(file)} or {wanted})
        if any(not file.after for file in plan):  # a full copy overwrites the one before it
            self._copies.pop(reader, None)
        self._begin(reader, wanted, readings)
        return tuple(m.FileRoute(file=file, route=self._route(reader, readings[file.digest])) for file in plan)

    def ask(self, reader: str, file: str, used: Sequence[m.SourceUse], received: int) -> m.ReadRoute:
        """A source failed, or the reader needs this file, which its load did not name. It has the first `received`
        bytes of it."""
        known, wanted = self._files.get(file), self._loads[reader].wanted if reader in self._loads else ""
        copy = self._files[wanted].file if wanted in self._files else None
        if known is None or not (reader in known.readings or (copy and file in _names(copy))):
            self._take(reader, used)
            if file == wanted:  # the copy that deltas should make: it has lost the one that they change
                self._copies.pop(reader, None)
            return NO_ROUTE
        if reader not in known.readings:  # the deltas cannot be applied: it has lost its copy
            self.stopped(reader)
            self._copies.pop(reader, None)
            self._keep_only(reader, set())
            known.held.pop(reader, None)
            self._begin(reader, wanted, {file: Reading(known.lacks(reader))})
        reading = known.readings[reader]
        self._loads[reader].received = max(received, self._loads[reader].received)
        reading.need = subtract(known.lacks(reader), normal([(0, received)]))
        if not reading.need:  # it lacks something nevertheless
            known.held.pop(reader, None)
            reading.need = known.lacks(reader)
        self._take(reader, used, known)
        self._renew(known, [reader], next((use.source for use in used if use.why), "first"))
        self._routed.pop((reader, file), None)
        return self._route(reader, reading)

    def progress(self, reader: str, received: int) -> None:
        """`received`: bytes of the reader's present load, about. The reader with most takes over from an importer."""
        if reader in self._loads:
            self._loads[reader].received = received

    def loaded(self, reader: str, digest: str, used: Sequence[m.SourceUse], now_s: float, apply_s: float = 0.0) -> None:
        """The reader has these weights, and every file of its load. `apply_s`: what applying deltas took."""
        load = self._loads.get(reader)
        if load is not None and load.wanted == digest:
            for name in self._loads.pop(reader).files:
                self._files[name].held[reader] = WHOLE
                del self._files[name].readings[reader]
            if (known := self._files.get(digest)) is not None:
                known.held[reader] = WHOLE
                if apply_s > 0:
                    self._verify_bytes_per_s = mean(self._verify_bytes_per_s, known.file.nbytes / apply_s)
            self._copies[reader] = digest
        self._take(reader, used)
        if digest == self.newest:
            self.traffic.ready(reader, now_s)

    def hold(self, reader: str, file: m.FileRef) -> None:
        """The reader has this file, though another directory has sent it there: the base of several adapters."""
        if self.knows(reader):
            holding, early = m.Holding(file=file), self._early.setdefault(reader, [])
            self._hold(reader, [holding])
            if file.digest not in self._files and holding not in early:
                early.append(holding)

    def stopped(self, *readers: str) -> None:
        """Their loads have failed, or others follow. Their followers get other routes. To stop many at once is cheaper
        than to stop them one by one, each time with new routes for followers that will be stopped, too."""
        busy = [reader for reader in readers if reader in self._loads]
        for reader in busy:
            for name in self._loads.pop(reader).files:
                del self._files[name].readings[reader]
        self._repair(busy)

    # What others need to know

    def routed(self) -> list[tuple[str, m.FileRoute]]:
        """Routes to send to readers that did not ask, since the last call."""
        changed, self._routed = self._routed, {}
        still = [(r, self._files[name]) for r, name in changed if name in self._files]
        return [(r, m.FileRoute(file=k.file, route=self._route(r, k.readings[r]))) for r, k in still if r in k.readings]

    def damaged(self) -> tuple[str, ...]:
        """Files that the trainer must upload again, since the last call."""
        out, self._damaged = tuple(self._damaged), []
        return out

    def base_of(self, digest: str) -> m.FileRef | None:
        """The base of these weights, if they are an adapter."""
        known = self._files.get(digest)
        base = self._files.get(known.file.before) if known is not None and not known.file.after else None
        return base.file if base is not None else None

    @property
    def wrong(self) -> tuple[str, ...]:
        """All files that are damaged in the bucket."""
        return tuple(sorted(name for name, known in self._files.items() if known.damaged))

    def offered(self) -> frozenset[str]:
        """Weights that can be read from somewhere."""
        return frozenset(updates.result(known.file) for known in self._files.values() if known.held)

    def needed(self) -> frozenset[str]:
        """Files that must not expire."""
        files = [known.file for known in self._files.values()]
        out = {self.newest} | {name for name, known in self._files.items() if known.readings}
        plans: dict[tuple[frozenset[str], float], tuple[m.FileRef, ...] | None] = {}
        for id, holder in self._contacts.holders.items():
            if holder.kind == "peer":
                key = frozenset(self._held(id)), self._rate(holder)
                if key not in plans:
                    plans[key] = self._plan(id, self.newest, files)
                out.update(name for file in plans[key] or () for name in _names(file))
        return frozenset(out & set(self._files))

    def pack(self) -> bool:
        """Whether packed deltas save more time on the slowest link from the trainer than packing takes."""
        workers = (holder for holder in self._contacts.holders.values() if holder.kind == "peer")
        slowest = min(map(self._rate, workers), default=float("inf"))
        return (1 - PACKED) / slowest > PACK_S_PER_BYTE

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """What happened since the last call, for the event log."""
        out, self._events = self._events, []
        return out

    # Plans

    def _plan(self, reader: str, wanted: str, files: Iterable[m.FileRef]) -> tuple[m.FileRef, ...] | None:
        copy = self._files[wanted].file.nbytes if wanted in self._files else 0
        rate, apply_s = self._rate(self._contacts.holders[reader]), copy / self._verify_bytes_per_s
        return updates.plan(self._held(reader), wanted, files, bytes_per_s=rate, apply_s=apply_s)

    def _held(self, reader: str) -> list[str]:
        """All weights that the reader has complete."""
        whole = [name for name, known in self._files.items() if not known.lacks(reader)]
        return [*whole, *([self._copies[reader]] if reader in self._copies else [])]

    def _rate(self, me: WeightHolder) -> float:
        """Expected bytes per second from the trainer. It says what a delta is worth even if a copy is nearer: somebody
        must bring that copy."""
        return max(self._rates.between(me, trainer) for trainer in self._trainers)

    # Routes

    def _search(self, reader: str, known: KnownFile, reading: Reading) -> tuple[Part, ...]:
        near = WeightHolder(id="", kind="peer", region=self._region)
        slots = fan_out(len(self._contacts.holders), known.file.nbytes, self._rates.between(near, near))
        me, slow = self._contacts.holders[reader], self._rates.slow
        return RouteSearch(self._contacts, self._prices, me, known, slots=slots, slow=slow).route(reading)

    def _find(self, reader: str, file: str) -> Reading:
        """A reading with its route, which has not begun."""
        known = self._files[file]
        reading = Reading(known.lacks(reader))
        reading.parts = self._search(reader, known, reading)
        return reading

    def _begin(self, reader: str, wanted: str, readings: dict[str, Reading]) -> None:
        self._loads[reader] = WeightLoad(wanted, tuple(readings))
        for file, reading in readings.items():
            self._files[file].readings[reader] = reading
            self._log_import(file, reader, reading, "first")

    def _keep_only(self, reader: str, keep: set[str]) -> None:
        """The reader overwrites its copy: it serves deltas and these files only."""
        for name, known in self._files.items():
            if name not in keep and not known.file.after and known.held.pop(reader, None) is not None:
                self._repair([reader])

    def _log_import(self, file: str, reader: str, reading: Reading, why: str) -> None:
        me, before = self._contacts.holders[reader], reading.importing
        reading.importing = any(self._contacts.holders[id].across(me) for id in reading.sources)
        if reading.importing and not before:
            at = {"worker": reader, "file": file, "at_bytes": self._loads[reader].received}
            self._events.append(("importer", {"region": me.region, **at, "why": why.removeprefix(NO_WORKER)}))

    def _route(self, reader: str, reading: Reading) -> m.ReadRoute:
        me, ids = self._contacts.holders[reader], reading.sources
        refs = tuple(
            m.SourceRef(id=h.id, kind=h.kind, location=h.location, machine=h.machine if me.shares_machine(h) else "")
            for h in (self._contacts.holders[id] for id in ids)
        )
        parts = (m.RoutePart(start=p.start, stop=p.stop, source=ids.index(p.source)) for p in reading.parts)
        return m.ReadRoute(sources=refs, parts=tuple(parts))

    def _repair(self, suspects: Collection[str]) -> None:
        """Something has changed about these sources. Give new routes to all readers whose source is none any more."""
        for known in self._files.values() if suspects else ():
            broken = [
                reader for reader, reading in known.readings.items()
                if any(part.source in suspects and not self._valid(known, reader, part) for part in reading.parts)
            ]  # fmt: skip
            self._renew(known, broken, next(iter(suspects)))

    def _renew(self, known: KnownFile, readers: Collection[str], why: str) -> None:
        """Give these readers new routes. The one with the most bytes comes first: if it must import, the others can
        follow it."""
        for reader in readers:
            known.readings[reader].parts = ()
        for reader in sorted(readers, key=lambda id: (-self._loads[id].received, id)):
            reading = known.readings[reader]
            reading.parts = self._search(reader, known, reading)
            if reading.parts:
                self._log_import(known.file.digest, reader, reading, why)
                self._routed[reader, known.file.digest] = None

    def _valid(self, known: KnownFile, reader: str, part: Part) -> bool:
        has = part.source in known.readings or known.has(part.source, part.start, part.stop)
        return has and self._contacts.usable(reader, part.source)

    # Reports

    def _take(self, reader: str, used: Sequence[m.SourceUse], known: KnownFile | None = None) -> None:
        """Count what a reader got, and take its complaints about sources of this file."""
        me = self._contacts.holders[reader]
        for use in used:
            source = self._contacts.holders.get(use.source) or self._left.get(use.source)
            if source is not None:
                usd = use.bytes / 1e9 * self._prices.usd_per_gb(me, source)
                self.usd += usd
                self._rates.add(me, source, use.bytes, use.s)
                self.traffic.add(me, source, use.bytes, usd)
            if self.knows(use.source) and self._complain(reader, use, known):
                file, name = known.file.digest if known is not None else "", use.source.removeprefix(NO_WORKER)
                about = {"source": name, "file": file, "why": use.why, "by": reader, "bytes": use.bytes}
                self._events.append(("source_dropped", about))
        self._repair([use.source for use in used if use.why])

    def _complain(self, reader: str, use: m.SourceUse, known: KnownFile | None) -> bool:
        """Take a complaint. Whether it takes the source from other readers, too."""
        kind = self._contacts.holders[use.source].kind
        damaged = use.why == "wrong" and kind == "bucket"
        if use.why in ("unreachable", "wrong") and not (damaged and known is not None):
            return self._contacts.report(reader, use.source, use.why)
        if known is None or use.why in ("", "slow"):
            return False
        known.readings[reader].avoid.add(use.source)
        if damaged:
            if known.damaged or not self._contacts.report_damage(reader):
                return False
            known.damaged = True
            self._damaged.append(known.file.digest)
            return True
        gone = use.why == "gone" and kind == "peer" and use.source not in known.readings
        return gone and known.held.pop(use.source, None) is not None


def _names(file: m.FileRef) -> tuple[str, ...]:
    """A file, and the base that it is useless without."""
    return (file.digest, file.before) if file.before and not file.after else (file.digest,)
