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
import re
import secrets
import time
from pathlib import Path

from windfall.errors import WindfallError

NONCE_BYTES = 32
SHAPE = re.compile(r"[A-Za-z0-9_-]{16,4096}")
"""What windfall's own tokens look like. Few paths do: they are shorter, or have a separator or a dot in them."""


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


def make_token(path: Path, token: str | None = None) -> str:
    """A file with this token, or with a new one if the file is not there yet; readable by its owner only."""
    if token is None and path.is_file():
        return read_token(path)
    made = token or secrets.token_urlsafe(24)
    try:
        if token is not None:
            path.unlink(missing_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(made)
    except FileExistsError:  # made by another process since the line above, and perhaps not yet written
        time.sleep(0.2)
        return read_token(path)
    except OSError as e:
        raise WindfallError(f"cannot write the token: {e.strerror or e}", where=str(path)) from e
    return made


def read_token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except OSError as e:
        raise WindfallError(f"the run's token cannot be read: {e}", where=str(path)) from e
    except UnicodeDecodeError:
        token = ""
    if len(token) < 16 or not re.fullmatch(r"[!-~]+", token):
        what = "this is no token: one is 16 or more printable characters in one word"
        raise WindfallError(what, where=str(path), fix="Delete it; `windfall token FILE` and a run's start make one.")
    return token


def given(value: str) -> str | Path:
    """What a person means who gives this as a token: the token itself, or the path of a file that has it, or will.

    >>> given("0123456789abcdefXYZ-_"), given("runs/demo/token"), given("token.txt")
    ('0123456789abcdefXYZ-_', PosixPath('runs/demo/token'), PosixPath('token.txt'))
    """
    path = Path(value)
    if SHAPE.fullmatch(value) and (len(value) > 255 or not path.exists()):
        return value
    return path
