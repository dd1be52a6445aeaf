"""A recipe is either refused with an error that says how to fix it, or loaded exactly as written."""

from __future__ import annotations

import datetime
import math
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windfall import envs, parts
from windfall.algorithms import make
from windfall.errors import WindfallError
from windfall.recipe import env_sections, sections, unknown_keys
from windfall.recipe.file import dump_recipe, load_recipe, parse_recipe
from windfall.recipe.sections import Recipe

RECIPES = sorted((Path(__file__).parent.parent.parent / "recipes").rglob("*.toml"))

ASYNC_AND_DETERMINISTIC = "[run]\ndeterministic = true\n[rollout]\nstaleness = 2"


def test_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("[run]\nsteps = 7\n", encoding="utf-8-sig")
    assert load_recipe(tmp_path / "recipe.toml").run.steps == 7


def refusal(tmp_path: Path, toml: str, *overrides: str) -> str:
    path = tmp_path / "recipe.toml"
    path.write_text(toml)
    with pytest.raises(WindfallError) as e:
        load_recipe(path, list(overrides))
    return str(e.value)


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ("[trian]\nlr = 1.0", "unknown key 'trian'. Did you mean 'train'?"),
        ("zzz = 3", "unknown key 'zzz'. Known: algorithm, chat, checkpoint, "),
        ("stps = 3", "unknown key 'stps'. Did you mean 'run.steps'?"),
        ("[enviroment]\nname = 'gym'", "unknown key 'enviroment'. Did you mean 'env'?"),
        ("[env]\nname = 'agent'\ntasks = { name = 'gym', task = 'x', optons = {} }", "Did you mean 'options'?"),
        ("[optimizer]\nlr = 1.0", "unknown key 'optimizer'. Did you mean 'train' or 'train.optimizer'?"),
        ("[techniques]\nseeding = false", "unknown key 'techniques.seeding'. Did you mean 'trainer_generates'?"),
        ("[fleet]\nautoscale = 'value'", "unknown key 'fleet.autoscale'. Did you mean 'workers_max'?"),
        ("[fleet]\nfirst_seed_s = 3.0", "unknown key 'fleet.first_seed_s'"),
        ("[fleet]\nworkers = 2\nmax_workers = 2", "max_workers = 2 refuses some of 3 workers"),
        ("[train]\nzzz = 1.0", "unknown key 'train.zzz'. Known: betas, "),
        ("[train]\nlearning_rate = 1.0", "unknown key 'train.learning_rate'. Did you mean 'lr'?"),
        ("[train]\nlearnin_rate = 1.0", "unknown key 'train.learnin_rate'. Did you mean 'lr'?"),
        ("[train]\nnum_generations = 4", "unknown key 'train.num_generations'. Did you mean 'rollout.group_size'?"),
        ("[train]\nbeta = 0.1", "unknown key 'train.beta'. Did you mean 'betas' or 'algorithm.kl'?"),
        ("[rollout]\nn = 4", "unknown key 'rollout.n'. Did you mean 'group_size'?"),
        ("[eval]\nn = 4", "unknown key 'eval.n'. Did you mean 'responses'?"),
        ("[train]\nn = 4", "unknown key 'train.n'. Did you mean 'rollout.group_size'?"),
        ("[algorithm]\nclip = 0.2", "unknown key 'algorithm.clip'. Did you mean 'options.clip'?"),
        ("[train.lora]\nr = 8", "unknown key 'train.lora.r'. Did you mean 'rank'?"),
        ("[run]\nlr = 1.0", "unknown key 'run.lr'. Did you mean 'train.lr'?"),
        ("[run]\ntemperature = 1.0", "Did you mean 'rollout.temperature' or 'eval.temperature'?"),
        ("[rollout]\ntemprature = 1.0", "unknown key 'rollout.temprature'. Did you mean 'temperature'?"),
        ("[env]\nname = 'arithmetic'\nmax_step = 2", "unknown key 'env.max_step'. Did you mean 'max_steps'?"),
        ("[env]\nname = 'datasett'", "env.name = 'datasett' is not an environment. Did you mean 'dataset'?"),
        ("[env]\nname = 'jsonl'", 'is not an environment. Use name = "dataset": columns instead of prompt_field'),
        ("[env]\nname = 'frozen_lake'", 'Use name = "custom" with factory = "examples.frozen_lake:FrozenLake"'),
        (
            "[env]\nmax_steps = 3",
            "'env.name' is missing. Known: agent, arithmetic, custom, dataset, gym.",
        ),
        ("[env]\nname = 'gym'", "'env.task' is missing"),
        ("[env]\nname = 'custom'\nfactory = 'mine'", "'env.factory' = 'mine': "),
        ("[algorithm]\nname = 'grpp'", "unknown algorithm 'grpp'. Did you mean 'grpo'?"),
        ("[algorithm]\nimportance = 'clip'", "'algorithm.importance' = 'clip': must be 'truncate', 'mask' or"),
        ("[algorithm]\nimportance = 'mask'\nimportance_cap = 1", "importance = 'mask' needs an importance_cap above 1"),
        ("[algorithm]\nimportance_cap = 0", "'algorithm.importance_cap' = 0: must be greater than 0"),
        ("[algorithm.options]\nclp = 0.1", "algorithm grpo: unknown option 'clp'. Did you mean 'clip'?"),
        ("[algorithm.options]\nclip = 'wide'", "algorithm grpo: wrong type: clip = 'wide'. Use a value such as 0.2."),
        ("[algorithm.options]\nclip = [1]", "'algorithm.options.clip' = [1]: "),
        ("[run]\nsteps = 0", "'run.steps' = 0: must be greater than or equal to 1"),
        ("[run]\nsteps = '20'", "'run.steps' = '20': must be a valid integer"),
        ("[run]\nsteps = true", "'run.steps' = True: must be a valid integer"),
        ("[run]\nname = '../elsewhere'", "'run.name' = '../elsewhere': "),
        ("[run]\ndevice = 'tpu'", "'run.device' = 'tpu': must be 'auto', 'cpu' or 'cuda'"),
        ("[run]\ndevice = 'cuda:x'", "or must match pattern"),
        ("[rollout]\ntop_p = 1.5", "'rollout.top_p' = 1.5: must be less than or equal to 1"),
        ("[train]\nbetas = [0.9]", "'train.betas.1' is missing"),
        ("[train]\ncheckpoint_activations = 'x'", "'train.checkpoint_activations' = 'x': must be a valid bool"),
        ("train = 3", "'train' = 3: this is a section"),
        ("[train]\nlora = 8", "'train.lora' = 8: this is a section"),
        ("[train.lora]\nrank = 0", "'train.lora.rank' = 0: must be greater than or equal to 1"),
        ("[train.lora]\nalpha = -1.0", "'train.lora.alpha' = -1.0: must be greater than 0"),
        ("[train.lora]\nrnk = 8", "unknown key 'train.lora.rnk'. Did you mean 'rank'?"),
        ("[train.lora]\ntargets = 'q_proj'", "'train.lora.targets' = 'q_proj': must be 'all', or"),
        (
            "[train.lora]\ntargets = []",
            "'train.lora.targets' = []: must be 'all', or must have at least",
        ),
        ("env = 'gym'", "'env' = 'gym': this is a section"),
        ("[train]\nminibatches = 3", "rollout.groups = 32 cannot be split into train.minibatches = 3 equal parts"),
        ("[rollout]\ngroups = 2\n[train]\nminibatches = 4", "Set rollout.groups to a multiple of train.minibatches."),
        ("[rollout]\nstaleness = -1", "'rollout.staleness' = -1: must be greater than or equal to 0"),
        ("[rollout]\nstaleness = 1.5", "'rollout.staleness' = 1.5: must be a valid integer"),
        ("[rollout]\non_new_weights = 'stop'", "'rollout.on_new_weights' = 'stop': must be 'interrupt' or "),
        (ASYNC_AND_DETERMINISTIC, "the order in which responses finish decides what each step is trained on"),
        (ASYNC_AND_DETERMINISTIC, "run.deterministic = true excludes rollout.staleness = 2"),
        ("[run]\ndeterministic = true\n[engine]\nkv_dtype = 'fp8'", "excludes engine.kv_dtype = 'fp8'"),
        (ASYNC_AND_DETERMINISTIC, "Set rollout.staleness = 0, or run.deterministic = false."),
        (
            "[weights]\nbucket = 's3://me:secret@b/p'",
            "must not contain credentials or options: set them in the environ",
        ),
        (
            "[weights]\nbucket = 's3://b/p?key=1'",
            "must not contain credentials or options: set them in the environment",
        ),
        (
            "[weights]\nbucket = 'bucket/path'",
            "write it as s3://bucket/path, gs://bucket/path, az://container/path or ",
        ),
        ("[weights]\nbucket = 'file:///'", "write it as s3://bucket/path, gs://bucket/path, az://container/path or "),
    ],
)
def test_invalid_recipe_is_refused_with_a_fix(tmp_path: Path, toml: str, expected: str) -> None:
    message = refusal(tmp_path, toml)
    assert expected in message
    assert message.startswith(str(tmp_path / "recipe.toml"))
    assert len(message.splitlines()) == 1


