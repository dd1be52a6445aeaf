"""Pulls with network faults: broken, damaged and stalled connections. No byte is downloaded twice without need, and no
damaged byte is used."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.weights.weight_shelves import load_of, route_to
from windfall.link.messages import Routed, SourceRef
from windfall.weights.pulling.pull import PullFailed

HEAD = 400
"""Upper bound for the header of an answer, in bytes."""
CHUNK = 1 << 16


@pytest.fixture(autouse=True)
def no_more_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow read must not begin further connections: the tests count them."""
    monkeypatch.setattr("windfall.weights.pulling.download.MAX_CONNECTIONS", 1)


def weights() -> dict[str, torch.Tensor]:
    return {"big": torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))}


def ranges(requests: list[str]) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for x in requests for a, b in re.findall(r"Range: bytes=(\d+)-(\d+)", x)]


def test_continues_at_the_byte_where_it_broke(serving: Callable[..., Any], proxied: Callable[..., Any]) -> None:
    s, w = serving(), weights()
    m = s.publisher.publish(0, w)

    def cut(number: int, sent: int, data: bytes) -> bytes | None:
        return None if sent > 300_000 else data

    proxy = proxied(s, cut)
    p = s.puller(parallel=1)
    s.pull(p, m, url=proxy.url)
    assert torch.equal(p.tensors()["big"], w["big"])
    assert p.retries >= 4_000_000 // 330_000
    assert p.bytes_received == m.nbytes + len(m.encode())  # every byte once, despite many breaks
    assert proxy.forwarded <= p.bytes_received + HEAD * len(proxy.requests)
    starts = [a for a, _ in ranges(proxy.requests)]
    assert starts == sorted(starts)
    assert any(a % CHUNK for a in starts)  # in the middle of a chunk


def test_survives_breaks_on_parallel_connections(serving: Callable[..., Any], proxied: Callable[..., Any]) -> None:
    s, w = serving(), weights()
    m = s.publisher.publish(0, w)
    proxy = proxied(s, lambda number, sent, data: None if sent > 100_000 + 7_777 * (number % 5) else data)
    p = s.puller(parallel=4)
    s.pull(p, m, url=proxy.url)
    assert torch.equal(p.tensors()["big"], w["big"])
    assert p.bytes_received == m.nbytes + len(m.encode())


def test_damaged_chunk_is_downloaded_again(serving: Callable[..., Any], proxied: Callable[..., Any]) -> None:
    s, w = serving(), weights()
    m = s.publisher.publish(0, w)
    damaged = []

    def damage(number: int, sent: int, data: bytes) -> bytes:
        if sent > 500_000 and len(damaged) < 3 and number not in damaged:
            damaged.append(number)
            return data[:-1] + bytes([data[-1] ^ 0x10])
        return data

    proxy = proxied(s, damage)
    p = s.puller(parallel=1)
    s.pull(p, m, url=proxy.url)
    assert len(damaged) == 3
    assert torch.equal(p.tensors()["big"], w["big"])
    assert m.nbytes < p.bytes_received <= m.nbytes + len(m.encode()) + 3 * CHUNK  # at most the damaged chunks twice


def test_permanently_damaged_chunk_fails_the_pull(serving: Callable[..., Any], proxied: Callable[..., Any]) -> None:
    s, w = serving(), weights()
    m = s.publisher.publish(0, w)

    def damage(number: int, sent: int, data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1]) if len(data) == 1 << 14 and sent else data

    p = s.puller(parallel=1, tries=3)
    with pytest.raises(PullFailed, match=r"sent chunk 0 of [0-9a-f]{64} damaged twice"):
        s.pull(p, m, url=proxied(s, damage).url)
    assert p.held is None
    s.pull(p, m)
    assert torch.equal(p.tensors()["big"], w["big"])


def test_damaged_delta_falls_back_to_the_full_copy(serving: Callable[..., Any], proxied: Callable[..., Any]) -> None:
    s, w = serving(), weights()
    enabled = threading.Event()

    def damage(number: int, sent: int, data: bytes) -> bytes:
        inside = enabled.is_set() and any(s.publisher.delta.manifest.digest + " " in x for x in proxy.requests[-3:])
        return data[:-1] + bytes([data[-1] ^ 1]) if inside and sent else data

    proxy = proxied(s, damage)
    p = s.puller(parallel=1, tries=2)
    s.pull(p, s.publisher.publish(0, w), url=proxy.url)
    enabled.set()
    w["big"][::50] += 1
    s.pull(p, s.publisher.publish(1, w), url=proxy.url)
    assert p.delta_used == 0
    assert torch.equal(p.tensors()["big"], w["big"])


