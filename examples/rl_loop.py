"""GRPO, written as a loop of your own over windfall's verbs. It takes about a minute on a CPU.

    python examples/rl_loop.py
    python examples/rl_loop.py --steps 40 --groups 24 --model HuggingFaceTB/SmolLM2-135M-Instruct

The loop decides everything: which tasks, which rewards, what credit each token gets, when the weights change and when
workers get them. windfall samples, differentiates, updates, publishes and saves (src/windfall/verbs.py):

    sample ──▶ reward ──▶ credit ──▶ forward_backward ──▶ optim_step ──▶ publish ──▶ sample ...

Every call has an id. If the trainer is lost, the verbs raise TrainerLost: wait for `policy.connected` and repeat the
calls of the step with their ids.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

from windfall.recipe.file import parse_recipe
from windfall.run.own_loop import OpenedPolicy, open_policy
from windfall.training import CheckpointState, Sample, samples_of
from windfall.types import Response


@dataclass(frozen=True)
class Task:
    prompt: str
    answer: int


def draw_task(seed: int, index: int) -> Task:
    """A chain of small sums, such as 37+58-12=, whose partial sums are between 0 and 99."""
    rng = random.Random(f"{seed}/{index}")
    total = rng.randint(0, 99)
    prompt = str(total)
    for _ in range(rng.randint(1, 4)):
        change = rng.randint(-total, 99 - total)
        prompt += f"{change:+d}"
        total += change
    return Task(prompt=f"{prompt}=", answer=total)


def reward(task: Task, text: str) -> float:
    """The tiny model works a chain out step by step, and writes its result after a #."""
    _, mark, answer = text.rpartition("#")
    return 1.0 if mark and answer.strip() == str(task.answer) else 0.0


def advantages(rewards: Sequence[float]) -> list[float]:
    """GRPO: how much better each response is than its siblings, in standard deviations."""
    mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(r - mean) / (spread + 1e-6) for r in rewards]


async def sample_group(opened: OpenedPolicy, task: Task, options: argparse.Namespace, id: str) -> list[Response]:
    prompt = opened.text.prompt(task.prompt)
    return await opened.policy.sample(prompt, options.group_size, id=id, max_tokens=options.max_tokens)


async def train_step(opened: OpenedPolicy, options: argparse.Namespace, step: int) -> float:
    """One step. Returns the mean reward of its responses, which the weights before the step generated."""
    policy = opened.policy
    first = (step - 1) * options.groups
    tasks = [draw_task(options.seed, first + n) for n in range(options.groups)]
    groups = await asyncio.gather(*(sample_group(opened, task, options, f"{step}/{n}") for n, task in enumerate(tasks)))
    samples: list[Sample] = []
    rewards: list[float] = []
    for task, responses in zip(tasks, groups, strict=True):
        found = [reward(task, opened.text.decode(r.tokens)) for r in responses]
        rewards += found
        for response, advantage in zip(responses, advantages(found), strict=True):
            samples += samples_of(response, advantage, options.max_tokens)
    await policy.forward_backward(samples, id=f"{step}/forward_backward")
    state = CheckpointState(step=step, next_task=first + options.groups)
    report = await policy.optim_step(state, id=f"{step}/optim_step")
    await policy.publish(id=f"{step}/publish")
    lengths = statistics.fmean(len(r.tokens) for responses in groups for r in responses)
    print(
        f"step {step:3}/{options.steps}  reward {statistics.fmean(rewards):.3f}  length {lengths:5.1f}  "
        f"entropy {report.entropy:.3f}  gradient {report.grad_norm:.3f}  engine gap {report.engine_gap:.1e}",
        flush=True,
    )
    return statistics.fmean(rewards)


async def evaluate(opened: OpenedPolicy, options: argparse.Namespace, name: str) -> float:
    """The mean reward on tasks that are never trained on."""
    tasks = [draw_task(options.seed, 1_000_000 + n) for n in range(options.eval_tasks)]
    calls = (
        opened.policy.sample(opened.text.prompt(task.prompt), 1, id=f"eval {name}/{n}", max_tokens=options.max_tokens)
        for n, task in enumerate(tasks)
    )
    groups = await asyncio.gather(*calls)
    return statistics.fmean(
        reward(task, opened.text.decode(response.tokens)) for task, (response,) in zip(tasks, groups, strict=True)
    )


async def run(options: argparse.Namespace) -> tuple[float, float]:
    """Train. Returns the rewards on held-out tasks before and after."""
    began_s = time.monotonic()
    recipe = parse_recipe(
        {
            "run": {"name": "rl-loop", "steps": options.steps, "seed": options.seed, "folder": options.folder},
            "model": {"path": options.model},
            "rollout": {
                "groups": options.groups,
                "group_size": options.group_size,
                "max_tokens": options.max_tokens,
            },
            "train": {"lr": options.lr, "schedule": "linear"},
        },
        where="examples/rl_loop.py",
    )
    async with open_policy(recipe) as opened:
        before = await evaluate(opened, options, "before")
        print(f"before training: reward {before:.3f} on {options.eval_tasks} held-out tasks", flush=True)
        for step in range(1, options.steps + 1):
            await train_step(opened, options, step)
        after = await evaluate(opened, options, "after")
        path = await opened.policy.save(id="last/save")
    print(
        f"after {options.steps} steps ({time.monotonic() - began_s:.0f} s): reward {after:.3f}, checkpoint {path}",
        flush=True,
    )
    return before, after


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO as a loop of your own over windfall's verbs.")
    parser.add_argument("--model", default="tiny", help="Model to train: a name, a folder or a hub id.")
    parser.add_argument("--steps", type=int, default=12, help="Number of steps.")
    parser.add_argument("--groups", type=int, default=16, help="Tasks per step.")
    parser.add_argument("--group-size", type=int, default=8, help="Responses per task.")
    parser.add_argument("--max-tokens", type=int, default=96, help="Upper limit for the tokens of a response.")
    parser.add_argument("--lr", type=float, default=1e-3, help="Learning rate at the first step; it falls to 0.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of tasks and sampling.")
    parser.add_argument("--eval-tasks", type=int, default=128, help="Held-out tasks before and after training.")
    parser.add_argument("--folder", default=None, help="Folder for the checkpoint. Default: a new temporary folder.")
    options = parser.parse_args(arguments)
    options.folder = options.folder or tempfile.mkdtemp(prefix="rl-loop-")
    return options


if __name__ == "__main__":
    asyncio.run(run(parse_options(sys.argv[1:])))
