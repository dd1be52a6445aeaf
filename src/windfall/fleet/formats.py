"""A change in availability, and the three text formats that traces of it come in.

    180000,add,node20                   milliseconds, add or remove, node (as the traces of Bamboo)
    2021-12-11, 11:15:50, 54            date, time, number of nodes that are up
    {"metadata": {"gap_seconds": 300}, "data": [0, 3, ...]}    the same number, at equal distances

The last is that of SkyPilot's spot-traces.

- Changes are in the order of time, and alternate for every node: up, down, up, ...
- A file of counts becomes nodes n1, n2, ...: a rising count brings up the lowest numbers that are down; a falling one
  takes down nodes drawn at random among those that are up, always with the same seed, so a file gives one trace.
- Anything else is refused, with the line: times that go back, a node that is removed but not up, an empty file.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from windfall.errors import WindfallError

SEED = 0
MOST_NODES = 10_000
FORMATS = (
    "Lines are 'milliseconds,add or remove,node' or 'YYYY-MM-DD, HH:MM:SS, count', all of one kind; or all is JSON, "
    'as {"metadata": {"gap_seconds": SECONDS}, "data": [COUNT, ...]}.'
)


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


def parse(text: str, where: str) -> list[Change]:
    """The changes in a text of any of the formats."""
    if text.lstrip().startswith("{"):
        changes = _ticks(text, where)
        check(changes, where)
        return changes
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise WindfallError("the trace is empty", where=where, fix=FORMATS)
    counts = "-" in lines[0][1].partition(",")[0].strip()[1:]
    take: Callable[[list[str]], list[Change]] = _Counts().take if counts else _named
    changes: list[Change] = []
    up: set[str] = set()
    before_s = 0.0
    for n, line in lines:
        fields = [field.strip() for field in line.split(",")]
        try:
            if len(fields) != 3:
                raise ValueError(f"{len(fields)} fields instead of 3")
            for change in take(fields):
                if wrong := _wrong(change, before_s, up):
                    raise ValueError(wrong)
                before_s = change.at_s
                changes.append(change)
        except ValueError as e:
            raise WindfallError(f"{e}: {line.strip()[:80]!r}", where=f"{where}, line {n}", fix=FORMATS) from None
    check(changes, where)
    return changes


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


def _named(fields: list[str]) -> list[Change]:
    at_ms, what, node = fields
    if what not in ("add", "remove"):
        raise ValueError(f"'{what}' is neither add nor remove")
    if not node:
        raise ValueError("the node has no name")
    return [Change(at_s=_whole(at_ms, "milliseconds", 10**15) / 1000, node=node, up=what == "add")]


class _Counts:
    """Turns counts into nodes."""

    def __init__(self) -> None:
        self._random = random.Random(SEED)
        self._first: datetime | None = None
        self._before_s = 0.0
        self._up: set[int] = set()

    def take(self, fields: list[str]) -> list[Change]:
        date, clock, number = fields
        at = datetime.strptime(f"{date} {clock}", "%Y-%m-%d %H:%M:%S")
        self._first = self._first or at
        at_s = (at - self._first).total_seconds()
        if at_s < self._before_s:  # also where the count does not change
            raise ValueError(f"the time goes back from {self._before_s:g} s to {at_s:g} s")
        self._before_s = at_s
        return self.to(at_s, _whole(number, "nodes", MOST_NODES))

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
