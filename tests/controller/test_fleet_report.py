"""What fleet.json says about staleness, and that `windfall top` reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from windfall.controller.cost.bill import Gathering, Totals
from windfall.controller.fleet_report import FleetReport, read_history
from windfall.controller.rollout.dispatch import Dispatch
from windfall.events.log import Clock, EventLog
from windfall.link.messages import Capacity, Stats
from windfall.recipe.file import parse_recipe
from windfall.run.views import top
from windfall.types import Lease

STEP = {
    "staleness_mean": 0.44, "staleness_max": 1, "staleness_counts": [5, 4], "too_old": 3, "too_old_tokens": 1204,
    "held_s": 0.41, "train_wait_s": 1.2,
}  # fmt: skip
SHOWN = {
    "bound": 2, "counts": [5, 4], "mean": 0.44, "max": 1, "too_old": 3, "too_old_tokens": 1204, "held_s": 0.41,
    "train_wait_s": 1.2,
}  # fmt: skip


@contextmanager
def report(folder: Path, *, staleness: int) -> Iterator[FleetReport]:
    events = EventLog(folder / "events.jsonl")
    recipe = parse_recipe({"rollout": {"staleness": staleness}}, where="here")
    yield FleetReport(recipe, Dispatch(events=events), events)
    events.close()


def written(fleet: FleetReport) -> dict[str, Any]:
    """The snapshot as the file has it: strict JSON."""
    return json.loads(json.dumps(fleet.snapshot(steps={"": 3}, now_s=1.0, ended=None), allow_nan=False))


def test_snapshot_has_the_staleness_of_the_last_step(tmp_path: Path) -> None:
    with report(tmp_path, staleness=2) as fleet:
        assert written(fleet)["staleness"] is None  # before the first step
        fleet.counters(None, 1.0, STEP)
        assert written(fleet)["staleness"] == SHOWN
        fleet.counters(None, 1.0, {**STEP, "staleness_max": 2, "too_old": 0})
        assert written(fleet)["staleness"] == SHOWN | {"max": 2, "too_old": 0}


@pytest.mark.parametrize("set_s", [0.0, -7200.0, 3600.0 * 24])
@pytest.mark.parametrize("when", ["before the last bill", "after it", "while no controller runs"])
def test_time_that_is_billed_does_not_depend_on_the_wall_clock(tmp_path: Path, set_s: float, when: str) -> None:
    """The wall clock is set at some moment. A controller is killed after its last bill, and the next one must neither
    bill that time again nor leave out what follows."""
    wall, elapsed_s = 1.7e9, 500.0

    def passes(s: float, moment: str) -> None:
        nonlocal wall, elapsed_s
        wall, elapsed_s = wall + s + set_s * (moment == when), elapsed_s + s

    clock = Clock(wall=lambda: wall, monotonic=lambda: elapsed_s)
    log = EventLog(tmp_path / "events.jsonl", clock=clock)
    log.instant("start")
    passes(10.0, "before the last bill")
    log.scalar("step", step=1, bill={"holders": {}})
    passes(10.0, "after it")
    log.instant("activity")
    log.close()
    passes(30.0, "while no controller runs")
    log = EventLog(tmp_path / "events.jsonl", clock=clock)
    assert read_history(log).billed_s == pytest.approx(510.0)
    log.close()


@pytest.mark.parametrize("mean", [float("nan"), None])
def test_step_without_trained_responses_has_no_mean(tmp_path: Path, mean: float | None) -> None:
    with report(tmp_path, staleness=2) as fleet:
        fleet.counters(None, 1.0, {**STEP, "staleness_mean": mean})
        assert written(fleet)["staleness"] == SHOWN | {"mean": None}


def test_synchronous_run_has_no_staleness(tmp_path: Path) -> None:
    with report(tmp_path, staleness=0) as fleet:
        fleet.counters(None, 1.0, {"train_wait_s": 1.0})
        assert written(fleet)["staleness"] is None


def test_top_reads_the_snapshot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with report(tmp_path, staleness=2) as fleet:
        fleet.counters(None, 1.0, STEP)
        (tmp_path / "fleet.json").write_text(json.dumps(fleet.snapshot(steps={"": 3}, now_s=1.0, ended=None)))
    top.show(tmp_path, once=True)
    line = "stale 0.4 (max 1, bound 2); too old 3 (1,204 tok); waited 1.2 s; held 0.4 s"
    assert f"last step: {line}" in capsys.readouterr().out


def test_drafts_are_shown_if_there_were_any(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with report(tmp_path, staleness=0) as fleet:
        members = fleet._dispatch.members
        members.join("a", Lease(), 0.0)
        stats = Stats(running=1, made=0, steps=0, idle_s=0.0)
        members.seen("a", 0.0, stats)
        members.seen("a", 1.0, msgspec.structs.replace(stats, made=100))
        quiet = fleet.counters(None, 1.0, {"train_wait_s": 0.0})
        assert "drafted" not in quiet
        assert written(fleet)["drafts"] == {}
        measured = {"decode_s": 4.0, "undrafted_s": 5.0}
        members.seen("a", 2.0, msgspec.structs.replace(stats, made=242, drafted=100, accepted=42, **measured))
        step = fleet.counters(None, 2.0, {"train_wait_s": 0.0})
        shown = ("drafted", "drafts_accepted", "tokens_per_step", "drafts_gain")
        assert [step[key] for key in shown] == [100, 42, 1.42, 1.25]
        assert "drafted" not in fleet.counters(None, 3.0, {"train_wait_s": 0.0}), "nothing since"
        (tmp_path / "fleet.json").write_text(json.dumps(fleet.snapshot(steps={"": 3}, now_s=1.0, ended=None)))
    top.show(tmp_path, once=True)
    line = "drafts: 1.21 tokens per step, 42% of 100 accepted, 1.25x as fast as without"
    assert line in capsys.readouterr().out


def test_gathering_is_in_the_bill_and_in_the_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with report(tmp_path, staleness=0) as fleet:
        accounts = fleet._dispatch.accounts
        accounts.join(0.0, "a", kind="spot", usd_per_h=360.0)
        accounts.gathered(Gathering(moves=3, released=1, freed_s=9.0, sooner_s=4.0))
        bill = msgspec.convert(fleet.counters(None, 1.0, {"train_wait_s": 0.0})["bill"], Totals)
        assert bill.gathering == Gathering(moves=3, released=1, freed_s=9.0, sooner_s=4.0, usd=0.4)
        bill = msgspec.convert(fleet.bill(2.0)["bill"], Totals)
        assert bill.gathering == Gathering(), "nothing since"
        (tmp_path / "fleet.json").write_text(json.dumps(fleet.snapshot(steps={"": 3}, now_s=1.0, ended=None)))
    top.show(tmp_path, once=True)
    saved = "3 moves saved about 4.0 s and $0.40, and released a worker for 9.0 s"
    assert f"advice: gathering the last responses pays: {saved}" in capsys.readouterr().out


def test_step_has_what_engines_evicted_and_restored(tmp_path: Path) -> None:
    with report(tmp_path, staleness=0) as fleet:
        fleet._dispatch.members.join("a", Lease(), 0.0)
        steps = []
        for now, (evictions, restored) in enumerate([(0, 0), (3, 700), (3, 900)]):
            stats = Stats(running=1, made=0, steps=0, idle_s=0.0, evictions=evictions, kv_restored=restored)
            fleet._dispatch.members.seen("a", float(now), stats)
            step = fleet.counters(None, float(now), {"train_wait_s": 0.0})
            steps.append((step["evictions"], step["kv_restored"]))
        assert steps == [(0, 0), (3, 700), (0, 200)]


def test_snapshot_has_what_lenders_reported(tmp_path: Path) -> None:
    with report(tmp_path, staleness=0) as fleet:
        members = fleet._dispatch.members
        member = members.join("l", Lease(kind="borrowed", device="cpu"), 0.0, lends=True)
        assert "lender" not in written(fleet)["workers"][0]
        member.slots, member.capacity = 8, Capacity(slots=3, state="pressure", use=0.5, lent=0.1, slack_s=0.2)
        reported = {"in_use": False, "slots": 3, "state": "pressure", "use": 0.5, "lent": 0.1, "slack_s": 0.2}
        assert written(fleet)["workers"][0]["lender"] == reported
