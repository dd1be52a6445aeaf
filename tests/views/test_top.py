"""The fleet as a table: of a run in progress, and of one that ended, in order or not."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hostile.files import DAMAGES, damage
from rich.console import Console

from windfall.errors import WindfallError
from windfall.run_folder import owned
from windfall.views import top


def worker(name: str, state: str, **more: Any) -> dict[str, Any]:
    plain = {
        "worker": name, "kind": "spot", "device": "NVIDIA H200", "region": "", "price_usd_per_h": 0.0, "state": state,
        "version": 3, "running": 5, "slots": 8, "tok_per_s": 1234.5, "made": 98765, "moved": 2, "age_s": 61.0,
        "why": "",
    }  # fmt: skip
    return plain | more


def said(**more: Any) -> dict[str, Any]:
    counts = {"moved": 4, "accepted": 1000, "repeated": 1, "late": 2}
    plain = {
        "t": time.time(), "run": "r", "step": 3, "steps": 9, "version": 3, "ended": False, "queued": 7, "open": 12,
        "lost": 1, "counts": counts, "workers": [worker("a", "ready"), worker("[b]", "gone", why="connection lost")],
    }  # fmt: skip
    return plain | more


def shown(fleet: dict[str, Any], *, live: bool) -> str:
    out = Console(width=200, record=True, highlight=False)
    with out.capture() as captured:
        out.print(top.table(fleet, live=live, run=Path("runs/r")))
    return captured.get()


def test_who_is_here_and_who_was() -> None:
    text = shown(said(), live=True)
    assert "r: step 3/9, version 3, running\n" in text
    assert (
        "1 workers here, 1 lost; 12 responses open, 7 queued, 4 moved; tokens: 1,000 accepted, 3 generated twice"
        in text
    )
    here, gone = text.splitlines()[3:5]
    assert here.split() == ["a", "spot", "NVIDIA", "H200", "ready", "3", "5/8", "1,234", "98,765", "2", "1m01s"]
    assert gone.split() == ["[b]", *here.split()[1:4], "gone", "3", "-", "-", *here.split()[-3:], "connection", "lost"]


def test_only_the_newest_of_those_that_are_gone() -> None:
    fleet = said(workers=[worker(f"g{i}", "gone") for i in range(50)] + [worker("here", "ready")])
    lines = shown(fleet, live=True).splitlines()[3:]
    assert [line.split()[0] for line in lines] == ["here", *(f"g{i}" for i in range(42, 50))]


@pytest.mark.parametrize(
    ("ended", "word"),
    [("finished", "finished"), ("stopped", "stopped"), ("failed", "ended by an error"), (None, "ended without a word")],
)
def test_a_run_that_is_over(ended: str | None, word: str) -> None:
    text = shown(said(t=time.time() - 121, ended=ended), live=False)
    assert f"version 3, {word}, as of 2m0" in text
    assert ("go on with: windfall resume runs/r\n" in text) == (ended != "finished")


def test_a_silent_controller_shows() -> None:
    assert "running, as of 30s ago" in shown(said(t=time.time() - 30.5), live=True)


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_fleet_is_named(tmp_path: Path, kind: str) -> None:
    (tmp_path / "fleet.json").write_text(json.dumps(said()))
    damage(tmp_path / "fleet.json", kind)
    with pytest.raises(WindfallError, match="no fleet has been" if kind == "missing" else "damaged") as caught:
        top.show(tmp_path, once=True)
    assert str(tmp_path) in caught.value.where


def test_reads_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WindfallError, match="no fleet has been written down"):
        top.show(tmp_path)
    (tmp_path / "fleet.json").write_text(json.dumps(said()))
    top.show(tmp_path)
    assert "ended without a word" in capsys.readouterr().out
    with owned(tmp_path):
        top.show(tmp_path, once=True)
    assert "version 3, running" in capsys.readouterr().out
