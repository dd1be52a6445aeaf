"""Two roles: a pro and a con argue in turns, and a judge ends it with a reward for each. Once without state and once
with sessions; both say the same."""

from __future__ import annotations

from collections.abc import Sequence

from windfall.types import Feedback, Task, Turn

ORDER = ("policy:pro", "policy:con", "policy:con", "policy:pro")


def answer(texts: Sequence[str]) -> Feedback:
    if len(texts) < len(ORDER):
        return Feedback(observation=f"{len(texts)} said {texts[-1]}", role=ORDER[len(texts)])
    return Feedback(rewards={"policy:pro": float(len(texts[0])), "policy:con": float(len(texts[1]))}, reward=-1.0)


class Debate:
    def __init__(self, seed: int = 0) -> None: ...

    def task(self, index: int) -> Task:
        return Task(id=f"debate/{index}", prompt=f"motion {index}", role=ORDER[0])

    def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        wrong = [turn for turn, role in zip(turns, ORDER, strict=False) if turn.role != role]
        assert not wrong, f"other roles spoke: {wrong}"
        return answer([turn.text for turn in turns])


class DebateSessions:
    __init__ = Debate.__init__
    task = Debate.task

    def open(self, task: Task) -> DebateSession:
        return DebateSession()


class DebateSession:
    def __init__(self) -> None:
        self._texts: list[str] = []

    def step(self, text: str) -> Feedback:
        self._texts.append(text)
        return answer(self._texts)

    def close(self) -> None: ...
