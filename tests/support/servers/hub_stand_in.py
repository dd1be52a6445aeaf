"""A folder, served as the Hugging Face hub serves repositories: for clients that read HF_ENDPOINT, without a network.

    FOLDER/models/OWNER/NAME/...      a model or its tokenizer
    FOLDER/datasets/OWNER/NAME/...    a data set: files of rows, and a README.md that names its configurations

Every repository has one version, which all names of branches mean.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = hashlib.sha1(b"the only commit").hexdigest()


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """The URL of a server, until the context ends."""

    class Handler(_Handler):
        root = folder

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    root: Path
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = [unquote(part) for part in urlsplit(self.path).path.split("/") if part]
        if parts[:1] == ["api"] and len(parts) >= 4 and parts[1] in ("models", "datasets"):
            self._tell(parts[1], self.root.joinpath(*parts[1:4]), parts[4:], body)
            return
        kind, rest = ("datasets", parts[1:]) if parts[:1] == ["datasets"] else ("models", parts)
        if len(rest) > 4 and rest[2] == "resolve":
            self._file(self.root.joinpath(kind, *rest[:2]), "/".join(rest[4:]))
        else:
            self._refuse("EntryNotFound")

    def _tell(self, kind: str, repository: Path, what: list[str], body: bytes) -> None:
        """What the API says of a repository."""
        if not repository.is_dir():
            self._refuse("RepoNotFound")
            return
        files = sorted(path for path in repository.rglob("*") if path.is_file())
        if what[:1] == ["tree"]:
            below = "/".join(what[2:])
            found = [_entry(repository, path) for path in files]
            self._json([entry for entry in found if not below or entry["path"].startswith(f"{below}/")])
        elif what[:1] == ["paths-info"]:
            asked = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode())["paths"]
            self._json([_entry(repository, path) for path in files if str(path.relative_to(repository)) in asked])
        elif not what or what[0] == "revision":
            id = str(repository.relative_to(self.root / kind))
            names = [{"rfilename": str(path.relative_to(repository))} for path in files]
            known = {"id": id, "sha": COMMIT, "private": False, "gated": False, "disabled": False, "tags": []}
            self._json(known | {"downloads": 0, "likes": 0, "siblings": names})
        else:
            self._refuse("EntryNotFound")

    def _file(self, repository: Path, name: str) -> None:
        path = repository / name
        if not path.is_file():
            self._refuse("EntryNotFound" if repository.is_dir() else "RepoNotFound")
            return
        data = path.read_bytes()
        start, end = 0, len(data)
        given = self.headers.get("Range")
        if given:
            first, _, last = given.removeprefix("bytes=").partition("-")
            start, end = int(first), min(end, int(last) + 1) if last else end
        headers = {"ETag": f'"{_digest(path)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if given:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        self._send(206 if given else 200, data[start:end], "application/octet-stream", headers)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), "application/json", {})

    def _refuse(self, code: str) -> None:
        self._send(404, b"{}", "application/json", {"X-Error-Code": code, "X-Repo-Commit": COMMIT})

    def _send(self, status: int, data: bytes, kind: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


def _entry(repository: Path, path: Path) -> dict[str, Any]:
    name = str(path.relative_to(repository))
    return {"type": "file", "path": name, "size": path.stat().st_size, "oid": _digest(path)}
