"""Decides what a policy is trained on besides every task once: groups again, and prompts not. No clock, no I/O.

`Replay`: with `rollout.replay` above 0, this share of a batch's groups was trained on before by the same policy: those
that were trained on last, if their rewards differ and no response is more than `rollout.replay_age` versions old. Their
tokens keep the log-probs with which they were sampled, so importance weights correct for their age as for any other
older token. Until there are enough of them, in the first steps, batches are smaller.

`PromptSelection` (GRESO, arXiv 2506.02177): a group whose rewards are all equal teaches nothing. Its prompt is easy
(solved) or hard (not solved), and often will be so again. If the last z groups of a prompt were all easy, it is
generated with probability p ** z, with one p for easy and one for hard prompts; otherwise it is skipped, and the next
task is drawn. After a step, p falls by 0.01 if the share of easy (hard) groups in it was at least the target, and rises
by 0.01 otherwise; it stays while no prompt with a streak was drawn, as in the first epoch.

- What is drawn in a step depends on the state after the step before it, the run's seed and the task's number, not on
  which group ended first. So a run that was interrupted skips the same prompts.
- A prompt is skipped if each policy that needs the task would skip it. It does not count toward `rollout.max_draws`.
- Both states are part of a checkpoint: the tasks to replay, whose tokens the journal keeps; both p, and one number for
  each of the last MAX_PROMPTS prompts with a streak.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import xxhash

from windfall.controller.tasks.admission import is_usable
from windfall.types import Group, Prompt, prompt_key

Kind = Literal["easy", "hard"]
SOLVED = 0.5
"""A group whose rewards are all equal is easy if they are above this, and hard otherwise."""
TARGETS: dict[Kind, float] = {"easy": 1 / 12, "hard": 1 / 6}
"""Shares of a step's groups that may be of this kind: together a quarter, as in the paper."""
LEAST: dict[Kind, float] = {"easy": 0.05, "hard": 0.3}
"""Least probability of a prompt. Hard ones are tried again more often: the policy may have learned to solve them."""
MAX_PROMPTS = 1 << 15
"""The state must fit into the first message of a trainer."""


class Replay:
    """
    >>> from windfall.types import Task
    >>> replay = Replay(groups=2, age=8)
    >>> replay.groups.extend(Group(index=n, task=Task(id="", prompt="")) for n in range(5))
    >>> [group.index for group in replay.take(version=1)]
    [3, 4]
    """

    def __init__(self, *, groups: int, age: int) -> None:
        """`groups`: most groups that a step replays. `age`: the bound on the staleness of their responses."""
        self.groups: deque[Group] = deque(maxlen=groups)
        """In the order in which they were trained on."""
        self._age = age

    def take(self, version: int) -> list[Group]:
        """The groups for a step of a trainer at this version. Those that are too old are forgotten."""
        for group in list(self.groups):
            if not all(is_usable(r, version, self._age) for r in group.responses):
                self.groups.remove(group)
        return list(self.groups)


def outcome(group: Group) -> Kind | Literal["informative"] | None:
    """What the rewards of a group say. Only responses of the same role are compared. None: there are no rewards."""
    if any(len(set(part.rewards)) > 1 for part in group.by_role().values()):
        return "informative"
    return None if not group.rewards else "easy" if min(group.rewards) > SOLVED else "hard"


class PromptSelection:
    """
    >>> selection = PromptSelection(seed=0)
    >>> selection.restore((50, 40, 77 << 8 | 3))  # one prompt that was easy three times
    >>> selection.probability("easy", 3), selection.probability("hard", 3)
    (0.125, 0.3)
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.skipped = Counter[Kind]()
        """Prompts that were skipped since it was last cleared."""
        self.restore(())

    @property
    def state(self) -> tuple[int, ...]:
        """Both p in percent, then a number for each prompt: 48 bits of its hash, 8 bits of its streak."""
        return (*self._percent.values(), *(key << 8 | streak % 256 for key, streak in self._streaks.items()))

    def restore(self, state: Sequence[int]) -> None:
        """Continue from this state. An empty one is that of a new run."""
        easy, hard, *streaks = state or (50, 50)
        self._percent: dict[Kind, int] = {"easy": easy, "hard": hard}
        self._streaks = {entry >> 8: (entry + 128) % 256 - 128 for entry in streaks}
        """By prompt, the least recent first: how often in a row it was easy, or, below 0, hard."""
        self.skipped.clear()

    def probability(self, kind: Kind, streak: int) -> float:
        """The probability that such a prompt is generated."""
        return max((self._percent[kind] / 100) ** streak, LEAST[kind])

    def wants(self, index: int, prompt: Prompt) -> bool:
        """Whether to generate a group for this task."""
        streak = self._streaks.get(_key(prompt), 0)
        draw = xxhash.xxh3_64_intdigest(f"{self._seed}/{index}/prompt".encode()) / 2**64
        return not streak or draw < self.probability(_kind(streak), abs(streak))

    def skip(self, prompt: Prompt) -> None:
        """Count a prompt that is skipped."""
        self.skipped[_kind(self._streaks[_key(prompt)])] += 1

    def end_step(self, outcomes: Mapping[int, tuple[Prompt, str | None]]) -> None:
        """Learn from a step that has all its groups. `outcomes`: by task."""
        found = [(_key(prompt), kind) for _, (prompt, kind) in sorted(outcomes.items()) if kind is not None]
        if self.skipped or any(key in self._streaks for key, _ in found):
            for name, target in TARGETS.items():
                share = sum(kind == name for _, kind in found) / max(1, len(found))
                self._percent[name] = min(99, max(1, self._percent[name] + (-1 if share >= target else 1)))
        for key, kind in found:
            streak, sign = self._streaks.pop(key, 0), {"easy": 1, "hard": -1}.get(kind, 0)
            if sign:
                self._streaks[key] = sign * min(127, max(0, sign * streak) + 1)
        for key in list(self._streaks)[:-MAX_PROMPTS]:
            del self._streaks[key]

    def describe(self) -> dict[str, Any]:
        """Fields of the step's event."""
        skipped = {kind: self.skipped[kind] for kind in TARGETS}
        return {"skipped_prompts": skipped, "prompt_probability": {k: p / 100 for k, p in self._percent.items()}}


def _kind(streak: int) -> Kind:
    return "easy" if streak > 0 else "hard"


def _key(prompt: Prompt) -> int:
    return xxhash.xxh3_64_intdigest(prompt_key(prompt)) >> 16
