"""The trainer's own engine: the worker named `local`. It and the trainer take turns on the trainer's device.

    one process   local, in a thread of the trainer's process: it runs the trainer's module
    ranks         local, local-1, ...: one in the process of each rank, with a copy of the weights (rank_engine.py)

With ranks on several machines, only those on the machine of rank 0 generate. An engine that fails is built again if it
is the only one; an engine of a rank ends its rank, and so the trainer, which is restarted from its last checkpoint.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import ssl
import threading
import traceback
from dataclasses import replace
from typing import Any

import msgspec

from windfall import devices, errors
from windfall import run_folder as folders
from windfall.engine.engine_thread import EngineThread
from windfall.engine.factory import build_engine
from windfall.errors import WindfallError
from windfall.link import messages as m
from windfall.link import tls
from windfall.trainer.memory_plan import OWN_ENGINE_SHARE
from windfall.trainer.own_engine.rank_engine import PublishedWeights, PulledCopy, RankEngine
from windfall.trainer.own_engine.trainer_engine import TrainerEngine, TrainerWeights
from windfall.trainer.process import RankPart, run_rank
from windfall.trainer.ranks.ranks import RankLost
from windfall.trainer.service import EngineTerms, OwnEngine, TrainerService
from windfall.turns.client import of_environment
from windfall.types import LOCAL, Lease
from windfall.worker.controller_client import ControllerClient


class EngineOutdated(Exception):
    """The run wants a KV cache of another dtype than that of this engine."""


class LocalWorker(OwnEngine):
    """The engine of one rank, and its link to the controller."""

    def __init__(self, part: RankPart) -> None:
        super().__init__(first=part.place.rank == 0, state=part.state)
        self._part = part
        self._slots = 0
        self._kv_dtype: Any = "auto"
        """That of the engine, or of the one that the run wants instead."""
        self._weights: TrainerWeights | PulledCopy

    async def run(self, trainer: TrainerService, terms: EngineTerms) -> None:
        part = self._part
        await trainer.connected.wait()
        self._weights = TrainerWeights(lambda: trainer.manifest)
        while True:
            try:
                await trainer.run_in_thread(part.orders.call, part.build_engine, terms)
            except (WindfallError, RankLost):
                raise
            except Exception as e:  # fault boundary: the user learns how to run without it
                traceback.print_exception(e)
                fix = "Set fleet.local = false to run without it; trainer.log has the traceback."
                what = f"the trainer's own engine failed: {errors.last_line(e)}"
                raise WindfallError(what, where="fleet.local", fix=fix) from e
            if not await self._generate(terms):
                return
            terms = replace(terms, spec=msgspec.structs.replace(terms.spec, kv_dtype=self._kv_dtype))

    def build(self, terms: EngineTerms) -> None:
        part, device = self._part, self._part.ranks.device
        if self.engine is not None:  # the next one needs its memory
            self.engine = None
            gc.collect()
        self._kv_dtype = "auto" if part.ranks.distributed else terms.spec.kv_dtype
        if part.ranks.distributed:
            spec = msgspec.structs.replace(terms.spec, kv_dtype=self._kv_dtype)
            engine, self._slots = build_engine(spec, device, share=OWN_ENGINE_SHARE)
            if part.several_machines:
                weights = PulledCopy(key=terms.weights_key, ssl=self._ssl(terms))
            else:
                weights = PublishedWeights(part.policies[""].publisher)
            self._weights = weights
            self.engine = RankEngine(engine, self.turn, engine.model, weights.reading)
        else:
            trained = part.policies[""].weights  # several policies have no engine in the trainer
            merged = trained.merged()
            model = trained.model if merged is None else merged.module
            engine, self._slots = build_engine(terms.spec, device, model=model, share=OWN_ENGINE_SHARE)
            assert isinstance(self._weights, TrainerWeights)
            self.engine = TrainerEngine(
                engine, self.turn, published=self._weights.published, share_memory=device == "cuda", merged=merged
            )
        if not part.ranks.first:
            threading.Thread(target=self._generate_in_thread, args=(terms,), daemon=True).start()

    def _generate_in_thread(self, terms: EngineTerms) -> None:
        """Generate beside a rank that follows rank 0. An error ends the process."""
        part = self._part
        code = run_rank(part.folder, part.place, lambda: int(asyncio.run(self._generate(terms))))
        if code:
            os._exit(code)

    async def _generate(self, terms: EngineTerms) -> bool:
        """Generate until the run is over or does not need this engine. Returns whether the engine must be built again.
        Raises RuntimeError if it failed and is one of several."""
        part = self._part
        ranks, place, fleet = part.ranks, part.place, part.recipe.fleet
        # The engines are billed as the trainer. Each stands for its share of all ranks.
        lease = Lease(
            kind="reserved",
            device=devices.describe(ranks.device, place.size // place.local_size),
            price_usd_per_h=fleet.trainer_price_usd_per_h / place.local_size,
        )
        client = ControllerClient(
            terms.url,
            terms.secret,
            name=f"{LOCAL}-{place.rank}" if place.rank else LOCAL,
            lease=lease,
            build=self._built,
            puller=self._weights,
            patience_s=math.inf,
            address=lambda: (folders.address(terms.folder) or {}).get("url", terms.url),
            ssl=self._ssl(terms),
            host=lambda make: EngineThread(None, make=make, turn=of_environment("rollout", device=place.local_rank)),
        )
        try:
            failed = await client.run() == 1
        except EngineOutdated:
            return True
        if failed and ranks.distributed:
            raise RuntimeError("the engine of this rank failed")
        return failed

    def _built(self, spec: m.EngineSpec) -> tuple[Any, int]:
        """The engine, unless the run has gone back from fp8."""
        if self._kv_dtype == "fp8" and spec.kv_dtype != "fp8":
            self._kv_dtype = spec.kv_dtype
            raise EngineOutdated
        return self.engine, self._slots

    def _ssl(self, terms: EngineTerms) -> ssl.SSLContext | None:
        return tls.client_context(terms.url, pinned=self._part.recipe.fleet.tls_cert)
