"""Which recipe keys may change when a run is resumed. The table below is the only place that decides it.

    fixed      refused, because figures before and after the change would not be comparable
    noted      accepted; the console states the consequence
    free       accepted and listed. No token of a response depends on the key, so the journal stays valid

A rule for a key overrides the rule for its section. A key without any rule is free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from windfall.recipe.section_base import Section
from windfall.recipe.sections import Recipe

ChangeRule = Literal["fixed", "noted", "free"]

RULES: dict[str, tuple[ChangeRule, str]] = {
    "run.name": ("fixed", "Processes identify the run by this name, and its figures are labeled with it."),
    "run.folder": ("fixed", "A run continues in its own folder. To move a run, move that folder."),
    "run.seed": ("fixed", "The seed determines the tasks, including the held-out tasks."),
    "run.steps": ("noted", "A linear or cosine train.schedule is stretched to the new length."),
    "run.deterministic": ("noted", "Only a run that is deterministic from its first step can be repeated bit for bit."),
    "model.path": ("fixed", "A run continues from its own checkpoint; a new model would only be its KL reference."),
    "model.dtype": ("noted", "Log-probs before and after are rounded differently."),
    "env": ("fixed", "Rewards before and after would measure different tasks."),
    "env.path": ("free", "The contents of the file are compared with those at the start of the run."),
    "env.tasks.path": ("free", "The contents of the file are compared with those at the start of the run."),
    **{
        f"{section}.{key}": ("free", "")
        for section in ("env", "env.tasks")
        for key in ("servers", "servers_token", "max_sessions", "memory_mb")
    },
    "env.concurrency": ("free", ""),
    "env.time_limit_s": ("free", ""),
    "env.restart": ("free", ""),
    "env.port": ("free", ""),
    "env.directory": ("free", ""),
    "env.isolation": ("free", ""),
    "chat": ("noted", "Prompts after this point are rendered differently."),
    "algorithm": ("noted", "The steps after this point optimize a different objective."),
    "rollout": ("noted", "Responses after this point are generated with different settings."),
    "rollout.staleness": ("noted", "Responses after this point may be older or younger than before."),
    **{f"rollout.{key}": ("noted", "Later batches have other groups.") for key in ("replay", "replay_age", "select")},
    "rollout.on_new_weights": ("noted", "Running responses are treated differently when weights are published."),
    "rollout.reward_tries": ("free", ""),
    "rollout.reward_processes": ("free", ""),
    "rollout.reward_timeout_s": ("free", ""),
    "train": ("noted", "Updates after this point use different settings."),
    "train.optimizer": ("fixed", "The checkpoints of the run hold moments in one of the two forms."),
    "train.lora": ("fixed", "The checkpoints of the run hold adapters of one shape, or all weights."),
    "train.micro_tokens": ("free", ""),
    "train.checkpoint_activations": ("free", ""),
    "train.ranks": ("free", ""),
    "train.context_parallel": ("free", ""),
    "train.rendezvous": ("free", ""),
    "train.machine_timeout_s": ("free", ""),
    "train.offload": ("free", ""),
    "train.rank_timeout_s": ("free", ""),
    "train.engine_gap_alarm": ("free", ""),
    "train.engine_gap_limit": ("free", ""),
    "engine.kv_dtype": ("noted", "Log-probs before and after are rounded differently."),
    "eval": ("noted", "Rewards on held-out tasks before and after are not comparable."),
    "eval.every": ("free", ""),
    "sft": ("fixed", "Which rows a step trains on follows from these keys. To train longer, raise run.steps."),
    "sft.path": ("free", "The contents of the file are compared with those at the start of the run."),
    "sft.eval_path": ("free", "The contents of the file are compared with those at the start of the run."),
    "sft.eval_every": ("free", ""),
    "sft.max_tokens": ("free", ""),
    "policies": (
        "fixed",
        "Names, models and what is trained belong to the run; keys of a policy follow their sections.",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyChange:
    """A key whose value differs from the one that the run started with."""

    key: str
    old: Any
    new: Any
    verdict: ChangeRule
    why: str

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r} -> {self.new!r}" + (f". {self.why}" if self.why else "")


def recipe_changes(old: Recipe, new: Recipe) -> list[KeyChange]:
    """All keys that differ between the two recipes, in recipe order.

    >>> new = Recipe.model_validate({"train": {"lr": 0.5}})
    >>> [str(c) for c in recipe_changes(Recipe(), new)]
    ['train.lr: 0.0001 -> 0.5. Updates after this point use different settings.']
    """
    if _policies(old) != _policies(new):
        verdict, why = RULES["policies"]
        return [KeyChange(key="policies", old=_policies(old), new=_policies(new), verdict=verdict, why=why)]
    found = {name: _changes(old.of(name), new.of(name)) for name in new.names()}
    first, *others = found.values()
    common = [change for change in first if all(change in other for other in others)]
    return common + [
        replace(change, key=f"policies.{name}.{change.key}")
        for name, changes in found.items()
        for change in changes
        if change not in common
    ]


def _policies(recipe: Recipe) -> dict[str, Any]:
    """What cannot change: names, bases, and which policies are trained."""
    bases = {name: base for base, names in recipe.bases().items() for name in names}
    kept = {"base", "frozen", "copy_of", "slot"}
    return {n: {"base": bases[n], **own.model_dump(include=kept)} for n, own in recipe.policies.items()}


def _changes(old: Recipe, new: Recipe) -> list[KeyChange]:
    found = []
    for name, was, now in _differences(old, new):
        section, key = name.split(".")[:2]
        verdict, why = RULES.get(name) or _rule(section, key)
        if name == "run.steps" and new.train.schedule == "constant":
            verdict, why = "free", ""
        found.append(KeyChange(key=name, old=was, new=now, verdict=verdict, why=why))
    return found


def _differences(old: Section, new: Section, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(key, old, new) of what differs. A section within a section is compared key by key."""
    before, after = (section.model_dump(mode="json") for section in (old, new))
    for key in {**before, **after}:  # each environment has its own keys
        was, now = dict(old).get(key), dict(new).get(key)
        if isinstance(was, Section) and isinstance(now, Section):
            yield from _differences(was, now, f"{prefix}{key}.")
        elif before.get(key) != after.get(key):
            yield f"{prefix}{key}", before.get(key), after.get(key)


