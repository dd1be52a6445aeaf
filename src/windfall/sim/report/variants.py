"""Named variants of a recipe, which show what harvesting and each of its techniques are worth."""

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
DESCRIPTIONS = {
    "colocated": "only the trainer's machine, which generates and trains in turn",
    "disaggregated": "the trainer only trains; workers generate",
    "restart": "responses of a lost worker start again from the first token",
    "windfall": "the recipe as it is",
    "algorithm1": "T_seed by RLBoost's Algorithm 1 instead of a prediction",
    "algorithm2": "placement and migration by RLBoost's Algorithm 2",
    "rlboost": "RLBoost's Algorithms 1 and 2",
    "no-seeding": "the trainer generates only when there is no other worker",
    "no-balancing": "round-robin placement, and no response is rebalanced",
    "no-pipelining": "training starts when all responses are generated",
    "warned": "machines get a notice 30 s before they are preempted",
}


def names(text: str) -> list[str]:
    """Parse a comma-separated list of variants. "all" stands for every variant."""
    chosen = list(CHANGES) if text == "all" else [n.strip() for n in text.split(",") if n.strip()]
    for name in chosen:
        if name not in CHANGES:
            raise WindfallError(f"unknown variant {name!r}", where="--compare", fix=nearest(name, CHANGES))
    if not chosen:
        raise WindfallError("no variant is given", where="--compare", fix=nearest("", CHANGES))
    return list(dict.fromkeys(chosen))


def apply(recipe: Recipe, name: str) -> Recipe:
    sections = {section: getattr(recipe, section).model_copy(update=keys) for section, keys in CHANGES[name].items()}
    if name == "warned" and recipe.sim.notice_s:
        sections["sim"] = recipe.sim
    if name == "colocated":
        sections["sim"] = recipe.sim.model_copy(update={"prices_file": None})
    return recipe.model_copy(update=sections)


def seeded(recipe: Recipe, seeds: int) -> Sequence[Recipe]:
    """One recipe per seed. Each seed has its own tasks, lengths and traces."""
    return [
        recipe.model_copy(update={"run": recipe.run.model_copy(update={"seed": recipe.run.seed + n})})
        for n in range(seeds)
    ]
