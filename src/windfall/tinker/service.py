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
  removed. Named weights stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from windfall.errors import WindfallError
from windfall.tinker import calls as c
from windfall.tinker.keys import Account, Keys
from windfall.tinker.model import Changing, Model
from windfall.tinker.room import SampleSlots, Trainers, TrainSlots
from windfall.tinker.sampler import FleetSampler
from windfall.tinker.store import Statement, Store
from windfall.training import AdapterSpec, TrainerLost

KEPT_S = 600.0
"""Seconds for which a result is kept after it was retrieved: its answer may have been lost."""
TIDY_S = 5.0
CLONE = 1_000_000_000
"""Numbers of the calls of a sampler's clone begin with a multiple of this."""
FAILURES = 3
"""A call that fails so often with an unexpected error is given up."""


@dataclass(kw_only=True, eq=False)
class Session:
    id: str
    account: str
    created: float
    seen: float
    info: dict[str, Any]
    """Tags, metadata, the client's version, and a name that it gave."""
    ended: float | None = None


@dataclass(kw_only=True, eq=False)
class Checkpoint:
    """Weights that a client has saved."""

    path: str
    account: str
    model: str
    kind: str
    """training or sampler"""
    created: float
    folder: Path
    bytes: int = 0
    expires: float | None = None
    public: bool = False
    metadata: c.Metadata = field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class Sampler:
    """What responses are sampled from: the base, saved weights, or the newest of a model's live weights."""

    id: str
    account: str
    session: str
    created: float
    key: str
    """Of its slot: equal for samplers of the same weights. "" for the base."""
    folder: Path | None = None
    path: str = ""
    """The saved weights; "" if they have no name, or for the base."""
    base: str = ""
    clones: int = 0


@dataclass(kw_only=True, eq=False)
class Entry:
    """A call and its outcome."""

    id: str
    account: str
    model: str = ""
    sampler: str = ""
    seq: int = 0
    call: c.Call | None = None
    """None once it was performed and nothing will repeat it."""
    created: float
    done: float | None = None
    failed: bool = False
    result: bytes = b""
    retrieved: float | None = None
    why: str = ""
    """What it waits for."""
    event: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


@dataclass(kw_only=True, frozen=True, slots=True)
class Terms:
    """What the server offers."""

    base: str
    """Name under which it serves the base model."""
    tokenizer: str
    """Hub id, or folder on the server's machine, of the tokenizer of the base."""
    context: int
    rank: int
    """Largest rank of an adapter."""
    adapter: Callable[[c.LoraSpec], AdapterSpec]
    """The adapter that a client's spec means for this base. Raises WindfallError."""
    session_timeout_s: float


