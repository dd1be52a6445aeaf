"""Prices over time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from windfall.errors import WindfallError
from windfall.recipe.sections import Recipe
from windfall.sim.core import run, scenario
from windfall.sim.machines import market
from windfall.sim.machines.market import Prices
from windfall.sim.report.figures import figures


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
