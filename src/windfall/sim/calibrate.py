"""`windfall sim calibrate FILE...`: the formulas of a machine from measurements, printed as TOML for a recipe.

A file is the event log of a run (or its folder), or the JSON that benchmarks/engine_gpu.py writes. What a log has:
`speeds` of every kind of worker (steps), spans of training, pulls (`worker_ready`) and boots (the bill), all of that
run's model and lengths. What the JSON has: ms per step at several batches, prefill tokens/s, whole
rollouts; these last are predicted, not fitted to. Errors are those on points that were held out.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from windfall.bill import Totals
from windfall.errors import WindfallError
from windfall.events import Event, read
from windfall.sim.fit import Point, held_out, line, scaled
from windfall.sim.service import Service
from windfall.types import LOCAL

FIX = "Give events.jsonl of a run, its folder, or the JSON of benchmarks/engine_gpu.py."


def main(paths: Sequence[Path], *, gpu: str = "", to: str = "") -> None:
    if not paths:
        raise WindfallError("no file is given", where="windfall sim calibrate", fix=FIX)
    if to and not gpu:
        raise WindfallError("from which GPU?", where="--to", fix="Say with --gpu what was measured.")
    for path in paths:
        print(f"# {path}")
        file = path / "events.jsonl" if path.is_dir() else path
        for name, service, notes in _services(file):
            print("\n".join(f"# {note}" for note in notes))
            if to:
                _scaled(name, service, gpu, to)
            else:
                print(toml(name, service))


def _services(path: Path) -> list[tuple[str, Service, list[str]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise WindfallError(f"cannot read it: {e}", where=str(path), fix=FIX) from e
    try:
        said = json.loads(text)
    except json.JSONDecodeError:
        said = None
    if isinstance(said, dict) and "figures" in said:
        found = from_benchmark(said)
    else:
        try:
            found = from_log(read(path))
        except (KeyError, TypeError) as e:
            raise WindfallError(f"no measurement: {type(e).__name__}: {e}", where=str(path), fix=FIX) from e
    if not found:
        raise WindfallError("nothing to fit: no step times at any batch", where=str(path), fix=FIX)
    return found


def toml(name: str, service: Service) -> str:
    """
    >>> print(toml("worker", Service(fixed_s=0.01, each_s=0.0001)))
    [sim.worker]
    fixed_s = 0.01
    each_s = 0.0001
    """
    return "\n".join([f"[sim.{name}]", *(f"{k} = {v:.6g}" for k, v in asdict(service).items() if v)])


def _scaled(name: str, service: Service, gpu: str, to: str) -> None:
    low, middle, high = scaled(service, gpu, to)
    print(f"# scaled from {gpu} to {to} by published memory bandwidth and FLOP/s: not measured")
    for said, part in (("from", low), ("to", high)):
        print(f"# {said}: " + ", ".join(f"{k} {v:.3g}" for k, v in asdict(part).items() if v))
    print(toml(name, middle))


# engine_gpu.py


def from_benchmark(said: dict[str, Any]) -> list[tuple[str, Service, list[str]]]:
    rows = said["figures"]
    out = []
    for model, engine in dict.fromkeys((r["model"], r["engine"]) for r in rows):
        own = [r for r in rows if (r["model"], r["engine"]) == (model, engine)]
        points = [
            Point(float(r["case"].split()[1]), r["value"] / 1e3) for r in own
            if r["what"] == "decode" and r["case"].startswith("batch ")
        ]  # fmt: skip
        if len(points) < 2:
            continue
        fixed_s, each_s = line(points)
        prefill = [r["value"] for r in own if r["what"] == "prefill"]
        service = Service(fixed_s=fixed_s, each_s=each_s, prefill_s=1 / max(prefill) if prefill else 0.0)
        notes = [f"{model}, {engine}: {len(points)} batches from {points[0].batch:g} to {points[-1].batch:g}"]
        notes += _errors(points)
        notes += [note for r in own if r["what"] == "rollout" and (note := _rollout(service, r["case"], r["value"]))]
        trained = [t for text in said.get("training", []) if (t := re.search(r"([\d,]+) tok/s", text))]
        if trained:
            rate = float(trained[0].group(1).replace(",", ""))
            service = replace(service, train_s=1 / rate)
            notes.append(f"training: {rate:,.0f} tok/s, the first of {len(trained)} cases")
        out.append(("worker", service, notes))
    return out


def _rollout(service: Service, case: str, measured: float) -> str:
    """What it would be by the formula, where nobody fitted it."""
    numbers = re.fullmatch(r"(\d+) x (\d+) in, (\d+) out", case)
    if numbers is None:
        return ""
    count, prompt, length = map(int, numbers.groups())
    took_s = length * service.step_s(count) + service.prefill_s * count * prompt
    predicted = count * length / took_s
    return f"held out: {case}: {predicted:,.0f} tok/s, measured {measured:,.0f} ({predicted / measured - 1:+.0%})"


def _errors(points: Sequence[Point]) -> list[str]:
    found = held_out(points)
    if not found:
        return ["held out: nothing, fewer than three batches"]
    each = ", ".join(f"batch {p.batch:.3g} {off:+.0%}" for p, off in found)
    return [f"step times, each left out in turn: {each}; mean {statistics.mean(abs(o) for _, o in found):.1%}"]


# the log of a run


def from_log(events: Sequence[Event]) -> list[tuple[str, Service, list[str]]]:
    steps = [e for e in events if (e["kind"], e["name"]) == ("scalar", "step")]
    newest: dict[str, list[Point]] = {}
    for event in steps:
        for kind, rows in (event.get("speeds") or {}).items():
            newest[kind] = [Point(*row) for row in rows]
    scale = next((e["granule"] for e in events if e["name"] == "start" and "granule" in e), 1)
    train_s, notes = _training(events, steps)
    shared = [*_pulls(events), *_boots(steps, events)]
    out = []
    for kind, points in newest.items():
        if not points:
            continue
        points = sorted(Point(p.batch, p.step_s / scale, p.weight) for p in points)
        fixed_s, each_s = line(points)
        own = [f"{kind}: {len(points)} sizes of batch, {sum(p.weight for p in points):.0f} windows", *_errors(points)]
        local = kind == LOCAL
        service = Service(fixed_s=fixed_s, each_s=each_s, train_s=train_s / scale if local else 0.0)
        out.append(("trainer" if local else "worker", service, [*own, *(notes if local else shared)]))
    return out


def _training(events: Sequence[Event], steps: Sequence[Event]) -> tuple[float, list[str]]:
    """Seconds of a trained token: from the first half of the steps, and how far off that is in the second."""
    spans = {e["step"]: e["s"] + e.get("early_s", 0.0) for e in events if (e["kind"], e["name"]) == ("span", "train")}
    pairs = [(spans[e["step"]], e["trained"]) for e in steps if e["step"] in spans and e.get("trained")]
    if not pairs:
        return 0.0, ["training: nothing in this log"]
    half = max(1, len(pairs) // 2)
    fit = sum(s for s, _ in pairs[:half]) / sum(t for _, t in pairs[:half])
    later = pairs[half:]
    if not later:
        return fit, [f"training: {1 / fit:,.0f} tok/s; nothing held out"]
    off = fit * sum(t for _, t in later) / sum(s for s, _ in later) - 1
    every = sum(s for s, _ in pairs) / sum(t for _, t in pairs)
    return every, [f"training: {1 / every:,.0f} tok/s; the first half predicts the second to {off:+.1%}"]


def _pulls(events: Sequence[Event]) -> list[str]:
    rates = [e["bytes"] / e["s"] for e in events if e["name"] == "worker_ready" and e.get("bytes") and e["s"] > 0]
    return [f"pulls: {statistics.median(rates):.3g} bytes/s, median of {len(rates)}"] if rates else []


def _boots(steps: Sequence[Event], events: Sequence[Event]) -> list[str]:
    bill = sum((msgspec.convert(e["bill"], Totals) for e in steps if e.get("bill")), Totals())
    joined = sum(e["name"] == "worker_joined" and e["worker"].partition("#")[0] != LOCAL for e in events)
    booting_s = sum(a.seconds.get("booting", 0.0) for h, a in bill.holders.items() if h != "trainer")
    return [f"boot_s: {booting_s / joined:.1f}, first pull included, mean of {joined} workers"] if joined else []
