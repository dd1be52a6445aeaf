"""What the recipe leaves to the trainer: lengths, packs that fit into memory, and the spec of the engines."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from windfall.engine import factory
from windfall.engine.selftest import verdict
from windfall.envs.hosting import recipe_host
from windfall.envs.prompt_lengths import agent_prompts, fit, is_agent, prompt_lengths
from windfall.errors import WindfallError
from windfall.free_memory import free_bytes
from windfall.link import messages as m
from windfall.models.text import Text
from windfall.recipe.lora import DEFAULT_RANK, Lora
from windfall.recipe.sections import Recipe
from windfall.trainer.memory_plan import plan_memory
from windfall.trainer.ranks.rank_budget import ModelShape
from windfall.weights import adapter_folder
from windfall.weights.merged import is_repeated

ENDS = ("lm_head", adapter_folder.EMBEDDING)
"""The head and the embeddings, as targets of an adapter."""
WHOLE_BASE_SHARE = 0.5
"""Share of the free host memory that the bases of several ranks may use, if each has a whole one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Derived:
    """Values that the recipe leaves to windfall."""

    device: str
    dtype: str
    micro_tokens: int
    checkpoint_activations: bool
    longest: int
    """Tokens of the longest prompt and response together, judged by the first tasks."""
    host_share: float = 0.0
    """How much of the masters and moments is in host memory, from 0 to 1."""
    whole_base: bool = False
    """Whether each of several ranks has the whole base of its adapters."""
    memory: str = ""
    """On a GPU: what its memory is used for."""
    predicted_bytes: int = 0
    """Most bytes of the GPU that training will use."""


async def planned_prompts(recipe: Recipe, folder: Path, tokenizer: Any, model: Any) -> list[int]:
    """Prompt lengths in tokens for which memory is planned."""
    if is_agent(recipe):
        return agent_prompts(recipe, context_of(model))
    async with recipe_host(recipe, folder=folder) as env:
        return await prompt_lengths(env, recipe, text_for(tokenizer, model, recipe.chat.options()))


def context_of(model: Any) -> int | None:
    """The longest sequence of the model in tokens, if its configuration names it."""
    return getattr(model.config, "max_position_embeddings", None)


def text_for(tokenizer: Any, model: Any, chat: Mapping[str, Any]) -> Text:
    """`chat`: options of Text, from the recipe's [chat] section."""
    stops = getattr(model.generation_config, "eos_token_id", None)
    return Text(tokenizer, stops if isinstance(stops, list) else [] if stops is None else [stops], **chat)


def spec(recipe: Recipe, model_config: Any, dtype: str, longest: int) -> m.EngineSpec:
    """What a worker needs to build its engine."""
    e, o = recipe.engine, recipe.rollout
    return m.EngineSpec(
        model_config=model_config.to_json_string(use_diff=False),
        dtype=dtype,
        kv_tokens=e.kv_tokens,
        page_size=e.page_size,
        max_running=e.max_running,
        max_rows=e.max_rows,
        deterministic=recipe.run.deterministic,
        longest=longest,
        wanted=o.groups * o.group_size,
        engine=e.name,
        speculation=e.speculation,
        kv_dtype=e.kv_dtype,
        experts=recipe.train.replay_routing is not False,
        samplings=tuple(dict.fromkeys((o.sampling(), o.sampling(recipe.eval.temperature)))),
    )


def base_spec(
    recipe: Recipe, names: Sequence[str], model_config: Any, dtype: str, longest: Mapping[str, int]
) -> m.EngineSpec:
    """What a worker needs to build an engine for all policies of a base that it may hold. `longest`: of each, in
    tokens.

    Adapters are beside each other in the engine if there are several policies. A deterministic run with [policies]
    computes with one adapter in the same way, so that an adapter gives the same bits alone and beside others."""
    names = [name for name in names if name in recipe.answering()]
    specs = [spec(recipe.of(name), model_config, dtype, longest[name]) for name in names]
    sections = [lora for name in names if (lora := recipe.of(name).train.lora) is not None]
    beside = len(names) > 1 or bool(recipe.policies and sections and recipe.run.deterministic)
    ends = any(map(changes_ends, sections))
    if beside and ends and recipe.engine.name == "vllm":
        what = "vLLM holds no adapters of the head or the embeddings beside each other"
        fix = "Use engine.name = 'windfall', or leave lm_head and embed_tokens out."
        raise WindfallError(what, where="train.lora.targets", fix=fix)
    if not beside and ends:  # merged into one of them, head and embeddings differ
        fields = json.loads(specs[0].model_config) | {"tie_word_embeddings": False}
        specs[0] = msgspec.structs.replace(specs[0], model_config=json.dumps(fields))
    return msgspec.structs.replace(
        specs[0],
        longest=max(each.longest for each in specs),
        wanted=sum(each.wanted for each in specs),
        samplings=tuple(dict.fromkeys(sampling for each in specs for sampling in each.samplings)),
        adapters=len(names) if beside else 0,
        adapter_rank=max(map(rank_of, sections), default=0) if beside else 0,
    )


