"""`windfall sim calibrate FILE...`: fits the step times of a machine to the event log of a run (event_log.py), and
prints them as TOML for a recipe. They hold for that run's model and lengths. Printed errors are on held-out points.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from windfall.controller.cost.bill import Totals
from windfall.errors import WindfallError
from windfall.events.log import Event, read
from windfall.sim.calibrate import event_log
from windfall.step_time import StepPoint, StepTime
from windfall.types import LOCAL, is_local

FIX = "Give events.jsonl of a run, or its folder."


def main(paths: Sequence[Path]) -> None:
    if not paths:
        raise WindfallError("no file given", where="windfall sim calibrate", fix=FIX)
    for path in paths:
        print(f"# {path}")
        file = path / "events.jsonl" if path.is_dir() else path
        for name, service, notes in _services(file):
            print("\n".join(f"# {note}" for note in notes))
            print(toml(name, service))


def _services(path: Path) -> list[tuple[str, StepTime, list[str]]]:
    try:
        services = from_log(read(path))
    except (OSError, UnicodeDecodeError) as e:
        raise WindfallError(f"cannot read the file: {e}", where=str(path), fix=FIX) from e
    except (KeyError, TypeError) as e:
        what = f"the file has no measurements: {type(e).__name__}: {e}"
        raise WindfallError(what, where=str(path), fix=FIX) from e
    if not services:
        raise WindfallError("nothing to fit: the file has no step times", where=str(path), fix=FIX)
    return services


def held_out_errors(points: Sequence[StepPoint], fit_points: Callable[[Sequence[StepPoint]], StepTime]) -> str:
    """A note with the relative error at each point when it is predicted from a fit of the others. The smallest and the
    largest batch are left out as well, which makes this a hard test.

    >>> held_out_errors([StepPoint(1, 0.011), StepPoint(10, 0.02), StepPoint(100, 0.12)], event_log.fit_line)
    'step times, each left out in turn: batch 1 -9%, batch 10 +5%, batch 100 -8%; mean 7.3%'
    """
    if len(points) < 3:
        return "held out: nothing, because there are fewer than three batch sizes"
    fits = [fit_points([*points[:n], *points[n + 1 :]]) for n in range(len(points))]
    errors = [f.step_s(p.batch) / p.step_s - 1 for f, p in zip(fits, points, strict=True)]
    each = ", ".join(f"batch {p.batch:.3g} {error:+.0%}" for p, error in zip(points, errors, strict=True))
    return f"step times, each left out in turn: {each}; mean {statistics.mean(map(abs, errors)):.1%}"


def toml(name: str, service: StepTime) -> str:
    """The service times as a section of a recipe.

    >>> print(toml("worker", StepTime(fixed_s=0.01, each_s=0.0001)))
    [sim.worker]
    fixed_s = 0.01
    each_s = 0.0001
    """
    return "\n".join([f"[sim.{name}]", *(f"{k} = {v:.6g}" for k, v in asdict(service).items() if v)])


# from the log of a run


def from_log(events: Sequence[Event]) -> list[tuple[str, StepTime, list[str]]]:
    steps = event_log.steps_of(events)
    granule = next((e["granule"] for e in events if e["name"] == "start" and "granule" in e), 1)
    numbers = [e["step"] for e in steps]
    trained = event_log.training(events, numbers)
    worker_notes = [*_pulls(events), *_boots(steps, events), *_sessions(steps, granule), *_lengths(steps)]
    trainer_notes = _training(events, numbers)
    points, out = event_log.speeds(steps), []
    for kind, service in event_log.services(steps, trained).items():
        notes = [f"{kind}: {len(points[kind])} batch sizes, {sum(p.weight for p in points[kind]):.0f} windows"]
        notes += [
            held_out_errors(points[kind], event_log.fit_line),
            *(trainer_notes if kind == LOCAL else worker_notes),
        ]
        times = {n: getattr(service, n) / granule for n in ("fixed_s", "each_s", "train_s")}  # per real token
        out.append(("trainer" if kind == LOCAL else "worker", replace(service, **times), notes))
    return out


def _training(events: Sequence[Event], numbers: Sequence[int]) -> list[str]:
    trained = event_log.training(events, numbers)
    if trained is None:
        return ["training: nothing was trained in this log"]
    return [f"training: {1 / trained.train_s:,.0f} tok/s, update {trained.update_s:.3g} s"]


def _pulls(events: Sequence[Event]) -> list[str]:
    p = event_log.pulls(events)
    limits = {"egress_bytes_per_s": p.egress_per_s, "ingress_bytes_per_s": p.ingress_per_s}
    known = [f"{name} {rate:.3g}" for name, rate in limits.items() if rate < event_log.UNLIMITED_PER_S]
    return [f"pulls: weights_bytes {p.size_bytes:.3g}, " + ", ".join(known)] if known else []


def _sessions(steps: Sequence[Event], granule: int) -> list[str]:
    keys = ", ".join(f"{key} {value:g}" for key, value in event_log.session_keys(steps, granule).items())
    return [f"sessions, with lengths of turns instead of the lengths below: {keys}"] if keys else []


def _lengths(steps: Sequence[Event]) -> list[str]:
    keys = ", ".join(f"{key} {value:g}" for key, value in event_log.length_keys(steps).items())
    count = sum(len(row) for e in steps for row in e.get("lengths", ()))
    return [f"lengths: {keys}, from {count} responses; or set sim.lengths_file to this log"] if keys else []


def _boots(steps: Sequence[Event], events: Sequence[Event]) -> list[str]:
    bill = sum((msgspec.convert(e["bill"], Totals) for e in steps if e.get("bill")), Totals())
    joined = sum(e["name"] == "worker_joined" and not is_local(e["worker"]) for e in events)
    booting_s = sum(a.seconds.get("booting", 0.0) for h, a in bill.holders.items() if h != "trainer")
    return [f"boot_s: {booting_s / joined:.1f}, including the first pull, mean of {joined} workers"] if joined else []
