"""A change in availability, and the three text formats that traces of it come in.

    180000,add,node20                   milliseconds, add or remove, node (as the traces of Bamboo)
    2021-12-11, 11:15:50, 54            date, time, number of nodes that are up
    {"metadata": {"gap_seconds": 300}, "data": [0, 3, ...]}    the same number, at equal distances

The last is that of SkyPilot's spot-traces.

- Changes are in the order of time, and alternate for every node: up, down, up, ...
- A file of counts becomes nodes n1, n2, ...: a rising count brings up the lowest numbers that are down; a falling one
  takes down nodes drawn at random among those that are up, always with the same seed, so a file gives one trace.
- Lines whose time goes back are sorted by time, with a warning: Bamboo's traces of Google's V100 have some.
- Anything else is refused, with the line: a node that is removed but not up, an empty file.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise

from windfall.errors import WindfallError

SEED = 0
MOST_NODES = 10_000
FORMATS = (
    "Lines are 'milliseconds,add or remove,node' or 'YYYY-MM-DD, HH:MM:SS, count', all of one kind; or all is JSON, "
    'as {"metadata": {"gap_seconds": SECONDS}, "data": [COUNT, ...]}.'
)

Say = Callable[[str], None]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """At `at_s` after the start, a node comes up or goes down."""

    at_s: float
    node: str
    up: bool


def check(changes: Sequence[Change], where: str = "trace") -> None:
    """Refuse what is no trace: empty, out of order, or a node that comes up twice or goes down before it came."""
    if not changes:
        raise WindfallError("no node is ever up", where=where, fix="Give a trace with at least one node.")
    up: set[str] = set()
    before_s = 0.0
    for n, change in enumerate(changes, 1):
        if wrong := _wrong(change, before_s, up):
            raise WindfallError(wrong, where=f"{where}, change {n}", fix="Put the changes in order.")
        before_s = change.at_s


def parse(text: str, where: str, say: Say = _say) -> list[Change]:
    """The changes in a text of any of the formats. `say` is told of what was put right."""
    if text.lstrip().startswith("{"):
        changes = _ticks(text, where)
        check(changes, where)
        return changes
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise WindfallError("the trace is empty", where=where, fix=FORMATS)
    counts = "-" in lines[0][1].partition(",")[0].strip()[1:]
    rows = _sorted([_row(n, line, counts, where) for n, line in lines], where, say)
    nodes, changes, up = _Counts(), list[Change](), set[str]()
    for row in rows:
        new = nodes.to(row.at_s - rows[0].at_s, row.what) if isinstance(row.what, int) else [row.what]
        for change in new:
            if wrong := _wrong(change, 0.0, up):
                raise row.refused(wrong)
            changes.append(change)
    check(changes, where)
    return changes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A line of a trace: when, and what happens or how many are up."""

    line: str
    where: str
    at_s: float = 0.0
    what: Change | int = 0

    def refused(self, what: str) -> WindfallError:
        return WindfallError(f"{what}: {self.line.strip()[:80]!r}", where=self.where, fix=FORMATS)


def _row(n: int, line: str, counts: bool, where: str) -> _Row:
    row, fields = _Row(line=line, where=f"{where}, line {n}"), [field.strip() for field in line.split(",")]
    if len(fields) != 3:
        raise row.refused(f"{len(fields)} fields instead of 3")
    try:
        at_s, what = _counted(fields) if counts else _named(fields)
    except ValueError as e:
        raise row.refused(str(e)) from None
    return replace(row, at_s=at_s, what=what)


def _sorted(rows: list[_Row], where: str, say: Say) -> list[_Row]:
    """By time. Several pollers, or a clock that is set, write lines a little out of order."""
    back = [(a.at_s - b.at_s, b) for a, b in pairwise(rows) if b.at_s < a.at_s]
    if back:
        say(
            f"warning: {back[0][1].where}: the time goes back here and in {len(back) - 1} more of {len(rows)} lines, "
            f"by {max(s for s, _ in back):g} s at most; the lines of {where} were sorted by time"
        )
    return sorted(rows, key=lambda row: row.at_s)


def text(changes: Sequence[Change]) -> str:
    """In the first format; times are rounded to milliseconds.

    >>> text([Change(at_s=0.0, node="n1", up=True), Change(at_s=1.5, node="n1", up=False)])
    '0,add,n1\\n1500,remove,n1\\n'
    """
    return "".join(f"{round(c.at_s * 1000)},{'add' if c.up else 'remove'},{c.node}\n" for c in changes)


def _wrong(change: Change, before_s: float, up: set[str]) -> str:
    """What is wrong with the next change, or nothing; then it is counted in `up`."""
    if not before_s <= change.at_s < float("inf"):
        return f"the time goes back from {before_s:g} s to {change.at_s:g} s"
    if change.up == (change.node in up):
        return f"node {change.node} is {'already up' if change.up else 'removed but not up'}"
    (up.add if change.up else up.remove)(change.node)
    return ""


def _named(fields: list[str]) -> tuple[float, Change]:
    at_ms, what, node = fields
    if what not in ("add", "remove"):
        raise ValueError(f"'{what}' is neither add nor remove")
    if not node:
        raise ValueError("the node has no name")
    at_s = _whole(at_ms, "milliseconds", 10**15) / 1000
    return at_s, Change(at_s=at_s, node=node, up=what == "add")


def _counted(fields: list[str]) -> tuple[float, int]:
    """Seconds are since the year 1."""
    date, clock, number = fields
    at = datetime.strptime(f"{date} {clock}", "%Y-%m-%d %H:%M:%S")
    return (at - datetime.min).total_seconds(), _whole(number, "nodes", MOST_NODES)


class _Counts:
    """Turns counts into nodes."""

    def __init__(self) -> None:
        self._random = random.Random(SEED)
        self._up: set[int] = set()

    def to(self, at_s: float, count: int) -> list[Change]:
        changes: list[Change] = []
        while len(self._up) > count:
            gone = self._random.choice(sorted(self._up))
            self._up.remove(gone)
            changes.append(Change(at_s=at_s, node=f"n{gone}", up=False))
        for number_up in range(1, MOST_NODES + 1):
            if len(self._up) >= count:
                break
            if number_up not in self._up:
                self._up.add(number_up)
                changes.append(Change(at_s=at_s, node=f"n{number_up}", up=True))
        return changes


def _ticks(text: str, where: str) -> list[Change]:
    try:
        said = json.loads(text)
        gap_s, data = said["metadata"]["gap_seconds"], said["data"]
        if not (isinstance(gap_s, int | float) and 0 < gap_s < float("inf")):
            raise ValueError(f"gap_seconds is {gap_s!r}")
        counts, changes = _Counts(), []
        for n, count in enumerate(data):
            if type(count) is not int or not 0 <= count <= MOST_NODES:
                raise ValueError(f"data[{n}] is {count!r:.20}, no number of nodes from 0 to {MOST_NODES}")
            changes += counts.to(n * gap_s, count)
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        said = f"{e.args[0]!r} is missing" if isinstance(e, KeyError) else str(e)
        raise WindfallError(f"no trace in JSON: {said}", where=where, fix=FORMATS) from None
    return changes


def _whole(text: str, what: str, most: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 20 and int(text) <= most):
        raise ValueError(f"'{text[:20]}' is no number of {what} from 0 to {most}")
    return int(text)
