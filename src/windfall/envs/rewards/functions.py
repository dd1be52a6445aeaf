"""Reward functions as TRL has them, and how one is called:

    def reward(completions, answer, **columns):         # also prompts, completion_ids; also `async def`
        return [1.0 if ... else 0.0 for c in completions]

A function is called with lists of length one, because every response is graded as soon as it ends. Its arguments are
`prompts`, `completions`, `completion_ids` (only if it names this parameter) and the columns of the data. If the prompt
is a list of messages, so is the completion. None instead of a number means that the function does not score this
response. Everything else that is not one number is an error, never a zero.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from windfall.envs import user_code
from windfall.errors import WindfallError

ALWAYS = ("prompts", "completions", "completion_ids")
"""Arguments that do not come from the data."""


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    name: str
    call: Callable[..., Any]
    takes: frozenset[str] | None
    """The arguments that it accepts; None: all."""
    needs_tokens: bool = False
    """It names the parameter `completion_ids`."""

    def start(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function: its value, or an awaitable."""
        takes = arguments.keys() if self.takes is None else self.takes
        return self.call(**{name: value for name, value in arguments.items() if name in takes})

    async def score(self, value: Any) -> float | None:
        """The one score in what the function returned."""
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


def load(spec: str, columns: Collection[str]) -> RewardFunction:
    """Load a function and check that its parameters can be given. `columns`: those of the data."""
    where = "env.rewards"
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
