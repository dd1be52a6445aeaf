"""A whole run over two environment servers, as a user starts them. One is killed in mid-session: nothing changes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.ports import free_port
from windfall.events.log import read

SESSIONS = Path(__file__).parents[1] / "programs"
RECIPE = """
[run]
name = "relay"
steps = 2
deterministic = true
threads = 1
[env]
name = "custom"
factory = "lighthouse:Relay"
options = { notes = "notes" }
[rollout]
groups = 2
group_size = 4
max_tokens = 60
turn_tokens = 8
[train]
lr = 1e-3
[eval]
tasks = 2
"""


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "windfall.run.cli", *words]


def steps(folder: Path) -> list[dict[str, Any]]:
    return [e for e in read(folder / "runs" / "relay" / "events.jsonl") if (e["kind"], e["name"]) == ("scalar", "step")]


@pytest.mark.slow
def test_killed_server_changes_nothing(tmp_path: Path) -> None:
    path = os.pathsep.join([str(SESSIONS), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    for folder in (calm, killed):
        folder.mkdir()
        (folder / "recipe.toml").write_text(RECIPE)
    subprocess.run(command("train", "recipe.toml"), cwd=calm, env=environment, check=True, capture_output=True)
    subprocess.run(command("token", "env.token"), cwd=killed, env=environment, check=True, capture_output=True)
    with contextlib.ExitStack() as stack:
        ports, servers = [free_port(), free_port()], list[subprocess.Popen[bytes]]()
        for port in ports:
            serve = command("env-server", "recipe.toml", "--token", "env.token", "--port", str(port))
            servers.append(stack.enter_context(subprocess.Popen(serve, cwd=killed, env=environment)))
            stack.callback(servers[-1].kill)
        addresses = f'["127.0.0.1:{ports[0]}", "127.0.0.1:{ports[1]}"]'
        train = command(
            "train", "recipe.toml", "--set", f"env.servers={addresses}", "--set", "env.servers_token=env.token"
        )
        with (killed / "out").open("w") as out:
            run = stack.enter_context(
                subprocess.Popen(train, cwd=killed, env=environment, stdout=out, stderr=subprocess.STDOUT)
            )
        stack.callback(run.kill)
        deadline = time.monotonic() + 120
        while not (killed / "notes").exists() or (killed / "notes").stat().st_size < 20:  # the trial makes one step
            assert time.monotonic() < deadline, (killed / "out").read_text()
            assert run.poll() is None, (killed / "out").read_text()
            time.sleep(0.02)
        servers[0].send_signal(signal.SIGKILL)
        assert run.wait(120) == 0, (killed / "out").read_text()
    kept = ("step", "reward", "trained", "mean_length", "entropy", "grad_norm", "missing")
    assert [[e[k] for k in kept] for e in steps(killed)] == [[e[k] for k in kept] for e in steps(calm)]
    assert [e["step"] for e in steps(killed)] == [1, 2]
    assert not any(e["missing"] for e in steps(killed))
    events = read(killed / "runs" / "relay" / "events.jsonl")
    assert [e["address"] for e in events if e["name"] == "env_server_lost"] == [f"127.0.0.1:{ports[0]}"]
    lost = [(s["lost"], s["connected"]) for s in steps(killed)[-1]["env_servers"]]
    assert lost == [(1, False), (0, True)]
    said = (killed / "out").read_text()
    assert f"environment server lost 127.0.0.1:{ports[0]}" in said
    assert f"server 127.0.0.1:{ports[1]}" in said
