"""What the user may have meant by a key that no recipe has.

Suggestions come from three sources: keys that are spelled similarly, the same key in another section, and the names
that other frameworks use for the same thing (`OTHER_NAMES`). A misspelled name of another framework is found as well.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, get_args

from windfall.errors import nearest
from windfall.recipe.policies import PolicySection
from windfall.recipe.section_base import Section, part_sections
from windfall.recipe.sections import Recipe

MEANT_BY: dict[str, str] = {
    "model": "policy",
    "env": "data environment task",
    "rollout": "generation sampler sampling",
    "train": "optimizer trainer training",
    "train.lora": "adapter peft",
    "eval": "evaluation validation",
    "engine": "inference vllm",
    "log": "logging",
    "run.folder": "output_dir",
    "run.name": "exp_name experiment_name run_name",
    "run.seed": "random_seed",
    "run.steps": "epochs iterations max_steps num_train_epochs total_epochs total_steps total_training_steps",
    "model.dtype": "bf16 precision torch_dtype",
    "model.path": "base_model model_id model_name model_name_or_path pretrained",
    "env.path": "dataset dataset_name train_files",
    "env.rewards": "reward reward_fn reward_func reward_funcs reward_function",
    "algorithm.kl": "beta init_kl_coef kl_beta kl_coef kl_loss_coef",
    "algorithm.name": "adv_estimator advantage_estimator loss_type",
    "algorithm.options.clip": "clip clip_eps clip_range clip_ratio cliprange eps_clip epsilon",
    "rollout.group_size": (
        "n n_samples n_samples_per_prompt num_generations num_return_sequences rollouts_per_example samples_per_prompt"
    ),
    "rollout.groups": (
        "batch_size global_batch_size per_device_train_batch_size prompts_per_step rollout_batch_size train_batch_size"
    ),
    "rollout.max_tokens": "max_completion_length max_length max_new_tokens max_response_length response_length",
    "rollout.replay": "replay_ratio",
    "rollout.staleness": "async_level max_async_level max_staleness off_policy_steps",
    "train.betas": "adam_beta1 adam_beta2",
    "train.checkpoint_activations": "activation_checkpointing gradient_checkpointing",
    "train.clip_norm": "grad_clip gradient_clipping max_grad_norm",
    "train.lora.alpha": "lora_alpha",
    "train.lora.rank": "lora_r lora_rank r",
    "train.lora.targets": "target_modules",
    "train.lr": "learning_rate",
    "train.micro_tokens": "gradient_accumulation_steps micro_batch_size per_device_batch_size",
    "train.minibatches": "mini_batch_size num_mini_batches ppo_mini_batch_size",
    "train.ranks": "nproc_per_node num_gpus",
    "train.rendezvous": "machines master_addr nnodes rdzv_endpoint",
    "train.schedule": "lr_scheduler lr_scheduler_type",
    "train.warmup": "warmup_ratio warmup_steps",
    "checkpoint.every": "checkpoint_interval save_freq save_interval save_steps",
    "checkpoint.keep": "save_total_limit",
    "eval.every": "eval_freq eval_interval eval_steps test_freq",
    "eval.responses": "n n_samples samples",
    "engine.max_running": "max_num_seqs",
    "fleet.local": "offload",
    "fleet.workers_max": "autoscale",
    "fleet.worker_memory": "gpu_memory_utilization",
    "fleet.workers": "num_workers worker",
    "techniques.trainer_generates": "seeding",
    "log.wandb": "project_name report_to wandb_project",
}
"""Names that other frameworks use, by the key or section of a recipe that means the same or comes closest."""
OTHER_NAMES: dict[str, list[str]] = {}
for _meant, _names in MEANT_BY.items():
    for _name in _names.split():
        OTHER_NAMES.setdefault(_name, []).append(_meant)
PLAN_KEYS = "objective train_s rollout_s budget_usd_per_h deadline_h trainer_device trainer_gpus cluster"
KUBERNETES_KEYS = "trainer_gpus trainer_memory_gib trainer_node_selector storage_gib storage_class"
REMOVED: dict[str, str] = {
    **dict.fromkeys(
        ("env.filter", "env.tasks.filter", "eval.filter"),
        "Write the rows to use into a file, for example with dataset.filter(...).to_parquet('FILE.parquet').",
    ),
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
    **dict.fromkeys(
        (f"fleet.kubernetes.{key}" for key in KUBERNETES_KEYS.split()),
        "Remove it, and write it into the manifest of the run (docs/guides/kubernetes.md).",
    ),
    "sim.lenders": "Remove it: `windfall sim` simulates no lenders; `windfall plan` estimates what they would add.",
    "sim.prices_file": "Prices do not change over time: set trace.price_usd_per_h.",
    **dict.fromkeys(
        ("sim.trainer_mean_up_s", "sim.trainer_down_s", "sim.controller_mean_up_s", "sim.controller_down_s"),
        "Remove it: a simulation does not lose its trainer or its controller.",
    ),
}
"""Keys and environments of earlier versions, and what to do instead."""
EXPERIMENTS = ("techniques", "trace", "policies")
"""Sections for experiments and special cases: a key that is unknown elsewhere is hardly one of theirs, or of a part."""
MAX_SUGGESTIONS = 3
"""A name that fits more keys than this says too little."""
CLOSE, VERY_CLOSE = 0.6, 0.8
"""Least similarity (difflib) of a key of the same section, and of any other name."""


def suggestion(path: list[str], data: dict[str, Any]) -> str:
    """Return `Did you mean 'train.lr'?` for the unknown key at `path`, or the list of keys that may stand there.

    >>> suggestion(["train", "learning_rate"], {}), suggestion(["run", "lr"], {}), suggestion(["enviroment"], {})
    ("Did you mean 'lr'?", "Did you mean 'train.lr'?", "Did you mean 'env'?")
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
    meant = OTHER_NAMES.get(word, [])
    exact = [name for name in meant if name.startswith(prefix)] or meant[:1]
    elsewhere = everywhere.get(word, [])
    exact += elsewhere if len(elsewhere) <= MAX_SUGGESTIONS else []
    similar = difflib.get_close_matches(word, here, n=1, cutoff=VERY_CLOSE if exact else CLOSE)
    found = [*(prefix + name for name in similar), *exact]
    if not found:
        other = difflib.get_close_matches(word, [*OTHER_NAMES, *everywhere], n=1, cutoff=VERY_CLOSE)
        found = [name for near in other for name in [*OTHER_NAMES.get(near, []), *everywhere.get(near, [])]]
    found = [name for name in dict.fromkeys(found) if f"{name}." != prefix]
    if not 0 < len(found) <= MAX_SUGGESTIONS:
        return nearest("", here)
    return f"Did you mean {' or '.join(repr(name.removeprefix(prefix)) for name in found)}?"


def section_at(sections: list[str], data: Any) -> type[Section]:
    """The class of the section with this path. `data` says which environment, or which other variant, it is."""
    model: type[Section] = Recipe
    for name in sections:
        data = data[int(name)] if isinstance(data, list) else data.get(name) if isinstance(data, dict) else None
        if name.isdecimal() or (model is PolicySection and name not in model.model_fields):
            continue  # the element of a list, or the name of a policy: its class is known already
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
