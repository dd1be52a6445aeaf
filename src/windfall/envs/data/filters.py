"""Filters of rows: a small language of its own, in Python's syntax. Pure.

    level == "hard" and len(question) < 500
    source in ["gsm8k", "math"] and not solved
    difficulty >= 3 or meta["verified"]

A name is a column; a column that a row lacks is None. There are and, or, not, comparisons, `in`, subscripts, literals,
and the functions len, lower, int and float. Everything else is refused before anything is evaluated: no attributes, no
other calls, no arithmetic.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

from windfall.errors import WindfallError

MAX_CHARS = 2000
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {"len": len, "lower": str.lower, "int": int, "float": float}
_ALLOWED = (
    ast.Name, ast.List, ast.Tuple, ast.Set, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.expr_context, ast.boolop,
    ast.cmpop, ast.Not, ast.USub,
)  # fmt: skip


class _Columns(dict[str, Any]):
    def __missing__(self, name: str) -> None:
        if name in _FUNCTIONS:
            raise KeyError(name)  # Python then looks for the function


class Filter:
    """A parsed filter.

    >>> keep = Filter("level == 'hard' and len(question) < 8")
    >>> sorted(keep.columns), keep({"level": "hard", "question": "3+4="})
    (['level', 'question'], True)
    """

    def __init__(self, text: str, *, where: str = "filter") -> None:
        self._text, self._where = text, where
        if len(text) > MAX_CHARS:
            raise self._refused(f"it has {len(text):,} characters")
        try:
            tree = ast.parse(text.strip(), mode="eval")
            self._code = compile(tree, "<filter>", "eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
            raise self._refused(f"it cannot be parsed: {getattr(e, 'msg', e)}") from None
        nodes = list(ast.walk(tree.body))
        for node in nodes:
            if not _is_allowed(node):
                raise self._refused(f"{ast.unparse(node)[:80]!r} is not allowed")
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        self.columns = frozenset(node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in called)
        """The columns that the filter reads."""

    def __call__(self, row: Mapping[str, Any]) -> bool:
        """Whether to keep the row. Raises ValueError if the filter does not fit its values."""
        try:
            return bool(eval(self._code, {"__builtins__": {}, **_FUNCTIONS}, _Columns(row)))
        except (TypeError, ValueError, LookupError, ArithmeticError) as e:
            shown = ", ".join(f"{name} = {str(row.get(name))[:60]!r}" for name in sorted(self.columns))
            raise ValueError(f"the filter {self._text!r} does not fit this row ({shown}): {e}") from None

    def _refused(self, why: str) -> WindfallError:
        fix = 'Compare columns with and, or, not, in and len, for example: level == "hard" and len(prompt) < 500'
        return WindfallError(f"{self._text[:200]!r} is not a filter: {why}", where=self._where, fix=fix)


def _is_allowed(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=value):
            return value is None or isinstance(value, str | int | float)
        case ast.Subscript(slice=ast.Constant(value=str() | int())):
            return True
        case ast.Call(func=ast.Name(id=name), args=[ast.expr() as argument], keywords=[]):
            return name in _FUNCTIONS and not isinstance(argument, ast.Starred)
    return isinstance(node, _ALLOWED)
