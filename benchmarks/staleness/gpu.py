"""Time to a given held-out reward with rollout.staleness 0, 1 and 2, on one GPU, while workers are killed.

    make smollm2
    python benchmarks/staleness/gpu.py --seconds 160 --reward 0.5

SmolLM2-135M learns to add and subtract two numbers of one or two digits. The trainer and the workers share the GPU;
each worker is a process that is killed with SIGKILL after `--up-s` seconds on average and comes back. One run per
bound, one after another; each is stopped after `--seconds`. Evaluations (greedy, on tasks that are not trained on)
run every `--eval-every` steps. The time to a reward is that of the step whose version has it, interpolated between
evaluations, from the start of the first step; the time that the run stood still for evaluations counts, as a user
waits for it.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

RECIPE = """
[run]
name = "{name}"
folder = "{folder}"
steps = {steps}
[model]
path = "{model}"
[env]
name = "dataset"
path = "{train}"
rewards = ["exact"]
[algorithm]
name = "dr_grpo"
[rollout]
groups = {groups}
group_size = 16
max_tokens = 24
staleness = {staleness}
[train]
lr = {lr}
warmup = 5
[eval]
path = "{held_out}"
tasks = 256
every = {eval_every}
temperature = 0.0
[checkpoint]
every = 1000
[trace]
nodes = {nodes}
mean_up_s = {up_s}
mean_down_s = {down_s}
[fleet]
local = {local}
worker_memory = {memory}
"""


def write_tasks(folder: Path, held_out: int, *, chat: bool) -> None:
    """All sums and differences of two numbers of one or two digits, in random order: the first into test.jsonl, the
    others into train.jsonl. `chat`: prompts are messages for a chat template."""
    tasks = [(a, sign, b) for a in range(1, 100) for sign in "+-" for b in range(1, 100)]
    random.Random(0).shuffle(tasks)
    for name, part in (("test", tasks[:held_out]), ("train", tasks[held_out:])):
        with (folder / f"{name}.jsonl").open("w") as file:
            for a, sign, b in part:
                text = f"What is {a} {sign} {b}? Answer with the number only."
                prompt = [{"role": "user", "content": text}] if chat else f"{a}{sign}{b}="
                row = {"prompt": prompt, "answer": str(a + b if sign == "+" else a - b)}
                file.write(json.dumps(row) + "\n")


def train(recipe: Path, log: Path, seconds: float) -> None:
    """Run until it ends, or until `seconds` after its first step."""
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "windfall.run.cli", "train", str(recipe)], stdout=out, stderr=subprocess.STDOUT
        )
        deadline_s = time.monotonic() + seconds + 90  # starting takes a while
        while process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.5)
            if "step    1/" in log.read_text(errors="replace") and deadline_s > time.monotonic() + seconds:
                deadline_s = time.monotonic() + seconds
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def figures(events: Path, reward: float) -> dict[str, Any]:
    rows = [json.loads(line) for line in events.read_text().splitlines()]
    steps = {e["step"]: e for e in rows if (e["kind"], e["name"]) == ("scalar", "step")}
    evals = sorted((e["step"], e["reward"]) for e in rows if (e["kind"], e["name"]) == ("scalar", "eval"))
    began = min(e["m"] - e["s"] for e in steps.values())
    at = lambda step: steps[step]["m"] - began if step in steps else 0.0  # noqa: E731
    reached = None
    for (s0, r0), (s1, r1) in pairwise(evals):
        if r0 < reward <= r1:
            reached = at(s0) + (at(s1) - at(s0)) * (reward - r0) / (r1 - r0)
            break
    last = steps[max(steps)]
    total_s = last["m"] - began
    return {
        "steps": max(steps), "s": total_s, "per_step_s": total_s / max(steps),
        "tok_per_s": sum(e["trained"] for e in steps.values()) / total_s,
        "wait": sum(e["train_wait_s"] for e in steps.values()) / total_s,
        "lost": sum(e["workers_lost"] for e in steps.values()),
        "stale": last.get("staleness_max", 0), "too_old": sum(e.get("too_old", 0) for e in steps.values()),
        "drift": sum(e.get("drift", 0.0) for e in steps.values()) / len(steps),
        "gap": max(e["engine_gap"] for e in steps.values()),
        "reached_s": reached, "evals": [(step, round(r, 3)) for step, r in evals],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=160.0)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--reward", type=float, default=0.5)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--lr", type=float, default=4e-5)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--up-s", type=float, default=25.0)
    parser.add_argument("--down-s", type=float, default=4.0)
    parser.add_argument("--memory", type=float, default=0.12, help="share of the GPU memory for each worker")
    parser.add_argument("--local", action="store_true", help="the trainer's own engine generates, too")
    parser.add_argument("--out", type=Path, default=None, help="folder for the recipes, logs and runs")
    o = parser.parse_args()
    folder = o.out or Path(tempfile.mkdtemp(prefix="staleness-gpu-"))
    folder.mkdir(parents=True, exist_ok=True)
    write_tasks(folder, 256, chat=o.model != "tiny")
    print(f"files in {folder}; time to a held-out reward of {o.reward:g}")
    print(
        "staleness  steps  s/step  trained tok/s  trainer waits  workers lost  too old  drift  gap     time to reward"
    )
    for staleness in o.staleness:
        name = f"staleness-{staleness}"
        recipe = folder / f"{name}.toml"
        recipe.write_text(
            RECIPE.format(
                name=name, folder=folder, steps=o.steps, model=o.model, train=folder / "train.jsonl",
                held_out=folder / "test.jsonl", groups=o.groups, staleness=staleness, lr=o.lr,
                eval_every=o.eval_every, nodes=o.nodes, up_s=o.up_s, down_s=o.down_s, memory=o.memory,
                local=str(o.local).lower(),
            )
        )  # fmt: skip
        train(recipe, folder / f"{name}.log", o.seconds)
        f = figures(folder / name / "events.jsonl", o.reward)
        reached = "not reached" if f["reached_s"] is None else f"{f['reached_s']:.0f} s"
        print(
            f"{staleness:9}  {f['steps']:5}  {f['per_step_s']:6.2f}  {f['tok_per_s']:13,.0f}  {f['wait']:13.0%}  "
            f"{f['lost']:12}  {f['too_old']:7}  {f['drift']:.3f}  {f['gap']:.4f}  {reached}",
            flush=True,
        )
        print(f"           evaluations (step, reward): {f['evals']}", flush=True)


if __name__ == "__main__":
    main()
