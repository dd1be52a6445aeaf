"""Ports for servers that a test starts in another process, or starts again under the same address."""

from __future__ import annotations

import itertools
import os
import socket

FIRST, COUNT, BLOCK = 20_000, 12_000, 40
"""Below the ports that the kernel gives to connections (from 32768). Every test process has a block of its own."""
_offsets = itertools.cycle(range(BLOCK))


def free_port() -> int:
    """A port of this process's block that nothing listens on. Another process can only take it by asking for it."""
    start = FIRST + os.getpid() * BLOCK % COUNT
    for offset in itertools.islice(_offsets, BLOCK):
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(("127.0.0.1", start + offset))
            except OSError:
                continue
        return start + offset
    raise AssertionError(f"all ports from {start} to {start + BLOCK - 1} are in use")
