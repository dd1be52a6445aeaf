"""A model without a run: evaluate it on an environment, or let it speak."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from windfall import envs, launch, models
from windfall.config import Recipe, parse
from windfall.envs.base import HELD_OUT
from windfall.events import EventLog
from windfall.rollout.manager import Rollout, seed_of
from windfall.train import checkpoint
from windfall.types import Request, Sampling


def find_checkpoint(name: str) -> tuple[str, Path | None]:
    """Where the model is, and the recipe of the run it belongs to, if any. A run stands for its newest checkpoint."""
    path = Path(name)
    if (path / "recipe.toml").is_file():
        return str(checkpoint.latest(path)), path / "recipe.toml"
    recipe = path.resolve().parent.parent / "recipe.toml"
    models.resolve(name)
    return name, recipe if path.is_dir() and recipe.is_file() else None


def evaluate(model_path: str, recipe: Recipe, *, tasks: int, temperature: float | None, show: int) -> None:
    env = envs.make(recipe.env, recipe.run.seed)
    device, dtype = launch.place(recipe)
    model = models.load(model_path, dtype=dtype, device=device)
    text = launch.text_for(model_path, model)
    longest = max(len(text.prompt(env.task(HELD_OUT + i).prompt)) for i in range(min(64, tasks)))
    engine = launch.engine_for(model, recipe, launch.derive(recipe, model, device, dtype, longest))
    out = Console(highlight=False, soft_wrap=True)
    sampling = recipe.rollout.sampling(temperature)
    rewards: list[float] = []
    lengths: list[int] = []

    async def run() -> int:
        with ThreadPoolExecutor(1) as threads, out.status("evaluating") as status:
            rollout = Rollout(
                engine, env, text, recipe.rollout, seed=recipe.run.seed, events=EventLog(Path("/dev/null")),
                threads=threads, stop=asyncio.Event(),
            )  # fmt: skip
            done = 0
            async for group in rollout.groups(range(HELD_OUT, HELD_OUT + tasks), size=1, sampling=sampling):
                rewards.extend(group.rewards)
                lengths.append(group.responses[0].made)
                done += 1
                status.update(f"evaluating {done}/{tasks}, reward so far {_mean(rewards):.3f}")
                if done <= show:
                    said = escape(text.decode(group.responses[0].tokens))
                    out.print(f"[bold]{escape(group.task.prompt)}[/]\n{said}\n-> {group.responses[0].reward}\n")
            return rollout.missing

    missing = asyncio.run(run())
    mean = _mean(rewards)
    error = math.sqrt(sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - 1) / max(1, len(rewards)))
    out.print(
        f"reward {mean:.3f} +- {error:.3f} (standard error) on {len(rewards)} held-out tasks of {recipe.env.name}"
    )
    out.print(f"mean length {_mean(lengths):.1f} tokens; temperature {sampling.temperature:g}; missing {missing}")


def generate(
    model_path: str, prompts: Sequence[str], *, n: int, max_tokens: int, sampling: Sampling, seed: int
) -> None:
    recipe = parse({"rollout": {"groups": len(prompts), "group_size": n, "max_tokens": max_tokens}}, where="generate")
    device, dtype = launch.place(recipe)
    model = models.load(model_path, dtype=dtype, device=device)
    text = launch.text_for(model_path, model)
    ids = [text.prompt(p) for p in prompts]
    engine = launch.engine_for(model, recipe, launch.derive(recipe, model, device, dtype, max(map(len, ids))))
    tokens: dict[str, list[int]] = {}
    for p, prompt in enumerate(ids):
        for i in range(n):
            request = Request(id=f"{p}/{i}", prompt=prompt, seed=seed_of(seed, p, i), max_tokens=max_tokens,
                              sampling=sampling, stop=text.stop)  # fmt: skip
            engine.add(request)
            tokens[request.id] = []
    alone = len(tokens) == 1
    said = ""
    while len(engine):
        for chunk in engine.step():
            tokens[chunk.id] += chunk.tokens
        if alone:
            whole = text.decode(tokens["0/0"])
            if not whole.endswith("\ufffd"):  # half a character: the rest comes with the next token
                print(whole[len(said) :], end="", flush=True)
                said = whole
    if alone:
        print(text.decode(tokens["0/0"])[len(said) :])
        return
    for id, made in tokens.items():
        print(f"[{id}] {text.decode(made)}")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
