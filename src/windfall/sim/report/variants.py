"""The same recipe in several ways, by name: what harvesting, and each part of it, is worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from windfall.config import Recipe
from windfall.errors import WindfallError, nearest

CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "colocated": {"trace": {"nodes": 0, "file": None}, "fleet": {"workers": 0, "local": True}},
    "disaggregated": {"fleet": {"local": False}},
    "restart": {"techniques": {"migration": False}},
    "windfall": {},
    "algorithm1": {"fleet": {"offload": "feedback"}},
    "algorithm2": {"techniques": {"balancing": "algorithm2"}},
    "rlboost": {"fleet": {"offload": "feedback"}, "techniques": {"balancing": "algorithm2"}},
    "no-seeding": {"techniques": {"seeding": False}},
    "no-balancing": {"techniques": {"balancing": False}},
    "no-pipelining": {"techniques": {"pipelining": False}},
    "warned": {"sim": {"notice_s": 30.0}},
}
SAY = {
    "colocated": "the trainer's machine alone: generating and training in turn",
    "disaggregated": "the trainer only trains; workers generate",
    "restart": "responses of a lost worker begin again from zero",
    "windfall": "the recipe as it is",
    "algorithm1": "T_seed by RLBoost's Algorithm 1 instead of computed",
    "algorithm2": "placing and moving by RLBoost's Algorithm 2",
    "rlboost": "RLBoost's Algorithms 1 and 2",
    "no-seeding": "the trainer generates only when nobody else is there",
    "no-balancing": "placing in turn, and nothing moves",
    "no-pipelining": "training begins when all is generated",
    "warned": "machines are warned 30 s before they are taken",
}


def names(said: str) -> list[str]:
    """Of a list with commas; "all" is every one."""
    asked = list(CHANGES) if said == "all" else [n.strip() for n in said.split(",") if n.strip()]
    for name in asked:
        if name not in CHANGES:
            raise WindfallError(f"no variant {name!r}", where="--compare", fix=nearest(name, CHANGES))
    if not asked:
        raise WindfallError("no variant is named", where="--compare", fix=nearest("", CHANGES))
    return list(dict.fromkeys(asked))


def apply(recipe: Recipe, name: str) -> Recipe:
    sections = {section: getattr(recipe, section).model_copy(update=keys) for section, keys in CHANGES[name].items()}
    if name == "warned" and recipe.sim.notice_s:
        sections["sim"] = recipe.sim
    if name == "colocated":
        sections["sim"] = recipe.sim.model_copy(update={"prices_file": None})
    return recipe.model_copy(update=sections)


def seeded(recipe: Recipe, seeds: int) -> Sequence[Recipe]:
    """One recipe per seed: other tasks, lengths and traces."""
    return [
        recipe.model_copy(update={"run": recipe.run.model_copy(update={"seed": recipe.run.seed + n})})
        for n in range(seeds)
    ]
