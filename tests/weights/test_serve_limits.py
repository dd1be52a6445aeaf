"""The weight server limits peers without the key in time and connections; a reader with the key is not limited."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from windfall.link.listener import Listener
from windfall.weights.held_files import HeldFiles
from windfall.weights.serve import serve_in_thread


def served(serving: Callable[..., Any], **limits: Any) -> Any:
    server = serving({"limits": Listener(**limits)})
    server.publisher.publish(1, {"w": torch.arange(4096, dtype=torch.float32)})
    return server


def seconds_until_closed(connection: socket.socket, started: float) -> float:
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return time.monotonic() - started


@pytest.mark.parametrize(
    "request_bytes",
    [b"", b"GET /weights/1 HTTP/1.1\r\nHo", b"GET /weights/1 HTTP/1.1\r\nHost: x\r\n\r\n"],
    ids=["nothing", "half a request", "no key"],
)
def test_peer_without_the_key_is_disconnected_in_time(serving: Callable[..., Any], request_bytes: bytes) -> None:
    server = served(serving, auth_timeout_s=0.3)
    started = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as peer:
        peer.sendall(request_bytes)
        assert 0.2 < seconds_until_closed(peer, started) < 20.0


def test_reader_with_the_key_stays_connected(serving: Callable[..., Any]) -> None:
    server = served(serving, auth_timeout_s=1.0)
    path = f"/weights/{server.publisher.current.digest}/manifest"
    ask = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as reader:
        for _ in range(3):  # on one connection, for longer than the timeout
            reader.sendall(ask)
            assert reader.recv(1 << 16).startswith(b"HTTP/1.1 200")
            time.sleep(0.5)


def test_peers_without_the_key_keep_no_reader_out(
    serving: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    server = served(serving, max_unauthenticated=4)
    peers = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(12)]
    try:
        peers[-1].sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * 10_000 + b"\r\n\r\n")
        assert peers[-1].recv(64).startswith(b"HTTP/1.0 400")
        started = time.monotonic()
        assert [seconds_until_closed(c, started) < 9.0 for c in peers[:7]] == [True] * 7, "before their time limit"
        assert server.pull(server.puller(), server.publisher.current).version == 1
    finally:
        for c in peers:
            c.close()
    logged = [r for r in caplog.records if r.name.startswith(("windfall", "aiohttp"))]
    assert len(logged) == 1, "the request that is not HTTP"
    assert logged[0].exc_info is None


def test_a_server_that_is_closed_twice_is_closed() -> None:
    server, began_s = serve_in_thread(HeldFiles(), host="127.0.0.1", port=0, key="key"), time.monotonic()
    server.close()
    server.close()
    assert time.monotonic() - began_s < 10
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
