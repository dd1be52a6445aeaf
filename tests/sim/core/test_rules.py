"""Rules in whole simulated runs: speeds are learned, and the local time follows the fleet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.papers import rlboost
from windfall.controller.assembly import Rules
from windfall.controller.scheduling import local_time as offload
from windfall.step_time import StepTime

Simulated = Callable[..., Any]
LONG = {
    "median_tokens": 480.0, "granule": 15, "prompt_tokens": 30,
    "trainer": {"fixed_s": 0.004, "each_s": 5e-6, "context_s": 1e-7, "prefill_s": 5e-6, "train_s": 0.00003},
    "worker": {"fixed_s": 0.004, "each_s": 2e-5, "context_s": 4e-7, "prefill_s": 2e-5},
}  # fmt: skip
ROLLOUT = {"groups": 24, "group_size": 8, "max_tokens": 2000}


def test_speeds_are_learned_despite_granules_and_context(simulated: Simulated) -> None:
    """Reading a response's KV cache takes most of the time: with the batch size alone, equal workers look different."""
    done, _ = simulated(
        run={"steps": 4}, rollout=ROLLOUT, train={"micro_tokens": 8000}, sim=LONG, trace={"nodes": 0},
        fleet={"workers": 3, "heartbeat_s": 0.3},
    )  # fmt: skip
    devices, granule = done.dispatch.placement.speeds._devices, 15
    for device, name in (("simulated", "worker"), ("simulated trainer of the trainer", "trainer")):
        true, found = StepTime(**LONG[name]), devices[device].fitted
        assert found is not None
        assert found.fixed_s / granule == pytest.approx(true.fixed_s, rel=0.15)
        assert found.context_s / granule / granule == pytest.approx(true.context_s, rel=0.15)
        assert found.each_s / granule < 2 * true.each_s


@pytest.mark.slow
def test_local_time_is_recomputed_when_a_worker_joins(simulated: Simulated, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("".join(f"{at_ms},add,n{at_ms}\n" for at_ms in range(0, 40_000, 2500)))
    _, log = simulated(run={"steps": 5}, trace={"file": str(trace), "nodes": 16}, rollout=ROLLOUT, sim=LONG)
    plans: dict[int, list[int]] = {}
    for event in log:
        if event["name"] == "plan":
            plans.setdefault(event["step"], []).append(event["others"])
    assert any(len(set(others)) > 1 for others in plans.values())


@pytest.mark.parametrize("rules", [Rules(), *rlboost.RULES.values()], ids=["own", *rlboost.RULES])
def test_nothing_is_lost_under_any_rules(simulated: Simulated, rules: Rules) -> None:
    churn = {"mean_up_s": 4.0, "mean_down_s": 1.0}
    done, log = simulated(run={"steps": 3}, trace=churn, rules=rules)
    steps = [e for e in log if (e["kind"], e["name"]) == ("scalar", "step")]
    assert [e["responses"] for e in steps] == [64] * 3
    assert sum(e["made"] for e in steps) == done.token_schedule.real_tokens
    assert sum(e["workers_lost"] for e in steps) > 0, "too few losses for a meaningful test"


def late(folder: Path, at_s: float, nodes: int) -> dict[str, Any]:
    """A fleet whose machines all come up at this time and stay."""
    trace = folder / "late.csv"
    trace.write_text("".join(f"{round(at_s * 1000)},add,n{n}\n" for n in range(nodes)))
    return {"file": str(trace), "nodes": nodes}


@pytest.mark.slow
def test_late_fleet_is_part_of_the_plan_of_the_step_it_joins_in(simulated: Simulated, tmp_path: Path) -> None:
    """Nothing is known about these workers when they join. Planning only at the next step would mean generating and
    training in turn."""
    trace = late(tmp_path, 40.0, 6)
    sections = {"run": {"steps": 6}, "rollout": ROLLOUT, "sim": LONG, "train": {"micro_tokens": 8000}}
    _, log = simulated(**sections, trace=trace)
    step = next(e["step"] for e in log if e["name"] == "plan" and e["others"])
    assert step > 1, "the trainer's own rates are known by then"
    plans = [e["seed_s"] for e in log if e["name"] == "plan" and e["step"] == step]
    assert plans[-1] is not None
    assert plans[-1] > 0


@pytest.mark.slow
def test_first_local_time_is_as_good_as_the_best_constant(
    simulated: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is learned in the first step, and the fleet joins in the middle of it. With the same average number of
    workers present all the time, groups would complete at other times."""
    trace, trainer = late(tmp_path, 6.0, 12), LONG["trainer"] | {"train_s": 0.0001}
    sections = {"run": {"steps": 2}, "rollout": ROLLOUT, "sim": LONG | {"trainer": trainer}, "trace": trace}

    def second_s() -> float:
        _, log = simulated(**sections, train={"micro_tokens": 8000})
        return next(e["s"] for e in log if (e["kind"], e["name"]) == ("scalar", "step") and e["step"] == 2)

    own_s, constant_s = second_s(), list[float]()
    for local_s in (3.0, 4.5, 6.0):
        monkeypatch.setattr(
            offload.PredictedLocalTime, "replan", lambda self, others, now, s=local_s: planned(others, s)
        )
        constant_s.append(second_s())
    assert own_s <= 1.03 * min(constant_s) < max(constant_s)


def planned(others: offload.RemoteFleet, local_s: float) -> offload.LocalPlan:
    return offload.LocalPlan(local_s=local_s, why="", hold=True) if others.workers else offload.GENERATE_ALL
