"""TLS contexts. The processes that a run starts trust exactly its certificate, whatever host name it was issued for."""

from __future__ import annotations

import contextlib
import re
import ssl
from pathlib import Path

from windfall.errors import WindfallError
from windfall.recipe.fleet import Fleet


def server_context(fleet: Fleet) -> ssl.SSLContext | None:
    """For the ports of a run; None without a certificate."""
    if fleet.tls_cert is None or fleet.tls_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(fleet.tls_cert, fleet.tls_key)
    except (OSError, ssl.SSLError) as e:
        what, where = f"cannot use the certificate or its key: {e}", f"{fleet.tls_cert}, {fleet.tls_key}"
        raise WindfallError(what, where=where, fix="Give a PEM certificate chain and its private key.") from e
    _check_own(context, fleet.tls_cert)
    return context


def _check_own(server: ssl.SSLContext, certificate: Path) -> None:
    """Raise WindfallError if the run's own processes would not accept the certificate: connect to it, in memory."""
    client = client_context("https:", pinned=certificate)
    assert client is not None
    upward, downward = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = client.wrap_bio(downward, upward), server.wrap_bio(upward, downward, server_side=True)
    try:
        for side in sides * 2:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLError as e:
        why = getattr(e, "verify_message", "") or e
        fix = "Renew the certificate, or correct the clock of this machine."
        raise WindfallError(f"nothing can connect with this certificate: {why}", where=str(certificate), fix=fix) from e


PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def client_context(url: str, *, ca: Path | None = None, pinned: Path | str | None = None) -> ssl.SSLContext | None:
    """For connecting to an https URL; None for http. `ca`: also trust this certificate and those that it issued; it may
    be the controller's own. `pinned`: trust only the first certificate of this file, or of this PEM text, for any host
    name."""
    if not url.startswith("https"):
        return None
    try:
        if pinned:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            # Not the issuers that follow in the file: without a host name check, every certificate of theirs would be
            # trusted.
            context.load_verify_locations(cadata=first_certificate(pinned))
            context.check_hostname = False
        else:
            context = ssl.create_default_context()
            if ca is not None:
                context.load_verify_locations(cafile=ca)
    except (OSError, ValueError) as e:
        fix = "Give a certificate in PEM format."
        where = "WINDFALL_TLS_PIN" if isinstance(pinned, str) and PEM.search(pinned) else str(pinned or ca)
        raise WindfallError(f"cannot use the certificate: {e}", where=where, fix=fix) from e
    # The given certificate is trusted even if its issuer is not.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def first_certificate(source: str | Path) -> str:
    """The first certificate in a file, or in PEM text."""
    text = source if isinstance(source, str) else ""
    if not PEM.search(text):
        text = Path(source).read_text(encoding="ascii", errors="replace")
    found = PEM.search(text)
    if found is None:
        raise ValueError("the file contains no certificate")
    return found[0]
