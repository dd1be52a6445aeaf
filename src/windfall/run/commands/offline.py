"""`windfall eval` and `windfall generate`: a model without a run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from windfall import devices
from windfall import run_folder as folders
from windfall.controller.gateway import agents
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.rollout.evaluation import describe_passes
from windfall.controller.rollout.grading import EnvFailures
from windfall.controller.rollout.stream import Rollout, seed_of
from windfall.controller.step_batch import Scores, describe_scores
from windfall.controller.workers.versions import Offer, PolicyVersions
from windfall.engine.factory import build_engine
from windfall.envs import held_out
from windfall.envs.base import HELD_OUT
from windfall.envs.hosting import evaluation_data, recipe_host
from windfall.envs.prompt_lengths import agent_prompts, is_agent, prompt_lengths
from windfall.errors import WindfallError
from windfall.events.log import EventLog
from windfall.models import load
from windfall.models.text import Text
from windfall.recipe.file import load_recipe
from windfall.recipe.sections import ChatSection, Recipe, RolloutSection
from windfall.run.commands.in_process import in_process_worker, weights_already_loaded
from windfall.run.views.figures import graded, passes, reward_parts
from windfall.trainer import checkpoint
from windfall.trainer.derived import base_spec, context_of, longest_of, spec, text_for
from windfall.types import Group, Prompt, Request, Sampling, policy_of
from windfall.weights import adapter_folder
from windfall.weights.adapter_folder import AdapterBase, is_adapter
from windfall.weights.merged import MergedWeights
from windfall.worker.worker_link import Pull, PulledWeights


def named(model: str) -> str:
    """The run that a user means by its name alone, unless windfall has a model of that name."""
    run = folders.named(Path(model))
    return model if model in load.NAMED or run == Path(model) else str(run)


def find_checkpoint(name: str, policy: str = "") -> str:
    """The path of a model; for a run, that of its newest checkpoint. `policy`: which one, if the run has several. One
    that is not trained and has no checkpoint is the model that it began with."""
    path, policy = Path(name), folders.choose_policy(Path(name), policy)
    if (path / "recipe.toml").is_file():
        recipe = load_recipe(path / "recipe.toml") if policy else Recipe()
        own = folders.policy_folder(path, policy) / "checkpoints"
        if not recipe.is_trained(policy) and not checkpoint.list_checkpoints(own):
            return recipe.of(policy).model.path
        return str(checkpoint.latest(path, policy).path)
    if (path / checkpoint.STATE).is_file():
        checkpoint.check(path, optimizer=False)
    load.resolve(name)
    return name


def find_recipe(name: str) -> Path:
    """The recipe of a run, or of the run of a checkpoint."""
    path = Path(name)
    file = (path if (path / "recipe.toml").is_file() else folders.run_of(path)[0]) / "recipe.toml"
    if path.is_dir() and file.is_file():
        return file
    load.resolve(name)
    raise WindfallError("this checkpoint has no recipe", where=name, fix="Give one with --recipe.")


def find_chat(name: str, policy: str = "") -> ChatSection:
    """How the run of a checkpoint renders prompts; for another model, as by default."""
    path = Path(name)
    run, own = (path, policy) if (path / "recipe.toml").is_file() else folders.run_of(path)
    file = run / "recipe.toml"
    return load_recipe(file).of(own).chat if path.is_dir() and file.is_file() else ChatSection()


def find_models(name: str, recipe: Recipe, policy: str = "") -> dict[str, str]:
    """The path of a model for every policy of the recipe. A run has all of them. A checkpoint is its own policy, and
    another model is `policy`, or all of them; the others are those of the same run, or what the recipe names."""
    if not recipe.policies:
        return {"": find_checkpoint(name, policy)}
    if policy and policy not in recipe.policies:
        fix = f"Give one of: {', '.join(recipe.policies)}."
        raise WindfallError(f"the recipe has no policy {policy!r}", where="--policy", fix=fix)
    run, own = (Path(name), "") if (Path(name) / "policies").is_dir() else folders.run_of(Path(name))
    of_run = (run / "policies").is_dir()
    begin = {each: find_checkpoint(str(run), each) if of_run else recipe.of(each).model.path for each in recipe.names()}
    if of_run and not own:
        return begin
    own, model = policy or own, find_checkpoint(name)
    return begin | {own: model} if own else dict.fromkeys(begin, model)


def _warn(line: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[yellow]warning[/] {escape(line)}")


@dataclass
class _Results:
    """What `evaluate` keeps of one role."""

    by_task: list[tuple[float, ...]] = field(default_factory=list)
    """The rewards of each task in which the role spoke."""
    scores: list[Scores] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    @property
    def rewards(self) -> list[float]:
        return [reward for rewards in self.by_task for reward in rewards]

    def add(self, group: Group) -> None:
        self.by_task.append(group.rewards)
        self.scores.extend(r.scores for r in group.responses)
        self.lengths.extend(r.sampled_count for r in group.responses)


def evaluate(
    models: Mapping[str, str], recipe: Recipe, *, policy: str = "", tasks: int, temperature: float | None, show: int,
    as_json: bool = False,
) -> None:  # fmt: skip
    """`models`: by policy. `policy`: print only the rewards of its roles, with its own [eval]; by default, those of all
    policies. `temperature`: by default, that with which the run evaluates. `show`: number of tasks whose first response
    is printed. `as_json`: print only the figures to stdout."""
    described = held_out.describe(recipe.env, tasks, evaluation_data(recipe))
    tasks = described.tasks
    for warning in described.warnings:
        _warn(warning)
    if is_agent(recipe):  # a run may have the port of its gateway
        recipe = recipe.model_copy(update={"env": recipe.env.model_copy(update={"port": 0})})
    out = Console(highlight=False, soft_wrap=True, emoji=False, stderr=as_json)
    options, size = recipe.of(policy).eval, recipe.of(policy).eval.samples
    chosen = options.temperature if temperature is None else temperature
    samplings = {name: recipe.of(name).rollout.sampling(chosen) for name in models}
    if size > 1 and chosen == 0:
        fix = "Raise it, or set eval.responses = 1 and eval.pass_at = []."
        raise WindfallError(f"all {size} responses to a task would be the same", where="--temperature 0", fix=fix)
    results: dict[str, _Results] = {}
    shown: dict[int, str] = {}
    """By task: its first response, as it is printed."""

    async def collect() -> EnvFailures:
        async with _rollout(models, recipe, tasks) as rollout:
            with out.status("evaluating") as status:
                held_out = range(HELD_OUT, HELD_OUT + tasks)
                done = 0
                async for group in rollout.groups(held_out, size=size, sampling=samplings.__getitem__):
                    done += 1
                    for name in [policy] if policy else models:
                        for role, part in group.of(name).by_role().items():
                            results.setdefault(role, _Results()).add(part)
                    so_far = ", ".join(f"{role} {_mean(r.rewards):.3f}".lstrip() for role, r in results.items())
                    status.update(f"evaluating {done}/{tasks}, reward so far {so_far}")
                    if group.index < HELD_OUT + show:  # the first tasks, not those that finish first, which are short
                        shown[group.index] = _example(group, rollout.texts)
        return rollout.failures

    failures = asyncio.run(collect())
    if not any(found.rewards for found in results.values()):
        raise failures.no_rewards(f"{tasks} held-out tasks", sum(len(found.scores) for found in results.values()))
    for _, example in sorted(shown.items()):
        out.print(example)
    figures = {role: _figures(options, found) for role, found in sorted(results.items())}
    if as_json:
        for role, own in figures.items():
            own["temperature"] = samplings[policy_of(role)].temperature
            own["reward"] = own["reward"] if own["graded"] else None  # JSON has no nan
        fields = {"tasks": tasks, "env": described.description, "skipped": failures.skipped, "roles": figures}
        print(json.dumps(fields, indent=1))
        return
    for role, found in sorted(results.items()):
        label = f"{role}: " if role else ""
        _print_rewards(out, figures[role], described.description, label)
        out.print(
            f"{label}mean length {_mean(found.lengths):.1f} tokens; "
            f"temperature {samplings[policy_of(role)].temperature:g}; "
            f"rewards missing {len(found.lengths) - len(found.rewards)}"
        )
    if failures.skipped:
        out.print(f"skipped {failures.skipped} unusable tasks")


@contextlib.asynccontextmanager
async def _rollout(models: Mapping[str, str], recipe: Recipe, tasks: int) -> AsyncIterator[Rollout]:
    """A rollout of these models, by policy, with a worker in this process for each base."""
    device, dtype = devices.resolve(recipe.run.device, recipe.model.dtype, recipe.run.threads)
    bases = _bases(models)
    events = EventLog(Path("/dev/null"))
    versions = [PolicyVersions(name, base) for base, paths in bases.items() for name in paths]
    async with recipe_host(recipe) as env, contextlib.AsyncExitStack() as stack:
        await env.ready()  # before loading the model, which may take long
        dispatch, texts, contexts, workers = Dispatch(events=events, versions=versions), {}, {}, []
        for base, paths in bases.items():
            model, pull, adapters = _load_base(base, paths, dtype, device)
            longest: dict[str, int] = {}
            for name, path in paths.items():
                view, contexts[name] = recipe.of(name), context_of(model)
                texts[name] = text_for(load.load_tokenizer(path), model, view.chat.options())
                dispatch.ledger.vocabularies[name] = model.config.vocab_size
                if is_agent(recipe):
                    prompts = agent_prompts(view, contexts[name])
                else:
                    prompts = await prompt_lengths(env, view, texts[name], HELD_OUT, min(64, tasks))
                longest[name] = longest_of(view, model, prompts)
            found = base_spec(recipe, list(longest), model.config, dtype, longest)
            found = msgspec.structs.replace(found, adapters=len(adapters), adapter_rank=max(adapters, default=0))
            workers.append((base, *build_engine(found, device, model=model), pull))
        rollout = Rollout(dispatch, env, texts, recipe, seed=recipe.run.seed, events=events)
        rollout.contexts.update(contexts)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="windfall-eval-")))
        service = await stack.enter_async_context(agents.AgentService(recipe, folder, events, env))
        await service.open(rollout, {name: load.load_tokenizer(path) for name, path in models.items()})
        for number, (base, engine, slots, pull) in enumerate(workers):
            await stack.enter_async_context(
                in_process_worker(
                    dispatch, engine, slots, name=f"local-{number}", base=base, pull=pull, on_failure=rollout.interrupt
                )
            )
        for name, path in models.items():
            dispatch.set_offer(Offer(version=0, digest=path), policy=name)
        yield rollout


def _bases(models: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """By base: the paths of the models on it, by policy."""
    found: dict[str, dict[str, str]] = {}
    for name, path in models.items():
        where = load.fetch(path)
        base = load.fetch(load.adapter_base(where)) if isinstance(where, Path) and is_adapter(where) else where
        found.setdefault(str(base), {})[name] = path
    return found


def _load_base(base: str, paths: Mapping[str, str], dtype: str, device: str) -> tuple[Any, Pull, list[int]]:
    """The module, what a worker with it calls to get the weights of a policy, and the ranks of the adapters that its
    engine holds beside each other."""
    if len(paths) == 1:
        return load.load(next(iter(paths.values())), dtype=dtype, device=device), weights_already_loaded, []
    import torch

    model = load.load(base, dtype=dtype, device=device)
    weights = model.state_dict()
    digest = adapter_folder.base_digest(weights)
    shapes = {name: torch.empty_like(t, device="meta") for name, t in weights.items()}
    adapters: dict[str, MergedWeights] = {}
    for name, folder in ((name, Path(path)) for name, path in paths.items()):
        pairs, scale = {}, 1.0
        if is_adapter(folder):
            adapter_folder.check_base(folder, AdapterBase(path=base, dtype=dtype, digest=digest))
            pairs, scale = adapter_folder.read_tensors(folder, weights), adapter_folder.read_config(folder).scale
        adapters[name] = MergedWeights(shapes, pairs, scale, base_is_loaded=True)
    pull = lambda load, stop: PulledWeights(digest=load.digest, tensors=adapters[load.policy])  # noqa: E731
    return model, pull, [each.rank for each in adapters.values()]


def _figures(options: Any, results: _Results) -> dict[str, Any]:
    """What an evaluation found of one role, as in the event `eval`. `error`: the standard error of the mean reward."""
    mean, by_task = _mean(results.rewards), [r for r in results.by_task if r]
    means = [_mean(r) for r in by_task]  # responses to the same task are not independent
    error = math.sqrt(sum((m - mean) ** 2 for m in means) / max(1, len(means) - 1) / max(1, len(means)))
    counts = {"graded": len(results.rewards), "responses": len(results.lengths)}
    figures = {"reward": mean, "error": error, **counts, "mean_tokens": _mean(results.lengths)}
    return figures | describe_passes(options, by_task) | describe_scores(results.scores)


def _print_rewards(out: Console, found: Mapping[str, Any], tasks: str, label: str) -> None:
    error = f"{found['error']:.3f} (standard error)"
    out.print(f"{label}reward {found['reward']:.3f} ± {error} on {escape(tasks)}{graded(found)}")
    if line := passes(found).removeprefix(", ") + reward_parts(found):
        out.print(f"{label}{line.strip()}")


def generate(
    model_path: str, prompts: Sequence[str], *, n: int, max_tokens: int, sampling: Sampling, seed: int,
    chat: ChatSection | None = None, as_json: bool = False,
) -> None:  # fmt: skip
    recipe = Recipe(
        chat=chat or ChatSection(), rollout=RolloutSection(groups=len(prompts), group_size=n, max_tokens=max_tokens)
    )
    device, dtype = devices.resolve(recipe.run.device, recipe.model.dtype, recipe.run.threads)
    model = load.load(model_path, dtype=dtype, device=device)
    text = text_for(load.load_tokenizer(model_path), model, recipe.chat.options())
    ids = [text.prompt(p) for p in prompts]
    if not all(ids):
        raise WindfallError("the prompt has no tokens", where="--prompt", fix="Give some text.")
    try:
        longest = longest_of(recipe, model, [max(map(len, ids))])
        engine, _ = build_engine(spec(recipe, model.config, dtype, longest), device, model=model)
    except WindfallError as e:
        if e.where != "rollout.max_tokens":
            raise
        what, fix = e.what.replace(e.where, "--max-tokens"), "Shorten the prompt, or give a smaller --max-tokens."
        raise WindfallError(what, where="--prompt", fix=fix) from e
    tokens: dict[str, list[int]] = {}
    for p, prompt in enumerate(ids):
        for i in range(n):
            request = Request(id=f"{p}/{i}", prompt=prompt, seed=seed_of(seed, p, i), max_tokens=max_tokens,
                              sampling=sampling, stop=text.stop)  # fmt: skip
            engine.add(request)
            tokens[request.id] = []
    stream = len(tokens) == 1 and not as_json
    printed = ""
    while len(engine):
        for chunk in engine.step():
            tokens[chunk.id] += chunk.tokens
        if stream:
            decoded = text.decode(tokens["0/0"])
            if not decoded.endswith("\ufffd"):  # an incomplete character: the rest comes with the next token
                print(decoded[len(printed) :], end="", flush=True)
                printed = decoded
    if stream:
        print(text.decode(tokens["0/0"])[len(printed) :])
        return
    if as_json:
        asked = [prompt for prompt in prompts for _ in range(n)]
        made = zip(asked, tokens.values(), strict=True)
        rows = [{"prompt": prompt, "response": text.decode(ids), "tokens": len(ids)} for prompt, ids in made]
        print(json.dumps(rows, indent=1))
        return
    for id, response in tokens.items():
        print(f"[{id}] {text.decode(response)}")


def _example(group: Group, texts: Mapping[str, Text]) -> str:
    """The first response to a task, as it is printed. The calls of an agent, and a role that does not begin, have
    prompts of their own."""
    first = group.responses[0]
    lines = [f"[bold]{escape(_plain_text(group.task.prompt))}[/]"]
    for segment in first.segments:
        ids = (*segment.prompt, *segment.tokens) if first.agent or segment is not first else segment.tokens
        role = f"{segment.role}: " if segment.role else ""
        lines.append(escape(f"{role}{texts[policy_of(segment.role)].decode(ids)}"))
    shown = [f"{reward:g} for {role}" for role, reward in first.rewards]
    lines.append(f"reward {', '.join(shown) or ('missing' if first.reward is None else f'{first.reward:g}')}\n")
    return "\n".join(lines)


def _plain_text(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
