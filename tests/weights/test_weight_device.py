"""Publishing from a device gives the same bytes and the same delta as from the host, whatever overlaps."""

from __future__ import annotations

import threading
from contextlib import closing, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.weight_deltas import encode
from windfall.weights import copy_out, delta, manifest, plan
from windfall.weights import device_delta as device
from windfall.weights.buffers import Buffer
from windfall.weights.delta_share import DeltaShare
from windfall.weights.device_delta import DeviceDelta
from windfall.weights.plan import Piece, PublishPlan
from windfall.weights.publish import Publisher, describe

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = ["float32", "bfloat16", "int8", "int64"]


def planned(
    tensors: dict[str, torch.Tensor], chunk_bytes: int = 1 << 20
) -> tuple[PublishPlan, dict[Piece, torch.Tensor]]:
    """What a Publisher would do with these tensors."""
    rows, values = describe(tensors, None)
    made = plan.make([plan.RankOffer(machine="", address="", chunk_bytes=chunk_bytes, tensors=rows)])
    return made, {p: values[p.entry.name] for p in made.shares[0].pieces}


def version_of(tensors: dict[str, torch.Tensor]) -> tuple[PublishPlan, np.ndarray, dict[Piece, torch.Tensor]]:
    """PublishPlan, bytes and sources, laid out as by a Publisher."""
    made, sources = planned(tensors)
    data = np.zeros(made.nbytes, np.uint8)
    for p, t in sources.items():
        data[p.start : p.stop] = t.reshape(-1).view(torch.uint8).cpu().numpy()
    return made, data, sources


