"""The page of a service: its jobs, and one timeline for every device, colored by job.

    GET /page                              the page itself
    GET /page/data?window=600&since=N      the present snapshot, and what devices did (device_history.py)

It reads what the service writes to its folder, jobs.json and turns.jsonl, so it shows the time before a restart, too.

Rules: every path needs the key (`?key=...`), which is derived from the fleet's token, because the page shows all jobs.
Nothing can be changed through these paths. Files are read in a thread, at most once in READ_S, whatever the number of
viewers; of turns.jsonl at most MOST_BYTES.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from functools import cache
from pathlib import Path
from typing import Any

from aiohttp import web

from windfall import html_page
from windfall import run_folder as folders
from windfall.html_page import HEADERS, Handler
from windfall.jobs.views.device_history import BUCKETS, WINDOWS_S, DeviceHistory
from windfall.link import auth

STATIC = Path(__file__).parent / "static"
READ_S = 0.9
MOST_BYTES = 16 << 20
"""Turns are read from the last bytes of their file: about 150,000 turns."""


def link(url: str, token: str) -> str:
    """The address of the page. `url`: of the service. `token`: of the fleet."""
    return f"{url}/page?key={auth.page_key(token)}"


class ServiceFiles:
    """What the service has written, as far as it was read."""

    def __init__(self, folder: Path) -> None:
        self.life = secrets.token_hex(4)
        """Numbers of changes in `history` are valid within one life."""
        self.snapshot: dict[str, Any] = {}
        self.history = DeviceHistory()
        self._folder, self._read_s = folder, 0.0
        self._file_id, self._offset = 0, 0

    def read(self) -> None:
        """Read what is new. Blocks."""
        if time.monotonic() - self._read_s < READ_S:
            return
        self.snapshot = folders.read_json(self._folder / "jobs.json") or self.snapshot
        with contextlib.suppress(OSError):  # there is no turn yet
            self._read_turns(self._folder / "turns.jsonl")
        self._read_s = time.monotonic()

    def _read_turns(self, path: Path) -> None:
        with path.open("rb") as file:
            size, number = file.seek(0, 2), path.stat().st_ino
            if number != self._file_id or size < self._offset:  # the file is new
                self._file_id, self._offset = number, 0
            start = max(self._offset, size - MOST_BYTES)
            file.seek(start)
            data = file.read(size - start)
        if start > self._offset:  # the first line may be half a line
            data = data.partition(b"\n")[2]
        whole = data.rpartition(b"\n")[0]  # the last line may still be written
        self._offset = size - (len(data) - len(whole) - 1 if whole else len(data))
        now_s = time.time()
        for line in whole.splitlines():
            with contextlib.suppress(ValueError, RecursionError):  # a damaged line is left out
                turn = json.loads(line)
                if isinstance(turn, dict):
                    self.history.add(turn, now_s)


class JobsPage:
    def __init__(self, folder: Path, token: str) -> None:
        """`folder`: of the service. `token`: of the fleet."""
        self._files, self._key = ServiceFiles(folder), auth.page_key(token)
        self._reading = asyncio.Lock()

    def handlers(self) -> dict[str, Handler]:
        paths: dict[str, Handler] = {"/page": self._page, "/page/data": self._data}
        return html_page.guarded(paths, self._key)

    async def _page(self, request: web.Request) -> web.Response:
        del request
        script = _asset("page.js")
        headers = {**HEADERS, "Content-Security-Policy": html_page.content_policy(script)}
        data = {"windows": WINDOWS_S, "buckets": BUCKETS}
        text = html_page.html(title="jobs · windfall", style=_asset("page.css"), script=script, data=data)
        return web.Response(text=text, content_type="text/html", headers=headers)

    async def _data(self, request: web.Request) -> web.Response:
        try:
            window_s, since = float(request.query.get("window", WINDOWS_S[0])), int(request.query.get("since", "0"))
        except ValueError:
            window_s, since = 0.0, 0
        if window_s not in WINDOWS_S:
            text = f"unknown window; expected one of: {', '.join(f'{w:g}' for w in WINDOWS_S)}\n"
            return web.Response(status=400, text=text, headers=HEADERS)
        files = self._files
        async with self._reading:
            await asyncio.to_thread(files.read)
        now_s = time.time()
        answer = {
            "life": files.life, "changed": files.history.changed, "now_s": now_s, "snapshot": files.snapshot,
            "devices": files.history.changes(window_s, since if request.query.get("life") == files.life else 0, now_s),
        }  # fmt: skip
        return web.Response(text=html_page.as_json(answer), content_type="application/json", headers=HEADERS)


@cache
def _asset(name: str) -> str:
    return (STATIC / name).read_text("utf-8")
