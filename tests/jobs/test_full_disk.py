"""A service whose disk is full says so; it loses no job, and continues all of them when there is room."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs.small_disk import FILL, on_a_small_disk

SERVICE = """
from tests.support.runs.job_service import COMMAND, JobService
from windfall.errors import WindfallError

service = JobService(disk.parent)

def refused():
    done = subprocess.run([*COMMAND, "up", "fleet.toml"], cwd=disk.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr.replace("\\n", " ")

def free():
    (disk / "fill").unlink()
"""
START = """
(disk / "token").write_text("0123456789abcdef")
fill()
said = refused()
full = "No space left on device (0 bytes are free there)"
assert f"{disk}: cannot write the files of the service: {full}" in said, said
assert "Then start the service again: it continues all jobs." in said, said
"""
JOBS = """
with service:
    service.up()
    service.submit("a", directory=str(disk.parent))
    service.submit("b", "[checkpoint]", "every = 1", directory=str(disk.parent))
    service.until(lambda: service.jobs()["b"]["step"] >= 1, "has made a step")
    fill()
    try:
        service.submit("c", directory=str(disk.parent))
        raise SystemExit("a job was accepted that cannot be stored")
    except WindfallError as e:
        assert "No space left on device" in str(e), e
    states = service.until_ended()
    assert states.keys() == {"a", "b"}, states
    for name, job in service.jobs().items():
        if job["state"] == "failed":
            assert "No space left on device (0 bytes are free there)" in job["reason"], job
        else:
            assert job["state"] == "done", job
    said = (disk.parent / "up.log").read_text()
    assert f"{disk}: cannot write the state of the jobs: No space left on device" in said, said
    assert "Traceback" not in said, said
    service.kill()
    assert "No space left on device" in refused()
    free()
    client = service.up()
    for name, state in service.states().items():
        if state == "failed":
            client.post(f"/jobs/{name}/resume")
    assert service.until_ended() == {"a": "done", "b": "done"}
    service.submit("c", directory=str(disk.parent))
    assert service.until_ended()["c"] == "done"
    print("weights", *(service.weights(name) == service.weights("c") for name in "ab"))
    assert service.interrupt() == 0
"""


def test_service_does_not_start_on_a_full_disk_and_names_it(tmp_path: Path) -> None:
    done = on_a_small_disk(tmp_path, FILL + SERVICE + START, name="fleet")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_jobs_on_a_full_disk_fail_with_the_reason_and_continue_when_there_is_room(tmp_path: Path) -> None:
    """All three jobs have the same recipe and the same seed, so they end with the same weights."""
    done = on_a_small_disk(tmp_path, FILL + SERVICE + JOBS, name="fleet")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "weights True True" in done.stdout
