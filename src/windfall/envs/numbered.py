"""Tasks that are only numbers, for agents that bring their own tasks."""

from __future__ import annotations

from collections.abc import Sequence

from windfall.envs.base import HELD_OUT
from windfall.types import Feedback, Task, Turn


class Numbered:
    """An Env whose tasks have no prompt of their own."""

    def task(self, index: int) -> Task:
        name = f"held-out {index - HELD_OUT}" if index >= HELD_OUT else f"{index}"
        return Task(id=name, prompt=f"task {name}")

    def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        return Feedback(reward=0.0)  # called by a trial of the environment only: agents bring their own rewards
