"""What the user may have meant by a key that no recipe has.

Suggestions are keys that are spelled similarly, and the same key in another section.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, get_args

from windfall.errors import nearest
from windfall.recipe.section import Section, part_sections
from windfall.recipe.sections import Recipe

PLAN_KEYS = "objective train_s rollout_s budget_usd_per_h deadline_h trainer_device trainer_gpus cluster"
REMOVED: dict[str, str] = {
    "algorithm.clip": "Set it in [algorithm.options].",
    "engine.keep_share": "Remove it: the prefix cache keeps earlier turns as long as there is room.",
    "env.name = 'jsonl'": (
        'Use name = "dataset": columns instead of prompt_field and answer_field, rewards instead of scoring, and '
        "eval.path instead of eval_path."
    ),
    "env.name = 'guess'": (
        'Use name = "custom" with factory = "examples.guess:Guess", and move the other keys to [env.options].'
    ),
    "env.name = 'frozen_lake'": (
        'Use name = "custom" with factory = "examples.frozen_lake:FrozenLake", and move the other keys to '
        "[env.options]."
    ),
    "env.name = 'verifiers'": (
        'Use name = "agent" with function = "examples.verifiers_agent:run", and move id, args and sampling_args to '
        "[env.options]."
    ),
    **{f"plan.{key}": "Remove it, or plan again with `windfall plan --write`." for key in PLAN_KEYS.split()},
    "fleet.autoscale": "Set fleet.workers_max.",
    "sim.lenders.requests_file": "Remove it: the requests of simulated lenders are generated.",
    "sim.prices_file": "Prices do not change over time: set trace.price_usd_per_h.",
    **dict.fromkeys(
        ("sim.trainer_mean_up_s", "sim.trainer_down_s", "sim.controller_mean_up_s", "sim.controller_down_s"),
        "Remove it: a simulation does not lose its trainer or its controller.",
    ),
    "techniques.seeding": "Set techniques.trainer_generates.",
}
"""Keys and environments of earlier versions, and what to do instead."""
EXPERIMENTS = ("techniques", "trace")
"""Sections for experiments: a key that is unknown elsewhere is hardly one of theirs, or of a part."""
MAX_SUGGESTIONS = 3
"""A name that fits more keys than this says too little."""
CLOSE, VERY_CLOSE = 0.6, 0.8
"""Least similarity (difflib) of a key of the same section, and of any other name."""


def suggestion(path: list[str], data: dict[str, Any]) -> str:
    """Return `Did you mean 'train.lr'?` for the unknown key at `path`, or the list of keys that may stand there.

    >>> suggestion(["train", "warm_up"], {}), suggestion(["run", "lr"], {})
    ("Did you mean 'warmup'?", "Did you mean 'train.lr'?")
    """
    if removed := REMOVED.get(".".join(path)):
        return removed
    *sections, word = path
    word = word.lower().replace("-", "_")
    here = list(section_at(sections, data).model_fields)
    prefix = "".join(f"{section}." for section in sections)
    everywhere = dict[str, list[str]]()
    for name in _all_keys(data):
        everywhere.setdefault(name.rpartition(".")[2], []).append(name)
    elsewhere = everywhere.get(word, [])
    exact = elsewhere if len(elsewhere) <= MAX_SUGGESTIONS else []
    similar = difflib.get_close_matches(word, here, n=1, cutoff=VERY_CLOSE if exact else CLOSE)
    found = [*(prefix + name for name in similar), *exact]
    if not found:
        found = [n for near in difflib.get_close_matches(word, everywhere, 1, VERY_CLOSE) for n in everywhere[near]]
    if not 0 < len(found) <= MAX_SUGGESTIONS:
        return nearest("", here)
    return f"Did you mean {' or '.join(repr(name.removeprefix(prefix)) for name in dict.fromkeys(found))}?"


def section_at(sections: list[str], data: Any) -> type[Section]:
    """The class of the section with this path. `data` says which environment, or which other variant, it is."""
    model: type[Section] = Recipe
    for name in sections:
        data = data[int(name)] if isinstance(data, list) else data.get(name) if isinstance(data, dict) else None
        if name.isdecimal():  # the element of a list, whose class is known already
            continue
        variants = list(sections_in(model.model_fields[name].annotation))
        chosen = data.get("name") if isinstance(data, dict) else None
        model = next((v for v in variants if len(variants) > 1 and _is_named(v, chosen)), variants[0])
    return model


def _is_named(section: type[Section], name: Any) -> bool:
    field = section.model_fields.get("name")
    return field is not None and name in get_args(field.annotation)


def sections_in(annotation: Any) -> Iterator[type[Section]]:
    """The sections among the types that a key may have."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for inner in get_args(annotation):
        yield from sections_in(inner)


def _all_keys(data: dict[str, Any]) -> Iterator[str]:
    """The keys of this recipe that may be meant elsewhere, as `section.key`. [env] has those of its environment."""
    for section in [name for name in Recipe.model_fields if name not in {*part_sections(), *EXPERIMENTS}]:
        for key in section_at([section], data).model_fields:
            yield f"{section}.{key}"
