"""A user's loop on `windfall tinker` whose processes are killed has the results of one that was left alone."""

from __future__ import annotations

import random
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.runs.small_disk import FILL, on_a_small_disk
from tests.support.runs.tinker_run import TinkerRun, ended, lines

pytest.importorskip("tinker", reason="the SDK is not installed: pip install tinker")

FULL_DISK = """
from tests.support.runs.tinker_run import TinkerRun, ended, lines

steps = "8"
with TinkerRun(disk, "--models", "1", "--samplers", "2") as run:
    alone = ended(run.client(Path("alone.json"), steps), Path("alone.json"), 240)
    output = Path("client.json")
    client = run.client(output, steps)
    run.until(lambda: len(lines(output)) >= 8, "has made two steps of the second loop")
    fill()
    code = run.wait()
    said = run.output()
    assert code == 2, (code, said)
    assert "Traceback" not in said, said
    assert "No space left" in said or "disk is full" in said, said
    assert str(disk) in said, said
    assert client.poll() is None, "the client has given up"
    (disk / "fill").unlink()
    run.resume()
    found = ended(client, output, 240)
    assert found[:-1] == alone[:-1], "results differ"
    assert run.weights(found[-1]["weights"]) == run.weights(alone[-1]["weights"]), "weights differ"
    assert run.stop() == 0, run.output()
"""


def hunted(run: TinkerRun, kills: list[str], steps: int, folder: Path, seed: int = 0) -> list[dict[str, object]]:
    """Kill processes while a loop goes on, spread over its steps, at random moments. Returns what the loop writes."""
    rng, output = random.Random(seed), folder / "hunted.json"
    rng.shuffle(kills)
    client = run.client(output, str(steps))
    try:
        for n, kind in enumerate(kills):
            due = 1 + n * (steps - 1) / len(kills)
            _wait(client, output, due)
            time.sleep(rng.uniform(0, 1.5))
            run.kill(kind, rng)
        return list(ended(client, output, 300))
    finally:
        client.kill()


def _wait(client: subprocess.Popen[bytes], output: Path, step: float) -> None:
    """Wait until the loop is in this step."""
    deadline = time.monotonic() + 240
    while max((line["step"] for line in lines(output)), default=0) < int(step):
        assert client.poll() is None, output.with_suffix(".log").read_text()[-3000:]
        assert time.monotonic() < deadline, f"waited 240 s for step {int(step)}: {output.read_text()[-300:]}"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_loop_whose_server_is_killed_twenty_times_has_the_same_results(tmp_path: Path) -> None:
    steps, kills = 24, ["controller"] * 6 + ["trainer"] * 6 + ["worker"] * 7 + ["run"]
    with TinkerRun(tmp_path, "--models", "2", "--samplers", "2", "--workers", "2") as run:
        alone = ended(run.client(tmp_path / "alone.json", str(steps)), tmp_path / "alone.json", 300)
        url = run.url
        found = hunted(run, kills, steps, tmp_path)
        assert run.url == url
        assert found[:-1] == alone[:-1]
        assert run.weights(str(found[-1]["weights"])) == run.weights(str(alone[-1]["weights"])), "bit for bit"
        assert run.stop() == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_server_on_a_full_disk_ends_and_continues_when_there_is_room(tmp_path: Path) -> None:
    done = on_a_small_disk(tmp_path, FILL + FULL_DISK, timeout_s=800)
    assert done.returncode == 0, done.stdout + done.stderr
