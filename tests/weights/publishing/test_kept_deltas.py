"""A trainer keeps its last deltas, so that a reader several versions behind can apply them one after another."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.support.weights.weight_shelves import route_to
from windfall.link.messages import FileRef, FileRoute, Load
from windfall.weights import delta
from windfall.weights.publishing import publish
from windfall.weights.publishing.publish import Publisher
from windfall.weights.pulling.pull import NO_ROUTE, PullFailed

Weights = dict[str, torch.Tensor]


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher(chunk_bytes=1 << 12)
    yield made
    made.close()


def moved(w: Weights, seed: int, share: float = 0.01) -> Weights:
    g = torch.Generator().manual_seed(seed)
    out = {}
    for name, t in w.items():
        bits = t.clone().view(torch.int16)
        out[name] = torch.where(torch.rand(t.shape, generator=g) < share, bits + 1, bits).view(t.dtype)
    return out


def weights() -> Weights:
    return {f"w{i}": torch.randn(200, 50, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(5)}


def content(p: Publisher) -> np.ndarray:
    return p.readable[0].buffer.data.copy()


def chain(p: Publisher, digest: str) -> list[bytes] | None:
    """The deltas from these weights to the newest version, in order; None if one is missing."""
    blobs: list[bytes] = []
    assert p.current is not None
    while digest != p.current.digest:
        found = next((d for d in p.files._files.values() if d.manifest.before == digest), None)
        if found is None:
            return None
        with found.reading() as fd:
            blobs.append(os.pread(fd, found.manifest.nbytes, 0))
        digest = found.manifest.after
    return blobs


@pytest.mark.parametrize("pack", [False, True])
def test_chains_of_up_to_eight_deltas_lead_to_the_newest_version(publisher: Publisher, pack: bool) -> None:
    w, versions = weights(), []
    for v in range(12):
        w = moved(w, v)
        made = publisher.publish(v, w, pack=pack and v % 3 > 0)  # packed and other deltas in one chain
        versions.append((made.digest, content(publisher)))
    lengths = []
    for digest, old in versions:
        blobs = chain(publisher, digest)
        if blobs is None:
            continue
        lengths.append(len(blobs))
        for blob in blobs:
            delta.apply(old, blob, publisher.readable[0].manifest)
        assert (old == versions[-1][1]).all()
    assert lengths == [8, 7, 6, 5, 4, 3, 2, 1, 0]


def test_packed_deltas_are_smaller(publisher: Publisher) -> None:
    w = weights()
    publisher.publish(0, w)
    sizes = []
    for v, pack in ((1, False), (2, True)):
        w = moved(w, v)
        publisher.publish(v, w, pack=pack)
        assert publisher.delta is not None
        sizes.append(publisher.delta.manifest.nbytes)
    assert sizes[1] < 0.7 * sizes[0]


def test_kept_deltas_are_at_most_half_of_a_copy(publisher: Publisher) -> None:
    w = weights()
    for v in range(6):
        w = moved(w, v, share=0.1)
        made = publisher.publish(v, w)
    sizes = [d.manifest.nbytes for d in publisher.deltas]
    assert 1 < len(sizes) < 5
    assert sum(sizes) <= publish.MAX_DELTAS_RATIO * made.nbytes < sum(sizes) + sizes[-1] * 1.1
    publisher.publish(6, moved(w, 6, share=0.55))
    assert [d.manifest.version for d in publisher.deltas] == [6], "the newest is kept, though it is larger than that"


def test_version_without_a_delta_ends_the_chain(publisher: Publisher) -> None:
    w = weights()
    for v in range(3):
        w = moved(w, v)
        publisher.publish(v, w)
    assert len(publisher.deltas) == 2
    publisher.publish(3, {name: t + 1 for name, t in w.items()})
    assert publisher.deltas == ()
    assert len(publisher.files.describe()) == 2, "two versions"


def test_buffers_of_deltas_are_used_again(publisher: Publisher) -> None:
    w, used = weights(), []
    for v in range(30):
        w = moved(w, v)
        publisher.publish(v, w)
        if publisher.delta:
            used.append(publisher.delta.buffer.handle.inode)
    assert len(set(used)) <= delta.MAX_DELTAS + 2


def test_what_is_being_uploaded_is_not_overwritten(publisher: Publisher) -> None:
    w = weights()
    publisher.publish(0, w)
    publisher.publish(1, moved(w, 1))
    pinned, blob = publisher.readable[0].held, publisher.deltas[0]
    assert pinned is not None
    before = pinned.buffer.data.copy(), blob.buffer.data.copy()
    pinned.pinned = blob.pinned = True
    for v in range(2, 14):
        publisher.publish(v, moved(w, v))
        assert not pinned.revoked
        assert not blob.revoked
        assert (pinned.buffer.data == before[0]).all()
        assert (blob.buffer.data == before[1]).all()
    assert len({p.buffer for p in publisher.readable}) == len(publisher.readable) == 3
    pinned.pinned = blob.pinned = False
    for v in (14, 15):
        publisher.publish(v, moved(w, v))
    assert pinned.revoked
    assert blob.revoked
    assert len(publisher.readable) == 2


@pytest.mark.parametrize("pack", [False, True])
def test_reader_several_versions_behind_applies_the_chain(serving: Callable[..., Any], pack: bool) -> None:
    s, w = serving(chunk_bytes=1 << 12), weights()
    p = s.puller()
    made = s.publisher.publish(0, w)
    s.pull(p, made)
    for v, skipped in enumerate((1, 2, 4, 3), 1):
        for each in range(skipped):
            w = moved(w, 10 * v + each)
            made = s.publisher.publish(10 * v + each, w, pack=pack)
        chain = s.publisher.deltas[:skipped]
        before = p.bytes_received
        assert s.pull(p, made) == made
        assert p.delta_used == v
        assert p.bytes_received - before < sum(d.manifest.nbytes + len(d.manifest.encode()) for d in chain) + 1000
        assert all(torch.equal(t, w[name]) for name, t in p.tensors().items())


def test_a_reader_keeps_no_more_deltas_than_the_trainer(serving: Callable[..., Any]) -> None:
    s, w = serving(chunk_bytes=1 << 12), weights()
    p = s.puller()
    for v in range(delta.MAX_DELTAS + 3):
        w = moved(w, v, share=0.001)
        s.pull(p, s.publisher.publish(v, w))
    assert {d.file.digest for d in p.files.describe()} == {p.held.digest} | {
        d.manifest.digest for d in s.publisher.deltas
    }


def test_deltas_of_failed_pulls_do_not_pile_up(serving: Callable[..., Any]) -> None:
    """Every load fails after it has read its first delta: the second one is nowhere, and neither is the copy."""
    s, w = serving(chunk_bytes=1 << 12), weights()
    p = s.puller()
    s.pull(p, s.publisher.publish(0, w))
    held, nowhere = p.held.digest, FileRef(digest="0" * 64, nbytes=1, before="b", after="c")
    for v in range(1, 8):
        w = moved(w, v, share=0.1)
        made = s.publisher.publish(v, w)
        delta = s.publisher.delta.manifest
        first = msgspec.structs.replace(delta.ref, before=held)
        routes = FileRoute(file=first, route=route_to(s.ref)), FileRoute(file=nowhere, route=NO_ROUTE)
        with pytest.raises(PullFailed):
            p.pull(Load(version=v, digest=made.digest, files=routes))
        kept = [each.file.nbytes for each in p.files.describe() if each.file.after]
        assert p.files.find(delta.digest)
        assert sum(kept) - delta.nbytes <= made.nbytes // 4
