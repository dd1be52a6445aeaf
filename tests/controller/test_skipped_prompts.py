"""Which tasks of the stream are skipped, for one policy and for several. No model, no stream."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

from windfall.controller.generation import Generation
from windfall.controller.tasks.admission import Admission
from windfall.controller.tasks.selection import PromptSelection
from windfall.controller.tasks.task_gate import TaskGate
from windfall.types import Task

TASK = Task(id="t", prompt="p")


def generation(*streaks: int, history: tuple[str, ...] = ()) -> Any:
    """Two tasks are open for each policy. `streaks`: by policy, how often in a row the prompt was easy."""
    selections = []
    for streak in streaks:
        selections.append(selection := PromptSelection(seed=1))
        for step in range(streak):
            selection.end_step({step: (TASK.prompt, "easy")})
    made: Any = Generation(
        SimpleNamespace(history=dict.fromkeys(history)),  # type: ignore[arg-type]
        TaskGate({str(n): Admission(batch=2, steps=9) for n in range(len(streaks))}),
        group_size=2,
    )
    made.groups = {str(n): SimpleNamespace(selection=selection) for n, selection in enumerate(selections)}
    made._stream = SimpleNamespace(inbox=queue.SimpleQueue())
    assert made.gate.open() == [0, 1]
    return made


def skipped(made: Any) -> list[int]:
    """Those of the next 40 tasks that are skipped. The others stay open until there is no room."""
    out, tasks = [], [0, 1]
    while tasks and tasks[0] < 40:
        out += [index for index in tasks if not made._is_wanted(index, TASK)]
        tasks = made.gate.open()
        made.gate.check()
    return out


def test_skipped_task_makes_room_for_the_next_one() -> None:
    made = generation(5)
    found = skipped(made)
    assert len(found) >= 2
    assert made.gate.next_task == len(found) + 2, "two tasks stay open"
    assert made.groups["0"].selection.skipped == {"easy": len(found)}
    assert made._stream.inbox.qsize() == len(found), "more tasks are opened afterwards"


def test_prompt_that_one_policy_wants_is_generated() -> None:
    assert skipped(generation(9, 0)) == skipped(generation(0)) == []
    alone, both = skipped(generation(1)), skipped(generation(9, 1))
    assert both == alone != [], "the other policy would skip more"


def test_task_with_tokens_in_the_journal_is_not_skipped() -> None:
    assert 0 in skipped(generation(9))
    assert 0 not in skipped(generation(9, history=("0/1",)))


def test_policy_without_selection_skips_nothing() -> None:
    made = generation(9)
    made.groups["0"].selection = None
    assert skipped(made) == []
