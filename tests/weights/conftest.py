"""A publisher and its server in a thread of their own, and a proxy that can do to a connection what networks do."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from windfall.weights.publish import Publisher
from windfall.weights.pull import Puller
from windfall.weights.serve import serve

KEY = "a-key-for-tests"


class Served:
    def __init__(self, publisher: Publisher, **options: Any) -> None:
        self.publisher, self.key = publisher, KEY
        self._ready, self._options = threading.Event(), options
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        self.url = f"{'https' if options.get('ssl') else 'http'}://127.0.0.1:{self.port}"

    async def _run(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = await serve(self.publisher, host="127.0.0.1", port=0, key=KEY, **self._options)
        self.port = server.port
        self._ready.set()
        await self._end.wait()
        await server.close()

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(10)
        assert not self._thread.is_alive()
        self.publisher.close()

    def puller(self, **options: Any) -> Puller:
        return Puller(**{"key": KEY, "timeout_s": 5.0, **options})

    def ask(self, path: str, *lines: str, key: str = KEY, method: str = "GET", body: bytes = b"") -> bytes:
        """Everything that the server answers to one request, head and body."""
        head = "\r\n".join((f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", *lines))
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as s:
            s.sendall(f"{head}\r\nAuthorization: Bearer {key}\r\n\r\n".encode() + body)
            out = b""
            while piece := s.recv(1 << 16):
                out += piece
        return out


@pytest.fixture
def serving() -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def make(server: dict[str, Any] | None = None, **publisher: Any) -> Served:
        made.append(Served(Publisher(**{"chunk_bytes": 1 << 16, **publisher}), **(server or {})))
        return made[-1]

    yield make
    for s in made:
        s.close()


Rule = Callable[[int, int, bytes], bytes | None]
"""(number of the connection, bytes sent on it so far, data) to what is passed on; None cuts the connection."""


class Proxy:
    """Between puller and server. Keeps what was asked, and counts what was passed on."""

    def __init__(self, port: int, rule: Rule) -> None:
        self.rule, self.upstream = rule, port
        self.asked: list[str] = []
        self.passed = self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self.upstream))
            except OSError:
                return
            number, self.connections = self.connections, self.connections + 1
            self._open += [client, server]
            threading.Thread(target=self._up, args=(client, server), daemon=True).start()
            threading.Thread(target=self._down, args=(number, client, server), daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        try:
            while data := client.recv(1 << 16):
                self.asked += [x for x in data.decode().split("\r\n") if x.startswith(("GET", "Range"))]
                server.sendall(data)
        except OSError:
            pass

    def _down(self, number: int, client: socket.socket, server: socket.socket) -> None:
        sent = 0
        try:
            while data := server.recv(1 << 14):
                out = self.rule(number, sent, data)
                if out is None:
                    break
                client.sendall(out)
                sent += len(out)
                self.passed += len(out)
            client.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        self._listener.close()
        for s in self._open:
            s.close()


@pytest.fixture
def proxied() -> Iterator[Callable[[Served, Rule], Proxy]]:
    made: list[Proxy] = []

    def make(served: Served, rule: Rule) -> Proxy:
        made.append(Proxy(served.port, rule))
        return made[-1]

    yield make
    for p in made:
        p.close()
