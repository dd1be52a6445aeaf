"""Reward over time and over dollars on one GPU: windfall while its workers are killed, and TRL on the same task.

    make smollm2
    python benchmarks/beside_trl/curve.py windfall --folder FOLDER --seconds 540    once more: continues it
    python benchmarks/beside_trl/curve.py trl-vllm --folder FOLDER --seconds 540    TRL generates with vLLM
    python benchmarks/beside_trl/curve.py trl --folder FOLDER --seconds 540         TRL generates with transformers
    python benchmarks/beside_trl/curve.py table --folder FOLDER
    python benchmarks/beside_trl/curve.py picture --folder FOLDER                   reward.svg, with matplotlib

SmolLM2-135M learns to add and subtract two numbers of one or two digits (the tasks of staleness/gpu.py). All have the
same prompts, reward function, group sizes, learning rate, optimizer and loss (Dr. GRPO), and are evaluated on the same
256 held-out tasks at temperature 1. `--set KEY=VALUE` changes a key of the recipe, or a setting of TRL (`pip install
trl`). If TRL ends with an error, it is started again from its last checkpoint, and the table says how often.

windfall's four workers and its trainer share the GPU, and each costs a fifth of its price; two of the workers are
killed with SIGKILL after `--up-s` seconds on average. TRL has the GPU alone, for its whole price. Time is that of the
commands, with start-up, evaluations and checkpoints; what is between two commands does not count.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found
from benchmarks.staleness.gpu import write_tasks
from benchmarks.train.loop_gpu import SHARE_USD_PER_H
from windfall.controller.cost.bill import Totals
from windfall.events import log as events
from windfall.models.load import resolve
from windfall.recipe.file import load_recipe
from windfall.recipe.sections import Recipe

HERE = Path(__file__).parent
GPU_USD_PER_H = 5 * SHARE_USD_PER_H
TO_SAVE_S = 25
"""Seconds of a command that are left for the last step and the checkpoint."""
MINUTES = (1, 2, 5, 10, 15, 20, 25, 30)


RECIPE = """
[run]
name = "windfall"
folder = "{folder}"
steps = 100000
[model]
path = "smollm2-135m"
[env]
name = "dataset"
path = "{folder}/train.jsonl"
rewards = ["{rewards}:exact"]
[algorithm]
name = "dr_grpo"
[rollout]
groups = 64
group_size = 16
max_tokens = 24
staleness = 1
[train]
lr = 2e-5
warmup = 5
[eval]
path = "{folder}/test.jsonl"
tasks = {tasks}
every = 25
[checkpoint]
every = 200
[fleet]
kind = "spot"
workers = 2
worker_memory = 0.05
price_usd_per_h = {usd}
trainer_price_usd_per_h = {usd}
[trace]
nodes = 2
mean_up_s = {up_s}
mean_down_s = 5
price_usd_per_h = {usd}
"""


def prepare(folder: Path, tasks: int, up_s: float) -> Recipe:
    """The data of both halves, and the recipe. No task that is held out is in the data."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "recipe.toml"
    if not file.exists():
        write_tasks(folder, tasks, chat=True)
        places = {"folder": folder.resolve(), "rewards": HERE / "exact.py"}
        file.write_text(RECIPE.format(**places, usd=GPU_USD_PER_H / 5, tasks=tasks, up_s=up_s))
    return load_recipe(file)


def train_windfall(folder: Path, seconds: float, changes: Sequence[str]) -> None:
    """Start the run or resume it, and stop it when the time is over."""
    run = folder / "windfall"
    words = ["resume", str(run)] if run.is_dir() else ["train", str(folder / "recipe.toml")]
    command = [sys.executable, "-m", "windfall.run.cli", *words, *(word for c in changes for word in ("--set", c))]
    process = subprocess.Popen(command)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # it saves, so that it can be resumed
        process.wait(60)


def train_trl(folder: Path, half: str, seconds: float, recipe: Recipe, changes: Sequence[str]) -> None:
    """The settings of the recipe, as TRL calls them, in a process of TRL."""
    r, t = recipe.rollout, recipe.train
    parts = 4  # forward and backward passes of an update
    settings = {
        "model": str(resolve(recipe.model.path)), "loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0,
        "max_steps": recipe.run.steps, "per_device_train_batch_size": r.groups * r.group_size // parts,
        "gradient_accumulation_steps": parts, "num_generations": r.group_size, "max_completion_length": r.max_tokens,
        "temperature": r.temperature, "learning_rate": t.lr, "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": t.warmup, "adam_beta1": t.betas[0], "adam_beta2": t.betas[1], "max_grad_norm": t.clip_norm,
        "weight_decay": t.weight_decay, "eval_steps": recipe.eval.every, "num_generations_eval": 1,
        "save_steps": 50,
        "per_device_eval_batch_size": recipe.eval.tasks,
    }  # fmt: skip
    if half == "trl-vllm":
        settings |= {"use_vllm": True, "vllm_gpu_memory_utilization": 0.2, "vllm_max_model_length": 512}
    settings |= {key: json.loads(value) for key, _, value in (change.partition("=") for change in changes)}
    ends_s = time.time() + seconds
    while (left_s := ends_s - time.time()) > TO_SAVE_S:
        words = [str(folder), half, str(left_s), json.dumps(settings)]
        command = [sys.executable, "-m", "benchmarks.beside_trl.trl_half", *words]
        if subprocess.run(command, cwd=HERE.parents[1]).returncode == 0:
            return
        with (folder / half / "crashes").open("a") as file:
            file.write(f"{time.time()}\n")


