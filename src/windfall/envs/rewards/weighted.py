"""Several rewards for one response: the sum of weight times score, with every score kept by name.

    user functions ──▶ exact ──▶ math (last: the kernel may end its process) ──▶ sum of weights * scores

Rules: a function that does not score a response (None) adds nothing. If none scores it, the reward is missing, never
zero. A function that raises fails the whole call, which is tried again (envs/grade.py).
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windfall.envs.failures import EnvFailed
from windfall.envs.rewards import functions
from windfall.envs.rewards.functions import RewardFunction
from windfall.envs.scoring.extract import extract
from windfall.errors import WindfallError, install_command
from windfall.types import Feedback

GRADERS = ("math", "exact")
"""Rewards that ship with windfall. They compare a response with the column `answer`."""


@dataclass(frozen=True, kw_only=True)
class RowResponse:
    """What is graded: a response to one row."""

    text: str
    answer: str
    arguments: Mapping[str, Any]
    """Arguments of the user's functions."""


class Rewards:
    def __init__(
        self, specs: Sequence[str], weights: Sequence[float] = (), *, columns: Collection[str], cpu_s: float = 5.0
    ) -> None:
        """`specs`: names in GRADERS, `package.module:function` or `file.py:function`. `weights`: one for each, or none
        for 1.0 each. `columns`: those of the data. `cpu_s`: CPU time limit for comparing two answers."""
        self._cpu_s = cpu_s
        if "math" in specs and importlib.util.find_spec("math_verify") is None:
            fix = f"Install it: {install_command('math')}; or use 'exact' or a function of your own."
            raise WindfallError("math-verify is not installed", where="env.rewards", fix=fix)
        loaded = {spec: functions.load(spec, columns) for spec in specs if spec not in GRADERS}
        names = [loaded[spec].name if spec in loaded else spec for spec in specs]
        self._functions: dict[str, RewardFunction] = {}
        self._weights: dict[str, float] = {}
        for n, spec in enumerate(specs):
            name = spec if names.count(names[n]) > 1 else names[n]
            self._weights[name] = weights[n] if weights else 1.0
            if spec in loaded:
                self._functions[name] = loaded[spec]

    @property
    def needs_tokens(self) -> bool:
        return any(function.needs_tokens for function in self._functions.values())

    async def grade(self, response: RowResponse) -> Feedback:
        scores: dict[str, float | None] = dict.fromkeys(self._weights)
        started = {name: function.start(response.arguments) for name, function in self._functions.items()}
        waiting = {name: function.score(started[name]) for name, function in self._functions.items()}
        scores |= dict(zip(waiting, await asyncio.gather(*waiting.values()), strict=True))
        if "exact" in scores:
            scores["exact"] = float(extract(response.text, response.answer) == response.answer)
        if "math" in scores:
            scores["math"] = self._math(response, scores)
        if all(score is None for score in scores.values()):
            why = "no reward function scored the response (all returned None)"
            raise EnvFailed(why, why, final=True)
        return self._sum(scores)

    def _math(self, response: RowResponse, others: Mapping[str, float | None]) -> float:
        from windfall.envs.scoring import math_answer  # slow to import, and may end the process: only in a child

        try:
            verdict = self._sum({**others, "math": 0.0})
            return float(math_answer.means_the_same(response.answer, response.text, self._cpu_s, verdict))
        except MemoryError:
            return 0.0

    def _sum(self, scores: Mapping[str, float | None]) -> Feedback:
        known = tuple((name, score) for name, score in scores.items() if score is not None)
        return Feedback(reward=sum(self._weights[name] * score for name, score in known), scores=known)
