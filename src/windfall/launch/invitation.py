"""How to join a run: the address that other processes dial."""

from __future__ import annotations

import socket
from typing import Any
from urllib.parse import urlsplit

from windfall.config import Fleet

EVERYWHERE = ("0.0.0.0", "::", "")


def url(said: dict[str, Any], fleet: Fleet) -> str:
    """`said`: address.json. A controller that listens everywhere is dialled by this machine's own address."""
    if fleet.host not in EVERYWHERE:
        return said["url"]
    host = own_address()
    return f"{urlsplit(said['url']).scheme}://{f'[{host}]' if ':' in host else host}:{said['port']}"


def own_address() -> str:
    """By which other machines may reach this one. Nothing is sent to find it, and no name is looked up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect(("192.0.2.1", 9))  # an address that nobody has: only the route to it is of interest
            return s.getsockname()[0]
        except OSError:  # no network
            return socket.gethostname()
