"""Rewards of a response to a row: built-in graders and functions as TRL has them, added up by weight.

    def reward(completions, answer, **columns):         # also prompts, completion_ids; also `async def`
        return [1.0 if ... else 0.0 for c in completions]

A function is called with lists of length one, because every response is graded as soon as it ends. Its arguments are
`prompts`, `completions`, `completion_ids` (only if it names this parameter) and the columns of the data. If the prompt
is a list of messages, so is the completion. None instead of a number means that the function does not score this
response, and adds nothing. If no function scores it, the reward is missing, never zero. A function that raises fails
the whole call, which is tried again (grade.py). "math" is computed last: the kernel may end its process.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windfall.envs import user_code
from windfall.envs.failures import EnvFailed
from windfall.envs.scoring.extract import extract
from windfall.errors import WindfallError, install_command
from windfall.types import Feedback

GRADERS = ("math", "exact")
"""Rewards that ship with windfall. They compare a response with the column `answer`."""


ALWAYS = ("prompts", "completions", "completion_ids")
"""Arguments that do not come from the data."""


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    name: str
    call: Callable[..., Any]
    takes: frozenset[str] | None
    """The arguments that it accepts; None: all."""
    needs_tokens: bool = False

    def start(self, arguments: Mapping[str, Any]) -> Any:
        takes = arguments.keys() if self.takes is None else self.takes
        return self.call(**{name: value for name, value in arguments.items() if name in takes})

    async def score(self, value: Any) -> float | None:
        value = await value if isinstance(value, Awaitable) else value
        if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__") or not hasattr(value, "__iter__"):
            raise ValueError(f"{self._must} it returned a {type(value).__name__}")
        scores = list(value)
        if len(scores) != 1:
            raise ValueError(f"{self._must} it returned {len(scores)} for one completion")
        if scores[0] is None:
            return None
        try:
            score = float(scores[0])
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"{self._must} it returned a {type(scores[0]).__name__} in the list") from None
        if not math.isfinite(score):
            raise ValueError(f"{self._must} it returned {score}")
        return score

    @property
    def _must(self) -> str:
        return f"reward function '{self.name}' must return a list with one number or None per completion;"


def load_function(spec: str, columns: Collection[str]) -> RewardFunction:
    """Load a function and check that its parameters can be given. `columns`: those of the data."""
    where = "env.rewards"
    if hidden := sorted({*ALWAYS} & {*columns}):
        fix = "Rename the column: functions get what the policy was asked and wrote under this name."
        raise WindfallError(f"the data has a column '{hidden[0]}', which no function would get", where=where, fix=fix)
    function = user_code.load(spec, where)
    name = getattr(function, "__name__", type(function).__name__)
    if not callable(function):
        raise WindfallError(f"{spec} is not a function", where=where, fix="Name a function in it.")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions written in C have no signature
        return RewardFunction(name=name, call=function, takes=None)
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = {*ALWAYS, *columns}
    for p in by_name:
        if p.default is p.empty and p.name not in known:
            fix = f"Columns of the data: {', '.join(sorted(columns)) or 'none'}. Always given: {', '.join(ALWAYS)}."
            raise WindfallError(f"{spec} needs '{p.name}', which is not a column of the data", where=where, fix=fix)
    if not any_keyword and "completions" not in {p.name for p in by_name}:
        fix = "Write it as: def reward(completions, **columns) -> list[float]"
        raise WindfallError(f"{spec} has no parameter 'completions'", where=where, fix=fix)
    names = frozenset(p.name for p in by_name)
    takes = None if any_keyword else names
    return RewardFunction(name=name, call=function, takes=takes, needs_tokens="completion_ids" in names)


@dataclass(frozen=True, kw_only=True)
class RowResponse:
    text: str
    answer: str
    arguments: Mapping[str, Any]


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
        loaded = {spec: load_function(spec, columns) for spec in specs if spec not in GRADERS}
        names = [*GRADERS, *(function.name for function in loaded.values())]
        self._functions: dict[str, RewardFunction] = {}
        self._weights: dict[str, float] = {}
        for n, spec in enumerate(specs):
            name = loaded[spec].name if spec in loaded and names.count(loaded[spec].name) == 1 else spec
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
