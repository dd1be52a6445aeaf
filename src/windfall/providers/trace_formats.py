"""A change in availability, and the three text formats of availability traces.

    180000,add,node20                   milliseconds, add or remove, node (the format of Bamboo's traces)
    2021-12-11, 11:15:50, 54            date, time, number of nodes that are up
    {"metadata": {"gap_seconds": 300}, "data": [0, 3, ...]}    number of nodes that are up, at equal intervals

The last is the format of SkyPilot's spot-traces.

- Changes are sorted by time, and alternate for every node: up, down, up, ...
- A file of counts becomes nodes n1, n2, ...: a rising count brings up the lowest numbers that are down. A falling count
  takes down random nodes among those that are up. The seed is fixed, so a file always gives the same trace.
- Lines that are out of order are sorted by time: Bamboo's traces of Google's V100 contain some.
- Anything else is an error that names the line, such as removing a node that is not up, or an empty file.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from windfall.errors import WindfallError

SEED = 0
MAX_NODES = 10_000
FORMATS = (
    "All lines must be 'milliseconds,add or remove,node', or all must be 'YYYY-MM-DD, HH:MM:SS, count'; or the file "
    'must be JSON: {"metadata": {"gap_seconds": SECONDS}, "data": [COUNT, ...]}.'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A node comes up or goes down."""

    at_s: float
    """Seconds after the start of the trace."""
    node: str
    up: bool


def check(changes: Sequence[Change], where: str = "trace") -> None:
    """Raise unless this is a valid trace: not empty, in order, and alternating between up and down for every node."""
    if not changes:
        raise WindfallError("no node is ever up", where=where, fix="Use a trace with at least one node.")
    up: set[str] = set()
    before_s = 0.0
    for n, change in enumerate(changes, 1):
        if fault := _apply(change, before_s, up):
            raise WindfallError(fault, where=f"{where}, change {n}", fix="Put the changes in order.")
        before_s = change.at_s


def parse(text: str, where: str) -> list[Change]:
    """Parse a trace in any of the formats."""
    rows = _parse_json(text, where) if text.lstrip().startswith("{") else _parse_lines(text, where)
    rows.sort(key=lambda row: row.at_s)
    nodes, changes, up = _CountedNodes(), list[Change](), set[str]()
    for row in rows:
        new = nodes.set_count(row.at_s - rows[0].at_s, row.value) if isinstance(row.value, int) else [row.value]
        for change in new:
            if fault := _apply(change, 0.0, up):
                raise row.error(fault)
            changes.append(change)
    check(changes, where)
    return changes


def _parse_lines(text: str, where: str) -> list[_Row]:
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise WindfallError("the trace is empty", where=where, fix=FORMATS)
    counts = "-" in lines[0][1].partition(",")[0].strip()[1:]
    return [_parse_row(n, line, counts, where) for n, line in lines]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A line of a trace: its time, and either a change or the number of nodes that are up."""

    line: str
    where: str
    at_s: float = 0.0
    value: Change | int = 0

    def error(self, what: str) -> WindfallError:
        return WindfallError(f"{what}: {self.line.strip()[:80]!r}", where=self.where, fix=FORMATS)


def _parse_row(n: int, line: str, counts: bool, where: str) -> _Row:
    row, fields = _Row(line=line, where=f"{where}, line {n}"), [field.strip() for field in line.split(",")]
    if len(fields) != 3:
        raise row.error(f"{len(fields)} fields instead of 3")
    try:
        at_s, value = _parse_count(fields) if counts else _parse_change(fields)
    except ValueError as e:
        raise row.error(str(e)) from None
    return replace(row, at_s=at_s, value=value)


def _apply(change: Change, before_s: float, up: set[str]) -> str:
    """Apply the next change to `up` and return "", or return what is wrong with the change."""
    if not before_s <= change.at_s < float("inf"):
        return f"the time goes back from {before_s:g} s to {change.at_s:g} s"
    if change.up == (change.node in up):
        return f"node {change.node} is {'already up' if change.up else 'removed but not up'}"
    (up.add if change.up else up.remove)(change.node)
    return ""


def _parse_change(fields: list[str]) -> tuple[float, Change]:
    at_ms, what, node = fields
    if what not in ("add", "remove"):
        raise ValueError(f"'{what}' is neither add nor remove")
    if not node:
        raise ValueError("the node has no name")
    at_s = _parse_integer(at_ms, "milliseconds", 10**15) / 1000
    return at_s, Change(at_s=at_s, node=node, up=what == "add")


def _parse_count(fields: list[str]) -> tuple[float, int]:
    """Parse the time (seconds since the year 1) and the number of nodes."""
    date, clock, number = fields
    at = datetime.strptime(f"{date} {clock}", "%Y-%m-%d %H:%M:%S")
    return (at - datetime.min).total_seconds(), _parse_integer(number, "nodes", MAX_NODES)


class _CountedNodes:
    """Converts numbers of nodes into changes of named nodes."""

    def __init__(self) -> None:
        self._random = random.Random(SEED)
        self._up: set[int] = set()

    def set_count(self, at_s: float, count: int) -> list[Change]:
        changes: list[Change] = []
        while len(self._up) > count:
            gone = self._random.choice(sorted(self._up))
            self._up.remove(gone)
            changes.append(Change(at_s=at_s, node=f"n{gone}", up=False))
        for number_up in range(1, MAX_NODES + 1):
            if len(self._up) >= count:
                break
            if number_up not in self._up:
                self._up.add(number_up)
                changes.append(Change(at_s=at_s, node=f"n{number_up}", up=True))
        return changes


def _parse_json(text: str, where: str) -> list[_Row]:
    try:
        content = json.loads(text)
        gap_s, data = content["metadata"]["gap_seconds"], content["data"]
        if not (isinstance(gap_s, int | float) and 0 < gap_s < float("inf")):
            raise ValueError(f"gap_seconds is {gap_s!r}")
        for n, count in enumerate(data):
            if type(count) is not int or not 0 <= count <= MAX_NODES:
                raise ValueError(f"data[{n}] is {count!r:.20}, not a number of nodes from 0 to {MAX_NODES}")
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        why = f"{e.args[0]!r} is missing" if isinstance(e, KeyError) else str(e)
        raise WindfallError(f"not a valid JSON trace: {why}", where=where, fix=FORMATS) from None
    return [_Row(line="", where=where, at_s=n * gap_s, value=count) for n, count in enumerate(data)]


def _parse_integer(text: str, what: str, limit: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 20 and int(text) <= limit):
        raise ValueError(f"'{text[:20]}' is not a number of {what} from 0 to {limit}")
    return int(text)