def test_every_name_of_another_framework_leads_to_a_key_that_exists() -> None:
    for name, other in ((name, other) for name, others in unknown_keys.MEANT_BY.items() for other in others.split()):
        *path, key = name.split(".")
        if path == ["algorithm", "options"]:
            assert make("grpo", **{key: 0.1})
            continue
        data = {"env": {"name": "dataset"}}
        assert key in unknown_keys.section_at(path, data).model_fields, f"{other}: {name}"
        assert other not in unknown_keys.section_at(path, data).model_fields, f"{other} is a key itself"


def test_training_is_synchronous_unless_the_recipe_says_otherwise() -> None:
    assert (Recipe().rollout.staleness, Recipe().rollout.on_new_weights) == (0, "interrupt")
    written = {"run": {"deterministic": True}, "rollout": {"staleness": 0, "on_new_weights": "finish"}}
    assert parse_recipe(written, where="here").rollout.on_new_weights == "finish"
    written = {"run": {"deterministic": False}, "rollout": {"staleness": 4}}
    assert parse_recipe(written, where="here").rollout.staleness == 4


def test_all_invalid_keys_are_reported_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, "[run]\nsteps = 0\nsede = 1\n[train]\nlr = -1.0")
    assert [line.partition(": ")[2] if i == 0 else line for i, line in enumerate(message.splitlines())] == [
        "'run.steps' = 0: must be greater than or equal to 1",
        "unknown key 'run.sede'. Did you mean 'seed'?",
        "'train.lr' = -1.0: must be greater than 0",
    ]


