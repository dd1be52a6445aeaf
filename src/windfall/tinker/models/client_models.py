"""Models of clients: from the call that creates one to its end."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import replace

from windfall.errors import WindfallError
from windfall.tinker import calls as c
from windfall.tinker.accounts.keys import ApiAccount
from windfall.tinker.calls import Refusal
from windfall.tinker.disk.call_log import Entry, call_id
from windfall.tinker.disk.records import NamedWeights
from windfall.tinker.disk.saved_weights import SavedWeights, link_tree
from windfall.tinker.models.adapter_slots import TrainSlots
from windfall.tinker.models.model import TrainedModel
from windfall.tinker.sessions import ClientSessions
from windfall.tinker.shared import SharedParts


class ClientModels:
    def __init__(self, shared: SharedParts, sessions: ClientSessions, weights: SavedWeights, slots: TrainSlots) -> None:
        self.shared, self.weights, self.slots = shared, weights, slots
        self._sessions = sessions
        self.all: dict[str, TrainedModel] = {}
        self._copies: dict[str, asyncio.Task[NamedWeights]] = {}
        """Copies of weights that are being made, by path."""
        weights.used.append(lambda: [model.checkpoint for model in self.all.values() if not model.unloaded])

    def restore(self) -> None:
        for row in self.shared.store.rows("select * from model"):
            self.all[row["id"]] = TrainedModel.read(row, self.shared, self.weights)

    def get(self, account: ApiAccount, id: str) -> TrainedModel:
        """Raises Refusal."""
        model = self.all.get(id)
        if model is None or model.account != account.name:
            raise Refusal(404, f"there is no model {id!r}")
        return model

    def of(self, account: ApiAccount) -> list[TrainedModel]:
        """The models of an account, newest first."""
        return sorted((m for m in self.all.values() if m.account == account.name), key=lambda m: -m.created)

    # a new model

    def new(self, account: ApiAccount, call: c.CreateModel, body: bytes) -> Entry:
        """The call that creates a model, or the one that was made before. Raises Refusal."""
        self._sessions.get(account, call.session)
        model = f"{call.session}:train:{call.seq}"
        entry = self.shared.calls.entry(call_id(model, 0), account, call, body, model=model)
        if entry.body and model not in self.all:
            self.shared.keys.check_models(account, sum(1 for m in self.of(account) if not m.unloaded))
            self._check(account.name, call)
        return entry

    def _check(self, account: str, call: c.CreateModel) -> tuple[c.LoraSpec, NamedWeights | None]:
        """The adapter of a new model, and the weights that it starts with. Raises Refusal."""
        terms, lora, source = self.shared.terms, call.lora, None
        if call.path:
            source = self.weights.get(account, call.path, optimizer=call.optimizer)
            lora = self.all[source.model].spec
        if lora is None:
            fix = "Create it with create_lora_training_client."
            raise Refusal(400, f"lora_config: this server trains adapters (LoRA), not all weights of a model. {fix}")
        if call.base:
            terms.check_base(call.base)
        if not 1 <= lora.rank <= terms.rank:
            raise Refusal(400, f"lora_config.rank is {lora.rank}; this server takes 1 to {terms.rank}")
        if not (lora.attn or lora.mlp or lora.unembed):
            fix = "Set train_mlp, train_attn or train_unembed."
            raise Refusal(400, f"lora_config: the adapter would have no layers. {fix}")
        try:
            terms.adapter(lora)
        except WindfallError as e:
            raise Refusal(400, str(e)) from e
        return lora, source

    def create(self, entry: Entry) -> None:
        calls, tasks, call = self.shared.calls, self.shared.tasks, entry.call
        assert isinstance(call, c.CreateModel), f"{entry.id} creates no model"
        if entry.model in self.all:  # the same request again, after its result was forgotten
            tasks.start(calls.done(entry, c.ModelReady(model=entry.model, path=call.path)))
            return
        try:
            lora, source = self._check(entry.account, call)
        except Refusal as e:  # the weights were deleted while the server was down
            tasks.start(calls.fail([entry], str(e)))
            return
        model = self.all[entry.model] = TrainedModel(
            id=entry.model, account=entry.account, session=call.session, spec=lora,
            created=entry.created, shared=self.shared, weights=self.weights, metadata=call.metadata,
            optimizer=call.optimizer, seen=entry.created,
        )  # fmt: skip
        tasks.start(self._create(entry, model, source))

    async def _create(self, entry: Entry, model: TrainedModel, source: NamedWeights | None) -> None:
        calls, path = self.shared.calls, ""
        if source is not None:
            path, model.checkpoint = source.path, model.folder / "start"
            try:
                async with model.busy:
                    await asyncio.to_thread(link_tree, source.folder, model.checkpoint)
            except WindfallError as e:
                self.all.pop(model.id, None)
                model.unloaded = True
                model.ready.set()
                await calls.fail(list(model.waiting.values()), f"model {model.id} could not be created")
                await calls.done(entry, c.FailedCall(message=str(e)))
                return
        await calls.done(entry, c.ModelReady(model=model.id, path=path), model.row())
        model.ready.set()
        self.shared.log("tinker_model", model=model.id, account=model.account, rank=model.spec.rank, path=path)

    async def copy(self, account: ApiAccount, path: str, *, expires_s: float | None, key: str) -> NamedWeights:
        """A copy of weights for the account, in a model of its own that cannot be trained. The same key is the same
        copy. Raises Refusal."""
        source = self.weights.get(account.name, path)
        id = f"{uuid.uuid5(uuid.NAMESPACE_URL, f'{account.name} {key} {path}')}:copy:0"
        target = f"tinker://{id}/{path.removeprefix(f'tinker://{source.model}/')}"
        if (found := self.weights.named.get(target)) is not None:
            return found
        self.shared.keys.check_disk(account.name, self.weights.size_of(account.name))
        if (task := self._copies.get(target)) is None:
            made = replace(
                source, path=target, account=account.name, model=id, created=time.time(), public=False,
                expires=None if expires_s is None else time.time() + expires_s,
                folder=self.weights.folder_of(id) / source.folder.relative_to(self.weights.folder_of(source.model)),
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
        model = self.all[made.model] = TrainedModel(
            id=made.model, account=made.account, session="", spec=of.spec, created=made.created,
            shared=self.shared, weights=self.weights, unloaded=True, seen=made.created,
        )  # fmt: skip
        self.weights.named[made.path] = made
        await self.shared.store.write(model.row(), made.row())
        return made

    # its end

    def new_unload(self, account: ApiAccount, call: c.UnloadModel, body: bytes) -> Entry:
        """The call that unloads a model, or the one that was made before. Raises Refusal."""
        model = self.get(account, call.model)
        return self.shared.calls.entry(f"{model.id}/unload", account, call, body, model=model.id)

    def unload(self, entry: Entry) -> None:
        entry.task = self.shared.tasks.start(self._unload(entry))

    async def _unload(self, entry: Entry) -> None:
        if (model := self.all.get(entry.model)) is not None:
            await self._end(model, "the model was unloaded before the call was performed")
        await self.shared.calls.done(entry, c.ModelReady(model=entry.model))

    async def end_session(self, session: str, why: str) -> None:
        """Unload the models of a session."""
        models = [model for model in self.all.values() if model.session == session]
        await asyncio.gather(*(self._end(model, why) for model in models))

    async def _end(self, model: TrainedModel, why: str) -> None:
        """Take it out of its slot. Its named weights stay. `why`: for its calls that were not performed."""
        if model.unloaded:
            return
        model.unloaded = True
        async with model.busy:
            if model.task is not None:
                model.task.cancel()
                await asyncio.wait([model.task])
        self.slots.drop(model, gone=True)
        waiting = list(model.waiting.values())
        model.waiting.clear()
        await self.shared.calls.fail(waiting, why)
        await self.shared.store.write(model.row(), model.forget(model.next_seq))
        await self.weights.discard_model(model.id)
