"""The trainer process: model, optimizer, checkpoints, and the weight server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from windfall import devices, errors
from windfall import recipe as config
from windfall import run_folder as folders
from windfall.controller.gateway import agents
from windfall.engine import factory as build
from windfall.engine.selftest import verdict
from windfall.envs.hosting import recipe_host
from windfall.errors import WindfallError
from windfall.free_memory import free_bytes
from windfall.link import auth, listener, tls
from windfall.link import messages as m
from windfall.link.socket import Dialer
from windfall.models import load
from windfall.models.text import Text
from windfall.processes import process
from windfall.recipe import Recipe
from windfall.run import local_worker as local_engine
from windfall.run.local_worker import LocalEngine, ModuleEngine, RankEngines
from windfall.run.recipe_check import fit, prompt_lengths
from windfall.trainer import checkpoint, trained_weights
from windfall.trainer.agent import TrainerAgent
from windfall.trainer.model import activation_memory
from windfall.trainer.own_engine.trainer_engine import MAX_KEPT_SHARE
from windfall.trainer.ranks import process as rank
from windfall.trainer.ranks import rank_budget
from windfall.trainer.ranks.process import RankPlace, Setup, TrainerPart, crashed
from windfall.trainer.ranks.rank_group import RANK_LOST
from windfall.training import CheckpointState

ALONE = RankPlace()
DAMAGE_NOTE = "damaged.txt"
"""File in a checkpoint that was set aside: it says what is wrong with the checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Derived:
    """Values that the recipe leaves to windfall."""

    device: str
    dtype: str
    micro_tokens: int
    checkpoint_activations: bool
    longest: int
    """Tokens of the longest prompt and response together, judged by the first tasks."""


def main(folder: Path, place: RankPlace = ALONE) -> int:
    from windfall.trainer.ranks.ranks import RankLost
    from windfall.weights.meeting import PublishFailed

    recipe = config.load(folder / "recipe.toml")
    with folders.owned(folder, "trainer", timeout_s=10.0):
        try:
            return asyncio.run(errors.guard(_main(recipe, folder, place)))
        except WindfallError as e:
            return folders.fail(folder, "trainer", e, 2)
        except (RankLost, PublishFailed) as e:
            traceback.print_exc()
            # The rank that was lost may have written down why.
            folders.fail(folder, "trainer", crashed("the trainer", e, folder / "trainer.log"), first=True)
            return RANK_LOST
        except Exception as e:  # fault boundary: the traceback goes to the log, its last line to the supervisor
            traceback.print_exc()
            if (denied := errors.file_system_error(e, folder)) is not None:
                return folders.fail(folder, "trainer", denied, 2, first=True)
            error = crashed("the trainer", e, folder / "trainer.log")
            return folders.fail(folder, "trainer", error, first=True)


