"""The process of a trainer with several policies on one base, as a controller sees it: a link for each policy. It is
killed, and links are lost, and every policy goes on from its own checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windfall.controller.remote_trainer import RemoteTrainer
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.workers.versions import PolicyVersions
from windfall.events.log import EventLog
from windfall.link import auth
from windfall.link import messages as m
from windfall.link.base import Link
from windfall.link.gate import Gate
from windfall.link.socket import Port, Route
from windfall.processes import process
from windfall.processes.process import Handle
from windfall.run_folder import policy_folder
from windfall.trainer import checkpoint
from windfall.trainer.ranks.rank_place import RankPlace
from windfall.training import CheckpointState, NewVersion, Sample, TrainerLost

RECIPE = """
[run]
name = "two"
threads = 1
[model]
path = "tiny"
[env]
name = "arithmetic"
mean_steps = 1.5
[rollout]
max_tokens = 32
[train]
lr = 1e-2
engine_gap_limit = 50.0
engine_gap_alarm = 50.0
[policies.solver]
lora = { rank = 4 }
[policies.verifier]
lora = { rank = 3, targets = ["q_proj"] }
rollout = { groups = 4, max_tokens = 16 }
[policies.reference]
frozen = true
[policies.old]
copy_of = "solver"
every = 2
"""
NAMES = ("solver", "verifier", "reference", "old")
WAIT_S = 100.0


class Site:
    """A run's folder, and a controller that holds a link to the trainer of each policy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "recipe.toml").write_text(RECIPE)
        auth.make_token(folder / "token")
        secret = auth.make_token(folder / "trainer.secret")
        events, versions = EventLog(folder / "events.jsonl"), [PolicyVersions(name, "solver") for name in NAMES]
        self.gate = Gate("two", "t" * 20, log=events.instant, max_workers=1, trainer_secret=secret, policies=NAMES)
        routes = Dispatch(events=events, versions=versions).weights
        self.trainers = {name: RemoteTrainer(routes, name) for name in NAMES}
        self.links: dict[str, Link] = {}
        route = Route(receives=m.FromTrainer, max_frame_bytes=m.MAX_TRAINER_FRAME_BYTES, handler=self._accept)
        self.port = Port("127.0.0.1", 0, {"/trainer": route}, None)

    async def _accept(self, link: Link) -> None:
        async def serve(link: Link, hello: m.TrainerHello) -> None:
            self.links[hello.policy] = link
            await self.trainers[hello.policy].attend(link, hello)

        await self.gate.trainer(link, serve)

    def start(self) -> Handle:
        place = RankPlace(base="solver")
        argv = [sys.executable, "-m", "windfall.run.cli", "_trainer", str(self.folder), place.base]
        log = self.folder / f"{place.name}.log"
        return process.start(name=place.name, argv=argv, env={**os.environ, **place.environment()}, log=log)

    async def connected(self) -> dict[str, m.TrainerHello]:
        return {name: await trainer.connected(WAIT_S) for name, trainer in self.trainers.items()}

    async def step(self, policy: str, step: int) -> NewVersion:
        trainer = self.trainers[policy]
        await trainer.forward_backward(samples(step), id=f"{policy} {step}")
        await trainer.optim_step(CheckpointState(step=step, next_task=4 * step), id=f"{policy} {step} update")
        return await trainer.publish(id=f"{policy} {step} publish")


@contextlib.asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[tuple[Site, list[Handle]]]:
    site, started = Site(folder), list[Handle]()
    await site.port.open()
    url = f"http://127.0.0.1:{site.port.port}"
    (folder / "address.json").write_text(f'{{"url": "{url}", "port": {site.port.port}, "pid": 1}}')
    try:
        started.append(site.start())
        yield site, started
    finally:
        for handle in started:
            handle.kill()
            await handle.wait()
        await site.port.close()


