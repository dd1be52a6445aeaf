"""Simulated drafts, the order of the queue, and KV caches that become full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from windfall.controller.assembly import Rules
from windfall.controller.scheduling.balance import Move, WorkerLoad
from windfall.controller.scheduling.placement import Placement
from windfall.errors import WindfallError
from windfall.recipe.sections import Recipe
from windfall.sim.core.scenario import build

Simulated = Callable[..., Any]
WORKERS: dict[str, dict[str, Any]] = {
    "trace": {"nodes": 0}, "fleet": {"local": False, "workers": 3}, "techniques": {"pipelining": False},
}  # fmt: skip


class NoMoves(Placement):
    def moves(self, loads: Sequence[WorkerLoad]) -> list[Move]:
        return []


def rollout_s(log: list[dict[str, Any]]) -> list[float]:
    return [e["s"] for e in log if e["kind"] == "span" and e["name"] == "rollout"]


def steps_of(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for e in log if e["kind"] == "scalar" and e["name"] == "step"]


def test_rollout_takes_half_the_time_with_two_tokens_per_step(simulated: Simulated) -> None:
    plain = simulated(**WORKERS)[1]
    drafted = simulated(**WORKERS, sim={"acceptance": [[0, 2.0]], "verify_rows": 1})[1]
    assert [e["lengths"] for e in steps_of(drafted)] == [e["lengths"] for e in steps_of(plain)]
    for fast, slow in zip(rollout_s(drafted)[1:], rollout_s(plain)[1:], strict=True):
        assert fast == pytest.approx(slow / 2, rel=0.15), "prefill, pulls and messages take as long as before"


def test_engines_do_not_draft_if_the_recipe_turns_it_off(simulated: Simulated) -> None:
    plain = simulated(**WORKERS)[1]
    off = simulated(**WORKERS, sim={"acceptance": [[0, 2.0]], "verify_rows": 1}, engine={"speculation": "off"})[1]
    assert rollout_s(off) == rollout_s(plain)


def test_limit_of_a_turn_is_in_real_tokens(recipe: Callable[..., Recipe]) -> None:
    """It was 100 simulated tokens."""
    assert build(recipe(rollout={"turn_tokens": 100}, sim={"granule": 10})).recipe.rollout.turn_tokens == 10
    with pytest.raises(WindfallError, match="turns that reach a limit are not simulated"):
        build(recipe(rollout={"turn_tokens": 100}, sim={"turns": 3.0}))


def test_workers_elsewhere_are_not_left_out_silently(recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(WindfallError, match="workers that a run starts elsewhere are not simulated"):
        build(recipe(fleet={"slurm": {"workers": 8}}))


def test_engines_do_not_draft_where_that_is_slower(simulated: Simulated) -> None:
    plain = simulated(**WORKERS)[1]
    drafted = simulated(**WORKERS, sim={"acceptance": [[0, 1.5]], "verify_rows": 1000})[1]
    assert rollout_s(drafted) == rollout_s(plain)


def test_finished_siblings_make_drafts_better(simulated: Simulated) -> None:
    alone, siblings = (
        simulated(**WORKERS, sim={"acceptance": points, "verify_rows": 1})[1]
        for points in ([[0, 1.5]], [[0, 1.5], [3, 3]])
    )
    assert sum(rollout_s(siblings)) < 0.9 * sum(rollout_s(alone))


@pytest.mark.slow
def test_long_groups_begin_first_with_the_order_context(simulated: Simulated) -> None:
    """An eighth of the responses fits at once, and siblings are alike."""
    few, groups = {"worker_slots": 6, "alike": 0.95, "sigma": 1.0}, {"groups": 16, "group_size": 9, "max_tokens": 600}
    logs = {
        order: simulated(**WORKERS, sim=few, run={"steps": 6}, rollout={"order": order, **groups})[1]
        for order in ("fifo", "context")
    }
    fifo_s, context_s = (sum(rollout_s(logs[order])) for order in ("fifo", "context"))
    assert context_s < 0.95 * fifo_s
    predicted = steps_of(logs["context"])[-1]["predicted"]
    assert predicted["alike"] > 0.7
    assert predicted["error"] < 0.6 * predicted["error_without"]


def test_full_kv_caches_are_counted_and_lose_nothing(simulated: Simulated) -> None:
    room = {"worker_kv_tokens": 900, "worker_slots": 64}
    log = simulated(**WORKERS, sim=room)[1]
    assert sum(e["evictions"] for e in steps_of(log)) > 0
    assert all(e["lost_tokens"] == 0 for e in steps_of(log))


def test_value_of_gathering_the_last_responses_is_logged(simulated: Simulated) -> None:
    """One worker is eight times as slow: what is left there at the end of a step moves."""
    spread: dict[str, Any] = {"run": {"steps": 6}, "sim": {"worker_spread": 1.0}}
    log = simulated(**WORKERS, **spread)[1]
    gathered = [e["bill"]["gathering"] for e in steps_of(log)]
    assert all(g["usd"] == pytest.approx(g["sooner_s"] * 80 / 3600) for g in gathered), "the trainer waits, too"
    assert any(g["released"] and g["freed_s"] > 0 for g in gathered)
    still = simulated(**WORKERS, **spread, rules=Rules(placement=NoMoves))[1]
    assert not any(e["bill"]["gathering"]["moves"] for e in steps_of(still))
    saved_s = sum(rollout_s(still)) - sum(rollout_s(log))
    assert 0 < sum(g["sooner_s"] for g in gathered) < saved_s


def test_gathering_has_no_value_if_no_step_waits_for_its_last_response(simulated: Simulated) -> None:
    log = simulated(**WORKERS, rollout={"staleness": 1}, sim={"worker_spread": 1.0})[1]
    assert sum(e["moved"] for e in steps_of(log)) > 0
    assert not any(e["bill"]["gathering"]["moves"] for e in steps_of(log))
