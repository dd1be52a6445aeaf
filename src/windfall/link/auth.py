"""The run's token and its file, and the HMAC proofs that link/handshake.py exchanges."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import time
from pathlib import Path

from windfall.errors import WindfallError, unwritable

NONCE_BYTES = 32
TOKEN_PATTERN = re.compile(r"[A-Za-z0-9_-]{16,4096}")
"""Matches the tokens that windfall generates. Few paths match: most are shorter or contain a separator or a dot."""


def nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def proof(token: str, purpose: str, run: str, *nonces: bytes) -> bytes:
    """The HMAC over purpose, run and nonces, with the token as the key.

    >>> proof("t", "hello", "demo", b"1", b"2") == proof("t", "hello", "demo", b"1", b"3")
    False
    """
    parts = [purpose.encode(), run.encode(), *nonces]
    return hmac.digest(token.encode(), b"".join(len(p).to_bytes(4, "big") + p for p in parts), hashlib.sha256)


def weights_key(token: str) -> str:
    """The key that a worker sends to the weight server."""
    return proof(token, "weights", "").hex()


def page_key(token: str) -> str:
    """The key in the link to the page of a run. It allows reading the page, and nothing else."""
    return proof(token, "page", "").hex()[:32]


def make_token(path: Path, token: str | None = None) -> str:
    """Write `token` to this file, readable by its owner only. Without `token`: keep the file, or generate a new one."""
    if token is None and path.is_file():
        return read_token(path)
    new = token or secrets.token_urlsafe(24)
    try:
        if token is not None:
            path.unlink(missing_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(new)
    except FileExistsError:  # another process created it after the check above, and may still be writing
        time.sleep(0.2)
        return read_token(path)
    except OSError as e:
        with contextlib.suppress(OSError):  # on a full disk the file may be there and empty
            path.unlink()
        raise unwritable("the token", path, e) from e
    return new


def read_token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except OSError as e:
        fix = "Give a file that you may read; `windfall token FILE` creates one."
        raise WindfallError(f"the token cannot be read: {e.strerror or e}", where=str(path), fix=fix) from e
    except UnicodeDecodeError:
        token = ""
    if len(token) < 16 or not re.fullmatch(r"[!-~]+", token):
        what = "not a token: expected at least 16 printable characters without spaces"
        fix = "Delete the file; `windfall token FILE` or the start of a run creates a new one."
        raise WindfallError(what, where=str(path), fix=fix)
    return token


def token_or_path(value: str) -> str | Path:
    """Interpret a token argument: the token itself, or the path of a file that contains it or will contain it.

    >>> token_or_path("0123456789abcdefXYZ-_"), token_or_path("runs/demo/token"), token_or_path("token.txt")
    ('0123456789abcdefXYZ-_', PosixPath('runs/demo/token'), PosixPath('token.txt'))
    """
    path = Path(value)
    if TOKEN_PATTERN.fullmatch(value) and (len(value) > 255 or not path.exists()):
        return value
    return path
