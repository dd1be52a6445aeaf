"""A planned recipe, run for real on the CPUs of this machine: measured, planned, trained, checked."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.plan import plan_cpu as cpu

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
Windfall = Callable[..., tuple[int, str, str]]
SIZES = {"groups": 4, "group_size": 4, "max_tokens": 60, "staleness": 1}


def test_a_plan_is_run_and_checked(windfall: Windfall, here: Path) -> None:
    (here / "probe.toml").write_text(cpu.probe_recipe(here, steps=10, **SIZES))
    (here / "cluster.toml").write_text(cpu.CLUSTER)
    cpu.train(here / "probe.toml", here / "runs" / "probe", [cpu.SPOT], 1.0, here / "out")
    code, out, err = windfall(
        "plan", "probe.toml", "--cluster", "cluster.toml", "--measured", "runs/probe", "--write", "planned.toml"
    )
    assert (code, err) == (0, ""), out
    assert "as measured" in out
    commands = re.findall(r"then on m1: (windfall worker .*)", out)  # none if the slower worker is not worth it

    planned = (here / "planned.toml").read_text().replace('name = "probe"', 'name = "planned"', 1)
    (here / "planned.toml").write_text(planned)
    cpu.train(here / "planned.toml", here / "runs" / "planned", commands, 1.0, here / "out")
    code, out, err = windfall("plan", "--check", "runs/planned")
    assert (code, err) == (0, ""), out
    parts = ("tokens per second", "training, per million", "reserved cpu at $0.50/h", "price per million")
    for part in parts:
        assert part in out
    # How close they are is measured by benchmarks/plan/plan_cpu.py: other work on this machine may change by more.
    figures = re.search(r"tokens per second +([\d.]+) +([\d.]+)", out)
    assert figures, out
    assert min(map(float, figures.groups())) > 0
