"""Peers that lie about where they are, trickle, or answer nonsense: a reader notices, and goes on elsewhere."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import pytest

from tests.support.weights.weight_shelves import CHUNK, KEY, ServedShelf, some_bytes
from windfall.link import listener
from windfall.link.messages import SourceRef
from windfall.weights.buffers import machine
from windfall.weights.pulling import http_source
from windfall.weights.pulling import source as sources_module
from windfall.weights.pulling.http_source import HttpSource
from windfall.weights.pulling.source import Source, SourceBroken, SourceStalled, connect

Answer = Callable[[socket.socket], None]


class Peer:
    """A server that receives a request and then does what `answer` does with the connection."""

    def __init__(self, answer: Answer) -> None:
        self.requests: list[bytes] = []
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.location = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def connect(self, *, claim: str = "", tls: ssl.SSLContext | None = None) -> Source:
        ref = SourceRef(id="peer", kind="peer", location=self.location, machine=claim)
        return connect(ref, key=KEY, tls=tls, timeout_s=5.0, stopped=lambda: False)

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=(self._listener.accept()[0],), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with suppress(OSError), sock:
            while request := sock.recv(1 << 16):
                self.requests.append(request)
                self._answer(sock)


@pytest.fixture
def peer() -> Iterator[Callable[[Answer], Peer]]:
    peers: list[Peer] = []

    def make(answer: Answer) -> Peer:
        peers.append(Peer(answer))
        return peers[-1]

    yield make
    for each in peers:
        each.close()


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every address is that of another machine."""
    monkeypatch.setattr(listener, "is_same_machine", lambda peer, own: False)


@pytest.mark.parametrize("status", ["206", "²06", "2" * 16])
@pytest.mark.parametrize("length", ["²", "1" * 5000, "-1", ""])
def test_numbers_that_are_none_break_the_source(peer: Callable[[Answer], Peer], status: str, length: str) -> None:
    head = f"HTTP/1.1 {status} OK\r\nContent-Length: {length}\r\n\r\n".encode("latin-1")
    with (
        closing(peer(lambda sock: sock.sendall(head)).connect()) as source,
        pytest.raises(SourceBroken, match="unlike a weight server"),
    ):
        source.open("0" * 64, 0, 10)


def test_a_header_has_one_time_limit(peer: Callable[[Answer], Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_source, "PEER_SILENT_S", 0.5)

    def trickle(sock: socket.socket) -> None:
        with suppress(OSError):  # the reader has given up
            for _ in range(400):
                sock.sendall(b"x")
                time.sleep(0.1)

    began_s = time.monotonic()
    with closing(peer(trickle).connect()) as source, pytest.raises(SourceStalled):
        source.open("0" * 64, 0, 10)
    assert time.monotonic() - began_s < 30


def test_a_manifest_that_trickles_stalls(peer: Callable[[Answer], Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "PACE_S", 0.5)

    def trickle(sock: socket.socket) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\n")
        for _ in range(40):
            sock.sendall(b"x")
            time.sleep(0.1)

    with closing(peer(trickle).connect()) as source, pytest.raises(SourceStalled, match="too slowly"):
        source.manifest("0" * 64)


def test_an_endless_handle_breaks_the_source(peer: Callable[[Answer], Peer]) -> None:
    head = b"HTTP/1.1 206 OK\r\nContent-Length: 5000\r\n\r\n" + bytes(5000)
    with (
        closing(peer(lambda sock: sock.sendall(head)).connect(claim=machine())) as source,
        pytest.raises(SourceBroken, match="has 5000 bytes; the limit is 4096"),
    ):
        source.open("0" * 64, 0, 10)


@pytest.mark.usefixtures("remote")
def test_a_claimed_machine_is_not_believed() -> None:
    shelf = ServedShelf(by_handle=True, kind="peer")
    file = shelf.hold(some_bytes(CHUNK)).digest
    with closing(shelf.connect()) as source:
        source.open(file, 0, CHUNK)
        assert type(source) is HttpSource
        assert not source.trusted
    shelf.close()


@pytest.mark.usefixtures("remote")
def test_a_claimed_machine_does_not_get_the_key_unencrypted(peer: Callable[[Answer], Peer]) -> None:
    liar = peer(lambda sock: None)
    with pytest.raises(SourceBroken, match="TLS is configured"):
        liar.connect(claim=machine(), tls=ssl.create_default_context()).manifest("0" * 64)
    assert not liar.requests
