"""Write docs/recipes.md from the recipe's own definition: `python scripts/recipe_reference.py > docs/recipes.md`."""

from __future__ import annotations

from typing import Any, get_args

from windfall.config import RULES, SimKind, file, sections

HEAD = """# Recipes

A run is made from one TOML file. `windfall train RECIPE.toml --dry-run` checks it and prints it with every default
filled in; `--set section.key=value` overrides a key. Unknown keys, wrong types and impossible values are refused before
any work starts. This page is written by `scripts/recipe_reference.py`.
"""
RESUME = """## What may change on resume

`runs/NAME/recipe.began.toml` keeps the recipe that the run began with. `windfall resume` compares it with `recipe.toml`
and `--set`, lists every key that differs, on the console and in the event log (`recipe`), and refuses the fixed ones.
Another model, seed or environment needs a new run, which may start from a checkpoint of this one:
`windfall train RECIPE.toml --set model.path=RUN/checkpoints/step-...`.

`runs/NAME/data.began.json` has a digest of the files of a `jsonl` environment. They may move, but a run is not resumed
with other contents, nor with rows added: which task comes when follows from all rows.

A key beats its section. Keys and sections that are not listed are free: fleets, devices, engines, traces and
checkpoints may change from one life to the next.

| key or section | may it change? | why |
|---|---|---|
"""


SAID = {"fixed": "no", "noted": "yes, and it is said", "free": "yes"}


def rows(section: Any) -> list[str]:
    out = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in section.model_fields.items():
        if section in sections.ENVS.values() and name == "name":
            continue  # an environment's own name
        shown = "-" if field.default is None else f"`{file._toml(_plain(field.default))}`"
        default = "required" if field.is_required() else shown
        out.append(f"| `{name}` | {default} | {' '.join((field.description or '').split())} |")
    return out


def _plain(value: Any) -> Any:
    return (
        list(value)
        if isinstance(value, tuple)
        else value
        if isinstance(value, bool | int | float | dict | list)
        else str(value)
    )


def page() -> str:
    parts = [HEAD]
    for name, field in sections.Recipe.model_fields.items():
        if name == "env":
            for kind in get_args(get_args(sections.Env)[0]):
                label = get_args(kind.model_fields["name"].annotation)[0]
                parts.append("\n".join([f'## [env] with name = "{label}"', "", *rows(kind), ""]))
        else:
            parts.append("\n".join([f"## [{name}]", "", *rows(field.annotation), ""]))
        if name == "sim":
            parts.append("\n".join(["## [[sim.kinds]]", "", *rows(SimKind), ""]))
    parts.append(RESUME + "\n".join(f"| `{key}` | {SAID[verdict]} | {why} |" for key, (verdict, why) in RULES.items()))
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(page(), end="")
