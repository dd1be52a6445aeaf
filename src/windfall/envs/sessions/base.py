"""The SessionEnv interface: environments with state. A session is opened for a task, stepped with the policy's texts,
and closed.

    env.open(task) ──▶ session.step(text) ──▶ Feedback(observation) ──▶ session.step(text) ──▶ ... ──▶ Feedback(reward)
                                                                                          session.close() ◀──┘

All methods may be plain functions or `async def`. Sessions run in child processes (process_pool/), many at once. The
time limit of a step counts from when it begins to run; time in a queue does not count.

A session can be lost at any time: its process ends, or the controller is killed. What it said is in the journal.
`stateful.Stateful` then opens a fresh session and replays the policy's texts into it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Protocol

from windfall.types import Feedback, Task, Turn


class Session(Protocol):
    """One conversation with the policy about one task."""

    def step(self, text: str) -> Feedback | Awaitable[Feedback]:
        """Take the policy's text of one turn: a reward ends the session, an observation asks for one more turn. A
        reward that comes with an observation counts only if the response has no tokens left for another turn."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Free what the session holds. Not called if the process of the session is killed."""
        ...


class SessionEnv(Protocol):
    """An environment with sessions. A class attribute `replayable = False` says that the same texts may not give the
    same observations: a session that is lost then makes its response missing."""

    def task(self, index: int) -> Task | Awaitable[Task]:
        """Task number `index` (0, 1, 2, ... without end). The same number gives the same task in every process."""
        ...

    def open(self, task: Task) -> Session | Awaitable[Session]:
        """Open a session. Several may be open for the same task."""
        ...


History = tuple[tuple[str, str | None], ...]
"""The turns of a session so far: each text of the policy with the observation that answered it."""


def answered(turns: Sequence[Turn], feedback: Feedback) -> list[Turn]:
    """The turns with the observation that answers the last one."""
    return [*turns[:-1], replace(turns[-1], observation=feedback.observation)]


def history_of(turns: Sequence[Turn]) -> History:
    return tuple((turn.text, turn.observation) for turn in turns)
