"""Models of clients, and their calls.

Rules:
- calls of a model are performed in the order of their numbers, each after the one before it. If one fails, the model is
  as it was before it, and the next one is performed;
- a call whose mistake is known when it arrives keeps its place: the calls after it are for their turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from windfall.controller.remote_trainer import RemoteTrainer
from windfall.errors import WindfallError
from windfall.tinker import calls as c
from windfall.tinker.accounts.fairness import AccountTurn
from windfall.tinker.accounts.keys import ApiAccount
from windfall.tinker.calls import Refusal
from windfall.tinker.disk.call_log import Entry, call_id
from windfall.tinker.disk.records import NamedWeights
from windfall.tinker.disk.saved_weights import PARTS, SavedWeights, link_tree, path_of, size
from windfall.tinker.disk.store import Statement, TinkerStore
from windfall.tinker.models import call_checks
from windfall.tinker.models.adapter_slots import TrainSlots
from windfall.tinker.models.model import Changing, TrainedModel
from windfall.tinker.samplers import Samplers
from windfall.tinker.sessions import ClientSessions
from windfall.tinker.shared import Attempts, SharedParts
from windfall.training import AdapterSpec, TrainerLost


class ClientModels:
    """Implements model.ModelRecords."""

    def __init__(
        self, shared: SharedParts, sessions: ClientSessions, weights: SavedWeights, samplers: Samplers,
        slots: TrainSlots, *, save_updates: int,
    ) -> None:  # fmt: skip
        """`save_updates`: updates of a model after which it is saved."""
        self._shared, self._sessions, self._weights, self._samplers = shared, sessions, weights, samplers
        self._slots, self._save_updates = slots, save_updates
        self.all: dict[str, TrainedModel] = {}
        self._copies: dict[str, asyncio.Task[NamedWeights]] = {}
        """Copies of weights that are being made, by path."""
        weights.used.append(lambda: [model.checkpoint for model in self.all.values() if not model.unloaded])

    def restore(self) -> None:
        for row in self._shared.store.rows("select * from model"):
            self._restore(row)

    def _restore(self, row: Mapping[str, Any]) -> None:
        spec = json.loads(row["spec"])
        lora = c.LoraSpec(**spec["lora"])
        model = self.all[row["id"]] = TrainedModel(
            id=row["id"], account=row["account"], session=row["session"], base=spec["base"], spec=lora,
            adapter=self._shared.terms.adapter(lora), created=row["created"],
            folder=self._weights.folder_of(row["id"]), records=self, saved_seq=row["saved_seq"],
            checkpoint=Path(row["folder"]) if row["folder"] else None, optimizer=spec["optimizer"],
            next_seq=row["next_seq"], metadata=spec["metadata"], unloaded=bool(row["unloaded"]), seen=row["created"],
        )  # fmt: skip
        model.ready.set()

    def repeat(self, entry: Entry) -> None:
        """A call that a model may have to repeat, from a server before this one. They come in their order."""
        if (model := self.all.get(entry.model)) is not None:
            model.since.append(entry)

    def get(self, account: ApiAccount, id: str) -> TrainedModel:
        """Raises Refusal."""
        model = self.all.get(id)
        if model is None or model.account != account.name:
            raise Refusal(404, f"there is no model {id!r}")
        return model

    def of(self, account: ApiAccount) -> list[TrainedModel]:
        """The models of an account, newest first."""
        return sorted((m for m in self.all.values() if m.account == account.name), key=lambda m: -m.created)

    def slot_of(self, model: TrainedModel) -> str:
        """The slot of the trainer that holds a model; "" if none does."""
        return self._slots.slot_of(model)

    # a new model

    def new(self, account: ApiAccount, call: c.CreateModel) -> Entry:
        """The call that creates a model, or the one that was made before. Raises Refusal."""
        self._sessions.get(account, call.session)
        model, calls = f"{call.session}:train:{call.seq}", self._shared.calls
        entry = calls.entry(call_id(model, 0), account, call, model=model)
        if calls.get(entry.id) is not None:
            return entry
        if model in self.all:
            entry.call = None
            calls.add_known(entry, c.ModelReady(model=model, path=call.path))
            return entry
        self._shared.keys.check_models(account, sum(1 for m in self.of(account) if not m.unloaded))
        self._adapter(account.name, call)
        return entry

    def _adapter(self, account: str, call: c.CreateModel) -> tuple[c.LoraSpec, AdapterSpec, NamedWeights | None]:
        """The adapter of a new model, and the weights that it starts with. Raises Refusal."""
        terms, lora, source = self._shared.terms, call.lora, None
        if call.path:
            source = self._start(account, call)
            lora = self.all[source.model].spec
        if lora is None:
            raise Refusal(400, "lora_config is missing: this server trains adapters")
        if call.base:
            terms.check_base(call.base)
        if not 1 <= lora.rank <= terms.rank:
            raise Refusal(400, f"lora_config.rank is {lora.rank}; this server takes 1 to {terms.rank}")
        try:
            return lora, terms.adapter(lora), source
        except WindfallError as e:
            raise Refusal(400, str(e)) from e

    def _start(self, account: str, call: c.CreateModel | c.LoadWeights) -> NamedWeights:
        """The weights that a call loads. Raises Refusal."""
        source = self._weights.get(account, call.path)
        if call.optimizer and source.kind != "training":
            raise Refusal(400, f"{call.path} has no state of the optimizer: it was saved for sampling")
        return source

    def create(self, entry: Entry, call: c.CreateModel) -> None:
        shared = self._shared
        try:
            lora, adapter, source = self._adapter(entry.account, call)
        except Refusal as e:  # the weights were deleted while the server was down
            shared.tasks.start(shared.calls.fail([entry], str(e)))
            return
        folder = self._weights.folder_of(entry.model)
        model = self.all[entry.model] = TrainedModel(
            id=entry.model, account=entry.account, session=call.session, base=shared.terms.base, spec=lora,
            adapter=adapter, created=entry.created, folder=folder, records=self, metadata=call.metadata,
            optimizer=call.optimizer, seen=entry.created, checkpoint=None if source is None else folder / "start",
        )  # fmt: skip
        shared.tasks.start(self._create(entry, model, source))

    async def _create(self, entry: Entry, model: TrainedModel, source: NamedWeights | None) -> None:
        calls = self._shared.calls
        try:
            if source is not None and model.checkpoint is not None:
                await asyncio.to_thread(link_tree, source.folder, model.checkpoint)
        except WindfallError as e:
            self.all.pop(model.id, None)
            model.unloaded = True
            model.ready.set()
            await calls.fail(list(model.waiting.values()), f"model {model.id} could not be created")
            await calls.done(entry, c.FailedCall(message=str(e)))
            return
        path = source.path if source is not None else ""
        await calls.done(entry, c.ModelReady(model=model.id, path=path), _row(model))
        model.ready.set()
        self._shared.log("tinker_model", model=model.id, account=model.account, rank=model.spec.rank, path=path)

    async def copy(self, account: ApiAccount, path: str, *, expires_s: float | None, key: str) -> NamedWeights:
        """A copy of weights for the account, in a model of its own that cannot be trained. The same key is the same
        copy."""
        source = self._weights.get(account.name, path)
        id = f"{uuid.uuid5(uuid.NAMESPACE_URL, f'{account.name} {key} {path}')}:copy:0"
        target = f"tinker://{id}/{path.removeprefix(f'tinker://{source.model}/')}"
        if (found := self._weights.named.get(target)) is not None:
            return found
        self._check_disk(account.name)
        if (task := self._copies.get(target)) is None:
            made = replace(
                source, path=target, account=account.name, model=id, created=time.time(), public=False,
                expires=None if expires_s is None else time.time() + expires_s,
                folder=self._weights.folder_of(id) / source.folder.relative_to(self._weights.folder_of(source.model)),
            )  # fmt: skip
            task = self._copies[target] = asyncio.create_task(self._copy(source, made))
            task.add_done_callback(lambda _: self._copies.pop(target))
        return await asyncio.shield(task)

    async def _copy(self, source: NamedWeights, made: NamedWeights) -> NamedWeights:
        try:
            await asyncio.to_thread(link_tree, source.folder, made.folder)
        except WindfallError as e:
            raise Refusal(400, str(e)) from e
        of = self.all[source.model]
        model = TrainedModel(
            id=made.model, account=made.account, session="", base=of.base, spec=of.spec, adapter=of.adapter,
            created=made.created, folder=self._weights.folder_of(made.model), records=self, unloaded=True,
            seen=made.created,
        )  # fmt: skip
        self.all[model.id], self._weights.named[made.path] = model, made
        await self._shared.store.write(_row(model), made.row())
        return made

    # its end

    def new_unload(self, account: ApiAccount, call: c.UnloadModel) -> Entry:
        """The call that unloads a model, or the one that was made before. Raises Refusal."""
        model = self.get(account, call.model)
        return self._shared.calls.entry(f"{model.id}/unload", account, call, model=model.id)

    async def unload(self, entry: Entry) -> None:
        if (model := self.all.get(entry.model)) is not None:
            await self._unload(model, "the model was unloaded before the call was performed")
        await self._shared.calls.done(entry, c.ModelReady(model=entry.model))

    async def end_session(self, session: str, why: str) -> None:
        """Unload the models of a session."""
        models = [model for model in self.all.values() if model.session == session]
        await asyncio.gather(*(self._unload(model, why) for model in models))

    async def _unload(self, model: TrainedModel, why: str) -> None:
        """Take it out of its slot. Its named weights stay. `why`: for its calls that were not performed."""
        if model.unloaded:
            return
        model.unloaded = True
        if model.task is not None:
            if not model.busy:
                model.task.cancel()
            await asyncio.wait([model.task])
        self._slots.remove(model)
        for entry in model.since:
            entry.call = None
        model.since = []
        waiting = list(model.waiting.values())
        model.waiting.clear()
        await self._shared.calls.fail(waiting, why)
        await self._shared.store.write(_row(model), _forget_bodies(model.id, model.next_seq))
        await self._weights.discard_model(model.id)

    # its calls

    def entry(self, account: ApiAccount, call: c.ModelCall) -> Entry:
        """The call of a model, or the one that was made before with its number. Raises Refusal."""
        model, shared = self.get(account, call.model), self._shared
        entry = shared.calls.entry(call_id(model.id, call.seq), account, call, model=model.id, seq=call.seq)
        if shared.calls.get(entry.id) is not None:
            return entry
        if model.unloaded:
            raise Refusal(410, f"model {model.id} was unloaded. Create a training client from its saved weights.")
        if call.seq < model.next_seq:
            raise Refusal(410, f"call {call.seq} of model {model.id} was performed long ago; its result is gone")
        active = (m for m in self.all.values() if m.account == account.name and m.next_seq in m.waiting)
        shared.keys.check_calls(account, entry.size, awaited=call.seq == model.next_seq and not any(active))
        if why := self._why_not(account, call):
            entry.replace(c.RefusedCall(model=call.model, seq=call.seq, message=why))
        model.seen = entry.created
        return entry

    def _why_not(self, account: ApiAccount, call: c.ModelCall) -> str:
        """Why it will fail; "" if it is not known to."""
        try:
            if isinstance(call, c.LoadWeights):
                self._start(account.name, call)
            if isinstance(call, c.SaveWeights | c.SaveForSampler) and call.name:
                self._check_disk(account.name)
        except Refusal as e:
            return str(e)
        terms = self._shared.terms
        return call_checks.why_not(call, context=terms.context, vocabulary=terms.vocabulary)

    def perform(self, entry: Entry) -> None:
        """Perform a call when it is its turn."""
        model, shared = self.all.get(entry.model), self._shared
        if model is None or model.unloaded:  # the server was killed meanwhile
            shared.tasks.start(shared.calls.fail([entry], f"model {entry.model} is gone"))
            return
        model.waiting[entry.seq] = entry
        if model.task is None or model.task.done():
            model.task = shared.tasks.start(self._perform_all(model))

    def missing(self, entry: Entry) -> int:
        """The number of the call that a call of a model waits for and that has not arrived. 0: there is none."""
        model = self.all.get(entry.model)
        waits = model is not None and entry.seq > model.next_seq and model.next_seq not in model.waiting
        return model.next_seq if model is not None and waits else 0

    async def _perform_all(self, model: TrainedModel) -> None:
        """Perform the calls of a model whose turn it is."""
        await model.ready.wait()
        while not model.unloaded and (entry := model.waiting.get(model.next_seq)) is not None:
            await self._perform_until_done(model, entry)
            if not model.unloaded and model.is_due(self._save_updates):
                try:
                    with contextlib.suppress(WindfallError):  # it could not be loaded: the next call says so
                        await self._in_slot(model, lambda trainer, _: model.save_state(trainer))
                except TrainerLost as e:
                    await self._shared.trainers.lost(e)

    async def _perform_until_done(self, model: TrainedModel, entry: Entry) -> None:
        attempts = Attempts()
        entry.why = "all slots of the trainer are in use by other models" if self._slots.full else ""
        while entry.done is None and not model.unloaded:
            try:
                short = not isinstance(entry.call, c.LossCall) and bool(self.slot_of(model))
                perform = lambda trainer, turn: self._perform(model, trainer, turn, entry)  # noqa: E731
                await self._in_slot(model, perform, short=short)
            except WindfallError as e:  # the model could not be loaded: its slot is empty now
                if entry.done is None:
                    await self._finish(model, entry, c.FailedCall(message=str(e), user=False))
            except TrainerLost as e:
                if entry.done is None and (why := attempts.exhausted(e)):
                    await self._finish(model, entry, c.FailedCall(message=why, user=False))
                await self._shared.trainers.lost(e)

    async def _in_slot(
        self, model: TrainedModel, work: Callable[[RemoteTrainer, AccountTurn], Awaitable[None]], *,
        short: bool = False,
    ) -> None:  # fmt: skip
        """Work with the model in a slot, when it is the turn of its account. `short`: for milliseconds. Raises
        TrainerLost, and WindfallError if the model cannot be loaded."""
        await self._shared.trainers.ready()
        turn = self._shared.turns.turn(model.account, short=short)
        async with turn as turn, self._slots.hold(model) as trainer:
            model.busy = True
            try:
                await work(trainer, turn)
            finally:
                model.busy = False

    async def _perform(self, model: TrainedModel, trainer: RemoteTrainer, turn: AccountTurn, entry: Entry) -> None:
        """Perform one call, end the turn, and write down the result. Raises TrainerLost."""
        call, trained, entry.why = entry.call, 0, ""
        statements, replaced = list[Statement](), set[Path]()
        try:
            match call:
                case c.RefusedCall():
                    raise WindfallError(call.message)
                case c.SaveWeights() | c.SaveForSampler():
                    result, statements, replaced = await self._save(model, trainer, turn, call)
                case c.LossCall():
                    trained = sum(len(sample.ids) for sample in call.samples)
                    result = await model.perform(trainer, call)
                case c.OptimStepCall() | c.LoadWeights():
                    result = await model.perform(trainer, call)
                case _:
                    raise AssertionError(f"no call of a model: {entry.id}")
        except WindfallError as e:
            turn.end()
            if not isinstance(call, c.RefusedCall):
                self._slots.drop(model)  # what it changed is not known, and without memory the slot is empty
            await self._finish(model, entry, c.FailedCall(message=str(e)))
            return
        turn.end()
        self._shared.keys.count(model.account, trained_tokens=trained)
        await self._finish(model, entry, result, *statements)
        await self._weights.discard(replaced)

    async def _finish(
        self, model: TrainedModel, entry: Entry, result: c.Result | c.FailedCall, *statements: Statement
    ) -> None:
        model.next_seq = entry.seq + 1
        model.waiting.pop(entry.seq, None)
        failed = isinstance(result, c.FailedCall)
        repeated = isinstance(entry.call, Changing) and not failed and entry.seq > model.saved_seq
        if repeated:
            model.since.append(entry)
        await self._shared.calls.done(entry, result, _row(model), *statements, repeated=repeated)

    async def _save(
        self, model: TrainedModel, trainer: RemoteTrainer, turn: AccountTurn, call: c.SaveWeights | c.SaveForSampler
    ) -> tuple[c.WeightsSaved, list[Statement], set[Path]]:
        """Save weights. Returns the result, what to write down, and folders that were replaced."""
        kind = "training" if isinstance(call, c.SaveWeights) else "sampler"
        folder = model.folder / PARTS[kind] / f"{call.name or 'unnamed'}-{call.seq}"
        path = path_of(model.id, PARTS[kind], call.name or folder.name)
        before = self._weights.named.get(path)
        if isinstance(call, c.SaveWeights) and before is not None and not call.overwrite:
            raise WindfallError(f"there are weights {call.name!r} already", where=path, fix="Choose another name.")
        if kind == "training":
            await model.save(trainer, folder, optimizer=True)
        else:
            await model.save(trainer, folder, optimizer=False, begun=turn.end)
        if isinstance(call, c.SaveForSampler) and not call.name:
            sampler, replaced = await self._samplers.saved(call, model.session, model.account, folder)
            return c.WeightsSaved(path=path, sampler=sampler.id), [sampler.row()], replaced
        saved_bytes, now = await asyncio.to_thread(size, folder), time.time()
        found = self._weights.named[path] = NamedWeights(
            path=path, account=model.account, model=model.id, kind=kind, created=now, folder=folder, bytes=saved_bytes,
            expires=None if call.ttl_s is None else now + call.ttl_s, metadata=call.metadata,
        )  # fmt: skip
        return c.WeightsSaved(path=path), [found.row()], {before.folder} if before is not None else set()

    def _check_disk(self, account: str) -> None:
        """Raises Refusal if the account may save no more weights."""
        self._shared.keys.check_disk(account, self._weights.size_of(account))

    # model.ModelRecords

    def checkpoint_folder(self, path: str) -> Path:
        return self._weights.folder(path)

    async def saved(self, model: TrainedModel) -> None:
        await self._shared.store.write(_row(model), _forget_bodies(model.id, model.saved_seq))

    def unsaved(self, model: TrainedModel, error: WindfallError) -> NoReturn:
        fix = "Free disk space, then `windfall resume`: no call that was accepted is lost."
        what = f"model {model.id} cannot be saved: {error.what}"
        self._shared.tasks.end(WindfallError(what, where=error.where, fix=fix))


def _row(m: TrainedModel) -> Statement:
    spec = {"lora": msgspec.to_builtins(m.spec), "base": m.base, "metadata": m.metadata, "optimizer": m.optimizer}
    return TinkerStore.put(
        "model", id=m.id, account=m.account, session=m.session, created=m.created, spec=json.dumps(spec),
        saved_seq=m.saved_seq, folder=str(m.checkpoint or ""), next_seq=m.next_seq, unloaded=int(m.unloaded),
    )  # fmt: skip


def _forget_bodies(model: str, seq: int) -> Statement:
    """Calls up to this one are in a checkpoint: nothing repeats them."""
    return ("update call set body = null where model = ? and seq <= ? and done is not null", (model, seq))
