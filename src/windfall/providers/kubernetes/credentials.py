"""How to reach the API server: from inside a pod, from a kubeconfig file, or by an address that the recipe names.

- Programs that print credentials (`exec` in a kubeconfig) are not run: `kubectl proxy`, with its address as `server` in
  the recipe, does the same for every cluster.
"""

from __future__ import annotations

import base64
import os
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windfall.errors import WindfallError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
WHERE = "fleet.kubernetes"


@dataclass(frozen=True, kw_only=True)
class Credentials:
    server: str
    token: str = ""
    token_file: Path | None = None
    """File with the token; it is read for every request, because tokens of service accounts are replaced every hour."""
    ssl: ssl.SSLContext | None = None

    def authorization(self) -> dict[str, str]:
        try:
            token = self.token_file.read_text().strip() if self.token_file else self.token
        except OSError as e:
            raise OSError(f"cannot read the token of the API server: {e}") from e
        return {"Authorization": f"Bearer {token}"} if token else {}


def find(kubeconfig: Path | None, server: str, token_file: Path | None) -> Credentials:
    """The credentials that the recipe means."""
    if server:
        return Credentials(server=server.rstrip("/"), token_file=token_file, ssl=_context(server))
    if kubeconfig is None and (SERVICE_ACCOUNT / "token").is_file():
        return in_cluster()
    path = kubeconfig or Path(os.environ.get("KUBECONFIG") or "~/.kube/config").expanduser()
    return from_kubeconfig(path)


def in_cluster() -> Credentials:
    """The service account of the pod that this process is in."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    server = f"https://{f'[{host}]' if ':' in host else host or 'kubernetes.default.svc'}:{port}"
    context = ssl.create_default_context(cafile=str(SERVICE_ACCOUNT / "ca.crt"))
    return Credentials(server=server, token_file=SERVICE_ACCOUNT / "token", ssl=context)


def from_kubeconfig(path: Path) -> Credentials:
    """The current context of a kubeconfig file."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text())
        context = _named(data, "contexts", data["current-context"])["context"]
        cluster = _named(data, "clusters", context["cluster"])["cluster"]
        user = _named(data, "users", context["user"])["user"]
        server = str(cluster["server"])
    except OSError as e:
        fix = "Set fleet.kubernetes.kubeconfig, or server and token_file."
        raise WindfallError(f"cannot read the kubeconfig: {e.strerror or e}", where=str(path), fix=fix) from e
    except (KeyError, TypeError, StopIteration, yaml.YAMLError) as e:
        fix = "`kubectl config view --minify` shows what it should contain."
        raise WindfallError(f"not a kubeconfig with a current context: {e!r}", where=str(path), fix=fix) from e
    if "exec" in user or "auth-provider" in user:
        what = "this kubeconfig gets its credentials from a program, which windfall does not run"
        fix = 'Start `kubectl proxy`, and set fleet.kubernetes.server = "http://127.0.0.1:8001".'
        raise WindfallError(what, where=str(path), fix=fix)
    tls = _context(server, cluster, user, path.parent)
    file = user.get("tokenFile")
    return Credentials(
        server=server.rstrip("/"),
        token=str(user.get("token") or ""),
        token_file=path.parent / file if file else None,
        ssl=tls,
    )


def _named(data: Any, section: str, name: str) -> Any:
    return next(entry for entry in data[section] if entry["name"] == name)


def _context(server: str, cluster: Any = None, user: Any = None, folder: Path = Path()) -> ssl.SSLContext | None:
    """The TLS context for a server; None for http."""
    if not server.startswith("https"):
        return None
    cluster, user = cluster or {}, user or {}
    try:
        context = ssl.create_default_context()
        if ca := _contents(cluster, "certificate-authority", folder):
            context.load_verify_locations(cadata=ca.decode("ascii"))
        if cluster.get("insecure-skip-tls-verify"):
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        certificate, key = (_contents(user, name, folder) for name in ("client-certificate", "client-key"))
        if certificate and key:
            # Python loads a client certificate only from a file.
            with tempfile.NamedTemporaryFile(suffix=".pem") as file:  # readable by its owner only
                file.write(certificate + b"\n" + key)
                file.flush()
                context.load_cert_chain(file.name)
    except (OSError, ValueError, ssl.SSLError) as e:
        fix = "Check the certificates in the kubeconfig."
        raise WindfallError(f"cannot use a certificate for {server}: {e}", where=WHERE, fix=fix) from e
    return context


def _contents(entry: Any, name: str, folder: Path) -> bytes:
    if data := entry.get(f"{name}-data"):
        return base64.b64decode(data)
    return (folder / entry[name]).read_bytes() if entry.get(name) else b""