def token_settings(recipe: Recipe) -> dict[str, Any]:
    """All keys that can affect the tokens of a training response, with their values.

    `run.steps` is not among them, so a run that is extended keeps the responses of the current step. [eval]
    is not among them either, because evaluation generates its own responses. Keys such as `rollout.staleness` decide
    when a token is generated and whether it is used, not what it is: every token in the journal has its version, which
    is compared with the bound when the response is opened again and when it is used.
    """
    if recipe.policies:
        own = {f"policies.{name}": section.model_dump(include={"copy_of", "every"})
               for name, section in recipe.policies.items()}  # fmt: skip
        return own | {
            f"policies.{name}.{key}": value
            for name in recipe.names()
            for key, value in token_settings(recipe.of(name)).items()
        }
    values = recipe.model_dump(mode="json")
    sections = ("run", "model", "env", "chat", "algorithm", "rollout", "train")
    of_batches = ("staleness", "on_new_weights", "replay", "replay_age", "select")
    excluded = {"run.name", "run.folder", "run.steps", *(f"rollout.{key}" for key in of_batches)}
    return {
        f"{section}.{key}": _without_free(f"{section}.{key}", value)
        for section in sections
        for key, value in values[section].items()
        if _rule(section, key)[0] != "free" and f"{section}.{key}" not in excluded
    }


def _without_free(name: str, value: Any) -> Any:
    """The value without those of its keys that may change."""
    if not isinstance(value, dict):
        return value
    return {key: each for key, each in value.items() if RULES.get(f"{name}.{key}", ("",))[0] != "free"}


def _rule(section: str, key: str) -> tuple[ChangeRule, str]:
    return RULES.get(f"{section}.{key}") or RULES.get(section) or ("free", "")
