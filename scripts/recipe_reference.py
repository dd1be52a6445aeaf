"""Generate docs/recipes.md from windfall.recipe: `python scripts/recipe_reference.py > docs/recipes.md`."""

from __future__ import annotations

from collections.abc import Iterable

from windfall.recipe.changes import RULES
from windfall.recipe.env_sections import ENVS
from windfall.recipe.reference import Key, all_sections, keys_of, main_keys

HEAD = """# Recipes

One TOML file describes a run. `windfall train RECIPE.toml --dry-run` checks it and prints what differs from the
defaults. `windfall recipe --all` prints every key.
`--set section.key=value` overrides a key. Unknown keys, wrong types and impossible values are refused before any work
starts. Some keys need an extra, such as `wandb`: run `pip install -e '.[wandb]'` in a clone. `-` in the default column
means that the key is not set. `windfall recipe` prints these tables on the console, and `windfall new`
writes a recipe with the thirty keys that matter. `format = 1`, before the first section, is the version of the format;
a file without it has format 1, and a newer format than windfall knows is refused. This page is generated from
`src/windfall/recipe/` by `scripts/recipe_reference.py`.
"""
RESUME = """## What may change on resume

`runs/NAME/recipe.began.toml` holds the recipe that the run started with. `windfall resume` compares it with
`recipe.toml` and `--set`. It lists every key that differs on the console and in the event log (event `recipe`), and
refuses to resume if a key that may not change has changed. For another model, seed or environment, start a new run; it
can start from a checkpoint of this one: `windfall train RECIPE.toml --set model.path=RUN/checkpoints/step-...`.

`runs/NAME/data.began.json` holds a digest of the files of a `dataset` environment. The files may move, but
the run cannot be resumed with different contents or with added rows, because all rows together determine the order of
the tasks.

A rule for a key overrides the rule for its section. Keys and sections that are not listed may change: the fleet,
devices, engine, traces and checkpoints can differ every time a run is resumed.

| key or section | may it change? | why |
|---|---|---|
"""


VERDICTS = {"fixed": "no", "noted": "yes, with a note on the console", "free": "yes"}


def table(keys: Iterable[tuple[str, Key]]) -> list[str]:
    """The keys as a table. Each comes with the prefix of its name."""
    rows = [f"| `{prefix}{key.name}` | {_default(key.default)} | {key.meaning} |" for prefix, key in keys]
    return ["| key | default | meaning |", "|---|---|---|", *rows, ""]


def _default(text: str) -> str:
    return text if text in ("-", "required") else f"`{text}`"


def page() -> str:
    lines = [HEAD, "## The thirty keys that matter", "", "Those of `[env]` are the keys of a data set.", ""]
    lines += table((f"{section}.", key) for section, key in main_keys())
    lines += ["The sections below have all keys.", ""]
    for heading, section in all_sections():
        is_env = section in ENVS.values()
        intro = [] if is_env or not section.__doc__ else [" ".join(section.__doc__.split()), ""]
        keys = [key for key in keys_of(section) if not (is_env and key.name == "name")]  # the heading has it
        lines += [f"## {heading}", "", *intro, *table(("", key) for key in keys)]
    rules = [f"| `{key}` | {VERDICTS[verdict]} | {why} |" for key, (verdict, why) in RULES.items()]
    return "\n".join([*lines, RESUME + "\n".join(rules)]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
