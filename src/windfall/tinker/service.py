"""Sessions, models, samplers and calls of all clients. Everything that the wire asks is answered here.

    submit ──▶ the store ──▶ id ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─▶ outcome(id)
                  │
                  └──▶ calls of a model, in order ──▶ TrainSlots ──▶ verbs of the trainer
                       calls that sample, at once  ──▶ SampleSlots ──▶ workers

Rules:
- a call is on disk before its id is given out, and its result before anybody sees it. A restart of the server continues
  with all calls that have no result; a client notices nothing but a pause.
- a call with a number (`seq`) that was made before is that call, also after a restart.
- calls of a model are performed in the order of their numbers, each after the one before it. If one fails, the model is
  as it was before it, and the next one is performed.
- an account sees nothing of another one: what it does not own does not exist for it.
- a session whose client is silent for `session_timeout_s` ends: its models leave their slots, its unnamed weights are
  removed. Named weights stay;
- a loop that saves unnamed weights with every step does not fill the disk: what it has left behind is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import asdict

from windfall.controller.remote_trainer import RemoteTrainer
from windfall.errors import WindfallError
from windfall.tinker import calls as c
from windfall.tinker.adapter_slots import SampleSlots, Trainers, TrainSlots
from windfall.tinker.bill import AccountBill, AccountCost
from windfall.tinker.call_log import CallLog, Entry
from windfall.tinker.fairness import TrainerTurn, TrainerTurns
from windfall.tinker.keys import ApiAccount, Keys
from windfall.tinker.model import Changing, TrainedModel
from windfall.tinker.records import NamedWeights, Sampler, TinkerSession
from windfall.tinker.sampler import FleetSampler
from windfall.tinker.store import Statement, TinkerStore
from windfall.training import AdapterSpec, Sample, TrainerFailed, TrainerLost

MAX_SETTING = 1e6
"""Of the optimizer. Larger ones leave the range of float32 within one update, which ends the trainer's process."""
TIDY_S = 5.0
PARTS = {"training": "weights", "sampler": "sampler_weights"}
"""By kind of saved weights: the part of their path that says so."""
KEPT_UNNAMED, UNUSED_S = 16, 3600.0
"""Unnamed weights to sample from stay for this many saves of a model, and for as long after their last call."""
FAILURES = 3
"""A call with which a trainer fails so often is given up: others could not be performed either."""
LOSSES = 8
"""A call during which so many trainers are lost for another reason, such as a kill, is given up."""


@dataclass(kw_only=True, frozen=True, slots=True)
class ServerTerms:
    """What the server offers."""

    base: str
    """Name under which it serves the base model."""
    tokenizer: str
    """Hub id, or folder on the server's machine, of the tokenizer of the base."""
    context: int
    vocabulary: int
    """Token ids are below it."""
    rank: int
    """Largest rank of an adapter."""
    adapter: Callable[[c.LoraSpec], AdapterSpec]
    """The adapter that a client's spec means for this base. Raises WindfallError."""
    session_timeout_s: float