def random_tensors(
    sizes: list[tuple[str, int]], rng: np.random.Generator, where: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Any bit pattern, including NaN payloads."""
    out = {}
    for i, (dtype, n) in enumerate(sizes):
        kind = getattr(torch, dtype)
        raw = torch.from_numpy(rng.integers(0, 256, n * kind.itemsize, np.uint8))
        out[f"t{i}"] = (raw.view(kind) if n else torch.empty(0, dtype=kind)).to(where)
    return out


def changed(tensors: dict[str, torch.Tensor], densities: Any, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    out = {}
    for (n, t), density in zip(tensors.items(), densities, strict=True):
        width = t.element_size()
        if not len(t):
            out[n] = t
            continue
        words = t.cpu().clone().view(torch.uint8).numpy().view(f"<u{width}").copy()
        words[rng.random(len(words)) < density] ^= 1
        out[n] = torch.from_numpy(words.view(np.uint8)).view(t.dtype).to(t.device)
    return out


def both(
    old: dict[str, torch.Tensor], new: dict[str, torch.Tensor], max_ratio: float
) -> tuple[bytes | None, bytes | None]:
    """The delta computed by numpy, and by torch."""
    made, before, sources = version_of(old)
    _, after, new_sources = version_of(new)
    encoder = DeviceDelta(made, 0, next(iter(old.values())).device)
    encoder.store(sources, 0)
    share = DeltaShare(made, 0, map, max_ratio)
    share.on_device(encoder, new_sources)
    tables = [share.encode(before, after)]
    found = None
    if sizes := share.sizes(tables):
        with closing(Buffer(sizes[0])) as target:
            share.write(target, tables)
            found = target.data.tobytes()
    chunks = tuple(range(-(-made.nbytes // (1 << 20))))
    described = manifest.make(version=0, entries=made.entries, nbytes=made.nbytes, chunk_bytes=1 << 20, chunks=chunks)
    return encode(before, after, described, max_ratio=max_ratio), found


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 3000)), min_size=1, max_size=6),
    density=st.lists(st.sampled_from([0.0, 0.0005, 0.003, 0.01, 0.1, 0.5, 0.97, 1.0]), min_size=6, max_size=6),
    slab=st.sampled_from([1, 1 << 26]),
    seed=st.integers(0, 2**32),
)
def test_blob_equals_the_one_of_numpy(sizes: list[tuple[str, int]], density: list[float], slab: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = random_tensors(sizes, rng)
    if not sum(n for _, n in sizes):
        return
    default, device.SLAB = device.SLAB, slab
    try:
        expected, found = both(old, changed(old, density[: len(sizes)], rng), max_ratio=100)
    finally:
        device.SLAB = default
    assert expected is not None
    assert found == expected


B = delta.BLOCK


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=cuda)])
@pytest.mark.parametrize("density", [0.0, 0.0003, 0.004, 0.03, 0.4, 0.9, 1.0])
def test_blob_equals_the_one_of_numpy_for_whole_blocks_and_adjacent_tensors(where: str, density: float) -> None:
    rng = np.random.default_rng(7)
    old = random_tensors([("bfloat16", 2 * B), ("bfloat16", 3 * B + 77), ("float32", B), ("bfloat16", 5)], rng, where)
    expected, found = both(old, changed(old, [density] * 4, rng), max_ratio=2)
    assert expected is not None
    assert found == expected


@pytest.mark.parametrize("density", [0.02, 0.5, 0.9, 1.0])
def test_gives_up_when_numpy_does(density: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "BLOCK", 256)
    monkeypatch.setattr(device, "BLOCK", 256)
    rng = np.random.default_rng(0)
    old = random_tensors([("bfloat16", 256 * 300), ("bfloat16", 700)], rng)
    expected, found = both(old, changed(old, [density] * 2, rng), max_ratio=0.9)
    assert (expected is None) == (density >= 0.9)
    assert found == expected


def test_samples_the_same_blocks_as_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sampled blocks changed, and no others: both give up, although little has changed."""
    monkeypatch.setattr(delta, "BLOCK", 256)
    monkeypatch.setattr(device, "BLOCK", 256)
    old = random_tensors([("bfloat16", 256 * 300)], np.random.default_rng(0))
    new = {"t0": old["t0"].clone()}
    for i in range(0, 300, 4):
        new["t0"].view(torch.int16)[256 * i : 256 * (i + 1)] ^= 1
    assert both(old, new, max_ratio=0.9) == (None, None)
    new["t0"].view(torch.int16)[: 256 * 100] = old["t0"].view(torch.int16)[: 256 * 100]
    expected, found = both(old, new, max_ratio=0.9)
    assert expected is not None
    assert found == expected


def weights(seed: int, where: str = "cpu") -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    out = {f"w{i}": torch.randn(n, 65).bfloat16().to(where) for i, n in enumerate((3000, 1, 700, 64))}
    return {**out, "steps": torch.arange(7, device=where), "transposed": torch.randn(40, 30).to(where).t()}


def moved(w: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        n: torch.where(torch.rand(t.shape, device=t.device) < 0.02, -t, t) if t.is_floating_point() else t + 1
        for n, t in w.items()
    }


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=cuda)])
def test_publisher_with_device_delta_publishes_the_same(where: str) -> None:
    """Full copies and deltas equal those of a publisher without it, over several versions, including a new layout."""
    plain, ours = Publisher(chunk_bytes=1 << 12, device_delta=False), Publisher(chunk_bytes=1 << 12, device_delta=True)
    versions = [weights(0, where)]
    for i in range(3):
        versions.append(moved(versions[-1], i))
    versions += [{"other": torch.ones(50, device=where)}, {"other": torch.zeros(50, device=where)}]
    for v, w in enumerate(versions):
        expected = plain.publish(v, {n: t.cpu() for n, t in w.items()})
        assert ours.publish(v, w) == expected
        a, b = plain.readable[0], ours.readable[0]
        assert (a.buffer.data == b.buffer.data).all()
        assert a.delta == b.delta
        if a.delta_buffer is not None:
            assert b.delta_buffer is not None
            assert (a.delta_buffer.data == b.delta_buffer.data).all()
    assert ours.readable[0].delta is not None or plain.readable[0].delta is None
    assert ours._writer.device_delta is not None
    plain.close()
    ours.close()


