"""Everything that the wire asks is answered here: calls are accepted, performed, and their results are found again.

    submit ──▶ CallLog, on disk ──▶ id ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─▶ outcome(id)
                  │
                  ├──▶ ModelCalls: calls of a model, in order ──▶ TrainSlots ──▶ verbs of the trainer
                  └──▶ Samplers: calls that sample, at once ──▶ SampleSlots ──▶ workers

Rules:
- a call is on disk before its id is given out, and its result before anybody sees it. A restart of the server continues
  with all calls that have no result; a client notices nothing but a pause.
- a call with a number (`seq`) that was made before is that call, also after a restart.
- an account sees nothing of another one: what it does not own does not exist for it.
- a session whose client is silent for `session_timeout_s` ends: its models leave their slots, its unnamed weights are
  removed. Named weights stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from msgspec.structs import asdict

from windfall.errors import WindfallError
from windfall.tinker import calls as c
from windfall.tinker.accounts.bill import AccountBill, AccountCost
from windfall.tinker.accounts.keys import ApiAccount
from windfall.tinker.disk.call_log import Entry
from windfall.tinker.disk.records import TinkerSession
from windfall.tinker.disk.saved_weights import SavedWeights
from windfall.tinker.fleet_sampler import FleetSampler
from windfall.tinker.models.adapter_slots import SampleSlots, TrainSlots
from windfall.tinker.models.client_models import ClientModels
from windfall.tinker.models.model_calls import ModelCalls
from windfall.tinker.samplers import Samplers
from windfall.tinker.sessions import ClientSessions
from windfall.tinker.shared import SharedParts
from windfall.training import TrainerLost

TIDY_S = 5.0


class TinkerService:
    def __init__(
        self, folder: Path, shared: SharedParts, train: TrainSlots, sample: SampleSlots, fleet: FleetSampler, *,
        base_policy: str, save_updates: int, progress: Callable[[int], None] = lambda calls: None,
    ) -> None:  # fmt: skip
        """`folder`: of saved weights. `base_policy`: the policy without an adapter. `save_updates`: updates of a model
        after which it is saved. `progress`: is told now and then how many calls were performed since the run began."""
        self.shared, self.terms, self.keys, self.calls = shared, shared.terms, shared.keys, shared.calls
        self._train, self._progress = train, progress
        self.bill = AccountBill()
        self.keys.usd = lambda account: self.bill.usd(account)
        self.sessions = ClientSessions(shared.store, shared.log)
        self.weights = SavedWeights(folder / "models", shared.store)
        self.samplers = Samplers(shared, self.sessions, self.weights, sample, fleet, base_policy=base_policy)
        self.models = models = ClientModels(shared, self.sessions, self.weights, train)
        self._model_calls = ModelCalls(models, self.samplers, save_updates)
        self._kinds: dict[type, tuple[Callable[[ApiAccount, Any, bytes], Entry], Callable[[Entry], None]]] = {
            c.CreateModel: (models.new, models.create),
            c.UnloadModel: (models.new_unload, models.unload),
            c.SampleCall: (self.samplers.entry, self.samplers.begin),
            **dict.fromkeys(get_args(c.ModelCall), (self._model_calls.entry, self._model_calls.perform)),
        }
        """For each type of call: what accepts it, and what has it performed."""

    # start and end

    def restore(self) -> None:
        """Continue from the store."""
        usage = self.shared.store.rows("select * from account")
        self.keys.restore({row["name"]: row["usage"] for row in usage})
        for part in (self.sessions, self.weights, self.models, self.samplers):
            part.restore()
        self.weights.clear()
        open_, repeated = self.calls.restore()
        for entry in open_:
            _, begin = self._kinds[type(entry.call)]
            begin(entry)
        for entry in sorted(repeated, key=lambda entry: entry.seq):
            if (model := self.models.all.get(entry.model)) is not None:
                model.since.append(entry)
        # Sessions that a killed server was about to end.
        held = [m.session for m in self.models.all.values() if not m.unloaded]
        held += [s.session for s in self.samplers.all.values()]
        for id in {*held} - self.sessions.open.keys():
            self.shared.tasks.start(self._free(id))

    async def run(self) -> None:
        """Runs forever. Raises what a task of the service, or the store, has failed with."""
        tasks, store = self.shared.tasks, self.shared.store
        tasks.start(self.shared.trainers.watch())
        tasks.start(self._tidy())
        await asyncio.wait([tasks.failed, store.failed], return_when=asyncio.FIRST_COMPLETED)
        for failed in (store.failed, tasks.failed):
            if failed.done():
                failed.result()

    async def stop(self) -> None:
        """Perform no more calls, and save all models. Calls without a result are performed after the next start."""
        failed = self.shared.tasks.failed.done() or self.shared.store.failed.done()
        await self.shared.tasks.stop()
        if not failed:
            # The calls since their last checkpoints are repeated after the next start.
            with contextlib.suppress(TrainerLost, WindfallError):
                await self._train.save()

    def usage(self, account: ApiAccount) -> dict[str, float]:
        """What an account has used so far."""
        cost = self.bill.parts.get(account.name, AccountCost())
        return {**self.keys.usage(account.name), **asdict(cost), "max_usd": account.max_usd}

    # calls

    async def submit(self, account: ApiAccount, call: c.Call, body: bytes) -> Entry:
        """Accept a call, or find the one that was made before with its number. `body`: the encoded call. Raises
        Refusal."""
        accept, begin = self._kinds[type(call)]
        entry = accept(account, call, body)
        self.sessions.seen(entry.id)
        if entry.body:
            self.calls.add(entry)
            begin(entry)
        if entry.written is not None:
            await asyncio.shield(entry.written)
        return entry

    async def outcome(self, account: ApiAccount, id: str, wait_s: float) -> c.Outcome:
        """What came of a call; waits for it for at most `wait_s`."""
        entry = self.calls.find(account, id)
        self.sessions.seen(id)
        return await self.calls.outcome(entry, wait_s) or self._pending(entry)

    def _pending(self, entry: Entry) -> c.Pending:
        if missing := self._model_calls.missing(entry):
            return c.Pending(why=f"call {missing} of this model has not arrived yet")
        if not self.shared.trainers.current:
            return c.Pending(why="the trainer is starting", state="paused_capacity")
        return c.Pending(why=entry.why, state="paused_capacity" if entry.why else "active")

    async def completions(
        self, account: ApiAccount, sampler: str, clone: int, cursor: int, wait_s: float
    ) -> tuple[int, list[Entry]]:
        """Calls of a sampler that have had a result since the cursor, and the next cursor."""
        found = self.samplers.get(account, sampler)
        self.sessions.seen(found.id)
        return await self.calls.completions(found.id, clone, cursor, wait_s)

    async def cancel(self, account: ApiAccount, id: str) -> None:
        """Stop sampling for a call that nobody waits for. Other calls are performed all the same."""
        entry = self.calls.get(id)
        if entry is not None and entry.account == account.name and entry.sampler:
            await self.calls.fail([entry], "the call was canceled")

    # what is over

    async def end_session(self, session: TinkerSession) -> None:
        """Free what the session holds. Its named weights stay."""
        if await self.sessions.end(session):
            await self._free(session.id)

    async def _free(self, session: str) -> None:
        """Free what a session holds that has ended."""
        why = f"session {session} has ended"
        await self.models.end_session(session, why)
        await self.samplers.end_session(session, why)
        for model in [model.id for model in self.models.all.values() if model.session == session]:
            await self.weights.discard_model(model)

    async def _tidy(self) -> None:
        pause_s, before = min(TIDY_S, self.terms.session_timeout_s / 2), time.time()
        while True:
            await asyncio.sleep(pause_s)
            now = time.time()
            if not 0 <= now - before < 3 * pause_s:
                self.sessions.excuse(now)
            before = now
            for session in self.sessions.silent(now, self.terms.session_timeout_s):
                self.shared.tasks.start(self.end_session(session))  # one that takes long holds up no other
            await self.samplers.drop_outdated(now)
            await self.weights.remove_expired(now)
            await self.calls.forget(self._is_gone)
            self._progress(int(self.keys.total("calls")))

    def _is_gone(self, entry: Entry) -> bool:
        """Whether the model or sampler of a call is gone."""
        if entry.sampler:
            return entry.sampler not in self.samplers.all
        model = self.models.all.get(entry.model)
        return model is None or model.unloaded
