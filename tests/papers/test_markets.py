"""Generated spot markets: their rates, bursts and days."""

from __future__ import annotations

import pytest

from benchmarks.support.markets import MarketRates, generate
from windfall.providers import trace
from windfall.providers.trace_formats import check

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
