"""Fits the service times of a machine to the JSON that benchmarks/engine_gpu.py writes.

The fit uses milliseconds per step at several batch sizes, prefill tokens per second, and rollouts with a larger batch
than any of these sizes. All other rollouts are predicted and reported, but not fitted. The time to read the KV cache is
not measured separately: it is taken to be the time at full memory bandwidth, which the file gives, and is subtracted
from the time per response.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from windfall.sim.calibrate.fit import FLAT, held_out_errors, line_or_bend
from windfall.sim.machines.decode import Decode, DecodeRow
from windfall.step_time import StepPoint, StepTime

DECODE_CONTEXT = 272.0
"""Average context of a response in the decode cases of benchmarks/engine_gpu.py, in tokens."""
ROLLOUT = re.compile(r"(\d+) x (\d+) in, (\d+) out")
GROUP = re.compile(r"(\d+) x 8, (\d+) in, to (\d+) out, mean (\d+)")


def from_benchmark(data: dict[str, Any]) -> list[tuple[str, StepTime, list[str]]]:
    rows, out = data["figures"], []
    for model, engine in dict.fromkeys((r["model"], r["engine"]) for r in rows):
        own = [r for r in rows if (r["model"], r["engine"]) == (model, engine)]
        decode = [r for r in own if r["what"] == "decode" and r["case"].startswith("batch ")]
        if len(decode) < 2:
            continue
        prefill_s = 1 / max((r["value"] for r in own if r["what"] == "prefill"), default=math.inf)
        points = sorted(StepPoint(_batch(r), r["value"] / 1e3) for r in decode)
        notes = [f"{model}, {engine}: {len(points)} batches from {points[0].batch:g} to {points[-1].batch:g}"]
        notes.append(held_out_errors(points, line_or_bend))
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
        out.append(("worker", service, notes))
    return out


def _step_times(points: Sequence[StepPoint], floor_s: float) -> tuple[StepTime, list[str]]:
    """A service with fitted step times, and notes on the fit."""
    fit, notes = line_or_bend(points), []
    context_s = min(floor_s, fit.each_s / DECODE_CONTEXT)
    if context_s:
        part = context_s * DECODE_CONTEXT / fit.each_s
        notes.append(f"context_s is the time at full memory bandwidth: {part:.0%} of the time that a response with"
                     f" {DECODE_CONTEXT:g} tokens of context adds to a step; not measured separately")  # fmt: skip
    if fit.over_s:
        times = 1 + fit.over_s / fit.each_s
        notes.append(f"above {fit.over_batch:g} responses, each one adds {times:.1f} times as much")
    each_s = max(fit.each_s - context_s * DECODE_CONTEXT, FLAT * fit.fixed_s)
    return replace(fit, each_s=each_s, context_s=context_s), notes


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
    """Quantiles of the lengths that benchmarks/gpu_job.py draws: log-normal, truncated at `most`, with this mean.

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
