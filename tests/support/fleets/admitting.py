"""Admission as a run with one policy uses it."""

from __future__ import annotations

from windfall.controller.tasks.admission import Admission
from windfall.controller.tasks.task_gate import TaskGate


def admit(admission: Admission) -> list[int]:
    """The tasks to open now."""
    return TaskGate({"": admission}).open()
