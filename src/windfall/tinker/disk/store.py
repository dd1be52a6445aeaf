"""What the server must not forget, in one SQLite file of the run: accounts, sessions, models, calls, saved weights.

Rule: nothing is said to a client before it is on disk. `kill -9` loses no accepted call and no answer.

Everything else that the server knows is rebuilt from here (`read`). One thread writes, in the order of the calls of
`write`, and commits what has gathered meanwhile at once, so the event loop never waits for the disk.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from windfall import errors

FORMAT = 1
FILE = "tinker.sqlite"
SCHEMA = """
create table if not exists account (name text primary key, usage text not null);
create table if not exists session (
    id text primary key, account text not null, created real not null, seen real not null, ended real,
    info text not null
);
create table if not exists model (
    id text primary key, account text not null, session text not null, created real not null, spec text not null,
    saved_seq integer not null, folder text not null, next_seq integer not null, unloaded integer not null
);
create table if not exists call (
    id text primary key, account text not null, model text not null, sampler text not null, seq integer not null,
    digest blob not null, created real not null, done real, failed integer not null, body blob, result blob
);
create index if not exists call_of_model on call (model, seq);
create table if not exists checkpoint (
    path text primary key, account text not null, model text not null, kind text not null, created real not null,
    expires real, bytes integer not null, public integer not null, folder text not null, info text not null
);
create table if not exists sampler (
    id text primary key, account text not null, session text not null, created real not null, weights text not null,
    clones integer not null
);
create table if not exists counter (name text primary key, value integer not null);
"""
JSON = {"usage", "info", "spec", "weights"}
"""Columns that hold JSON objects."""
Statement = tuple[str, Sequence[Any]]


_Batch = tuple[Sequence[Statement], asyncio.Future[None]]
"""Statements that are committed together, and who waits for that."""


class TinkerStore:
    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._queue: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._reader = self._open()
        self._reader.executescript(SCHEMA)
        self._check_format()
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """Its exception says why nothing can be written any more."""
        self._error: Exception | None = None
        self._writer = threading.Thread(target=self._write_all, name="tinker store", daemon=True)
        self._writer.start()

    def _open(self) -> sqlite3.Connection:
        try:
            found = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None, timeout=30)
            found.execute("pragma journal_mode = wal")
            found.execute("pragma synchronous = full")
        except sqlite3.Error as e:
            fix = "Free disk space, or restore the file from a copy."
            raise errors.WindfallError(f"cannot be opened: {e}", where=str(self.path), fix=fix) from e
        return found

    def _check_format(self) -> None:
        (found,) = self._reader.execute("pragma user_version").fetchone()
        if found not in (0, FORMAT):
            what = f"format {found} was written by a newer windfall; this one reads up to {FORMAT}"
            raise errors.WindfallError(what, where=str(self.path), fix="Update windfall.")
        self._reader.execute(f"pragma user_version = {FORMAT}")

    def rows(self, sql: str, *values: Any) -> Iterator[dict[str, Any]]:
        """The rows of a query. For the start, and for answers that are not kept in memory."""
        cursor = self._reader.execute(sql, values)
        names = [column[0] for column in cursor.description]
        for row in cursor:
            yield {name: json.loads(value) if name in JSON else value for name, value in zip(names, row, strict=True)}

    def write(self, *statements: Statement) -> asyncio.Future[None]:
        """Commit these statements together. The future is done when they are on disk; its error is that of the disk.
        A caller that needs only the order need not await it. Raises OverflowError, and writes nothing, for a number
        that SQLite cannot store."""
        for value in (value for _, values in statements for value in values):
            if isinstance(value, int) and value.bit_length() > 63:
                raise OverflowError(f"{value} has more than 63 bits")
        done: asyncio.Future[None] = self._loop.create_future()
        if self._error is not None:
            done.set_exception(self._error)
            return done
        self._queue.put((statements, done))
        return done

    @staticmethod
    def put(table: str, **values: Any) -> Statement:
        """Insert or replace a row. Dictionaries are stored as JSON.

        >>> TinkerStore.put("counter", name="version", value=3)
        ('insert or replace into counter (name, value) values (?, ?)', ('version', 3))
        """
        names, marks = ", ".join(values), ", ".join("?" * len(values))
        row = tuple(json.dumps(value) if isinstance(value, dict) else value for value in values.values())
        return f"insert or replace into {table} ({names}) values ({marks})", row

    def _write_all(self) -> None:
        connection, last = self._open(), False
        while not last:
            batches = [self._queue.get()]
            while not self._queue.empty():
                batches.append(self._queue.get())
            last = None in batches
            self._commit(connection, [batch for batch in batches if batch is not None])
        connection.close()

    def _commit(self, connection: sqlite3.Connection, batches: Sequence[_Batch]) -> None:
        try:
            connection.execute("begin immediate")
            for statements, _ in batches:
                for sql, values in statements:
                    connection.execute(sql, values)
            connection.execute("commit")
        except Exception as e:  # every batch after this one would be built on what was lost
            fix = "Free disk space, then `windfall resume`: no call that was answered is lost."
            self._error = errors.WindfallError(f"cannot be written: {e}", where=str(self.path), fix=fix)
        self._loop.call_soon_threadsafe(self._tell, batches, self._error)

    def _tell(self, batches: Sequence[_Batch], error: Exception | None) -> None:
        for _, done in batches:
            if error is not None:
                _fail(done, error)
            elif not done.done():
                done.set_result(None)
        if error is not None:
            _fail(self.failed, error)

    async def close(self) -> None:
        """Write what is left."""
        self._queue.put(None)
        await asyncio.to_thread(self._writer.join, 30.0)
        self._reader.close()


def _fail(future: asyncio.Future[None], error: Exception) -> None:
    """Fail a future, also if nothing waits for it."""
    if not future.done():
        future.set_exception(error)
        future.exception()  # it counts as seen
