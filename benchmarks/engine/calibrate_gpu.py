"""Fits the step times of a GPU to the JSON that gpu.py writes, and prints them as TOML for [sim] of a recipe.

    python benchmarks/engine/calibrate_gpu.py FILE

The fit uses milliseconds per step at several batch sizes, prefill tokens per second, and rollouts with a larger batch
than any of these sizes. All other rollouts are predicted and reported, but not fitted. The time to read the KV cache is
not measured separately: it is taken to be the time at full memory bandwidth, which the file gives, and is subtracted
from the time per response. An engine that slows down at large batches gets a second, steeper line, which starts at a
measured batch, if the first line alone is far off.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from windfall.sim.calibrate.event_log import FLAT, toml
from windfall.sim.machines.decode import Decode, DecodeRow
from windfall.step_time import StepPoint, StepTime, fit

BEND_POINTS = 3
"""Minimum number of points on the first line."""
BEND_GAIN = 0.5
"""A bend is used only if it removes at least half of the error."""
DECODE_CONTEXT = 272.0
"""Average context of a response in the decode cases of benchmarks/engine/gpu.py, in tokens."""
ROLLOUT = re.compile(r"(\d+) x (\d+) in, (\d+) out")
GROUP = re.compile(r"(\d+) x 8, (\d+) in, to (\d+) out, mean (\d+)")


def from_benchmark(data: dict[str, Any]) -> list[tuple[StepTime, list[str]]]:
    rows, out = data["figures"], []
    for model, engine in dict.fromkeys((r["model"], r["engine"]) for r in rows):
        own = [r for r in rows if (r["model"], r["engine"]) == (model, engine)]
        decode = [r for r in own if r["what"] == "decode" and r["case"].startswith("batch ")]
        if len(decode) < 2:
            continue
        prefill_s = 1 / max((r["value"] for r in own if r["what"] == "prefill"), default=math.inf)
        points = sorted(StepPoint(_batch(r), r["value"] / 1e3) for r in decode)
        notes = [f"{model}, {engine}: {len(points)} batches from {points[0].batch:g} to {points[-1].batch:g}"]
        notes.append(held_out_errors(points))
        large = [(r, p) for r in own if (p := _large_batch(prefill_s, r)) and p.batch > 1.1 * points[-1].batch]
        service, more = _step_times(sorted([*points, *(p for _, p in large)]), _floor_s(decode))
        service = replace(service, prefill_s=prefill_s)
        notes += [*more, *(f"fitted, because no decode case has this batch size: {r['case']}" for r, _ in large)]
        fitted = [r for r, _ in large]
        notes += [note for r in own if r not in fitted and (note := _held_out(service, r))]
        trained = [t for text in data.get("training", []) if (t := re.search(r"([\d,]+) tok/s", text))]
        if trained:
            rate = float(trained[0].group(1).replace(",", ""))
            service = replace(service, train_s=1 / rate)
            notes.append(f"training: {rate:,.0f} tok/s, the first of {len(trained)} cases")
        out.append((service, notes))
    return out


def held_out_errors(points: Sequence[StepPoint]) -> str:
    """A note with the relative error at each point when it is predicted from a fit of the others. The smallest and the
    largest batch are left out as well, which makes this a hard test.

    >>> held_out_errors([StepPoint(1, 0.011), StepPoint(10, 0.02), StepPoint(100, 0.12)])
    'step times, each left out in turn: batch 1 -9%, batch 10 +5%, batch 100 -8%; mean 7.3%'
    """
    if len(points) < 3:
        return "held out: nothing, because there are fewer than three batch sizes"
    fits = [line_or_bend([*points[:n], *points[n + 1 :]]) for n in range(len(points))]
    errors = [f.step_s(p.batch) / p.step_s - 1 for f, p in zip(fits, points, strict=True)]
    each = ", ".join(f"batch {p.batch:.3g} {error:+.0%}" for p, error in zip(points, errors, strict=True))
    return f"step times, each left out in turn: {each}; mean {statistics.mean(map(abs, errors)):.1%}"


def _step_times(points: Sequence[StepPoint], floor_s: float) -> tuple[StepTime, list[str]]:
    """A service with fitted step times, and notes on the fit."""
    found, notes = line_or_bend(points), []
    context_s = min(floor_s, found.each_s / DECODE_CONTEXT)
    if context_s:
        part = context_s * DECODE_CONTEXT / found.each_s
        notes.append(f"context_s is the time at full memory bandwidth: {part:.0%} of the time that a response with"
                     f" {DECODE_CONTEXT:g} tokens of context adds to a step; not measured separately")  # fmt: skip
    if found.over_s:
        times = 1 + found.over_s / found.each_s
        notes.append(f"above {found.over_batch:g} responses, each one adds {times:.1f} times as much")
    each_s = max(found.each_s - context_s * DECODE_CONTEXT, FLAT * found.fixed_s)
    return replace(found, each_s=each_s, context_s=context_s), notes


def _batch(row: dict[str, Any]) -> float:
    return float(row["case"].split()[1])


def _floor_s(decode: Sequence[dict[str, Any]]) -> float:
    """Seconds to read one token of the KV cache at full memory bandwidth; 0 if the file does not say. `share` is the
    time of a step at that bandwidth as a share of the measured time, so two batch sizes give the time per response."""
    floors = sorted((_batch(r), r["share"] * r["value"] / 1e3) for r in decode if r.get("share"))
    if len(floors) < 2 or floors[-1][0] == floors[0][0]:
        return 0.0
    return max(0.0, (floors[-1][1] - floors[0][1]) / (floors[-1][0] - floors[0][0]) / DECODE_CONTEXT)


def _large_batch(prefill_s: float, row: dict[str, Any]) -> StepPoint | None:
    """The step time at a large batch, from a rollout whose responses have equal lengths."""
    numbers = ROLLOUT.fullmatch(row["case"]) if row["what"] == "rollout" else None
    if numbers is None:
        return None
    count, prompt, length = map(int, numbers.groups())
    step_s = count / row["value"] - prefill_s * count * prompt / length
    return StepPoint(count, step_s) if step_s > 0 else None


def _held_out(service: StepTime, row: dict[str, Any]) -> str:
    """A note with the predicted and measured throughput of a case that was not fitted."""
    case, measured = row["case"], row["value"]
    if row["what"] == "rollout" and (match := ROLLOUT.fullmatch(case)):
        prompts, prompt, length = map(int, match.groups())
        lengths = [length] * prompts
    elif row["what"] == "group" and (match := GROUP.fullmatch(case)):
        prompts, prompt, most, mean = map(int, match.groups())
        lengths = log_normal(8 * prompts, mean, most)
    else:
        return ""
    decode = Decode(service, 1)
    for n, length in enumerate(lengths):
        decode.add(
            DecodeRow(handle=n, seed=n, id_token=n, prompt=prompt, generated=0, length=length, cut=False, sent=0), 0
        )
    decode.prefill = prompts * prompt
    predicted = sum(lengths) / decode.seconds(max(lengths))
    return f"held out: {case}: {predicted:,.0f} tok/s, measured {measured:,.0f} ({predicted / measured - 1:+.0%})"


def log_normal(count: int, mean: float, most: int, sigma: float = 0.8) -> list[int]:
    """Quantiles of lengths as in benchmarks/support/gpu_job.py: log-normal, truncated at `most`, with this mean.

    >>> lengths = log_normal(512, 600, 2048)
    >>> round(sum(lengths) / 512), max(lengths)
    (600, 2048)
    """
    normal = statistics.NormalDist()
    shape = [math.exp(sigma * normal.inv_cdf((n + 0.5) / count)) for n in range(count)]
    low, high = 1.0, float(most)
    for _ in range(40):
        median = (low + high) / 2
        lengths = [max(1, min(most, round(median * x))) for x in shape]
        low, high = (median, high) if sum(lengths) < count * mean else (low, median)
    return lengths


def line_or_bend(points: Sequence[StepPoint]) -> StepTime:
    """Fit one line, or two: the first up to a bend (`over_batch`), the second from there on.

    >>> flat = [StepPoint(b, 0.01 + 0.0001 * b) for b in (1, 16, 64, 256)]
    >>> slows = line_or_bend([*flat, StepPoint(512, 0.2)])
    >>> line_or_bend(flat).over_s, slows.over_batch, round(slows.step_s(512), 9)
    (0.0, 256, 0.2)
    """
    best = fit(points, FLAT)
    if len(points) > BEND_POINTS:
        bends = [_bend(points, n) for n in range(BEND_POINTS - 1, len(points) - 1)]
        steeper = min(bends, key=lambda bend: _error(bend, points))
        if steeper.over_s > 0 and _error(steeper, points) < BEND_GAIN * _error(best, points):
            return steeper
    return best


def _bend(points: Sequence[StepPoint], at: int) -> StepTime:
    first, corner = fit(points[: at + 1], FLAT), points[at].batch
    above = [(p.batch - corner, p.step_s - first.step_s(p.batch), p.weight / p.step_s**2) for p in points[at + 1 :]]
    slope = sum(w * x * y for x, y, w in above) / sum(w * x * x for x, _, w in above)
    return replace(first, over_batch=corner, over_s=max(0.0, slope))


def _error(time: StepTime, points: Sequence[StepPoint]) -> float:
    """The weighted mean relative error."""
    return sum(p.weight * abs(time.step_s(p.batch) / p.step_s - 1) for p in points) / sum(p.weight for p in points)


def main() -> None:
    for service, notes in from_benchmark(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))):
        print("\n".join(f"# {note}" for note in notes))
        print(toml("worker", service))


if __name__ == "__main__":
    main()
