"""The base of adapters: published once, pulled once, and readable as long as the publisher is open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.weights.weight_writers import KEY, State, Writers, model, shards
from windfall.errors import WindfallError
from windfall.weights.manifest import Manifest
from windfall.weights.publishing.publish import Publisher
from windfall.weights.pulling.pull import Puller, PullFailed


def adapter(value: float) -> dict[str, torch.Tensor]:
    return {"layer.lora_A.weight": torch.full((8, 100), value), "layer.lora_B.weight": torch.full((300, 8), value)}


def whole(seed: int) -> dict[str, torch.Tensor]:
    """The model that it changes."""
    return model(seed) | {"layer.weight": torch.full((300, 100), float(seed))}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def test_base_is_pulled_once(serving: Callable[..., Any]) -> None:
    s, weights = serving(), whole(1)
    base = s.publisher.publish_base(weights)
    p = s.puller()
    for version in range(4):
        m = s.publisher.publish(version, adapter(version), base=base.digest, scale=0.5)
        assert (m.base, m.scale) == (base.digest, 0.5)
        before = p.bytes_received
        assert s.pull(p, m) == m
        assert equal(p.tensors(), adapter(version))
        assert equal(p.base_tensors(), weights)
        assert (p.bytes_received - before > base.nbytes) == (version == 0)
    late = s.puller()
    s.pull(late, m)
    assert equal(late.base_tensors(), weights)


def test_base_and_scale_are_part_of_the_digest_only_if_set(serving: Callable[..., Any]) -> None:
    s, plain = serving(), Publisher(chunk_bytes=1 << 16)
    base = s.publisher.publish_base(whole(1))
    digests = {
        plain.publish(0, adapter(1)).digest,
        s.publisher.publish(0, adapter(1)).digest,
        s.publisher.publish(1, adapter(1), base=base.digest).digest,
        s.publisher.publish(2, adapter(1), base=base.digest, scale=2.0).digest,
    }
    assert len(digests) == 3
    assert plain.publish(1, whole(1)).digest == base.digest
    plain.close()


def test_base_survives_a_broken_pull(serving: Callable[..., Any], proxied: Callable[..., Any]) -> None:
    s = serving()
    base = s.publisher.publish_base(whole(1))
    m = s.publisher.publish(0, adapter(0), base=base.digest)
    proxy = proxied(s, lambda number, sent, data: None if proxy.forwarded > 1_000_000 else data)
    p = s.puller(tries=2)
    with pytest.raises(PullFailed, match=base.digest):
        s.pull(p, m, url=proxy.url)
    before = p.bytes_received
    s.pull(p, m)
    assert p.bytes_received - before < base.nbytes - 800_000
    assert equal(p.base_tensors(), whole(1))


def test_pull_without_its_base_fails(serving: Callable[..., Any]) -> None:
    s = serving()
    base = s.publisher.publish_base(whole(1))
    m = s.publisher.publish(0, adapter(0), base=base.digest)
    s.publisher.files.remove(s.publisher.base.held)
    p = s.puller(tries=2)
    with pytest.raises(PullFailed, match=f"{base.digest} is not held here"):
        s.pull(p, m)
    with pytest.raises(WindfallError, match="no complete version"):
        p.base_tensors()


def test_errors(serving: Callable[..., Any]) -> None:
    s = serving()
    with pytest.raises(WindfallError, match="is not published"):
        s.publisher.publish(0, adapter(0), base="0" * 64)
    s.publisher.publish_base(whole(1))
    with pytest.raises(WindfallError, match="already published"):
        s.publisher.publish_base(whole(1))
    m = s.publisher.publish(0, model(2))
    p = s.puller()
    s.pull(p, m)
    with pytest.raises(WindfallError, match="not an adapter"):
        p.base_tensors()


def publish_both(state: State) -> tuple[Manifest, Manifest]:
    rank, size = state.ranks.rank, state.ranks.size
    base = state.publisher.publish_base(shards(whole(1), rank, size))
    return base, state.publisher.publish(0, shards(adapter(3), rank, size), base=base.digest, scale=0.25)


@pytest.mark.parametrize("machines", [[0, 0], [0, 1]])
def test_ranks_publish_the_base_together(machines: list[int]) -> None:
    with Writers(2, machines=machines) as writers:
        (base, m), other = writers.all(publish_both)
        assert other == (base, m)
        assert bool(base.cuts) == bool(machines[1])
        p = Puller(key=KEY, timeout_s=60)
        writers.pull(p, m)
        assert equal(p.tensors(), adapter(3))
        assert equal(p.base_tensors(), whole(1))
        if not machines[1]:
            one = Publisher(chunk_bytes=1 << 14)
            assert one.publish_base(whole(1)).digest == base.digest
            one.close()
