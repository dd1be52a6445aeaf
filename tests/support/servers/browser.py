"""What the tests of the page in a real browser share. `make test-page` runs them; without Chromium and playwright they
are skipped."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs.page_run import write_run
from windfall.page import command as pages

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MARKS = [pytest.mark.page, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]


class Served:
    """A server of the page in a process of its own."""

    def __init__(self, run: Path, server: str = "tests.support.servers.page_server") -> None:
        argv = [sys.executable, "-m", server, str(run)]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(10)


def append(run: Path, *events: dict[str, Any]) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write("".join(json.dumps(e) + "\n" for e in events))


def written(tmp_path: Path, events: list[dict[str, Any]], samples: list[dict[str, Any]] | None = None) -> str:
    run = write_run(tmp_path / "case", events)
    if samples:
        (run / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    return pages.write([run], tmp_path / "page.html").as_uri()
