"""Generate docs/recipes.md from windfall.recipe: `python scripts/recipe_reference.py > docs/recipes.md`."""

from __future__ import annotations

from typing import Any, get_args

from windfall.recipe import RULES, Lora, PlannedWorkers, SimKind, SimLenders, env_sections, file, sections
from windfall.recipe.worker_sources import SOURCES

HEAD = """# Recipes

One TOML file describes a run. `windfall train RECIPE.toml --dry-run` checks it and prints what differs from the
defaults, and what that amounts to: size of the model, devices, batch, fleet. With `--all` it prints every key.
`--set section.key=value` overrides a key. Unknown keys, wrong types and impossible values are refused before any work
starts. Some keys need an extra, such as `wandb`: run `pip install -e '.[wandb]'` in a clone. `-` in the default column
means that the key is not set. This page is generated from `src/windfall/recipe/` by `scripts/recipe_reference.py`.
"""
RESUME = """## What may change on resume

`runs/NAME/recipe.began.toml` holds the recipe that the run started with. `windfall resume` compares it with
`recipe.toml` and `--set`. It lists every key that differs on the console and in the event log (event `recipe`), and
refuses to resume if a key that may not change has changed. For another model, seed or environment, start a new run; it
can start from a checkpoint of this one: `windfall train RECIPE.toml --set model.path=RUN/checkpoints/step-...`.

`runs/NAME/data.began.json` holds a digest of the files of a `jsonl` or `dataset` environment. The files may move, but
the run cannot be resumed with different contents or with added rows, because all rows together determine the order of
the tasks.

A rule for a key overrides the rule for its section. Keys and sections that are not listed may change: the fleet,
devices, engine, traces and checkpoints can differ every time a run is resumed.

| key or section | may it change? | why |
|---|---|---|
"""


VERDICTS = {"fixed": "no", "noted": "yes, with a note on the console", "free": "yes"}


def rows(section: Any) -> list[str]:
    """The table of one section's keys."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in section.model_fields.items():
        if section in env_sections.ENVS.values() and name == "name":
            continue  # the heading already has the environment's name
        shown = "-" if field.default is None else f"`{file._toml(_plain(field.default))}`"
        default = "required" if field.is_required() else shown
        lines.append(f"| `{name}` | {default} | {' '.join((field.description or '').split())} |")
    return lines


def _plain(value: Any) -> Any:
    """The default as a value that TOML has."""
    if isinstance(value, tuple):
        return list(value)
    return value if isinstance(value, bool | int | float | dict | list) else str(value)


def page() -> str:
    parts = [HEAD]
    for name, field in sections.Recipe.model_fields.items():
        if name == "env":
            for kind in get_args(get_args(sections.Env)[0]):
                label = get_args(kind.model_fields["name"].annotation)[0]
                parts.append("\n".join([f'## [env] with name = "{label}"', "", *rows(kind), ""]))
        else:
            section: Any = field.annotation
            intro = [" ".join(section.__doc__.split()), ""] if section.__doc__ else []
            parts.append("\n".join([f"## [{name}]", "", *intro, *rows(section), ""]))
        if name == "train":
            parts.append("\n".join(["## [train.lora]", "", " ".join(str(Lora.__doc__).split()), "", *rows(Lora), ""]))
        if name == "fleet":
            for source, keys in SOURCES.items():
                parts.append(
                    "\n".join([f"## [fleet.{source}]", "", " ".join(str(keys.__doc__).split()), "", *rows(keys), ""])
                )
        if name == "sim":
            parts.append("\n".join(["## [[sim.kinds]]", "", str(SimKind.__doc__), "", *rows(SimKind), ""]))
            parts.append("\n".join(["## [sim.lenders]", "", str(SimLenders.__doc__), "", *rows(SimLenders), ""]))
        if name == "plan":
            intro = str(PlannedWorkers.__doc__)
            parts.append("\n".join(["## [[plan.workers]]", "", intro, "", *rows(PlannedWorkers), ""]))
    rules = [f"| `{key}` | {VERDICTS[verdict]} | {why} |" for key, (verdict, why) in RULES.items()]
    parts.append(RESUME + "\n".join(rules))
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(page(), end="")
