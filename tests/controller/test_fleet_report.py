"""What fleet.json says about staleness, and that `windfall top` reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from windfall.controller.cost.bill import Gathering, Totals
from windfall.controller.fleet_report import FleetReport, read_history
from windfall.controller.rollout.advisor import Advisor
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.scheduling.local_time import StepMeasurement
from windfall.controller.workers.versions import Offer, PolicyVersions
from windfall.controller.workers.worker_value import WorkerAdvice
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


ADAPTER = {"lora": {"rank": 4}}
MEASURED = StepMeasurement(
    tokens=1000,
    local_s=0.0,
    local_tokens=0,
    train_s=5.0,
    train_wait_s=1.0,
    remote_wait_s=0.0,
    remote_s=5.0,
    workers=1.0,
)


class Advised(Advisor):
    """Keeps the steps that it gets."""

    got: list[StepMeasurement]

    def step(self, last: StepMeasurement, now_s: float, held_s: float = 0.0) -> dict[str, WorkerAdvice]:
        self.got = [*getattr(self, "got", []), last]
        return {}


@contextmanager
def several(folder: Path, policies: dict[str, Any]) -> Iterator[FleetReport]:
    events = EventLog(folder / "events.jsonl")
    recipe = parse_recipe({"policies": policies, "rollout": {"staleness": 2}}, where="here")
    versions = [PolicyVersions(name, base, 2) for base, names in recipe.bases().items() for name in names]
    dispatch = Dispatch(events=events, versions=versions)
    yield FleetReport(recipe, dispatch, events, Advised)
    events.close()


def advised(fleet: FleetReport, story: list[tuple[str, StepMeasurement]]) -> list[StepMeasurement]:
    for n, (policy, last) in enumerate(story):
        fleet.counters(last, 10.0 + n, STEP, policy)
    assert isinstance(fleet._advisor, Advised)
    return fleet._advisor.got


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
    saved = "saved about 4.0 s and $0.40 (3 moves), and released a worker for 9.0 s"
    assert f"advice: moving the last responses of steps together {saved}" in capsys.readouterr().out


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


def test_snapshot_has_every_policy(tmp_path: Path) -> None:
    with several(tmp_path, {"solver": ADAPTER, "verifier": ADAPTER, "old": {"frozen": True}}) as fleet:
        fleet._dispatch.versions["verifier"].advance(Offer(version=4, digest="d"))
        fleet._dispatch.members.join("a", Lease(), 0.0, base="solver", policies=("solver", "verifier", "old"))
        fleet.counters(None, 1.0, {**STEP, "train_wait_s": 2.5}, "verifier")
        shown = json.loads(json.dumps(fleet.snapshot(steps={"solver": 3, "verifier": 4}, now_s=1.0, ended=None)))
    policies = shown["policies"]
    assert [(name, p["step"], p["version"]) for name, p in policies.items()] == [
        ("solver", 3, None), ("verifier", 4, 4), ("old", None, None),
    ]  # fmt: skip
    assert policies["verifier"]["staleness"] == SHOWN | {"train_wait_s": 2.5}
    assert policies["verifier"]["train_wait_s"] == 2.5
    assert policies["solver"]["staleness"] is None
    assert (shown["step"], shown["staleness"]) == (3, None), "those of the lead"
    (worker,) = shown["workers"]
    assert (worker["base"], worker["versions"]) == ("solver", {"solver": -1, "verifier": -1, "old": -1})


def test_advice_follows_from_the_trainer_that_waits_least(tmp_path: Path) -> None:
    """Two policies of full weights. The verifier's trainer is busy, so more workers would only wait."""
    busy, waits = replace(MEASURED, train_s=9.0), replace(MEASURED, train_wait_s=6.0, tokens=500)
    with several(tmp_path, {"solver": {}, "verifier": {}}) as fleet:
        got = advised(fleet, [("solver", waits), ("verifier", busy), ("solver", waits), ("solver", waits)] * 2)
    first, *later = got
    assert first.train_wait_s == 6.0, "nothing is known of the verifier yet"
    assert [m.train_s for m in later] == [9.0, 9.0]
    assert [m.tokens for m in later] == [1500, 2500], "those of both policies since its last step"


def test_advice_follows_the_others_when_a_policy_is_done(tmp_path: Path) -> None:
    waits = replace(MEASURED, train_wait_s=6.0)
    with several(tmp_path, {"solver": {}, "verifier": {}}) as fleet:
        fleet.counters(MEASURED, 1.0, STEP, "solver", done=True)
        assert [m.train_wait_s for m in advised(fleet, [("verifier", waits)] * 2)] == [1.0, 6.0, 6.0]


def test_trainer_of_two_policies_does_not_wait_while_it_trains_the_other(tmp_path: Path) -> None:
    """Adapters on one base: each waits for as long as the other is trained, and the trainer hardly waits."""
    each = replace(MEASURED, train_s=5.0, train_wait_s=6.0)
    with several(tmp_path, {"solver": ADAPTER, "verifier": ADAPTER}) as fleet:
        got = advised(fleet, [("solver", each), ("verifier", each)] * 4)
    assert {(m.train_s, m.train_wait_s, m.tokens) for m in got[1:]} == {(10.0, 1.0, 2000)}
