"""A planned recipe, run for real on the CPUs of this machine: measured, planned, trained, checked, advised."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from windfall import config
from windfall.events.log import read
from windfall.plan.model import cluster, measured
from windfall.plan.model.inputs import recipe_workload
from windfall.plan.run import recipe
from windfall.plan.search import planner
from windfall.plan.search.request import Request
from windfall.run_folder import read_json

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
Windfall = Callable[..., tuple[int, str, str]]
RECIPE = """
[run]
name = "probe"
steps = {steps}
threads = 1
device = "cpu"
[model]
path = "tiny"
[rollout]
groups = 4
group_size = 4
max_tokens = 60
staleness = 1
[eval]
tasks = 0
[fleet]
local = false
workers = 1
price_usd_per_h = 0.5
trainer_price_usd_per_h = 0.5
"""
CLUSTER = """
[[machine]]
gpu = "cpu"
count = 2
price_usd_per_gpu_h = 0.5
address = "127.0.0.1"

[[machine]]
gpu = "cpu"
lease = "spot"
price_usd_per_gpu_h = 0.2
"""
WORKER = "worker --join URL --token FILE --engine windfall --lease spot --price 0.2 --device cpu --threads 1"


def train(recipe: str, run: Path, worker: str | None) -> None:
    """`windfall train` and one worker of another machine, if the plan has one, as the planner prints its command."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(*args: str) -> subprocess.Popen[bytes]:
        with Path("out").open("ab") as out:
            command = [sys.executable, "-m", "windfall.cli", *args]
            return subprocess.Popen(command, stdout=out, stderr=out, env=environment)

    running = start("train", recipe)
    joined = None
    try:
        while not (run / "address.json").is_file():
            assert running.poll() is None, Path("out").read_text()
            time.sleep(0.1)
        url = (read_json(run / "address.json") or {})["url"]
        if worker is not None:
            joined = start(*worker.replace("URL", url).replace("FILE", str(run / "token")).split(), "--clouds", "none")
        assert running.wait(300) == 0, Path("out").read_text()
    finally:
        for process in (running, joined):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()


def test_a_plan_is_run_checked_and_advised(windfall: Windfall, here: Path) -> None:
    (here / "probe.toml").write_text(RECIPE.format(steps=10))
    (here / "cluster.toml").write_text(CLUSTER)
    train("probe.toml", here / "runs" / "probe", WORKER)
    code, out, err = windfall(
        "plan", "probe.toml", "--cluster", "cluster.toml", "--measured", "runs/probe", "--write", "planned.toml"
    )
    assert (code, err) == (0, ""), out
    assert "as measured" in out
    command = re.search(r"then on m1: windfall (worker .*)", out)  # none if the slower worker is not worth it

    planned = (here / "planned.toml").read_text().replace('name = "probe"', 'name = "planned"', 1)
    (here / "planned.toml").write_text(planned)
    train("planned.toml", here / "runs" / "planned", command and command[1])
    code, out, err = windfall("plan", "--check", "runs/planned")
    assert (code, err) == (0, ""), out
    for part in ("tokens per second", "training, per million", "reserved cpu at $0.50/h", "price per million"):
        assert part in out
    # How close they are is measured by benchmarks/plan_cpu.py: other work on this machine may change by more.
    figures = re.search(r"tokens per second +([\d.]+) +([\d.]+)", out)
    assert figures, out
    assert min(map(float, figures.groups())) > 0


def test_a_run_is_advised_when_its_spot_worker_is_too_dear(here: Path) -> None:
    """The plan has both workers, and the spot worker joins at a hundred times its price."""
    base = config.parse(tomllib.loads(RECIPE.format(steps=24).replace("probe", "dear")), "test")
    rows = {"worker": {"fixed_s": 0.02, "each_s": 0.001}, "trainer": {"train_s": 0.002, "update_s": 0.1}}
    data = tomllib.loads(CLUSTER)
    device = {"memory_gb": 16, "bandwidth_gb_per_s": 20, "tflops": 0.1, "link_gb_per_s": 1}
    made = cluster.parse({**data, "device": [{"name": "cpu", **device, **rows}]}, "cluster.toml")
    asked = Request(cluster=made, work=recipe_workload(base), efficiency=measured.efficiency(), objective="cost")
    own, spot = made.kinds()
    plan = planner.fixed(asked, "cpu", 1, {(own, 1): 1, (spot, 1): 1})
    assert plan is not None
    (here / "dear.toml").write_text(config.dump(recipe.write(plan, asked, base)))
    train("dear.toml", here / "runs" / "dear", WORKER.replace("--price 0.2", "--price 20"))
    log = read(here / "runs/dear/events.jsonl")
    advice = [e for e in log if e["name"].startswith("replan")]
    assert [e["name"] for e in advice] == ["replan"], [e["name"] for e in log if e["kind"] == "instant"]
    assert "spot" not in advice[0]["plan"]
    assert advice[0]["gain"] > 1
