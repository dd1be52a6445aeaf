"""Fits the efficiencies of the planner's cost model to windfall's own measurements of one H200. The defaults of
`Efficiency` (plan/model/cost_model.py) are the fit to all figures. Also reports the error of a fit to some of the
figures on the others: `python benchmarks/plan/plan_fit.py`.

The table holds the figures of docs/engine-gpu.md (2026-11-16, torch 2.11, random bfloat16 weights in Qwen3's shapes;
`python benchmarks/engine/gpu.py` and `python benchmarks/train/gpu.py`). Rows marked `fit` determine the efficiencies;
all others are predicted (`held_out`). Five numbers are fitted to the decode steps: launch,
weights, FLOP/s, KV and sampling; two to training (FLOP/s, and what moves bytes); one to prefill; one or two to
publishing.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

from benchmarks.engine.calibrate_gpu import DECODE_CONTEXT, log_normal
from windfall import step_time
from windfall.plan.model.cost_model import Efficiency, decode_service, elementwise_s, optimizer_s
from windfall.plan.model.devices import TABLE
from windfall.plan.model.workload import MODELS, VALUE_BYTES, kv_bytes
from windfall.sim.machines.decode import Decode, DecodeRow
from windfall.step_time import StepPoint, StepTime, non_negative
from windfall.trainer.ranks.rank_budget import ModelShape
from windfall.trainer.ranks.state_layout import STATE_BYTES

H200 = TABLE["H200"]
SMALL, LARGE = MODELS["Qwen3-0.6B"], MODELS["Qwen3-8B"]
HALF = replace(LARGE, layers=16)
"""The 8B shape with 16 layers, whose training was measured."""


class Row(NamedTuple):
    part: Literal["decode", "rollout", "group", "prefill", "train", "publish"]
    model: str
    shape: ModelShape
    size: int
    """Batch of a decode step, requests of a rollout, tokens of a training batch."""
    value: float
    """Measured: seconds of a decode step or of publishing; otherwise tokens per second."""
    fit: bool = False


DECODE_MS = {
    "0.6B": ((1, 1.33), (16, 1.34), (64, 1.73), (256, 3.55), (512, 5.80)),
    "8B": ((1, 4.69), (16, 4.82), (64, 5.47), (256, 10.30), (512, 18.35)),
}
FITTED_BATCHES = (1, 64, 512)
ROLLOUT = {
    "0.6B": ((64, 38_972), (256, 68_659), (1024, 87_592)),
    "8B": ((64, 10_719), (256, 19_496), (1024, 21_533)),
}
SHAPES = {"0.6B": SMALL, "8B": LARGE, "8B, 16 layers": HALF}
TABLE_ROWS: tuple[Row, ...] = (
    *(
        Row("decode", m, SHAPES[m], batch, ms / 1e3, batch in FITTED_BATCHES)
        for m, rows in DECODE_MS.items() for batch, ms in rows
    ),
    *(Row("rollout", m, SHAPES[m], n, rate) for m, rows in ROLLOUT.items() for n, rate in rows),
    Row("group", "0.6B", SMALL, 64, 32_946), Row("group", "8B", LARGE, 64, 12_803),
    Row("prefill", "0.6B", SMALL, 65_536, 465_527), Row("prefill", "8B", LARGE, 65_536, 44_048, True),
    Row("train", "0.6B", SMALL, 8192, 92_646), Row("train", "0.6B", SMALL, 65_536, 109_018, True),
    Row("train", "8B, 16 layers", HALF, 8192, 21_731), Row("train", "8B, 16 layers", HALF, 32_768, 24_885, True),
    Row("publish", "0.6B", SMALL, 0, 0.122), Row("publish", "8B", LARGE, 0, 0.900, True),
)  # fmt: skip
ATTENTION_CONTEXT = 512.0
"""Mean context of a token in the training and prefill cases: half of 1,024."""


def matmul_flops(shape: ModelShape) -> float:
    """FLOP of one token in one forward pass, attention over the cases' context included."""
    return 2 * shape.parameters + 4 * shape.layers * shape.heads * shape.head * ATTENTION_CONTEXT


def fit(rows: Sequence[Row] = TABLE_ROWS) -> Efficiency:
    """The efficiencies that describe these rows."""
    e = _fit_decode([r for r in rows if r.part == "decode"])
    trained = [
        (matmul_flops(r.shape) / H200.flops, r.shape.layers * r.shape.hidden / H200.flops, _training_s(r, e) / 3)
        for r in rows if r.part == "train"
    ]  # fmt: skip
    table = np.array(trained)
    table /= table[:, -1:]
    compute, elementwise = non_negative(table.T @ table)
    e = replace(e, train=1 / max(compute, 1.0), elementwise=elementwise)
    shares = [r.value * matmul_flops(r.shape) / H200.flops for r in rows if r.part == "prefill"]
    published = [StepPoint(VALUE_BYTES * r.shape.parameters, r.value) for r in rows if r.part == "publish"]
    time = step_time.fit(published, 1e-15)
    return replace(e, prefill=statistics.mean(shares), publish_s=time.fixed_s, publish_bytes_per_s=1 / time.each_s)


