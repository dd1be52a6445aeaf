"""Chains of small sums, worked out step by step: a task family that a tiny model can learn on a CPU.

    task      37+58-12=
    response  37+58=95;95-12=83;#83

Every number stays between 0 and 99. The number of steps has a long tail (1 + an exponential). With a tokenizer of
single characters, responses have between a dozen and well over a hundred tokens, so some are still being generated long
after others have ended. One wrong step spoils the rest.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from windfall.types import Feedback, Task, Turn


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    seed: int = 0
    mean_steps: float = 6.0
    max_steps: int = 16

    def task(self, index: int) -> Task:
        rng = random.Random(f"arithmetic/{self.seed}/{index}")
        steps = min(1 + int(rng.expovariate(1 / self.mean_steps)), self.max_steps)
        chain = draw(rng, steps)
        return Task(id=f"arithmetic/{self.seed}/{index}", prompt="".join(chain) + "=", answer=total(chain))

    def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        _, mark, answer = turns[-1].text.rpartition("#")
        return Feedback(reward=1.0 if mark and answer.strip() == str(task.answer) else 0.0)


def draw(rng: random.Random, steps: int) -> list[str]:
    """A number followed by `steps` signed numbers. All partial sums are between 0 and 99.

    >>> draw(random.Random(1), 3)
    ['17', '-2', '+63', '-60']
    """
    running = rng.randint(0, 99)
    chain = [str(running)]
    for _ in range(steps):
        if rng.random() < 0.5:
            change = rng.randint(0, 99 - running)
            chain.append(f"+{change}")
        else:
            change = -rng.randint(0, running)
            chain.append(f"-{-change}")
        running += change
    return chain


def total(chain: Sequence[str]) -> int:
    """
    >>> total(['37', '+58', '-12'])
    83
    """
    return sum(int(term) for term in chain)
