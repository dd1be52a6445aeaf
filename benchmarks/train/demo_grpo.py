"""The demo compared with a plain GRPO loop: CPU seconds per token of whole process trees, run alternately.

    python benchmarks/train/demo_grpo.py                     the recipe's number of steps for each
    python benchmarks/train/demo_grpo.py --rounds 2 --steps 8

`plain loop` is the loop below: transformers' generate, a log-softmax, torch's AdamW, one process. It has the demo's
model, tasks, group sizes, learning rate and limit, and trains on every response of the step. `demo` is `windfall train
recipes/demo.toml` as `make demo` runs it: controller, trainer, and workers that are killed and come back. `undisturbed`
is the same recipe with two workers that stay.

CPU seconds are user and system time of all processes of a tree. They include start-up and held-out tasks, so the demo
pays for its imports, its checkpoints and repeated work. Unlike wall time, they do not depend on other load on the
machine. Tokens are those trained on and those of held-out tasks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "demo.toml"
UNDISTURBED = ("trace.nodes=0", "fleet.workers=2")


# --- the plain loop, in its own process ---


def plain(steps: int) -> None:
    """Print a line of JSON: tokens, and the reward on held-out tasks before and after."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from windfall.envs.arithmetic import Arithmetic
    from windfall.envs.base import HELD_OUT
    from windfall.models import load
    from windfall.recipe.file import load_recipe

    recipe = load_recipe(RECIPE)
    r, lr, env = recipe.rollout, recipe.train.lr, Arithmetic(seed=recipe.run.seed)
    torch.set_num_threads(1)
    torch.manual_seed(recipe.run.seed)
    folder = load.fetch(recipe.model.path)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adam = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=recipe.train.betas, weight_decay=recipe.train.weight_decay
    )
    generated = 0

    def rollout(tasks: list[Any], each: int) -> tuple[Any, Any, Any, Any]:
        """Whole sequences, mask of response tokens, attention mask, rewards."""
        nonlocal generated
        prompts = tokenizer([t.prompt for t in tasks for _ in range(each)], return_tensors="pt", padding=True)
        with torch.inference_mode():
            ids = model.generate(
                prompts.input_ids, attention_mask=prompts.attention_mask, do_sample=True, temperature=r.temperature,
                top_k=0, top_p=1.0, max_new_tokens=r.max_tokens, pad_token_id=tokenizer.pad_token_id,
            ).clone()  # fmt: skip
        start = prompts.input_ids.shape[1]
        is_end = (ids[:, start:] == tokenizer.eos_token_id).long()
        up_to_end = (is_end.cumsum(1) - is_end == 0).long()  # the end token belongs to the response
        own = torch.cat([torch.zeros_like(prompts.input_ids), up_to_end], 1)
        generated += int(own.sum())
        texts = tokenizer.batch_decode(ids[:, start:], skip_special_tokens=True)
        answers = [t.answer for t in tasks for _ in range(each)]
        parts = [text.rpartition("#") for text in texts]
        rewards = torch.tensor(
            [float(bool(m) and s.strip() == str(a)) for (_, m, s), a in zip(parts, answers, strict=True)]
        )
        return ids, own, torch.cat([prompts.attention_mask, own[:, start:]], 1), rewards

    def held_out() -> float:
        tasks = [env.task(HELD_OUT + i) for i in range(recipe.eval.tasks)]
        return float(rollout(tasks, 1)[3].mean())

    before = held_out()
    for step in range(steps):
        for group in adam.param_groups:
            group["lr"] = lr * (1 - step / steps)
        ids, own, seen, rewards = rollout([env.task(step * r.groups + i) for i in range(r.groups)], r.group_size)
        grouped = rewards.view(r.groups, r.group_size)
        advantage = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-6)).view(-1)
        for part in torch.arange(len(ids)).split(24):
            used = int(seen[part].sum(0).nonzero().max()) + 1
            x, m, mask = ids[part, :used], own[part, 1:used], seen[part, :used]
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            logits = model(input_ids=x, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, :-1]
            logp = torch.log_softmax(logits / r.temperature, -1).gather(-1, x[:, 1:, None])[..., 0]
            loss = -(logp * m).sum(1) / m.sum(1) * advantage[part]  # the first update of a step: the ratio is 1
            (loss.sum() / len(ids)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.train.clip_norm)
        adam.step()
        adam.zero_grad()
        print(
            f"step {step + 1}: reward {float(rewards.mean()):.3f}, {generated} tokens, {time.process_time():.1f} CPU s",
            flush=True,
        )
    after = held_out()
    print(json.dumps({"tokens": generated, "rewards": [before, after]}))


