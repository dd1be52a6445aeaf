"""Generated traces, and prices over time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from windfall.errors import WindfallError
from windfall.providers import trace
from windfall.providers.trace_formats import check
from windfall.recipe.sections import Recipe
from windfall.sim.core import run, scenario
from windfall.sim.machines import market
from windfall.sim.machines.market import MarketRates, Prices, generate
from windfall.sim.report.figures import figures

DAY_S = 86400.0
RATES = MarketRates(
    nodes=40, mean_up_s=3600.0, mean_down_s=1800.0, arrivals_per_h=20.0, bursts_per_h=0.5, burst_share=0.6, day_s=DAY_S
)


@pytest.mark.parametrize("kind", ["machines", "poisson", "bursts", "diurnal"])
def test_generated_trace_depends_only_on_its_seed(kind: str) -> None:
    first, again, other = (generate(kind, RATES, seconds=4 * DAY_S, seed=n) for n in (3, 3, 4))
    check(first)
    assert first == again != other
    assert trace.summary(first, 4 * DAY_S).max_up <= 40


def test_generated_traces_have_the_given_rates() -> None:
    machines = trace.summary(generate("machines", RATES, seconds=10 * DAY_S, seed=0), 10 * DAY_S)
    assert machines.losses_per_node_hour == pytest.approx(1.0, rel=0.05)
    poisson = trace.summary(generate("poisson", RATES, seconds=10 * DAY_S, seed=0), 10 * DAY_S)
    assert poisson.mean_up == pytest.approx(20.0, rel=0.05), "20 per hour that stay for an hour"
    bursts = trace.summary(generate("bursts", RATES, seconds=10 * DAY_S, seed=0), 10 * DAY_S)
    assert bursts.losses_per_node_hour == pytest.approx(1.0 + 0.5 * 0.6, rel=0.1)


def test_burst_preempts_many_machines_at_once() -> None:
    downs = [c.at_s for c in generate("bursts", RATES, seconds=2 * DAY_S, seed=0) if not c.up]
    assert max(downs.count(t) for t in set(downs)) > 5


def test_diurnal_market_has_a_good_and_a_bad_half() -> None:
    changes = generate("diurnal", RATES, seconds=DAY_S, seed=0)
    night, noon = (trace.summary(trace.window(changes, at, 3600.0), 3600.0).mean_up for at in (0.0, DAY_S / 2))
    assert night > 2 * noon


@pytest.mark.parametrize("text", ["", "5,1.0\n", "0,1.0\n0,2.0\n", "0,1.0\n9,-1\n", "0;1\n"])
def test_invalid_price_file_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(text)
    with pytest.raises(WindfallError, match="price"):
        market.prices(path)


def test_cost_is_summed_over_price_steps() -> None:
    p = Prices(from_s=(0.0, 100.0, 200.0), usd_per_h=(3600.0, 7200.0, 36.0))
    assert p.between(50, 250) == pytest.approx(50 * 1 + 100 * 2 + 50 * 0.01)
    assert p.between(0, 0) == 0


def test_run_pays_the_current_price(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    file, log = tmp_path / "prices.csv", tmp_path / "events.jsonl"
    file.write_text("0,36\n10,72\n")

    def usd(**sim: Any) -> tuple[float, float]:
        w = scenario.build(recipe(sim={**sim, "granule": 1}, trace={"mean_up_s": 1e6, "price_usd_per_h": 36.0}))
        done = run.simulate(w, log)
        f = figures(log, w, done.stays)
        return f.usd, f.virtual_s

    flat, seconds = usd()
    steps, same = usd(prices_file=str(file))
    assert seconds == same > 12, "prices do not change times"
    there = len(run.simulate(scenario.build(recipe(trace={"mean_up_s": 1e6})), log).stays)
    assert steps - flat == pytest.approx(there * (seconds - 10) * 36 / 3600, rel=1e-6)
