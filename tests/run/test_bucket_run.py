"""A run whose worker reaches the controller's port and a bucket, and nothing else: it trains as with pulls."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from obstore.store import from_url

from benchmarks.support.network_lab import missing
from tests.support.servers.isolated_network import isolated_network
from tests.support.servers.ports import free_port
from tests.support.weights.s3_server import BUCKET, SECRET, s3_server
from windfall.events.log import read

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]
RECIPE = """
[run]
name = "{name}"
steps = 3
device = "cpu"
threads = 1
deterministic = true
[rollout]
groups = 2
group_size = 4
max_tokens = 24
[train]
lr = 1e-3
[eval]
every = 0
[fleet]
local = false
"""
COMMAND = (sys.executable, "-m", "windfall.run.cli")


def train(folder: Path, name: str, more: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    (folder / f"{name}.toml").write_text(RECIPE.format(name=name) + more)
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*COMMAND, "train", f"{name}.toml"], cwd=folder, env=environment, **options)


def results(run: Path) -> list[tuple[Any, ...]]:
    keys = ("step", "reward", "made", "lengths", "grad_norm", "entropy")
    return [tuple(e[key] for key in keys) for e in read(run / "events.jsonl") if e["name"] == "step"]


def last_checkpoint(run: Path) -> bytes:
    return max((run / "checkpoints").glob("step-*")).joinpath("model.safetensors").read_bytes()


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_a_worker_that_reaches_only_the_controller_and_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pulled = train(tmp_path, "pulled", "workers = 1\n", environment)
    with ended(pulled), s3_server() as credentials:
        port, bucket_port = free_port(), urlsplit(credentials["AWS_ENDPOINT_URL"]).port
        assert bucket_port is not None
        environment |= credentials
        through = train(tmp_path, "through", f'port = {port}\n[weights]\nbucket = "s3://{BUCKET}/runs"\n', environment)
        token = tmp_path / "runs" / "through" / "token"
        with ended(through), isolated_network([port, bucket_port]) as place:
            join = ["worker", "--join", f"http://127.0.0.1:{port}", "--token", str(token), "--threads", "1"]
            log = (tmp_path / "worker.log").open("w")
            worker = subprocess.Popen(place.command(*COMMAND, *join, "--clouds", "none"), env=environment, stderr=log)
            with ended(worker):
                said = through.communicate(timeout=120)[0]
                assert through.returncode == 0, said + (tmp_path / "worker.log").read_text()
        with monkeypatch.context() as patch:
            for name, value in credentials.items():
                patch.setenv(name, value)
            assert from_url(f"s3://{BUCKET}", client_options={"allow_http": True}).list().collect() == []
        assert pulled.wait(120) == 0, pulled.communicate()[0]
    runs = tmp_path / "runs"
    assert results(runs / "through") == results(runs / "pulled")
    assert len(results(runs / "through")) == 3
    assert last_checkpoint(runs / "through") == last_checkpoint(runs / "pulled")
    events = read(runs / "through" / "events.jsonl")
    assert all(e["trainer_bytes"] == 0 < e["bucket_bytes"] for e in events if e["name"] == "weights")
    assert any(e["name"] == "bucket_upload" and not e["error"] for e in events)
    texts = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    assert not any(SECRET.encode() in path.read_bytes() for path in texts)