def samples(seed: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    ids = tuple(rng.integers(3, 60, 12).tolist())
    return [Sample(ids=ids, targets=tuple(range(2, 12)), behavior=np.full(10, -4.0), advantage=1.0, limit=20)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_policies_of_one_trainer_go_on_from_their_own_checkpoints(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (site, started):
            first = await site.connected()
            check_hellos(first)
            for name, step in (("solver", 1), ("solver", 2), ("verifier", 1)):
                await site.step(name, step)
            await site.trainers["old"].publish(id="old 2")
            for name in ("solver", "verifier"):
                await site.trainers[name].save(id=f"{name} save")
            lost = {name: await site.step(name, step) for name, step in (("solver", 3), ("verifier", 2))}

            started[0].kill()
            with pytest.raises(TrainerLost):
                await site.step("solver", 4)
            await started[0].wait()
            await forgotten(site)
            started.append(site.start())
            hellos = await site.connected()
            steps = {name: (hello.step, hello.version) for name, hello in hellos.items()}
            assert steps == {"solver": (2, 2), "verifier": (1, 1), "reference": (0, 0), "old": (2, 2)}
            assert hellos["reference"].digest == first["reference"].digest
            assert hellos["old"].digest == hellos["solver"].digest, "the same adapters: the same bytes"
            assert (await site.step("solver", 3)).digest == lost["solver"].digest
            assert (await site.step("verifier", 2)).digest == lost["verifier"].digest

            # The link of one policy is lost within a step. Its gradient is dropped; the other goes on with its own.
            solver, verifier = site.trainers["solver"], site.trainers["verifier"]
            await verifier.forward_backward(samples(7), id="verifier 3")
            await solver.forward_backward(samples(9), id="dropped")
            await site.links["solver"].close("lost")
            await asyncio.sleep(0.05)
            assert (await solver.connected(WAIT_S)).step == 3
            report = await verifier.optim_step(CheckpointState(step=3, next_task=12), id="verifier 3 update")
            assert report.tokens == 10
            await verifier.publish(id="verifier 3 publish")
            await solver.forward_backward(samples(4), id="solver 4")
            assert (await solver.optim_step(CheckpointState(step=4, next_task=16), id="solver 4 update")).tokens == 10

            with pytest.raises(Exception, match="this policy is not trained"):
                await site.trainers["reference"].forward_backward(samples(1), id="wrong")

    asyncio.run(asyncio.wait_for(main(), 280))


def check_hellos(hellos: dict[str, m.TrainerHello]) -> None:
    engine = hellos["solver"].engine
    assert all(hello.engine == engine for hello in hellos.values()), "one kind of engine"
    assert (engine.adapters, engine.adapter_rank) == (4, 4)
    assert engine.wanted == (32 + 4 + 32 + 32) * 8
    base = {hello.weights.digest for hello in hellos.values() if hello.weights and hello.policy == "reference"}
    for hello in hellos.values():
        assert hello.weights is not None
        assert base <= {file.digest for file in hello.weights.files}, "all of them need the base"
    assert hellos["solver"].digest == hellos["old"].digest != hellos["verifier"].digest
    assert len({hello.facts["pid"] for hello in hellos.values()}) == 1


async def forgotten(site: Site) -> None:
    """Wait until the controller has noticed that the links have ended."""
    while any(trainer.hello is not None for trainer in site.trainers.values()):
        await asyncio.sleep(0.01)


def test_copies_of_weights_that_were_lost_are_forgotten(tmp_path: Path) -> None:
    from windfall.recipe.file import load_recipe
    from windfall.trainer.process import _newest

    (tmp_path / "recipe.toml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "recipe.toml")
    for name, step in (("solver", 4), ("old", 2), ("old", 4), ("old", 6)):
        tokenizer: Any = type("", (), {"save_pretrained": lambda self, folder: None})()
        checkpoint.save(
            policy_folder(tmp_path, name) / "checkpoints", CheckpointState(step=step, next_task=0), keep=9,
            write_model=lambda folder: (folder / "config.json").write_text("{}"), tokenizer=tokenizer,
            write_optimizer=checkpoint.no_optimizer,
        )  # fmt: skip
    found = _newest(recipe, tmp_path, "old")
    assert found is not None
    assert found.state.step == 4
    left = checkpoint.list_checkpoints(found.path.parent)
    assert [checkpoint.step_of(path) for path in left] == [2, 4], "step 6 will have other weights"
