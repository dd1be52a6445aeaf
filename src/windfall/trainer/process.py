"""The trainer process: model, optimizer, checkpoints, and the weight server."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from windfall import devices, errors
from windfall import run_folder as folders
from windfall.errors import WindfallError
from windfall.link import auth, listener, tls
from windfall.link import messages as m
from windfall.link.socket import Dialer
from windfall.models import load
from windfall.processes import process
from windfall.recipe.file import load_recipe
from windfall.recipe.sections import Recipe
from windfall.trainer import checkpoint, derived, trained_weights
from windfall.trainer.ranks import process as rank
from windfall.trainer.ranks.process import RankPart, Setup
from windfall.trainer.ranks.rank_place import RankPlace
from windfall.trainer.service import OwnEngine, TrainerService, cannot_load, run_beside
from windfall.training import CheckpointState
from windfall.weights.serve import serve

MakeEngine = Callable[[RankPart, str, Callable[[], str]], OwnEngine]
"""From the part of rank 0, the secret of the trainer, and a function that returns the address of the controller."""


def main(folder: Path, place: RankPlace, make_engine: MakeEngine) -> int:
    """Returns the exit status. `make_engine`: builds the trainer's own engine, if the recipe wants one."""

    def run() -> int:
        recipe = load_recipe(folder / "recipe.toml")
        with folders.owned(folder, "trainer", timeout_s=10.0):
            return asyncio.run(errors.guard(_main(recipe, folder, place, make_engine)))

    return rank.run_rank(folder, place, run)


async def _main(recipe: Recipe, folder: Path, place: RankPlace, make_engine: MakeEngine) -> int:
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
    tokenizer.save_pretrained(folder / "tokenizer")  # for the controller, which reads it without torch
    model.generation_config.save_pretrained(folder / "tokenizer")
    prompts = await derived.planned_prompts(recipe, folder, tokenizer, model)
    chosen = derived.derive(recipe, model, device, dtype, prompts, ranks=place.size, sharded=sharded)
    engine = derived.checked(derived.spec(recipe, model.config, dtype, chosen.longest), device, model)
    loaded = trained_weights.prepare(model, recipe, found, dtype=dtype)
    reference = loaded.reference(recipe, dtype=dtype, device=where_loaded) if recipe.algorithm.kl else None
    setup = Setup(
        model_config=model.config,
        dtype=dtype,
        micro_tokens=chosen.micro_tokens,
        checkpoint_activations=chosen.checkpoint_activations,
        onednn=bool(torch.backends.mkldnn.enabled),
        checkpoint=found.path if found else None,
        adapter=loaded.adapters.config if loaded.adapters else None,
    )
    part = RankPart(recipe, folder, orders, place=place, loaded=loaded, reference=reference)
    orders.call(part.build, setup)
    trainer, publisher, weights = part.trainer, part.publisher, part.weights
    if sharded:
        model.to("meta")  # the ranks have the weights; the module is still needed to write checkpoints
        if isinstance(reference, torch.nn.Module):
            reference.to("meta")
    if not trainer.learner.has_graph:  # it decides for every pack which activations to keep
        chosen = replace(chosen, checkpoint_activations=False)
    token, secret, f = auth.read_token(folder / "token"), auth.make_token(folder / "trainer.secret"), recipe.fleet
    listener.raise_file_limit()
    server = await serve(
        publisher, host=f.host, port=f.weights_port, key=auth.weights_key(token), ssl=tls.server_context(f)
    )
    facts = weights.facts() | {"rank_pids": " ".join(map(str, part.pids)) if sharded else ""}
    facts["machine"] = devices.describe(device, place.size)

    def hello(**more: Any) -> m.TrainerHello:
        now = {"pid": os.getpid(), "age_s": process.age_s(), **asdict(chosen)}
        return m.TrainerHello(
            micro_tokens=chosen.micro_tokens,
            model=derived.fingerprint(engine),
            engine=engine,
            facts=facts | now | notes,
            url=f"{'https' if f.tls_cert else 'http'}://_:{server.port}",
            **more,
        )

    address = await _address(folder)
    where = lambda: (folders.address(folder) or {}).get("url", address)  # noqa: E731
    dialer = Dialer(
        address,
        "/trainer",
        m.ToTrainer,
        ssl=tls.client_context(address, pinned=f.tls_cert),
        max_frame_bytes=m.MAX_TRAINER_FRAME_BYTES,
    )
    write = weights.saved.save_pretrained
    if sharded:
        write = partial(weights.write_published, model, publisher, lambda: orders.call(part.collect))
    local = make_engine(part, secret, where) if f.local else OwnEngine()
    host = TrainerService(
        trainer=trainer,
        state=state,
        secret=secret,
        dialer=dialer,
        hello=hello,
        engine=local,
        publish=lambda version: orders.call(part.publish, version),
        update_bytes=lambda: publisher.readable[0].update_bytes,
        save=lambda now: checkpoint.save(
            folder / "checkpoints",
            now,
            tokenizer=tokenizer,
            write_optimizer=trainer.write_optimizer,
            write_model=write,
            keep=recipe.checkpoint.keep,
            base=loaded.base,
        ),
        load=cannot_load if sharded or loaded.adapters else partial(trained_weights.load_into, model, trainer),
        address=where,
    )
    part.copied = host.release_module
    try:
        return await run_beside(host.run(), local.run(host))
    finally:
        local.close()
        await dialer.close()
        await server.close()
        publisher.close()


def _find_checkpoint(folder: Path) -> tuple[checkpoint.IntactCheckpoint | None, dict[str, str]]:
    """Set damaged checkpoints aside. Returns the one to continue from, and what the controller should report."""
    found = checkpoint.newest_intact(folder)
    damages = [f"{d.short} (now {checkpoint.set_aside(d).name})" for d in (found.damaged if found else ())]
    for damage in damages:
        print(f"damaged: {damage}", file=sys.stderr, flush=True)
    return found, {"checkpoint_damaged": "; ".join(damages)} if damages else {}


async def _address(folder: Path, timeout_s: float = 120.0) -> str:
    for _ in range(int(timeout_s * 10)):
        found = folders.address(folder)
        if found is not None:
            return found["url"]
        await asyncio.sleep(0.1)
    what = f"waited {timeout_s:g} s for the controller's address"
    raise WindfallError(what, where=str(folder / "address.json"), fix="See controller.log.")
