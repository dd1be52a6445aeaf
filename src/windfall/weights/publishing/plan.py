"""Decides what each rank does when several publish one version of the weights together.

Every rank makes a `RankOffer`: which rows of which tensors it holds, and on which machine. From the offers of all
ranks, every rank computes the same `PublishPlan`, so the ranks need not send it to each other. Rules:

- rows that several ranks hold (a tensor that is not sharded, a replica) are written by the first of them;
- the ranks of one machine share one buffer, which the first of them, the leader, creates and serves;
- a rank hashes the chunks in which it alone has rows, and the leader the other ones of its machine. No chunk has bytes
  of two machines (manifest.py);
- every rank compares its own rows with those of the previous version (row_writer.py);
- the digest is the one that a single process would compute, whatever the number of ranks on one machine.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import msgspec

from windfall.errors import WindfallError
from windfall.link.messages import Ranges
from windfall.weights import manifest
from windfall.weights.manifest import TensorEntry


class HeldRows(msgspec.Struct, frozen=True, array_like=True):
    """The rows of one tensor that a rank holds."""

    name: str
    dtype: str  # as published
    shape: tuple[int, ...]  # of the whole tensor
    storage: int  # equal for tensors of this rank that are tied; -1 if it has no bytes of the tensor
    first: int
    count: int


class RankOffer(msgspec.Struct, frozen=True, array_like=True):
    machine: str
    chunk_bytes: int
    tensors: tuple[HeldRows, ...]


class Piece(NamedTuple):
    """The bytes of one tensor that one rank writes, as a range of the buffer."""

    entry: TensorEntry
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one rank does."""

    leader: int  # the rank that creates the buffer of this machine
    pieces: tuple[Piece, ...]  # in the order of the buffer


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePlan:
    """The chunks of a file that is published, and which machine has which bytes."""

    nbytes: int
    chunk_bytes: int
    parts: dict[int, Ranges]  # by the leader of the machine
    cuts: tuple[int, ...]
    bounds: tuple[int, ...]  # of the chunks

    def chunks(self, leader: int) -> list[int]:
        """The chunks of a machine."""
        at = functools.partial(bisect_left, self.bounds)
        return [i for start, stop in self.parts.get(leader, ()) for i in range(at(start), at(stop))]


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishPlan:
    entries: tuple[TensorEntry, ...]
    file: FilePlan
    shares: tuple[Share, ...]  # by rank
    only: tuple[int, ...]  # for each chunk, the rank that alone has rows in it; -1: several ranks, or none

    def delta(self, sizes: Sequence[int]) -> tuple[FilePlan, list[int]]:
        """A delta made of a part of each rank with these sizes: its plan, and where each rank's part starts. The parts
        of one machine are next to each other, and no chunk has bytes of two ranks."""
        starts, parts, end = [0] * len(sizes), {}, 0
        for rank, share in sorted(enumerate(self.shares), key=lambda each: each[1].leader):
            starts[rank], end = end, end + sizes[rank]
            if sizes[rank]:
                first = parts[share.leader][0][0] if share.leader in parts else starts[rank]
                parts[share.leader] = ((first, end),)
        return file_plan(end, self.file.chunk_bytes, parts, starts), starts


def file_plan(nbytes: int, chunk_bytes: int, parts: dict[int, Ranges], more_cuts: Iterable[int] = ()) -> FilePlan:
    chunk_bytes = manifest.chunk_size(nbytes, chunk_bytes)
    starts = {start for of in parts.values() for start, _ in of}
    cuts = tuple(sorted((starts | {*more_cuts}) - {0, nbytes}))
    bounds = tuple(manifest.chunk_bounds(nbytes, chunk_bytes, cuts))
    return FilePlan(nbytes=nbytes, chunk_bytes=chunk_bytes, parts=parts, cuts=cuts, bounds=bounds)


