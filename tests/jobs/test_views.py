"""What `windfall jobs` and `windfall top` show of a service."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from tests.support.hostile.files import DAMAGES, damage
from tests.support.runs.service_folder import device, job, snapshot, write
from windfall import run_folder as folders
from windfall.errors import WindfallError
from windfall.jobs.views import table
from windfall.run import cli


def shown(what: RenderableType, width: int = 200) -> str:
    out = Console(width=width, highlight=False)
    with out.capture() as captured:
        out.print(what)
    return captured.get()


def test_jobs_and_devices_in_one_table() -> None:
    jobs = {
        "a": job(share=2.0, max_usd=40.0),
        "b": job("queued", priority=3, waiting_for="one of 4 places", step=0),
        "c": job("over_budget", reason="it has spent $5.0000, and may spend $5"),
    }
    devices = {"gpu0": device("a", "train", 25.0, a=50.0, c=25.0), "gpu1": device(idle_s=10.0)}
    lines = shown(table.table(snapshot(jobs, devices), now_s=time.time())).splitlines()
    assert lines[0].rstrip() == "jobs: 1 running, 1 queued, 1 over budget; bill: $3.00, of which $1.00 idle"
    rows = {line.split()[0]: line.split() for line in lines[1:]}
    assert rows["a"] == ["a", "running", "2", "3/10", "1,234", "2m05s", "50s", "0.50", "of", "40.00"]
    assert rows["b"][1:5] == ["queued", "1", "(priority", "3)"]
    assert "one of 4 places" in " ".join(rows["b"])
    assert rows["c"][1:3] == ["over", "budget"]
    assert rows["gpu0"] == ["gpu0", "a", "trains", "25.0%", "a", "50.0%,", "c", "25.0%"]
    assert rows["gpu1"] == ["gpu1", "idle", "100.0%", "-"]


def test_what_the_token_of_a_job_shows() -> None:
    """No devices, no bill of the machines, no other job."""
    text = shown(table.table({"time_s": time.time(), "jobs": {"a": job()}}))
    assert text.splitlines()[0].rstrip() == "jobs: 1 running"
    assert len(text.splitlines()) == 3


def test_ended_jobs_that_are_left_out_are_counted() -> None:
    jobs = {f"j{n}": job("done", ended_s=float(n)) for n in range(20)} | {"now": job()}
    text = shown(table.table(snapshot(jobs), ended=8))
    assert "12 jobs that ended earlier are not shown" in text
    assert "j11 " not in text
    assert "j12 " in text
    assert "now " in text
    assert "j0 " in shown(table.table(snapshot(jobs)))


def test_one_job() -> None:
    now = time.time()
    late = job(deadline=now + 5.0, eta_s=125.0, max_usd=4.0)
    devices = {"gpu0": device(a=60.0), "gpu1": device(a=30.0, b=9.0), "gpu2": device(b=1.0)}
    text = shown(table.one("a", late, devices))
    assert "(predicted to end 2m00s after its deadline)" in text or "1m59s after" in text
    assert "1m30s (gpu0 1m00s, gpu1 30s)" in text
    assert "0.50 of 4.00" in text
    assert "deadline" not in shown(table.one("a", job(deadline=0.0)))
    assert "after its deadline" not in shown(table.one("a", job(deadline=now + 500.0)))


def test_text_of_a_job_moves_no_cursor_and_is_no_markup() -> None:
    hostile = "\x1b[2J[red]gone[/]\r\n\x07"
    jobs = {"a": job("failed", reason=hostile)}
    for text in (shown(table.table(snapshot(jobs))), shown(table.one("a", jobs["a"]))):
        assert not set(text) & set("\x1b\r\x07")
        assert "?[2J[red]gone[/]" in text


def test_a_service_that_does_not_run_is_said(tmp_path: Path) -> None:
    write(tmp_path, snapshot({"a": job()}, time_s=time.time() - 125))
    assert table.is_service(tmp_path)
    text = shown(table.of_folder(tmp_path))
    assert "as of 2m05s ago: the service does not run; continue its jobs with `windfall up`" in text
    write(tmp_path, snapshot({"a": job()}))
    assert "does not run" not in shown(table.of_folder(tmp_path))


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_file_of_a_service(tmp_path: Path, how: str) -> None:
    write(tmp_path, snapshot({"a": job()}))
    damage(tmp_path / "jobs.json", how)
    with pytest.raises(WindfallError, match="damaged or cannot be read"):
        table.of_folder(tmp_path)
    with pytest.raises(WindfallError, match=r"damaged or cannot be read|no recipe\.toml"):
        cli.top(tmp_path, as_json=True)


def test_top_as_json_of_a_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = snapshot({"a": job()}, {"m/gpu0": device("a", "train", 1.0, a=2.0)})
    write(tmp_path, state)
    cli.top(tmp_path, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"live": False, **state}
    with folders.owned(tmp_path, "service"):
        cli.top(tmp_path, as_json=True)
    assert json.loads(capsys.readouterr().out)["live"] is True


@pytest.mark.parametrize(
    "value", [{}, {"jobs": []}, {"jobs": {"a": 1}, "devices": {}}, {"jobs": {}, "devices": {"g": 1}}]
)
def test_json_that_no_service_wrote(tmp_path: Path, value: dict[str, Any]) -> None:
    write(tmp_path, value)
    with pytest.raises(WindfallError, match="damaged or cannot be read"):
        table.of_folder(tmp_path)


def test_twenty_jobs_fit_into_a_narrow_terminal() -> None:
    jobs = {f"experiment-{n}": job(reason="x" * 300) for n in range(20)}
    devices = {f"gpu{n}": device("experiment-1", "rollout", 1.0, **dict.fromkeys(jobs, 1.0)) for n in range(8)}
    lines = shown(table.table(snapshot(jobs, devices)), width=100).splitlines()
    assert max(map(len, lines)) <= 100
    assert sum(line.startswith("experiment-") for line in lines) == 20
    assert "16 others 76.2%" in shown(table.table(snapshot(jobs, devices)))
