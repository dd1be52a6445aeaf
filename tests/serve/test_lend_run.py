"""A whole run whose only worker is a server that lends: real processes, real weights."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

RECIPE = """
[run]
name = "small"
steps = 2
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


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ask(port: int) -> dict[str, object]:
    body = json.dumps({"prompt": "3+4=", "max_tokens": 8, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", data=body)
    return json.loads(urllib.request.urlopen(request, timeout=30).read())


@pytest.mark.slow
def test_a_run_on_borrowed_capacity_alone(tmp_path: Path) -> None:
    controller, port = free_port(), free_port()
    (tmp_path / "small.toml").write_text(RECIPE.format(port=controller))
    windfall = [sys.executable, "-m", "windfall.cli"]
    subprocess.run([*windfall, "token", "t.token"], cwd=tmp_path, check=True, env=os.environ)
    options = ["--port", str(port), "--threads", "1", "--device", "cpu", "--kv-tokens", "16384"]
    options += ["--lend", f"http://127.0.0.1:{controller}", "--token", "t.token"]
    server = subprocess.Popen([*windfall, "serve", "tiny", *options], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("serving tiny")
        run = subprocess.Popen([*windfall, "train", "small.toml", "--token", "t.token"], cwd=tmp_path)
        while run.poll() is None:
            assert ask(port)["object"] == "text_completion"
            time.sleep(0.5)
        assert run.returncode == 0
        events = [json.loads(line) for line in (tmp_path / "runs/small/events.jsonl").read_text().splitlines()]
        joined = [e for e in events if e.get("name") == "worker_joined"]
        assert [e["lease"] for e in joined] == ["borrowed"]
        assert ask(port)["object"] == "text_completion", "serving goes on after the run"
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.wait()
