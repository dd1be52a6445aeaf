"""Reads from the event log of a run how long its parts took, for the formulas of step_time.py. `windfall sim calibrate
FILE...` prints them as TOML for a recipe. They hold for that run's model and lengths.

A log contains the time of an engine step at several batch sizes for every kind of worker (`speeds`), and spans of
training with the optimizer's part. It does not separate the cost of prefill and of long contexts from the rest of a
step: the step times include both. It does not record other load on the machines.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from windfall.errors import WindfallError
from windfall.events.log import Event, read
from windfall.step_time import StepPoint, StepTime, fit
from windfall.types import LOCAL

FLAT = 1e-4
"""Minimum time that a response adds to a step, as a share of the fixed time."""
FIX = "Give events.jsonl of a run, or its folder."


class TrainingTimes(NamedTuple):
    """Times of training, averaged over the measured steps."""

    train_s: float
    """Seconds per trained token."""
    update_s: float
    """Seconds per step for optimizer updates and publishing."""


def steps_of(events: Sequence[Event], policy: str | None = None) -> list[Event]:
    """The steps of this policy; None: of all."""
    steps = [e for e in events if (e["kind"], e["name"]) == ("scalar", "step")]
    return steps if policy is None else [e for e in steps if e.get("policy", "") == policy]


def speeds(steps: Iterable[Event]) -> dict[str, list[StepPoint]]:
    """Step times by batch size for each kind of worker, averaged over these steps.

    >>> rows = [{"speeds": {"local": [[4.0, 0.1, 2], [40.0, 0.3, 1]]}}, {"speeds": {"local": [[4.0, 0.2, 2]]}}]
    >>> speeds(rows)["local"][0]
    StepPoint(batch=4.0, step_s=0.15000000000000002, weight=4.0)
    """
    sums: dict[str, dict[int, list[float]]] = {}
    for event in steps:
        for kind, rows in (event.get("speeds") or {}).items():
            for batch, step_s, windows in rows:
                size = round(batch * batch).bit_length()  # half-octaves, as in controller/workers/worker_speed.py
                row = sums.setdefault(kind, {}).setdefault(size, [0.0, 0.0, 0.0])
                for n, x in enumerate((batch * windows, step_s * windows, windows)):
                    row[n] += x
    return {
        kind: sorted(StepPoint(b / w, s / w, float(w)) for b, s, w in sizes.values() if w)
        for kind, sizes in sums.items()
    }


def training(events: Sequence[Event], steps: Sequence[Event]) -> TrainingTimes | None:
    """Times of training of these steps. None: they trained on nothing."""
    trained = {_step(e): e["trained"] for e in steps if e.get("trained")}
    spans = [e for e in events if (e["kind"], e["name"]) == ("span", "train") and _step(e) in trained]
    tokens = sum(trained[_step(e)] for e in spans)
    if not tokens:
        return None
    update_s = statistics.mean(e.get("update_s", 0.0) for e in spans)
    # The time that the controller waited: transferring samples is part of training on them.
    whole_s = sum(e["s"] + e.get("asked_s", e.get("early_s", 0.0)) - e.get("update_s", 0.0) for e in spans)
    return TrainingTimes(train_s=whole_s / tokens, update_s=update_s)


def _step(event: Event) -> tuple[str, int]:
    """The step of an event: each policy of a run has its own."""
    return event.get("policy", ""), event["step"]


def services(steps: Sequence[Event], trained: TrainingTimes | None) -> dict[str, StepTime]:
    """Step times of every kind of worker in these steps."""
    out = {}
    for kind, points in speeds(steps).items():
        out[kind] = fit(points, FLAT)
        if kind == LOCAL and trained is not None:
            out[kind] = replace(out[kind], **trained._asdict())
    return out


def main(paths: Sequence[Path]) -> None:
    if not paths:
        raise WindfallError("no file given", where="windfall sim calibrate", fix=FIX)
    for path in paths:
        print(f"# {path}; for the lengths of its responses, set sim.lengths_file to this log")
        for name, service, note in _calibrated(path / "events.jsonl" if path.is_dir() else path):
            print(f"# {note}\n{toml(name, service)}")


def _calibrated(path: Path) -> list[tuple[str, StepTime, str]]:
    """Name of the section, step times in real tokens, and what they were fitted to, for every kind of worker."""
    try:
        events = read(path)
        steps = steps_of(events)
        granule = next((e["granule"] for e in events if e["name"] == "start" and "granule" in e), 1)
        points, found = speeds(steps), services(steps, training(events, steps))
    except (OSError, UnicodeDecodeError) as e:
        raise WindfallError(f"cannot read the file: {e}", where=str(path), fix=FIX) from e
    except (KeyError, TypeError) as e:
        what = f"the file has no measurements: {type(e).__name__}: {e}"
        raise WindfallError(what, where=str(path), fix=FIX) from e
    if not found:
        raise WindfallError("nothing to fit: the file has no step times", where=str(path), fix=FIX)
    out = []
    for kind, service in found.items():
        times = {n: getattr(service, n) / granule for n in ("fixed_s", "each_s", "train_s")}  # per real token
        note = f"{kind}: {len(points[kind])} batch sizes, {sum(p.weight for p in points[kind]):.0f} windows"
        out.append(("trainer" if kind == LOCAL else "worker", replace(service, **times), note))
    return out


def toml(name: str, service: StepTime) -> str:
    """The service times as a section of a recipe.

    >>> print(toml("worker", StepTime(fixed_s=0.01, each_s=0.0001)))
    [sim.worker]
    fixed_s = 0.01
    each_s = 0.0001
    """
    return "\n".join([f"[sim.{name}]", *(f"{k} = {v:.6g}" for k, v in asdict(service).items() if v)])
