"""Compares the whole journal of an asynchronous run with its event log: is every response trained on once, and in time?

    python benchmarks/kills/journal_audit.py FOLDER/journal-copy FOLDER/run --staleness 2

A run removes the files of its journal that it no longer needs. `JournalCopy` keeps all of them: call `look` a few times
per second while the run is running. The rules, each of which `audit` checks without any code of the controller:

- no position of a response was accepted twice: nothing that was in the journal was generated again;
- a step that was trained again was trained on the same tasks, and no task was trained on in two steps;
- the tasks of a step's `Trained` record are those in its event, and every response has all its tokens in the journal;
- when a response was trained on, its oldest token lagged behind the trainer by no more than the bound;
- every finished response was trained on, unless it was too old for the last step, or its whole group was replaced.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windfall.controller.ledger.journal_format import Accepted, Assigned, Started, Trained, TurnGraded, read_records
from windfall.events import log as events


class JournalCopy:
    """Hard links to all files of a journal: they keep what the run removes, and grow with what it writes."""

    def __init__(self, journal: Path, copy: Path) -> None:
        self._journal, self._copy = journal, copy
        copy.mkdir(parents=True, exist_ok=True)

    def look(self) -> None:
        with suppress(OSError):
            for path in self._journal.glob("*.wal"):
                with suppress(FileExistsError, FileNotFoundError):
                    os.link(path, self._copy / path.name)


@dataclass(slots=True)
class _Past:
    """What the journal has of one response."""

    spans: list[tuple[int, int, int]] = field(default_factory=list)
    """Accepted tokens: first position, number, version."""
    finished: bool = False

    @property
    def tokens(self) -> int:
        return sum(count for _, count, _ in self.spans)

    @property
    def oldest(self) -> int:
        return min((version for _, _, version in self.spans), default=0)


@dataclass(slots=True)
class Contents:
    """What all files of a journal hold. Evaluations are left out."""

    responses: dict[str, _Past] = field(default_factory=lambda: defaultdict(_Past))
    trained: dict[int, list[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(list))
    """By step: the tasks it was trained on, once for every time."""
    ownerless: int = 0
    """Tokens whose handle was never assigned."""


def read(copy: Path) -> Contents:
    contents = Contents()
    for path in sorted(copy.glob("*.wal")):
        owners: dict[int, str] = {}
        for _, record in read_records(path):
            match record:
                case Started():
                    owners.clear()
                case Assigned(handles=handles):
                    owners |= handles
                case Accepted(frame=frame):
                    counts = frame.counts or (1,) * len(frame.handles)
                    for handle, position, count in zip(frame.handles, frame.positions, counts, strict=True):
                        if (id := owners.get(handle)) is None:
                            contents.ownerless += count
                        elif ":" not in id:
                            contents.responses[id].spans.append((position, count, frame.version))
                case TurnGraded(id=id, reward=reward):
                    if ":" not in id and reward is not None:
                        contents.responses[id].finished = True
                case Trained(step=step, tasks=tasks):
                    contents.trained[step].append(tasks)
    return contents


def audit(copy: Path, run: Path, *, staleness: int) -> list[str]:
    """The rules that do not hold."""
    contents = read(copy)
    steps = [e for e in events.read(run / "events.jsonl") if (e["kind"], e["name"]) == ("scalar", "step")]
    out = [f"{contents.ownerless} tokens in the journal have no owner"] if contents.ownerless else []
    out += [f"{id}: position {at} was accepted twice" for id, past in contents.responses.items() for at in _twice(past)]
    for step, times in sorted(contents.trained.items()):
        if len(set(times)) > 1:
            out.append(f"step {step} was trained on different tasks: {' and '.join(map(str, times))}")
    out += _wrong_steps(contents, steps, staleness)
    return out + _unused(contents, steps, staleness)


def _twice(past: _Past) -> list[int]:
    """The first position that was accepted twice, if any. Observations leave gaps between the turns of a response."""
    spans = sorted(past.spans)
    overlaps = (b[0] for a, b in itertools.pairwise(spans) if b[0] < a[0] + a[1])
    return [at for at in [next(overlaps, None)] if at is not None]


def _wrong_steps(contents: Contents, steps: list[dict[str, Any]], staleness: int) -> list[str]:
    out: list[str] = []
    step_of: dict[int, int] = {}
    for e in steps:
        step, rows = e["step"], dict(zip(e["tasks"], e["lengths"], strict=True))
        used = {task: row for task, row in rows.items() if task not in e["replaced"]}
        recorded = contents.trained.get(step, [()])[-1]
        if sorted(recorded) != sorted(used):
            out.append(f"step {step}: its event names the tasks {sorted(used)}, its record {sorted(recorded)}")
        for task, row in used.items():
            if step_of.setdefault(task, step) != step:
                out.append(f"task {task} was trained on in step {step_of[task]} and in step {step}")
            for sibling, tokens in enumerate(row):
                if not tokens:  # too old
                    continue
                past = contents.responses[f"{task}/{sibling}"]
                if past.tokens != tokens:
                    out.append(f"{task}/{sibling}: {tokens} tokens were trained on, {past.tokens} are in the journal")
                if step - 1 - past.oldest > staleness:
                    out.append(f"step {step}: {task}/{sibling} has tokens of version {past.oldest}")
    return out


def _unused(contents: Contents, steps: list[dict[str, Any]], staleness: int) -> list[str]:
    """Finished responses that no step used although the last step could have."""
    used = {f"{task}/{n}" for e in steps for task, row in zip(e["tasks"], e["lengths"], strict=True)
            for n, tokens in enumerate(row) if tokens}  # fmt: skip
    oldest = steps[-1]["step"] - 1 - staleness if steps else 0
    fresh = sorted(id for id, p in contents.responses.items() if p.finished and id not in used and p.oldest >= oldest)
    return [f"finished and never used: {', '.join(fresh)}"] if fresh else []


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("copy", type=Path, help="folder with all files of the journal")
    p.add_argument("run", type=Path, help="folder of the run")
    p.add_argument("--staleness", type=int, required=True, help="the run's bound")
    a = p.parse_args()
    wrong = audit(a.copy, a.run, staleness=a.staleness)
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
