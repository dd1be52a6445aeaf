"""The trainer's own engine: the worker named `local`. It and the trainer take turns on the trainer's devices.

    one process   ModuleWorker   runs the trainer's module, in a thread of the trainer's process
    ranks         RanksWorker    one engine per rank, each in a child process of rank 0 on the device of its rank

No rank has the whole model, so the engines of a sharded trainer have copies of their own. They read the weights from
the publisher's buffers, and give their memory back while the trainer works (engine/group/group.py). With ranks
on several machines, only those on the machine of rank 0 have an engine. The children end with rank 0, however it ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from windfall import devices
from windfall.engine.factory import build_engine
from windfall.engine.group.group import EngineGroup
from windfall.link import tls
from windfall.link.messages import EngineSpec
from windfall.trainer.derived import OWN_ENGINE_SHARE
from windfall.trainer.own_engine.trainer_engine import TrainerEngine, TrainerTurn, TrainerWeights
from windfall.trainer.process import RankPart, cpu_threads
from windfall.trainer.service import OwnEngine, TrainerService
from windfall.types import LOCAL, Lease
from windfall.worker.controller_client import ControllerClient


def make(part: RankPart, secret: str, where: Callable[[], str]) -> OwnEngine:
    return RanksWorker(part, secret, where) if part.ranks.distributed else ModuleWorker(part, secret, where)


class LocalWorker(OwnEngine):
    """What both kinds share: the engine's link to the controller."""

    def __init__(self, part: RankPart, secret: str, where: Callable[[], str], turn: TrainerTurn | None = None) -> None:
        """`part`: that of rank 0, which is this process. `where` returns the address of the controller."""
        super().__init__(turn)
        self.part = part
        self._secret = secret
        self._where = where

    async def run(self, trainer: TrainerService) -> None:
        address, fleet, failed = self._where(), self.part.recipe.fleet, list[Exception]()

        def build(spec: EngineSpec) -> tuple[Any, int]:
            try:
                self.engine, slots = self.build(spec, trainer)
            except Exception as e:  # fault boundary: for some of these the worker is only refused, without the reason
                failed.append(e)
                raise
            return self.engine, slots

        device = devices.describe(self.part.ranks.device, len(self.part.pids))
        lease = Lease(kind="reserved", device=device, price_usd_per_h=fleet.trainer_price_usd_per_h)
        while True:
            await trainer.connected.wait()
            client = ControllerClient(
                address,
                self._secret,
                name=LOCAL,
                lease=lease,
                build=build,
                puller=TrainerWeights(lambda: trainer.manifest),
                patience_s=math.inf,
                address=self._where,
                ssl=tls.client_context(address, pinned=fleet.tls_cert),
            )
            code = await client.run()
            if failed:
                raise failed[0]
            if code != 1:
                return  # the run is over, or the engine was refused for good

    def build(self, spec: EngineSpec, trainer: TrainerService) -> tuple[TrainerEngine, int]:
        """The engine, and the number of responses that it decodes at once. Runs in the engine's thread."""
        raise NotImplementedError


class ModuleWorker(LocalWorker):
    def build(self, spec: EngineSpec, trainer: TrainerService) -> tuple[TrainerEngine, int]:
        device, weights = self.part.ranks.device, self.part.weights
        with self.turn.engines:  # the engine for GPUs changes the layout of the module's weights
            merged = weights.merged()
            model = weights.model if merged is None else merged.module
            built, slots = build_engine(spec, device, model=model, share=OWN_ENGINE_SHARE)
        own = TrainerEngine(
            built, self.turn.engines, published=lambda: trainer.manifest, share_memory=device == "cuda", merged=merged
        )
        return own, slots


class RanksWorker(LocalWorker):
    def __init__(self, part: RankPart, secret: str, where: Callable[[], str]) -> None:
        self._group = EngineGroup(
            part.places,
            part.publisher,
            folder=part.folder / "engines",
            share=OWN_ENGINE_SHARE,
            threads=cpu_threads(part.recipe, part.place),
            modules=[f"windfall.run.preload:preload_run:{part.folder}"],
        )
        super().__init__(part, secret, where, TrainerTurn(self._group.pause))

    def build(self, spec: EngineSpec, trainer: TrainerService) -> tuple[TrainerEngine, int]:
        with self.turn.engines:
            slots = self._group.build(spec)
        own = TrainerEngine(self._group, self.turn.engines, published=lambda: trainer.manifest, share_memory=True)
        return own, slots

    def give_back(self) -> None:
        self.part.orders.call(self.part.free_memory)

    def close(self) -> None:
        self._group.close()
