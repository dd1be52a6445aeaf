"""Named variants of a recipe, which show what harvesting and each of its techniques are worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from windfall.errors import WindfallError, nearest
from windfall.recipe.sections import Recipe
from windfall.sim.core.scenario import with_keys


class Variant(NamedTuple):
    description: str
    changes: dict[str, dict[str, Any]]
    """Recipe keys that the variant sets, by section."""


NO_WORKERS = {
    "trace": {"nodes": 0, "file": None},
    "fleet": {"workers": 0, "workers_max": 0, "borrowed_max": 0, "local": True},
}
VARIANTS = {
    "colocated": Variant("only the trainer's machine, which generates and trains in turn", NO_WORKERS),
    "disaggregated": Variant("the trainer only trains; workers generate", {"fleet": {"local": False}}),
    "restart": Variant(
        "responses of a lost worker start again from the first token", {"techniques": {"migration": False}}
    ),
    "windfall": Variant("the recipe as it is", {}),
    "no-local-time": Variant(
        "the trainer generates only when there is no other worker", {"techniques": {"trainer_generates": False}}
    ),
    "no-balancing": Variant(
        "round-robin placement, and no response is rebalanced", {"techniques": {"balancing": False}}
    ),
    "no-pipelining": Variant("training starts when all responses are generated", {"techniques": {"pipelining": False}}),
    "warned": Variant("machines get a notice 30 s before they are preempted", {"sim": {"notice_s": 30.0}}),
}


def names(text: str) -> list[str]:
    """Parse a comma-separated list of variants. "all" stands for every variant."""
    chosen = list(VARIANTS) if text == "all" else [n.strip() for n in text.split(",") if n.strip()]
    for name in chosen:
        if name not in VARIANTS:
            raise WindfallError(f"unknown variant {name!r}", where="--compare", fix=nearest(name, VARIANTS))
    if not chosen:
        raise WindfallError("no variant is given", where="--compare", fix=nearest("", VARIANTS))
    return list(dict.fromkeys(chosen))


def apply(recipe: Recipe, name: str) -> Recipe:
    if name == "warned" and recipe.sim.notice_s:  # the recipe has its own notice
        return recipe
    return with_keys(recipe, VARIANTS[name].changes)


def seeded(recipe: Recipe, seeds: int) -> Sequence[Recipe]:
    """One recipe per seed. Each seed has its own tasks, lengths and traces."""
    return [with_keys(recipe, {"run": {"seed": recipe.run.seed + n}}) for n in range(seeds)]
