"""`windfall eval` and `windfall generate`: a model without a run."""

from __future__ import annotations

import asyncio
import contextlib
import math
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from windfall import devices
from windfall import run_folder as folders
from windfall.controller.gateway import agents
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.rollout.evaluation import describe_passes
from windfall.controller.rollout.grading import EnvFailures
from windfall.controller.rollout.stream import Rollout, seed_of
from windfall.controller.scheduling.versions import Offer
from windfall.controller.step_batch import Scores, describe_scores
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
from windfall.recipe.policies import refuse_several
from windfall.recipe.sections import Recipe, RolloutSection
from windfall.run.commands.in_process import in_process_worker
from windfall.run.views.figures import graded, passes, reward_parts
from windfall.trainer import checkpoint
from windfall.trainer.derived import context_of, derive, spec, text_for
from windfall.types import Group, Prompt, Request, Sampling


def find_checkpoint(name: str, policy: str = "") -> tuple[str, Path | None]:
    """The path of the model (for a run, its newest checkpoint), and the recipe of its run, if any. `policy`: which one,
    if the run has several. A frozen one has no checkpoint: it is the model that it began with."""
    path = Path(name)
    if (path / "recipe.toml").is_file():
        source, policy = path / "recipe.toml", folders.choose_policy(path, policy)
        if policy and (recipe := load_recipe(source)).policies[policy].frozen:
            return recipe.of(policy).model.path, source
        return str(checkpoint.latest(path, policy).path), source
    if policy:
        raise WindfallError("only a run has policies", where=name, fix="Give a run, or leave out --policy.")
    if (path / checkpoint.STATE).is_file():
        checkpoint.check(path, optimizer=False)
    own = path.resolve().parent.parent
    recipe = (own.parent.parent if own.parent.name == "policies" else own) / "recipe.toml"
    load.resolve(name)
    return name, recipe if path.is_dir() and recipe.is_file() else None


