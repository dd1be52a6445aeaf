"""Who does not show the key has little time and few places at the weight server; a reader with the key goes on."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from windfall.link.listener import Listener


def served(serving: Callable[..., Any], **strangers: Any) -> Any:
    server = serving({"limits": Listener(**strangers)})
    server.publisher.publish(1, {"w": torch.arange(4096, dtype=torch.float32)})
    return server


def ended_after(connection: socket.socket) -> float:
    started = time.monotonic()
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return time.monotonic() - started


@pytest.mark.parametrize(
    "said",
    [b"", b"GET /weights/1/full HTTP/1.1\r\nHo", b"GET /weights/1/full HTTP/1.1\r\nHost: x\r\n\r\n"],
    ids=["nothing", "half a request", "no key"],
)
def test_who_does_not_show_the_key_is_cut_off(serving: Callable[..., Any], said: bytes) -> None:
    server = served(serving, auth_timeout_s=0.3)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as stranger:
        stranger.sendall(said)
        assert 0.2 < ended_after(stranger) < 2.0


def test_a_reader_with_the_key_is_not(serving: Callable[..., Any]) -> None:
    server = served(serving, auth_timeout_s=0.2)
    ask = f"GET /weights/1/manifest HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as reader:
        for _ in range(3):  # on one connection, for longer than a stranger could
            reader.sendall(ask)
            assert reader.recv(1 << 16).startswith(b"HTTP/1.1 200")
            time.sleep(0.15)


def test_strangers_keep_no_reader_out(serving: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    server = served(serving, max_unauthenticated=4)
    crowd = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(12)]
    try:
        crowd[-1].sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * 10_000 + b"\r\n\r\n")
        assert crowd[-1].recv(64).startswith(b"HTTP/1.0 400")
        assert [ended_after(c) < 1.0 for c in crowd[:7]] == [True] * 7
        assert server.puller().pull(server.url, 1, server.publisher.current.digest).version == 1
    finally:
        for c in crowd:
            c.close()
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