# --- measurement ---


def measured(command: list[str], folder: Path) -> dict[str, float]:
    """CPU and wall seconds of a process and all its descendants. The time of a child counts when its parent waits for
    it, and every process of windfall waits for its children, including killed ones."""
    began_s = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "out.txt").open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(
            f"{' '.join(command)} exited with status {status}:\n{(folder / 'out.txt').read_text()[-2000:]}"
        )
    return {"cpu_s": used.ru_utime + used.ru_stime, "wall_s": time.monotonic() - began_s}


def plain_run(steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        took = measured([sys.executable, __file__, "--plain", str(steps)], Path(name))
        result = json.loads((Path(name) / "out.txt").read_text().splitlines()[-1])
    return {**took, "tokens": result["tokens"], "rewards": result["rewards"], "lost": 0}


def windfall_run(steps: int, *changes: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        sets = [f"run.folder={name}", f"run.steps={steps}", *changes]
        command = [sys.executable, "-m", "windfall.run.cli", "train", str(RECIPE)]
        took = measured([*command, *(word for s in sets for word in ("--set", s))], Path(name))
        log = [json.loads(line) for line in (Path(name) / "demo" / "events.jsonl").read_text().splitlines()]
    evals = [e for e in log if e["kind"] == "scalar" and e["name"] == "eval"]
    step_events = [e for e in log if e["kind"] == "scalar" and e["name"] == "step"]
    trained = sum(length for e in step_events for group in e["lengths"] for length in group)
    held_out = sum(sum(e["lengths"]) for e in evals)
    lost = sum(e["name"] == "worker_lost" for e in log)
    return {**took, "tokens": trained + held_out, "rewards": [e["reward"] for e in evals], "lost": lost}


KINDS: dict[str, Any] = {
    "plain loop": plain_run,
    "demo": windfall_run,
    "undisturbed": lambda steps: windfall_run(steps, *UNDISTURBED),
}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--rounds", type=int, default=1, help="Number of rounds. Each runs every kind once, in a different order."
    )
    p.add_argument("--steps", type=int, default=20, help="Training steps.")
    p.add_argument("--kinds", default="plain loop,demo,undisturbed")
    p.add_argument("--plain", type=int, metavar="STEPS", help="Run only the plain loop, in this process.")
    p.add_argument("--out", type=Path, help="File to write the figures to, as JSON.")
    a = p.parse_args()
    if a.plain is not None:
        plain(a.plain)
        return
    kinds, console = a.kinds.split(","), Console(highlight=False)
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for n in range(a.rounds):
        for kind in random.Random(n).sample(kinds, len(kinds)):
            run = KINDS[kind](a.steps)
            runs[kind].append(run)
            console.print(f"{kind}: " + json.dumps(run))
    each = {kind: statistics.median(r["cpu_s"] / r["tokens"] for r in of) for kind, of in runs.items()}
    table = Table(title=f"{a.steps} steps, {a.rounds} rounds")
    for column in ("", "CPU ms/token", "plain / this", "CPU s", "wall s", "reward", "workers lost"):
        table.add_column(column, justify="right")
    for kind, of in runs.items():
        mean = {key: statistics.mean(r[key] for r in of) for key in ("cpu_s", "wall_s", "lost")}
        rewards = ["{:.2f}".format(statistics.mean(r["rewards"][i] for r in of)) for i in (0, -1)]
        table.add_row(
            kind, f"{1e3 * each[kind]:.3f}", f"{each['plain loop'] / each[kind]:.2f}" if "plain loop" in each else "",
            f"{mean['cpu_s']:.0f}", f"{mean['wall_s']:.0f}", " to ".join(rewards), f"{mean['lost']:.0f}",
        )  # fmt: skip
    console.print(table)
    if a.out:
        a.out.write_text(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
