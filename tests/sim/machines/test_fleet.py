"""Simulated fleets with several kinds of machines, small KV caches, and workers that are scaled by advice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from windfall.controller.rollout import dispatch
from windfall.controller.rollout.dispatch import Dispatch
from windfall.errors import WindfallError
from windfall.recipe.sections import Recipe
from windfall.sim.core import scenario
from windfall.sim.core.run import Simulation

Simulated = Callable[..., Any]
FAST = {"name": "H200", "worker": {"fixed_s": 0.004, "each_s": 0.0002}, "slots": 32, "price_usd_per_h": 4.0}
SLOW = {"name": "L4", "share": 2, "worker": {"fixed_s": 0.02, "each_s": 0.001}, "slots": 8, "kv_tokens": 900}
STAYS = {"trace": {"nodes": 0}, "fleet": {"workers": 2, "price_usd_per_h": 5.0}}


def steps_of(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for e in log if (e["kind"], e["name"]) == ("scalar", "step")]


def test_fleet_has_several_kinds_of_machines(simulated: Simulated) -> None:
    done, log = simulated(trace={"nodes": 6, "mean_up_s": 60.0, "mean_down_s": 1.0}, sim={"kinds": [FAST, SLOW]})
    joined = [e for e in log if e["name"] == "worker_joined" and e["worker"] != "local"]
    first = {e["worker"].partition(".")[0]: e["device"] for e in joined}
    assert Counter(first.values()) == {"H200": 2, "L4": 4}
    assert all(first[e["worker"].partition(".")[0]] == e["device"] for e in joined), "the kind of a node never changes"
    assert {(e["device"], e["usd_per_h"]) for e in joined} == {("H200", 4.0), ("L4", 5.0)}, "L4 has the trace's price"
    generated: Counter[str] = Counter()
    for member in done.dispatch.members.all.values():
        generated[member.lease.device] += member.generated
    assert generated["H200"] > generated["L4"] > 0
    kinds = {lease.partition(" at ")[0] for e in steps_of(log) for lease in e["speeds"]}
    assert kinds == {"local", "spot H200", "spot L4"}, "each kind is measured separately"


def test_wrong_kind_is_rejected(recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(WindfallError, match=r"unknown key 'sim.kinds.0.slot'.*'slots'"):
        recipe(sim={"kinds": [{"name": "L4", "slot": 3, "worker": {}}]})
    with pytest.raises(WindfallError, match="each_s must be above 0") as e:
        scenario.build(recipe(sim={"kinds": [{"name": "L4", "worker": {"fixed_s": 0.1}}]}))
    assert "sim.kinds, L4" in str(e.value)


def test_small_kv_cache_makes_responses_wait(simulated: Simulated) -> None:
    most: list[tuple[int, int]] = []

    def watch(s: Simulation) -> None:
        def look() -> None:
            stats = [m.stats for m in s.dispatch.members.here() if m.stats is not None and m.name != "local"]
            most.extend((w.waiting, w.evictions) for w in stats)
            asyncio.get_running_loop().call_later(0.1, look)

        look()

    wide, log = simulated(watch, **STAYS)
    assert max(most) == (0, 0)
    narrow, tight = simulated(watch, sim={"worker_kv_tokens": 380}, **STAYS)
    assert max(w for w, _ in most) > 0
    assert max(p for _, p in most) > 0
    assert narrow.token_schedule.real_tokens == wide.token_schedule.real_tokens, "the same responses"
    assert tight[-1]["m"] > log[-1]["m"], "it takes longer"


def test_worker_too_small_for_every_response_gets_none(simulated: Simulated) -> None:
    """Responses that only `local` can generate do not wait while `local` is paused."""
    done, log = simulated(sim={"worker_kv_tokens": 250}, **STAYS)
    assert [e["responses"] for e in steps_of(log)] == [64] * len(steps_of(log))
    assert all(m.generated == 0 for m in done.dispatch.members.all.values() if m.name != "local")
    assert any(e["name"] == "local_resumed" and "has room" in e["why"] for e in log)


def test_run_whose_workers_are_all_too_small_ends_with_an_error(simulated: Simulated) -> None:
    with pytest.raises(WindfallError, match=r"no worker has had more than 250\. Set engine\.kv_tokens to 367"):
        simulated(sim={"worker_kv_tokens": 250}, **{**STAYS, "fleet": {**STAYS.get("fleet", {}), "local": False}})


@pytest.mark.slow
def test_workers_are_scaled_by_advice(simulated: Simulated) -> None:
    """Workers that cost almost nothing pay off; workers that cost more than the trainer do not."""
    fleet = {"workers": 1, "workers_max": 4, "kind": "spot"}
    for price, last in ((0.1, 4), (500.0, 0)):
        _, log = simulated(
            run={"steps": 14}, trace={"nodes": 0}, fleet={**fleet, "price_usd_per_h": price}, sim={"boot_s": 0.1}
        )
        steps = steps_of(log)
        assert steps[0]["workers"] <= 2, "local and one worker"
        assert steps[-1]["workers"] - 1 == last, price
        assert not any(e["name"] == "worker_lost" for e in log), "workers that are scaled down drain first"
        assert all(e["responses"] == 64 and e["lost_tokens"] == 0 for e in steps)


def test_large_fleet_is_settled_less_often(simulated: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """All responses are still assigned."""
    times: list[tuple[float, int]] = []
    settle = Dispatch._schedule

    def timed(self: Dispatch) -> None:
        times.append((asyncio.get_running_loop().time(), self.members.count))
        settle(self)

    monkeypatch.setattr(Dispatch, "_schedule", timed)
    gaps: dict[bool, list[float]] = {}
    for large in (False, True):
        monkeypatch.setattr(dispatch, "SMALL_FLEET", 2 if large else 256)
        monkeypatch.setattr(dispatch, "PAUSE_PER_WORKER_S", 0.1)
        times.clear()
        _, log = simulated(run={"steps": 3})
        assert all(e["responses"] == 64 and e["lost_tokens"] == 0 for e in steps_of(log))
        gaps[large] = [b - a for (a, _), (b, count) in pairwise(times) if count == 4]
    assert min(gaps[False]) < 0.001
    assert min(gaps[True]) >= 0.1 - 1e-9, "four workers are two above FEW"
