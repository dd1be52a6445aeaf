"""How a run is joined: the address that other processes dial, and the token that they show."""

from __future__ import annotations

import socket
import sys
import time
from typing import Any
from urllib.parse import urlsplit

from windfall.config import Fleet
from windfall.errors import WindfallError
from windfall.link import auth

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


def token(value: str, patience_s: float = 0.0) -> str:
    """The token that is given as `value`: what this file holds, or the value itself. A file that is not there yet is
    waited for, so that workers can be started before their run."""
    found = auth.token_or_path(value)
    if isinstance(found, str):
        return found
    if not value:
        raise WindfallError("this is empty", where="--token", fix="Give the file that holds the run's token.")
    give_up = time.monotonic() + patience_s
    if patience_s and not found.exists():
        print(f"waiting up to {patience_s:g} s for the token's file {found}", file=sys.stderr, flush=True)
    while not found.exists():
        if time.monotonic() >= give_up:
            what = f"waited {patience_s:g} s for this token file" if patience_s else "no such token file"
            fix = "`windfall token FILE` makes one; the token of a run is in its folder, such as runs/demo/token."
            raise WindfallError(what, where=f"--token {value}", fix=fix)
        time.sleep(0.2)
    return auth.read_token(found)
