"""`windfall sft`: start a supervised run, in a run folder and with the processes of `windfall train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windfall.errors import WindfallError
from windfall.run.commands.options import Overrides

if TYPE_CHECKING:
    from windfall.recipe.sections import Recipe


def sft(
    data: Annotated[
        Path | None, typer.Argument(metavar="DATA.jsonl", help="Rows to train on. Default: sft.path of the recipe.")
    ] = None,
    recipe: Annotated[Path | None, typer.Option(metavar="RECIPE.toml", help="Recipe. Default: all defaults.")] = None,
    set: Overrides = None,
) -> None:
    """Fine-tune a model on given completions. Ctrl-C saves and shows how to resume.

    A row has "prompt" and "completion", or "messages". The result is a model for `windfall train --set model.path=...`.
    """
    from windfall.recipe.file import load_recipe, parse_recipe
    from windfall.run import start
    from windfall.sft import files

    parsed = load_recipe(recipe, set) if recipe is not None else parse_recipe({}, where="--set", overrides=set or ())
    chosen = any(text.partition("=")[0].strip() == "run.steps" for text in set or ())
    prepared = supervised(parsed, data, steps=parsed.run.steps if chosen else None)
    folder = start.new_folder(prepared)
    files.record(prepared, folder)
    raise typer.Exit(start.train(prepared, folder))


def supervised(recipe: Recipe, data: Path | None, steps: int | None = None) -> Recipe:
    """The recipe of a supervised run: with its data and number of steps, without workers and environment. Raises
    WindfallError if the data cannot be used. `steps`: by default they follow from the epochs, because run.steps of a
    recipe may be for reinforcement learning."""
    from windfall.run.recipe_check import check_model
    from windfall.sft import files, rows

    if recipe.policies:
        what = "a supervised run has one policy"
        raise WindfallError(
            what, where="policies", fix="Leave [policies] out, and give its keys in [model] and [train]."
        )
    section = recipe.sft.model_copy(update={"path": data} if data is not None else {})
    if section.path is None:
        raise WindfallError("no data", where="sft.path", fix="Give a file: windfall sft DATA.jsonl")
    check_model(recipe)
    changed = recipe.model_copy(update={"sft": section})
    (_, train), _ = files.read(changed)
    if steps is None:
        steps = section.epochs * rows.steps_per_epoch(len(train), section.batch)
    sources = dict.fromkeys(recipe.fleet.sources)
    fleet = {"local": False, "workers": 0, "workers_max": 0, **sources}
    sections = {
        "run": {"steps": steps},
        "train": {"minibatches": 1},
        "fleet": fleet,
        "trace": {"nodes": 0, "file": None},
        "eval": {"tasks": 0},
        "log": {"samples": 0},
    }
    for name, update in sections.items():
        changed = changed.model_copy(update={name: getattr(changed, name).model_copy(update=update)})
    return changed
