"""What may change in a recipe while its run goes on. This table is the only place that decides it.

    fixed      refused, because figures before and after the change would not belong to one run
    noted      accepted; the consequence is said
    free       accepted; listed with the other changes

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
    "env.path": ("noted", "The file must hold the same rows in the same order."),
    "algorithm": ("noted", "The steps after this point optimize a different objective."),
    "rollout": ("noted", "Responses after this point are made under other settings."),
    "rollout.reward_tries": ("free", ""),
    "rollout.reward_timeout_s": ("free", ""),
    "train": ("noted", "Updates after this point follow other settings."),
    "train.micro_tokens": ("free", ""),
    "train.checkpoint_activations": ("free", ""),
    "eval": ("noted", "Rewards on held-out tasks before and after are not comparable."),
    "eval.every": ("free", ""),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One key that differs from what the run began with."""

    key: str
    began: Any
    now: Any
    verdict: Verdict
    why: str

    def __str__(self) -> str:
        return f"{self.key}: {self.began!r} -> {self.now!r}" + (f". {self.why}" if self.why else "")


def changes(began: Recipe, now: Recipe) -> list[Change]:
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
                verdict, why = RULES.get(name) or RULES.get(section) or ("free", "")
                if name == "run.steps" and now.train.schedule == "constant":
                    verdict, why = "free", ""
                out.append(Change(key=name, began=was, now=is_, verdict=verdict, why=why))
    return out
