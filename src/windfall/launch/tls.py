"""TLS contexts. A run's own children trust exactly its certificate, whatever name it was made for."""

from __future__ import annotations

import re
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


PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def dialling(url: str, *, ca: Path | None = None, pinned: Path | None = None) -> ssl.SSLContext | None:
    """For a URL that begins with https. `ca`: trust this, too, and what it has issued; it may be the certificate of the
    controller itself. `pinned`: trust the first certificate of this file alone, by any name."""
    if not url.startswith("https"):
        return None
    try:
        if pinned is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            # Not those that follow in the file: by any name, all that their issuer ever certified would be trusted.
            context.load_verify_locations(cadata=_first(pinned))
            context.check_hostname = False
        else:
            context = ssl.create_default_context()
            if ca is not None:
                context.load_verify_locations(cafile=ca)
    except (OSError, ValueError) as e:
        raise WindfallError(f"the certificate cannot be used: {e}", where=str(pinned or ca)) from e
    # What was given is trusted as it is, also where it was issued by somebody who is not.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _first(path: Path) -> str:
    found = PEM.search(path.read_text(encoding="ascii", errors="replace"))
    if found is None:
        raise ValueError("there is none in this file")
    return found[0]
