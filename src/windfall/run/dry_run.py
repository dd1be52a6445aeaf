"""What `windfall train --dry-run` prints: the recipe, and what it amounts to on this machine. No torch.

The text is a recipe itself: what is not a key is a comment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from windfall import devices
from windfall.models import load
from windfall.recipe.file import dump_recipe
from windfall.recipe.sections import Recipe
from windfall.run import recipe_check
from windfall.trainer.ranks.rank_place import rank_devices


def describe(recipe: Recipe, report: str, *, all_keys: bool) -> str:
    """`report`: what the checks of the recipe found. `all_keys`: print the keys that have their defaults, too."""
    lines = [dump_recipe(recipe, all_keys=all_keys)]
    if not all_keys:
        lines.append("# all other keys have their defaults: add --all to print them; docs/recipes.md describes them")
    lines += [f"# {label:<11} {text}" for label, text in facts(recipe)]
    lines += [f"# {line}" for line in (report, f"checked: {recipe_check.CHECKED}")]
    return "\n".join([*lines, f"# not checked: {recipe_check.NOT_CHECKED}; nothing was started"])


def facts(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """What the recipe amounts to, with the values that it leaves to windfall."""
    run, rollout, train = recipe.run, recipe.rollout, recipe.train
    yield "run", f"{run.steps} steps, a checkpoint every {recipe.checkpoint.every}; files in {run.folder / run.name}"
    places = devices.gpu_places(run.device)
    size, on_gpu = parameters(load.resolve(recipe.model.path)), bool(places) or run.device.startswith("cuda")
    dtype = recipe.model.dtype
    if dtype == "auto":
        dtype = "bfloat16" if on_gpu else "float32"
    known = f"{size / 1e6:,.1f} M parameters" if size else "size not known before it is loaded"
    yield "model", f"{recipe.model.path}: {known}, {dtype}"
    ranks = len(rank_devices(recipe, places))
    processes = f"{ranks} process{'es' if ranks > 1 else ''} on {'GPUs' if on_gpu and ranks > 1 else _device(on_gpu)}"
    if train.rendezvous:
        processes = f"{'the' if train.ranks == 'auto' else train.ranks} processes that join at {train.rendezvous}"
    what = "adapters (LoRA)" if train.lora else "all weights"
    yield "trainer", f"{processes}; {recipe.algorithm.name} on {what}, learning rate {train.lr:g} ({train.schedule})"
    count = rollout.groups * rollout.group_size
    yield (
        "batch",
        f"{rollout.groups} tasks x {rollout.group_size} responses per step, at most {count * rollout.max_tokens:,} "
        f"tokens; {train.minibatches} optimizer update{'s' if train.minibatches > 1 else ''}; "
        + (f"staleness up to {rollout.staleness}" if rollout.staleness else "synchronous"),
    )
    yield "fleet", "; ".join(_fleet(recipe)) or "no workers yet: the run waits until one joins"
    times = f", and every {recipe.eval.every} steps" if recipe.eval.every else ""
    held_out = f"{recipe.eval.tasks} held-out tasks before the first and after the last step{times}"
    yield "evaluation", held_out if recipe.eval.tasks else "none"


def _device(on_gpu: bool) -> str:
    return "a GPU" if on_gpu else "the CPU"


def _fleet(recipe: Recipe) -> Iterator[str]:
    f = recipe.fleet
    if f.local:
        yield "the trainer's own engine"
    if f.workers:
        yield f"{_workers(f.workers, f.workers_max)} on this machine ({f.kind})"
    if recipe.trace.nodes:
        yield f"at most {_workers(recipe.trace.nodes)} on this machine that come and go by a trace"
    for name, source in f.sources.items():
        yield f"{_workers(source.workers, source.workers_max)} from {name} ({source.kind})"


def _workers(count: int, most: int = 0) -> str:
    return f"{count}{f' to {most}' if most else ''} worker{'' if count == 1 and not most else 's'}"


def parameters(model: Path | str) -> int | None:
    """The number of parameters in the files of a model, from their headers. None: there are no such files here."""
    from safetensors import SafetensorError, safe_open

    total = 0
    for path in sorted(model.glob("*.safetensors")) if isinstance(model, Path) else []:
        try:
            with safe_open(str(path), framework="np") as file:
                total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        except (OSError, SafetensorError):  # the trainer reports it when it loads the model
            return None
    return total or None
