"""How workers join a run: the address that they connect to, and the token that they authenticate with."""

from __future__ import annotations

import socket
import sys
import time
from typing import Any
from urllib.parse import urlsplit

from windfall.errors import WindfallError
from windfall.link import auth, network
from windfall.recipe.fleet import Fleet

ALL_INTERFACES = ("0.0.0.0", "::", "")
"""Values of `fleet.host` that let other machines connect."""


def url(address: dict[str, Any], fleet: Fleet) -> str:
    """The URL for workers. If the controller listens on all interfaces, it contains this machine's own address.
    `address`: the contents of address.json."""
    if fleet.host not in ALL_INTERFACES:
        return address["url"]
    return f"{urlsplit(address['url']).scheme}://{network.in_url(own_address())}:{address['port']}"


def own_address() -> str:
    """The address at which other machines may reach this one. Sends no packets and looks up no names."""
    try:
        return network.address_toward("192.0.2.1", 9)  # reserved for documentation: only the route to it matters
    except OSError:  # no network
        return socket.gethostname()


def token(value: str, patience_s: float = 0.0) -> str:
    """The token: the contents of the file `value`, or `value` itself. Waits up to `patience_s` seconds for a file that
    does not exist yet, so that workers can be started before their run."""
    source = auth.token_or_path(value)
    if isinstance(source, str):
        return source
    if not value:
        raise WindfallError("the token is empty", where="--token", fix="Give the file that holds the run's token.")
    deadline = time.monotonic() + patience_s
    if patience_s and not source.exists():
        print(f"waiting up to {patience_s:g} s for the token file {source}", file=sys.stderr, flush=True)
    while not source.exists():
        if time.monotonic() >= deadline:
            what = f"waited {patience_s:g} s for this token file" if patience_s else "no such token file"
            fix = "`windfall token FILE` creates one; the token of a run is in its folder, such as runs/demo/token."
            raise WindfallError(what, where=f"--token {value}", fix=fix)
        time.sleep(0.2)
    return auth.read_token(source)
