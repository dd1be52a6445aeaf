"""Calls of the service's HTTP api, for commands. No asyncio."""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from windfall import run_folder as folders
from windfall.errors import WindfallError
from windfall.link import auth, invitation, tls

TIMEOUT_S = 60.0
"""A submission reads the data files of its recipe."""


class RequestRefused(WindfallError):
    """The service has answered, with an error."""

    status = 0
    """Status of the HTTP response; 0: there was none."""


class JobsClient:
    """`on`: the address of a service, or its folder on this machine. `token`: the token or its file; None: the one in
    that folder, or in the folder "fleet" here. `ca`: a certificate to trust, for an https address. `timeout_s`: for one
    answer."""

    def __init__(self, on: str, token: str | None, ca: Path | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        folder = Path("fleet") if on.startswith(("http://", "https://")) else Path(on)
        self.url, self._timeout_s = on.rstrip("/"), timeout_s
        pinned = os.environ.get("WINDFALL_TLS_PIN", "")
        if folder == Path(on):
            address = folders.read_json(folder / "address.json") or {}
            if not isinstance(address.get("url"), str):
                fix = "Start it with `windfall up fleet.toml`, or give its address: --on http://HOST:8765."
                raise WindfallError("no service has this folder", where=f"--on {on}", fix=fix)
            self.url, pinned = address["url"], str(address.get("certificate", ""))
        self._ssl = tls.client_context(self.url, ca=ca, pinned=pinned)
        if token is None and not (folder / "token").is_file():
            fix = f"Give --token FILE; the file is {folder / 'token'} on the service's machine."
            raise WindfallError("the service needs a token", where=f"--on {on}", fix=fix)
        self._token = auth.read_token(folder / "token") if token is None else invitation.token(token)

    def get(self, path: str) -> Any:
        return self._call("GET", path, None)

    def post(self, path: str, **fields: Any) -> Any:
        return self._call("POST", path, json.dumps(fields).encode())

    def delete(self, path: str) -> Any:
        return self._call("DELETE", path, None)

    def _call(self, method: str, path: str, body: bytes | None) -> Any:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s, context=self._ssl) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as e:
            raise _refusal(e, self.url) from None
        except (OSError, ValueError) as e:
            why = getattr(e, "reason", e)
            fix = "Is `windfall up` running there, and can this machine reach it? With tls_cert its address is https://..."
            if isinstance(why, ssl.SSLCertVerificationError):
                why = f"its certificate is not accepted: {why.verify_message}"
                fix = "Set --tls-ca to the certificate to trust: that of the service is `tls_cert` in its fleet.toml."
            raise WindfallError(f"the service does not answer: {why}", where=f"{self.url}{path}", fix=fix) from None


def _refusal(error: urllib.error.HTTPError, url: str) -> RequestRefused:
    try:
        said = json.load(error)["error"]
        found = RequestRefused(str(said["what"]), where=str(said["where"]), fix=str(said["fix"]))
    except (OSError, ValueError, LookupError, TypeError):
        found = RequestRefused(f"the service answered with status {error.code}", where=url)
    found.status = error.code
    return found
