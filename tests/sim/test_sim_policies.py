"""Policies in whole simulated runs: speeds are learned through granules and context, T_seed follows the fleet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from windfall.sim.service import Service

Simulated = Callable[..., Any]
LONG = {
    "median_tokens": 480.0, "granule": 15, "prompt_tokens": 30,
    "trainer": {"fixed_s": 0.004, "each_s": 5e-6, "context_s": 1e-7, "prefill_s": 5e-6, "train_s": 0.00003},
    "worker": {"fixed_s": 0.004, "each_s": 2e-5, "context_s": 4e-7, "prefill_s": 2e-5},
}  # fmt: skip
ROLLOUT = {"groups": 24, "group_size": 8, "max_tokens": 2000}


def test_speeds_are_learned_through_granules_and_context(simulated: Simulated) -> None:
    """A response's cache takes far more time than the response: over the batch alone, equal workers look unequal."""
    done, _ = simulated(
        run={"steps": 4}, rollout=ROLLOUT, train={"micro_tokens": 8000}, sim=LONG, trace={"nodes": 0},
        fleet={"workers": 3, "heartbeat_s": 0.3},
    )  # fmt: skip
    shapes, granule = done.dispatch.giving.speeds._shapes, 15
    for device, name in (("simulated", "worker"), ("simulated trainer of the trainer", "trainer")):
        true, figures = Service(**LONG[name]), shapes._devices[device].fit
        fixed_s, each_s, behind_s = (f / granule for f in figures)
        assert fixed_s == pytest.approx(true.fixed_s, rel=0.15)
        assert behind_s / granule == pytest.approx(true.context_s, rel=0.15)
        assert each_s < 2 * true.each_s


def test_t_seed_is_computed_again_when_somebody_comes(simulated: Simulated, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("".join(f"{at_ms},add,n{at_ms}\n" for at_ms in range(0, 40_000, 2500)))
    _, log = simulated(run={"steps": 5}, trace={"file": str(trace), "nodes": 16}, rollout=ROLLOUT, sim=LONG)
    plans: dict[int, list[int]] = {}
    for event in log:
        if event["name"] == "plan":
            plans.setdefault(event["step"], []).append(event["others"])
    assert any(len(set(others)) > 1 for others in plans.values())


@pytest.mark.parametrize("techniques", [{"balancing": "algorithm2"}, {"balancing": True}], ids=["algorithm2", "own"])
@pytest.mark.parametrize("offload", ["predict", "feedback", "feedback-no-memory"])
def test_nothing_is_lost_under_any_policy(simulated: Simulated, techniques: dict[str, Any], offload: str) -> None:
    fleet = {"offload": offload, "first_seed_s": 2.0}
    churn = {"mean_up_s": 4.0, "mean_down_s": 1.0}
    done, log = simulated(run={"steps": 3}, trace=churn, techniques=techniques, fleet=fleet)
    steps = [e for e in log if (e["kind"], e["name"]) == ("scalar", "step")]
    assert [e["responses"] for e in steps] == [64] * 3
    assert sum(e["made"] for e in steps) == done.book.real_tokens
    assert sum(e["workers_lost"] for e in steps) > 0, "or this says little"
