"""A whole run whose only worker is a server that lends: real processes, real weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.servers.ports import free_port

WINDFALL = [sys.executable, "-m", "windfall.run.cli"]
RECIPE = """
[run]
name = "small"
steps = 6
device = "cpu"
threads = 1
[rollout]
groups = 2
group_size = 2
max_tokens = 24
[eval]
tasks = 4
[fleet]
local = false
port = {port}
"""


class Lender:
    """A server that lends to the controller on a port."""

    def __init__(self, folder: Path, controller: int, token: str) -> None:
        self.port, self.log = free_port(), folder / f"{token}.log"
        options = ["--port", str(self.port), "--threads", "1", "--device", "cpu", "--kv-tokens", "16384"]
        options += ["--lend", f"http://127.0.0.1:{controller}", "--token", token]
        with self.log.open("w") as log:
            command = [*WINDFALL, "serve", "tiny", *options]
            self.process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)

    def said(self, text: str) -> bool:
        return text in self.log.read_text()

    def ends(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(240)


def until(holds: Callable[[], object], what: str) -> None:
    end_s = time.monotonic() + 240
    while not holds():
        assert time.monotonic() < end_s, f"waited until {what}"
        time.sleep(0.05)


def ask(port: int) -> dict[str, object]:
    body = json.dumps({"prompt": "3+4=", "max_tokens": 8, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", data=body)
    return json.loads(urllib.request.urlopen(request, timeout=30).read())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_on_borrowed_capacity_alone(tmp_path: Path) -> None:
    """Serving goes on before, during and after the run, and while its controller is down. A server with a wrong token
    serves without lending."""
    controller, events = free_port(), tmp_path / "runs/small/events.jsonl"
    (tmp_path / "small.toml").write_text(RECIPE.format(port=controller))
    for token in ("right", "wrong"):
        subprocess.run([*WINDFALL, "token", token], cwd=tmp_path, check=True)
    lenders = [Lender(tmp_path, controller, token) for token in ("right", "wrong")]
    run: subprocess.Popen[bytes] | None = None
    try:
        for lender in lenders:
            until(lambda: lender.said("serving tiny") and lender.said("no link"), "it serves")  # noqa: B023
            assert ask(lender.port)["object"] == "text_completion"
        run = subprocess.Popen([*WINDFALL, "train", "small.toml", "--token", "right"], cwd=tmp_path)
        until(lambda: events.is_file() and '"name":"step","step":1' in events.read_text(), "the first step")
        os.kill(json.loads((tmp_path / "runs/small/address.json").read_text())["pid"], signal.SIGKILL)
        while run.poll() is None:
            for lender in lenders:
                assert ask(lender.port)["object"] == "text_completion"
            time.sleep(0.5)
        assert run.returncode == 0
        joined = [e for e in map(json.loads, events.read_text().splitlines()) if e.get("name") == "worker_joined"]
        assert [e["lease"] for e in joined] == ["borrowed", "borrowed"], "it joined again, and the other one never"
        assert lenders[1].said("refused: wrong token")
        assert lenders[1].said("serving goes on without lending")
        for lender in lenders:
            assert ask(lender.port)["object"] == "text_completion", "serving goes on after the run"
            assert lender.ends() == 0
    finally:
        for process in (*(lender.process for lender in lenders), run):
            if process is not None:
                process.kill()
                process.wait()
