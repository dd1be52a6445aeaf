"""GRPO, written as a loop of your own over windfall's verbs. It takes about a minute on a CPU.

    python examples/rl_loop.py
    python examples/rl_loop.py --steps 40 --groups 24 --model HuggingFaceTB/SmolLM2-135M-Instruct
    python examples/rl_loop.py --on http://127.0.0.1:8900 --key runs/tinker/tinker.key --lr 3e-3

With `--on`, the same loop trains an adapter on the trainer and the workers of a server (`windfall tinker`); otherwise
it trains all weights in this process. The loop decides everything: which tasks, which rewards, what credit
each token gets, when the weights change and when workers get them. windfall samples, differentiates, updates, publishes
and saves (src/windfall/verbs.py):

    sample ──▶ reward ──▶ credit ──▶ forward_backward ──▶ optim_step ──▶ publish ──▶ sample ...

Every call has an id. If the trainer is lost, the verbs raise TrainerLost: wait for `policy.connected` and repeat the
calls of the step with their ids.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from windfall.algorithms.given import Loss
from windfall.client import Client
from windfall.models import load
from windfall.models.text import Text
from windfall.recipe.file import parse_recipe
from windfall.run.own_loop import open_policy
from windfall.training import Adam, CheckpointState, Sample, samples_of
from windfall.types import Response
from windfall.verbs import Policy

LOSS = Loss(name="ppo")


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


@contextlib.asynccontextmanager
async def opened(options: argparse.Namespace) -> AsyncIterator[tuple[Policy, Text]]:
    """The policy, and the text of its tokens: on a server, or in this process."""
    if options.on:
        key = Path(options.key).read_text().strip()
        async with Client(options.on, key) as client:
            yield await client.create(seed=options.seed), Text(load.load_tokenizer(options.model))
        return
    recipe = {
        "run": {"name": "rl-loop", "steps": options.steps, "seed": options.seed, "folder": options.folder},
        "model": {"path": options.model},
        "rollout": {"max_tokens": options.max_tokens},
    }
    async with open_policy(parse_recipe(recipe, where="examples/rl_loop.py")) as own:
        yield own.policy, own.text


async def train_step(policy: Policy, text: Text, options: argparse.Namespace, step: int) -> float:
    """One step. Returns the mean reward of its responses, which the weights before the step generated."""
    first = (step - 1) * options.groups
    tasks = [draw_task(options.seed, first + n) for n in range(options.groups)]
    size, limit = options.group_size, options.max_tokens
    groups: list[list[Response]] = await asyncio.gather(
        *(
            policy.sample(text.prompt(task.prompt), size, id=f"{step}/{n}", max_tokens=limit)
            for n, task in enumerate(tasks)
        )
    )
    samples: list[Sample] = []
    rewards: list[float] = []
    tokens = sum(len(response.tokens) for responses in groups for response in responses)
    for task, responses in zip(tasks, groups, strict=True):
        found = [reward(task, text.decode(response.tokens)) for response in responses]
        rewards += found
        for response, advantage in zip(responses, advantages(found), strict=True):
            samples += samples_of(response, advantage / tokens, limit)  # the loss is a sum: this makes it a mean
    await policy.forward_backward(samples, LOSS, id=f"{step}/forward_backward")
    state = CheckpointState(step=step, next_task=first + options.groups)
    lr = options.lr * (1 - (step - 1) / options.steps)
    report = await policy.optim_step(state, Adam(lr=lr, clip_norm=1.0), id=f"{step}/optim_step")
    await policy.publish(id=f"{step}/publish")
    print(
        f"step {step:3}/{options.steps}  reward {statistics.fmean(rewards):.3f}  length {tokens / len(rewards):5.1f}  "
        f"gradient {report.grad_norm:.3f}",
        flush=True,
    )
    return statistics.fmean(rewards)


async def evaluate(policy: Policy, text: Text, options: argparse.Namespace, name: str) -> float:
    """The mean reward on tasks that are never trained on."""
    tasks = [draw_task(options.seed, 1_000_000 + n) for n in range(options.eval_tasks)]
    calls = (
        policy.sample(text.prompt(task.prompt), 1, id=f"eval {name}/{n}", max_tokens=options.max_tokens)
        for n, task in enumerate(tasks)
    )
    groups = await asyncio.gather(*calls)
    return statistics.fmean(
        reward(task, text.decode(response.tokens)) for task, (response,) in zip(tasks, groups, strict=True)
    )


async def run(options: argparse.Namespace) -> tuple[float, float]:
    """Train. Returns the rewards on held-out tasks before and after."""
    began_s = time.monotonic()
    async with opened(options) as (policy, text):
        before = await evaluate(policy, text, options, "before")
        print(f"before training: reward {before:.3f} on {options.eval_tasks} held-out tasks", flush=True)
        for step in range(1, options.steps + 1):
            await train_step(policy, text, options, step)
        after = await evaluate(policy, text, options, "after")
        path = await policy.save(id="last")
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
    parser.add_argument("--on", default="", metavar="URL", help="Address of a server. Default: train in this process.")
    parser.add_argument("--key", default="runs/tinker/tinker.key", metavar="FILE", help="With --on: the API key.")
    parser.add_argument("--folder", default=None, help="Folder for the checkpoint. Default: a new temporary folder.")
    options = parser.parse_args(arguments)
    options.folder = options.folder or tempfile.mkdtemp(prefix="rl-loop-")
    return options


if __name__ == "__main__":
    asyncio.run(run(parse_options(sys.argv[1:])))
