"""Filters of rows: a small language of its own, in Python's syntax. Pure. Nothing is ever evaluated as Python.

    level == "hard" and len(question) < 500
    source in ["gsm8k", "math"] and not solved
    difficulty >= 3 or meta["verified"]

A name is a column; a column that a row lacks is None. There are and, or, not, comparisons, `in`, subscripts, literals,
and the functions len, lower, int and float. Everything else is refused.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

from windfall.errors import WindfallError

Value = Callable[[Mapping[str, Any]], Any]
MAX_CHARS = 2000
"""Longest filter, in characters."""
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {"len": len, "lower": str.lower, "int": int, "float": float}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Is: lambda a, b: a is b,
    ast.IsNot: lambda a, b: a is not b,
}


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
        except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
            raise self._refused(f"it cannot be parsed: {getattr(e, 'msg', e)}") from None
        self._columns: set[str] = set()
        self._value = self._compile(tree.body)

    @property
    def columns(self) -> frozenset[str]:
        """The columns that the filter reads."""
        return frozenset(self._columns)

    def __call__(self, row: Mapping[str, Any]) -> bool:
        """Whether to keep the row. Raises ValueError if the filter does not fit its values."""
        try:
            return bool(self._value(row))
        except (TypeError, ValueError, LookupError, AttributeError) as e:
            shown = ", ".join(f"{name} = {str(row.get(name))[:60]!r}" for name in sorted(self._columns))
            raise ValueError(f"the filter {self._text!r} does not fit this row ({shown}): {e}") from None

    def _refused(self, why: str) -> WindfallError:
        fix = 'Compare columns with and, or, not, in and len, for example: level == "hard" and len(prompt) < 500'
        return WindfallError(f"{self._text[:200]!r} is not a filter: {why}", where=self._where, fix=fix)

    def _compile(self, node: ast.expr) -> Value:
        match node:
            case ast.Constant(value=str() | int() | float() | bool() | None as constant):
                return lambda row: constant
            case ast.Name(id=name):
                self._columns.add(name)
                return lambda row: row.get(name)
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                values = [self._compile(part) for part in parts]
                return lambda row: [value(row) for value in values]
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self._compile(operand)
                return lambda row: not inner(row)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return lambda row: -number
            case ast.BoolOp(op=op, values=parts):
                values = [self._compile(part) for part in parts]
                decide = all if isinstance(op, ast.And) else any
                return lambda row: decide(value(row) for value in values)
            case ast.Compare(left=left, ops=ops, comparators=rights):
                return self._comparison([left, *rights], [_COMPARE[type(op)] for op in ops])
            case ast.Subscript(value=of, slice=ast.Constant(value=str() | int() as key)):
                inner = self._compile(of)
                return lambda row: inner(row)[key]
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
                function, inner = _FUNCTIONS[name], self._compile(argument)
                return lambda row: function(inner(row))
        raise self._refused(f"{ast.unparse(node)[:80]!r} is not allowed")

    def _comparison(self, nodes: list[ast.expr], compare: list[Callable[[Any, Any], bool]]) -> Value:
        values = [self._compile(node) for node in nodes]

        def decide(row: Mapping[str, Any]) -> bool:
            found = [value(row) for value in values]
            return all(c(a, b) for c, a, b in zip(compare, found, found[1:], strict=False))

        return decide
