"""Simulated lenders: serving comes first, the run gets what is left, and everything follows from the seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.request_load import GeneratedLoad
from benchmarks.support.sim_lenders import Lenders, LendingSimulation, SimLender, learned, with_lenders
from windfall.recipe.file import parse_recipe
from windfall.serve.slo import Objectives
from windfall.sim.core import run, scenario
from windfall.sim.report.figures import Figures, figures
from windfall.step_time import StepTime

SPEED = {"fixed_s": 0.01, "each_s": 0.0003, "prefill_s": 0.00002, "context_s": 1e-8}


def lending(*, per_s: float = 1.0, peak: float = 4.0, max_slowdown: float = 100.0) -> Lenders:
    return Lenders(
        count=3, serving=StepTime(**SPEED), kv_tokens=100_000, serving_kv_tokens=100_000,
        load=GeneratedLoad(seed=0, per_s=per_s, peak=peak, prompt_tokens=900.0, generated_tokens=150.0),
        objectives=Objectives(max_slowdown=max_slowdown),
    )  # fmt: skip


def simulate(folder: Path, lenders: Lenders | None, **sections: Any) -> tuple[Figures, list[SimLender], Any]:
    keys: dict[str, Any] = {
        "run": {"name": "lent", "steps": 3}, "rollout": {"groups": 12, "group_size": 4, "max_tokens": 2000},
        "eval": {"tasks": 0}, "checkpoint": {"every": 100},
        "fleet": {"local": False, "workers": 1, "trainer_price_usd_per_h": 80.0, "price_usd_per_h": 8.0},
        "sim": {
            "trainer": {**SPEED, "train_s": 0.00001}, "worker": SPEED, "worker_slots": 16, "weights_bytes": 1e9,
            "boot_s": 1.0, "median_tokens": 400, "granule": 16, "skip_steps": 1,
        },
    }  # fmt: skip
    for name, more in sections.items():
        keys[name] |= more
    w, log = scenario.build(parse_recipe(keys, where="test")), folder / "events.jsonl"
    if lenders is not None:
        w = with_lenders(w, lenders)
    done = run.simulate(w, log, make=LendingSimulation)
    lent = [x for x in done.fleet.workers.values() if isinstance(x, SimLender)]
    done.dispatch.ledger.check()
    return figures(log, w, done.stays), lent, done


def test_lenders_make_a_run_faster_and_stay_within_their_objectives(tmp_path: Path) -> None:
    alone, _, _ = simulate(tmp_path, None)
    lent, lenders, done = simulate(tmp_path, lending())
    assert lent.tok_per_s > 1.2 * alone.tok_per_s  # 1.26 to 1.32 with other seeds
    assert len(lenders) == 3
    assert all(max(x.turns_s) < 0.15 for x in lenders), "time per token of the requests"
    assert {w.lease.kind for w in done.dispatch.members.all.values()} == {"reserved", "borrowed"}
    assert any("lent" in line for line in lent.advice)
    bill = done.dispatch.accounts.totals(1e6).holders
    assert bill["borrowed"].tokens > 0
    assert bill["borrowed"].total_usd == 0


def test_borrowed_max_and_a_busy_service_limit_what_is_lent(tmp_path: Path) -> None:
    one, lenders, done = simulate(tmp_path, lending(), fleet={"borrowed_max": 1})
    assert sum(w.generated > 0 for w in done.dispatch.members.all.values() if w.lease.kind == "borrowed") <= 2
    none, _, done = simulate(tmp_path, lending(), fleet={"borrowed_max": 0})
    assert "borrowed" not in {h for h, a in done.dispatch.accounts.totals(1e6).holders.items() if a.tokens}
    assert one.tok_per_s > none.tok_per_s
    busy, lenders, done = simulate(tmp_path, lending(per_s=12.0, peak=3.0))
    assert sum(x.returned for x in lenders) > 0, "responses went back to the controller"
    assert any(x._policy.halvings for x in lenders)
    assert busy.tok_per_s < one.tok_per_s


@pytest.mark.slow
def test_lending_slows_no_request_down_by_more_than_the_limit(tmp_path: Path) -> None:
    speeds: list[float] = []
    for limit in (100.0, 0.15, 0.0):
        lent, lenders, _ = simulate(tmp_path, lending(per_s=2.0, max_slowdown=limit))
        speeds.append(lent.tok_per_s)
        requests = [r for x in lenders for r in x._requests]
        assert requests
        assert all(r.lent_s <= limit * (r.elapsed_s - r.lent_s) + 1e-9 for r in requests)
    assert speeds[0] > 1.1 * speeds[1] > 1.1 * speeds[2]


def test_same_seed_gives_the_same_log(tmp_path: Path) -> None:
    logs = []
    for _ in range(2):
        simulate(tmp_path, lending(per_s=4.0), run={"steps": 2})
        logs.append((tmp_path / "events.jsonl").read_bytes())
    assert logs[0] == logs[1]


def test_sessions_with_several_turns_on_lenders(tmp_path: Path) -> None:
    keys = {"turns": 3.0, "env_s": 1.0, "median_tokens": 100}
    lent, _, done = simulate(tmp_path, lending(), sim=keys)
    assert lent.steps > 0
    assert done.dispatch.turns.typical > 0


def test_learned_step_times_are_those_of_the_formula() -> None:
    service = StepTime(fixed_s=0.01, each_s=0.0002, context_s=2e-8)
    estimate = learned(service)
    for batch, context in ((1, 500), (40, 80_000), (200, 300_000)):
        assert estimate.predict_s(batch, context) == pytest.approx(service.step_s(batch, context), rel=0.02)
