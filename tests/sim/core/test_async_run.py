"""Whole simulated runs with rollout.staleness above 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Simulated = Callable[..., Any]


def steps_of(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for e in log if (e["kind"], e["name"]) == ("scalar", "step")]


@pytest.mark.parametrize("mode", ["interrupt", "finish"])
@pytest.mark.parametrize("bound", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_bound_holds_and_nothing_is_lost_while_workers_come_and_go(simulated: Simulated, bound: int, mode: str) -> None:
    _, log = simulated(
        run={"steps": 12}, rollout={"staleness": bound, "on_new_weights": mode},
        trace={"mean_up_s": 4.0, "mean_down_s": 1.0},
    )  # fmt: skip
    steps = steps_of(log)
    assert [e["step"] for e in steps] == list(range(1, 13))
    assert all(e["staleness_max"] <= bound and e["lost_tokens"] == 0 for e in steps)
    assert max(e["staleness_max"] for e in steps) > 0, "nothing was generated ahead"
    assert all(sum(e["staleness_counts"]) == e["responses"] for e in steps)
    assert sum(e["workers_lost"] for e in steps) > 5, "too few losses for a meaningful test"
    used = [task for e in steps for task in e["tasks"]]
    assert len(used) == len(set(used)), "a task was trained on twice"


@pytest.mark.slow
def test_generation_ahead_makes_steps_shorter(simulated: Simulated) -> None:
    def seconds(bound: int) -> float:
        log = simulated(run={"steps": 10}, rollout={"staleness": bound}, trace={"mean_up_s": 1e9})[1]
        return sum(e["s"] for e in steps_of(log)[2:])

    assert seconds(2) < 0.9 * seconds(0)


@pytest.mark.parametrize("pipelining", [True, False])
def test_responses_are_fresher_than_the_bound_if_training_is_the_bottleneck(
    simulated: Simulated, pipelining: bool
) -> None:
    """Before, every response was trained on at the bound."""
    machine = {"fixed_s": 0.006, "each_s": 0.00012, "prefill_s": 4e-6, "train_s": 0.006}
    _, log = simulated(
        run={"steps": 28}, rollout={"staleness": 3, "groups": 8, "max_tokens": 40}, fleet={"local": False},
        techniques={"pipelining": pipelining}, trace={"nodes": 2, "mean_up_s": 1e9},
        sim={"granule": 8, "weights_bytes": 1e6, "trainer": machine},
    )  # fmt: skip
    steps = steps_of(log)
    assert {e["staleness_bound"] for e in steps} == {3}
    assert [e["staleness_mean"] for e in steps[3:6]] == [3.0] * 3, "at first, everything that the bound allows is open"
    assert max(e["staleness_mean"] for e in steps[22:25]) <= 1.0
    assert sum(e["train_wait_s"] for e in steps[1:25]) == 0.0


def test_trainers_engine_alone_generates_and_trains(simulated: Simulated) -> None:
    _, log = simulated(run={"steps": 5}, rollout={"staleness": 1}, trace={"nodes": 0})
    assert len(steps_of(log)) == 5
    assert all(e["staleness_max"] <= 1 for e in steps_of(log))


@pytest.mark.parametrize("mode", ["interrupt", "finish"])
def test_generation_goes_on_while_training_waits_for_an_evaluation(simulated: Simulated, mode: str) -> None:
    """With a fixed version, the ledger accepts no token of another one (tests/ledger)."""
    _, log = simulated(
        run={"steps": 12}, rollout={"staleness": 2, "on_new_weights": mode}, eval={"tasks": 16, "every": 4},
        trace={"mean_up_s": 1e9},
    )  # fmt: skip
    results = {e["step"]: e for e in log if (e["kind"], e["name"]) == ("scalar", "eval")}
    assert sorted(results) == [0, 4, 8, 12]
    assert all(e["tasks"] == 16 and e["lengths"] == results[0]["lengths"] for e in results.values())
    steps = {e["step"]: e for e in steps_of(log)}
    assert results[4]["m"] <= steps[5]["m"] - steps[5]["s"], "training waited"
    assert steps[5]["s"] < steps[4]["s"], "groups of the next step were generated meanwhile"