def _warn(line: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[yellow]warning[/] {escape(line)}")


@dataclass
class _Results:
    """What `evaluate` keeps of the groups."""

    rewards: list[float] = field(default_factory=list)
    by_task: list[tuple[float, ...]] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    shown: dict[int, str] = field(default_factory=dict)
    """By task: its first response, as it is printed."""

    def add(self, group: Group) -> None:
        self.rewards.extend(group.rewards)
        self.by_task.append(group.rewards)
        self.scores.extend(r.scores for r in group.responses)
        self.lengths.extend(r.sampled_count for r in group.responses)


def evaluate(model_path: str, recipe: Recipe, *, tasks: int, temperature: float | None, show: int) -> None:
    """`show`: number of tasks whose first response is printed."""
    refuse_several(recipe.policies)
    described = held_out.describe(recipe.env, tasks, evaluation_data(recipe))
    tasks = described.tasks
    for warning in described.warnings:
        _warn(warning)
    if is_agent(recipe):  # a run may have the port of its gateway
        recipe = recipe.model_copy(update={"env": recipe.env.model_copy(update={"port": 0})})
    out = Console(highlight=False, soft_wrap=True)
    sampling, size = recipe.rollout.sampling(temperature), recipe.eval.samples
    if sampling.temperature == 0 and size > 1:
        fix = "Raise it, or set eval.responses = 1 and eval.pass_at = []."
        raise WindfallError(f"all {size} responses to a task would be the same", where="--temperature 0", fix=fix)
    results = _Results()

    async def collect() -> EnvFailures:
        async with _rollout(model_path, recipe, tasks) as rollout:
            with out.status("evaluating") as status:
                held_out = range(HELD_OUT, HELD_OUT + tasks)
                async for group in rollout.groups(held_out, size=size, sampling=lambda policy: sampling):
                    results.add(group)
                    done, mean = len(results.by_task), _mean(results.rewards)
                    status.update(f"evaluating {done}/{tasks}, reward so far {mean:.3f}")
                    if group.index < HELD_OUT + show:  # the first tasks, not those that finish first, which are short
                        results.shown[group.index] = _example(group, rollout.text)
        return rollout.failures

    failures = asyncio.run(collect())
    if not results.rewards:
        raise failures.no_rewards(f"{tasks} held-out tasks", Counter())
    for _, example in sorted(results.shown.items()):
        out.print(example)
    _print_rewards(out, recipe, results, described.description, responses=tasks * size)
    out.print(
        f"mean length {_mean(results.lengths):.1f} tokens; temperature {sampling.temperature:g}; "
        f"rewards missing {failures.missing}"
    )
    if failures.skipped:
        out.print(f"skipped {failures.skipped} unusable tasks")


@contextlib.asynccontextmanager
async def _rollout(model_path: str, recipe: Recipe, tasks: int) -> AsyncIterator[Rollout]:
    """A rollout of this model, with a worker in this process."""
    device, dtype = devices.resolve(recipe.run.device, recipe.model.dtype, recipe.run.threads)
    async with recipe_host(recipe) as env:
        await env.ready()  # before loading the model, which may take long
        model = load.load(model_path, dtype=dtype, device=device)
        text = text_for(load.load_tokenizer(model_path), model, recipe.chat.options())
        context = context_of(model)
        if is_agent(recipe):
            prompts = agent_prompts(recipe, context)
        else:
            prompts = await prompt_lengths(env, recipe, text, HELD_OUT, min(64, tasks))
        engine, slots = _engine(recipe, model, device, dtype, prompts)
        events = EventLog(Path("/dev/null"))
        rollout = Rollout(Dispatch(events=events), env, {"": text}, recipe, seed=recipe.run.seed, events=events)
        rollout.contexts[""] = context
        with tempfile.TemporaryDirectory(prefix="windfall-eval-") as folder:
            async with agents.AgentService(recipe, Path(folder), events, env) as service:
                await service.open(rollout, {"": load.load_tokenizer(model_path)})
                async with in_process_worker(rollout.dispatch, engine, slots, on_failure=rollout.interrupt):
                    rollout.dispatch.set_offer(Offer(version=0, digest="as loaded"))
                    yield rollout


def _print_rewards(out: Console, recipe: Recipe, results: _Results, tasks: str, *, responses: int) -> None:
    mean, by_task = _mean(results.rewards), [r for r in results.by_task if r]
    means = [_mean(r) for r in by_task]  # responses to the same task are not independent
    error = math.sqrt(sum((m - mean) ** 2 for m in means) / max(1, len(means) - 1) / max(1, len(means)))
    of_all = graded({"graded": len(results.rewards), "responses": responses})
    out.print(f"reward {mean:.3f} ± {error:.3f} (standard error) on {escape(tasks)}{of_all}")
    more = describe_passes(recipe.eval, by_task) | describe_scores(results.scores)
    if line := passes(more).removeprefix(", ") + reward_parts(more):
        out.print(line.strip())


def generate(
    model_path: str, prompts: Sequence[str], *, n: int, max_tokens: int, sampling: Sampling, seed: int
) -> None:
    recipe = Recipe(rollout=RolloutSection(groups=len(prompts), group_size=n, max_tokens=max_tokens))
    device, dtype = devices.resolve(recipe.run.device, recipe.model.dtype, recipe.run.threads)
    model = load.load(model_path, dtype=dtype, device=device)
    text = text_for(load.load_tokenizer(model_path), model, recipe.chat.options())
    ids = [text.prompt(p) for p in prompts]
    try:
        engine, _ = _engine(recipe, model, device, dtype, [max(map(len, ids))])
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
    stream = len(tokens) == 1
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
    for id, response in tokens.items():
        print(f"[{id}] {text.decode(response)}")


def _engine(recipe: Recipe, model: Any, device: str, dtype: str, prompts: Sequence[int]) -> tuple[Any, int]:
    """An engine, and the number of responses that it runs at once."""
    derived = derive(recipe, model, device, dtype, prompts)
    return build_engine(spec(recipe, model.config, dtype, derived.longest), device, model=model)


def _example(group: Group, text: Text) -> str:
    """The first response to a task, as it is printed. The calls of an agent have prompts of their own."""
    first = group.responses[0]
    segments = [((*s.prompt, *s.tokens) if first.agent else s.tokens) for s in first.segments]
    response = "\n".join(escape(text.decode(ids)) for ids in segments)
    reward = "missing" if first.reward is None else f"{first.reward:g}"
    return f"[bold]{escape(_plain_text(group.task.prompt))}[/]\n{response}\nreward {reward}\n"


def _plain_text(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
