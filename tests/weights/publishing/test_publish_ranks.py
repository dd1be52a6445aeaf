"""Several processes publish one version together: the same bytes and digest as from one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import xxhash

from tests.support.weights.weight_writers import (
    KEY,
    Shard,
    State,
    Writers,
    descriptors,
    found,
    model,
    publish,
    small_slabs,
)
from windfall.errors import WindfallError
from windfall.weights import delta
from windfall.weights.manifest import Manifest
from windfall.weights.publishing import row_writer
from windfall.weights.publishing.meeting import PublishFailed
from windfall.weights.publishing.publish import Publisher
from windfall.weights.pulling.pull import Puller

VERSIONS = [(1, 1.0), (2, 0.02), (3, 0.3), (3, 0.3), (4, 1.0)]
"""Seed, and share of the elements that differ from seed 0."""


def alone(versions: list[tuple[int, float]], **options: Any) -> list[dict[str, Any]]:
    """What one process publishes."""
    publisher, out = Publisher(**{"chunk_bytes": 1 << 14, **options}), []
    for v, (seed, share) in enumerate(versions):
        publisher.publish(v, model(seed, share))
        state = type("State", (), {"publisher": publisher})
        out.append(found(state))  # type: ignore[arg-type]
    publisher.close()
    return out


def pulled(writers: Writers, made: Manifest) -> dict[str, torch.Tensor]:
    puller = Puller(key=KEY, timeout_s=60)
    writers.pull(puller, made)
    return puller.tensors()


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
OPTIONS = [
    pytest.param({}, id="host"),
    pytest.param({"dtype": "bfloat16"}, id="cast"),
    pytest.param({"where": "cuda", "dtype": "bfloat16"}, id="cuda", marks=cuda),
]


@pytest.mark.parametrize("size", [1, 2])
def test_one_or_two_writers_publish_the_same(size: int) -> None:
    publish_all(size, {})


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS[1:])
@pytest.mark.parametrize("size", [1, 2])
def test_one_or_two_writers_publish_the_same_with_options(size: int, options: dict[str, Any]) -> None:
    publish_all(size, options)


@pytest.mark.parametrize("options", OPTIONS)
def test_four_writers_publish_the_same(options: dict[str, Any]) -> None:
    publish_all(4, options)


def publish_all(size: int, options: dict[str, Any]) -> None:
    expected = alone(VERSIONS, **{k: v for k, v in options.items() if k != "where"})
    assert [bool(x["blob"]) for x in expected] == [False, False, True, True, False]
    with Writers(size, **options) as writers:
        before = b""
        for version, ((seed, share), one) in enumerate(zip(VERSIONS, expected, strict=True)):
            ranks = writers.publish(version, seed, share)
            for rank in ranks:
                assert (rank["manifest"], rank["bytes"]) == (one["manifest"], one["bytes"])
            check_delta(before, ranks[0], bool(one["blob"]))
            before = writers.call(0, content)
        if not options:
            assert equal(pulled(writers, one["manifest"]), model(seed, share))


def content(state: State) -> bytes:
    return state.publisher.readable[0].buffer.data.tobytes()


def check_delta(before: bytes, published: dict[str, Any], expected: bool) -> None:
    """The delta turns the content of the previous version into that of this one."""
    assert bool(published["blob"]) == expected
    if expected:
        data = bytearray(before)
        delta.apply(data, published["blob"], published["manifest"])
        assert xxhash.xxh3_64_hexdigest(data) == published["bytes"]


def test_delta_of_several_ranks_with_many_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = [(1, 0.02), (2, 0.02), (3, 0.01), (3, 1.0)]
    monkeypatch.setattr(row_writer, "SLAB_BYTES", 1024)
    expected = alone(versions)
    assert [bool(x["blob"]) for x in expected] == [False, True, True, False]
    with Writers(3) as writers:
        writers.all(small_slabs)
        before = b""
        for version, (seed, share) in enumerate(versions):
            published = writers.publish(version, seed, share, pack=bool(version % 2))[0]
            check_delta(before, published, bool(expected[version]["blob"]))
            before = writers.call(0, content)


def test_replicated_rows_are_written_by_the_first_rank_that_has_them() -> None:
    w = model(5)
    with Writers(3) as writers:
        got = writers.all(publish_pieces, r0=("both",), r1=("both",), r2=("rest",))
    one = Publisher(chunk_bytes=1 << 14)
    assert one.publish(0, {"embed": w["embed"]}) == got[0] == got[1] == got[2]
    one.close()


def publish_pieces(state: State, what: str) -> Any:
    embed = model(5)["embed"]
    mine = slice(0, 200) if what == "both" else slice(200, 331)
    if what == "wrong":
        mine = slice(100, 250)
    if what == "scalar":
        return state.publisher.publish(0, {"embed": torch.tensor(1.0)})
    return state.publisher.publish(0, {"embed": Shard(embed[mine], tuple(embed.shape), mine.start)})


@pytest.mark.parametrize(
    ("second", "error"),
    [
        ("both", "the ranks have 200 of 331 rows"),
        ("wrong", "rank 1 has a part of another's rows"),
        ("scalar", "rank 1 has other tensors than rank 0"),
    ],
)
def test_rows_that_do_not_fit_are_refused_on_all_ranks(second: str, error: str) -> None:
    with Writers(2) as writers:
        for failed in writers.all(publish_pieces, r0=("both",), r1=(second,)):
            assert isinstance(failed, WindfallError)
            assert error in failed.what
        assert writers.publish(0)[0]["versions"] == [0]


def fail(state: State, version: int, seed: int, share: float) -> Any:
    def copied() -> None:
        raise OSError("no")

    return publish(state, version, seed, share, "", {"copied": copied})


def test_failure_of_one_rank_fails_the_version_on_all() -> None:
    """The next version works, and its delta is from the last complete version."""
    expected = alone([(1, 0.1), (3, 0.1)])[1]
    with Writers(3) as writers:
        writers.publish(0, 1, 0.1)
        before = writers.call(0, content)
        for orders in writers.orders[:1] + writers.orders[2:]:
            orders.send((publish, (1, 3, 1.0, "", {})))
        writers.orders[1].send((fail, (1, 3, 1.0)))
        for rank in range(3):
            with pytest.raises(OSError if rank == 1 else PublishFailed, match="no"):
                writers._answer(rank)
        assert writers.call(0, found)["versions"] == [0]
        got = writers.publish(2, 3, 0.1)[0]
        check_delta(before, got, expected=True)
        assert got["manifest"].digest == expected["manifest"].digest


def test_ranks_that_publish_different_versions_are_refused() -> None:
    with Writers(2) as writers:
        for failed in writers.all(publish, r0=(1, 0, 1.0, "", {}), r1=(2, 0, 1.0, "", {})):
            assert isinstance(failed, WindfallError)
            assert "rank 1 publishes version 2, rank 0 version 1" in failed.what


STEPS = [
    "describe their tensors", "prepare the buffer", "write their rows", "hash the chunks", "write the delta",
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
def test_death_of_a_rank_leaves_the_previous_version_readable(step: str) -> None:
    with Writers(3) as writers:
        writers.publish(0, 1)
        writers.publish(1, 2, 0.01)
        for rank, orders in enumerate(writers.orders):
            orders.send((publish, (2, 3, 0.01, step if rank == 1 else "", {})))
        for rank in (0, 2):
            with pytest.raises(PublishFailed, match=f"version 2: rank {rank} waited for the other ranks to {step}"):
                writers._answer(rank)
        assert not writers.processes[1].join(5)
        left = writers.call(0, found)
        assert left["versions"] == ([1, 0] if step == STEPS[0] else [1])
        assert equal(pulled(writers, left["manifest"]), model(2, 0.01))


def set_timeout(state: State, timeout_s: float) -> None:
    state.ranks.timeout_s = timeout_s


def test_rank_that_hangs_is_waited_for_only_so_long() -> None:
    with Writers(2) as writers:
        writers.publish(0)
        writers.call(0, set_timeout, 0.3)
        what = "version 1: rank 0 waited for the other ranks to describe their tensors: TimeoutError: no answer"
        with pytest.raises(PublishFailed, match=what):
            writers.call(0, publish, 1, 2, 1.0, "", {})
        assert writers.call(0, found)["versions"] == [0]


def other_layout(state: State, version: int) -> Any:
    mine = slice(0, 60) if state.ranks.rank == 0 else slice(60, 100)
    whole = torch.arange(300.0).view(100, 3) + version
    return state.publisher.publish(version, {"x": Shard(whole[mine], (100, 3), mine.start)})


def test_layouts_may_change_and_no_descriptor_is_left() -> None:
    one = Publisher(chunk_bytes=1 << 14)
    with Writers(2) as writers:
        before = [writers.call(r, descriptors) for r in range(2)]
        for v in range(8):
            if v % 4 == 3:
                got = writers.all(other_layout, v)
                assert got[0] == one.publish(v, {"x": torch.arange(300.0).view(100, 3) + v})
            else:
                assert writers.publish(v, v, 0.01)[0]["manifest"] == one.publish(v, model(v, 0.01))
        for rank in range(2):
            writers.call(rank, close)
            assert writers.call(rank, descriptors) <= before[rank]
    one.close()


def close(state: State) -> None:
    state.publisher.close()
