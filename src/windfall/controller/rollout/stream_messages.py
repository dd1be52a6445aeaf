"""What arrives in the inbox of a stream, and what ends it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from windfall.controller.ledger.episode import Episode
from windfall.envs.grade import Graded
from windfall.types import Group


class Stopped(Exception):
    """The run was asked to stop."""


class VersionGone(Exception):
    """No worker holds the fixed version of this stream any more."""


@dataclass(frozen=True, slots=True)
class TasksDrawn:
    tasks: list[int]


@dataclass(frozen=True, slots=True)
class TurnEnded:
    id: str


@dataclass(frozen=True, slots=True)
class TurnAnswered:
    episode: Episode
    graded: Graded


Message = TasksDrawn | TurnEnded | TurnAnswered | BaseException
"""An exception ends the stream."""


def forward_error(arrived: asyncio.Queue[Group | int | BaseException], running: asyncio.Task[None]) -> None:
    """Put the error that ended a stream into the queue of its groups."""
    if not running.cancelled() and (error := running.exception()) is not None:
        arrived.put_nowait(error)
