"""The directory: it knows who has which bytes of which files, and tells every reader from where to read. Pure.

    load       a worker is to get a version: which files, and a route for each
    ask        a source failed: a new route, from the first missing byte on
    routed     routes that changed because a source left, was dropped or began something else: send them. They have
               all that the reader needed when it began or last asked; it knows what it has got since

The state is soft. Workers say what they hold when they join, and the trainer when it connects; a controller that starts
again builds a directory from that. Times are arguments: same calls, same answers.

Rules (`check` tests those that a state can show):
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

from collections import Counter
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
from windfall.weights.ranges import covers, intersect, normal, subtract, union

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
    files: tuple[m.FileRef, ...]
    """In the order of reading."""
    received: int = 0
    """Bytes, by its last report."""


class Directory:
    def __init__(self, prices: TrafficPrices, *, peers: PeerUse = "all", region: str = "") -> None:
        """`region`: of the trainer and the bucket."""
        self.newest = ""
        self.wrong: set[str] = set()
        """Files that are damaged in the bucket, until they are uploaded again."""
        self._damaged: list[str] = []
        self.traffic: Traffic | None = None
        """Of the newest version."""
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
        self._early: dict[str, dict[str, m.Ranges]] = {}
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
        for holding in holds:
            known, name = self._files.get(holding.file.digest), holding.file.digest
            held = self._early.setdefault(name, {}) if known is None else known.held
            held[holder.id] = normal(holding.ranges) or WHOLE
            if not holding.ranges and not holding.file.after:
                self._copies[holder.id] = holding.file.digest

    def leave(self, id: str) -> None:
        """A worker or a machine of the trainer (by its id) is gone. Its readers get other routes (`routed`)."""
        if not self.knows(id):
            return
        self._left[id] = self._contacts.holders[id]
        self._loads.pop(id, None)
        self._copies.pop(id, None)
        for held in self._early.values():
            held.pop(id, None)
        for known in self._files.values():
            known.held.pop(id, None)
            self._end(known, id)
            known.load.pop(id, None)
        self._contacts.remove(id)
        self._rates.forget(id)
        self._repair(self._files.values(), [id])
        if self.traffic is not None:
            self.traffic.waiting.discard(id)

    def publish(self, files: m.PublishedFiles, now_s: float) -> None:
        """What the trainer and the bucket hold, all of it. A trainer that connects again says the same, and readers may
        try it again."""
        gone = {id for id, holder in self._contacts.holders.items() if holder.kind != "peer"}
        for id in gone if files.version <= self._version else ():
            self._contacts.forgive(id)
        self._version = files.version
        listed = {file.digest: file for file in files.files}
        self._files = {name: known for name, known in self._files.items() if name in listed or known.readings}
        for known in self._files.values():
            for id in gone:
                known.held.pop(id, None)
        for name, file in listed.items():
            self._files.setdefault(name, KnownFile(file, self._early.get(name, {})))
        self._early = {}
        self.wrong &= self._files.keys()
        for each in files.holders:
            at, kind = each.location, "bucket" if each.location == files.bucket else "trainer"
            id = NO_WORKER + at
            about = WeightHolder(id=id, kind=kind, location=at, region=self._region, machine=each.machine)
            self._contacts.holders[id] = about
            gone.discard(id)
            for holding in each.holds:
                if holding.file.digest in self._files:
                    self._files[holding.file.digest].held[id] = normal(holding.ranges) or WHOLE
        for id in sorted(gone):
            self.leave(id)
        trainers = [holder for holder in self._contacts.holders.values() if holder.kind == "trainer"]
        self._trainers = trainers or self._trainers
        self._repair(self._files.values(), [NO_WORKER + each.location for each in files.holders], gained=True)
        if files.digest != self.newest:
            self.end_version()
            copy = sum(file.nbytes for file in files.files if file.digest == files.digest)
            delta = sum(file.nbytes for file in files.files if file.after == files.digest)
            waiting = {id for id, holder in self._contacts.holders.items() if holder.kind == "peer"}
            self.newest, self._left = files.digest, {}
            self.traffic = Traffic(files.version, copy, delta, now_s, waiting, len(waiting) // 2)

    def end_version(self) -> None:
        """The next version comes, or the run ends: write the event of the newest one."""
        if self.traffic is not None and self.traffic.readers:
            self._events.append(("weights", self.traffic.describe()))

    def uploaded(self, file: str, count: int, ranges: m.Ranges = (), *, failed: bool) -> None:
        """The trainer has sent bytes of a file to the bucket, which has these ranges of it; or not, if that failed."""
        if self.traffic is not None:
            self.traffic.bytes["upload"] += count
        if not failed:
            self.wrong.discard(file)
        if (known := self._files.get(file)) is not None:
            whole = normal([(0, known.file.nbytes)])
            buckets = [id for id, holder in self._contacts.holders.items() if holder.kind == "bucket"]
            for id in buckets:
                held = intersect(known.held.pop(id, ()), whole)
                if held := (subtract if failed else union)(held, normal(ranges) or whole):
                    known.held[id] = held
            for reading in known.readings.values() if not failed else ():
                reading.avoid.difference_update(buckets)
            self._repair([known], buckets, gained=not failed)

    # Readers

    def load(self, reader: str, wanted: str) -> tuple[m.FileRoute, ...]:
        """The files that bring the reader to these weights, each with its route. Nothing to read: no files. A file
        without sources: none are known, and the reader is to ask again."""
        self.stopped(reader)
        files = {name: known.file for name, known in self._files.items()}
        while (plan := self._plan(reader, wanted, files.values())) is not None:
            readings = [self._find(reader, file) for file in plan]
            unread = [file for file, reading in zip(plan, readings, strict=True) if reading.unfed]
            if not unread:
                break
            del files[unread[0].digest]
        else:  # no way has sources now: wait for those of the copy
            plan = (self._files[wanted].file,) if wanted in self._files else ()
            readings = [Reading(self._lacks(self._files[wanted], reader)) for _ in plan]
        self._keep_only(reader, {name for file in plan for name in _names(file)} or {wanted})
        if any(not file.after for file in plan):  # a full copy overwrites the one before it
            self._copies.pop(reader, None)
        return self._begin(reader, wanted, plan, readings)

    def ask(self, reader: str, file: str, used: Sequence[m.SourceUse], received: int) -> m.ReadRoute:
        """A source failed, or the reader needs this file, which its load did not name. It has the first `received`
        bytes of it."""
        known, wanted = self._files.get(file), self._loads[reader].wanted if reader in self._loads else ""
        copy = self._files[wanted].file if wanted in self._files else None
        if known is None or not (reader in known.readings or (copy and file in _names(copy))):
            for use in used:
                self._take(reader, use, None)
            if file == wanted:  # the copy that deltas should make: it has lost the one that they change
                self._copies.pop(reader, None)
            return NO_ROUTE
        if reader not in known.readings:  # the deltas cannot be applied: it has lost its copy
            self.stopped(reader)
            self._copies.pop(reader, None)
            self._keep_only(reader, set())
            known.held.pop(reader, None)
            self._begin(reader, wanted, (known.file,), [Reading(self._lacks(known, reader))])
        reading = known.readings[reader]
        self._loads[reader].received = max(received, self._loads[reader].received)
        reading.need = subtract(self._lacks(known, reader), normal([(0, received)]))
        if not reading.need:  # it lacks something nevertheless
            known.held.pop(reader, None)
            reading.need = self._lacks(known, reader)
        for use in used:
            self._take(reader, use, known)
        failed = [use.source for use in used if use.why]
        self._renew(known, [reader], failed[0] if failed else "first")
        if failed:
            self._repair(self._files.values(), failed)
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
            for file in self._loads.pop(reader).files:
                self._files[file.digest].held[reader] = WHOLE
                self._end(self._files[file.digest], reader)
            if (known := self._files.get(digest)) is not None:
                known.held[reader] = WHOLE
                if apply_s > 0:
                    self._verify_bytes_per_s = mean(self._verify_bytes_per_s, known.file.nbytes / apply_s)
            self._copies[reader] = digest
        for use in used:
            self._take(reader, use, None)
        if failed := [use.source for use in used if use.why]:
            self._repair(self._files.values(), failed)
        if self.traffic is not None and digest == self.newest:
            self.traffic.ready(reader, now_s)

    def stopped(self, *readers: str) -> None:
        """Their loads have failed, or others follow. Their followers get other routes. To stop many at once is cheaper
        than to stop them one by one, each time with new routes for followers that will be stopped, too."""
        files: dict[str, KnownFile] = {}
        for reader in readers:
            load = self._loads.pop(reader, None)
            for file in load.files if load is not None else ():
                known = files[file.digest] = self._files[file.digest]
                self._end(known, reader)
        self._repair(files.values(), readers)

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
        """Since the last call, for the event log."""
        out, self._events = self._events, []
        return out

    def check(self) -> None:
        """Raise AssertionError if the state breaks a rule."""
        holders, usable = self._contacts.holders, self._contacts.usable
        for digest, known in self._files.items():
            importers: list[str] = []
            load: Counter[str] = Counter()
            for reader, reading in known.readings.items():
                me = holders[reader]
                for part in reading.parts:
                    assert self._valid(known, reader, part), (1, part)
                    assert part.source not in self._contacts.dropped, (6, part)
                covered = normal((part.start, part.stop) for part in reading.parts)
                assert not reading.parts or covers(covered, reading.need), (1, reader, digest)
                sources = [holders[id] for id in reading.sources]
                load.update(reading.sources)
                importing = any(holder.across(me) for holder in sources)
                for other in importers if importing else ():
                    pair = ((reader, other), (other, reader))
                    both = all(usable(*ids) and ids[1] not in known.readings[ids[0]].avoid for ids in pair)
                    assert holders[other].region != me.region or not both, (3, reader, other)
                if importing:
                    importers.append(reader)
            assert +load == +known.load, (digest, load, known.load)
            follows = {reader: known.follows(reader) for reader in known.readings}
            while done := [reader for reader, others in follows.items() if not others & follows.keys()]:
                for reader in done:
                    del follows[reader]
            assert not follows, (2, follows)
        kept = [id for id, holder in holders.items() if holder.kind != "peer"]
        if self.newest in self._files and any(holders[id].kind == "trainer" for id in kept):
            known = self._files[self.newest]
            complete = normal(piece for id in kept for piece in known.held.get(id, ()))
            assert covers(complete, normal([(0, known.file.nbytes)])), (8, self.newest)

    # Plans

    def _plan(self, reader: str, wanted: str, files: Iterable[m.FileRef]) -> tuple[m.FileRef, ...] | None:
        copy = self._files[wanted].file.nbytes if wanted in self._files else 0
        rate, apply_s = self._rate(self._contacts.holders[reader]), copy / self._verify_bytes_per_s
        return updates.plan(self._held(reader), wanted, files, bytes_per_s=rate, apply_s=apply_s)

    def _held(self, reader: str) -> list[str]:
        """All weights that the reader has complete."""
        whole = [name for name, known in self._files.items() if not self._lacks(known, reader)]
        return [*whole, *([self._copies[reader]] if reader in self._copies else [])]

    def _lacks(self, known: KnownFile, reader: str) -> m.Ranges:
        return subtract(normal([(0, known.file.nbytes)]), known.held.get(reader, ()))

    def _rate(self, me: WeightHolder) -> float:
        """Expected bytes per second from the trainer. It says what a delta is worth even if a copy is nearer: somebody
        must bring that copy."""
        return max(self._rates.between(me, trainer) for trainer in self._trainers)

    # Routes

    def _search(self, reader: str, known: KnownFile, reading: Reading) -> tuple[Part, ...]:
        near = WeightHolder(id="", kind="peer", region=self._region)
        slots = fan_out(len(self._contacts.holders), known.file.nbytes, self._rates.between(near, near))
        me, damaged = self._contacts.holders[reader], known.file.digest in self.wrong
        return RouteSearch(self._contacts, self._prices, slots, self._rates.slow, me, known, damaged).route(reading)

    def _find(self, reader: str, file: m.FileRef) -> Reading:
        """A reading with its route, which has not begun."""
        known = self._files[file.digest]
        reading = Reading(self._lacks(known, reader))
        reading.parts = self._search(reader, known, reading)
        return reading

    def _begin(
        self, reader: str, wanted: str, plan: tuple[m.FileRef, ...], found: Sequence[Reading]
    ) -> tuple[m.FileRoute, ...]:
        self._loads[reader] = WeightLoad(wanted, plan)
        for file, reading in zip(plan, found, strict=True):
            known, parts, reading.parts = self._files[file.digest], reading.parts, ()
            known.readings[reader] = reading
            self._set(known, reader, parts, "first")
        return tuple(m.FileRoute(file=file, route=self._route(reader, r)) for file, r in zip(plan, found, strict=True))

    def _end(self, known: KnownFile, reader: str) -> None:
        if reader in known.readings:
            self._set(known, reader, ())
            del known.readings[reader]

    def _keep_only(self, reader: str, keep: set[str]) -> None:
        """The reader overwrites its copy: it serves deltas and these files only."""
        for name, known in self._files.items():
            if name not in keep and not known.file.after and known.held.pop(reader, None) is not None:
                self._repair([known], [reader])

    def _set(self, known: KnownFile, reader: str, parts: tuple[Part, ...], why: str = "") -> None:
        """Give a reader this route, and count the load of its sources. `why`: for the event of an importer."""
        reading, me, holders = known.readings[reader], self._contacts.holders[reader], self._contacts.holders
        known.load.subtract(id for id in reading.sources if id in holders)
        reading.parts = parts
        known.load.update(reading.sources)
        if parts:
            importing = any(holders[id].across(me) for id in reading.sources)
            if importing and not reading.importing:
                at_bytes = self._loads[reader].received
                cause = why.removeprefix(NO_WORKER)
                at = {"worker": reader, "file": known.file.digest, "at_bytes": at_bytes, "why": cause}
                self._events.append(("importer", {"region": me.region, **at}))
            reading.importing = importing

    def _route(self, reader: str, reading: Reading) -> m.ReadRoute:
        me, ids = self._contacts.holders[reader], reading.sources
        refs = tuple(
            m.SourceRef(id=h.id, kind=h.kind, location=h.location, machine=h.machine if me.shares_machine(h) else "")
            for h in (self._contacts.holders[id] for id in ids)
        )
        parts = (m.RoutePart(start=p.start, stop=p.stop, source=ids.index(p.source)) for p in reading.parts)
        return m.ReadRoute(sources=refs, parts=tuple(parts))

    def _repair(self, files: Iterable[KnownFile], suspects: Collection[str], *, gained: bool = False) -> None:
        """Something has changed about these sources. Give new routes to all whose source is none any more. `gained`:
        also to those that had none, which otherwise ask again."""
        for known in files:
            broken = [
                reader for reader, reading in known.readings.items()
                if (gained and reading.unfed)
                or any(part.source in suspects and not self._valid(known, reader, part) for part in reading.parts)
            ]  # fmt: skip
            self._renew(known, broken, next(iter(suspects), "first"))

    def _renew(self, known: KnownFile, readers: Collection[str], why: str) -> None:
        """Give these readers new routes. The one with the most bytes comes first: if it must import, the others can
        follow it."""
        for reader in readers:
            self._set(known, reader, ())
        for reader in sorted(readers, key=lambda id: (-self._loads[id].received, id)):
            parts = self._search(reader, known, known.readings[reader])
            self._set(known, reader, parts, why)
            if parts:
                self._routed[reader, known.file.digest] = None

    def _valid(self, known: KnownFile, reader: str, part: Part) -> bool:
        has = part.source in known.readings or known.has(part.source, part.start, part.stop)
        return has and self._contacts.usable(reader, part.source)

    # Reports

    def _take(self, reader: str, use: m.SourceUse, known: KnownFile | None) -> None:
        """Count what a reader got, and take its complaint."""
        me, source = self._contacts.holders[reader], self._contacts.holders.get(use.source)
        if (past := source or self._left.get(use.source)) is not None:
            usd = use.bytes / 1e9 * self._prices.usd_per_gb(me, past)
            self.usd += usd
            self._rates.add(me, past, use.bytes, use.s)
            if self.traffic is not None:
                self.traffic.add(me, past, use.bytes, usd)
        if source is None or use.why in ("", "slow"):
            return
        dropped = False
        if known is not None and use.why == "wrong" and source.kind == "bucket":
            known.readings[reader].avoid.add(use.source)
            if known.file.digest not in self.wrong and self._contacts.report_damage(reader):
                dropped = True
                self.wrong.add(known.file.digest)
                self._damaged.append(known.file.digest)
        elif use.why in ("unreachable", "wrong"):
            dropped = self._contacts.report(reader, use.source, use.why)
        elif known is not None:
            known.readings[reader].avoid.add(use.source)
            if use.why == "gone" and source.kind == "peer" and use.source not in known.readings:
                dropped = known.held.pop(use.source, None) is not None
        if dropped:
            file, name = known.file.digest if known is not None else "", use.source.removeprefix(NO_WORKER)
            about = {"source": name, "file": file, "why": use.why, "by": reader, "bytes": use.bytes}
            self._events.append(("source_dropped", about))


def _names(file: m.FileRef) -> tuple[str, ...]:
    """A file, and the base that it is useless without."""
    return (file.digest, file.before) if file.before and not file.after else (file.digest,)
