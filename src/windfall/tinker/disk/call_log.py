"""The calls of all clients and their results: in memory, and on disk before anybody is told.

    add ──▶ open ── done ──▶ result on disk ── retrieved ── KEPT_S later ──▶ forgotten

A call that is made again gets the entry of the first one, also after a restart. Only calls without a result are in
memory: results, and calls that a model may repeat, are read from disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from windfall.tinker import calls as c
from windfall.tinker.accounts.keys import ApiAccount, Keys
from windfall.tinker.disk.store import Statement, TinkerStore

KEPT_S = 600.0
"""Seconds for which a result is kept after it was retrieved."""
CLONE = 1_000_000_000
"""Numbers of the calls of a sampler's clone begin with a multiple of this."""
COLUMNS = """id, account, model, sampler, seq, digest, created, done, failed, coalesce(length(result), 0) as size,
    coalesce(length(body), 0) as kept_bytes, case when done is null then body else x'' end as body"""


@dataclass(kw_only=True, eq=False)
class Entry:
    """A call and its outcome."""

    id: str
    account: str
    model: str = ""
    sampler: str = ""
    seq: int = 0
    digest: bytes
    """Digest of the call as the client made it."""
    call: c.Call | None = None
    """None once it has a result."""
    created: float
    done: float | None = None
    failed: bool = False
    body: bytes = b""
    """The call, until it is added; empty if the call was made before."""
    size: int = 0
    """Bytes of the call while it has no result, then those of the result."""
    kept_bytes: int = 0
    """Bytes of the call if it has a result and a model may repeat it: then it stays on disk."""
    retrieved: float | None = None
    why: str = ""
    """What it waits for."""
    event: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has a result."""
    written: asyncio.Future[None] | None = None
    """Done when it is on disk."""
    task: asyncio.Task[None] | None = None

    def replace(self, call: c.Call) -> None:
        """Perform another call in its place."""
        self.call, self.body = call, c.encode(call)
        self.size = len(self.body)


def call_id(owner: str, seq: int) -> str:
    """The id of a call of a model or a sampler.

    >>> call_id("s:train:0", 3)
    's:train:0/3'
    """
    return f"{owner}/{seq}"


class CallLog:
    def __init__(self, store: TinkerStore, keys: Keys) -> None:
        """`keys`: counts what accounts have used, and their calls without a result."""
        self._store, self._keys = store, keys
        self._entries: dict[str, Entry] = {}
        self._completed: dict[tuple[str, int], list[Entry]] = defaultdict(list)
        """Calls of each sampler and clone that have a result, in the order of `done`."""
        self._news: dict[tuple[str, int], asyncio.Event] = defaultdict(asyncio.Event)
        self._last_done = 0.0

    def restore(self) -> tuple[list[Entry], list[Entry]]:
        """Read all calls. Returns those without a result, and those that a model may repeat, both in their order."""
        now, open_, repeated = time.time(), list[Entry](), list[Entry]()
        for row in self._store.rows(f"select {COLUMNS} from call order by rowid"):
            self._entries[row["id"]] = entry = Entry(**row)
            if entry.done is None:
                entry.call, entry.body = c.decode_call(entry.body), b""
                entry.size, entry.kept_bytes = entry.kept_bytes, 0
                open_.append(entry)
                self._opened(entry)
                continue
            if entry.kept_bytes:
                repeated.append(entry)
            entry.event.set()
            entry.retrieved = now  # it may have been: clients ask at once, so they have KEPT_S for it
            self._last_done = max(self._last_done, entry.done)
            if entry.sampler:
                self._completed[_key(entry)].append(entry)
        for entries in self._completed.values():
            entries.sort(key=_cursor)
        return open_, repeated

    def get(self, id: str) -> Entry | None:
        return self._entries.get(id)

    def entry(self, id: str, account: ApiAccount, call: c.Call, body: bytes, **owner: Any) -> Entry:
        """The call that was made before with this id, or a new entry, which is to be added. `body`: the encoded call.
        `owner`: other fields of a new one. Raises Refusal if the call before was another one."""
        found, digest = self._entries.get(id), c.digest(body)
        if found is None:
            return Entry(
                id=id, account=account.name, digest=digest, call=call, body=body, size=len(body), created=time.time(),
                **owner,
            )  # fmt: skip
        if found.digest != digest:
            raise c.Refusal(400, f"call {id} was made before with other content. Give every call a number of its own.")
        return found

    def find(self, account: ApiAccount, id: str) -> Entry:
        """A call of the account. Raises Refusal."""
        entry = self._entries.get(id)
        if entry is None or entry.account != account.name:
            raise c.Refusal(410, f"there is no call {id!r}, or its result was retrieved long ago")
        return entry

    def of(self, owners: Iterable[str]) -> list[Entry]:
        """The calls of these models and samplers that have no result."""
        wanted = set(owners)
        return [e for e in self._entries.values() if e.done is None and (e.model in wanted or e.sampler in wanted)]

    def _opened(self, entry: Entry) -> None:
        self._keys.open_calls[entry.account] += 1
        self._keys.open_bytes[entry.account] += entry.size

    def add(self, entry: Entry) -> None:
        """A new call. It may be performed, but its id must not be told before `written`."""
        assert entry.body
        row = self._store.put(
            "call", id=entry.id, account=entry.account, model=entry.model, sampler=entry.sampler, seq=entry.seq,
            digest=entry.digest, created=entry.created, done=None, failed=0, body=entry.body, result=None,
        )  # fmt: skip
        entry.written = self._store.write(row)
        self._entries[entry.id] = entry
        self._opened(entry)
        entry.body = b""

    async def done(
        self, entry: Entry, result: c.Result | c.FailedCall, *statements: Statement, repeated: bool = False
    ) -> None:
        """The call has this result, which is committed with the statements. `repeated`: a model may repeat it. A call
        that has a result keeps it: nothing is written."""
        if entry.done is not None:
            return
        self._keys.open_bytes[entry.account] -= entry.size
        encoded, entry.failed = c.encode(result), isinstance(result, c.FailedCall)
        entry.kept_bytes, entry.size, entry.call = entry.size if repeated else 0, len(encoded), None
        entry.done = self._last_done = max(time.time(), self._last_done + 2e-6)  # so that cursors differ
        body = "body" if repeated else "null"
        sql = f"update call set done = ?, failed = ?, result = ?, body = {body} where id = ?"
        self._keys.count(entry.account, calls=1)
        account = self._store.put("account", name=entry.account, usage=self._keys.usage(entry.account))
        update = (sql, (entry.done, int(entry.failed), encoded, entry.id))
        written = self._store.write(update, account, *statements)
        written.add_done_callback(lambda _: self._announce(entry, written))  # also if who waits here is canceled
        await asyncio.shield(written)

    def _announce(self, entry: Entry, written: asyncio.Future[None]) -> None:
        """Tell who waits that the result of a call is on disk."""
        if written.exception() is not None:
            return  # the store ends the server
        self._keys.open_calls[entry.account] -= 1
        entry.event.set()
        if entry.sampler:
            self._completed[_key(entry)].append(entry)
            self._news[_key(entry)].set()

    async def fail(self, entries: Iterable[Entry], why: str) -> None:
        """Fail calls: they are not performed any more."""
        entries = [entry for entry in entries if entry.done is None]
        for entry in entries:
            if entry.task is not None:
                entry.task.cancel()
        await asyncio.gather(*(self.done(entry, c.FailedCall(message=why)) for entry in entries))

    async def outcome(self, entry: Entry, wait_s: float) -> c.Done | c.FailedCall | None:
        """What came of a call; waits for it for at most `wait_s`. None: nothing yet."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await entry.event.wait()
        if not entry.event.is_set():
            return None
        result = self._read("result", entry)
        return c.decode_failed(result) if entry.failed else c.Done(result=c.decode_result(result), size=entry.size)

    async def call(self, entry: Entry) -> Any:
        """A call that a model repeats."""
        if entry.written is not None:
            await asyncio.shield(entry.written)
        return await asyncio.to_thread(c.decode_call, self._read("body", entry))

    def _read(self, column: str, entry: Entry) -> bytes:
        (row,) = self._store.rows(f"select {column} from call where id = ?", entry.id)
        return row[column]

    def retrieved(self, account: ApiAccount, ids: Iterable[str]) -> None:
        """Record that the client has these results."""
        for id in ids:
            entry = self._entries.get(id)
            if entry is not None and entry.account == account.name and entry.event.is_set():
                entry.retrieved = entry.retrieved or time.time()

    async def completions(self, sampler: str, clone: int, cursor: int, wait_s: float) -> tuple[int, list[Entry]]:
        """Calls of a sampler that have had a result since the cursor, and the next cursor."""
        key = (sampler, clone)
        deadline = time.monotonic() + wait_s
        while True:
            news, entries = self._news[key], self._completed[key]
            news.clear()
            found = entries[bisect_right(entries, cursor, key=_cursor) :]
            left = deadline - time.monotonic()
            if found or left <= 0:
                return (_cursor(found[-1]) if found else cursor), found
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await news.wait()

    def drop_samplers(self, samplers: Collection[str]) -> None:
        """Forget what these samplers have completed."""
        for known in (self._completed, self._news):
            for key in [key for key in known if key[0] in samplers]:
                del known[key]

    async def forget(self, gone: Callable[[Entry], bool]) -> None:
        """Forget the calls that nobody will ask for any more. `gone`: whether the owner of a call is gone."""
        before, old = time.time() - KEPT_S, set[str]()
        for entry in self._entries.values():
            since = entry.retrieved if entry.retrieved is not None else entry.done if gone(entry) else None
            if entry.done is not None and not entry.kept_bytes and since is not None and since < before:
                old.add(entry.id)
        if not old:
            return
        for id in old:
            del self._entries[id]
        for key, entries in self._completed.items():
            self._completed[key] = [entry for entry in entries if entry.id not in old]
        await self._store.write(*(("delete from call where id = ?", (id,)) for id in old))


def _key(entry: Entry) -> tuple[str, int]:
    return entry.sampler, entry.seq // CLONE


def _cursor(entry: Entry) -> int:
    """Grows with the time at which a call was done, also over restarts."""
    return int((entry.done or 0.0) * 1e6)