def test_stalled_connection_is_closed_and_retried(serving: Callable[..., Any], proxied: Callable[..., Any]) -> None:
    s, w = serving(), weights()
    m = s.publisher.publish(0, w)
    free = threading.Event()

    def stall(number: int, sent: int, data: bytes) -> bytes:
        if number == 0 and sent > 200_000:
            free.wait(60)
        return data

    p = s.puller(parallel=1, timeout_s=1.0)
    started = time.monotonic()
    s.pull(p, m, url=proxied(s, stall).url)
    free.set()
    assert 1.0 <= time.monotonic() - started < 30
    assert p.retries == 1
    assert p.bytes_received == m.nbytes + len(m.encode())
    assert torch.equal(p.tensors()["big"], w["big"])


def test_pull_from_a_dead_server_fails_in_time_and_the_next_one_continues(
    serving: Callable[..., Any], proxied: Callable[..., Any]
) -> None:
    s, w = serving(), weights()
    m = s.publisher.publish(0, w)
    p = s.puller(parallel=1, tries=3)
    proxy = proxied(s, lambda number, sent, data: None if proxy.forwarded > 2_000_000 else data)
    started = time.monotonic()
    with pytest.raises(PullFailed, match=r"[0-9a-f]{64}: .*closed the connection"):
        s.pull(p, m, url=proxy.url)
    assert time.monotonic() - started < 15, "less than the time limit of a connection"
    assert p.held is None
    before = p.bytes_received
    assert before > 1_900_000
    s.pull(p, m)
    assert p.bytes_received - before <= m.nbytes - before + 2 * len(m.encode()) + CHUNK  # only the missing chunks
    assert torch.equal(p.tensors()["big"], w["big"])


def test_failed_pull_leaves_no_version_held(serving: Callable[..., Any], proxied: Callable[..., Any]) -> None:
    """The buffer holds parts of two versions."""
    s, w = serving(), weights()
    p = s.puller(tries=2)
    s.pull(p, s.publisher.publish(0, w))
    m = s.publisher.publish(1, {"big": w["big"] + 1})
    proxy = proxied(s, lambda number, sent, data: None if proxy.forwarded > 1_000_000 else data)
    with pytest.raises(PullFailed):
        s.pull(p, m, url=proxy.url)
    assert p.held is None
    s.pull(p, m)
    assert torch.equal(p.tensors()["big"], w["big"] + 1)


def test_pull_without_a_server_fails(serving: Callable[..., Any]) -> None:
    s = serving()
    m = s.publisher.publish(0, weights())
    s.close()
    with pytest.raises(PullFailed, match=r"127\.0\.0\.1:\d+: connecting"):
        s.pull(s.puller(tries=3), m)


def test_stop_ends_a_pull(serving: Callable[..., Any], proxied: Callable[..., Any]) -> None:
    s = serving()
    m = s.publisher.publish(0, weights())
    stop, free = threading.Event(), threading.Event()

    def stall(number: int, sent: int, data: bytes) -> bytes:
        if number and sent > 200_000:
            free.wait(90)
        return data

    threading.Timer(0.2, stop.set).start()
    started = time.monotonic()
    with pytest.raises(PullFailed, match="stopped"):
        s.pull(s.puller(), m, url=proxied(s, stall).url, stop=stop)
    assert time.monotonic() - started < 30
    free.set()


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 503 later\r\nContent-Length: 0\r\n\r\n",
        b"x" * 100_000,
        b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n",
    ],
)
def test_answer_of_another_server_fails_the_pull(
    serving: Callable[..., Any], proxied: Callable[..., Any], answer: bytes
) -> None:
    s = serving()
    m = s.publisher.publish(0, weights())
    p = s.puller(tries=2, timeout_s=1)
    with pytest.raises(PullFailed):
        s.pull(p, m, url=proxied(s, lambda number, sent, data: answer if not sent else None).url)
    assert p.held is None


def test_a_route_that_comes_just_before_a_read_is_used(serving: Callable[..., Any]) -> None:
    s, gone = serving(), SourceRef(id="gone", kind="peer", location="http://127.0.0.1:9")
    made, p = s.publisher.publish(0, weights()), s.puller(tries=1)

    class Late(dict[str, Any]):
        """Another route comes when a read has its route, and before it is known as a read."""

        def __setitem__(self, file: str, sources: Any) -> None:
            p.reroute(Routed(file=file, route=route_to(s.ref)))
            super().__setitem__(file, sources)

    p._reading = Late()
    p.pull(load_of(0, made.digest, [made], gone))
    assert p.held


def test_the_bytes_of_a_file_come_over_the_connection_of_its_manifest(
    serving: Callable[..., Any], proxied: Callable[..., Any]
) -> None:
    s = serving()
    proxy, p = proxied(s, lambda number, sent, data: data), s.puller(parallel=1)
    s.pull(p, s.publisher.publish(0, weights()), url=proxy.url)
    assert proxy.connections == 1
