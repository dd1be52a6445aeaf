"""The section [policies]: several policies in one run (docs/policies.md).

A policy sees the recipe as if it were alone: `Recipe.of` puts the keys of its section into the others. Policies with
the same model are on one *base* unless they train all of its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from windfall.recipe.lora import Lora
from windfall.recipe.section_base import Count, Section

ROLLOUT = (
    "groups", "staleness", "replay", "replay_age", "max_draws", "max_tokens", "turn_tokens", "temperature", "top_p",
    "top_k",
)  # fmt: skip
"""Keys of [rollout] that may differ between policies. The others belong to the tasks, which all policies share."""
OF_TRAINING = ("groups", "replay", "replay_age", "max_draws")
"""Those of them that say which responses a policy is trained on."""
OF_TASKS = ("path", "split", "subset")
"""Keys of [eval] that cannot differ: they name the held-out tasks."""
OF_A_TRAINER = (
    "lora", "ranks", "context_parallel", "rendezvous", "machine_timeout_s", "offload", "checkpoint_activations",
    "rank_timeout_s",
)  # fmt: skip
"""Keys of [train] that cannot differ, because one trainer may have several policies."""


def _check_name(name: str) -> str:
    if not (name[:1].isalpha() and set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-") and len(name) <= 32):
        raise ValueError("use up to 32 lowercase letters, digits, '-' and '_' for a policy's name, a letter first")
    return name


PolicyName = Annotated[str, AfterValidator(_check_name)]


class PolicySection(Section):
    """One of several policies that are trained together, such as [policies.solver] and [policies.verifier]. Its keys
    replace those of other sections for this policy. Without such a section, a run has one policy."""

    model: str = ""
    """Model of this policy. Empty: `model.path`."""
    lora: Lora | None = None
    """Train an adapter: the keys of [train.lora]. Policies with the same model that all have adapters, or are not
    trained, share one copy of it in every engine and trainer. If left out: [train.lora], if there is one."""
    algorithm: str = ""
    """Algorithm of this policy. Empty: that of [algorithm]. Another one has its default options."""
    frozen: bool = False
    """Do not train this policy: it only answers, as a reference or an opponent."""
    copy_of: str = ""
    """Name of a policy with an adapter. This policy is not trained: it is an earlier version of that one."""
    slot: Literal["", "train", "sample"] = ""
    """This policy is a place for adapters that a loop of your own loads and saves while it runs: "train" to train
    them, "sample" to generate with them. The rank of `lora` is the upper limit for theirs."""
    every: Count = 10
    """With `copy_of`: the copy is renewed whenever the other policy has made this many steps."""
    rollout: dict[str, Any] = Field(default={})
    """Keys of [rollout] that differ for this policy: groups, staleness, replay, replay_age, max_draws, max_tokens,
    turn_tokens, temperature, top_p and top_k."""
    train: dict[str, Any] = Field(default={})
    """Keys of [train] that differ for this policy, such as `{ lr = 1e-5 }`."""
    chat: dict[str, Any] = Field(default={})
    """Keys of [chat] that differ for this policy."""
    eval: dict[str, Any] = Field(default={})
    """Keys of [eval] that differ for this policy. `{ tasks = 0 }` turns its evaluation off."""

    @property
    def trained(self) -> bool:
        """Whether the recipe says how it is trained. What a slot does is for a loop of your own to say."""
        return not self.frozen and not self.copy_of and not self.slot


def changes(policies: Mapping[str, PolicySection], name: str, algorithm: str) -> dict[str, dict[str, Any]]:
    """The keys that a policy changes, by section. `algorithm`: that of the recipe."""
    own = policies[name]
    weights = policies[own.copy_of] if own.copy_of else own
    train = dict(weights.train)
    if own.frozen or weights.lora is not None:
        train["lora"] = weights.lora
    another = bool(own.algorithm) and own.algorithm != algorithm
    found = {
        "model": {"path": weights.model} if weights.model else {},
        "algorithm": {"name": own.algorithm, "options": {}} if another else {},
        "rollout": own.rollout,
        "train": train,
        "chat": own.chat,
        "eval": own.eval,
    }
    return {section: keys for section, keys in found.items() if keys}


def check(policies: Mapping[str, PolicySection]) -> None:
    """Raise ValueError if sections contradict each other or have keys that a policy cannot have."""
    for name, own in policies.items():
        where = f"policies.{name}"
        if other := [key for key in own.rollout if key not in ROLLOUT]:
            can = ", ".join(ROLLOUT)
            raise ValueError(f"{where}.rollout: '{other[0]}' cannot differ between policies; these can: {can}")
        if other := [key for key in own.train if key in OF_A_TRAINER]:
            fix = f"set {where}.lora" if other[0] == "lora" else "set it in [train]"
            raise ValueError(f"{where}.train: '{other[0]}' is not a key for a policy's `train`; {fix}")
        if other := [key for key in OF_TASKS if key in own.eval]:
            raise ValueError(f"{where}.eval: '{other[0]}' cannot differ between policies; set it in [eval]")
        if own.every != PolicySection().every and not own.copy_of:
            raise ValueError(f"{where}.every: only a policy with copy_of is renewed; remove it, or set copy_of")
        if own.slot:
            _check_slot(own, where)
            continue
        kind = f"copy_of = {own.copy_of!r}" if own.copy_of else "frozen = true"
        given = [key for key in ("lora", "algorithm", "train", "eval") if getattr(own, key)]
        given += [f"rollout.{key}" for key in OF_TRAINING if key in own.rollout]
        given += [key for key in ("model", "frozen") if own.copy_of and getattr(own, key)]
        if not own.trained and given:
            raise ValueError(f"{where}: {kind} excludes '{given[0]}', because this policy is not trained; remove one")
        if own.copy_of and (own.copy_of not in policies or not policies[own.copy_of].trained):
            trained = ", ".join(n for n in policies if policies[n].trained) or "there is none"
            raise ValueError(f"{where}.copy_of = {own.copy_of!r} is not a policy that is trained ({trained})")
    slots = [name for name, own in policies.items() if own.slot]
    trained = [name for name, own in policies.items() if own.trained or own.copy_of]
    if slots and trained:
        raise ValueError(
            f"policies.{slots[0]}.slot: a loop of your own fills slots, and the recipe trains {trained[0]!r}. Make two "
            "runs of it, or set `slot` or `frozen` for all policies."
        )
    if policies and not slots and not trained:
        raise ValueError("no policy is trained: remove frozen or copy_of from one of [policies]")


def _check_slot(own: PolicySection, where: str) -> None:
    if given := [key for key in ("frozen", "copy_of", "algorithm") if getattr(own, key)]:
        raise ValueError(f"{where}: slot = {own.slot!r} excludes '{given[0]}'; remove one")
