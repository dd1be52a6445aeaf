"""Simulated weight files: what a machine holds, reads along routes of the controller's directory, and sends to others.

    Load ──▶ WeightReading: a flow per file, one after another ──▶ done
                  │ its source is lost: the flow pauses   ▲
                  └── AskRoute ──▶ controller ── Routed ──┘ the flow goes on at the same byte

A reader of a file is a source of it from the beginning: others follow its flow. Not simulated: parts of files, hashes,
the time that applying a delta takes, and slow sources that are reported.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from windfall.controller.directory.routes import CHUNK_BYTES, MAX_CHUNKS
from windfall.link import messages as m
from windfall.sim.machines.network import Flow, Network
from windfall.sim.section import SimRegion

Fault = Literal["", "gone", "wrong", "unreachable", "stalled"]
"""What is wrong with a source."""
NOTICED_S: Mapping[Fault, float] = {"gone": 0.05, "wrong": 0.1, "unreachable": 2.0, "stalled": 3.0}
"""Seconds until a reader reports it."""
ASK_AGAIN_S = 1.0
MAX_DELTAS = 8
"""Deltas that a machine keeps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreNetwork:
    """All machines that hold weights, and what is between them."""

    regions: Mapping[str, SimRegion] = field(default_factory=dict)
    latency_s: float = 0.0
    """Latency of one message within a region."""
    network: Network = field(default_factory=Network)
    stores: dict[str, WeightStore] = field(default_factory=dict)
    """By location."""

    def path(self, sender: WeightStore, reader: WeightStore) -> tuple[dict[str, float], float]:
        """The links from one machine to another, and their latency."""
        links = {f"{sender.location} up": sender.up_per_s, f"{reader.location} down": reader.down_per_s}
        wide = [self.regions[name] for name in (sender.region, reader.region) if name in self.regions]
        if sender.region == reader.region or not wide:
            return links, self.latency_s
        links[f"{sender.region} to {reader.region}"] = min(region.bytes_per_s for region in wide)
        return links, max(region.latency_s for region in wide)


@dataclass(kw_only=True, eq=False, slots=True)
class WeightStore:
    """The files of one machine."""

    net: StoreNetwork
    location: str
    region: str = ""
    up_per_s: float = math.inf
    down_per_s: float = math.inf
    files: dict[str, tuple[m.FileRef, Flow | None]] = field(default_factory=dict)
    """By digest: the file, and the flow that fills it. None: it is complete."""
    policies: dict[str, str] = field(default_factory=dict)
    """By digest of a file that was read: the policy of its load. The base of adapters belongs to none."""
    withdrawn: set[str] = field(default_factory=set)
    """Files that it had, and has no more."""
    readers: dict[WeightReading, None] = field(default_factory=dict)
    fault: Fault = ""

    def __post_init__(self) -> None:
        self.net.stores[self.location] = self

    def close(self) -> None:
        """The machine is lost."""
        if self.net.stores.get(self.location) is self:
            del self.net.stores[self.location]
        self.fail("unreachable")

    def fail(self, fault: Fault) -> None:
        """What readers find from now on. Empty: all is well again."""
        self.fault = fault
        for reading in [*self.readers]:
            reading.read()

    @property
    def complete(self) -> list[m.FileRef]:
        return [file for file, flow in self.files.values() if flow is None]

    def hold(self, complete: Iterable[m.FileRef], flows: Iterable[tuple[m.FileRef, Flow]] = ()) -> None:
        """Hold these files and no others: complete ones, and those that flows bring."""
        before, self.files = self.files, {}
        self.files.update((file.digest, (file, None)) for file in complete)
        self.files.update((file.digest, (file, flow)) for file, flow in flows)
        self.withdrawn = (self.withdrawn | before.keys()) - self.files.keys()
        for reading in [*self.readers]:
            if (reading.digest in before) != (reading.digest in self.files):
                reading.read()


