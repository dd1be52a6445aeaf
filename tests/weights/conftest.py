"""A publisher with its server in a separate thread, and a proxy that injects network faults."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.weights.weight_shelves import load_for, route_to
from windfall.link.messages import AskRoute, Load, Routed, SourceRef
from windfall.weights.manifest import Manifest
from windfall.weights.publishing.publish import Publisher
from windfall.weights.pulling.pull import Puller
from windfall.weights.serve import serve

KEY = "a-key-for-tests"


class Served:
    def __init__(self, publisher: Publisher, **options: Any) -> None:
        self.publisher, self.key = publisher, KEY
        self._ready, self._options = threading.Event(), options
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._ready.wait(120)
        self.url = f"{'https' if options.get('ssl') else 'http'}://127.0.0.1:{self.port}"

    async def _run(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = await serve(self.publisher.files, host="127.0.0.1", port=0, key=KEY, **self._options)
        self.port = server.port
        self._ready.set()
        await self._end.wait()
        await server.close()

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(60)
        assert not self._thread.is_alive()
        self.publisher.close()

    @property
    def ref(self) -> SourceRef:
        return SourceRef(id=self.url, kind="trainer", location=self.url)

    def load(self, made: Manifest, held: str = "", *, url: str = "") -> Load:
        """What the controller would tell a reader with the weights `held`."""
        return load_for(made, held, {url or self.url: self.publisher.files.describe()})

    def pull(self, puller: Puller, made: Manifest, *, url: str = "", **options: Any) -> Manifest:
        """What a worker does that gets the load and can ask. `url`: of a proxy before the server."""
        ref = SourceRef(id=self.url, kind="trainer", location=url or self.url)

        def ask(question: AskRoute) -> None:
            puller.reroute(Routed(file=question.file, route=route_to(ref)))

        load = self.load(made, puller.held.digest if puller.held else "", url=url)
        puller.pull(load, ask, **options)
        assert puller.held is not None
        return puller.held

    def puller(self, **options: Any) -> Puller:
        return Puller(**{"key": KEY, "timeout_s": 5.0, **options})

    def ask(self, path: str, *lines: str, key: str = KEY, method: str = "GET", body: bytes = b"") -> bytes:
        """The complete answer of the server to one request, header and body."""
        head = "\r\n".join((f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", *lines))
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as s:
            s.sendall(f"{head}\r\nAuthorization: Bearer {key}\r\n\r\n".encode() + body)
            out = b""
            while piece := s.recv(1 << 16):
                out += piece
        return out


@pytest.fixture
def serving() -> Iterator[Callable[..., Served]]:
    servers: list[Served] = []

    def make(server: dict[str, Any] | None = None, **publisher: Any) -> Served:
        servers.append(Served(Publisher(**{"chunk_bytes": 1 << 16, **publisher}), **(server or {})))
        return servers[-1]

    yield make
    for s in servers:
        s.close()


Rule = Callable[[int, int, bytes], bytes | None]
"""From (number of the connection, bytes forwarded so far, data) to the data to forward; None closes the connection."""


class Proxy:
    """Between puller and server. Records the requests, and counts the bytes forwarded to the puller."""

    def __init__(self, port: int, rule: Rule) -> None:
        self.rule, self.upstream = rule, port
        self.requests: list[str] = []
        self.forwarded = self.connections = 0
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
                self.requests += [x for x in data.decode().split("\r\n") if x.startswith(("GET", "Range"))]
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
                self.forwarded += len(out)
            client.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        self._listener.close()
        for s in self._open:
            s.close()


@pytest.fixture
def proxied() -> Iterator[Callable[[Served, Rule], Proxy]]:
    proxies: list[Proxy] = []

    def make(served: Served, rule: Rule) -> Proxy:
        proxies.append(Proxy(served.port, rule))
        return proxies[-1]

    yield make
    for p in proxies:
        p.close()