def _training_s(row: Row, e: Efficiency) -> float:
    """Measured seconds per token without the optimizer's."""
    return 1 / row.value - optimizer_s(STATE_BYTES * row.shape.parameters, H200.bandwidth, e) / row.size


def _fit_decode(rows: list[Row]) -> Efficiency:
    """Whether a step is bound by reading weights or by computing changes with the fit, so the two are repeated until
    they agree."""
    e = Efficiency()
    for _ in range(20):
        table = np.array([[*_columns(r, e), r.value] for r in rows])
        table /= table[:, -1:]
        launch, weights, compute, kv, sample = non_negative(table.T @ table)
        new = replace(
            e, launch_s=launch, weights=1 / max(weights, 1.0), decode=1 / max(compute, 1.0), kv=1 / max(kv, 1.0),
            sample_s=sample,
        )  # fmt: skip
        if new == e:
            break
        e = new
    return e


def _columns(row: Row, e: Efficiency) -> tuple[float, float, float, float, float]:
    weights_s = VALUE_BYTES * row.shape.parameters / H200.bandwidth
    compute_s = row.size * 2 * row.shape.parameters / H200.flops
    by_weights = weights_s / e.weights >= compute_s / e.decode
    kv_s = row.size * DECODE_CONTEXT * kv_bytes(row.shape) / H200.bandwidth
    return row.shape.layers, weights_s * by_weights, compute_s * (not by_weights), kv_s, row.size


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    row: Row
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the predicted speed; positive: too fast."""
        ratio = self.predicted / self.row.value - 1
        return -ratio / (1 + ratio) if self.row.part in ("decode", "publish") else ratio


def predict(row: Row, e: Efficiency) -> Prediction:
    service = decode_service(row.shape, H200, 1, e)
    match row.part:
        case "decode":
            value = service.step_s(row.size, row.size * DECODE_CONTEXT)
        case "rollout":
            value = _rollout(service, [256] * row.size, row.size, 128)
        case "group":
            value = _rollout(service, log_normal(8 * row.size, 600, 2048), row.size, 512)
        case "prefill":
            value = e.prefill * H200.flops / matmul_flops(row.shape)
        case "train":
            token_s = 3 * (matmul_flops(row.shape) / (H200.flops * e.train) + elementwise_s(row.shape, H200, e))
            update_s = optimizer_s(STATE_BYTES * row.shape.parameters, H200.bandwidth, e)
            value = 1 / (token_s + update_s / row.size)
        case "publish":
            value = e.publish_s + VALUE_BYTES * row.shape.parameters / e.publish_bytes_per_s
    return Prediction(row=row, predicted=value)


def _rollout(service: StepTime, lengths: Sequence[int], prompts: int, prompt: int) -> float:
    decode = Decode(service, 1)
    for n, length in enumerate(lengths):
        decode.add(
            DecodeRow(handle=n, seed=n, id_token=n, prompt=prompt, generated=0, length=length, cut=False, sent=0), 0
        )
    decode.prefill = prompts * prompt
    return sum(lengths) / decode.seconds(max(lengths))


class HeldOut(NamedTuple):
    mean: float
    worst: float
    predictions: tuple[Prediction, ...]

    def by_part(self) -> dict[str, float]:
        """Mean absolute error of each part."""
        parts = dict.fromkeys(p.row.part for p in self.predictions)
        return {x: statistics.mean(abs(p.error) for p in self.predictions if p.row.part == x) for x in parts}


def held_out(rows: Sequence[Row] = TABLE_ROWS) -> HeldOut:
    """Fit to the rows marked `fit`: mean and worst absolute error on the others."""
    e = fit([r for r in rows if r.fit])
    predictions = tuple(predict(r, e) for r in rows if not r.fit)
    errors = [abs(p.error) for p in predictions]
    return HeldOut(statistics.mean(errors), max(errors, default=math.nan), predictions)


def main() -> None:
    print(fit())
    done = held_out()
    print(f"held-out: {len(done.predictions)} figures, mean {done.mean:.1%}, worst {done.worst:.1%}")
    for part, error in done.by_part().items():
        print(f"  {part:8} {error:.1%}")
    for p in done.predictions:
        print(
            f"  {p.row.part:8} {p.row.model:14} {p.row.size:6} {p.row.value:12.5g} {p.predicted:12.5g} {p.error:+.1%}"
        )


if __name__ == "__main__":
    main()