class TinkerService:
    """Implements model.ModelRecords."""

    def __init__(
        self, folder: Path, store: TinkerStore, keys: Keys, terms: ServerTerms, trainers: Trainers, train: TrainSlots,
        sample: SampleSlots, sampler: FleetSampler, *, base_policy: str, save_updates: int, log: Callable[..., None],
        progress: Callable[[int], None] = lambda calls: None,
    ) -> None:  # fmt: skip
        """`folder`: of saved weights. `base_policy`: the policy without an adapter. `save_updates`: updates of a model
        after which it is saved. `log`: logs an event. `progress`: is told now and then how many calls were performed
        since the run began."""
        self.folder, self.keys, self.terms = folder, keys, terms
        self._store, self._trainers, self._train, self._sample = store, trainers, train, sample
        self._sampler, self._base_policy, self._log, self._save_updates = sampler, base_policy, log, save_updates
        self._progress = progress
        self._calls = CallLog(store)
        keys.open_calls = self._calls.open_calls
        self.turns, self.bill = TrainerTurns(), AccountBill()
        keys.usd = lambda account: self.bill.usd(account)
        self.sessions: dict[str, TinkerSession] = {}
        self.models: dict[str, TrainedModel] = {}
        self.checkpoints: dict[str, NamedWeights] = {}
        self.samplers: dict[str, Sampler] = {}
        self._live: dict[str, Path] = {}
        """By model: its newest live weights."""
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[Any]] = set()

    # start and end

    def restore(self) -> None:
        """Continue from the store."""
        now, rows = time.time(), self._store.rows
        self.keys.restore({row["name"]: json.loads(row["usage"]) for row in rows("select * from account")})
        for row in rows("select * from session where ended is null"):
            self.sessions[row["id"]] = TinkerSession(**{**row, "seen": now, "info": json.loads(row["info"])})
        self.checkpoints = {row["path"]: NamedWeights.read(row) for row in rows("select * from checkpoint")}
        for row in rows("select * from model"):
            self._restore_model(row)
        for row in rows("select * from sampler"):
            self.samplers[row["id"]] = found = Sampler.read(row)
            if found.key.startswith("live/") and found.folder is not None:
                self._live[found.key.removeprefix("live/")] = found.folder
        models = self.folder / "models"
        for folder in models.iterdir() if models.is_dir() else ():
            for path in self._unused(_contents(folder)):  # a killed server was about to write or remove it
                shutil.rmtree(path, ignore_errors=True)
        for entry in self._calls.restore():
            if entry.done is None:
                self._begin(entry)
            elif (model := self.models.get(entry.model)) is not None:
                model.since.append(entry)
        for model in self.models.values():
            model.since.sort(key=lambda entry: entry.seq)
        self._start(self._end_left_over())

    def _restore_model(self, row: Mapping[str, Any]) -> None:
        spec = json.loads(row["spec"])
        lora = c.LoraSpec(**spec["lora"])
        self.models[row["id"]] = TrainedModel(
            id=row["id"], account=row["account"], session=row["session"], base=spec["base"], spec=lora,
            adapter=self.terms.adapter(lora), created=row["created"], folder=self._folder_of(row["id"]),
            journal=self, saved_seq=row["saved_seq"], checkpoint=Path(row["folder"]) if row["folder"] else None,
            optimizer=spec["optimizer"], next_seq=row["next_seq"], metadata=spec["metadata"],
            unloaded=bool(row["unloaded"]), seen=row["created"],
        )  # fmt: skip
        self.models[row["id"]].ready.set()

    async def _end_left_over(self) -> None:
        """Free what sessions held that a killed server was about to end."""
        ids = {
            *(m.session for m in self.models.values() if not m.unloaded),
            *(s.session for s in self.samplers.values()),
        }
        await asyncio.gather(*(self._free(id) for id in ids - self.sessions.keys()))

    async def run(self) -> None:
        """Runs forever. Raises what a task of the service, or the store, has failed with."""
        self._start(self._trainers.watch())
        self._start(self._tidy())
        await asyncio.wait([self._failed, self._store.failed], return_when=asyncio.FIRST_COMPLETED)
        for failed in (self._store.failed, self._failed):
            if failed.done():
                failed.result()

    async def stop(self) -> None:
        """Perform no more calls, and save all models. Calls without a result are performed after the next start."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._failed.cancel()
        if not self._store.failed.done():
            # The calls since their last checkpoints are repeated after the next start.
            with contextlib.suppress(TrainerLost, WindfallError):
                await self._train.save()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)

    # accounts and sessions

    def account(self, key: str) -> ApiAccount:
        """Who has this key. Raises Refusal."""
        return self.keys.account(key)

    def usage(self, account: ApiAccount) -> dict[str, float]:
        """What an account has used so far."""
        part = self.bill.parts.get(account.name, AccountCost())
        return {**self.keys.usage(account.name), **asdict(part), "max_usd": account.max_usd}

    async def create_session(
        self, account: ApiAccount, *, tags: Sequence[str] = (), metadata: Mapping[str, Any] | None = None,
        sdk: str = "", name: str = "",
    ) -> TinkerSession:  # fmt: skip
        now = time.time()
        info = {"tags": list(tags), "metadata": dict(metadata or {}), "sdk": sdk, "name": name}
        session = TinkerSession(id=str(uuid.uuid4()), account=account.name, created=now, seen=now, info=info)
        self.sessions[session.id] = session
        await self._store.write(session.row())
        self._log("tinker_session", session=session.id, account=account.name, sdk=sdk)
        return session

    def session(self, account: ApiAccount, id: str) -> TinkerSession:
        """A session of the account. Raises Refusal; 410 if it has ended."""
        session = self.sessions.get(id)
        if session is None or session.account != account.name:
            for row in self._store.rows("select ended from session where id = ? and account = ?", id, account.name):
                if row["ended"] is not None:
                    raise c.Refusal(410, f"session {id} has ended. Create a new client.")
            raise c.Refusal(404, f"there is no session {id!r}. Create a new client.")
        return session

    def sessions_of(self, account: ApiAccount) -> list[TinkerSession]:
        """Those that have not ended, newest first."""
        return sorted((s for s in self.sessions.values() if s.account == account.name), key=lambda s: -s.created)

    def heartbeat(self, account: ApiAccount, id: str) -> None:
        self.session(account, id).seen = time.time()

    async def end_session(self, session: TinkerSession) -> None:
        """Free what the session holds. Its named weights stay."""
        if self.sessions.pop(session.id, None) is None:
            return
        session.ended = time.time()
        await self._store.write(session.row())
        self._log("tinker_session_ended", session=session.id, account=session.account)
        await self._free(session.id)

    async def _free(self, session: str) -> None:
        """Free what a session holds that has ended."""
        why = f"session {session} has ended"
        models = [model for model in self.models.values() if model.session == session]
        await asyncio.gather(*(self._unload(model, why) for model in models))
        await self._drop_samplers([s for s in self.samplers.values() if s.session == session], why)

    async def _drop_samplers(self, samplers: Sequence[Sampler], why: str) -> None:
        """End these samplers, and remove their weights if they have no name. `why`: for their open calls."""
        ids = [sampler.id for sampler in samplers]
        for id in ids:
            self.samplers.pop(id, None)
        await self._fail(self._calls.of(ids), why)
        for id in ids:
            self._calls.drop_sampler(id)
        await self._store.write(*(("delete from sampler where id = ?", (id,)) for id in ids))
        await self._discard({sampler.folder for sampler in samplers if sampler.folder is not None})

    def _outdated(self, now: float) -> list[Sampler]:
        """Samplers of unnamed weights that a loop has left behind: it saves new ones with every step."""
        unnamed = defaultdict[Path, list[Sampler]](list)
        for sampler in self.samplers.values():
            if sampler.folder is not None and not sampler.path and sampler.key == str(sampler.folder):
                unnamed[sampler.folder.parent].append(sampler)
        newest_first = (sorted(of_model, key=lambda s: -s.created) for of_model in unnamed.values())
        return [s for found in newest_first for s in found[KEPT_UNNAMED:] if now - s.used > UNUSED_S]

    # models

    def model(self, account: ApiAccount, id: str) -> TrainedModel:
        model = self.models.get(id)
        if model is None or model.account != account.name:
            raise c.Refusal(404, f"there is no model {id!r}")
        return model

    def slot_of(self, model: TrainedModel) -> str:
        """The slot of the trainer that holds a model; "" if none does."""
        return self._train.slot_of(model)

    def models_of(self, account: ApiAccount) -> list[TrainedModel]:
        """Newest first."""
        return sorted((m for m in self.models.values() if m.account == account.name), key=lambda m: -m.created)

    def _new_model(self, account: ApiAccount, call: c.CreateModel) -> Entry:
        """The call, or the one that was made before. Raises Refusal."""
        session = self.session(account, call.session)
        entry = Entry(
            id=request_id(model_id(call), 0), account=account.name, model=model_id(call), call=call, created=time.time()
        )
        if (found := self._calls.get(entry.id)) is not None:
            return found
        if (model := self.models.get(entry.model)) is not None:
            entry.call = None
            self._calls.add_known(entry, c.ModelReady(model=model.id, path=call.path))
            return entry
        self.keys.check_models(account, sum(1 for m in self.models_of(account) if not m.unloaded))
        self._make_model(account.name, session.id, call)
        return entry

    def _make_model(self, account: str, session: str, call: c.CreateModel) -> tuple[TrainedModel, NamedWeights | None]:
        """The model that a call asks for, and the weights that it starts with. Raises Refusal."""
        lora, source = call.lora, None
        if call.path:
            source = self._weights(account, call.path)
            lora = self.models[source.model].spec
            if call.optimizer and source.kind != "training":
                raise c.Refusal(400, f"{call.path} has no state of the optimizer: it was saved for sampling")
        if lora is None:
            raise c.Refusal(400, "lora_config is missing: this server trains adapters")
        if call.base:
            self._check_base(call.base)
        if not 1 <= lora.rank <= self.terms.rank:
            raise c.Refusal(400, f"lora_config.rank is {lora.rank}; this server takes 1 to {self.terms.rank}")
        try:
            adapter = self.terms.adapter(lora)
        except WindfallError as e:
            raise c.Refusal(400, str(e)) from e
        id, now = model_id(call), time.time()
        model = TrainedModel(
            id=id, account=account, session=session, base=self.terms.base, spec=lora, adapter=adapter, created=now,
            folder=self._folder_of(id), journal=self, metadata=call.metadata, optimizer=call.optimizer, seen=now,
        )  # fmt: skip
        if source is not None:
            model.checkpoint = model.folder / "start"
        return model, source

    def _check_base(self, base: str) -> None:
        if base != self.terms.base:
            raise c.Refusal(400, f"the base model {base!r} is not served here; this server has {self.terms.base!r}")

    async def _unload(self, model: TrainedModel, why: str) -> None:
        """Take it out of its slot. Its named weights stay. `why`: for its calls that were not performed."""
        if model.unloaded:
            return
        model.unloaded = True
        if model.task is not None:
            if not model.busy:
                model.task.cancel()
            await asyncio.wait([model.task])
        self._train.remove(model)
        for entry in model.since:
            entry.call = None
        model.since = []
        waiting = list(model.waiting.values())
        model.waiting.clear()
        await self._fail(waiting, why)
        await self._store.write(self._model_row(model), _forget_bodies(model.id, model.next_seq))
        await self._discard(_contents(model.folder))

    # saved weights

    def weights(self, account: ApiAccount, path: str) -> NamedWeights:
        """Saved weights that the account may read. Raises Refusal."""
        return self._weights(account.name, path)

    def _weights(self, account: str, path: str) -> NamedWeights:
        found = self.checkpoints.get(path)
        if found is None or (found.account != account and not found.public):
            raise c.Refusal(404, f"there are no weights {path!r}")
        return found

    def checkpoints_of(self, account: ApiAccount, model: str = "") -> list[NamedWeights]:
        """Newest first."""
        mine = (p for p in self.checkpoints.values() if p.account == account.name and model in ("", p.model))
        return sorted(mine, key=lambda p: -p.created)

    def _own(self, account: ApiAccount, path: str) -> NamedWeights:
        found = self.weights(account, path)
        if found.account != account.name:
            raise c.Refusal(403, f"{path} belongs to another account")
        return found

    async def delete(self, account: ApiAccount, path: str) -> None:
        await self._remove(self._own(account, path))

    async def change(
        self, account: ApiAccount, path: str, *, expires_s: float | bool | None = False, public: bool | None = None
    ) -> NamedWeights:
        """Change when weights are deleted (`expires_s` from now; None: never), or whether other accounts may read
        them."""
        found = self._own(account, path)
        if not isinstance(expires_s, bool):
            found.expires = None if expires_s is None else time.time() + expires_s
        found.public = found.public if public is None else public
        await self._store.write(found.row())
        return found

    async def copy(self, account: ApiAccount, path: str, *, expires_s: float | None, key: str) -> NamedWeights:
        """A copy of weights for the account, in a model of its own that cannot be trained. The same key is the same
        copy."""
        source, now = self.weights(account, path), time.time()
        of, place = self.models[source.model], path.removeprefix(f"tinker://{source.model}/")
        id = f"{uuid.uuid5(uuid.NAMESPACE_URL, f'{account.name} {key} {path}')}:copy:0"
        if (found := self.checkpoints.get(f"tinker://{id}/{place}")) is not None:
            return found
        folder = self._folder_of(id) / place
        try:
            await asyncio.to_thread(_link_tree, source.folder, folder)
        except WindfallError as e:
            raise c.Refusal(400, str(e)) from e
        model = TrainedModel(
            id=id, account=account.name, session="", base=of.base, spec=of.spec, adapter=of.adapter, created=now,
            folder=self._folder_of(id), journal=self, unloaded=True, seen=now,
        )  # fmt: skip
        copy = replace(
            source, path=f"tinker://{id}/{place}", account=account.name, model=id, created=now, folder=folder,
            expires=None if expires_s is None else now + expires_s, public=False,
        )  # fmt: skip
        self.models[id], self.checkpoints[copy.path] = model, copy
        await self._store.write(self._model_row(model), copy.row())
        return copy

    async def _remove(self, found: NamedWeights) -> None:
        self.checkpoints.pop(found.path, None)
        await self._store.write(("delete from checkpoint where path = ?", (found.path,)))
        await self._discard({found.folder})

    async def _discard(self, folders: Collection[Path]) -> None:
        """Remove those of these folders that nothing uses any more."""
        for folder in self._unused(folders):
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _unused(self, folders: Collection[Path]) -> list[Path]:
        used = {p.folder for p in self.checkpoints.values()} | {s.folder for s in self.samplers.values()}
        used |= {m.checkpoint for m in self.models.values() if not m.unloaded}
        return [folder for folder in folders if folder not in used]

    # model.ModelRecords

    def checkpoint_folder(self, path: str) -> Path:
        found = self.checkpoints.get(path)
        if found is None:
            raise WindfallError("there are no such weights", where=path, fix="They were deleted, or never saved.")
        return found.folder

    async def saved(self, model: TrainedModel) -> None:
        await self._store.write(self._model_row(model), _forget_bodies(model.id, model.saved_seq))

    # samplers

    async def create_sampler(
        self, account: ApiAccount, session_id: str, seq: int, *, path: str = "", base: str = ""
    ) -> Sampler:
        """A sampling session for saved weights or for the base. The same number is the same one."""
        session = self.session(account, session_id)
        id = f"{session.id}:sample:{seq}"
        if (found := self.samplers.get(id)) is not None:
            return found
        sampler = Sampler(id=id, account=account.name, session=session.id, created=time.time(), base=self.terms.base)
        if path:
            sampler.path, sampler.folder = path, self.weights(account, path).folder
            sampler.key = str(sampler.folder)
        else:
            self._check_base(base)
        self.samplers[id] = sampler
        await self._store.write(sampler.row())
        return sampler

    def sampler(self, account: ApiAccount, id: str) -> Sampler:
        """Raises Refusal; 410 if its session has ended."""
        found = self.samplers.get(id)
        if found is None or found.account != account.name:
            self.session(account, id.partition(":")[0])
            kept = f"Weights without a name are kept for the newest {KEPT_UNNAMED} saves of a model, and for an hour"
            raise c.Refusal(404, f"there is no sampling session {id!r}. {kept}; save others with a name.")
        return found

    async def join_sampler(self, account: ApiAccount, id: str) -> int:
        """The number of a new clone of a sampler's client: its calls have numbers of their own."""
        found = self.sampler(account, id)
        found.clones += 1
        clone = found.clones
        await self._store.write(found.row())
        return clone

    # calls

    async def submit(self, account: ApiAccount, call: c.Call) -> Entry:
        """Accept a call, or find the one that was made before with its number. Raises Refusal."""
        match call:
            case c.CreateModel():
                entry = self._new_model(account, call)
            case c.UnloadModel():
                entry = self._new_unload(account, call)
            case c.SampleCall():
                entry = self._new_sample(account, call)
            case _:
                entry = self._new_model_call(account, call)
        if self._calls.get(entry.id) is None:
            self._calls.add(entry)
            self._begin(entry)
        if entry.written is not None:
            await asyncio.shield(entry.written)
        return entry

    def _new_unload(self, account: ApiAccount, call: c.UnloadModel) -> Entry:
        model = self.model(account, call.model)
        entry = Entry(id=f"{model.id}/unload", account=account.name, model=model.id, call=call, created=time.time())
        return self._calls.get(entry.id) or entry

    def _new_sample(self, account: ApiAccount, call: c.SampleCall) -> Entry:
        sampler = self.sampler(account, call.sampler)
        id = request_id(sampler.id, call.seq)
        if (found := self._calls.get(id)) is not None:
            return found
        self.keys.check_calls(account)
        if why := self._sampler.check(call):
            raise c.Refusal(400, why)
        sampler.used = time.time()
        return Entry(id=id, account=account.name, sampler=sampler.id, seq=call.seq, call=call, created=sampler.used)

    def _new_model_call(self, account: ApiAccount, call: c.ModelCall) -> Entry:
        model = self.model(account, call.model)
        id = request_id(model.id, call.seq)
        if (found := self._calls.get(id)) is not None:
            return found
        if model.unloaded:
            raise c.Refusal(410, f"model {model.id} was unloaded. Create a training client from its saved weights.")
        if call.seq < model.next_seq:
            raise c.Refusal(410, f"call {call.seq} of model {model.id} was performed long ago; its result is gone")
        self.keys.check_calls(account)
        if why := self._why_not(account, call):  # it keeps its place: the calls after it are for their turn
            call = c.RefusedCall(model=call.model, seq=call.seq, message=why)
        model.seen = time.time()
        return Entry(id=id, account=account.name, model=model.id, seq=call.seq, call=call, created=model.seen)

    def _why_not(self, account: ApiAccount, call: c.ModelCall) -> str:
        """Why a call of a model will fail; "" if it is not known to."""
        match call:
            case c.LoadWeights():
                try:
                    source = self.weights(account, call.path)
                except c.Refusal as e:
                    return str(e)
                if call.optimizer and source.kind != "training":
                    return f"{call.path} has no state of the optimizer: it was saved for sampling"
            case c.SaveWeights() | c.SaveForSampler() if not _is_name(call.name, call):
                return f"{call.name!r} is no name for weights: use letters, digits, '.', '_' and '-'"
            case c.OptimStepCall(adam=adam):
                settings = (adam.lr, adam.eps, adam.weight_decay, adam.clip_norm)
                if not all(0 <= each <= MAX_SETTING for each in settings):  # a NaN fails every comparison
                    names = "learning_rate, eps, weight_decay and grad_clip_norm"
                    return f"adam_params: {names} are at least 0 and at most {MAX_SETTING:g}"
                if not all(0 <= beta < 1 for beta in adam.betas):
                    return "adam_params: beta1 and beta2 are from 0 to below 1"
            case c.LossCall():
                return next(filter(None, (self._wrong(n, sample) for n, sample in enumerate(call.samples))), "")
        return ""

    def _wrong(self, number: int, sample: Sample) -> str:
        """What no pass over the model can compute; "" if there is nothing."""
        tokens, context, known = len(sample.ids), self.terms.context, self.terms.vocabulary
        if tokens > context:
            return f"data[{number}]: {tokens} tokens are more than the context of {context}"
        for name, values in (("advantages or weights", sample.advantages), ("logprobs", sample.behavior)):
            if values is not None and not (values.dtype == np.float64 and np.isfinite(values).all()):
                return f"data[{number}]: {name} are not all finite numbers"
        if sample.labels is not None and sample.labels.dtype != np.uint32:
            return f"data[{number}]: target_tokens are not token ids"
        largest = max(max(sample.ids), 0 if sample.labels is None else int(sample.labels.max(initial=0)))
        return f"data[{number}]: token {largest} is not one of the model's {known}" if largest >= known else ""

    async def outcome(self, account: ApiAccount, id: str, wait_s: float) -> c.Outcome:
        """What came of a call; waits for it for at most `wait_s`."""
        entry = self._calls.find(account, id)
        return await self._calls.outcome(entry, wait_s) or self._pending(entry)

    def _pending(self, entry: Entry) -> c.Pending:
        model = self.models.get(entry.model)
        if model is not None and entry.seq > model.next_seq and model.next_seq not in model.waiting:
            return c.Pending(why=f"call {model.next_seq} of this model has not arrived yet")
        if not self._trainers.current:
            return c.Pending(why="the trainer is starting", state="paused_capacity")
        return c.Pending(why=entry.why, state="paused_capacity" if entry.why else "active")

    def retrieved(self, account: ApiAccount, ids: Sequence[str]) -> None:
        """The client has these results."""
        self._calls.retrieved(account, ids)

    async def completions(
        self, account: ApiAccount, sampler: str, clone: int, cursor: int, wait_s: float
    ) -> tuple[int, list[Entry]]:
        """Calls of a sampler that have had a result since the cursor, and the next cursor."""
        return await self._calls.completions(self.sampler(account, sampler).id, clone, cursor, wait_s)

    async def cancel(self, account: ApiAccount, id: str) -> None:
        """Stop sampling for a call that nobody waits for. Other calls are performed all the same."""
        entry = self._calls.get(id)
        if entry is not None and entry.account == account.name and entry.sampler:
            await self._fail([entry], "the call was canceled")

    async def _fail(self, entries: Sequence[Entry], why: str) -> None:
        """Calls that are not performed any more."""
        entries = [entry for entry in entries if entry.done is None]
        for entry in entries:
            if entry.task is not None:
                entry.task.cancel()
        await asyncio.gather(*(self._done(entry, c.CallFailed(message=why)) for entry in entries))

    # performing calls

    def _begin(self, entry: Entry) -> None:
        """Have a call performed."""
        match entry.call:
            case c.SampleCall():
                entry.task = self._start(self._run_sample(entry, entry.call))
            case c.UnloadModel():
                entry.task = self._start(self._run_unload(entry))
            case c.CreateModel():
                try:
                    model, source = self._make_model(entry.account, entry.call.session, entry.call)
                except c.Refusal as e:  # the weights were deleted while the server was down
                    self._start(self._fail([entry], str(e)))
                else:
                    self.models[model.id] = model
                    self._start(self._run_create(entry, model, source))
            case _:
                model = self.models.get(entry.model)
                if model is None or model.unloaded:  # the server was killed meanwhile
                    self._start(self._fail([entry], f"model {entry.model} is gone"))
                    return
                model.waiting[entry.seq] = entry
                if model.task is None or model.task.done():
                    model.task = self._start(self._run_model(model))

    async def _run_create(self, entry: Entry, model: TrainedModel, source: NamedWeights | None) -> None:
        try:
            if source is not None and model.checkpoint is not None:
                await asyncio.to_thread(_link_tree, source.folder, model.checkpoint)
        except WindfallError as e:
            self.models.pop(model.id, None)
            model.unloaded = True
            model.ready.set()
            await self._fail(list(model.waiting.values()), f"model {model.id} could not be created")
            await self._done(entry, c.CallFailed(message=str(e)))
            return
        path = source.path if source is not None else ""
        await self._done(entry, c.ModelReady(model=model.id, path=path), self._model_row(model))
        model.ready.set()
        self._log("tinker_model", model=model.id, account=model.account, rank=model.spec.rank, path=path)

    async def _run_unload(self, entry: Entry) -> None:
        if (model := self.models.get(entry.model)) is not None:
            await self._unload(model, "the model was unloaded before the call was performed")
        await self._done(entry, c.ModelReady(model=entry.model))

    async def _run_model(self, model: TrainedModel) -> None:
        """Perform the calls of a model whose turn it is."""
        await model.ready.wait()
        while not model.unloaded and (entry := model.waiting.get(model.next_seq)) is not None:
            attempts = Attempts()
            entry.why = "all slots of the trainer are in use by other models" if self._train.full else ""
            while entry.done is None and not model.unloaded:
                try:
                    await self._trainers.ready()
                    async with self.turns.turn(model.account) as turn, self._train.hold(model) as trainer:
                        entry.why, model.busy = "", True
                        try:
                            await self._perform(model, trainer, turn, entry)
                            await model.settle(trainer, self._save_updates)
                        finally:
                            model.busy = False
                except WindfallError as e:  # the model could not be loaded, or not be saved: its slot is empty now
                    if entry.done is None:
                        await self._finish(model, entry, c.CallFailed(message=str(e), user=False))
                except TrainerLost as e:
                    if entry.done is None and (why := attempts.exhausted(e)):
                        await self._finish(model, entry, c.CallFailed(message=why, user=False))
                    await self._trainers.lost(e)

    async def _perform(self, model: TrainedModel, trainer: RemoteTrainer, turn: TrainerTurn, entry: Entry) -> None:
        """Perform one call, end the turn, and write down the result. Raises TrainerLost."""
        call, trained = entry.call, 0
        statements, replaced = list[Statement](), set[Path]()
        try:
            match call:
                case c.RefusedCall():
                    raise WindfallError(call.message)
                case c.SaveWeights() | c.SaveForSampler():
                    result, statements, replaced = await self._save(model, trainer, call)
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
                self._train.drop(model)  # what it changed is not known, and without memory the slot is empty
            await self._finish(model, entry, c.CallFailed(message=str(e)))
            return
        turn.end()
        self.keys.count(model.account, trained_tokens=trained)
        await self._finish(model, entry, result, *statements)
        await self._discard(replaced)

    async def _finish(
        self, model: TrainedModel, entry: Entry, result: c.Result | c.CallFailed, *statements: Statement
    ) -> None:
        model.next_seq = entry.seq + 1
        model.waiting.pop(entry.seq, None)
        failed = isinstance(result, c.CallFailed)
        repeated = isinstance(entry.call, Changing) and not failed and entry.seq > model.saved_seq
        if repeated:
            model.since.append(entry)
        await self._done(entry, result, self._model_row(model), *statements, repeated=repeated)

    async def _save(
        self, model: TrainedModel, trainer: RemoteTrainer, call: c.SaveWeights | c.SaveForSampler
    ) -> tuple[c.WeightsSaved, list[Statement], set[Path]]:
        """Save weights. Returns the result, what to write down, and folders that were replaced."""
        training = isinstance(call, c.SaveWeights)
        kind = "training" if training else "sampler"
        folder = model.folder / PARTS[kind] / f"{call.name or 'unnamed'}-{call.seq}"
        path = f"tinker://{model.id}/{PARTS[kind]}/{call.name or folder.name}"
        before = self.checkpoints.get(path)
        if isinstance(call, c.SaveWeights) and before is not None and not call.overwrite:
            raise WindfallError(f"there are weights {call.name!r} already", where=path, fix="Choose another name.")
        await model.save(trainer, folder, optimizer=training)
        size, now = await asyncio.to_thread(_size, folder), time.time()
        if call.name:
            found = NamedWeights(
                path=path, account=model.account, model=model.id, kind=kind, created=now, folder=folder, bytes=size,
                expires=None if call.ttl_s is None else now + call.ttl_s, metadata=call.metadata,
            )  # fmt: skip
            self.checkpoints[path] = found
            return c.WeightsSaved(path=path), [found.row()], {before.folder} if before is not None else set()
        assert isinstance(call, c.SaveForSampler)
        seq = call.seq if call.sampler_seq is None else call.sampler_seq
        sampler = Sampler(
            id=f"{model.session}:sample:{seq}", account=model.account, session=model.session, created=now,
            key=f"live/{model.id}" if call.live else str(folder), folder=folder, base=self.terms.base,
        )  # fmt: skip
        samplers, replaced = [sampler], set[Path]()
        if call.live:
            samplers += [each for each in self.samplers.values() if each.key == sampler.key and each.id != sampler.id]
            await self._sample.changed(sampler.key, folder)
            if (live := self._live.get(model.id)) is not None:
                replaced.add(live)
            self._live[model.id] = folder
        for each in samplers:
            each.folder = folder
        self.samplers[sampler.id] = sampler
        return c.WeightsSaved(path=path, sampler=sampler.id), [each.row() for each in samplers], replaced

    async def _run_sample(self, entry: Entry, call: c.SampleCall) -> None:
        attempts = Attempts()
        while entry.done is None:
            try:
                sampler = self.samplers.get(entry.sampler)
                if sampler is None:
                    raise WindfallError(f"the sampling session {entry.sampler} has ended")
                await self._trainers.ready()
                result = await self._sampled(sampler, entry, call)
            except WindfallError as e:
                await self._done(entry, c.CallFailed(message=str(e)))
            except TrainerLost as e:
                if why := attempts.exhausted(e):
                    await self._done(entry, c.CallFailed(message=why, user=False))
                await self._trainers.lost(e)
            else:
                tokens = sum(len(sequence.tokens) for sequence in result.sequences)
                self.keys.count(entry.account, sampled_tokens=tokens, prompt_tokens=len(call.prompt))
                await self._done(entry, result)

    async def _sampled(self, sampler: Sampler, entry: Entry, call: c.SampleCall) -> c.Sampled:
        id, sequences = entry.id, ()
        async with contextlib.AsyncExitStack() as stack:
            policy = self._base_policy
            if sampler.folder is not None:
                policy = await stack.enter_async_context(self._sample.hold(sampler.key, sampler.newest))
            if call.max_tokens != 0:
                sequences = await self._sampler.sample(policy, id, entry.account, call)
            if not call.prompt_logprobs and not call.prompt_top_k:
                return c.Sampled(sequences=sequences)
            trainer = self._trainers.trainers[policy]
            try:
                async with self.turns.turn(entry.account):
                    (found,) = await trainer.score([call.prompt], call.prompt_top_k, id=f"{id}/score")
            except WindfallError:
                self._sample.drop(sampler.key)  # without memory for a pass, the trainer empties the slot
                raise
        logprobs = np.concatenate([[np.nan], found.logprobs])
        top_ids, top = [(), *map(tuple, found.top_ids.tolist())], [(), *map(tuple, found.top_logprobs.tolist())]
        if call.prompt_last:
            left_out = len(call.prompt) - call.prompt_last
            logprobs[:left_out] = np.nan
            top_ids[:left_out] = top[:left_out] = [()] * left_out
        return c.Sampled(
            sequences=sequences,
            prompt_logprobs=logprobs if call.prompt_logprobs else None,
            prompt_top_ids=tuple(top_ids) if call.prompt_top_k else (),
            prompt_top_logprobs=tuple(top) if call.prompt_top_k else (),
        )

    async def _done(
        self, entry: Entry, result: c.Result | c.CallFailed, *statements: Statement, repeated: bool = False
    ) -> None:
        self.keys.count(entry.account, calls=1)
        usage = json.dumps(self.keys.usage(entry.account))
        account = self._store.put("account", name=entry.account, usage=usage)
        await self._calls.done(entry, result, *statements, account, repeated=repeated)

    # what is over

    async def _tidy(self) -> None:
        pause_s, before = min(TIDY_S, self.terms.session_timeout_s / 2), time.time()
        while True:
            await asyncio.sleep(pause_s)
            now = time.time()
            if not 0 <= now - before < 3 * pause_s:  # the clock was set, or this process stood still
                for session in self.sessions.values():
                    session.seen = now
            before = now
            silent = [s for s in self.sessions.values() if now - s.seen > self.terms.session_timeout_s]
            await asyncio.gather(*map(self.end_session, silent))
            await self._drop_samplers(self._outdated(now), "its weights, which have no name, are older than an hour")
            for found in list(self.checkpoints.values()):
                if found.expires is not None and found.expires < now:
                    await self._remove(found)
            await self._calls.forget(self._is_gone)
            self._progress(int(self.keys.total("calls")))

    def _is_gone(self, entry: Entry) -> bool:
        """Whether the model or sampler of a call is gone."""
        if entry.sampler:
            return entry.sampler not in self.samplers
        model = self.models.get(entry.model)
        return model is None or model.unloaded

    def _model_row(self, m: TrainedModel) -> Statement:
        lora = {name: getattr(m.spec, name) for name in m.spec.__struct_fields__}
        spec = {"lora": lora, "base": m.base, "metadata": m.metadata, "optimizer": m.optimizer}
        return self._store.put(
            "model", id=m.id, account=m.account, session=m.session, created=m.created, spec=json.dumps(spec),
            saved_seq=m.saved_seq, folder=str(m.checkpoint or ""), next_seq=m.next_seq, unloaded=int(m.unloaded),
        )  # fmt: skip

    def _folder_of(self, model: str) -> Path:
        return self.folder / "models" / model.replace(":", "_")


