"""A run over TLS that starts no workers itself: strangers are refused, workers are added by hand, one is killed, one
is asked to leave, and the run finishes. Real processes and real sockets; `windfall top` shows the fleet at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from windfall.events.log import read
from windfall.link import auth

OPENSSL = shutil.which("openssl")
RECIPE = """
[run]
name = "joined"
steps = 3
threads = 1
device = "cpu"
[rollout]
groups = 4
group_size = 4
max_tokens = 120
[eval]
tasks = 0
[fleet]
workers = 0
local = false
"""


def windfall(*args: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "windfall.run.cli", *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip


def until(true: Callable[[], Any], what: str, timeout_s: float = 90.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := true()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.05)
    return found


@pytest.mark.slow
@pytest.mark.skipif(OPENSSL is None, reason="no openssl to make a certificate with")
def test_workers_are_added_by_hand(tmp_path: Path) -> None:
    cert, key, run = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "runs" / "joined"
    subprocess.run(
        [str(OPENSSL), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True,
    )  # fmt: skip
    (tmp_path / "r.toml").write_text(RECIPE)
    tls = ("--set", f"fleet.tls_cert={cert}", "--set", f"fleet.tls_key={key}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    secret, later = tmp_path / "chosen.token", tmp_path / "later.token"
    auth.make_token(secret)
    started: list[subprocess.Popen[str]] = []

    def start(*args: str, **env: str) -> subprocess.Popen[str]:
        started.append(windfall(*args, **env))
        return started[-1]

    def events(name: str) -> list[dict[str, Any]]:
        path = run / "events.jsonl"
        return [e for e in read(path) if e["name"] == name] if path.is_file() else []

    try:
        # Started before the run, with the name of a token file that does not exist yet.
        url = f"https://127.0.0.1:{port}"
        token, join = str(run / "token"), ("worker", "--join", url, "--clouds", "none", "--threads", "1")
        one = start(*join, "--token", str(later), "--tls-ca", str(cert), "--name", "one", "--price", "2.5")
        train = start(
            "train", str(tmp_path / "r.toml"), f"--set=run.folder={tmp_path / 'runs'}", f"--set=fleet.port={port}",
            "--token", str(secret), *tls,
        )  # fmt: skip
        until((run / "address.json").is_file, "its address")
        assert json.loads((run / "address.json").read_text())["url"] == url
        later.write_text(secret.read_text() + "\n")
        until(lambda: events("trainer_ready"), "the trainer")

        stranger = start(*join, "--token", "not-the-token-of-this-run", "--tls-ca", str(cert))
        distrusts = start(*join, "--token", token, "--patience", "1")
        assert stranger.wait(240) == 3
        output = str(stranger.communicate()[0])
        assert "wrong token" in output
        assert "every user of this machine can read this token" in output
        assert distrusts.wait(240) == 5
        assert "the certificate is not accepted: self-signed certificate" in str(distrusts.communicate()[0])
        assert [e["why"] for e in events("refused")] == ["wrong token, or a proof for another challenge"]

        until(lambda: events("worker_ready"), "the first worker")
        one.send_signal(signal.SIGKILL)
        output = str(one.communicate()[0])
        assert f"waiting up to 300 s for the token file {later}" in output
        assert "can read this token" not in output
        until(lambda: events("worker_lost"), "its loss")
        two = start(*join, "--tls-ca", str(cert), "--name", "two", WINDFALL_TOKEN=Path(token).read_text())
        until(lambda: len(events("worker_ready")) > 1, "the second worker")
        two.send_signal(signal.SIGTERM)
        assert two.wait(240) == 0
        three = start(*join, "--token", token, "--tls-ca", str(cert), "--name", "two")
        out, _ = train.communicate(timeout=240)
        assert train.returncode == 0, out
        assert three.wait(240) == 0
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert Path(token).read_text() == secret.read_text()
    assert Path(token).read_text() not in out
    assert f"--token {token}" in out  # the console shows a file name, which may appear in the process list
    assert Path(token).read_text() not in (run / "events.jsonl").read_text()
    assert [e["worker"] for e in events("worker_lost")] == ["one"]
    assert [e["worker"] for e in events("worker_left")] == ["two", "two#2"]
    assert [e["step"] for e in events("step")] == [1, 2, 3]
    assert all(e["lost_tokens"] == e["repeated"] == e["late"] == 0 for e in events("step"))

    top = windfall("top", str(run), COLUMNS="200")
    table, _ = top.communicate(timeout=240)
    assert "joined: step 3/3, version 3, finished" in table
    assert "workers: 0 in the fleet, 1 lost" in table
    assert "spot $2.5/h" in table
    assert "two#2" in table
