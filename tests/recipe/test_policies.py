"""Several policies in a recipe: what each of them sees, which share a base, and what is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from windfall.errors import WindfallError
from windfall.recipe.changes import recipe_changes, token_settings
from windfall.recipe.file import dump_recipe, parse_recipe
from windfall.recipe.sections import Recipe
from windfall.run_folder import with_absolute_paths

ADAPTER = {"lora": {"rank": 4}}


def recipe(policies: dict[str, Any], **sections: Any) -> Recipe:
    return parse_recipe({"policies": policies, **sections}, where="recipe.toml")


def test_recipe_without_policies_has_one() -> None:
    alone = Recipe()
    assert (alone.names(), alone.bases()) == (("",), {"": ("",)})
    assert alone.of("") is alone
    assert "[policies" not in dump_recipe(alone)


def test_policy_sees_its_own_keys() -> None:
    verifier = {**ADAPTER, "model": "other", "algorithm": "gspo", "rollout": {"groups": 6}, "eval": {"tasks": 0}}
    both = recipe({"solver": {}, "verifier": verifier}, algorithm={"options": {"clip": 0.3}}, train={"lr": 0.5})
    solver, own = both.of("solver"), both.of("verifier")
    assert (own.model.path, own.algorithm.name, own.rollout.groups, own.eval.tasks) == ("other", "gspo", 6, 0)
    assert own.train.lora is not None
    assert (own.train.lora.rank, own.train.lr, own.policies) == (4, 0.5, {})
    assert own.algorithm.options == {}
    assert solver == Recipe.model_validate({
        "algorithm": {"options": {"clip": 0.3}}, "train": {"lr": 0.5}, "fleet": {"local": False},
    })  # fmt: skip


def test_recipe_with_policies_is_read_back_as_it_was() -> None:
    both = recipe({"b": {"rollout": {"groups": 4}}, "a": {**ADAPTER, "train": {"betas": [0.1, 0.2]}}})
    again = parse_recipe(tomllib.loads(dump_recipe(both)), where="recipe.toml")
    assert again == both
    assert again.names() == ("b", "a")


def test_policies_share_a_base_unless_they_train_all_weights() -> None:
    policies = {
        "reference": {"frozen": True}, "solver": {}, "player": ADAPTER, "other": {**ADAPTER, "model": "other"},
        "old": {"copy_of": "player"}, "coder": ADAPTER,
    }  # fmt: skip
    assert recipe(policies).bases() == {
        "solver": ("solver",), "player": ("player", "coder", "reference", "old"), "other": ("other",),
    }  # fmt: skip
    assert recipe(policies).names()[0] == "solver", "the lead is trained"
    old = recipe(policies).of("old").train.lora
    assert old is not None
    assert old.rank == 4
    with_lora = recipe({"solver": {}, "reference": {"frozen": True}}, train=ADAPTER)
    assert with_lora.bases() == {"solver": ("solver", "reference")}
    assert with_lora.of("reference").train.lora is None


@pytest.mark.parametrize(
    ("policies", "expected"),
    [
        ({"Solver": {}}, "'policies.Solver' = 'Solver': use up to 32 lowercase letters"),
        ({"a": {"modl": "tiny"}}, "unknown key 'policies.a.modl'. Did you mean 'model'?"),
        ({"a": {"rollout": {"group_size": 4}}}, "'group_size' cannot differ between policies; these can: groups, "),
        ({"a": {"rollout": {"groups": "4"}}}, "policies.a.rollout.groups: must be a valid integer"),
        ({"a": {"train": {"learn": 1.0}}}, "policies.a.train.learn: unknown key. "),
        ({"a": {"train": {"lora": {}}}}, "set policies.a.lora"),
        ({"a": {"train": {"ranks": 2}}}, "'ranks' is not a key for a policy's `train`; set it in [train]"),
        ({"a": {"train": {"minibatches": 5}}}, "policies.a: rollout.groups = 32 cannot be split"),
        ({"a": {"algorithm": "ppo"}}, "policies.a: unknown algorithm 'ppo'"),
        ({"a": {"frozen": True}, "b": {"copy_of": "a"}}, "policies.b.copy_of = 'a' is not a policy that is trained"),
        ({"a": {"frozen": True}}, "no policy is trained"),
        ({"a": {}, "b": {"frozen": True, **ADAPTER}}, "frozen = true excludes 'lora'"),
        ({"a": ADAPTER, "b": {"copy_of": "a", "model": "tiny"}}, "copy_of = 'a' excludes 'model'"),
        ({"a": {}, "b": {"frozen": True, "rollout": {"groups": 8}}}, "frozen = true excludes 'rollout.groups'"),
        ({"a": ADAPTER, "b": {"copy_of": "a", "eval": {"tasks": 8}}}, "copy_of = 'a' excludes 'eval'"),
        ({"a": {"eval": {"split": "test"}}}, "a.eval: 'split' cannot differ between policies; set it in [eval]"),
        ({"a": {**ADAPTER, "every": 2}}, "policies.a.every: only a policy with copy_of is renewed"),
        ({"a": {}, "b": {"copy_of": "a"}}, "'a' trains all weights, and only adapters are copied"),
    ],
)
def test_contradictions_are_refused(policies: dict[str, Any], expected: str) -> None:
    with pytest.raises(WindfallError) as e:
        recipe(policies)
    assert expected in str(e.value)


def test_what_several_trainers_cannot_do_is_refused() -> None:
    assert recipe({"a": {}}, fleet={"workers": 1}).fleet.local is False
    with pytest.raises(WindfallError, match=r"fleet\.local = true is for runs with one policy"):
        recipe({"a": {}}, fleet={"local": True})
    meeting = {"rendezvous": "10.0.0.5:29400"}
    assert recipe({"a": ADAPTER, "b": ADAPTER}, train=meeting).train.rendezvous
    with pytest.raises(WindfallError, match="these policies need 2: a, b"):
        recipe({"a": ADAPTER, "b": {}}, train=meeting)


def test_changes_on_resume_are_judged_for_each_policy() -> None:
    before = recipe({"a": {}, "b": ADAPTER})
    after = recipe({"a": {"train": {"lr": 0.5}}, "b": ADAPTER}, run={"seed": 3}, rollout={"reward_tries": 9})
    found = {change.key: change.verdict for change in recipe_changes(before, after)}
    assert found == {"run.seed": "fixed", "rollout.reward_tries": "free", "policies.a.train.lr": "noted"}
    (rank,) = recipe_changes(before, recipe({"a": {}, "b": {"lora": {"rank": 8}}}))
    assert (rank.key, rank.verdict) == ("policies.b.train.lora.rank", "fixed")
    for other in (recipe({"a": {}}), recipe({"a": ADAPTER, "b": ADAPTER}), recipe({"a": {}, "b": {"frozen": True}})):
        assert [(c.key, c.verdict) for c in recipe_changes(before, other)] == [("policies", "fixed")]


def test_tokens_depend_on_the_keys_of_every_policy() -> None:
    def settings(**of_a: Any) -> dict[str, Any]:
        return token_settings(recipe({"a": of_a, "b": ADAPTER}))

    assert settings() != settings(rollout={"temperature": 0.5})
    assert settings() == settings(rollout={"staleness": 2}) == settings(eval={"tasks": 1})
    assert not [key for key in token_settings(Recipe()) if "policies" in key]


def test_paths_of_policies_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    own = {"model": "weights", "lora": {"path": "adapter"}, "chat": {"template": "chat.jinja"}}
    moved = with_absolute_paths(recipe({"a": own, "b": {"model": "tiny"}})).policies
    assert moved["a"].model == str(tmp_path / "weights")
    assert moved["a"].lora is not None
    assert moved["a"].lora.path == tmp_path / "adapter"
    assert (moved["a"].chat["template"], moved["b"].model) == ("{{ messages }}", "tiny")