@pytest.mark.parametrize("text", ["run.steps", "=3", "run..steps=3", ".steps=3", "run.=3", ""])
def test_malformed_override_is_refused(tmp_path: Path, text: str) -> None:
    assert "Write it as --set section.key=value." in refusal(tmp_path, "", text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run.stps=3", "unknown key 'run.stps'. Did you mean 'steps'?"),
        ("run.steps=many", "'run.steps' = 'many': must be a valid integer"),
        ("run.name.first=x", "'name' in 'run.name.first=x' is a value, not a section"),
        ("train.lr=", "'train.lr' = '': must be a valid number"),
    ],
)
def test_override_with_wrong_key_or_type_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refusal(tmp_path, "[run]\nname = 'a'", text)


def test_wrong_values_of_the_command_line_are_not_those_of_the_file(tmp_path: Path) -> None:
    assert refusal(tmp_path, "", "train.lr=-1").startswith("--set: 'train.lr' = -1: must be")
    file = f"{tmp_path / 'recipe.toml'}: "
    assert refusal(tmp_path, "[run]\nsteps = 0", "train.lr=-1").startswith(file)
    assert refusal(tmp_path, "[run]\nsteps = 0", "train.lr=1e-3").startswith(file)


CUSTOM = "[env]\nname = 'custom'\nfactory = 'my_task:Sums'\n"
DATASET = "[env]\nname = 'dataset'\npath = 'x'\nrewards = ['math', 'rewards.py:brevity']\n"


@pytest.mark.parametrize(
    ("recipe", "text", "expected"),
    [
        (CUSTOM, "env.factory=my_task.Sums", """'env.factory' = 'my_task.Sums': write it as "my_task:Sums\""""),
        (CUSTOM, "env.factory=Sums", "'env.factory' = 'Sums': write it as \"package.module:name\""),
        (CUSTOM, "env.options.mode=nan", "'env.options': mode is nan (not a number); if you mean the text"),
        (CUSTOM, "env.options.a={ b = [0.5, -nan] }", "'env.options': a.b.1 is nan"),
        (DATASET, "env.rewards=['judge.score']", """'env.rewards.0' = 'judge.score': write it as "judge:score\""""),
        (DATASET, "env.rewards=['maths']", 'write it as "math", "exact", "package.module:function" or'),
        (
            DATASET,
            "env.reward_weights=[1.0]",
            "'env': reward_weights has 1 numbers for 2 rewards: no weight for rewards.py:brevity; give one for each",
        ),
        (DATASET, "env.reward_weights=[1.0, 2.0, 3.0]", "reward_weights has 3 numbers for 2 rewards: 1 more than"),
    ],
)
def test_wrong_env_key_is_explained(tmp_path: Path, recipe: str, text: str, expected: str) -> None:
    said = refusal(tmp_path, recipe, text)
    assert expected in said
    assert "pattern" not in said
    assert "{" not in said


def test_infinite_option_reaches_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(CUSTOM)
    recipe = load_recipe(path, ["env.options.limit=inf", "env.options.mode='nan'"])
    assert envs.section_dict(recipe.env)["options"] == {"limit": math.inf, "mode": "nan"}
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path) == recipe


