"""A network namespace that reaches nothing but some ports of this machine, under the same numbers on its loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.support.network_lab import LabMachine, enter


@contextmanager
def isolated_network(ports: Sequence[int]) -> Iterator[LabMachine]:
    """`LabMachine.command` runs a command there."""
    name = f"windfall-test-{os.getpid()}"
    place = LabMachine(name=name, region=0, address="127.0.0.1", namespace=name)
    subprocess.run(["ip", "netns", "add", name], check=True)
    listeners: list[socket.socket] = []

    def listen() -> None:
        enter(place)  # only this thread
        listeners.extend(socket.create_server(("127.0.0.1", port), backlog=64) for port in ports)

    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        opening = threading.Thread(target=listen)
        opening.start()
        opening.join()
        assert len(listeners) == len(ports)
        for listener in listeners:
            threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        yield place
    finally:
        for listener in listeners:
            listener.close()
        subprocess.run(["ip", "netns", "delete", name], check=True)


def _accept(listener: socket.socket) -> None:
    while True:
        try:
            port = listener.getsockname()[1]
            client, _ = listener.accept()
        except OSError:
            return
        try:
            server = socket.create_connection(("127.0.0.1", port))
        except OSError:
            client.close()
            continue
        for pair in ((client, server), (server, client)):
            threading.Thread(target=_copy, args=pair, daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        target.close()
