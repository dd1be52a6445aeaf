"""What arrives in the inbox of a stream, and what ends it."""

from __future__ import annotations

from dataclasses import dataclass

from windfall.envs.grade import Graded
from windfall.ledger.episode import Episode


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
