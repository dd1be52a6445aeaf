"""Addresses and network interfaces of this machine, for ranks that talk to ranks on other machines.

gloo and NCCL choose a network interface by themselves: gloo takes the one of the host name, which is often the loopback
interface or a public network. `socket_environment` tells both to use the one with the address of the rendezvous. A
choice of the user (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) has priority, and is needed for an IPv6 address.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from urllib.parse import urlsplit

from windfall.errors import WindfallError

SIOCGIFADDR = 0x8915
"""ioctl of Linux: the IPv4 address of an interface."""


def split_endpoint(text: str) -> tuple[str, int]:
    """Host and port.

    >>> split_endpoint("10.0.0.5:29400"), split_endpoint("[fd00::5]:29400")
    (('10.0.0.5', 29400), ('fd00::5', 29400))
    """
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def in_url(host: str) -> str:
    """A host as a part of a URL.

    >>> in_url("10.0.0.5"), in_url("fd00::5")
    ('10.0.0.5', '[fd00::5]')
    """
    return f"[{host}]" if ":" in host else host


def host_of(url: str) -> str:
    """The host of a URL in lower case; empty if it has none.

    >>> host_of("http://[FD00::5]:9001"), host_of("http://[10.0.0.5"), host_of("10.0.0.5")
    ('fd00::5', '', '')
    """
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def plain_address(address: str) -> str:
    """An IPv4 address as such, also if it was seen on an IPv6 socket.

    >>> plain_address("::ffff:10.0.0.5"), plain_address("fd00::5")
    ('10.0.0.5', 'fd00::5')
    """
    return address.removeprefix("::ffff:")


def is_loopback(host: str) -> bool:
    """Whether whoever connects to this host reaches its own machine.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.5", "gpu5")]
    [True, True, True, True, False, False]
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def resolve(host: str) -> str:
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def address_toward(host: str, port: int) -> str:
    """The address of this machine from which it reaches another host. Sends no packets."""
    family, kind, protocol, _, to = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as s:
        s.connect(to)
        return str(s.getsockname()[0])


def free_port(host: str) -> int:
    return _bound(host, 0)


def check_port(host: str, port: int, fix: str) -> None:
    """Raises WindfallError with `fix` if nothing can listen there. Port 0 selects a free one."""
    try:
        _bound(host, port)
    except OSError as e:
        raise WindfallError(f"cannot listen: {e.strerror or e}", where=f"{host}:{port}", fix=fix) from e


def _bound(host: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind((host, port))
        return s.getsockname()[1]


def interface_of(address: str) -> str | None:
    """The network interface with this IPv4 address; None if there is none or it cannot be found out."""
    try:
        wanted = ipaddress.IPv4Address(address)
    except ValueError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                found = fcntl.ioctl(s.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if found[20:24] == wanted.packed:
                    return name
    return None


def socket_environment(address: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables for ranks that use the interface with this address."""
    name = interface_of(address)
    wanted = {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    return {key: value for key, value in wanted.items() if key not in environment}