def rank_of(section: Lora) -> int:
    """The rank of an adapter, which may be that of an existing one."""
    if section.path is not None:
        return adapter_folder.read_config(section.path).rank
    return section.rank or DEFAULT_RANK


def changes_ends(section: Lora) -> bool:
    """Whether the adapter changes the head or the embeddings."""
    if section.path is not None:
        return any(not is_repeated(name) for name in adapter_folder.layers(section.path))
    return section.targets != "all" and any(target.rpartition(".")[2] in ENDS for target in section.targets)


def checked(engine: m.EngineSpec, device: str, model: Any, *, must_replay: bool = False) -> m.EngineSpec:
    """The spec with the result of the self-test added, so that workers do not have to repeat it. Raises WindfallError
    for a model that the engine or the trainer would compute differently from transformers, before any worker starts.
    Experts are recorded only if the trainer can replay them; `must_replay`: raise WindfallError if it cannot."""
    from windfall.trainer import selftest

    fields = json.loads(engine.model_config)
    how: dict[str, Any] = {"device": device, "longest": engine.longest, "adapters": engine.adapters > 0}
    selftest.check_trainer(fields, names=model.state_dict(), **how)
    if engine.experts and (why := selftest.replay_refusal(fields, device=device, names=model.state_dict())):
        if must_replay:
            fix = "Set train.replay_routing = 'auto'."
            raise WindfallError(f"routing cannot be replayed: {why}", where="train.replay_routing", fix=fix)
        if why != selftest.NO_EXPERTS:
            print(f"tokens are trained without the experts of their engine: {why}", file=sys.stderr, flush=True)
        engine = msgspec.structs.replace(engine, experts=False)
    found = factory.self_test(engine, device, model)
    verdict.check_weights(model)
    return msgspec.structs.replace(engine, checked=(found,))


def fingerprint(engine: m.EngineSpec) -> str:
    """Digest of the architecture and the engine settings. A worker with another one belongs to another run."""
    fields = json.loads(engine.model_config)
    for key in ("transformers_version", "_name_or_path", "architectures"):
        fields.pop(key, None)
    name = fields.get("model_type", "model")
    rest = [
        msgspec.to_builtins(getattr(engine, f))
        for f in engine.__struct_fields__
        if f not in ("model_config", "checked", "experts")
    ]
    return f"{name}-{xxhash.xxh3_64_hexdigest(json.dumps([fields, rest], sort_keys=True).encode())}"


def derive(
    recipe: Recipe,
    model: Any,
    device: str,
    dtype: str,
    prompts: Sequence[int],
    **place: Any,
) -> Derived:
    """Choose what the recipe leaves open. `prompts`: prompt lengths in tokens; those without room are skipped later.
    `place`: ranks, local_ranks, sharded, trains and beside, as in `plan_memory`, which raises WindfallError if the
    trainer's state does not fit."""
    shape, asked = ModelShape.of_model(model), recipe.train.checkpoint_activations
    longest = longest_of(recipe, model, prompts)
    pack, memory, peak = max(longest, 4096), "", 0.0
    host_share, whole_base = float(recipe.train.offload is True), False
    if device == "cuda":
        import torch

        total = torch.cuda.mem_get_info()[1]
        plan = plan_memory(recipe, model, longest, free=free_bytes("cuda"), total=total, host=free_bytes(), **place)
        pack, host_share, memory, peak = plan.pack_tokens, plan.layout.host_share, plan.describe(), plan.peak_bytes
        whole_base = plan.layout.frozen > 0 and not plan.layout.sharded
    elif recipe.train.lora is not None:
        needed = place.get("local_ranks", 1) * sum(p.nbytes for p in model.parameters())
        whole_base = needed < WHOLE_BASE_SHARE * free_bytes(device)
    micro = recipe.train.micro_tokens or pack
    # Per token and layer, autograd keeps about 12 vectors of the hidden size and 4 of the MLP size; and for each chosen
    # expert 4 of the hidden size. That is more than windfall's own layers keep, which do not ask.
    vectors = (12 + 4 * shape.chosen) * shape.hidden + 4 * shape.intermediate
    kept = max(micro, longest) / recipe.train.context_parallel * shape.layers * vectors * model.dtype.itemsize
    return Derived(
        device=device,
        dtype=dtype,
        micro_tokens=micro,
        longest=longest,
        checkpoint_activations=kept > 0.3 * free_bytes(device) if asked == "auto" else asked,
        host_share=host_share,
        whole_base=whole_base,
        memory=memory,
        predicted_bytes=int(peak),
    )


def longest_of(recipe: Recipe, model: Any, prompts: Sequence[int]) -> int:
    """Tokens of the longest prompt and response together."""
    return fit(recipe, prompts, context_of(model)) + recipe.rollout.max_tokens
