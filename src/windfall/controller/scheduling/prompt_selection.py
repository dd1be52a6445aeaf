"""Decides which prompts are skipped, because a policy is likely to learn nothing from them (GRESO, arXiv 2506.02177).
No clock, no I/O.

    drawn task ── wants() ──▶ generated ── note() ──▶ end_step(): streaks of prompts, probabilities
                    └─ no ──▶ skip(): the next task is drawn instead

A group has no information if all its rewards are equal: the prompt is easy (solved) or hard (not solved). A prompt that
was easy or hard once is often so again. So a prompt whose last z groups were all easy is generated with probability
max(p ** z, least), with one p for easy and one for hard prompts; after an informative group, always. After each step p
falls by 0.01 if the share of easy (hard) groups in the step was at least its target, and rises by 0.01 otherwise. It
stays as it is while no prompt with a streak was drawn: in the first epoch nothing can be skipped.

- What is drawn in a step depends on the state after the step before it, on the run's seed and on the number of the
  task, and on nothing else: not on which group ended first. So a run that was interrupted skips the same prompts.
- Every policy has its own state. With several policies, a prompt is skipped if each of them would skip it.
- A prompt that is skipped costs a call to the environment. It does not count toward `rollout.max_draws`.
- The state is a part of the checkpoint: both p, and one number for each of the last MAX_PROMPTS prompts with a streak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import xxhash

from windfall.types import Group, Prompt, prompt_key

Kind = Literal["easy", "hard"]
SOLVED = 0.5
"""A group whose rewards are all equal is easy if they are above this, and hard otherwise."""
MAX_PROMPTS = 1 << 15
"""Number of prompts with a streak that are remembered. The state must fit into the first message of a trainer."""
LONGEST = 127
"""Longest streak that is counted."""


@dataclass(frozen=True, slots=True)
class _Aim:
    target: float
    """Share of all groups of a step that may be of this kind."""
    least: float
    """Least probability with which a prompt of this kind is generated."""


# A quarter of all groups, twice as many hard ones as easy ones, as in the paper. Hard prompts are looked at again more
# often: the policy may have learned to solve them.
AIMS: dict[Kind, _Aim] = {"easy": _Aim(1 / 12, 0.05), "hard": _Aim(1 / 6, 0.3)}
START, LOWEST, HIGHEST = 50, 1, 99
"""Values of p, in percent."""


def outcome(group: Group) -> Kind | Literal["informative"] | None:
    """What the rewards of a group say about its prompt. Responses are compared with those of the same role. None: it
    has no rewards."""
    rewards: dict[str, set[float]] = {}
    for response in group.responses:
        if response.reward is not None:
            rewards.setdefault(response.role, set()).add(response.reward)
    if any(len(values) > 1 for values in rewards.values()):
        return "informative"
    return None if not rewards else "easy" if min(map(min, rewards.values())) > SOLVED else "hard"


class PromptSelection:
    """
    >>> selection = PromptSelection(seed=0)
    >>> selection.restore((50, 1, 77 << 8 | 3))  # one prompt that was easy three times
    >>> selection.state
    (50, 1, 19715)
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.skipped = Counter[Kind]()
        """Prompts skipped since it was last cleared."""
        self.restore(())

    @property
    def state(self) -> tuple[int, ...]:
        """Both p in percent, then a number for each prompt: 48 bits of its hash, 8 bits of its streak."""
        streaks = (key << 8 | streak % 256 for key, streak in self._streaks.items())
        return (self._percent["easy"], self._percent["hard"], *streaks)

    def restore(self, state: Sequence[int]) -> None:
        """Continue from this state. An empty one is that of a new run."""
        easy, hard, *streaks = state or (START, START)
        self._percent: dict[Kind, int] = {"easy": easy, "hard": hard}
        self._streaks = {entry >> 8: (entry + 128) % 256 - 128 for entry in streaks}
        """By prompt, the least recent first: how often in a row it was easy, or, below 0, hard."""
        self._noted: dict[int, tuple[int, str]] = {}
        """By task of this step: its prompt, and the outcome."""
        self.skipped.clear()

    def wants(self, index: int, prompt: Prompt) -> bool:
        """Whether the policy should be trained on this task."""
        streak = self._streaks.get(_key(prompt), 0)
        draw = xxhash.xxh3_64_intdigest(f"{self._seed}/{index}/prompt".encode()) / 2**64
        return not streak or draw < self.probability(_kind(streak), abs(streak))

    def probability(self, kind: Kind, streak: int) -> float:
        """The probability with which a prompt of this kind is generated."""
        return max((self._percent[kind] / 100) ** streak, AIMS[kind].least)

    def skip(self, prompt: Prompt) -> None:
        """The prompt is skipped."""
        self.skipped[_kind(self._streaks[_key(prompt)])] += 1

    def note(self, group: Group) -> None:
        """A group of this step is complete."""
        if (found := outcome(group)) is not None:
            self._noted[group.index] = _key(group.task.prompt), found

    def end_step(self) -> None:
        """The step has all its groups: learn from them, in the order of their tasks."""
        noted = [found for _, found in sorted(self._noted.items())]
        if self.skipped or any(key in self._streaks for key, _ in noted):
            for kind, aim in AIMS.items():
                share = sum(found == kind for _, found in noted) / max(1, len(noted))
                change = -1 if share >= aim.target else 1
                self._percent[kind] = min(HIGHEST, max(LOWEST, self._percent[kind] + change))
        for key, found in noted:
            streak, sign = self._streaks.pop(key, 0), {"easy": 1, "hard": -1}.get(found, 0)
            if sign:
                self._streaks[key] = sign * min(LONGEST, max(0, sign * streak) + 1)
        for key in list(self._streaks)[: max(0, len(self._streaks) - MAX_PROMPTS)]:
            del self._streaks[key]
        self._noted.clear()

    def describe(self) -> dict[str, Any]:
        """Fields of the step's event."""
        return {
            "skipped_prompts": {kind: self.skipped[kind] for kind in AIMS},
            "prompt_probability": {kind: percent / 100 for kind, percent in self._percent.items()},
        }


def _kind(streak: int) -> Kind:
    return "easy" if streak > 0 else "hard"


def _key(prompt: Prompt) -> int:
    return xxhash.xxh3_64_intdigest(prompt_key(prompt)) >> 16