async def _main(recipe: Recipe, folder: Path, place: RankPlace) -> int:
    import torch

    from windfall.weights.serve import serve

    device, dtype = rank.choose_device(recipe, place)
    orders, sharded = rank.join(recipe, place, device), bool(place.rendezvous)
    found, notes = _find_checkpoint(folder / "checkpoints")
    source = str(found.path) if found else recipe.model.path
    state = found.state if found else CheckpointState(step=0, next_task=0)
    where_loaded = "cpu" if sharded else device
    model = load.load(trained_weights.model_to_load(recipe, found), dtype=dtype, device=where_loaded)
    if device == "cpu":
        devices.choose_matmul_library(model, deterministic=recipe.run.deterministic)
    tokenizer = load.load_tokenizer(source)
    _write_tokenizer(tokenizer, model, folder / "tokenizer")
    prompts = await _prompts(recipe, folder, tokenizer, model)
    derived = derive(recipe, model, device, dtype, prompts, ranks=place.size, sharded=sharded)
    engine = checked(spec(recipe, model.config, dtype, derived.longest), device, model)
    loaded = trained_weights.prepare(model, recipe, found, dtype=dtype)
    reference = loaded.reference(recipe, dtype=dtype, device=where_loaded) if recipe.algorithm.kl else None
    setup = Setup(
        model_config=model.config, dtype=dtype, micro_tokens=derived.micro_tokens,
        checkpoint_activations=derived.checkpoint_activations, onednn=bool(torch.backends.mkldnn.enabled),
        checkpoint=found.path if found else None, adapter=loaded.adapters.config if loaded.adapters else None,
    )  # fmt: skip
    build_part = partial(rank.build_part, recipe, folder, orders=orders, loaded=loaded, reference=reference)
    orders.add("build", build_part)
    part = orders.call("build", setup)
    trainer, publisher, weights = part.trainer, part.publisher, part.weights
    if sharded:
        model.to("meta")  # the ranks have the weights; the module is still needed to write checkpoints
        if isinstance(reference, torch.nn.Module):
            reference.to("meta")
    if not trainer.learner.has_graph:  # it decides for every pack which activations to keep
        derived = replace(derived, checkpoint_activations=False)
    token, secret, f = auth.read_token(folder / "token"), auth.make_token(folder / "trainer.secret"), recipe.fleet
    listener.raise_file_limit()
    server = await serve(
        publisher, host=f.host, port=f.weights_port, key=auth.weights_key(token), ssl=tls.server_context(f)
    )
    facts = weights.facts() | {"rank_pids": " ".join(map(str, part.pids)) if sharded else ""}
    facts["machine"] = local_engine.describe(device, place.size)

    def hello(**more: Any) -> m.TrainerHello:
        now = {"pid": os.getpid(), "age_s": process.age_s(), **asdict(derived)}
        return m.TrainerHello(
            micro_tokens=derived.micro_tokens, model=fingerprint(engine), engine=engine, facts=facts | now | notes,
            url=f"{'https' if f.tls_cert else 'http'}://_:{server.port}", **more,
        )  # fmt: skip

    address = await _address(folder)
    where = lambda: (folders.address(folder) or {}).get("url", address)  # noqa: E731
    dialer = Dialer(
        address, "/trainer", m.ToTrainer, ssl=tls.client_context(address, pinned=f.tls_cert),
        max_frame_bytes=m.MAX_TRAINER_FRAME_BYTES,
    )  # fmt: skip
    write = partial(weights.write_published, model, publisher, orders) if sharded else weights.saved.save_pretrained
    local = _local_engine(recipe, folder, place, part, device)
    host = TrainerAgent(
        trainer=trainer, state=state, secret=secret, dialer=dialer, hello=hello,
        lock=threading.Lock() if local is None else local.lock,
        publish=lambda version: orders.call("publish", version),
        update_bytes=lambda: trained_weights.update_bytes(publisher),
        give_back=(lambda: orders.call("free_memory")) if isinstance(local, RankEngines) else lambda: None,
        save=lambda now: checkpoint.save(
            folder / "checkpoints", now, tokenizer=tokenizer, write_optimizer=trainer.write_optimizer,
            write_model=write, keep=recipe.checkpoint.keep, base=loaded.base,
        ),
        address=where,
    )  # fmt: skip
    orders.add("publish", partial(weights.publish, publisher, copied=partial(_copied, host, local)))
    try:
        return await local_engine.run_trainer(host, local, f, secret, where)
    finally:
        await dialer.close()
        await server.close()
        publisher.close()


async def _prompts(recipe: Recipe, folder: Path, tokenizer: Any, model: Any) -> list[int]:
    """Prompt lengths in tokens for which memory is planned."""
    if agents.is_agent(recipe):
        return agents.prompts(recipe, getattr(model.config, "max_position_embeddings", None))
    async with recipe_host(recipe, folder=folder) as env:
        return await prompt_lengths(env, recipe, text_for(tokenizer, model, recipe.chat.options()))


def _local_engine(recipe: Recipe, folder: Path, place: RankPlace, part: TrainerPart, device: str) -> LocalEngine | None:
    if not recipe.fleet.local:
        return None
    if not place.rendezvous:
        return ModuleEngine(part.weights, device)
    return RankEngines(part, folder, threads=rank.cpu_threads(recipe, place))


def _copied(host: TrainerAgent, local: LocalEngine | None) -> None:
    """The rows of rank 0 are copied, so its module may be used again."""
    if isinstance(local, RankEngines):
        rank.free_memory()
    host.release_module()