class WeightReading:
    """A worker reads the files of one Load."""

    def __init__(
        self, store: WeightStore, load: m.Load, ask: Callable[[m.AskRoute], None], done: Callable[[], None]
    ) -> None:
        self._store, self.load, self._ask, self._done = store, load, ask, done
        bases = {each.file.before for each in load.files if not each.file.after}
        here = bases & {file.digest for file in store.complete}  # the load of another policy has brought the base
        self._files = [each for each in load.files if each.file.digest not in here]
        self._left = {each.file.digest: each.route for each in self._files}
        """Files that are not complete, with their routes. The first is being read."""
        self.used: list[m.SourceUse] = []
        """What it got from each source since its last report."""
        self._source: m.SourceRef | None = None
        """None: it waits for a route."""
        self._sender: WeightStore | None = None
        self._since = (0.0, 0.0)
        """When it began with this source (loop time, seconds), and the bytes that were missing then."""
        self._timer: asyncio.TimerHandle | None = None
        whole = any(not each.file.after for each in self._files)
        own = [f for f in store.complete if not f.after and store.policies.get(f.digest) == load.policy]
        self._copies = [] if whole else own
        """What deltas will be applied to. It is there again if they do not arrive."""
        if self._files:  # the old copy is overwritten
            others = [file for file in store.complete if not file.after and file not in own]
            deltas = [file for file in store.complete if file.after][-MAX_DELTAS:]
            store.hold([*others, *deltas], [(each.file, self._new_flow(each.file.nbytes)) for each in self._files])
            store.policies.update(dict.fromkeys({each.file.digest for each in self._files} - bases, load.policy))

    @property
    def digest(self) -> str:
        """The file that is being read. Empty: none."""
        return next(iter(self._left), "")

    @property
    def received(self) -> float:
        """Bytes of all files so far."""
        complete = sum(each.file.nbytes for each in self._files if each.file.digest not in self._left)
        return complete + (self._flow.count_bytes - self._flow.left_bytes if self._left else 0.0)

    @property
    def _flow(self) -> Flow:
        flow = self._store.files[self.digest][1]
        assert flow is not None
        return flow

    def _new_flow(self, count: int) -> Flow:
        return Flow(
            count_bytes=count, chunk_bytes=min(count, max(CHUNK_BYTES, count // MAX_CHUNKS)), done=self._complete
        )

    def read(self) -> None:
        """Read on from the first source of the route."""
        self._leave()
        if not self._left:
            self._done()
        elif not (route := self._left[self.digest]).parts:
            self._report()
        else:
            net = self._store.net
            self._source = route.sources[route.parts[0].source]
            self._since = (asyncio.get_running_loop().time(), self._flow.left_bytes)
            self._sender = net.stores.get(self._source.location)
            fault = self._fault()
            if self._sender is not None:
                self._sender.readers[self] = None
            if self._sender is None or fault:
                self._call_later(NOTICED_S[fault], fault)
            else:
                links, late_s = net.path(self._sender, self._store)
                net.network.send(self._flow, links, leader=self._sender.files[self.digest][1], late_s=late_s)

    def _fault(self) -> Fault:
        if self._sender is None:
            return "unreachable"
        begun = "gone" if self.digest in self._sender.withdrawn else "stalled"  # it will read it, too
        return self._sender.fault or ("" if self.digest in self._sender.files else begun)

    def routed(self, message: m.Routed) -> None:
        """A route from the controller."""
        if message.file in self._left and message.route.parts:
            self._left[message.file] = message.route
            first = message.route.sources[message.route.parts[0].source]
            if message.file == self.digest and first != self._source:
                self.read()

    def stop(self) -> None:
        self._leave()
        self._store.hold([*self._store.complete, *(self._copies if self._left else ())])
        self._left = {}

    def _leave(self, why: Fault = "") -> None:
        """Stop reading from this source."""
        if self._timer is not None:
            self._timer.cancel()
        if self._source is not None:
            self._store.net.network.send(self._flow, {})
            since_s, left = self._since
            count, s = round(left - self._flow.left_bytes), asyncio.get_running_loop().time() - since_s
            if count or why:
                self.used.append(m.SourceUse(source=self._source.id, bytes=count, s=s, why=why))
        if self._sender is not None:
            del self._sender.readers[self]
        self._source = self._sender = None

    def _report(self, why: Fault = "") -> None:
        """Ask for another route, and again until there is one."""
        self._leave(why)
        received = int(self._flow.count_bytes - self._flow.left_bytes)
        used = tuple(self.used)
        self._ask(m.AskRoute(file=self.digest, used=used, received=received, policy=self.load.policy))
        self.used = []
        self._call_later(ASK_AGAIN_S)

    def _call_later(self, s: float, why: Fault = "") -> None:
        self._timer = asyncio.get_running_loop().call_later(s, self._report, why)

    def _complete(self) -> None:
        self._leave()
        file = self._store.files[self.digest][0]
        del self._left[file.digest]
        self._store.files[file.digest] = (file, None)
        if not self._left:
            copy = m.FileRef(digest=self.load.digest, nbytes=0)
            self._store.files.setdefault(copy.digest, (copy, None))
            self._store.policies[copy.digest] = self.load.policy
        self.read()
