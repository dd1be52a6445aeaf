"""From where a reader gets which bytes of a file. Pure.

    trainer ──▶ a ──▶ b ──▶ c           a chain within the region of the trainer; each follows the one before it
       └──────▶ x ──▶ y                 another region: x is its *importer*, the one that crosses the wide link

Rules:
- The first source of a part is, in this order: on the reader's machine; in its region, with a free slot; in its region;
  elsewhere, where it costs least. Among equals, who has the bytes comes before who is reading them, and who began
  earlier before who began later, which keeps the tree flat.
- So a reader imports only if it can use no source in its region, and the next readers there follow it.
- A holder has as many slots as the file's fan-out. A slow one has none. Reads within a machine, and by importers, take
  no slot.
- The second source of a part, if there is one, has the bytes already, and is in the reader's region if the first is. A
  reader goes to it by itself if the controller does not answer.
- Sources that a reader avoids come back if there is no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from windfall.controller.directory.holders import WHOLE, Contacts, KnownFile, Part, Reading, WeightHolder
from windfall.controller.directory.traffic import TrafficPrices

MAX_FAN_OUT = 8
CHUNK_BYTES, MAX_CHUNKS = 4 << 20, 16_384
LATENCY_S = 0.002
"""What a hop adds beside its bytes: a request and a wait. Within a region; no hop of a tree crosses regions."""


def chunk_bytes(nbytes: int) -> int:
    """The chunk of a file of this size, which passes through a hop as a whole."""
    size = CHUNK_BYTES
    while size * MAX_CHUNKS < nbytes:
        size *= 2
    return size


def fan_out(readers: int, nbytes: int, chunk_bytes: int, bytes_per_s: float, latency_s: float) -> int:
    """How many readers each holder should feed at once, so that the last of all readers has the file first.

    >>> fan_out(64, 16 << 30, 4 << 20, 1e9, 0.002), fan_out(64, 1 << 20, 4 << 20, 1e9, 0.002)
    (1, 4)
    """

    def last_s(d: int) -> float:
        depth, reached, level = 0, 0, 1
        while reached < readers and d > 1:
            depth, level = depth + 1, level * d
            reached += level
        hop_s = min(chunk_bytes, nbytes) / bytes_per_s + latency_s
        return d * nbytes / bytes_per_s + (depth if d > 1 else readers) * hop_s

    return min(range(1, MAX_FAN_OUT + 1), key=last_s)


@dataclass(frozen=True, slots=True)
class SourceChoice:
    """What a choice of sources depends on beside the file and its reader."""

    contacts: Contacts
    prices: TrafficPrices
    slots: int
    slow: frozenset[str] = frozenset()

    def route(self, me: WeightHolder, known: KnownFile, reading: Reading) -> tuple[Part, ...]:
        """Parts that cover all that it needs; none if no sources do."""
        unfit = known.unfit()
        parts = self._cover(_Search(self, me, known, unfit, reading.avoid), reading)
        if not parts and reading.avoid:
            parts = self._cover(_Search(self, me, known, unfit, set()), reading)
        return parts

    def _cover(self, search: _Search, reading: Reading) -> tuple[Part, ...]:
        parts: list[Part] = []
        for need in reading.need:
            pieces = _pieces(search.known, *need)
            whole = search.sources(*need, outside=False) if len(pieces) > 1 else ()
            for start, stop in (need,) if whole else pieces:
                found = whole or search.sources(start, stop, outside=True)
                if not found:
                    return ()
                joined = parts and parts[-1].stop == start and parts[-1].sources == found
                parts.append(Part(parts.pop().start if joined else start, stop, found))
        return tuple(parts)


@dataclass(frozen=True, slots=True)
class _Search:
    """The sources of one reader for one file."""

    choice: SourceChoice
    me: WeightHolder
    known: KnownFile
    unfit: set[str]
    avoid: set[str]

    def sources(self, start: int, stop: int, *, outside: bool) -> tuple[str, ...]:
        """The first and the second source of these bytes; with `outside`, also from other regions."""
        known, region, holders = self.known, self.me.region, self.choice.contacts.holders
        candidates = [*known.held, *(id for id in known.readings if id not in known.held)]
        neighbors = self.choice.contacts.machines.get(self.me.machine, ())
        first = next((id for id in neighbors if self._serves(id, start, stop)), None) or next(
            (id for id in candidates if self._free(id) and self._serves(id, start, stop)), None
        )
        if first is None:
            usable = [id for id in candidates if self._serves(id, start, stop)]
            first = min((id for id in usable if holders[id].region == region), key=self._cost, default=None)
            if first is None and usable and outside:
                first = min(usable, key=lambda id: (self._cost(id)[:2], not known.has(id, start, stop)))
        if first is None:
            return ()
        across = holders[first].across(self.me)
        for id in known.held:
            near = across or holders[id].region == region
            if near and id != first and known.has(id, start, stop) and self._serves(id, start, stop):
                return first, id
        return (first,)

    def _free(self, id: str) -> bool:
        """Whether it is in the region, with a free slot and without a price. This visits every reader."""
        if self.known.load.get(id, 0) >= self.choice.slots or id in self.choice.slow:
            return False
        holder = self.choice.contacts.holders[id]
        return holder.region == self.me.region and not self.choice.prices.usd_per_gb(self.me, holder)

    def _serves(self, id: str, start: int, stop: int) -> bool:
        if id in self.avoid or not self.choice.contacts.usable(self.me.id, id):
            return False
        return (id in self.known.readings and id not in self.unfit) or self.known.has(id, start, stop)

    def _cost(self, id: str) -> tuple[float, bool, int]:
        holder = self.choice.contacts.holders[id]
        return self.choice.prices.usd_per_gb(self.me, holder), id in self.choice.slow, self.known.load.get(id, 0)


def _pieces(known: KnownFile, start: int, stop: int) -> list[tuple[int, int]]:
    """These bytes, cut where the ranges of a holder begin or end."""
    cuts = {edge for ranges in known.held.values() if ranges != WHOLE for piece in ranges for edge in piece}
    edges = [start, *sorted(cut for cut in cuts if start < cut < stop), stop]
    return list(pairwise(edges))
