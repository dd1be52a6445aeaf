"""Sessions of clients. What a session holds, which is models and samplers, is freed when it ends.

A session is alive as long as its client sends anything for it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from windfall.tinker.accounts.keys import ApiAccount
from windfall.tinker.calls import Refusal
from windfall.tinker.disk.records import TinkerSession
from windfall.tinker.disk.store import TinkerStore


class ClientSessions:
    def __init__(self, store: TinkerStore, log: Callable[..., None]) -> None:
        """`log`: logs an event."""
        self._store, self._log = store, log
        self.open: dict[str, TinkerSession] = {}
        """Sessions that have not ended."""

    def restore(self) -> None:
        now = time.time()
        for row in self._store.rows("select * from session where ended is null"):
            self.open[row["id"]] = TinkerSession(**{**row, "seen": now})

    async def create(
        self, account: ApiAccount, *, tags: Sequence[str] = (), metadata: Mapping[str, Any] | None = None,
        sdk: str = "", name: str = "",
    ) -> TinkerSession:  # fmt: skip
        now = time.time()
        info = {"tags": list(tags), "metadata": dict(metadata or {}), "sdk": sdk, "name": name}
        session = TinkerSession(id=str(uuid.uuid4()), account=account.name, created=now, seen=now, info=info)
        self.open[session.id] = session
        await self._store.write(session.row())
        self._log("tinker_session", session=session.id, account=account.name, sdk=sdk)
        return session

    def get(self, account: ApiAccount, id: str) -> TinkerSession:
        """A session of the account, whose client is alive. Raises Refusal; 410 if it has ended."""
        session = self.open.get(id)
        if session is None or session.account != account.name:
            for row in self._store.rows("select ended from session where id = ? and account = ?", id, account.name):
                if row["ended"] is not None:
                    raise Refusal(410, f"session {id} has ended. Create a new client.")
            raise Refusal(404, f"there is no session {id!r}. Create a new client.")
        session.seen = time.time()
        return session

    def of(self, account: ApiAccount) -> list[TinkerSession]:
        """The sessions of an account that have not ended, newest first."""
        return sorted((s for s in self.open.values() if s.account == account.name), key=lambda s: -s.created)

    def seen(self, id: str) -> None:
        """A client has sent something for what has this id: of a session, or a model, sampler or call of it."""
        session = self.open.get(id.partition(":")[0])
        if session is not None:
            session.seen = time.time()

    def silent(self, now: float, timeout_s: float) -> list[TinkerSession]:
        """Sessions whose clients have sent nothing for longer than `timeout_s`."""
        return [s for s in self.open.values() if now - s.seen > timeout_s]

    def excuse(self, now: float) -> None:
        """Count no silence before `now`: the clock was set, or this process stood still."""
        for session in self.open.values():
            session.seen = now

    async def end(self, session: TinkerSession) -> bool:
        """End the session. Returns whether it was open."""
        if self.open.pop(session.id, None) is None:
            return False
        session.ended = time.time()
        await self._store.write(session.row())
        self._log("tinker_session_ended", session=session.id, account=session.account)
        return True
