"""How long prompts are, in tokens, and whether they fit into the model's context: known before a run starts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from windfall.envs.base import EnvHost
from windfall.errors import WindfallError
from windfall.models.text import Text
from windfall.recipe.env_sections import AgentLimits
from windfall.recipe.sections import Recipe

UNKNOWN_CONTEXT = 4096
"""Context of a model whose configuration does not name it (tokens)."""


async def prompt_lengths(env: EnvHost, recipe: Recipe, text: Text, first: int = 0, count: int = 64) -> list[int]:
    """Prompt lengths in tokens of `count` tasks from `first` on. Tasks that take too long are left out."""
    await env.ready()
    timeout_s = recipe.rollout.reward_timeout_s
    calls = [env.task(first + i, timeout_s) for i in range(count)]
    done, late = await asyncio.wait(calls, timeout=2 * timeout_s)
    for future in late:
        future.cancel()
    created = [future for future in done if future.exception() is None]
    if not created:
        timed_out = f"no task was ready after {2 * timeout_s:g} s"
        why = next((str(future.exception()) for future in calls if future in done), timed_out)
        fix = "Check the environment, or raise rollout.reward_timeout_s."
        what = f"none of the first {count} tasks could be created: {why}"
        raise WindfallError(what, where=f"environment {env.name}", fix=fix)
    return [len(text.prompt(future.result().prompt)) for future in created]


def fit(recipe: Recipe, prompts: Sequence[int], context: int | None) -> int:
    """The longest of these prompts, in tokens, that leaves room for a response in the model's context. The rollout
    skips tasks with longer prompts. If no prompt fits, that is an error."""
    o = recipe.rollout
    fitting = [n for n in prompts if not context or n + o.max_tokens <= context]
    prompt_tokens = max(fitting) if fitting else min(prompts)
    longest = prompt_tokens + o.max_tokens
    lengths, page = (
        f"prompts of {prompt_tokens} tokens and rollout.max_tokens = {o.max_tokens}",
        recipe.engine.page_size,
    )
    if context and not fitting:
        fix = f"Set it to at most {max(1, context - prompt_tokens)}."
        raise WindfallError(f"{lengths} exceed the model's context of {context}", where="rollout.max_tokens", fix=fix)
    room = recipe.engine.kv_tokens // page * page
    if recipe.engine.kv_tokens and room < longest:
        what = f"a KV cache of {room} tokens has no room for one response: {lengths} need {longest}"
        fix = f"Set it to at least {-(-longest // page) * page}, or to 0."
        raise WindfallError(what, where="engine.kv_tokens", fix=fix)
    return prompt_tokens


def is_agent(recipe: Recipe) -> bool:
    return isinstance(recipe.env, AgentLimits)


def context_of(recipe: Recipe, model_context: int | None) -> int:
    """Upper limit for the tokens of a prompt and its turn together. Raises WindfallError if the model has fewer."""
    assert isinstance(recipe.env, AgentLimits)
    wanted, most = recipe.env.context, model_context or UNKNOWN_CONTEXT
    if wanted > most:
        known = f"the model's context is {most}" if model_context else f"the model does not say more than {most}"
        what = f"context = {wanted} tokens, but {known}"
        raise WindfallError(what, where="env.context", fix="Set a smaller number, or 0 for the model's context.")
    return wanted or most


def agent_prompts(recipe: Recipe, model_context: int | None) -> list[int]:
    """Prompt lengths for which memory is planned: those of agents are not known before they run."""
    return [max(1, context_of(recipe, model_context) - recipe.rollout.max_tokens)]
