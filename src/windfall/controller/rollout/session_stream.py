"""A stream whose responses are made by sessions, such as agents, and not by one episode each.

A session decides itself when it asks for turns. The stream opens one for every response of a group, waits for its end,
and drops it if it becomes too old. The rest is as in stream.py: every session that is opened is handed out exactly
once, in its group, or dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from windfall.controller.ledger.journal_reader import History
from windfall.controller.rollout.open_group import OpenGroup
from windfall.controller.rollout.stream import Rollout, Stream, VersionGone
from windfall.envs.failures import EnvFailed
from windfall.envs.grade import Graded
from windfall.types import Response, Sampling, Task, Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionOrder:
    """A session that is to be opened."""

    id: str
    """The id of the response that the session makes."""
    index: int
    """Number of the task."""
    task: Task
    seed: int
    sampling: Sampling
    version: int | None
    """Every token must come from this version; None: from any version in the version window."""
    past: History
    """What the journal has of its segments."""
    version_gone: Callable[[], None]
    """Called if no worker holds the version any more."""
    grade: Callable[[Sequence[Turn]], Awaitable[Graded]]
    """Asks the environment of the task for its verdict."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionEnd:
    """How a session ended. Its reward is missing if `error` says why."""

    response: Response
    restored: int = 0
    """Number of its sampled tokens that came from the journal."""
    error: EnvFailed | None = None


class OpenSession(Protocol):
    async def run(self) -> SessionEnd:
        """Run the session to its end. Canceling this ends it early."""
        ...

    def oldest_version(self) -> int | None: ...
    def sampled(self) -> int: ...
    def has_begun(self) -> bool: ...

    def withdraw(self) -> None:
        """The run no longer needs the session: nothing more is sampled for it. Its `run` is canceled next."""
        ...


@dataclass(frozen=True, slots=True)
class _SessionEnded:
    id: str
    end: SessionEnd


class SessionStream(Stream):
    def __init__(
        self, rollout: Rollout, open_session: Callable[[SessionOrder], OpenSession | Response], **options: Any
    ) -> None:
        """`open_session` returns the response if the journal has all of it. `options`: those of Stream."""
        super().__init__(rollout, **options)
        self._open_session = open_session
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._segments: dict[str, list[str]] = {}
        """By response: the ids of its segments in the journal."""
        for id in rollout.history:
            self._segments.setdefault(id.partition("+")[0], []).append(id)

    def _prompt(self, task: Task) -> tuple[int, ...]:
        return ()  # every call of the session has its own prompt

    def _open_response(self, id: str, group: OpenGroup, prompt: tuple[int, ...]) -> None:
        gone = VersionGone(f"no worker holds version {self._version} any more")
        order = SessionOrder(
            id=id,
            index=group.index,
            task=group.task,
            seed=self._seed(id),
            sampling=self._sampling,
            version=self._version,
            past=self._past(id),
            version_gone=lambda: self.inbox.put_nowait(gone),
            grade=partial(self._rollout.grader.grade, id, group, counted=self._counted),
        )
        opened = self._open_session(order)
        self._live[id] = (opened, group)
        if isinstance(opened, Response):
            self._restored[id] = opened.sampled_count
            self._finish(opened)
            return
        self._runs[id] = asyncio.create_task(self._run_session(id, opened))
        self._background.add(self._runs[id])
        self._runs[id].add_done_callback(self._background.discard)

    def _past(self, id: str) -> History:
        """Take what the journal has of this response: its segments 0, 1, 2, ... Numbers may be missing."""
        history = self._rollout.history
        return {segment: history.pop(segment) for segment in self._segments.pop(id, ()) if segment in history}

    async def _run_session(self, id: str, session: OpenSession) -> None:
        try:
            end = await session.run()
        except Exception as e:  # fault boundary: the error is raised in run()
            self.inbox.put_nowait(e)
            return
        self.inbox.put_nowait(_SessionEnded(id, end))  # type: ignore[arg-type]

    def _handle(self, message: Any) -> None:
        if not isinstance(message, _SessionEnded):
            super()._handle(message)
        elif message.id in self._live:  # otherwise it was dropped meanwhile
            self._runs.pop(message.id, None)
            if message.end.error is not None:
                self._rollout.failures.miss(message.id, message.end.error)
            self._restored[message.id] = message.end.restored
            self._finish(message.end.response)

    def _oldest_version(self, id: str) -> int | None:
        return self._live[id][0].oldest_version()

    def _sampled(self, id: str) -> int:
        return self._live[id][0].sampled()

    def _has_begun(self, id: str) -> bool:
        return self._live[id][0].has_begun()

    def _withdraw(self, ids: Sequence[str]) -> None:
        for id in ids:
            session, _ = self._live[id]
            if id in self._runs:
                session.withdraw()
                self._runs.pop(id).cancel()
