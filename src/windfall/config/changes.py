"""What may change in a recipe while its run goes on. This table is the only place that decides it.

    fixed      refused, because figures before and after the change would not belong to one run
    noted      accepted; the consequence is said
    free       accepted; listed with the other changes. No token of a response depends on it: the journal stays valid

A rule for a key beats the rule for its section. A key without any rule is free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from windfall.config.sections import Recipe

Verdict = Literal["fixed", "noted", "free"]

RULES: dict[str, tuple[Verdict, str]] = {
    "run.name": ("fixed", "Processes of a run identify it by this name, and its figures carry it."),
    "run.folder": ("fixed", "A run goes on in the folder it is in. To move a run, move that folder."),
    "run.seed": ("fixed", "Tasks follow from the seed: held-out tasks of one seed are not those of another."),
    "run.steps": ("noted", "A linear or cosine train.schedule is stretched to the new length."),
    "run.deterministic": ("noted", "Only a run that was deterministic from its first step can be repeated bit by bit."),
    "model.path": ("fixed", "A run goes on from its own checkpoint; another model would only become its KL reference."),
    "model.dtype": ("noted", "Log-probs before and after are rounded differently."),
    "env": ("fixed", "Rewards before and after would measure different tasks."),
    "env.path": ("free", "The file's contents are compared with those that the run began with."),
    "algorithm": ("noted", "The steps after this point optimize a different objective."),
    "rollout": ("noted", "Responses after this point are made under other settings."),
    "rollout.reward_tries": ("free", ""),
    "rollout.reward_timeout_s": ("free", ""),
    "train": ("noted", "Updates after this point follow other settings."),
    "train.micro_tokens": ("free", ""),
    "train.checkpoint_activations": ("free", ""),
    "train.engine_gap_alarm": ("free", ""),
    "train.engine_gap_limit": ("free", ""),
    "eval": ("noted", "Rewards on held-out tasks before and after are not comparable."),
    "eval.every": ("free", ""),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyChange:
    """One key that differs from what the run began with."""

    key: str
    began: Any
    now: Any
    verdict: Verdict
    why: str

    def __str__(self) -> str:
        return f"{self.key}: {self.began!r} -> {self.now!r}" + (f". {self.why}" if self.why else "")


def changes(began: Recipe, now: Recipe) -> list[KeyChange]:
    """Every key that differs, in the order of the recipe.

    >>> now = Recipe.model_validate({"train": {"lr": 0.5}})
    >>> [str(c) for c in changes(Recipe(), now)]
    ['train.lr: 0.0001 -> 0.5. Updates after this point follow other settings.']
    """
    before, after = (r.model_dump(mode="json") for r in (began, now))
    out = []
    for section in after:
        for key in {**before[section], **after[section]}:  # environments have keys of their own
            was, is_ = before[section].get(key), after[section].get(key)
            if was != is_:
                name = f"{section}.{key}"
                verdict, why = _rule(section, key)
                if name == "run.steps" and now.train.schedule == "constant":
                    verdict, why = "free", ""
                out.append(KeyChange(key=name, began=was, now=is_, verdict=verdict, why=why))
    return out


def deciding(recipe: Recipe) -> dict[str, Any]:
    """All keys that can decide which tokens a response gets, with their values. A run that is made longer keeps the
    responses of the step under way, and evaluations have responses of their own."""
    said = recipe.model_dump(mode="json")
    sections = ("run", "model", "env", "algorithm", "rollout", "train")
    apart = {"run.name", "run.folder", "run.steps"}
    return {
        f"{section}.{key}": value
        for section in sections
        for key, value in said[section].items()
        if _rule(section, key)[0] != "free" and f"{section}.{key}" not in apart
    }


def _rule(section: str, key: str) -> tuple[Verdict, str]:
    return RULES.get(f"{section}.{key}") or RULES.get(section) or ("free", "")
