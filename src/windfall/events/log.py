"""The event log: one append-only JSONL file per run. Console, summary and tests read only this.

Every line has `t` (wall clock, s), `m` (monotonic clock, s), `kind`, `name` and fields of its own:

    {"t": 1763.2, "m": 12.5, "kind": "scalar",  "name": "step", "step": 3, "reward": 0.41, ...}
    {"t": ...,               "kind": "span",    "name": "rollout", "step": 3, "s": 1.92}
    {"t": ...,               "kind": "instant", "name": "stopped", "step": 10}

A line is written whole and flushed at once, so a killed process leaves at most one torn line at the end: `scan` skips
it, and opening the log again starts on a fresh line. Lines that windfall did not write are skipped and counted.

The first write that fails raises, and tells `failed`; after it the log is silent, because the run is ending. A run that
was resumed from step k has an instant "resumed" with that step; `read` then leaves out what the lost steps after k had
said.

The log reads its clock from a `Clock`: a run in virtual time (windfall.sim) brings one of its own.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from windfall.errors import WindfallError

Event = dict[str, Any]
Sink = Callable[[Event], None]


TORN = b'{"t":'
"""How a line begins that a kill may have torn."""
LONGEST = 1 << 26
"""Bytes of a line. What is longer was not written by windfall."""
TAIL = 1 << 20
"""Bytes at the end of a log in which its last event is found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """The two clocks of an event, in seconds."""

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic


REAL = Clock()


class EventLog:
    def __init__(self, path: Path, sinks: list[Sink] | None = None, *, clock: Clock = REAL) -> None:
        self.path, self.clock = path, clock
        self.failed: Callable[[WindfallError], None] = lambda e: None
        self._sinks = list(sinks or [])
        self._broken = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
            if _torn(path):
                self._file.write("\n")
        except OSError as e:
            raise self._fail(e) from e

    def attach(self, sink: Sink) -> None:
        """Every later event also goes to `sink`."""
        self._sinks.append(sink)

    def instant(self, name: str, **fields: Any) -> None:
        self._write("instant", name, fields)

    def scalar(self, name: str, **fields: Any) -> None:
        self._write("scalar", name, fields)

    @contextmanager
    def span(self, name: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Times its body; the body may add fields to the dict it gets. Written at the end, also after an error."""
        start = self.clock.monotonic()
        try:
            yield fields
        except BaseException as e:  # only to write down which; it goes on up
            fields["error"] = type(e).__name__
            raise
        finally:
            self._write("span", name, {**fields, "s": self.clock.monotonic() - start})

    def _write(self, kind: str, name: str, fields: dict[str, Any]) -> None:
        assert not {"t", "m", "kind", "name"} & fields.keys(), f"{name}: a field would hide one that every event has"
        if self._broken:
            return
        event = _plain({"t": self.clock.wall(), "m": self.clock.monotonic(), "kind": kind, "name": name} | fields)
        try:
            self._file.write(json.dumps(event, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as e:
            raise self._fail(e) from e
        for sink in list(self._sinks):
            try:
                sink(event)
            except Exception as e:  # fault boundary: a view of the run must never end the run
                self._sinks.remove(sink)
                view = getattr(sink, "__qualname__", sink)
                print(f"windfall: {view} failed and is no longer shown: {type(e).__name__}: {e}", file=sys.stderr)

    def close(self) -> None:
        with suppress(OSError):  # every line was flushed when it was written; what is left failed then
            self._file.close()

    def abandon(self) -> None:
        """As if this process had been killed: nothing is written any more."""
        self._broken = True
        self.close()

    def _fail(self, e: OSError) -> WindfallError:
        self._broken = True
        fix = "Make room, or make it writable; then go on with `windfall resume`."
        error = WindfallError(f"cannot write the event log: {e.strerror or e}", where=str(self.path), fix=fix)
        self.failed(error)
        return error


def _torn(path: Path) -> bool:
    """Does the file end in the middle of a line?"""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _plain(value: Any) -> Any:
    """As JSON can hold it: a number that is none becomes null, and what is no JSON at all its text."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(k): _plain(v) for k, v in value.items()}
        case list() | tuple():
            return [_plain(v) for v in value]
    # Numbers of other libraries, such as numpy's, turn into Python's.
    return _plain(value.item()) if getattr(value, "shape", None) == () else str(value)


@dataclass(slots=True)
class Foreign:
    """Lines of a log that windfall did not write, and that no kill has torn."""

    lines: int = 0
    first: int = 0
    """The number of the first such line, from 1."""


def parse(line: bytes) -> Event | None:
    """None: this line is no event, whole and written by windfall."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or type(event.get("step", 0)) is not int:
        return None
    times = all(type(event.get(key)) in (int, float) for key in ("t", "m"))
    named = all(type(event.get(key)) is str for key in ("kind", "name"))
    return event if times and named and (event["name"] != "resumed" or "step" in event) else None


def scan(path: Path, foreign: Foreign | None = None) -> Iterator[Event]:
    """Every event of a log, one at a time: a log of any size takes the memory of its longest line."""
    with path.open("rb") as file:
        number, whole = 0, True
        while line := file.readline(LONGEST):
            begins, whole = whole, line.endswith(b"\n")
            number += begins
            event = parse(line) if begins else None
            if event is not None:
                yield event
            elif foreign is not None and begins and line.strip() and not _is_torn(line):
                foreign.lines += 1
                foreign.first = foreign.first or number


def _is_torn(line: bytes) -> bool:
    return line.startswith(TORN) and not line.rstrip().endswith(b"}")


def last(path: Path) -> Event | None:
    """The last event of a log, read from its end."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().splitlines()
    except OSError:
        return None
    return next((e for e in map(parse, reversed(lines)) if e is not None), None)


def read(path: Path, *, without: Collection[str] = (), foreign: Foreign | None = None) -> list[Event]:
    """All events, less what a later resume has made void; of a step that was, its bill is left, as `void`. Fields in
    `without` are left out."""
    events: list[Event] = []
    for event in scan(path, foreign):
        if event["name"] == "resumed":
            events = [e for e in map(partial(_void, after=event["step"]), events) if e is not None]
        for key in without:
            event.pop(key, None)
        events.append(event)
    return events


def _void(event: Event, after: int) -> Event | None:
    if event.get("step", 0) <= after:
        return event
    if not event.get("bill"):
        return None
    return {k: event[k] for k in ("t", "m", "kind", "bill")} | {"name": "void"}


def tensorboard(folder: Path) -> Sink:
    """A sink that writes every number of every scalar to TensorBoard (`pip install 'windfall[tensorboard]'`)."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as e:
        raise WindfallError(
            "tensorboard is not installed", where="log.tensorboard", fix="pip install 'windfall[tensorboard]'"
        ) from e
    writer = SummaryWriter(str(folder))

    def sink(event: Event) -> None:
        if event["kind"] != "scalar":
            return
        for key, value in event.items():
            if key not in ("t", "m", "step") and isinstance(value, int | float):
                writer.add_scalar(f"{event['name']}/{key}", value, event.get("step", 0), walltime=event["t"])
        writer.flush()

    return sink