def _find_checkpoint(folder: Path) -> tuple[checkpoint.IntactCheckpoint | None, dict[str, str]]:
    """Set damaged checkpoints aside. Returns the one to continue from, and what the controller should report."""
    found, notes = checkpoint.newest_intact(folder), dict[str, str]()
    if found is None:
        return None, notes
    print(f"{found.path.name}: {found.checked}", file=sys.stderr, flush=True)
    if not found.checked.hashed:
        notes["checkpoint_unchecked"] = f"{found.path.name} {found.checked}"
    for damaged in found.damaged:
        with contextlib.suppress(OSError):  # the disk is full; the log has the reason
            (damaged.checkpoint / DAMAGE_NOTE).write_text(damaged.short, encoding="utf-8")
        print(f"damaged: {damaged.short} (now {checkpoint.set_aside(damaged).name})", file=sys.stderr, flush=True)
    if damages := _set_aside_after(folder, found.state.step):
        notes["checkpoint_damaged"] = "; ".join(damages)
    return found, notes


def _set_aside_after(folder: Path, step: int) -> list[str]:
    """What is wrong with the checkpoints after `step` that were set aside, newest first. They were set aside by this
    process, or by one that died before it could report it to the controller."""
    newer: list[tuple[int, str, str]] = []
    for path in folder.glob(f"{checkpoint.DAMAGED}step-*"):
        number = path.name.removeprefix(f"{checkpoint.DAMAGED}step-").partition("-")[0]
        if not number.isdecimal() or int(number) <= step:
            continue
        try:
            why = (path / DAMAGE_NOTE).read_text(encoding="utf-8")
        except (OSError, ValueError):
            why = f"step-{number}: set aside earlier, see trainer.log"
        newer.append((int(number), path.name, why))
    return [f"{why} (now {name})" for _, name, why in sorted(newer, reverse=True)]


async def _address(folder: Path, timeout_s: float = 120.0) -> str:
    for _ in range(int(timeout_s * 10)):
        found = folders.address(folder)
        if found is not None:
            return found["url"]
        await asyncio.sleep(0.1)
    what = f"waited {timeout_s:g} s for the controller's address"
    raise WindfallError(what, where=str(folder / "address.json"), fix="See controller.log.")


def _write_tokenizer(tokenizer: Any, model: Any, out: Path) -> None:
    """Write the tokenizer for the controller, which reads it without torch."""
    tokenizer.save_pretrained(out)
    model.generation_config.save_pretrained(out)


def text_for(tokenizer: Any, model: Any, chat: Mapping[str, Any]) -> Text:
    """`chat`: options of Text, from the recipe's [chat] section."""
    stops = getattr(model.generation_config, "eos_token_id", None)
    return Text(tokenizer, stops if isinstance(stops, list) else [] if stops is None else [stops], **chat)


def spec(recipe: Recipe, model_config: Any, dtype: str, longest: int) -> m.EngineSpec:
    """What a worker needs to build its engine."""
    e, o = recipe.engine, recipe.rollout
    return m.EngineSpec(
        model_config=model_config.to_json_string(use_diff=False), dtype=dtype, kv_tokens=e.kv_tokens,
        page_size=e.page_size, max_running=e.max_running, max_rows=e.max_rows, keep_share=e.keep_share,
        deterministic=recipe.run.deterministic,
        longest=longest, wanted=o.groups * o.group_size, engine=e.name,
        samplings=tuple(dict.fromkeys((o.sampling(), o.sampling(recipe.eval.temperature)))),
    )  # fmt: skip


def checked(engine: m.EngineSpec, device: str, model: Any) -> m.EngineSpec:
    """The spec with the result of the self-test added, so that workers do not have to repeat it. Raises WindfallError
    for a model that the engine or the trainer would compute differently from transformers, before any worker starts."""
    fields = json.loads(engine.model_config)
    verdict.check_trainer(fields, device=device, longest=engine.longest, names=model.state_dict())
    found = build.self_test(engine, device, model)
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
        if f not in ("model_config", "checked")
    ]
    return f"{name}-{xxhash.xxh3_64_hexdigest(json.dumps([fields, rest], sort_keys=True).encode())}"


