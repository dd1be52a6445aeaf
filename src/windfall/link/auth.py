"""Who may join. Both sides show that they know the run's token; the token itself never crosses the wire.

    controller ──▶ Challenge(nonce c)
    worker     ──▶ Hello(nonce w, proof = HMAC(token, "hello", run, c, w))        a replayed Hello has another c
    controller ──▶ Welcome(proof = HMAC(token, "welcome", run, c, w))             nor can a stranger play controller

The trainer does the same with a secret of its own, which stays in the run's folder: a worker cannot pass for it.
Against somebody who can read or change what is on the wire, use TLS.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from pathlib import Path

from windfall.errors import WindfallError

NONCE_BYTES = 32


def nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def proof(token: str, said: str, run: str, *nonces: bytes) -> bytes:
    """
    >>> proof("t", "hello", "demo", b"1", b"2") == proof("t", "hello", "demo", b"1", b"3")
    False
    """
    parts = [said.encode(), run.encode(), *nonces]
    return hmac.digest(token.encode(), b"".join(len(p).to_bytes(4, "big") + p for p in parts), hashlib.sha256)


same = hmac.compare_digest


def weights_key(token: str) -> str:
    """What a worker shows to the weight server."""
    return proof(token, "weights", "").hex()


def make_token(path: Path) -> str:
    """The run's token: made once, readable by its owner only."""
    if path.is_file():
        return read_token(path)
    token = secrets.token_urlsafe(24)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:  # made by another process since the line above, and perhaps not yet written
        time.sleep(0.2)
        return read_token(path)
    with os.fdopen(handle, "w") as file:
        file.write(token)
    return token


def read_token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except OSError as e:
        raise WindfallError(f"the run's token cannot be read: {e}", where=str(path)) from e
    if len(token) < 16:
        raise WindfallError("this is no token", where=str(path), fix="Delete the file: a new one is made at the start.")
    return token