def test_overrides_are_toml_or_bare_words(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("[run]\nsteps = 3")
    overrides = ["run.steps=5", "train.lr = 3e-4", "run.name=2026-01-31", "train.betas=[0.8, 0.9]",
                 "run.deterministic=true", "algorithm.options.clip=0.1", "model.path= ./a folder ", 'run.device="cpu"',
                 "run.steps=7"]  # fmt: skip
    recipe = load_recipe(path, overrides)
    assert (recipe.run.steps, recipe.run.name, recipe.run.deterministic, recipe.run.device) == (
        7, "2026-01-31", True, "cpu")  # fmt: skip
    assert (recipe.train.lr, recipe.train.betas) == (3e-4, (0.8, 0.9))
    assert recipe.algorithm.options == {"clip": 0.1}
    assert recipe.model.path == "./a folder"


def test_error_for_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "demo.toml").write_text('[model]\npath = "tiny"')
    (tmp_path / "dno.toml").write_text("[project]\nname = 'not a recipe'")
    with pytest.raises(WindfallError, match=r"no such recipe file\nDid you mean 'demo.toml'\?"):
        load_recipe(tmp_path / "dmo.toml")
    with pytest.raises(WindfallError, match="Recipes are TOML files"):
        load_recipe(tmp_path / "nowhere" / "demo.toml")


@pytest.mark.parametrize("content", [b"[run\nsteps=1", b"[run]\nname = '\xff'", b"run = 1\nrun = 2"])
def test_invalid_toml_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.toml").write_bytes(content)
    with pytest.raises(WindfallError, match="not valid TOML"):
        load_recipe(tmp_path / "bad.toml")


def test_every_environment_is_registered_by_its_name() -> None:
    union = get_args(sections.Env)[0]
    assert set(env_sections.ENVS.values()) == set(get_args(union))
    assert all(get_args(kind.model_fields["name"].annotation) == (name,) for name, kind in env_sections.ENVS.items())


def again(recipe: Recipe, folder: Path, *, all_keys: bool = True) -> Recipe:
    path = folder / "again.toml"
    path.write_text(dump_recipe(recipe, all_keys=all_keys) or "[run]", encoding="utf-8")
    return load_recipe(path)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_dump_of_every_recipe_loads_again(path: Path, tmp_path: Path) -> None:
    if any(map(parts.restore, tomllib.loads(path.read_text()))):
        pytest.skip("it needs a part that is not installed")
    recipe = load_recipe(path)
    assert again(recipe, tmp_path) == recipe
    assert again(recipe, tmp_path, all_keys=False) == recipe


plain = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.dates() | st.datetimes()
options = st.recursive(plain, lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=6)


@settings(deadline=None)
@given(text=st.text(), options=st.dictionaries(st.text(), options, max_size=4))
def test_dump_of_odd_values_loads_again(tmp_path_factory: Any, text: str, options: dict[str, Any]) -> None:
    env = {"name": "gym", "task": text, "options": options, "instruction": text}
    recipe = parse_recipe({"env": env, "train": {"lr": 1e-5, "clip_norm": math.inf}}, where="here")
    for all_keys in (True, False):
        assert again(recipe, tmp_path_factory.getbasetemp(), all_keys=all_keys) == recipe


def test_dump_keeps_types() -> None:
    options = {"one": 1, "float": 1.0, "yes": True, "day": datetime.date(2026, 1, 31), "at": datetime.time(1, 2, 3)}
    recipe = parse_recipe({"env": {"name": "gym", "task": "t", "options": options}}, where="here")
    text = dump_recipe(recipe)
    for line in ('"one" = 1,', '"float" = 1.0', '"yes" = true', '"day" = 2026-01-31', '"at" = 01:02:03'):
        assert line in text


def test_removed_keys_are_refused_with_what_to_do() -> None:
    for name, instead in unknown_keys.REMOVED.items():
        path, _, value = name.partition(" = ")
        *sections, key = path.split(".")
        if any(map(parts.restore, sections)):
            continue  # the section belongs to a part that is not installed
        data: dict[str, Any] = {key: value.strip("'") or 0.5}
        for section in reversed(sections):
            data = {section: data}
        if key == "filter" and "tasks" in data.get("env", {}):
            data["env"] |= {"name": "agent", "command": ["true"]}
            data["env"]["tasks"] |= {"name": "dataset", "path": __file__}
        elif key == "filter" and "env" in data:
            data["env"] |= {"name": "dataset", "path": __file__}
        with pytest.raises(WindfallError) as e:
            parse_recipe(data, where="here")
        assert instead in str(e.value), name
