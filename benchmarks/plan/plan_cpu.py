"""A plan for a small fleet of CPU workers with unequal speeds, run for real, and compared with what it predicted.

    python benchmarks/plan/plan_cpu.py                    three rounds, about two minutes each on two idle cores
    python benchmarks/plan/plan_cpu.py --rounds 5 --steps 20 --staleness 0

A round is what a user does:

    windfall train probe.toml                        a short run, from which the planner learns times and lengths
    windfall plan probe.toml --cluster cluster.toml --measured RUN --write planned.toml
    windfall train planned.toml                      and the commands that the planner printed for other machines
    windfall plan --check RUN                        planned beside measured, by part

The fleet: the trainer and a worker on this machine, and a spot worker that gets a share of its time (`--share`): it
is stopped and continued many times per second. All of them compute; nothing sleeps in place of an engine. A run on a
machine with other work says little about the plan: times change between the probe and the run. So the benchmark prints
the load. The exit status is 1 if the median error of the tokens per second is above `--limit`.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from windfall.plan.run import run_log
from windfall.run_folder import read_json

RECIPE = """
[run]
name = "{name}"
folder = "{folder}/runs"
steps = {steps}
threads = 1
device = "cpu"
[model]
path = "tiny"
[rollout]
groups = {groups}
group_size = {group_size}
max_tokens = {max_tokens}
staleness = {staleness}
[train]
lr = 1e-5
[eval]
tasks = 0
[checkpoint]
every = 1000
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
SPOT = "windfall worker --join URL --token FILE --engine windfall --lease spot --price 0.2 --device cpu --threads 1"
PERIOD_S = 0.04
"""A slowed worker is stopped once per period."""
START_S, RUN_S = 240.0, 1200.0
"""Longest waits for a run to start and to end."""


def probe_recipe(folder: Path, *, name: str = "probe", steps: int, groups: int, staleness: int, group_size: int = 8,
                 max_tokens: int = 160) -> str:  # fmt: skip
    """The recipe of a short run with a trainer and a worker."""
    return RECIPE.format(
        folder=folder, name=name, steps=steps, groups=groups, staleness=staleness, group_size=group_size,
        max_tokens=max_tokens,
    )  # fmt: skip


class Slowed(threading.Thread):
    """Lets a process run for a share of the time."""

    def __init__(self, pid: int, share: float) -> None:
        super().__init__(daemon=True)
        self.pid, self.share, self.over = pid, share, threading.Event()

    def run(self) -> None:
        try:
            while not self.over.wait(self.share * PERIOD_S):
                os.kill(self.pid, signal.SIGSTOP)
                time.sleep((1 - self.share) * PERIOD_S)
                os.kill(self.pid, signal.SIGCONT)
        except ProcessLookupError:  # the run is over
            pass


def windfall(*args: str) -> list[str]:
    return [sys.executable, "-m", "windfall.run.cli", *args]


def train(recipe: Path, run: Path, workers: list[str], share: float, out: Path) -> None:
    """Run a recipe, with these commands for workers of other machines, the first one slowed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        log = stack.enter_context(out.open("ab"))
        main = subprocess.Popen(windfall("train", str(recipe)), stdout=log, stderr=log, env=environment)
        stack.callback(main.wait)
        stack.callback(main.terminate)
        give_up = time.monotonic() + START_S
        while not (run / "address.json").is_file():
            if main.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"the run did not start: {out.read_text()}")
            time.sleep(0.1)
        url = (read_json(run / "address.json") or {})["url"]
        for line in workers:
            words = shlex.split(line.replace("URL", url).replace("FILE", str(run / "token")))
            command = windfall(*words[1:], "--clouds", "none", "--patience", "20")
            worker = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            stack.callback(worker.wait)
            stack.callback(worker.kill)
            slowed = Slowed(worker.pid, share)
            stack.callback(slowed.over.set)
            if share < 1:
                slowed.start()
        if main.wait(RUN_S) != 0:
            raise RuntimeError(f"the run failed: {out.read_text()}")


def one_round(o: argparse.Namespace, folder: Path) -> list[run_log.CheckedPart]:
    probe, cluster, planned = folder / "probe.toml", folder / "cluster.toml", folder / "planned.toml"
    probe.write_text(probe_recipe(folder, steps=o.steps, groups=o.groups, staleness=o.staleness))
    cluster.write_text(CLUSTER)
    train(probe, folder / "runs" / "probe", [SPOT], o.share, folder / "out")
    done = subprocess.run(
        windfall(
            "plan", str(probe), "--cluster", str(cluster), "--measured", str(folder / "runs" / "probe"), "--write",
            str(planned),
        ),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    print(re.search(r"^1\. .*", done.stdout, re.MULTILINE)[0])  # pyright: ignore
    commands = re.findall(r"then on \w+: (windfall worker .*)", done.stdout)
    planned.write_text(planned.read_text().replace('name = "probe"', 'name = "planned"', 1))
    train(planned, folder / "runs" / "planned", commands, o.share, folder / "out")
    return run_log.check(*run_log.planned_run(folder / "runs" / "planned"), "planned")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--groups", type=int, default=12)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--share", type=float, default=0.5, help="share of its time that the spot worker gets")
    parser.add_argument("--limit", type=float, default=0.10)
    o = parser.parse_args()
    errors: list[float] = []
    for n in range(o.rounds):
        with tempfile.TemporaryDirectory() as folder:
            before = os.getloadavg()[0]
            parts = one_round(o, Path(folder))
            print(f"round {n + 1}, load {before:.1f} before and {os.getloadavg()[0]:.1f} after")
            print("\n".join([run_log.HEADER, *map(str, parts)]), flush=True)
            errors.append(next(p.error for p in parts if p.name == "tokens per second"))
    middle = statistics.median(errors)
    print(f"tokens per second, planned relative to measured: median {middle:+.1%} of {[f'{e:+.1%}' for e in errors]}")
    return int(abs(middle) > o.limit)


if __name__ == "__main__":
    sys.exit(main())
