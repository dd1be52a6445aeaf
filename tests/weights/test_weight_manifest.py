"""A manifest survives a round trip, and an inconsistent one is refused before it is used."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash

from windfall.errors import WindfallError
from windfall.link.messages import FileRef
from windfall.weights import manifest
from windfall.weights.manifest import Manifest, TensorEntry
from windfall.weights.publishing.publish import Publisher


def example(version: int = 3) -> Manifest:
    rows = [
        ("a", "float32", (5, 7), 0),
        ("b", "bfloat16", (), 1),
        ("tied", "float32", (5, 7), 0),
        ("c", "int64", (9,), 2),
    ]
    entries, nbytes = manifest.layout(rows)
    return manifest.make(version=version, entries=entries, nbytes=nbytes, chunk_bytes=128, **hashes(nbytes, 128))


def hashes(nbytes: int, chunk_bytes: int, cuts: int = 0) -> dict[str, bytes]:
    count = -(-nbytes // chunk_bytes) + cuts
    return {"chunks": np.arange(count, dtype="<u8").tobytes(), "seals": bytes(range(32)) * count}


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
    assert manifest.decode(m.encode()) == m
    assert m.nbytes == 192 + 64 + 72
    assert [e.offset for e in m.entries] == [0, 192, 0, 256]
    assert [e.name for e in m.ranges()] == ["a", "b", "c"]


def test_digest_covers_the_bytes_but_not_the_version() -> None:
    assert example(1).digest == example(2).digest
    for field in ("chunks", "seals"):
        other = msgspec.structs.replace(example(), **{field: b"\xff" + getattr(example(), field)[1:]})
        with pytest.raises(WindfallError, match="the digest does not match"):
            manifest.decode(other.encode())


def test_manifest_must_have_the_digest_that_was_asked_for() -> None:
    m = example()
    assert manifest.decode(m.encode(), m.digest) == m
    with pytest.raises(WindfallError, match=f"it has digest {m.digest}, expected {'0' * 64}"):
        manifest.decode(m.encode(), "0" * 64)


def test_chunk_is_checked_by_its_checksum_or_its_seal() -> None:
    data = [bytes(128), b"x" * 72]
    both = [manifest.hash_chunk(x) for x in data]
    m = manifest.make(
        nbytes=200, chunk_bytes=128, before="a" * 64, after="b" * 64,
        chunks=b"".join(c for c, _ in both), seals=b"".join(s for _, s in both),
    )  # fmt: skip
    for trusted in (True, False):
        assert [[m.is_chunk(i, x, trusted=trusted) for x in data] for i in range(2)] == [[True, False], [False, True]]
    assert m.checksums() == [xxhash.xxh3_64_intdigest(x) for x in data]


def test_digest_does_not_change_between_releases() -> None:
    """Pulled weights are compared with the digest of a trainer that may be older or newer."""
    a = (torch.arange(300 * 70).view(300, 70) * 7 % 1013).float()
    w = (torch.arange(130 * 33).view(130, 33) % 251).bfloat16()
    tensors = {"embed": a, "norm": torch.arange(70).float(), "w": w, "n": torch.tensor(7), "none": torch.empty(0, 3)}
    digests = {
        None: "41c5dc3c5e1c7f4952bd595bd23776ff859313a76d15190394e62f69a190d679",
        "bfloat16": "1a23e0b290cc78c062cca4860ee693c39a957959168f4d9c194f45642ade4601",
    }
    for dtype, digest in digests.items():
        publisher = Publisher(chunk_bytes=1 << 12, dtype=dtype)
        assert publisher.publish(0, {**tensors, "head": a}).digest == digest
        publisher.close()


def test_cuts_split_chunks() -> None:
    m = example()
    fields = {"entries": m.entries, "nbytes": m.nbytes, "chunk_bytes": 128}
    cut = manifest.make(**fields, cuts=(130, 256), **hashes(m.nbytes, 128, cuts=1))
    assert cut.bounds() == [0, 128, 130, 256, m.nbytes]
    assert manifest.decode(cut.encode()) == cut
    assert cut.digest != m.digest


def test_base_and_scale_are_in_the_digest() -> None:
    m = example()
    fields = {"entries": m.entries, "nbytes": m.nbytes, "chunk_bytes": 128, **hashes(m.nbytes, 128)}
    made = [manifest.make(**fields, **more) for more in ({}, {"base": "a" * 64}, {"base": "a" * 64, "scale": 2.0})]
    assert len({x.digest for x in made}) == 3
    assert made[0].digest == m.digest
    for x in made:
        assert manifest.decode(x.encode()) == x
    assert "scale" not in msgspec.msgpack.decode(m.encode())


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"base": "x"}, "'x' or '' is not a digest"),
        ({"base": "A" * 64}, "is not a digest"),
        ({"scale": float("nan")}, "scale nan"),
        ({"before": "a" * 64}, "nor a delta"),
        ({"before": "a" * 64, "after": "b" * 64}, "nor a delta: scale 1, 4 tensors"),
        ({"cuts": (0,)}, "not in order"),
        ({"cuts": (130, 130)}, "not in order"),
        ({"cuts": (1 << 20,)}, "not inside"),
        ({"cuts": (100,)}, "checksums"),
        ({"nbytes": 1 << 44, "chunk_bytes": 64}, "checksums"),
        ({"nbytes": 1 << 50}, "bytes in chunks"),
        ({"nbytes": -1}, "bytes in chunks"),
        ({"chunk_bytes": 0}, "bytes in chunks"),
        ({"chunk_bytes": 1 << 40}, "bytes in chunks"),
        ({"chunks": bytes(8)}, "8 bytes of checksums and 96 of seals"),
        ({"seals": bytes(95)}, "95 of seals"),
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
        manifest.decode(forged(**changes))


def test_invalid_encoding_is_refused() -> None:
    good = example().encode()
    for bad in (b"", b"\x00", good[:-1], good + b"\x00", msgspec.msgpack.encode({"version": "3"}), b"<html>"):
        with pytest.raises(WindfallError, match="cannot be decoded"):
            manifest.decode(bad)
    unknown = {**msgspec.msgpack.decode(good), "more": 1}
    with pytest.raises(WindfallError, match="more"):
        manifest.decode(msgspec.msgpack.encode(unknown))


def test_delta() -> None:
    d = manifest.make(before="0" * 64, after="1" * 64, nbytes=130, chunk_bytes=64, **hashes(130, 64))
    assert manifest.decode(d.encode()) == d
    assert d.ref == FileRef(digest=d.digest, nbytes=130, before="0" * 64, after="1" * 64)
    short = msgspec.structs.replace(d, chunks=bytes(16))
    with pytest.raises(WindfallError, match="checksums"):
        manifest.decode(msgspec.structs.replace(short, digest=manifest.digest_of(short)).encode())


def test_rules_are_checked_after_the_digest() -> None:
    """Checking the rules of a large manifest takes long, so a forger must not get that far."""
    with pytest.raises(WindfallError, match="the digest does not match"):
        manifest.decode(msgspec.structs.replace(example(), entries=()).encode(), example().digest)


def test_entry_without_elements() -> None:
    entries, nbytes = manifest.layout([("none", "float32", (0, 4), 0), ("a", "int8", (3,), 1)])
    assert entries[0] == TensorEntry(name="none", dtype="float32", shape=(0, 4), offset=0, nbytes=0)
    m = manifest.make(version=0, entries=entries, nbytes=nbytes, chunk_bytes=64, **hashes(nbytes, 64))
    assert [e.name for e in m.ranges()] == ["a"]
