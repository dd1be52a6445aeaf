"""Samplers of clients, and their calls: each is performed at once, together with others.

Rule: a loop that saves unnamed weights with every step does not fill the disk. What it has left behind is removed.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from windfall.errors import WindfallError
from windfall.tinker import calls as c
from windfall.tinker.accounts.keys import ApiAccount
from windfall.tinker.call_checks import why_not
from windfall.tinker.calls import Refusal
from windfall.tinker.disk.call_log import Entry, call_id
from windfall.tinker.disk.records import Sampler
from windfall.tinker.disk.saved_weights import SavedWeights
from windfall.tinker.fleet_sampler import FleetSampler
from windfall.tinker.models.adapter_slots import SampleSlots
from windfall.tinker.sessions import ClientSessions
from windfall.tinker.shared import SharedParts

KEPT_UNNAMED, UNUSED_S = 16, 3600.0
"""Unnamed weights to sample from stay for this many saves of a model, and for as long after their last call."""


class Samplers:
    def __init__(
        self, shared: SharedParts, sessions: ClientSessions, weights: SavedWeights, slots: SampleSlots,
        fleet: FleetSampler, *, base_policy: str,
    ) -> None:  # fmt: skip
        """`base_policy`: the policy without an adapter."""
        self._shared, self._sessions, self._weights, self._slots = shared, sessions, weights, slots
        self._fleet, self._base_policy = fleet, base_policy
        self.all: dict[str, Sampler] = {}
        self._live: dict[str, Path] = {}
        """The newest live weights, by the key of their samplers."""
        weights.used.append(lambda: [sampler.folder for sampler in self.all.values()])

    def restore(self) -> None:
        # The row that was written last has the newest of live weights.
        for row in self._shared.store.rows("select * from sampler order by rowid"):
            self.all[row["id"]] = found = Sampler.read(row)
            if found.key.startswith("live/") and found.folder is not None:
                self._live[found.key] = found.folder
        for sampler in self.all.values():
            sampler.folder = self._live.get(sampler.key, sampler.folder)

    async def create(self, account: ApiAccount, session: str, seq: int, *, path: str = "", base: str = "") -> Sampler:
        """A sampling session for saved weights or for the base. The same number is the same one."""
        terms, id = self._shared.terms, f"{self._sessions.get(account, session).id}:sample:{seq}"
        if (found := self.all.get(id)) is not None:
            if found.path != path:
                raise Refusal(400, f"sampling session {id} was created with {found.path or 'the base'!r}, not {path!r}")
            await self._shared.store.write(found.row())  # the first request may still wait for the disk
            return found
        sampler = Sampler(id=id, account=account.name, session=session, created=time.time())
        if path:
            sampler.path, sampler.folder = path, self._weights.get(account.name, path).folder
            sampler.key = str(sampler.folder)
        else:
            terms.check_base(base)
        self.all[id] = sampler
        await self._shared.store.write(sampler.row())
        return sampler

    def get(self, account: ApiAccount, id: str) -> Sampler:
        """Raises Refusal; 410 if its session has ended."""
        found = self.all.get(id)
        if found is None or found.account != account.name:
            self._sessions.get(account, id.partition(":")[0])
            kept = f"Weights without a name are kept for the newest {KEPT_UNNAMED} saves of a model, and for an hour"
            raise Refusal(404, f"there is no sampling session {id!r}. {kept}; save others with a name.")
        return found

    async def join(self, account: ApiAccount, id: str) -> int:
        """The number of a new clone of a sampler's client: its calls have numbers of their own."""
        found = self.get(account, id)
        found.clones += 1
        clone = found.clones
        await self._shared.store.write(found.row())
        return clone

    def new_id(self, call: c.SaveForSampler, session: str) -> str:
        """The id of the sampler of weights without a name. Raises Refusal if there is one."""
        id = f"{session}:sample:{call.seq if call.sampler_seq is None else call.sampler_seq}"
        if id in self.all:
            raise Refusal(400, f"there is a sampling session {id!r} already. Give every one a number of its own.")
        return id

    async def saved(
        self, call: c.SaveForSampler, id: str, session: str, account: str, folder: Path
    ) -> tuple[Sampler, set[Path]]:
        """A sampler of weights that were saved without a name. Returns it, and folders that may be removed once it is
        written down."""
        sampler = Sampler(
            id=id, account=account, session=session, created=time.time(), folder=folder,
            key=f"live/{call.model}" if call.live else str(folder),
        )  # fmt: skip
        replaced = set[Path]()
        if call.live:
            await self._slots.changed(sampler.key, folder)
            if (live := self._live.get(sampler.key)) is not None:
                replaced.add(live)
            self._live[sampler.key] = folder
            for each in self.all.values():
                each.folder = folder if each.key == sampler.key else each.folder
        self.all[sampler.id] = sampler
        return sampler, replaced

    # the end

    async def end_session(self, session: str, why: str) -> None:
        """Drop the samplers of a session. `why`: for their open calls."""
        await self._drop([sampler for sampler in self.all.values() if sampler.session == session], why)

    async def drop_outdated(self, now: float) -> None:
        """Drop samplers of unnamed weights that a loop has left behind: it saves new ones with every step."""
        unnamed = defaultdict[Path, list[Sampler]](list)
        for sampler in self.all.values():
            if sampler.folder is not None and not sampler.path:
                unnamed[sampler.folder.parent].append(sampler)
        newest_first = (sorted(of_model, key=lambda s: -s.created) for of_model in unnamed.values())
        outdated = [s for found in newest_first for s in found[KEPT_UNNAMED:] if now - s.used > UNUSED_S]
        await self._drop(outdated, "its weights, which have no name, are older than an hour")

    async def _drop(self, samplers: Sequence[Sampler], why: str) -> None:
        ids = [sampler.id for sampler in samplers]
        for id in ids:
            self.all.pop(id, None)
        calls = self._shared.calls
        await calls.fail(calls.of(ids), why)
        calls.drop_samplers(ids)
        await self._shared.store.write(*(("delete from sampler where id = ?", (id,)) for id in ids))
        await self._weights.discard({sampler.folder for sampler in samplers if sampler.folder is not None})

    # calls

    def entry(self, account: ApiAccount, call: c.SampleCall, body: bytes) -> Entry:
        """The call, or the one that was made before with its number. Raises Refusal."""
        sampler = self.get(account, call.sampler)
        id = call_id(sampler.id, call.seq)
        entry = self._shared.calls.entry(id, account, call, body, sampler=sampler.id, seq=call.seq)
        if entry.body:
            self._shared.keys.check_calls(account, entry.size)
            terms = self._shared.terms
            if why := why_not(call, context=terms.context, vocabulary=terms.vocabulary):
                raise Refusal(400, why)
            sampler.used = entry.created
        return entry

    def begin(self, entry: Entry) -> None:
        """Have a call performed."""
        assert isinstance(entry.call, c.SampleCall), f"{entry.id} does not sample"
        entry.task = self._shared.tasks.start(self._perform(entry, entry.call))

    async def _perform(self, entry: Entry, call: c.SampleCall) -> None:
        shared = self._shared

        async def attempt() -> None:
            sampler = self.all.get(entry.sampler)
            if sampler is None:
                raise WindfallError(f"the sampling session {entry.sampler} has ended")
            await shared.trainers.ready()
            result = await self._sampled(sampler, entry, call)
            tokens = sum(len(sequence.tokens) for sequence in result.sequences)
            shared.keys.count(entry.account, sampled_tokens=tokens, prompt_tokens=len(call.prompt))
            await shared.calls.done(entry, result)

        await shared.until_done(entry, attempt, partial(shared.calls.done, entry), user=True)

    @contextlib.asynccontextmanager
    async def _place(self, sampler: Sampler, entry: Entry) -> AsyncIterator[str]:
        """The policy of a sampler, when it is the turn of the account. Until a response of the call has it, `entry.why`
        says what is waited for."""
        # First the turn: a response that waits for it keeps no slot from the calls of others.
        async with self._fleet.open.opened(entry.account):
            if sampler.folder is None:
                entry.why = ""
                yield self._base_policy
                return
            entry.why = entry.why and "all adapter slots of the workers are in use"
            async with self._slots.hold(sampler.key, entry.account, sampler.newest) as policy:
                entry.why = ""
                yield policy

    async def _sampled(self, sampler: Sampler, entry: Entry, call: c.SampleCall) -> c.Sampled:
        id, sequences, place = entry.id, (), partial(self._place, sampler, entry)
        entry.why = "the workers are busy with other calls"
        if call.max_tokens != 0:
            sequences = await self._fleet.sample(id, entry.account, call, place)
        if not call.prompt_logprobs and not call.prompt_top_k:
            return c.Sampled(sequences=sequences)
        async with place() as policy:
            trainer = self._shared.trainers.trainers[policy]
            try:
                async with self._shared.turns.turn(entry.account):
                    (found,) = await trainer.score([call.prompt], call.prompt_top_k, id=f"{id}/score")
            except WindfallError:
                self._slots.drop(sampler.key)  # without memory for a pass, the trainer empties the slot
                raise
        logprobs = np.concatenate([[np.nan], found.logprobs])
        top_ids, top = [(), *map(tuple, found.top_ids.tolist())], [(), *map(tuple, found.top_logprobs.tolist())]
        if call.prompt_last:
            left_out = len(call.prompt) - call.prompt_last
            logprobs[:left_out] = np.nan
            top_ids[:left_out] = top[:left_out] = [()] * left_out
        if not call.prompt_top_k:
            top_ids, top = (), ()
        return c.Sampled(
            sequences=sequences, prompt_logprobs=logprobs if call.prompt_logprobs else None,
            prompt_top_ids=tuple(top_ids), prompt_top_logprobs=tuple(top),
        )  # fmt: skip
