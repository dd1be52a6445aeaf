"""TLS contexts. A run's own children trust exactly its certificate, whatever name it was made for."""

from __future__ import annotations

import ssl
from pathlib import Path

from windfall.config import Fleet
from windfall.errors import WindfallError


def serving(fleet: Fleet) -> ssl.SSLContext | None:
    if fleet.tls_cert is None or fleet.tls_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(fleet.tls_cert, fleet.tls_key)
    except (OSError, ssl.SSLError) as e:
        where = f"{fleet.tls_cert}, {fleet.tls_key}"
        raise WindfallError(f"the certificate or its key cannot be used: {e}", where=where) from e
    return context


def dialling(url: str, *, ca: Path | None = None, pinned: Path | None = None) -> ssl.SSLContext | None:
    """For a URL that begins with https. `ca`: trust this one too; `pinned`: trust this alone, by any name."""
    if not url.startswith("https"):
        return None
    try:
        context = ssl.create_default_context(cafile=pinned or ca)
    except (OSError, ssl.SSLError) as e:
        raise WindfallError(f"the certificate cannot be used: {e}", where=str(pinned or ca)) from e
    context.check_hostname = pinned is None
    return context
