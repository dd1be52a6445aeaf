"""Calls of models: accepted, performed in their order, and their results written down.

Rules:
- calls of a model are performed in the order of their numbers, each after the one before it. If one fails, the model is
  as it was before it, and the next one is performed;
- a call whose mistake is known when it arrives keeps its place: the calls after it are for their turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from windfall.controller.remote_trainer import RemoteTrainer
from windfall.errors import WindfallError
from windfall.tinker import calls as c
from windfall.tinker.accounts.fairness import AccountTurn
from windfall.tinker.accounts.keys import ApiAccount
from windfall.tinker.call_checks import why_not
from windfall.tinker.calls import Refusal
from windfall.tinker.disk.call_log import Entry, call_id
from windfall.tinker.disk.records import NamedWeights
from windfall.tinker.disk.saved_weights import PARTS, path_of, size
from windfall.tinker.disk.store import Statement
from windfall.tinker.models.client_models import ClientModels
from windfall.tinker.models.model import TrainedModel
from windfall.tinker.samplers import Samplers
from windfall.training import TrainerLost

KEPT_BYTES = 4 << 30
"""Most bytes of an account's calls that are kept on disk to be repeated. With an update, a checkpoint replaces them
(model.SAVE_BYTES); a client that never makes one gets no further."""


class ModelCalls:
    def __init__(self, models: ClientModels, samplers: Samplers, save_updates: int) -> None:
        """`save_updates`: updates of a model after which it is saved."""
        self._shared, self._weights, self._slots = models.shared, models.weights, models.slots
        self._models, self._samplers, self._save_updates = models, samplers, save_updates

    def entry(self, account: ApiAccount, call: c.ModelCall, body: bytes) -> Entry:
        """The call of a model, or the one that was made before with its number. Raises Refusal."""
        model, shared = self._models.get(account, call.model), self._shared
        entry = shared.calls.entry(call_id(model.id, call.seq), account, call, body, model=model.id, seq=call.seq)
        if not entry.body:
            return entry
        if model.unloaded:
            raise Refusal(410, f"model {model.id} was unloaded. Create a training client from its saved weights.")
        if call.seq < model.next_seq:
            raise Refusal(410, f"call {call.seq} of model {model.id} was performed long ago; its result is gone")
        active = (m for m in self._models.of(account) if m.next_seq in m.waiting)
        shared.keys.check_calls(account, entry.size, awaited=call.seq == model.next_seq and not any(active))
        try:
            self._check(account, call)
        except Refusal as e:
            entry.replace(c.RefusedCall(model=call.model, seq=call.seq, message=str(e)))
        model.seen = entry.created
        return entry

    def _check(self, account: ApiAccount, call: c.ModelCall) -> None:
        """Raises Refusal if it is known that the call will fail."""
        terms = self._shared.terms
        if why := why_not(call, context=terms.context, vocabulary=terms.vocabulary):
            raise Refusal(400, why)
        if isinstance(call, c.LoadWeights):
            self._weights.get(account.name, call.path, optimizer=call.optimizer)
        if isinstance(call, c.SaveCall) and call.name:
            self._shared.keys.check_disk(account.name, self._weights.size_of(account.name))

    def perform(self, entry: Entry) -> None:
        """Perform a call when it is its turn."""
        model, shared = self._models.all.get(entry.model), self._shared
        if model is None or model.unloaded:  # the server was killed meanwhile
            shared.tasks.start(shared.calls.fail([entry], f"model {entry.model} is gone"))
            return
        model.waiting[entry.seq] = entry
        if model.task is None or model.task.done():
            model.task = shared.tasks.start(self._perform_all(model))

    def missing(self, entry: Entry) -> int:
        """The number of the call that a call of a model waits for and that has not arrived. 0: there is none."""
        model = self._models.all.get(entry.model)
        if model is None or entry.seq <= model.next_seq or model.next_seq in model.waiting:
            return 0
        return model.next_seq

    async def _perform_all(self, model: TrainedModel) -> None:
        """Perform the calls of a model whose turn it is."""
        await model.ready.wait()
        while not model.unloaded and (entry := model.waiting.get(model.next_seq)) is not None:
            await self._perform_until_done(model, entry)
            if not model.unloaded and model.is_due(self._save_updates):
                try:
                    with contextlib.suppress(WindfallError):  # it could not be loaded: the next call says so
                        async with self._in_slot(model) as (trainer, _):
                            await model.save_state(trainer)
                except TrainerLost as e:
                    await self._shared.trainers.lost(e)

    async def _perform_until_done(self, model: TrainedModel, entry: Entry) -> None:
        call = entry.call
        assert isinstance(call, c.ModelCall), f"{entry.id} has a result"

        finish = partial(self._finish, model, entry)
        if isinstance(call, c.RefusedCall):
            await finish(c.FailedCall(message=call.message))
            return

        async def attempt() -> None:
            short = call.short and bool(self._slots.slot_of(model))
            async with self._in_slot(model, short=short) as (trainer, turn):
                await self._perform(model, trainer, turn, entry, call)

        entry.why = "all slots of the trainer are in use by other models" if self._slots.full else ""
        # An error here means that the model could not be loaded: its slot is empty now.
        await self._shared.until_done(entry, attempt, finish, user=False, over=lambda: model.unloaded)

    @contextlib.asynccontextmanager
    async def _in_slot(
        self, model: TrainedModel, *, short: bool = False
    ) -> AsyncIterator[tuple[RemoteTrainer, AccountTurn]]:
        """The model in a slot, when it is the turn of its account. `short`: for milliseconds. Raises TrainerLost, and
        WindfallError if the model cannot be loaded."""
        await self._shared.trainers.ready()
        turns, slots = self._shared.turns, self._slots
        async with turns.turn(model.account, short=short) as turn, slots.hold(model) as trainer, model.busy:
            yield trainer, turn

    async def _perform(
        self, model: TrainedModel, trainer: RemoteTrainer, turn: AccountTurn, entry: Entry,
        call: c.TrainerCall | c.SaveCall,
    ) -> None:  # fmt: skip
        """Perform one call, end the turn, and write down the result. Raises TrainerLost."""
        statements, replaced, entry.why = list[Statement](), set[Path](), ""
        try:
            if isinstance(call, c.SaveCall):
                result, statements, replaced = await self._save(model, trainer, turn, call)
            else:
                self._check_kept(model.account, call)
                result = await model.perform(trainer, call)
        except Refusal as e:
            result = c.FailedCall(message=str(e))
        except WindfallError as e:
            self._slots.drop(model)  # what it changed is not known, and without memory the slot is empty
            result = c.FailedCall(message=str(e))
        turn.end()
        if isinstance(result, c.ForwardResult) and isinstance(call, c.LossCall):
            self._shared.keys.count(model.account, trained_tokens=sum(len(sample.ids) for sample in call.samples))
        await self._finish(model, entry, result, *statements)
        await self._weights.discard(replaced)

    def _check_kept(self, account: str, call: c.TrainerCall) -> None:
        """Raises Refusal if the call would add to gradients without an update that are too many to be repeated."""
        kept = sum(model.kept_bytes for model in self._models.all.values() if model.account == account)
        if isinstance(call, c.ForwardBackwardCall) and kept >= KEPT_BYTES:
            what = f"account {account} has gradients of {kept >> 20} MiB of data without an update, of at most"
            raise Refusal(400, f"{what} {KEPT_BYTES >> 20}. Call optim_step, or unload models.")

    async def _finish(
        self, model: TrainedModel, entry: Entry, result: c.Result | c.FailedCall, *statements: Statement
    ) -> None:
        model.next_seq = entry.seq + 1
        model.waiting.pop(entry.seq, None)
        repeated = isinstance(entry.call, c.ModelCallBase) and entry.call.repeated
        if repeated := repeated and not isinstance(result, c.FailedCall):
            model.since.append(entry)
        await self._shared.calls.done(entry, result, model.row(), *statements, repeated=repeated)

    async def _save(
        self, model: TrainedModel, trainer: RemoteTrainer, turn: AccountTurn, call: c.SaveCall
    ) -> tuple[c.WeightsSaved, list[Statement], set[Path]]:
        """Save weights. Returns the result, what to write down, and folders that were replaced."""
        kind = "training" if isinstance(call, c.SaveWeights) else "sampler"
        folder = model.folder / PARTS[kind] / f"{call.name or 'unnamed'}-{call.seq}"
        path = path_of(model.id, PARTS[kind], call.name or folder.name)
        before = self._weights.named.get(path)
        if isinstance(call, c.SaveWeights) and before is not None and not call.overwrite:
            raise Refusal(400, f"there are weights {call.name!r} already: {path}. Choose another name.")
        sampler_id = ""
        if isinstance(call, c.SaveForSampler) and not call.name:
            sampler_id = self._samplers.new_id(call, model.session)
        if kind == "training":
            await model.save(trainer, folder, optimizer=True)
        else:
            await model.save(trainer, folder, optimizer=False, begun=turn.end)
        if isinstance(call, c.SaveForSampler) and not call.name:
            sampler, replaced = await self._samplers.saved(call, sampler_id, model.session, model.account, folder)
            return c.WeightsSaved(path=path, sampler=sampler.id), [sampler.row()], replaced
        saved_bytes, now = await asyncio.to_thread(size, folder), time.time()
        found = self._weights.named[path] = NamedWeights(
            path=path, account=model.account, model=model.id, kind=kind, created=now, folder=folder, bytes=saved_bytes,
            expires=None if call.ttl_s is None else now + call.ttl_s, info=call.metadata,
        )  # fmt: skip
        return c.WeightsSaved(path=path), [found.row()], {before.folder} if before is not None else set()
