"""From where a reader gets which bytes of a file. Pure.

    trainer ──▶ a ──▶ b ──▶ c           a chain within the region of the trainer; each follows the one before it
       └──────▶ x ──▶ y                 another region: x is its *importer*, the one that crosses the wide link

Rules:
- The source of a part is, in this order: on the reader's machine; in its region, with a free slot; in its region;
  elsewhere, where it costs least. Among equals, who has the bytes comes before who is reading them, and who began
  earlier before who began later, which keeps the tree flat. A bucket comes last: it gets the bytes later.
- So a reader imports only if it can use no source in its region, and the next readers there follow it.
- A holder has as many slots as the file's fan-out; readers on its machine and importers may take more. A slow holder
  has none.
- A file that is damaged in the bucket is read there only if no other source has it: the seals of its chunks protect the
  reader, and most chunks are right. Sources that a reader avoids come back after that.
- A reader gets one source of each byte, and asks for another if that fails. A second one in advance would be out of
  date by then, and nobody would balance the reads that go there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from itertools import pairwise

from windfall.controller.directory.holders import Contacts, KnownFile, Part, Reading, WeightHolder
from windfall.controller.directory.traffic import TrafficPrices
from windfall.link.messages import Ranges

MAX_FAN_OUT = 8
CHUNK_BYTES, MAX_CHUNKS = 4 << 20, 16_384
"""A file has chunks of this size, or as many. A chunk passes through a hop as a whole."""
LATENCY_S = 0.002
"""What a hop adds beside its bytes: a request and a wait. Within a region; no hop of a tree crosses regions."""


def fan_out(readers: int, nbytes: int, bytes_per_s: float) -> int:
    """How many readers each holder should feed at once, so that the last of all readers has the file first.

    >>> fan_out(64, 16 << 30, 1e9), fan_out(64, 1 << 20, 1e9)
    (1, 4)
    """
    hop_s = min(nbytes, max(CHUNK_BYTES, nbytes // MAX_CHUNKS)) / bytes_per_s + LATENCY_S

    def last_s(d: int) -> float:
        depth, reached, level = 0, 0, 1
        while reached < readers and d > 1:
            depth, level = depth + 1, level * d
            reached += level
        return d * nbytes / bytes_per_s + (depth if d > 1 else readers) * hop_s

    return min(range(1, MAX_FAN_OUT + 1), key=last_s)


class RouteSearch:
    """Looks for the sources of one reader for one file."""

    def __init__(
        self,
        contacts: Contacts,
        prices: TrafficPrices,
        me: WeightHolder,
        known: KnownFile,
        *,
        slots: int,
        slow: Collection[str],
    ) -> None:
        self._contacts, self._prices, self._me, self._known = contacts, prices, me, known
        self._slots, self._slow = slots, slow
        self._unfit, self._load = known.unfit(), known.load()
        self._buckets = {id for id in known.held if contacts.holders[id].kind == "bucket"}

    def route(self, reading: Reading) -> tuple[Part, ...]:
        """Parts that cover all that it needs; none if no sources do."""
        avoid = reading.avoid | self._contacts.shunned(self._me.id)
        damaged = self._buckets if self._known.damaged else set[str]()
        attempts = dict.fromkeys(frozenset(left_out) for left_out in (avoid | damaged, avoid, damaged, ()))
        return next((parts for left_out in attempts if (parts := self._cover(reading.need, left_out))), ())

    def _cover(self, ranges: Ranges, avoid: Collection[str]) -> tuple[Part, ...]:
        known, parts = self._known, list[Part]()
        ids = [id for id in {**known.held, **known.readings} if id not in avoid and id not in self._buckets]
        ids += [id for id in self._buckets if id not in avoid]
        cuts = sorted({edge for held in known.held.values() for piece in held for edge in piece})
        for need in ranges:
            pieces = _pieces(cuts, *need)
            whole = self._source(ids, *need, outside=False) if len(pieces) > 1 else None
            for start, stop in (need,) if whole else pieces:
                found = whole or self._source(ids, start, stop, outside=True)
                if found is None:
                    return ()
                joined = parts and parts[-1].stop == start and parts[-1].source == found
                parts.append(Part(parts.pop().start if joined else start, stop, found))
        return tuple(parts)

    def _source(self, ids: Sequence[str], start: int, stop: int, *, outside: bool) -> str | None:
        """The source of these bytes; with `outside`, also from other regions."""
        known, me, holders = self._known, self._me, self._contacts.holders

        def serves(id: str) -> bool:
            has = known.has(id, start, stop) or (id in known.readings and id not in self._unfit)
            return has and self._contacts.usable(me.id, id)

        def cost(id: str) -> tuple[bool, float, bool, int]:
            usd, far = self._prices.usd_per_gb(me, holders[id]), holders[id].region != me.region
            return far, usd, id in self._slow, not known.has(id, start, stop) if far else self._load[id]

        near = (id for id in ids if me.shares_machine(holders[id]) and serves(id))
        free = (id for id in ids if self._free(id) and serves(id))
        rest = (id for id in ids if (outside or holders[id].region == me.region) and serves(id))
        return next(near, None) or next(free, None) or min(rest, key=cost, default=None)

    def _free(self, id: str) -> bool:
        """Whether it is in the region, with a free slot and without a price."""
        if self._load[id] >= self._slots or id in self._slow:
            return False
        holder = self._contacts.holders[id]
        return holder.region == self._me.region and not self._prices.usd_per_gb(self._me, holder)


def _pieces(cuts: Sequence[int], start: int, stop: int) -> list[tuple[int, int]]:
    """These bytes, cut where the ranges of a holder begin or end."""
    return list(pairwise([start, *cuts[bisect_right(cuts, start) : bisect_left(cuts, stop)], stop]))
