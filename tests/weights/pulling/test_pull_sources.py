"""Weights that several machines hold, each with its own server: workers pull from all of them at once."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.support.weights.weight_writers import KEY, Shard, State, Writers, model
from tests.weights.conftest import Proxy
from windfall.weights.manifest import Manifest
from windfall.weights.publishing.publish import Publisher
from windfall.weights.pulling.pull import Puller, PullFailed

CHUNK = 1 << 14


@pytest.fixture
def writers() -> Iterator[Writers]:
    """Ranks 0 and 1 on one machine, rank 2 on another one."""
    with Writers(3, machines=[0, 0, 1]) as made:
        yield made


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def puller(**options: Any) -> Puller:
    return Puller(**{"key": KEY, "timeout_s": 5.0, "tries": 3, **options})


def by_server(writers: Writers, m: Manifest) -> list[int]:
    """Bytes that each server has."""
    return [sum(stop - start for start, stop in writers.call(leader, held, m.digest)) for leader in writers.leaders]


def held(state: State, digest: str) -> Any:
    return state.publisher.files.find(digest).held


def port(url: str) -> int:
    return int(url.rpartition(":")[2])


@pytest.fixture
def proxies(writers: Writers) -> Iterator[Callable[..., list[Proxy]]]:
    made: list[Proxy] = []

    def make(*rules: Any) -> list[Proxy]:
        """One before each server."""
        made.extend(Proxy(port(url), rule) for url, rule in zip(writers.urls, rules, strict=True))
        return made

    yield make
    for p in made:
        p.close()


def forward(number: int, sent: int, data: bytes) -> bytes:
    return data


@pytest.mark.parametrize("machines", [[0, 1], [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 2]])
def test_pull_from_several_machines(machines: list[int]) -> None:
    with Writers(len(machines), machines=machines) as writers:
        first = writers.publish(0, 1)[0]
        m = first["manifest"]
        assert all(nbytes > 0.2 * m.nbytes for nbytes in by_server(writers, m))
        assert sum(by_server(writers, m)) == m.nbytes
        p = puller()
        writers.pull(p, m)
        assert equal(p.tensors(), model(1))
        assert p.bytes_received == m.nbytes + first["encoded"]
        second = writers.publish(1, 2, 0.01)[0]["manifest"]
        writers.pull(p, second)
        assert p.delta_used == 0  # everything changed: seed 1 differs from seed 0 everywhere
        third = writers.publish(2, 3, 0.01)[0]["manifest"]
        before = p.bytes_received
        writers.pull(p, third)
        assert p.delta_used == 1
        assert p.bytes_received - before < 0.2 * m.nbytes
        assert equal(p.tensors(), model(3, 0.01))


def test_machine_has_memory_only_for_its_own_rows(writers: Writers) -> None:
    m = writers.all(publish_layer, 0, 0.0)[0]
    memory = [writers.call(leader, allocated) for leader in writers.leaders]
    for nbytes, has in zip(by_server(writers, m), memory, strict=True):
        assert nbytes <= has < nbytes + 4096 * 2 * len(m.cuts)


def allocated(state: State) -> int:
    return os.fstat(state.publisher.readable[0].buffer.fd).st_blocks * 512


def test_both_servers_send_at_once(writers: Writers, proxies: Callable[..., list[Proxy]]) -> None:
    """Each proxy holds back the bytes of the weights until the other one has some, too."""
    waiting = [threading.Event(), threading.Event()]
    alone: list[int] = []

    def rule(mine: int) -> Any:
        def hold(number: int, sent: int, data: bytes) -> bytes:
            if any(m.digest + " " in x for x in made[mine].requests):
                waiting[mine].set()
                if not waiting[1 - mine].wait(5):
                    alone.append(mine)
            return data

        return hold

    made = proxies(rule(0), rule(1))
    m = writers.publish(0, 1)[0]["manifest"]
    p = puller(parallel=1)
    writers.pull(p, m, [proxy.url for proxy in made])
    assert equal(p.tensors(), model(1))
    assert not alone


def test_dead_server_is_named_and_the_next_pull_continues(
    writers: Writers, proxies: Callable[..., list[Proxy]]
) -> None:
    def die(number: int, sent: int, data: bytes) -> bytes | None:
        return None if dead.is_set() and made[1].forwarded > 200_000 else data

    dead = threading.Event()
    dead.set()
    made = proxies(forward, die)
    published = writers.publish(0, 1)[0]
    m = published["manifest"]
    p, started, urls = puller(), time.monotonic(), [proxy.url for proxy in made]
    with pytest.raises(PullFailed, match=rf"{m.digest}: trainer {re.escape(made[1].url)}: closed the connection"):
        writers.pull(p, m, urls)
    assert time.monotonic() - started < 15, "less than the time limit of a connection"
    assert p.held is None
    (holding,) = p.files.describe()
    verified = sum(stop - start for start, stop in holding.ranges)
    assert verified > 100_000
    before = p.bytes_received
    dead.clear()
    writers.pull(p, m, urls)
    assert p.bytes_received - before == m.nbytes - verified
    assert equal(p.tensors(), model(1))


def test_killed_server_fails_the_pull_in_time(writers: Writers) -> None:
    load = writers.load(writers.publish(0, 1)[0]["manifest"])
    writers.processes[2].kill()
    writers.processes[2].join()
    with pytest.raises(PullFailed, match=rf"{re.escape(writers.urls[1])}: connecting"):
        puller().pull(load)


def corrupt(state: State, at: int) -> None:
    state.publisher.readable[0].buffer.data[at] ^= 1


def test_server_with_wrong_bytes_is_named(writers: Writers) -> None:
    m = writers.publish(0, 1)[0]["manifest"]
    chunk = m.bounds().index(writers.call(2, held, m.digest)[0][0])
    writers.call(2, corrupt, m.bounds()[chunk])
    p = puller()
    with pytest.raises(PullFailed, match=rf"{re.escape(writers.urls[1])} sent chunk {chunk} .* damaged twice"):
        writers.pull(p, m)
    assert p.held is None
    writers.call(2, corrupt, m.bounds()[chunk])
    writers.pull(p, m)
    assert equal(p.tensors(), model(1))


def test_delta_is_one_file_in_parts(writers: Writers) -> None:
    """Each machine holds the part with the changes of its rows."""
    m = writers.all(publish_layer, 0, 0.0)[0]
    p = puller()
    writers.pull(p, m)
    m = writers.all(publish_layer, 1, 1.0, 100)[0]
    found = [writers.call(leader, delta_parts) for leader in writers.leaders]
    assert found[0][0] == found[1][0]
    assert [len(parts) for _, parts in found] == [1, 1]
    assert found[0][1][0][1] == found[1][1][0][0], "where the one ends, the other begins"
    before = p.bytes_received
    writers.pull(p, m)
    assert p.tensors()["w"].sum() == 600 * 100 * 1.0 + 3
    assert p.delta_used == 1
    assert found[0][0].nbytes <= p.bytes_received - before < found[0][0].nbytes + len(m.encode()) + 2 * CHUNK


def delta_parts(state: State) -> tuple[Any, Any]:
    return state.publisher.delta.manifest.ref, state.publisher.delta.held


def publish_layer(state: State, version: int, change: float, columns: int = 1000) -> Manifest:
    """A tensor with 600 rows on each machine."""
    rank, w = state.ranks.rank, torch.zeros(1200, 1000)
    w[600:, :columns] += change
    w[:3, 7] += change
    first, stop = [(0, 300), (300, 600), (600, 1200)][rank]
    return state.publisher.publish(version, {"w": Shard(w[first:stop], (1200, 1000), first)})


BORDER = 64 * 9 + 1
"""One row of the first machine, and 63 of the second, are in the same block."""


def publish_band(state: State, version: int, band: int) -> Manifest:
    """Rows around the border between the machines change, and one element of every row."""
    rank, w = state.ranks.rank, torch.zeros(1200, 1024)
    w[:, 7] = version
    w[BORDER - band : BORDER + band] = version
    first, stop = [(0, 300), (300, BORDER), (BORDER, 1200)][rank]
    return state.publisher.publish(version, {"w": Shard(w[first:stop], (1200, 1024), first)})


@pytest.mark.parametrize("band", [1, 30, 64])
def test_block_with_rows_of_two_machines(writers: Writers, band: int) -> None:
    """If one machine wrote a whole block, it would overwrite the row of the other one."""
    p = puller()
    for version in range(2):
        m = writers.all(publish_band, version, band)[0]
        writers.pull(p, m)
    assert p.delta_used == 1
    assert (p.tensors()["w"] != 0).sum() == 2 * band * 1023 + 1200


def test_version_withdrawn_on_one_machine_is_gone(writers: Writers) -> None:
    load = writers.load(writers.publish(0, 1)[0]["manifest"])
    writers.call(2, close)
    with pytest.raises(PullFailed, match=rf"{re.escape(writers.urls[1])}: refused .* 404"):
        puller().pull(load)


def close(state: State) -> None:
    state.publisher.close()


def test_one_machine_and_several_hold_the_same_bytes(writers: Writers) -> None:
    """Chunks that are cut at the same places in both are not downloaded again."""
    one = Publisher(chunk_bytes=CHUNK)
    m, single = writers.publish(0, 1)[0]["manifest"], one.publish(0, model(1))
    one.close()
    assert single.entries == m.entries
    assert set(single.bounds()) <= set(m.bounds())
    same = set(zip(pairwise(single.bounds()), single.checksums(), strict=True))
    assert len(same & set(zip(pairwise(m.bounds()), m.checksums(), strict=True))) >= len(single.checksums()) - len(
        m.cuts
    )