def derive(
    recipe: Recipe, model: Any, device: str, dtype: str, prompts: Sequence[int], *, ranks: int = 1,
    sharded: bool = False,
) -> Derived:  # fmt: skip
    """Choose what the recipe leaves open. `prompts`: prompt lengths in tokens; those without room are skipped later."""
    c, o = model.config, recipe.rollout
    context = getattr(c, "max_position_embeddings", None)
    longest = fit(recipe, prompts, context) + o.max_tokens
    pack = _pack_tokens(recipe, model, longest, ranks, sharded) if device == "cuda" else max(longest, 4096)
    micro = recipe.train.micro_tokens or pack
    # Per token and layer, the backward pass keeps about 12 vectors of the hidden size and 4 of the MLP size.
    kept = micro * c.num_hidden_layers * (12 * c.hidden_size + 4 * getattr(c, "intermediate_size", 4 * c.hidden_size))
    asked = recipe.train.checkpoint_activations
    much = kept * model.dtype.itemsize > 0.3 * free_bytes(device)
    return Derived(
        device=device, dtype=dtype, micro_tokens=micro, longest=longest,
        checkpoint_activations=much if asked == "auto" else asked,
    )  # fmt: skip


def _pack_tokens(recipe: Recipe, model: Any, longest: int, ranks: int, sharded: bool) -> int:
    """Tokens per pack that fit into the GPU memory left by everything else."""
    c, free = model.config, free_bytes("cuda")
    used = sharded_use(recipe, model, ranks, free) if sharded else unsharded_use(recipe, model)
    free = (free - used) * (1.0 - local_engine.SHARE if recipe.fleet.local else 1.0)
    heads = c.num_attention_heads
    each = activation_memory.layer_bytes(
        hidden=c.hidden_size, intermediate=getattr(c, "intermediate_size", None) or 4 * c.hidden_size, heads=heads,
        kv_heads=getattr(c, "num_key_value_heads", None) or heads,
        head=getattr(c, "head_dim", None) or c.hidden_size // heads, value_bytes=model.dtype.itemsize,
    )  # fmt: skip
    return activation_memory.pack_tokens(free, c.num_hidden_layers, each, longest)


def unsharded_use(recipe: Recipe, model: Any) -> float:
    """GPU memory that the trainer will need besides activations, if the weights are on the GPU already."""
    from windfall.trainer.model.lora import trained_parameters

    width, section = model.dtype.itemsize, recipe.train.lora
    whole, trained = sum(p.numel() for p in model.parameters()), trained_parameters(model, section)
    # In float32: the gradient, Adam's two moments, and a master copy unless the weights are float32 themselves. Then
    # the publisher's copy of the last version, and the KL reference (with adapters there is none, but merged copies for
    # the trainer's own engine).
    used = trained * (12 if width == 4 else 16) + trained * width
    return used + whole * width * (recipe.algorithm.kl > 0 if section is None else recipe.fleet.local)


def sharded_use(recipe: Recipe, model: Any, ranks: int, free: float) -> float:
    """GPU memory that a rank will need besides activations and the layers that are gathered. No weight is on a GPU yet,
    and with `train.offload` none stays there. `free`: bytes of free GPU memory."""
    from windfall.trainer.model.lora import trained_parameters

    width, section = model.dtype.itemsize, recipe.train.lora
    whole, trained = sum(p.numel() for p in model.parameters()), trained_parameters(model, section)
    sizes = {"value_bytes": width, "adapter_parameters": 0 if section is None else trained}
    used = rank_budget.state_bytes(whole, ranks, **sizes)
    used += rank_budget.reference_bytes(whole, ranks, kl=recipe.algorithm.kl > 0, **sizes)
    used += trained * width / ranks  # the publisher's copy of the last version
    used = 0.0 if recipe.train.offload else used
    # With adapters, the engine of each GPU has a whole copy of the base, which it frees during training if it is large.
    kept = section is not None and recipe.fleet.local and whole * width <= MAX_KEPT_SHARE * free
    return used + whole * width * kept
