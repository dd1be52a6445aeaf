"""The event log: one append-only JSONL file per run. The console, the summary and the tests read only this file.

Every line has `t` (wall clock, s), `m` (monotonic clock, s), `kind`, `name` and the fields of the event:

    {"t": 1763.2, "m": 12.5, "kind": "scalar",  "name": "step", "step": 3, "reward": 0.41, ...}
    {"t": ...,               "kind": "span",    "name": "rollout", "step": 3, "s": 1.92}
    {"t": ...,               "kind": "instant", "name": "stopped", "step": 10}

Each line is written in one piece and flushed at once, so a killed process leaves at most one truncated line at the end.
`scan` skips it, and opening the log again starts a new line. Lines that windfall did not write are skipped.

The first write that fails raises an error and calls `failed`. After that nothing more is written, because the run is
ending. A run that was resumed from step k has an instant "resumed" with that step; `read` then leaves out the events of
the lost steps after k. If a run has several policies, events of one have its name as `policy`, and so has its
"resumed": steps of the others were not lost.

The log reads the time from a `Clock`: a run in virtual time (windfall.sim) has its own.
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

from windfall.errors import WindfallError, unwritable

Event = dict[str, Any]
Sink = Callable[[Event], None]

LINE_START = b'{"t":'
"""First bytes of every line that windfall writes, also of a line that a kill truncated."""
MAX_LINE_BYTES = 1 << 26
"""Upper limit for a line in bytes. Longer lines were not written by windfall."""
MAX_TIME_S = 1e12
"""Times of events are smaller, also those of a simulation."""
NUMBERS = frozenset({
    "capped", "counted_s", "drafted", "drafts_accepted", "drafts_gain", "early_s", "entropy", "grad_norm",
    "grader_errors", "grading_peak", "held_s", "kept_tokens", "late", "lost_tokens", "made", "mean_length", "missing",
    "moved", "parameters", "prefill_saved", "prefilled", "repeated", "restored", "reward", "reward_s", "reward_s_max",
    "rewards_retried", "s", "skipped", "staleness_max", "staleness_mean", "tok_per_s", "tokens_per_step", "too_old",
    "too_old_tokens", "train_s", "train_wait_s", "trained", "updates_not_finite", "updates_skipped", "weights_bytes",
})  # fmt: skip
"""Fields that are numbers, or null, in every event that has them. Views add them up."""
MAX_NUMBER = 1e18
"""Numbers in an event are smaller. NaN and infinity are not numbers here."""
TAIL_BYTES = 1 << 20
"""Bytes at the end of a log in which `last` looks for the last event."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """The two clocks of an event, in seconds."""

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic


REAL_TIME = Clock()


class EventLog:
    def __init__(self, path: Path, sinks: list[Sink] | None = None, *, clock: Clock = REAL_TIME) -> None:
        self.path, self.clock = path, clock
        self.failed: Callable[[WindfallError], None] = lambda e: None
        """Called with the error of the first write that fails."""
        self._sinks = list(sinks or [])
        self._broken = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
            if _ends_mid_line(path):
                self._file.write("\n")
        except OSError as e:
            raise self._fail(e) from e

    def attach(self, sink: Sink) -> None:
        self._sinks.append(sink)

    def instant(self, name: str, **fields: Any) -> None:
        self._write("instant", name, fields)

    def scalar(self, name: str, **fields: Any) -> None:
        self._write("scalar", name, fields)

    def bind(self, **fields: Any) -> EventLog:
        """The same log, with these fields in every event. Itself if there are none."""
        return _BoundLog(self, fields) if fields else self

    @contextmanager
    def span(self, name: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Time a block, which may add fields to the dict that it gets. The event is written even after an error."""
        start = self.clock.monotonic()
        try:
            yield fields
        except BaseException as e:  # only recorded; raised again
            fields["error"] = type(e).__name__
            raise
        finally:
            self._write("span", name, {**fields, "s": self.clock.monotonic() - start})

    def _write(self, kind: str, name: str, fields: dict[str, Any]) -> None:
        assert not {"t", "m", "kind", "name"} & fields.keys(), f"{name}: a field has a reserved name"
        if self._broken:
            return
        event = _plain({"t": self.clock.wall(), "m": self.clock.monotonic(), "kind": kind, "name": name} | fields)
        try:
            self._file.write(json.dumps(event, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as e:
            raise self._fail(e) from e
        dropped: list[tuple[str, str]] = []
        for sink in list(self._sinks):
            try:
                sink(event)
            except Exception as e:  # fault boundary: a failing view must never end the run
                self._sinks.remove(sink)
                view = str(getattr(sink, "__qualname__", sink))
                why = f"{type(e).__name__}: {e}"[:400]
                print(f"windfall: {view} failed and gets no more events: {why}", file=sys.stderr)
                dropped.append((view, why))
        for view, why in dropped:  # afterwards, so that the other sinks get the events in their order
            self.instant("sink_dropped", sink=view, why=why)

    def close(self) -> None:
        with suppress(OSError):  # every line was flushed when it was written, and a failure was reported then
            self._file.close()

    def abandon(self) -> None:
        """Stop writing, as if this process had been killed."""
        self._broken = True
        self.close()

    def _fail(self, e: OSError) -> WindfallError:
        self._broken = True
        fix = "Free disk space or make the file writable; then continue with `windfall resume`."
        error = unwritable("the event log", self.path, e, fix)
        self.failed(error)
        return error


class _BoundLog(EventLog):
    def __init__(self, log: EventLog, fields: dict[str, Any]) -> None:
        self.path, self.clock, self._log, self._fields = log.path, log.clock, log, fields

    def attach(self, sink: Sink) -> None:
        self._log.attach(sink)

    def _write(self, kind: str, name: str, fields: dict[str, Any]) -> None:
        self._log._write(kind, name, self._fields | fields)

    def close(self) -> None:
        """Whoever opened the log closes it."""


def _ends_mid_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _plain(value: Any) -> Any:
    """The value as JSON can represent it: NaN and infinity become null, and other types become text."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(k): _plain(v) for k, v in value.items()}
        case list() | tuple():
            return [_plain(v) for v in value]
    # Convert the scalars of other libraries, such as numpy, to Python numbers.
    return _plain(value.item()) if getattr(value, "shape", None) == () else str(value)


def parse(line: bytes) -> Event | None:
    """The event on this line, or None if the line is not a complete event written by windfall."""
    try:
        event = json.loads(line, parse_constant=lambda _: None)  # NaN and infinity, which windfall does not write
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not _is_number(event.get("step", 0)) or type(event.get("step", 0)) is not int:
        return None
    if not all(event[key] is None or _is_number(event[key]) for key in NUMBERS & event.keys()):
        return None
    has_times = all(type(event.get(key)) in (int, float) and abs(event[key]) < MAX_TIME_S for key in ("t", "m"))
    has_names = all(type(event.get(key)) is str for key in ("kind", "name"))
    return event if has_times and has_names and (event["name"] != "resumed" or "step" in event) else None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < MAX_NUMBER


def scan(path: Path) -> Iterator[Event]:
    """The events of a log, one at a time, so that memory use does not depend on the size of the log."""
    with path.open("rb") as file:
        complete = True
        while line := file.readline(MAX_LINE_BYTES):
            starts_line, complete = complete, line.endswith(b"\n")
            if starts_line and (event := parse(line)) is not None:
                yield event


def is_truncated(line: bytes) -> bool:
    """Whether a kill may have cut off the end of this line."""
    return line.startswith(LINE_START) and not line.rstrip().endswith(b"}")


def last(path: Path) -> Event | None:
    """The last event of a log, read from the end of the file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    return next((e for e in map(parse, reversed(lines)) if e is not None), None)


def read(path: Path, *, without: Collection[str] = ()) -> list[Event]:
    """All events, without those that a later resume has made void. The bill of a void step remains, as an event named
    `void`. Fields in `without` are left out."""
    events: list[Event] = []
    for event in scan(path):
        if event["name"] == "resumed":
            events = [e for e in map(partial(_void, resumed=event), events) if e is not None]
        for key in without:
            event.pop(key, None)
        events.append(event)
    return events


def _void(event: Event, resumed: Event) -> Event | None:
    if event.get("step", 0) <= resumed["step"] or event.get("policy") != resumed.get("policy"):
        return event
    if not event.get("bill"):
        return None
    return {k: event[k] for k in ("t", "m", "kind", "bill")} | {"name": "void"}
