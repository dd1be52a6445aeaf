"""The keys of a recipe for readers: the ones that matter first. All texts and defaults come from the sections.

docs/recipes.md (scripts/recipe_reference.py), `windfall recipe` and `windfall new` are made from this.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from windfall.recipe.env_sections import ENVS
from windfall.recipe.file import to_toml
from windfall.recipe.policies import PolicySection
from windfall.recipe.section_base import Section
from windfall.recipe.sections import Recipe
from windfall.recipe.unknown_keys import section_at, sections_in

MAIN = (
    "run.name", "run.steps", "run.seed", "run.device", "model.path", "env.name", "env.path", "env.columns",
    "env.rewards", "env.held_out", "algorithm.name", "algorithm.kl", "rollout.groups", "rollout.group_size",
    "rollout.max_tokens", "rollout.temperature", "rollout.staleness", "train.lr", "train.warmup", "train.minibatches",
    "train.micro_tokens", "train.lora", "checkpoint.every", "eval.tasks", "eval.every", "engine.name",
    "fleet.workers", "fleet.price_usd_per_h", "fleet.host", "log.wandb",
)  # fmt: skip
"""The thirty keys that most runs need. Those of [env] are the keys of a data set."""
ENV = {"env": {"name": "dataset"}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    name: str
    default: str
    """As TOML; "required", or "-" for a key that is not set."""
    meaning: str


def keys_of(section: type[Section]) -> list[Key]:
    return [_key(section, name) for name in section.model_fields]


def _key(section: type[Section], name: str) -> Key:
    field = section.model_fields[name]
    if section in ENVS.values() and name == "name":
        return Key(name=name, default='"arithmetic"', meaning=f"Environment: {', '.join(ENVS)}.")
    default = "-" if field.default is None else to_toml(field.default)
    meaning = " ".join((field.description or _descriptions(section)[name]).split())
    return Key(name=name, default="required" if field.is_required() else default, meaning=meaning)


@cache
def _descriptions(section: type[Section]) -> dict[str, str]:
    """The text under each key in the source of its section. Pydantic can read them, too, but does it when the class is
    made: every process that reads a recipe would wait for it."""
    found = dict[str, str]()
    for base in reversed(section.__mro__[: section.__mro__.index(Section)]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for key, text in pairwise(tree.body):
            match key, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(meaning))):
                    found[name] = meaning
    return found


def main_keys() -> Iterator[tuple[str, Key]]:
    """The sections of the thirty keys, and the keys."""
    for path in MAIN:
        section, _, name = path.rpartition(".")
        yield section, _key(section_at([section], ENV), name)


def all_sections() -> Iterator[tuple[str, type[Section]]]:
    """Every section with its heading, such as `[train.lora]` or `[env] with name = "dataset"`."""
    for name, field in Recipe.model_fields.items():
        if name == "env":
            yield from ((f'[env] with name = "{label}"', section) for label, section in ENVS.items())
            continue
        (section,) = sections_in(field.annotation)
        if section is PolicySection:
            yield "[policies.NAME]", section
            continue
        yield from _with_inner(name, section)


def _with_inner(path: str, section: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    yield f"[{path}]", section
    for name, field in section.model_fields.items():
        for inner in sections_in(field.annotation):
            many = str(field.annotation).startswith("list")
            yield f"[[{path}.{name}]]" if many else f"[{path}.{name}]", inner


def written(values: Mapping[str, Any]) -> str:
    """A recipe with the thirty keys and what they mean. Keys without a value here are comments that show the default.
    `values`: by path, such as `model.path`."""
    lines, last = list[str](), ""
    for section, key in main_keys():
        if section != last:
            lines += ["", f"[{section}]"]
            last = section
        lines += [f"# {line}" for line in textwrap.wrap(key.meaning, 110)]
        value = values.get(f"{section}.{key.name}")
        default = "..." if key.default == "-" else key.default
        lines.append(f"# {key.name} = {default}" if value is None else f"{key.name} = {to_toml(value)}")
    return "\n".join(lines[1:]) + "\n"
