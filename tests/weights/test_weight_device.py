"""Publishing from a device gives the same bytes and the same delta as from the host, whatever overlaps."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch

from windfall.weights import delta
from windfall.weights.publishing import row_writer
from windfall.weights.publishing.publish import Publisher

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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
def test_delta_turns_the_previous_version_into_the_next(where: str) -> None:
    """Over several versions, including a new layout, which has no delta."""
    versions = [weights(0, where)]
    for i in range(3):
        versions.append(moved(versions[-1], i))
    versions += [{"other": torch.ones(500, device=where)}, {"other": torch.ones(500, device=where)}]
    with closing(Publisher(chunk_bytes=1 << 12)) as publisher, closing(Publisher(chunk_bytes=1 << 12)) as host:
        for v, w in enumerate(versions):
            before = publisher.readable[0].buffer.data.copy() if v else None
            assert publisher.publish(v, w) == host.publish(v, {n: t.cpu() for n, t in w.items()})
            now = publisher.readable[0]
            assert (publisher.delta is None) == (v in (0, 4))
            if publisher.delta is not None:
                blob = publisher.delta.buffer.data[: publisher.delta.manifest.nbytes].tobytes()
                delta.apply(before, blob, now.manifest)
                assert (before == now.buffer.data).all()


def test_no_memory_on_the_device_compares_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, calls = row_writer.encode, []

    def first_fails(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return encode(*args)

    monkeypatch.setattr(row_writer, "encode", first_fails)
    with closing(Publisher(chunk_bytes=1 << 12)) as publisher:
        w = weights(0)
        publisher.publish(0, w)
        publisher.publish(1, moved(w, 1))
        assert publisher.delta is not None
    assert len(calls) == 2, "one slab"


def test_failed_publish_is_not_the_base_of_the_next_delta() -> None:
    p, w = Publisher(chunk_bytes=1 << 12), weights(0)
    p.publish(0, w)

    def fail() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        p.publish(1, moved(w, 1), copied=fail)
    new = moved(w, 2)
    p.publish(2, new)
    plain = Publisher(chunk_bytes=1 << 12)
    plain.publish(0, w)
    plain.publish(2, new)
    assert p.delta is not None
    assert plain.delta is not None
    assert p.delta.manifest == plain.delta.manifest
    p.close()
    plain.close()


def test_tensors_may_change_once_they_are_copied() -> None:
    """Checksums and delta are those of the copied bytes."""
    with closing(Publisher(chunk_bytes=1 << 12)) as p, closing(Publisher(chunk_bytes=1 << 12)) as other:
        for version in range(2):
            w = {"a": torch.zeros(100_000)}
            w["a"][: 10 * version] = 1.0
            expected = other.publish(version, {"a": w["a"].clone()})
            assert p.publish(version, w, copied=lambda w=w: w["a"].fill_(9.0)) == expected
        assert p.delta is not None
        assert other.delta is not None
        assert p.delta.manifest == other.delta.manifest


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
