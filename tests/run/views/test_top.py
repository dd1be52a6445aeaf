"""The table of the fleet: for a run in progress, and for one that finished, stopped or was killed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.hostile.files import DAMAGES, damage
from windfall.errors import WindfallError
from windfall.run.views import top
from windfall.run_folder import owned


def worker(name: str, state: str, **more: Any) -> dict[str, Any]:
    plain = {
        "worker": name, "kind": "spot", "device": "NVIDIA H200", "engine": "vllm 0.23.0", "region": "",
        "price_usd_per_h": 0.0, "state": state,
        "version": 3, "running": 5, "slots": 8, "tok_per_s": 1234.5, "made": 98765, "moved": 2, "age_s": 61.0,
        "why": "",
    }  # fmt: skip
    return plain | more


def snapshot(**more: Any) -> dict[str, Any]:
    counts = {"moved": 4, "accepted": 1000, "repeated": 1, "late": 2}
    plain = {
        "t": time.time(), "run": "r", "step": 3, "steps": 9, "version": 3, "ended": False, "queued": 7, "open": 12,
        "lost": 1, "counts": counts,
        "workers": [worker("a", "ready"), worker("[b]", "gone", why="connection lost")],
    }  # fmt: skip
    return plain | more


def shown(fleet: dict[str, Any], *, live: bool, width: int = 200) -> str:
    out = Console(width=width, record=True, highlight=False)
    with out.capture() as captured:
        out.print(top.table(fleet, live=live, run=Path("runs/r")))
    return captured.get()


def test_narrow_terminal_cuts_the_reason_first() -> None:
    why = "no heartbeat for 8 s; the link was closed by the machine of the worker"
    workers = [worker("w1.1", "ready", price_usd_per_h=3.29), worker("w2.1", "gone", why=why)]
    lines = shown(snapshot(workers=workers), live=True, width=120).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("worker "))
    assert lines[start].split() == list(top.COLUMNS)
    assert max(map(len, lines[start:])) <= 120
    assert "spot $3.29/h" in lines[start + 1]


def test_present_workers_come_before_gone_ones() -> None:
    text = shown(snapshot(), live=True)
    assert "r: step 3/9, version 3, running\n" in text
    assert (
        "workers: 1 in the fleet, 1 lost; responses: 12 open, 7 queued, 4 moved; "
        "tokens: 1,000 accepted since the controller started, 3 twice" in text
    )
    present, gone = text.splitlines()[3:5]
    assert present.split() == [
        "a",
        "spot",
        "NVIDIA",
        "H200",
        "vllm",
        "0.23.0",
        "ready",
        "3",
        "5/8",
        "1,234",
        "98,765",
        "2",
        "1m01s",
    ]
    assert gone.split() == [
        "[b]",
        *present.split()[1:6],
        "gone",
        "3",
        "-",
        "-",
        *present.split()[-3:],
        "connection",
        "lost",
    ]


STALENESS = {
    "bound": 2, "mean": 0.44, "max": 1, "too_old": 3, "too_old_tokens": 1204, "held_s": 0.41, "train_wait_s": 1.2,
}  # fmt: skip


def test_staleness_of_the_last_step_is_shown() -> None:
    text = shown(snapshot(staleness=STALENESS), live=True)
    assert "\nlast step: stale 0.4 (max 1, bound 2); too old 3 (1,204 tok); waited 1.2 s; held 0.4 s\n" in text
    calm = STALENESS | {"mean": None, "max": 0, "too_old": 0, "too_old_tokens": 0, "held_s": 0.0, "train_wait_s": 0.0}
    assert "last step: nothing was trained\n" in shown(snapshot(staleness=calm), live=True)


def test_synchronous_run_shows_no_staleness() -> None:
    assert "stale" not in shown(snapshot(staleness=None), live=True)


def test_only_the_newest_gone_workers_are_shown() -> None:
    fleet = snapshot(workers=[worker(f"g{i}", "gone") for i in range(50)] + [worker("here", "ready")])
    lines = shown(fleet, live=True).splitlines()[3:]
    assert [line.split()[0] for line in lines] == ["here", *(f"g{i}" for i in range(42, 50))]


@pytest.mark.parametrize(
    ("ended", "word"),
    [("finished", "finished"), ("stopped", "stopped"), ("failed", "failed"), (None, "ended unexpectedly")],
)
def test_ended_run_shows_how_it_ended_and_how_to_resume(ended: str | None, word: str) -> None:
    text = shown(snapshot(t=time.time() - 121, ended=ended), live=False)
    assert f"version 3, {word}, as of 2m0" in text
    assert ("resume with: windfall resume runs/r\n" in text) == (ended != "finished")


def test_age_of_an_old_snapshot_is_shown() -> None:
    assert "running, as of 30s ago" in shown(snapshot(t=time.time() - 30.5), live=True)


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_snapshot_is_reported(tmp_path: Path, kind: str) -> None:
    (tmp_path / "fleet.json").write_text(json.dumps(snapshot()))
    damage(tmp_path / "fleet.json", kind)
    with pytest.raises(WindfallError, match="no fleet.json" if kind == "missing" else "damaged") as caught:
        top.show(tmp_path, once=True)
    assert str(tmp_path) in caught.value.where


def test_show_reads_the_folder_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WindfallError, match=r"no fleet\.json"):
        top.show(tmp_path)
    (tmp_path / "fleet.json").write_text(json.dumps(snapshot()))
    top.show(tmp_path)
    assert "ended unexpectedly" in capsys.readouterr().out
    with owned(tmp_path):
        top.show(tmp_path, once=True)
    assert "version 3, running" in capsys.readouterr().out


def test_graders_are_shown() -> None:
    graders = {"processes": 2, "limit": 8, "queued": 5, "grading": 7, "longest_s": 3.0, "reward_s": 0.5, "errors": 1}
    assert "graders: 2 processes (at most 8), 7 rewards in progress" in shown(snapshot(graders=graders), live=True)
    assert "graders" not in shown(snapshot(graders=None), live=True)


def test_lenders_are_added_up() -> None:
    lender = {"in_use": True, "slots": 3, "state": "frozen", "use": 0.4, "lent": 0.25, "slack_s": None}
    out = shown(snapshot(workers=[worker("[l]", "ready", kind="borrowed", lender=lender)]), live=True)
    assert "lenders: 1 of 1 in use, 3 of 8 slots open, 25% of their time lent" in out
    assert "lenders" not in shown(snapshot(), live=True)
