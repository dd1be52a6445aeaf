"""A manifest survives a round trip, and an inconsistent one is refused before it is used."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from windfall.errors import WindfallError
from windfall.weights import manifest
from windfall.weights.manifest import DeltaManifest, Manifest, TensorEntry
from windfall.weights.publish import Publisher


def example(version: int = 3) -> Manifest:
    rows = [
        ("a", "float32", (5, 7), 0),
        ("b", "bfloat16", (), 1),
        ("tied", "float32", (5, 7), 0),
        ("c", "int64", (9,), 2),
    ]
    entries, nbytes = manifest.layout(rows)
    chunks = tuple(range(-(-nbytes // 128)))
    return manifest.make(version=version, entries=entries, nbytes=nbytes, chunk_bytes=128, chunks=chunks)


def forged(**changes: Any) -> bytes:
    """A changed manifest with a matching digest: only the other checks can refuse it."""
    m = msgspec.structs.replace(example(), **changes)
    return msgspec.structs.replace(m, digest=manifest.digest_of(m)).encode()


def entry(at: int, **changes: Any) -> dict[str, Any]:
    entries = list(example().entries)
    entries[at] = msgspec.structs.replace(entries[at], **changes)
    return {"entries": tuple(entries)}


def test_round_trip() -> None:
    m = example()
    assert manifest.decode(m.encode(), Manifest) == m
    assert m.nbytes == 192 + 64 + 72
    assert [e.offset for e in m.entries] == [0, 192, 0, 256]
    assert [e.name for e in m.ranges()] == ["a", "b", "c"]


def test_digest_covers_the_bytes_but_not_the_version() -> None:
    assert example(1).digest == example(2).digest
    other = msgspec.structs.replace(example(), chunks=(9, *example().chunks[1:]))
    with pytest.raises(WindfallError, match="digest"):
        manifest.decode(other.encode(), Manifest)


def test_digest_does_not_change_between_releases() -> None:
    """Pulled weights are compared with the digest of a trainer that may be older or newer."""
    a = (torch.arange(300 * 70).view(300, 70) * 7 % 1013).float()
    w = (torch.arange(130 * 33).view(130, 33) % 251).bfloat16()
    tensors = {"embed": a, "norm": torch.arange(70).float(), "w": w, "n": torch.tensor(7), "none": torch.empty(0, 3)}
    digests = {None: "7f95a61804c2190b171a6ff06872978f", "bfloat16": "03ac9e2d3c95f125f18825e1ce8ef2b6"}
    for dtype, digest in digests.items():
        publisher = Publisher(chunk_bytes=1 << 12, dtype=dtype)
        assert publisher.publish(0, {**tensors, "head": a}).digest == digest
        publisher.close()


def test_sources_split_chunks_and_are_not_in_the_digest() -> None:
    m = example()
    cut = manifest.make(
        version=3, entries=m.entries, nbytes=m.nbytes, chunk_bytes=128, chunks=(5, 6, 7, 8),
        servers=("", "http://b:1"), sources=((0, 1), (130, 0), (256, 1)),
    )  # fmt: skip
    assert cut.bounds() == [0, 128, 130, 256, m.nbytes]
    assert cut.chunk_servers() == [1, 1, 0, 1]
    assert manifest.decode(cut.encode(), Manifest) == cut
    other = msgspec.structs.replace(cut, servers=("http://c:1", "http://b:1"))
    assert manifest.decode(other.encode(), Manifest).digest == cut.digest


def test_base_and_scale_are_in_the_digest_if_set() -> None:
    m = example()
    fields = {"version": 3, "entries": m.entries, "nbytes": m.nbytes, "chunk_bytes": 128, "chunks": m.chunks}
    made = [manifest.make(**fields, **more) for more in ({}, {"base": "a" * 32}, {"base": "a" * 32, "scale": 2.0})]
    assert len({x.digest for x in made}) == 3
    assert made[0].digest == m.digest
    for x in made:
        assert manifest.decode(x.encode(), Manifest) == x
    assert "scale" not in msgspec.msgpack.decode(m.encode())


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"base": "x"}, "an adapter of 'x'"),
        ({"base": "A" * 32}, "an adapter of"),
        ({"scale": float("nan")}, "scale nan"),
        ({"servers": ("",)}, "0 sources on 1 servers"),
        ({"servers": ("",), "sources": ((64, 0),)}, "the source at byte 64"),
        ({"servers": ("",), "sources": ((0, 1),)}, "on server 1"),
        ({"servers": ("",), "sources": ((0, 0), (0, 0))}, "not in order"),
        ({"servers": ("",), "sources": ((0, 0), (1 << 20, 0))}, "not part of the weights"),
        ({"servers": ("",), "sources": ((0, 0), (100, 0))}, "checksums"),
        ({"nbytes": 1 << 44, "chunk_bytes": 64}, "checksums"),
        ({"version": -1}, "negative"),
        ({"nbytes": 1 << 50}, "bytes in chunks"),
        ({"nbytes": -1}, "bytes in chunks"),
        ({"chunk_bytes": 0}, "bytes in chunks"),
        ({"chunk_bytes": 1 << 40}, "bytes in chunks"),
        ({"chunks": (1,)}, "1 checksums"),
        ({"chunks": (0, 1, -2)}, "checksums"),
        ({"entries": example().entries[:3]}, "the tensors end at"),
        ({"entries": (*example().entries, example().entries[0])}, "the same name"),
        (entry(0, nbytes=136), "do not match"),
        (entry(0, shape=(-5, -7)), "do not match"),
        (entry(0, shape=(1 << 60,)), "do not match"),
        (entry(0, dtype="float31"), "dtype 'float31'"),
        (entry(1, offset=190), "not aligned"),
        (entry(1, offset=-64), "not aligned"),
        (entry(3, offset=320), "not inside"),
        (entry(1, offset=128), "overlaps another"),
        (entry(1, offset=0), "overlaps another"),
        (entry(2, shape=(7, 5)), "overlaps another"),
    ],
)
def test_inconsistent_manifest_is_refused(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(WindfallError, match=error):
        manifest.decode(forged(**changes), Manifest)


def test_invalid_encoding_is_refused() -> None:
    good = example().encode()
    for bad in (b"", b"\x00", good[:-1], good + b"\x00", msgspec.msgpack.encode({"version": "3"}), b"<html>"):
        with pytest.raises(WindfallError, match="cannot be decoded"):
            manifest.decode(bad, Manifest)
    unknown = {**msgspec.to_builtins(example()), "more": 1}
    with pytest.raises(WindfallError, match="more"):
        manifest.decode(msgspec.msgpack.encode(unknown), Manifest)


def test_delta_manifest() -> None:
    d = DeltaManifest(base="0" * 32, digest="1" * 32, nbytes=130, chunk_bytes=64, chunks=(1, 2, 3))
    assert manifest.decode(d.encode(), DeltaManifest) == d
    with pytest.raises(WindfallError, match="checksums"):
        manifest.decode(msgspec.structs.replace(d, chunks=(1, 2)).encode(), DeltaManifest)


def test_entry_without_elements() -> None:
    entries, nbytes = manifest.layout([("none", "float32", (0, 4), 0), ("a", "int8", (3,), 1)])
    assert entries[0] == TensorEntry(name="none", dtype="float32", shape=(0, 4), offset=0, nbytes=0)
    m = manifest.make(version=0, entries=entries, nbytes=nbytes, chunk_bytes=64, chunks=(7,))
    assert [e.name for e in m.ranges()] == ["a"]