@dataclass(slots=True)
class Attempts:
    """How often a trainer was lost while it performed a call."""

    failed: int = 0
    lost: int = 0

    def exhausted(self, error: TrainerLost) -> str:
        """Count this loss. Returns why the call is given up; "" if it is tried again."""
        if isinstance(error, TrainerFailed):
            self.failed += 1
            return f"the trainer failed with it {self.failed} times: {error}" if self.failed >= FAILURES else ""
        self.lost += 1
        return f"the trainer was lost {self.lost} times meanwhile: {error}" if self.lost >= LOSSES else ""


def model_id(call: c.CreateModel) -> str:
    return f"{call.session}:train:{call.seq}"


def request_id(owner: str, seq: int) -> str:
    """The id of a call of a model or a sampler.

    >>> request_id("s:train:0", 3)
    's:train:0/3'
    """
    return f"{owner}/{seq}"


def _forget_bodies(model: str, seq: int) -> Statement:
    """Calls up to this one are in a checkpoint: nothing repeats them."""
    return ("update call set body = null where model = ? and seq <= ? and done is not null", (model, seq))


def _is_name(name: str, call: c.Call) -> bool:
    if not name:
        return isinstance(call, c.SaveForSampler)
    return len(name) <= 128 and name[0] != "." and all(ch.isalnum() or ch in "._-" for ch in name) and name.isascii()


def _link_tree(source: Path, target: Path) -> None:
    """A copy that shares the bytes, where the file system can."""
    shutil.rmtree(target, ignore_errors=True)
    try:
        shutil.copytree(source, target, copy_function=_link)
    except (OSError, shutil.Error) as e:
        raise WindfallError(f"cannot be copied: {e}", where=str(source), fix="Save the weights again.") from e


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _contents(model: Path) -> list[Path]:
    """Everything in the folder of a model: weights that were saved, and states."""
    if not model.is_dir():
        return []
    parts = [model / part for part in PARTS.values()]
    return [
        *(path for part in parts if part.is_dir() for path in part.iterdir()),
        *(path for path in model.iterdir() if path not in parts),
    ]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in _files(folder))


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