class TinkerService:
    """Implements model.Journal."""

    def __init__(
        self, folder: Path, store: Store, keys: Keys, terms: Terms, trainers: Trainers, train: TrainSlots,
        sample: SampleSlots, sampler: FleetSampler, *, base_policy: str, save_updates: int, log: Callable[..., None],
    ) -> None:  # fmt: skip
        """`folder`: of saved weights. `base_policy`: the policy without an adapter. `save_updates`: updates of a model
        after which it is saved. `log`: logs an event."""
        self.folder, self.keys, self.terms = folder, keys, terms
        self._store, self._trainers, self._train, self._sample = store, trainers, train, sample
        self._sampler, self._base_policy, self._log, self._save_updates = sampler, base_policy, log, save_updates
        keys.open_calls = self._open_calls
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.checkpoints: dict[str, Checkpoint] = {}
        self.samplers: dict[str, Sampler] = {}
        self._live: dict[str, Path] = {}
        """By model: its newest live weights."""
        self._calls: dict[str, Entry] = {}
        self._completed: dict[tuple[str, int], list[Entry]] = defaultdict(list)
        """By sampler and clone: calls that are done, in that order."""
        self._news: dict[tuple[str, int], asyncio.Event] = defaultdict(asyncio.Event)
        self._last_done = 0.0
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[Any]] = set()

    # start and end

    def restore(self) -> None:
        """Continue from the store."""
        now, rows = time.time(), self._store.rows
        self.keys.restore({row["name"]: json.loads(row["usage"]) for row in rows("select * from account")})
        for row in rows("select * from session where ended is null"):
            info = json.loads(row.pop("info"))
            self.sessions[row["id"]] = Session(**{**row, "seen": now}, info=info)
        for row in rows("select * from checkpoint"):
            found = json.loads(row.pop("info"))
            row |= {"folder": Path(row["folder"]), "public": bool(row["public"])}
            self.checkpoints[row["path"]] = Checkpoint(**row, metadata=found)
        for row in rows("select * from model"):
            self._restore_model(row)
        for row in rows("select * from sampler"):
            weights = json.loads(row.pop("weights"))
            folder = Path(weights.pop("folder")) if weights.get("folder") else None
            weights.pop("folder", None)
            self.samplers[row["id"]] = found = Sampler(**row, **weights, folder=folder)
            if found.key.startswith("live/") and folder is not None:
                self._live[found.key.removeprefix("live/")] = folder
        for row in rows("select * from call order by created, seq"):
            self._restore_call(row)
        for model in self.models.values():
            self._go_on(model)

    def _restore_model(self, row: Mapping[str, Any]) -> None:
        spec = json.loads(row["spec"])
        lora = c.LoraSpec(**spec["lora"])
        self.models[row["id"]] = Model(
            id=row["id"], account=row["account"], session=row["session"], base=spec["base"], spec=lora,
            adapter=self.terms.adapter(lora), created=row["created"], folder=self._folder_of(row["id"]),
            journal=self, saved_seq=row["saved_seq"], checkpoint=Path(row["folder"]) if row["folder"] else None,
            optimizer=spec["optimizer"], next_seq=row["next_seq"], metadata=spec["metadata"],
            unloaded=bool(row["unloaded"]), seen=row["created"],
        )  # fmt: skip

    def _restore_call(self, row: Mapping[str, Any]) -> None:
        call = c.decode_call(row["body"]) if row["body"] else None
        entry = Entry(
            id=row["id"], account=row["account"], model=row["model"], sampler=row["sampler"], seq=row["seq"],
            call=call, created=row["created"], done=row["done"], failed=bool(row["failed"]),
            result=row["result"] or b"",
        )  # fmt: skip
        self._calls[entry.id] = entry
        if entry.done is not None:
            entry.event.set()
            self._last_done = max(self._last_done, entry.done)
            if entry.sampler:
                self._completed[entry.sampler, entry.seq // CLONE].append(entry)
        elif isinstance(call, c.SampleCall):
            entry.task = self._start(self._run_sample(entry, call))
        elif isinstance(call, c.UnloadModel):
            entry.task = self._start(self._run_unload(entry, call))
        elif entry.model in self.models and call is not None:
            self.models[entry.model].waiting[entry.seq] = entry.id

    async def run(self) -> None:
        """Runs forever. Raises what a task of the service has failed with."""
        watching, tidying = self._start(self._trainers.watch()), self._start(self._tidy())
        try:
            await self._failed
        finally:
            for task in (watching, tidying):
                task.cancel()

    async def stop(self) -> None:
        """Perform no more calls, and save all models. Calls without a result are performed after the next start."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(TrainerLost):  # then the next trainer repeats the calls since their last checkpoints
            await self._train.save()

    def _start(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)  # pyright: ignore[reportArgumentType]
        task.add_done_callback(self._ended)  # pyright: ignore[reportArgumentType]
        return task  # pyright: ignore[reportReturnType]

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not self._failed.done():
            self._failed.set_exception(task.exception() or AssertionError())

    # accounts and sessions

    def account(self, key: str) -> Account:
        """Who has this key. Raises Refusal."""
        return self.keys.account(key)

    async def create_session(
        self,
        account: Account,
        *,
        tags: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        sdk: str = "",
        name: str = "",
    ) -> Session:
        now = time.time()
        info = {"tags": list(tags), "metadata": dict(metadata or {}), "sdk": sdk, "name": name}
        session = Session(id=str(uuid.uuid4()), account=account.name, created=now, seen=now, info=info)
        self.sessions[session.id] = session
        await self._store.write(self._session_row(session))
        self._log("tinker_session", session=session.id, account=account.name, sdk=sdk)
        return session

    def session(self, account: Account, id: str) -> Session:
        """A session of the account. Raises Refusal; 410 if it has ended."""
        session = self.sessions.get(id)
        if session is None or session.account != account.name:
            for row in self._store.rows("select * from session where id = ? and account = ?", id, account.name):
                if row["ended"] is not None:
                    raise c.Refusal(410, f"session {id} has ended. Create a new client.")
            raise c.Refusal(404, f"there is no session {id!r}. Create a new client.")
        return session

    def sessions_of(self, account: Account) -> list[Session]:
        """Those that have not ended, newest first."""
        return sorted((s for s in self.sessions.values() if s.account == account.name), key=lambda s: -s.created)

    def heartbeat(self, account: Account, id: str) -> None:
        self.session(account, id).seen = time.time()

    async def end_session(self, session: Session) -> None:
        """Free what the session holds. Its named weights stay."""
        if self.sessions.pop(session.id, None) is None:
            return
        session.ended = time.time()
        await self._store.write(self._session_row(session))
        self._log("tinker_session_ended", session=session.id, account=session.account)
        for entry in list(self._calls.values()):
            sampler, model = self.samplers.get(entry.sampler), self.models.get(entry.model)
            owner = sampler.session if sampler else model.session if model else ""
            if owner == session.id and entry.done is None:
                await self._fail(entry, f"session {session.id} has ended", user=True)
        for model in [model for model in self.models.values() if model.session == session.id]:
            await self._unload(model)
        for sampler in [sampler for sampler in self.samplers.values() if sampler.session == session.id]:
            await self._drop_sampler(sampler)

    # models

    def model(self, account: Account, id: str) -> Model:
        model = self.models.get(id)
        if model is None or model.account != account.name:
            raise c.Refusal(404, f"there is no model {id!r}")
        return model

    def models_of(self, account: Account) -> list[Model]:
        """Newest first."""
        return sorted((m for m in self.models.values() if m.account == account.name), key=lambda m: -m.created)

    async def _create_model(self, account: Account, call: c.CreateModel) -> Entry:
        session = self.session(account, call.session)
        id = f"{session.id}:train:{call.seq}"
        if (entry := self._calls.get(request_id(id, 0))) is not None:
            return entry
        if id in self.models:
            return self._finished(request_id(id, 0), account, c.ModelReady(model=id, path=call.path))
        self.keys.check_models(account, sum(1 for m in self.models_of(account) if not m.unloaded))
        lora, source = call.lora, None
        if call.path:
            source = self.weights(account, call.path)
            lora = self.models[source.model].spec
            if call.optimizer and source.kind != "training":
                raise c.Refusal(400, f"{call.path} has no state of the optimizer: it was saved for sampling")
        if lora is None:
            raise c.Refusal(400, "lora_config is missing: this server trains adapters")
        if call.base and call.base != self.terms.base:
            raise c.Refusal(
                400, f"the base model {call.base!r} is not served here; this server has {self.terms.base!r}"
            )
        model = Model(
            id=id, account=account.name, session=session.id, base=self.terms.base, spec=lora,
            adapter=self._adapter(lora), created=time.time(), folder=self._folder_of(id), journal=self,
            metadata=call.metadata, optimizer=call.optimizer, seen=time.time(),
        )  # fmt: skip
        self.models[id] = model  # from now on, a call that is made again finds it
        if source is not None:
            model.checkpoint = model.folder / "start"
            try:
                await asyncio.to_thread(_link_tree, source.folder, model.checkpoint)
            except WindfallError as e:
                del self.models[id]
                raise c.Refusal(400, str(e)) from e
        entry = self._finished(request_id(id, 0), account, c.ModelReady(model=id, path=call.path))
        await self._store.write(self._model_row(model), self._call_row(entry, None))
        self._log("tinker_model", model=id, account=account.name, rank=lora.rank, path=call.path)
        return entry

    def _adapter(self, lora: c.LoraSpec) -> AdapterSpec:
        if not 1 <= lora.rank <= self.terms.rank:
            raise c.Refusal(400, f"lora_config.rank is {lora.rank}; this server takes 1 to {self.terms.rank}")
        try:
            return self.terms.adapter(lora)
        except WindfallError as e:
            raise c.Refusal(400, str(e)) from e

    async def _unload(self, model: Model) -> None:
        """Take it out of its slot. Its named weights stay."""
        if model.unloaded:
            return
        model.unloaded = True
        if model.task is not None:
            model.task.cancel()
        await self._patiently(lambda: self._train.remove(model))
        statements = [self._model_row(model), _forget_bodies(model.id, model.next_seq)]
        await self._store.write(*statements)
        for state in [*model.folder.glob("state-*"), model.folder / "start"]:
            await asyncio.to_thread(shutil.rmtree, state, ignore_errors=True)

    # saved weights

    def weights(self, account: Account, path: str) -> Checkpoint:
        """Saved weights that the account may read. Raises Refusal."""
        found = self.checkpoints.get(path)
        if found is None or (found.account != account.name and not found.public):
            raise c.Refusal(404, f"there are no weights {path!r}")
        return found

    def checkpoints_of(self, account: Account, model: str = "") -> list[Checkpoint]:
        """Newest first."""
        mine = (p for p in self.checkpoints.values() if p.account == account.name and model in ("", p.model))
        return sorted(mine, key=lambda p: -p.created)

    async def delete(self, account: Account, path: str) -> None:
        found = self.weights(account, path)
        if found.account != account.name:
            raise c.Refusal(403, f"{path} belongs to another account")
        await self._remove(found)

    async def change(
        self, account: Account, path: str, *, expires_s: float | bool | None = False, public: bool | None = None
    ) -> Checkpoint:
        """Change when weights are deleted (`expires_s` from now; None: never), or whether other accounts may read
        them."""
        found = self.weights(account, path)
        if found.account != account.name:
            raise c.Refusal(403, f"{path} belongs to another account")
        if not isinstance(expires_s, bool):
            found.expires = None if expires_s is None else time.time() + expires_s
        found.public = found.public if public is None else public
        await self._store.write(self._checkpoint_row(found))
        return found

    async def copy(self, account: Account, path: str, *, expires_s: float | None, key: str) -> Checkpoint:
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
        model = Model(
            id=id, account=account.name, session="", base=of.base, spec=of.spec, adapter=of.adapter, created=now,
            folder=self._folder_of(id), journal=self, unloaded=True, seen=now,
        )  # fmt: skip
        copy = replace(
            source, path=f"tinker://{id}/{place}", account=account.name, model=id, created=now, folder=folder,
            expires=None if expires_s is None else now + expires_s, public=False,
        )  # fmt: skip
        self.models[id], self.checkpoints[copy.path] = model, copy
        await self._store.write(self._model_row(model), self._checkpoint_row(copy))
        return copy

    async def _remove(self, found: Checkpoint) -> None:
        self.checkpoints.pop(found.path, None)
        await self._store.write(("delete from checkpoint where path = ?", (found.path,)))
        if not any(sampler.folder == found.folder for sampler in self.samplers.values()):
            await asyncio.to_thread(shutil.rmtree, found.folder, ignore_errors=True)

    # model.Journal

    def checkpoint_folder(self, path: str) -> Path:
        found = self.checkpoints.get(path)
        if found is None:
            raise WindfallError("there are no such weights", where=path, fix="They were deleted, or never saved.")
        return found.folder

    def since(self, model: Model) -> list[Changing]:
        ids = (request_id(model.id, seq) for seq in range(model.saved_seq + 1, model.next_seq))
        entries = [entry for id in ids if (entry := self._calls.get(id)) is not None and not entry.failed]
        return [entry.call for entry in entries if isinstance(entry.call, Changing)]

    async def saved(self, model: Model) -> None:
        await self._store.write(self._model_row(model), _forget_bodies(model.id, model.saved_seq))
        for entry in self._calls.values():
            if entry.model == model.id and entry.seq <= model.saved_seq and entry.done is not None:
                entry.call = None

    # samplers

    async def create_sampler(
        self, account: Account, session_id: str, seq: int, *, path: str = "", base: str = ""
    ) -> Sampler:
        """A sampling session for saved weights or for the base. The same number is the same one."""
        session = self.session(account, session_id)
        id = f"{session.id}:sample:{seq}"
        if (found := self.samplers.get(id)) is not None:
            return found
        if path:
            weights = self.weights(account, path)
            sampler = Sampler(
                id=id, account=account.name, session=session.id, created=time.time(), key=str(weights.folder),
                folder=weights.folder, path=path, base=self.terms.base,
            )  # fmt: skip
        elif base == self.terms.base:
            sampler = Sampler(id=id, account=account.name, session=session.id, created=time.time(), key="", base=base)
        else:
            raise c.Refusal(400, f"the base model {base!r} is not served here; this server has {self.terms.base!r}")
        self.samplers[id] = sampler
        await self._store.write(self._sampler_row(sampler))
        return sampler

    async def sampler_for(self, account: Account, *, path: str = "", base: str = "") -> Sampler:
        """A sampler for a call that names weights instead of a sampling session."""
        wanted = (s for s in self.samplers.values() if s.account == account.name and s.session == "")
        found = next((s for s in wanted if s.path == path and (path or s.base == base)), None)
        if found is not None:
            return found
        key = "" if not path else str(self.weights(account, path).folder)
        if not path and base != self.terms.base:
            raise c.Refusal(400, f"the base model {base!r} is not served here; this server has {self.terms.base!r}")
        found = Sampler(
            id=f"{uuid.uuid4()}:sample:0", account=account.name, session="", created=time.time(), key=key,
            folder=Path(key) if key else None, path=path, base=self.terms.base,
        )  # fmt: skip
        self.samplers[found.id] = found
        await self._store.write(self._sampler_row(found))
        return found

    def sampler(self, account: Account, id: str) -> Sampler:
        found = self.samplers.get(id)
        if found is None or found.account != account.name:
            raise c.Refusal(404, f"there is no sampling session {id!r}")
        return found

    async def join_sampler(self, account: Account, id: str) -> int:
        """The number of a new clone of a sampler's client: its calls have numbers of their own."""
        found = self.sampler(account, id)
        found.clones += 1
        await self._store.write(self._sampler_row(found))
        return found.clones

    async def _drop_sampler(self, sampler: Sampler) -> None:
        self.samplers.pop(sampler.id, None)
        await self._store.write(("delete from sampler where id = ?", (sampler.id,)))
        folder = sampler.folder
        others = [s.folder for s in self.samplers.values()] + [p.folder for p in self.checkpoints.values()]
        if folder is not None and folder not in others:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    # calls

    async def submit(self, account: Account, call: c.Call) -> Entry:
        """Accept a call, or find the one that was made before with its number. Raises Refusal."""
        if isinstance(call, c.CreateModel):
            return await self._create_model(account, call)
        if isinstance(call, c.UnloadModel):
            model = self.model(account, call.model)
            entry = Entry(id=f"{model.id}/unload", account=account.name, model=model.id, call=call, created=time.time())
            if (found := self._calls.get(entry.id)) is not None:
                return found
            await self._accept(entry)
            entry.task = self._start(self._run_unload(entry, call))
            return entry
        if isinstance(call, c.SampleCall):
            return await self._submit_sample(account, call)
        return await self._submit_model_call(account, call)

    async def _submit_sample(self, account: Account, call: c.SampleCall) -> Entry:
        sampler = self.sampler(account, call.sampler)
        id = request_id(sampler.id, call.seq)
        if (found := self._calls.get(id)) is not None:
            return found
        self.keys.check_calls(account)
        if why := self._sampler.check(call):
            raise c.Refusal(400, why)
        entry = Entry(
            id=id, account=account.name, sampler=sampler.id, seq=call.seq, call=call, created=time.time()
        )  # fmt: skip
        await self._accept(entry)
        entry.task = self._start(self._run_sample(entry, call))
        return entry

    async def _submit_model_call(self, account: Account, call: c.ModelCall) -> Entry:
        model = self.model(account, call.model)
        id = request_id(model.id, call.seq)
        if (found := self._calls.get(id)) is not None:
            return found
        if model.unloaded:
            raise c.Refusal(410, f"model {model.id} was unloaded. Create a training client from its saved weights.")
        if call.seq < model.next_seq:
            raise c.Refusal(410, f"call {call.seq} of model {model.id} was performed long ago; its result is gone")
        self.keys.check_calls(account)
        if why := self._why_not(account, model, call):  # it keeps its place: the calls after it are for their turn
            call = c.Refused(model=call.model, seq=call.seq, message=why)
        model.seen = time.time()
        entry = Entry(id=id, account=account.name, model=model.id, seq=call.seq, call=call, created=time.time())
        await self._accept(entry)
        model.waiting[call.seq] = id
        self._go_on(model)
        return entry

    def _why_not(self, account: Account, model: Model, call: c.ModelCall) -> str:
        """Why a call of a model will fail; "" if it is not known to."""
        if isinstance(call, c.LoadWeights):
            try:
                source = self.weights(account, call.path)
            except c.Refusal as e:
                return str(e)
            if call.optimizer and source.kind != "training":
                return f"{call.path} has no state of the optimizer: it was saved for sampling"
        if isinstance(call, c.SaveWeights | c.SaveForSampler) and not _is_name(call.name, call):
            return f"{call.name!r} is no name for weights: use letters, digits, '.', '_' and '-'"
        return ""

    async def _accept(self, entry: Entry) -> None:
        self._calls[entry.id] = entry
        assert entry.call is not None
        try:
            await self._store.write(self._call_row(entry, c.encode(entry.call)))
        except BaseException:  # raised again: it was not accepted
            self._calls.pop(entry.id, None)
            raise

    def call(self, account: Account, id: str) -> Entry:
        entry = self._calls.get(id)
        if entry is None or entry.account != account.name:
            raise c.Refusal(410, f"there is no call {id!r}, or its result was retrieved long ago")
        return entry

    async def outcome(self, account: Account, id: str, wait_s: float) -> c.Outcome:
        """What came of a call; waits for it for at most `wait_s`."""
        entry = self.call(account, id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await entry.event.wait()
        if entry.done is None:
            return self._pending(entry)
        if entry.failed:
            return c.decode_failed(entry.result)
        return c.Done(result=c.decode_result(entry.result), size=len(entry.result))

    def retrieved(self, account: Account, ids: Sequence[str]) -> None:
        """The client has these results."""
        for id in ids:
            entry = self._calls.get(id)
            if entry is not None and entry.account == account.name and entry.done is not None:
                entry.retrieved = entry.retrieved or time.time()

    def _pending(self, entry: Entry) -> c.Pending:
        model = self.models.get(entry.model)
        if model is not None and entry.seq > model.next_seq and model.next_seq not in model.waiting:
            return c.Pending(why=f"call {model.next_seq} of this model has not arrived yet")
        if not self._trainers.current:
            return c.Pending(why="the trainer is starting", state="paused_capacity")
        return c.Pending(why=entry.why, state="paused_capacity" if entry.why else "active")

    async def completions(
        self, account: Account, sampler: str, clone: int, cursor: int, wait_s: float
    ) -> tuple[int, list[Entry]]:
        """Calls of a sampler that were done after those that the cursor covers, and the next cursor."""
        self.sampler(account, sampler)
        key = (sampler, clone)
        deadline = time.monotonic() + wait_s
        while True:
            news = self._news[key]
            news.clear()
            found = [entry for entry in self._completed[key] if _cursor(entry) > cursor]
            left = deadline - time.monotonic()
            if found or left <= 0:
                return max(map(_cursor, found), default=cursor), found
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await news.wait()

    async def cancel(self, account: Account, id: str) -> None:
        """Stop sampling for a call that nobody waits for. Other calls are performed all the same."""
        entry = self._calls.get(id)
        if entry is None or entry.account != account.name or not entry.sampler or entry.done is not None:
            return
        await self._fail(entry, "the call was canceled", user=True)

    # performing calls

    def _go_on(self, model: Model) -> None:
        """Perform the calls of a model whose turn it is."""
        if (model.task is None or model.task.done()) and model.next_seq in model.waiting and not model.unloaded:
            model.task = self._start(self._run_model(model))

    async def _run_model(self, model: Model) -> None:
        while (id := model.waiting.get(model.next_seq)) is not None:
            entry, failures = self._calls[id], 0
            assert entry.call is not None
            entry.why = "all slots of the trainer are in use by other models" if self._train.full else ""
            while entry.done is None:
                try:
                    await self._trainers.ready()
                    async with self._train.hold(model) as trainer:
                        entry.why = ""
                        failures = await self._perform(model, trainer, entry, failures)
                        await model.settle(trainer, self._save_updates)
                except TrainerLost as e:
                    failures += 1
                    if failures >= FAILURES * 10:
                        await self._finish_model_call(
                            model, entry, c.Failed(message=f"the trainer is lost: {e}", user=False)
                        )
                    await self._trainers.lost(e)
            model.waiting.pop(entry.seq, None)

    async def _perform(self, model: Model, trainer: Any, entry: Entry, failures: int) -> int:
        """Perform one call and write down its result. Raises TrainerLost."""
        call, began = entry.call, time.monotonic()
        assert call is not None
        try:
            if isinstance(call, c.Refused):
                raise WindfallError(call.message)
            if isinstance(call, c.SaveWeights | c.SaveForSampler):
                result: c.Result = await self._save(model, trainer, call, entry.id)
            else:
                result = await model.perform(trainer, call)  # pyright: ignore[reportArgumentType]
        except WindfallError as e:
            if isinstance(call, Changing):
                self._train.drop(model)  # what it changed before it failed is not known
            await self._finish_model_call(model, entry, c.Failed(message=str(e)))
            return failures
        if isinstance(call, c.Forward | c.ForwardBackward):
            tokens = sum(len(sample.ids) for sample in call.samples)
            self.keys.count(model.account, trained_tokens=tokens, trainer_s=time.monotonic() - began)
        else:
            self.keys.count(model.account, trainer_s=time.monotonic() - began)
        await self._finish_model_call(model, entry, result)
        return failures

    async def _finish_model_call(self, model: Model, entry: Entry, result: c.Result | c.Failed) -> None:
        model.next_seq = entry.seq + 1
        if not isinstance(entry.call, Changing):
            entry.call = None
        await self._done(entry, result, self._model_row(model))

    async def _save(
        self, model: Model, trainer: Any, call: c.SaveWeights | c.SaveForSampler, id: str
    ) -> c.WeightsSaved:
        training = isinstance(call, c.SaveWeights)
        kind, part = ("training", "weights") if training else ("sampler", "sampler_weights")
        folder = model.folder / part / f"{call.name or 'unnamed'}-{call.seq}"
        path = f"tinker://{model.id}/{part}/{call.name or folder.name}"
        before = self.checkpoints.get(path)
        if isinstance(call, c.SaveWeights) and before is not None and not call.overwrite:
            raise WindfallError(f"there are weights {call.name!r} already", where=path, fix="Choose another name.")
        await model.save(trainer, folder, optimizer=training, id=id)
        size, now = await asyncio.to_thread(_size, folder), time.time()
        if call.name:
            found = Checkpoint(
                path=path, account=model.account, model=model.id, kind=kind, created=now, folder=folder, bytes=size,
                expires=None if call.ttl_s is None else now + call.ttl_s, metadata=call.metadata,
            )  # fmt: skip
            if before is not None and before.folder != folder:
                await self._remove(before)
            self.checkpoints[path] = found
            await self._store.write(self._checkpoint_row(found))
            return c.WeightsSaved(path=path)
        assert isinstance(call, c.SaveForSampler)
        key = f"live/{model.id}" if call.live else str(folder)
        seq = call.seq if call.sampler_seq is None else call.sampler_seq
        sampler = Sampler(
            id=f"{model.session}:sample:{seq}", account=model.account, session=model.session, created=now, key=key,
            folder=folder, base=self.terms.base,
        )  # fmt: skip
        if call.live:
            await self._renew_live(model, folder)
        self.samplers[sampler.id] = sampler
        await self._store.write(self._sampler_row(sampler))
        return c.WeightsSaved(path=path, sampler=sampler.id)

    async def _renew_live(self, model: Model, folder: Path) -> None:
        """All live samplers of the model follow these weights from now on."""
        key, before = f"live/{model.id}", self._live.get(model.id)
        self._live[model.id] = folder
        followers = [sampler for sampler in self.samplers.values() if sampler.key == key]
        for sampler in followers:
            sampler.folder = folder
        await self._store.write(*map(self._sampler_row, followers))
        await self._sample.changed(key, folder)
        if before is not None and before != folder:
            await asyncio.to_thread(shutil.rmtree, before, ignore_errors=True)

    async def _run_sample(self, entry: Entry, call: c.SampleCall) -> None:
        sampler = self.samplers.get(entry.sampler)
        if sampler is None:
            await self._done(entry, c.Failed(message=f"the sampling session {entry.sampler} has ended"))
            return
        while entry.done is None:
            try:
                await self._trainers.ready()
                async with contextlib.AsyncExitStack() as stack:
                    policy = self._base_policy
                    if sampler.folder is not None:
                        policy = await stack.enter_async_context(self._sample.hold(sampler.key, sampler.folder))
                    result = await self._sampled(policy, entry.id, call)
            except WindfallError as e:
                await self._done(entry, c.Failed(message=str(e)))
                return
            except TrainerLost as e:
                await self._trainers.lost(e)
            else:
                tokens = sum(len(sequence.tokens) for sequence in result.sequences)
                self.keys.count(entry.account, sampled_tokens=tokens, prompt_tokens=len(call.prompt) * call.n)
                await self._done(entry, result)

    async def _sampled(self, policy: str, id: str, call: c.SampleCall) -> c.Sampled:
        sequences = await self._sampler.sample(policy, id, call) if call.max_tokens != 0 else ()
        if not call.prompt_logprobs and not call.prompt_top_k:
            return c.Sampled(sequences=sequences)
        trainer = self._trainers.trainers[policy]
        (found,) = await trainer.score([call.prompt], call.prompt_top_k, id=f"{id}/score")
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

    async def _run_unload(self, entry: Entry, call: c.UnloadModel) -> None:
        if (model := self.models.get(call.model)) is not None:
            await self._unload(model)
        await self._done(entry, c.ModelReady(model=call.model))

    def _open_calls(self, account: str) -> int:
        return sum(1 for entry in self._calls.values() if entry.account == account and entry.done is None)

    async def _patiently(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do it with a trainer that is not lost meanwhile."""
        while True:
            try:
                await self._trainers.ready()
                return await work()
            except TrainerLost as e:
                await self._trainers.lost(e)

    async def _fail(self, entry: Entry, why: str, *, user: bool) -> None:
        if entry.task is not None:
            entry.task.cancel()
        if entry.done is None:
            await self._done(entry, c.Failed(message=why, user=user))

    async def _done(self, entry: Entry, result: c.Result | c.Failed, *more: Statement) -> None:
        entry.result, entry.failed = c.encode(result), isinstance(result, c.Failed)
        entry.done = self._last_done = max(time.time(), self._last_done + 1e-6)
        body = c.encode(entry.call) if isinstance(entry.call, Changing) else None
        await self._store.write(self._call_row(entry, body), *more, self._account_row(entry.account))
        if not isinstance(entry.call, Changing):
            entry.call = None
        entry.event.set()
        if entry.sampler:
            key = (entry.sampler, entry.seq // CLONE)
            self._completed[key].append(entry)
            self._news[key].set()

    def _finished(self, id: str, account: Account, result: c.Result) -> Entry:
        """A call that was performed at once."""
        entry = Entry(id=id, account=account.name, created=time.time(), done=time.time(), result=c.encode(result))
        entry.event.set()
        self._calls[id] = entry
        return entry

    # what is over

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(min(TIDY_S, self.terms.session_timeout_s / 2))
            now = time.time()
            for session in list(self.sessions.values()):
                if now - session.seen > self.terms.session_timeout_s:
                    await self.end_session(session)
            for found in list(self.checkpoints.values()):
                if found.expires is not None and found.expires < now:
                    await self._remove(found)
            old = [entry for entry in self._calls.values() if self._is_over(entry, now)]
            for entry in old:
                del self._calls[entry.id]
                if entry.sampler:
                    self._completed[entry.sampler, entry.seq // CLONE].remove(entry)
            if old:
                await self._store.write(*(("delete from call where id = ?", (entry.id,)) for entry in old))

    def _is_over(self, entry: Entry, now: float) -> bool:
        """Whether nobody will ask for the call any more, and no model repeats it."""
        if entry.done is None or entry.call is not None:
            return False
        model, sampler = self.models.get(entry.model), self.samplers.get(entry.sampler)
        gone = (model is None or model.unloaded) if entry.model else (sampler is None and bool(entry.sampler))
        since = entry.retrieved if entry.retrieved is not None else entry.done if gone else None
        return since is not None and now - since > KEPT_S

    # rows of the store

    def _session_row(self, s: Session) -> Statement:
        return self._store.put(
            "session",
            id=s.id,
            account=s.account,
            created=s.created,
            seen=s.seen,
            ended=s.ended,
            info=json.dumps(s.info),
        )

    def _model_row(self, m: Model) -> Statement:
        lora = {name: getattr(m.spec, name) for name in m.spec.__struct_fields__}
        spec = {"lora": lora, "base": m.base, "metadata": m.metadata, "optimizer": m.optimizer}
        return self._store.put(
            "model", id=m.id, account=m.account, session=m.session, created=m.created, spec=json.dumps(spec),
            saved_seq=m.saved_seq, folder=str(m.checkpoint or ""), next_seq=m.next_seq, unloaded=int(m.unloaded),
        )  # fmt: skip

    def _call_row(self, e: Entry, body: bytes | None) -> Statement:
        return self._store.put(
            "call", id=e.id, account=e.account, model=e.model, sampler=e.sampler, seq=e.seq, created=e.created,
            done=e.done, failed=int(e.failed), body=body, result=e.result or None,
        )  # fmt: skip

    def _checkpoint_row(self, p: Checkpoint) -> Statement:
        return self._store.put(
            "checkpoint", path=p.path, account=p.account, model=p.model, kind=p.kind, created=p.created,
            expires=p.expires, bytes=p.bytes, public=int(p.public), folder=str(p.folder), info=json.dumps(p.metadata),
        )  # fmt: skip

    def _sampler_row(self, s: Sampler) -> Statement:
        weights = {"key": s.key, "folder": str(s.folder or ""), "path": s.path, "base": s.base}
        return self._store.put(
            "sampler", id=s.id, account=s.account, session=s.session, created=s.created, weights=json.dumps(weights),
            clones=s.clones,
        )  # fmt: skip

    def _account_row(self, account: str) -> Statement:
        return self._store.put("account", name=account, usage=json.dumps(self.keys.usage(account)))

    def _folder_of(self, model: str) -> Path:
        return self.folder / "models" / model.replace(":", "_")


def request_id(owner: str, seq: int) -> str:
    """The id of a call of a model or a sampler.

    >>> request_id("s:train:0", 3)
    's:train:0/3'
    """
    return f"{owner}/{seq}"


def _cursor(entry: Entry) -> int:
    """Grows with the time at which a call was done, also over restarts."""
    return int((entry.done or 0.0) * 1e6)


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
    import os

    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in _files(folder))


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
