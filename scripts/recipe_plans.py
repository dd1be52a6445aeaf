"""Write what `windfall plan` predicts for the recipes of Qwen3, and what its simulation shows, into their READMEs and
into docs/known-recipes.md: `python scripts/recipe_plans.py`."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from windfall.errors import WindfallError
from windfall.plan.options import plan
from windfall.recipe.file import load_recipe

ROOT = Path(__file__).parent.parent
FOLDERS = sorted({file.parent for file in (ROOT / "recipes").glob("*/qwen3-*.toml")})
PAGE = ROOT / "docs" / "known-recipes.md"
BEGIN, END = "<!-- plans: begin -->", "<!-- plans: end -->"
CLUSTERS = {
    "one H100": "1xH100",
    "three H100, reserved": "1xH100 + 2xH100",
    "one reserved, two spot": "1xH100 + 2xH100:spot",
}


def recipes(folder: Path) -> list[Path]:
    """The recipes of a folder, from the smallest model to the largest, all weights before adapters."""
    return sorted(
        folder.glob("qwen3-*.toml"), key=lambda file: (float(file.stem.split("-")[1][:-1]), "lora" in file.stem)
    )


def best_plan(file: Path, gpus: str) -> dict[str, Any] | None:
    """None: these GPUs are too few. Trainers of several policies do not generate."""
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            plan(str(file), gpus=gpus, top=1, simulate=True, as_json=True)
    except WindfallError:
        return None
    return json.loads(printed.getvalue())["plans"][0]


def duration(hours: float) -> str:
    """
    >>> duration(0.31), duration(12.6)
    ('19 min', '12.6 h')
    """
    return f"{60 * hours:.0f} min" if hours < 1 else f"{hours:.1f} h"


def times_and_price(plan: dict[str, Any] | None) -> str:
    """Predicted time, simulated time, and the price of the latter.

    >>> times_and_price({"hours": 0.5, "usd": 6.95, "tok_per_s": 200.0, "predicted_tok_per_s": 100.0})
    '1.0 h / 30 min, $6.95'
    """
    if plan is None:
        return "-"
    predicted = plan["hours"] * plan["tok_per_s"] / plan["predicted_tok_per_s"]
    return f"{duration(predicted)} / {duration(plan['hours'])}, ${plan['usd']:.{2 if plan['usd'] < 10 else 0}f}"


def row(file: Path) -> str:
    recipe, plans = load_recipe(file), [best_plan(file, gpus) for gpus in CLUSTERS.values()]
    trains = "all weights" if recipe.train.lora is None and not recipe.policies else "adapters"
    cells = [f"`{file.relative_to(ROOT)}`", trains, str(recipe.run.steps)]
    cells.append(f"{max(p['training_gb'] for p in plans if p is not None):.0f} GB")
    return f"| {' | '.join([*cells, *map(times_and_price, plans)])} |"


def table(folders: Sequence[Path]) -> str:
    heads = ["recipe", "trains", "steps", "memory of a training GPU", *CLUSTERS]
    lines = [
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
        *(row(file) for folder in folders for file in recipes(folder)),
    ]
    return "\n".join(lines)


def tables() -> dict[Path, str]:
    """Every page with such a table, and the table."""
    each = {folder / "README.md": table([folder]) for folder in FOLDERS}
    head = "\n".join(next(iter(each.values())).splitlines()[:2])
    return {**each, PAGE: "\n".join([head, *("\n".join(made.splitlines()[2:]) for made in each.values())])}


def between(text: str) -> str:
    """What is between the two marks of a page."""
    return text.split(BEGIN)[1].split(END)[0].strip()


if __name__ == "__main__":
    for page, made in tables().items():
        before, after = page.read_text().split(BEGIN)[0], page.read_text().split(END)[1]
        page.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}")
