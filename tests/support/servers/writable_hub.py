"""The part of the Hugging Face hub's HTTP interface that uploads use, over a folder (hub_stand_in.py serves its reads).

    FOLDER/models/OWNER/NAME/...      what the last commit of a repository shows
    FOLDER/lfs/SHA256                 large files that were uploaded, committed or not

Large files take the LFS protocol: preupload says which they are, the batch asks for those that are missing, PUT takes
their bytes, and the commit names them. Tests set `fail` to break a request, and read `seen`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.support.servers.hub_stand_in import COMMIT, _Handler

LARGE = 4096
"""Bytes from which a file takes the LFS protocol."""


@dataclass
class WritableHub:
    folder: Path
    tokens: dict[str, str]
    """The namespace that each token may write to; "" for none."""
    url: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    """Messages of the commits."""
    seen: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of every request."""
    fail: Callable[[str, str], int] = lambda method, path: 0
    """The status with which a request fails; 0: it does not; -1: the connection is cut."""

    def files(self, repo: str) -> set[str]:
        root = self.folder / "models" / repo
        return {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()}


@contextmanager
def serve(folder: Path, tokens: dict[str, str]) -> Iterator[WritableHub]:
    hub = WritableHub(folder=folder, tokens=tokens)
    (folder / "lfs").mkdir(parents=True)

    class Handler(_WriteHandler):
        root, state = folder, hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _WriteHandler(_Handler):
    state: WritableHub

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.state.seen.append((self.command, path))
        parts = [part for part in path.split("/") if part]
        if (status := self.state.fail(self.command, path)) < 0:
            self.close_connection = True
            self.connection.close()
            return
        if status:
            self._error(status, "broken by the test")
        elif self.command == "PUT" and parts[0] == "lfs":  # signed in its own way: no token
            self._store(parts[1])
        elif (owner := self._owner()) is None:
            self._error(401, "Invalid credentials in Authorization header")
        elif self.command == "POST" and parts[:2] != ["api", "models"]:
            self._post(parts, owner, json.loads(self._body()))
        elif self.command == "POST" and parts[4:5] in (["preupload"], ["commit"]):
            if owner != parts[2]:
                self._error(403, f"You have no right to write to {parts[2]}")
            elif parts[4] == "preupload":
                self._preupload(json.loads(self._body()))
            else:
                self._commit(f"{parts[2]}/{parts[3]}", self._body())
        else:
            super()._answer()

    def _owner(self) -> str | None:
        return self.state.tokens.get((self.headers.get("Authorization") or "").removeprefix("Bearer "))

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _post(self, parts: list[str], owner: str, body: dict[str, Any]) -> None:
        if parts == ["api", "repos", "create"]:
            self._create(owner, body)
        elif parts == ["api", "validate-yaml"]:
            self._json({"errors": [], "warnings": []})
        elif parts[2:] == ["info", "lfs", "objects", "batch"]:
            self._json({"transfer": "basic", "objects": [self._object(entry) for entry in body["objects"]]})
        else:
            self._error(404, "no such path")

    def _create(self, owner: str, body: dict[str, Any]) -> None:
        namespace = body.get("organization") or owner
        repo = f"{namespace}/{body['name']}"
        folder = self.root / "models" / repo
        if namespace != owner:
            self._error(403, f"You don't have the rights to create a model under the namespace {namespace}")
        elif folder.is_dir():
            self._send(409, json.dumps({"url": f"{self.state.url}/{repo}"}).encode(), "application/json", {})
        else:
            folder.mkdir(parents=True)
            (folder / ".gitattributes").write_text("*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
            self.state.private[repo] = body.get("visibility") == "private" or body.get("private") is True
            self._json({"url": f"{self.state.url}/{repo}", "name": repo})

    def _preupload(self, body: dict[str, Any]) -> None:
        modes = [{"path": f["path"], "uploadMode": "lfs" if f["size"] >= LARGE else "regular"} for f in body["files"]]
        self._json({"files": [mode | {"shouldIgnore": False} for mode in modes]})

    def _object(self, entry: dict[str, Any]) -> dict[str, Any]:
        if (self.root / "lfs" / entry["oid"]).is_file():
            return entry
        return entry | {"actions": {"upload": {"href": f"{self.state.url}/lfs/{entry['oid']}"}}}

    def _store(self, oid: str) -> None:
        data = self._body()
        if hashlib.sha256(data).hexdigest() != oid:
            self._error(400, "the bytes are not those of this object")
            return
        (self.root / "lfs" / oid).write_bytes(data)
        self._send(200, b"", "text/plain", {})

    def _commit(self, repo: str, body: bytes) -> None:
        """All or nothing: a commit that names a large file that was not uploaded changes nothing."""
        folder, work = self.root / "models" / repo, self.root / "work"
        lines = [json.loads(line) for line in body.splitlines() if line]
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(folder, work)
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.state.messages.append(value["summary"])
            elif line["key"] == "file":
                (work / value["path"]).write_bytes(base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile" and (self.root / "lfs" / value["oid"]).is_file():
                shutil.copy(self.root / "lfs" / value["oid"], work / value["path"])
            elif line["key"] == "deletedFile":
                (work / value["path"]).unlink()
            else:
                self._error(400, f"cannot commit {value}")
                return
        shutil.rmtree(folder)
        work.rename(folder)
        self._json({"success": True, "commitOid": COMMIT, "commitUrl": f"{self.state.url}/{repo}/commit/{COMMIT}"})

    def _error(self, status: int, message: str) -> None:
        headers = {"X-Error-Message": message, "Connection": "close"}
        self.close_connection = True
        self._send(status, json.dumps({"error": message}).encode(), "application/json", headers)
