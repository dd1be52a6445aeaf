"""The service of a slot in its trainer: the verbs of a slot (slot.py), performed for the run's controller.

It differs from the service of a policy that the recipe trains (trainer/service.py) in these ways:

- when the link ends, the slot is emptied: its adapter, gradients and optimizer are dropped. The process lives on and
  dials again. So no answer is kept: a controller fills the slot again and repeats its calls;
- a WindfallError is the answer to the verb that raised it, and the service goes on. If the memory of the GPU does not
  suffice, the slot is emptied, and that is the answer. Any other exception ends the process;
- it has no steps. A slot to sample from is published as the version that the controller says;
- files are checked, and written without an optimizer, while the one thread works for other slots.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from windfall.engine.module_weights import return_freed_memory
from windfall.errors import WindfallError
from windfall.link import messages as m
from windfall.trainer.service import TrainerService
from windfall.trainer.slots.slot import Slot


@dataclass(kw_only=True)
class SlotService(TrainerService):
    slot: Slot

    async def _link_ended(self) -> int | None:
        if self.slot.adapters is not None:
            await self.run_in_thread(self.slot.clear)
        return None

    async def _perform(self, request: object) -> object:
        if not isinstance(request, m.Verb):
            return await super()._perform(request)
        try:
            return await self._perform_once(request)
        except WindfallError as e:
            return m.RefusedVerb(what=e.what, where=e.where, fix=e.fix)
        except torch.OutOfMemoryError as e:
            why = str(e).partition(". ")[0]
        await self.run_in_thread(self.slot.clear)
        return_freed_memory(on_gpu=torch.cuda.is_available())
        return m.RefusedVerb(
            what=f"not enough memory for this call, and the slot is empty now: {why}",
            where=f"policy {self.slot.name!r}",
            fix="Use shorter samples, an adapter of lower rank, or a smaller train.micro_tokens.",
        )

    async def _perform_once(self, request: m.Verb) -> object:
        slot, started, run = self.slot, time.monotonic(), self.run_in_thread
        match request:
            case m.LoadAdapter():
                return await run(await asyncio.to_thread(slot.checked, request), room=True)
            case m.SaveAdapter(optimizer=False):
                write = await run(slot.copied, Path(request.path))
                return m.Saved(path=str(await asyncio.to_thread(write)))
            case m.SaveAdapter():
                work = lambda: slot.save(Path(request.path), optimizer=True)  # noqa: E731
                return m.Saved(path=str(await run(work)))
            case m.Forward():
                return m.LogProbs(old=tuple(await run(slot.forward, request.samples, request.loss, room=True)))
            case m.ForwardBackward():
                tokens = sum(len(sample.ids) for sample in request.samples)
                found = await run(slot.forward_backward, request.samples, request.loss, room=True, tokens=tokens)
                return m.GradientAdded(s=time.monotonic() - started, logprobs=tuple(found))
            case m.OptimStep():
                return m.Optimized(report=asdict(await run(slot.optim_step, request.adam, room=True)))
            case m.Score():
                return m.Scored(sequences=await run(slot.score, request.sequences, request.top_k, room=True))
            case m.Publish():
                slot.check_publish(request.version)
                self._manifest = await run(self.publish, request.version, request)
                return m.PublishedVersion(
                    version=self._manifest.version, digest=self._manifest.digest, weights=self.weights()
                )
            case _:
                what = f"a {type(request).__name__} is not for slots"
                raise WindfallError(what, where=f"policy {slot.name!r}", fix="Use the verbs of slots.")