def test_no_memory_for_a_device_delta_falls_back_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other work may have taken the memory since the check. The buffers are compared on the host instead."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(device, "DeviceDelta", full)
    with closing(Publisher(chunk_bytes=1 << 12, device_delta=True)) as publisher:
        for version in range(2):
            assert publisher.publish(version, {"w": torch.full((64,), float(version))}).version == version
        assert publisher._writer.use_device_delta is False


def test_failed_publish_is_not_the_base_of_the_next_delta() -> None:
    p, w = Publisher(device_delta=True, chunk_bytes=1 << 12), weights(0)
    p.publish(0, w)

    def fail() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        p.publish(1, moved(w, 1), copied=fail)
    new = moved(w, 2)
    p.publish(2, new)
    plain = Publisher(device_delta=False, chunk_bytes=1 << 12)
    plain.publish(0, w)
    plain.publish(2, new)
    assert plain.readable[0].delta is not None
    assert p.readable[0].delta == plain.readable[0].delta
    p.close()
    plain.close()


def test_hashing_continues_after_the_tensors_are_free() -> None:
    """`copied` is called while checksums are still computed; the checksums are those of the copied bytes."""
    p, w, seen = Publisher(chunk_bytes=1 << 12, threads=1), {"a": torch.zeros(100_000)}, []
    held = threading.Event()
    p._writer.pool.submit(held.wait, 10)  # the only thread that hashes

    def copied() -> None:
        seen.append(p.current)
        w["a"].fill_(1.0)
        held.set()

    m = p.publish(0, w, copied=copied)
    assert seen == [None]
    other = Publisher(chunk_bytes=1 << 12)
    assert m.digest == other.publish(0, {"a": torch.zeros(100_000)}).digest
    p.close()
    other.close()


def test_chunk_is_hashed_only_after_its_bytes_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a GPU's bytes, with events that record which bytes had been copied."""

    class Event:
        def __init__(self, **_: Any) -> None:
            self.seen = np.empty(0, np.uint8)

        def record(self, stream: Any) -> None:
            self.seen = buffer.data.copy()

        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(wait_event=lambda event: None))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(copy_out, "COPY_BYTES", 3000)
    p, tensors = Publisher(chunk_bytes=1 << 10), {**weights(0), "none": torch.empty(0), "last": torch.ones(11)}
    monkeypatch.setattr(copy_out.LockedPages, "lock", lambda *_: None)
    made, sources = planned(tensors, 1 << 10)
    buffer, nbytes = Buffer(made.nbytes), made.nbytes
    hashed: list[tuple[int, Any]] = []

    def hash_chunk(chunk: np.ndarray, copied: Any) -> None:
        hashed.append((chunk.ctypes.data - buffer.data.ctypes.data, copied))

    monkeypatch.setattr(p._writer, "hash", hash_chunk)
    hashes, last = p._writer.copy(buffer, made, sources, object())
    for h in hashes:
        h.result()
    assert sorted(at for at, _ in hashed) == list(range(0, nbytes, 1 << 10))
    assert len({id(copied) for _, copied in hashed}) > 5, "hashing must start before the last byte is copied"
    assert all((copied.seen[at : at + 1024] == buffer.data[at : at + 1024]).all() for at, copied in hashed)
    assert (last.seen == buffer.data).all()
    for e in made.entries:
        expected = tensors[e.name].contiguous().view(-1).view(torch.uint8).numpy() if e.nbytes else []
        assert (buffer.data[e.offset : e.offset + e.nbytes] == expected).all()
    buffer.close()
    p.close()


@cuda
def test_copy_on_the_side_stream_sees_the_published_values() -> None:
    """Work enqueued before the publish is included, work enqueued after `copied` is not."""
    p, w = Publisher(chunk_bytes=1 << 16), {"a": torch.zeros(1 << 24, device="cuda", dtype=torch.bfloat16)}
    for v in range(4):
        busy = torch.randn(4096, 4096, device="cuda")
        for _ in range(20):
            busy = busy @ busy * 1e-3
        w["a"].fill_(v)
        p.publish(v, w, copied=lambda: w["a"].fill_(99.0))
        found = torch.from_numpy(p.readable[0].buffer.data).view(torch.bfloat16)
        assert (found == v).all()
    p.close()