class Point(NamedTuple):
    """Where a half is after a while."""

    at_s: float
    step: int
    held_out: float | None
    tokens: int
    usd: float


def windfall_points(own: Path, elapsed: Callable[[float], float]) -> Iterator[Point]:
    step, tokens, usd, held_out = 0, 0, 0.0, None
    for e in events.read(own / "events.jsonl"):
        if e.get("bill"):
            usd += msgspec.convert(e["bill"], Totals).all.total_usd
        if (e["kind"], e["name"]) == ("scalar", "step"):
            step, tokens = e["step"], tokens + e["trained"]
        elif (e["kind"], e["name"]) == ("scalar", "eval"):
            held_out = e["reward"]
        else:
            continue
        yield Point(elapsed(e["t"]), step, held_out, tokens, usd)


def trl_points(own: Path, elapsed: Callable[[float], float]) -> Iterator[Point]:
    tokens, held_out, log = 0, None, own / "log.jsonl"
    for e in map(json.loads, log.read_text().splitlines() if log.exists() else ()):
        tokens += round(e.get("completions/mean_length", 0) * e["responses"])  # TRL's own number counts prompts, too
        held_out = e.get("eval_reward", held_out)
        at_s = elapsed(e["t"])
        yield Point(at_s, e["step"], held_out, tokens, at_s / 3600 * GPU_USD_PER_H)


POINTS = {"windfall": windfall_points, "trl-vllm": trl_points, "trl": trl_points}


def points(folder: Path, half: str) -> list[Point]:
    """Time counts while a command ran."""
    pieces = [p for p in map(json.loads, (folder / "pieces.jsonl").read_text().splitlines()) if p["half"] == half]

    def elapsed(t: float) -> float:
        return sum(max(0.0, min(t, piece["ended"]) - piece["began"]) for piece in pieces)

    return list(POINTS[half](folder / half, elapsed))


def row(half: str, p: Point) -> str:
    held_out = "-" if p.held_out is None else f"{p.held_out:.3f}"
    return f"{half:10}{p.at_s / 60:>8.1f}{p.step:>7}{held_out:>26}{p.tokens:>12,}{p.usd:>8.3f}"


def table(folder: Path) -> Iterator[str]:
    yield f"{'':10}{'minutes':>8}{'steps':>7}{'reward on held-out tasks':>26}{'tokens':>12}{'$':>8}"
    for half in POINTS:
        known = points(folder, half) if (folder / half).is_dir() else []
        for minutes in MINUTES:
            before = [p for p in known if p.at_s <= 60 * minutes]
            if before and before[-1] is not known[-1]:
                yield row(half, before[-1])
        yield from (row(half, p) for p in known[-1:])
    if (log := folder / "windfall" / "events.jsonl").exists():
        seen = events.read(log)
        steps = [e for e in seen if (e["kind"], e["name"]) == ("scalar", "step")]
        moved, lost = sum(e["moved"] for e in steps), sum(e["lost_tokens"] for e in steps)
        workers = sum(e["name"] == "worker_lost" for e in seen)
        yield f"windfall: {workers} workers lost, {moved:,} responses moved, {lost} tokens lost"
    for crashes in folder.glob("trl*/crashes"):
        yield f"{crashes.parent.name}: ended {len(crashes.read_text().splitlines())} times with an error"


def picture(folder: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3), sharey=True, layout="constrained")
    for half in POINTS:
        known = [p for p in points(folder, half) if p.held_out is not None] if (folder / half).is_dir() else []
        for axis, at in zip(axes, ([p.at_s / 60 for p in known], [p.usd for p in known]), strict=True):
            axis.plot(at, [p.held_out for p in known], label=half)
    axes[0].set(xlabel="minutes", ylabel="reward on held-out tasks")
    axes[1].set(xlabel="dollars")
    axes[1].legend(frameon=False)
    figure.savefig(folder / "reward.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*POINTS, "table", "picture"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=540, help="How long the command may take.")
    parser.add_argument("--tasks", type=int, default=256, help="Held-out tasks.")
    parser.add_argument("--up-s", type=float, default=60, help="Mean seconds until a worker is killed.")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    folder, began = options.folder.resolve(), time.time()
    if options.what == "picture":
        picture(folder)
    elif options.what != "table":
        recipe, seconds = prepare(folder, options.tasks, options.up_s), options.seconds - TO_SAVE_S
        if options.what == "windfall":
            train_windfall(folder, seconds, options.set)
        else:
            train_trl(folder, options.what, seconds, recipe, options.set)
        with (folder / "pieces.jsonl").open("a") as file:
            file.write(json.dumps({"half": options.what, "began": began, "ended": time.time()}) + "\n")
    print("\n".join(table(folder)))


if __name__ == "__main__":
    main()
