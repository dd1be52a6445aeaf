"""Do prompts and responses fit into the model's context and the KV cache? Known before any process starts. No torch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from windfall import run_folder as folders
from windfall.config import Recipe
from windfall.envs.base import EnvHost
from windfall.envs.hosting import env_host
from windfall.errors import WindfallError
from windfall.models import load, tokenizer
from windfall.models.text import Text
from windfall.types import Task


def check(recipe: Recipe, task: Task) -> str:
    """Refuses what the trainer would refuse, as far as the model's folder shows it. Returns what was not checked."""
    where = load.resolve(recipe.model.path)
    if not isinstance(where, Path) or not (where / "tokenizer.json").is_file():
        return f"prompts were not checked: {where} has no tokenizer.json here yet"
    try:
        text = Text(tokenizer.load(where))
    except WindfallError as e:  # transformers reads more kinds than we do
        return f"prompts were not checked: {e.what}"
    prompts = [len(text.prompt(task.prompt))]
    context = (folders.read_json(where / "config.json") or {}).get("max_position_embeddings")
    context = context if isinstance(context, int) else None
    if context and 0 < context - recipe.rollout.max_tokens < prompts[0]:  # there may be shorter ones
        prompts = asyncio.run(_first_lengths(recipe, text))
    fit(recipe, prompts, context)
    return ""


async def _first_lengths(recipe: Recipe, text: Text) -> list[int]:
    async with env_host(recipe.env, recipe.run.seed) as env:
        return await prompt_lengths(env, recipe, text)


async def prompt_lengths(env: EnvHost, recipe: Recipe, text: Text, first: int = 0, count: int = 64) -> list[int]:
    """In tokens, of the first tasks that can be made in reasonable time."""
    await env.ready()
    timeout_s = recipe.rollout.reward_timeout_s
    asked = [env.task(first + i, timeout_s) for i in range(count)]
    done, late = await asyncio.wait(asked, timeout=2 * timeout_s)
    for future in late:
        future.cancel()
    made = [future for future in done if future.exception() is None]
    if not made:
        why = next((str(future.exception()) for future in asked if future in done), f"none came in {2 * timeout_s:g} s")
        raise WindfallError(f"none of the first {count} tasks could be made: {why}", where=f"environment {env.name}")
    return [len(text.prompt(future.result().prompt)) for future in made]


def fit(recipe: Recipe, prompts: Sequence[int], context: int | None) -> int:
    """The longest of these prompts, in tokens, that leaves room for a response. Tasks with longer ones are skipped by
    the rollout; that no prompt fits is an error."""
    o = recipe.rollout
    fitting = [n for n in prompts if not context or n + o.max_tokens <= context]
    prompt_tokens = max(fitting) if fitting else min(prompts)
    longest = prompt_tokens + o.max_tokens
    if context and not fitting:
        raise WindfallError(
            f"prompts of {prompt_tokens} tokens and rollout.max_tokens = {o.max_tokens} exceed the model's context of "
            f"{context}",
            where="rollout.max_tokens",
            fix=f"Set it to at most {max(1, context - prompt_tokens)}.",
        )
    room = recipe.engine.kv_tokens // recipe.engine.page_size * recipe.engine.page_size
    if recipe.engine.kv_tokens and room < longest:
        raise WindfallError(
            f"a KV cache of {room} tokens has no room for one response: prompts of {prompt_tokens} tokens and "
            f"rollout.max_tokens = {o.max_tokens} need {longest}",
            where="engine.kv_tokens",
            fix=f"Set it to at least {-(-longest // recipe.engine.page_size) * recipe.engine.page_size}, or to 0.",
        )
    return prompt_tokens