def make(offers: Sequence[RankOffer]) -> PublishPlan:
    """Raises WindfallError if the offers do not fit together."""
    _check_same(offers)
    entries, nbytes, first = _layout(offers)
    leaders = [next(r for r, o in enumerate(offers) if o.machine == mine.machine) for mine in offers]
    pieces = sorted(
        ((piece, rank) for entry, i in first.items() for piece, rank in _pieces(entry, [o.tensors[i] for o in offers])),
        key=lambda found: found[0].start,
    )
    parts = _parts(pieces, leaders, nbytes)
    by_rank: list[list[Piece]] = [[] for _ in offers]
    for piece, rank in pieces:
        by_rank[rank].append(piece)
    shares = tuple(Share(leader=leader, pieces=tuple(mine)) for leader, mine in zip(leaders, by_rank, strict=True))
    file = file_plan(nbytes, offers[0].chunk_bytes, parts)
    return PublishPlan(entries=entries, file=file, shares=shares, only=_only(file, pieces))


def _only(file: FilePlan, pieces: Sequence[tuple[Piece, int]]) -> tuple[int, ...]:
    writers: list[set[int]] = [set() for _ in file.bounds[1:]]
    for piece, rank in pieces:
        for i in range(bisect_right(file.bounds, piece.start) - 1, bisect_left(file.bounds, piece.stop)):
            writers[i].add(rank)
    return tuple(next(iter(ranks)) if len(ranks) == 1 else -1 for ranks in writers)


def _check_same(offers: Sequence[RankOffer]) -> None:
    first = [(t.name, t.dtype, t.shape) for t in offers[0].tensors]
    for rank, offer in enumerate(offers):
        if offer.chunk_bytes != offers[0].chunk_bytes:
            raise _invalid(f"rank {rank} has chunks of {offer.chunk_bytes} bytes, rank 0 of {offers[0].chunk_bytes}")
        other = [(t.name, t.dtype, t.shape) for t in offer.tensors]
        if other != first:
            pairs = (f"{b} instead of {a}" for a, b in zip(first, other, strict=False) if a != b)
            what = next(pairs, f"{len(other)} tensors instead of {len(first)}")
            raise _invalid(f"rank {rank} has other tensors than rank 0: {what}")


def _layout(offers: Sequence[RankOffer]) -> tuple[tuple[TensorEntry, ...], int, dict[TensorEntry, int]]:
    """Entries, size of the buffer, and for each byte range its first entry with the number of its tensor. Tensors are
    tied if they are tied on every rank that holds rows of them."""
    rows, storages, first = [], {}, {}
    for i, t in enumerate(offers[0].tensors):
        found = tuple(offer.tensors[i].storage for offer in offers)
        identity = (found, t.dtype, t.shape) if max(found) >= 0 else i
        rows.append((t.name, t.dtype, t.shape, storages.setdefault(identity, len(storages))))
        first.setdefault(storages[identity], i)
    entries, nbytes = manifest.layout(rows)
    return entries, nbytes, {entries[i]: i for i in first.values() if entries[i].nbytes}


def _pieces(entry: TensorEntry, held: Sequence[HeldRows]) -> list[tuple[Piece, int]]:
    """Who writes which bytes of a tensor."""
    writers: dict[tuple[int, int], int] = {}
    for rank, rows in enumerate(held):
        if rows.count:
            writers.setdefault((rows.first, rows.count), rank)
    total = entry.shape[0] if entry.shape else 1
    row_bytes, out, end = entry.nbytes // total, [], 0
    for (first, count), rank in sorted(writers.items()):
        if first != end:
            what = f"no rank has rows {end} to {first}" if first > end else f"rank {rank} has a part of another's rows"
            raise _invalid(f"tensor {entry.name!r}: {what}")
        end = first + count
        out.append((Piece(entry, entry.offset + first * row_bytes, entry.offset + end * row_bytes), rank))
    if end != total:
        raise _invalid(f"tensor {entry.name!r}: the ranks have {end} of {total} rows")
    return out


def _parts(pieces: Sequence[tuple[Piece, int]], leaders: Sequence[int], nbytes: int) -> dict[int, Ranges]:
    """The bytes of each machine that has some; bytes between tensors belong to the tensor before."""
    starts: list[tuple[int, int]] = []
    for piece, rank in pieces:
        if not starts or starts[-1][1] != leaders[rank]:
            starts.append((piece.start, leaders[rank]))
    parts: dict[int, Ranges] = {}
    for (start, leader), (stop, _) in pairwise([*starts, (nbytes, -1)]):
        parts[leader] = (*parts.get(leader, ()), (start, stop))
    return parts or {0: ()}


def _invalid(what: str) -> WindfallError:
    return WindfallError(what, where="weights", fix="Pass the shards of the same model on all ranks.")
