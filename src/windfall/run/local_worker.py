"""The trainer's own engine: the worker named `local`. It and the trainer take turns on the trainer's devices.

    one process   ModuleEngine   runs the trainer's module, in a thread of the trainer's process
    ranks         RankEngines    one engine per rank, each in a child process of rank 0 on the device of its rank

No rank has the whole model, so the engines of a sharded trainer have copies of their own. They read the weights from
the publisher's buffers, and give their memory back while the trainer works (engine/group/group.py). With ranks
on several machines, only those on the machine of rank 0 have an engine. The children end with rank 0, however it ends.
"""

from __future__ import annotations

import asyncio
import math
import threading
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

from windfall import devices
from windfall.engine.factory import build_engine
from windfall.errors import WindfallError
from windfall.link import tls
from windfall.link.messages import EngineSpec
from windfall.recipe import Fleet
from windfall.trainer.agent import Lock, TrainerAgent
from windfall.trainer.own_engine.trainer_engine import TrainerEngine, TrainerWeights
from windfall.trainer.own_engine.trainer_turn import TrainerTurn
from windfall.trainer.ranks.process import TrainerPart
from windfall.trainer.trained_weights import TrainedWeights
from windfall.types import LOCAL, Lease
from windfall.worker.controller_client import ControllerClient

SHARE = 0.3
"""Share of the free memory that the KV cache of an engine on the trainer's device may use."""


class LocalEngine(Protocol):
    device: str
    """The devices of the engine, for people and for the price."""

    @property
    def lock(self) -> Lock:
        """The lock that the trainer must hold while it works."""
        ...

    def build(self, spec: EngineSpec, host: TrainerAgent) -> tuple[TrainerEngine, int]:
        """The engine, and the number of responses that it decodes at once. Runs in the engine's thread."""
        ...

    def close(self) -> None: ...


class ModuleEngine:
    def __init__(self, weights: TrainedWeights, device: str) -> None:
        self.device, self.lock = devices.describe(device), threading.Lock()
        self._weights, self._kind = weights, device

    def build(self, spec: EngineSpec, host: TrainerAgent) -> tuple[TrainerEngine, int]:
        with self.lock:  # the engine for GPUs changes the layout of the module's weights
            merged = self._weights.merged()
            model = self._weights.model if merged is None else merged.module
            built, slots = build_engine(spec, self._kind, model=model, share=SHARE)
        on_gpu = self._kind == "cuda"
        return TrainerEngine(
            built, self.lock, published=lambda: host.manifest, share_memory=on_gpu, merged=merged
        ), slots

    def close(self) -> None:
        pass


class RankEngines:
    def __init__(self, part: TrainerPart, folder: Path, *, threads: int) -> None:
        """`part`: that of rank 0, which is this process. `folder`: of the run. `threads`: CPU threads per engine."""
        from windfall.engine.group.group import EngineGroup

        publisher = part.publisher
        self.device = describe(part.places[0].device, len(part.pids))
        self._group = EngineGroup(
            part.places, publisher.find, base=lambda: publisher.base, folder=folder / "engines", share=SHARE,
            threads=threads, modules=[f"windfall.run.preload:preload_run:{folder}"],
        )  # fmt: skip
        self.lock = TrainerTurn(self._group.pause)

    def build(self, spec: EngineSpec, host: TrainerAgent) -> tuple[TrainerEngine, int]:
        with self.lock.engines:
            slots = self._group.build(spec)
        return TrainerEngine(self._group, self.lock.engines, published=lambda: host.manifest, share_memory=True), slots

    def close(self) -> None:
        self._group.close()


def describe(device: str, ranks: int) -> str:
    """The devices of all ranks, as controller/cost/prices.py reads them.

    >>> describe("cpu", 1), describe("cpu", 2)
    ('cpu', '2x cpu')
    """
    name = devices.describe(device)
    return name if ranks == 1 else f"{ranks}x {name}"


async def run_trainer(
    host: TrainerAgent, local: LocalEngine | None, fleet: Fleet, secret: str, where: Callable[[], str]
) -> int:
    """Run the trainer, and its own engine beside it, if it has one. Returns the exit status. `where` returns the
    address of the controller."""
    if local is None:
        return await host.run()
    try:
        return await run_beside(host.run(), asyncio.create_task(run(local, host, fleet, secret, where)))
    finally:
        local.close()


async def run(local: LocalEngine, host: TrainerAgent, fleet: Fleet, secret: str, where: Callable[[], str]) -> None:
    """Run the engine as the worker named `local`. Raises the original error if it cannot be built."""
    address = where()
    failed: list[Exception] = []

    def build(spec: EngineSpec) -> tuple[Any, int]:
        try:
            shared, slots = local.build(spec, host)
        except Exception as e:  # fault boundary: for some of these the worker is only refused, without the reason
            failed.append(e)
            raise
        host.make_room, host.invalidate = shared.make_room, shared.invalidate
        return shared, slots

    lease = Lease(kind="reserved", device=local.device, price_usd_per_h=fleet.trainer_price_usd_per_h)
    while True:
        await host.connected.wait()
        client = ControllerClient(
            address, secret, name=LOCAL, lease=lease, build=build, puller=TrainerWeights(lambda: host.manifest),
            ssl=tls.client_context(address, pinned=fleet.tls_cert), patience_s=math.inf, address=where,
        )  # fmt: skip
        code = await client.run()
        if failed:
            raise failed[0]
        if code != 1:
            return  # the run is over, or the engine was refused for good


async def run_beside(trainer: Coroutine[Any, Any, int], local: asyncio.Task[None]) -> int:
    """The result of `trainer`. If its own engine cannot be built, this ends the process with the reason, because the
    controller would wait for its work."""
    running = asyncio.create_task(trainer)
    try:
        await asyncio.wait([running, local], return_when=asyncio.FIRST_COMPLETED)
        if local.done() and not running.done() and (error := local.exception()) is not None:
            if isinstance(error, WindfallError):
                raise error
            fix = "Set fleet.local = false to run without it; trainer.log has the traceback."
            traceback.print_exception(error)
            line = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise WindfallError(f"the trainer's own engine failed: {line}", where="fleet.local", fix=fix)
        return await running
    finally:
        running.cancel()
        local.cancel()
        await asyncio.wait([running, local])
