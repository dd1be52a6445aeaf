"""Runs simulated from their own logs. If the log is itself simulated, the replay must reproduce it. Not covered: the
log of a real run (`python benchmarks/fleet/harvest.py --replay`)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from windfall.errors import WindfallError
from windfall.events import log as events
from windfall.recipe.file import dump_recipe
from windfall.recipe.sections import Recipe
from windfall.run import cli
from windfall.sim.calibrate import event_log
from windfall.sim.core import run, scenario
from windfall.sim.replay import command, recorded_scenario
from windfall.sim.replay import log as replay_log
from windfall.types import LOCAL

Make = Callable[..., tuple[Path, scenario.Scenario]]
QUICK_PULLS = {"weights_bytes": 1e3}


@pytest.fixture(scope="module")
def logs() -> dict[str, bytes]:
    """The event logs of simulated runs that were not disturbed, by recipe: several tests need the same run."""
    return {}


@pytest.fixture
def ran(tmp_path: Path, recipe: Callable[..., Recipe], logs: dict[str, bytes]) -> Make:
    """The folder of a simulated run, as a real run leaves it."""

    def simulate(disturb: Callable[[run.Simulation], None] | None = None, **sections: dict[str, Any]) -> Any:
        full_recipe = recipe(**{"run": {"steps": 6}, **sections})
        built, text, log = scenario.build(full_recipe), dump_recipe(full_recipe), tmp_path / "events.jsonl"
        if disturb is None and text in logs:
            log.write_bytes(logs[text])
        else:
            run.simulate(built, log, disturb=disturb)
        if disturb is None:
            logs[text] = log.read_bytes()
        (tmp_path / "recipe.toml").write_text(text)
        return tmp_path, built

    return simulate


def exactly(folder: Path, built: scenario.Scenario, log: Path) -> list[events.Event]:
    """Simulate the run again with its original formulas, not with fitted ones. The clock is aligned once."""
    was = replay_log.record(folder)
    found = recorded_scenario.fitted(was, "first-half")
    true = {kind: built.trainer if kind == LOCAL else built.worker.service for kind in found.services}
    command._simulate(was, replace(found, services=true, skip=0, reward_s=built.real.sim.reward_s), log)
    return events.read(log)


SAME = ("step", "drawn", "groups", "made", "moved", "prefilled_again", "workers", "workers_lost", "lengths", "replaced")


@pytest.mark.parametrize(
    "sections",
    [
        {"fleet": {"workers": 1}},
        {"sim": {"notice_s": 7.0, **QUICK_PULLS}},
        {"eval": {"tasks": 24, "every": 2}, "checkpoint": {"every": 2}, "sim": {"reward_s": 0.05, **QUICK_PULLS}},
        {"algorithm": {"name": "dapo"}, "sim": {"reward_mean": 0.2, **QUICK_PULLS}},
        {"fleet": {"local": False}},
        {"trace": {"nodes": 0}},
    ],
    ids=["two kinds", "warned", "evaluations", "dynamic sampling", "no local", "alone"],
)
def test_replay_with_the_same_formulas_is_the_same_run(ran: Make, sections: dict[str, Any], tmp_path: Path) -> None:
    folder, built = ran(**{"sim": QUICK_PULLS, **sections})
    was = event_log.steps_of(events.read(folder / "events.jsonl"))
    now = event_log.steps_of(exactly(folder, built, tmp_path / "again.jsonl"))
    assert [{k: e[k] for k in SAME} for e in now] == [{k: e[k] for k in SAME} for e in was]
    assert [e["s"] for e in now] == pytest.approx([e["s"] for e in was], rel=1e-3)
    for holder in was[-1]["bill"]["holders"]:
        for bucket in ("booting", "generating", "waiting", "draining", "paused"):
            spent = [[e["bill"]["holders"][holder]["seconds"].get(bucket, 0.0) for e in log[1:]] for log in (was, now)]
            assert spent[1] == pytest.approx(spent[0], abs=0.02), f"{holder} {bucket}"


def test_frozen_worker_is_frozen_in_the_replay(ran: Make, tmp_path: Path) -> None:
    def disturb(simulation: run.Simulation) -> None:
        def all_workers(method: str) -> None:
            for name, worker in simulation.fleet.workers.items():
                if name != LOCAL:
                    getattr(worker, method)()

        import asyncio

        loop = asyncio.get_running_loop()
        loop.call_later(6.0, all_workers, "freeze")
        loop.call_later(8.0, all_workers, "thaw")

    folder, built = ran(disturb, sim=QUICK_PULLS, trace={"mean_up_s": 1000.0, "mean_down_s": 0.1})
    was = events.read(folder / "events.jsonl")
    assert {"worker_suspect", "worker_well"} <= {e["name"] for e in was}
    now = exactly(folder, built, tmp_path / "again.jsonl")
    rows = [event_log.steps_of(log) for log in (was, now)]
    assert [e["s"] for e in rows[1]] == pytest.approx([e["s"] for e in rows[0]], rel=0.1)


def run_sim(*words: str) -> str:
    done = CliRunner().invoke(cli.app, ["sim", *words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


@pytest.mark.slow
def test_second_half_is_predicted_from_the_first(ran: Make, tmp_path: Path) -> None:
    folder, _ = ran(run={"steps": 8})
    out = run_sim("--replay", str(folder), "--out", str(tmp_path / "out"))
    assert "fitted to steps 1 to 4; figures of steps 5 to 8, held out" in out
    result = json.loads((tmp_path / "out" / "replay.json").read_text())
    for name in ("tok_per_s", "step_mean_s", "tok_per_usd", "workers_there"):
        assert abs(result["figures"][name]["error"]) < 0.05, name
    for name in ("trainer_idle", "workers_idle", "workers_lost"):
        assert abs(result["figures"][name]["error"]) < 0.08, name
    assert result["figures"]["killed"]["predicted"] == result["figures"]["killed"]["measured"] > 0
    assert [row["step"] for row in result["steps"]] == [5, 6, 7, 8]
    assert (tmp_path / "out" / "replay.jsonl").is_file()
    assert "not a prediction" in run_sim("--replay", str(folder), "--fit", "all")


def test_machines_that_became_slower_are_reported(ran: Make) -> None:
    folder, _ = ran()
    done = command.replay(folder)
    assert command.drift(done) == []
    log = [dict(e) for e in done.record.events]
    for e in log:
        if (e["kind"], e["name"]) == ("span", "train") and e["step"] > done.fitted.steps:
            e |= {"s": 2 * e["s"], "asked_s": 2 * e["asked_s"], "update_s": 2 * e["update_s"]}
    slower = replace(done, record=replace(done.record, events=log))
    assert [what for what, _ in command.drift(slower)] == ["training"]
    assert "training took 2.0" in "\n".join(command.notes(slower))


def test_run_that_died_is_replayed_up_to_its_last_step(ran: Make) -> None:
    folder, _ = ran(run={"steps": 8})
    log = folder / "events.jsonl"
    lines = log.read_text().splitlines()
    seventh = next(n for n, line in enumerate(lines) if '"name":"step","step":7' in line)
    log.write_text("\n".join(lines[: seventh + 3]) + '\n{"t": 17')
    assert "figures of steps 4 to 7" in run_sim("--replay", str(folder))


@pytest.mark.parametrize("steps", [2, 5])
def test_too_few_steps_for_a_prediction_are_rejected(ran: Make, steps: int) -> None:
    folder, _ = ran(run={"steps": steps})
    with pytest.raises(WindfallError, match=f"the run completed {steps} steps, and a prediction needs 6: 3 to fit"):
        run_sim("--replay", str(folder))
    assert "not a prediction" in run_sim("--replay", str(folder), "--fit", "all")


def test_prediction_reports_its_confidence(ran: Make, tmp_path: Path) -> None:
    """The more single steps differ from the fitted formulas, the wider the interval."""
    folder, _ = ran(run={"steps": 8})
    calm = command.replay(folder)
    assert abs(calm.rows()["tok_per_s"][2] or 0.0) < calm.error_bound < 0.3
    uneven = replace(calm, fitted_to=tuple((1.0, measured_s) for measured_s in (0.8, 1.1, 1.0, 1.3)))
    assert uneven.error_bound > 2 * calm.error_bound
    assert uneven.error_bound > math.log(1.3)
    out = run_sim("--replay", str(folder), "--out", str(tmp_path / "out"))
    result = json.loads((tmp_path / "out" / "replay.json").read_text())
    assert result["sure"] == {"level": 0.9, "off": calm.error_bound, "step_off": calm.step_error, "steps": 4}
    low, high = re.findall(
        r"\(([\d,.]+) to ([\d,.]+)\)", next(line for line in out.splitlines() if "tokens/s" in line)
    )[0]
    assert float(low.replace(",", "")) < result["figures"]["tok_per_s"]["measured"] < float(high.replace(",", ""))
    assert "confidence: the 4 fitted steps are off by" in out


def test_replayed_trainer_is_never_lost(ran: Make) -> None:
    folder, _ = ran(sim={"trainer_mean_up_s": 8.0, "trainer_down_s": 1.0, **QUICK_PULLS}, checkpoint={"every": 1})
    was = events.read(folder / "events.jsonl")
    lost = sum(e["name"] == "trainer_lost" for e in was)
    assert lost > 1
    done = command.replay(folder, log=folder / "replay.jsonl")
    assert f"the trainer was lost {lost} times; a replay does not simulate this" in command.notes(done)
    assert not any(e["name"] == "trainer_lost" for e in events.read(folder / "replay.jsonl"))
    assert len(done.predicted.step_s) == len(done.measured.step_s)


def test_run_that_cannot_be_replayed_is_rejected(ran: Make, tmp_path: Path) -> None:
    with pytest.raises(WindfallError, match=r"no events\.jsonl"):
        run_sim("--replay", str(tmp_path / "nowhere"))
    with pytest.raises(WindfallError, match="nothing to simulate"):
        run_sim()
    folder, _ = ran()
    with pytest.raises(WindfallError, match="first-half"):
        run_sim("--replay", str(folder), "--fit", "firsthalf")
    with pytest.raises(WindfallError, match="uses the recipe of its run"):
        run_sim("recipe.toml", "--replay", str(folder))
    log = folder / "events.jsonl"
    text = log.read_text()
    log.write_text(text.replace('"lengths"', '"length"'))
    with pytest.raises(WindfallError, match="no response lengths"):
        run_sim("--replay", str(folder))
    log.write_text(text.replace('"age_s"', '"age"'))
    with pytest.raises(WindfallError, match="lacks data that a simulation needs"):
        run_sim("--replay", str(folder))
    log.write_text("\n".join(line for line in text.splitlines() if '"step":1' in line or '"name":"step"' not in line))
    with pytest.raises(WindfallError, match="the run completed 1 steps"):
        run_sim("--replay", str(folder))
    log.write_text(text.replace('"granule":1', '"granule":4'))
    with pytest.raises(WindfallError, match="granules"):
        run_sim("--replay", str(folder))


# reading a log


def test_concurrent_pulls_measure_the_trainers_egress() -> None:
    def ready(worker: str, at_s: float, s: float) -> events.Event:
        return {"name": "worker_ready", "worker": worker, "t": at_s, "s": s, "bytes": 100}

    first = [ready(w, 1.0, 50.0) for w in ("a", "b")]  # includes building the engine: no measurement of the network
    together = [ready(w, 20.0, 4.0) for w in ("a", "b")]
    found = event_log.pulls([*first, *together, ready("a", 40.0, 1.0)], 99.0)
    assert (found.egress_per_s, found.ingress_per_s) == (50.0, 100.0)
    assert event_log.pulls(first, 99.0).ingress_per_s == event_log.UNLIMITED_PER_S


def test_worker_that_joins_again_under_its_id_lost_its_link() -> None:
    """This happens after a killed controller, which does not log the workers that it loses."""

    def event(name: str, at_s: float, **more: Any) -> events.Event:
        return {"t": at_s, "kind": "instant", "name": f"worker_{name}", "worker": "a", **more}

    joined = {"lease": "spot", "device": "L4", "usd_per_h": None, "age_s": 2.0}
    log = [event("joined", 1.0, **joined), event("ready", 3.0, slots=8), event("ready", 4.0, slots=9)]
    log += [event("joined", 9.0, **joined), event("suspect", 14.0), event("well", 15.0)]
    log += [event("left", 20.0, why="left: the run is over")]
    first, second = replay_log.recorded_workers(log, suspect_s=3.0)
    assert (first.ready_s, first.slots, first.lease.price_usd_per_h) == (2.0, 8, 0.0)
    assert [(d.at_s, d.what) for d in first.incidents] == [(9.0, "killed")]
    assert [(d.at_s, d.what) for d in second.incidents] == [(11.0, "frozen"), (15.0, "thawed")]
    assert second.ready_s == math.inf


def test_training_time_is_separate_from_the_update() -> None:
    log: list[events.Event] = []
    for n, (tokens, early_s) in enumerate([(1000, 2.0), (3000, 4.0)], 1):
        span = {
            "kind": "span",
            "name": "train",
            "early_s": early_s - 0.5,
            "asked_s": early_s,
            "update_s": 1.0,
            "s": 3.0,
        }
        log += [span | {"step": n}, {"kind": "scalar", "name": "step", "step": n, "trained": tokens}]
    found = event_log.training(log, [1, 2])
    assert found == event_log.TrainingTimes(train_s=(2.0 + 4.0 + 2 * 2.0) / 4000, update_s=1.0)
    assert event_log.training(log, []) is None


def test_unmeasured_kind_is_assumed_to_be_like_others(ran: Make) -> None:
    folder, _ = ran()
    was = replay_log.record(folder)
    last = replace(was.workers[-1], lease=replace(was.workers[-1].lease, price_usd_per_h=7.0))
    found = recorded_scenario.fitted(replace(was, workers=(*was.workers, last)), "first-half")
    assert found.services["spot simulated at $7.00/h"] == found.services["spot simulated at $5.00/h"]
    assert "nothing measured" in found.notes[0]
