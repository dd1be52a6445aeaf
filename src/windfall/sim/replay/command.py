"""`windfall sim --replay RUN`: simulates a recorded run from its own log and prints predicted next to measured figures.

By default, service times are fitted to the first half of the steps, and the figures cover the second half. All that the
simulation knows about the second half is the lengths of its responses and when workers joined and left. With `--fit
all`, it is fitted to the steps that it is compared with. That is not a prediction: it shows what the formulas cannot
express.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from windfall.errors import WindfallError, nearest
from windfall.events.log import Event, read
from windfall.sim.calibrate import event_log
from windfall.sim.core import run
from windfall.sim.replay import recorded_scenario
from windfall.sim.replay.fleet import ReplayedFleet, fleet_events
from windfall.sim.replay.log import Record, record
from windfall.sim.replay.recorded_scenario import FITS, Fit, Fitted
from windfall.sim.report import figures
from windfall.sim.report.compare import output_folder
from windfall.sim.report.figures import Figures
from windfall.types import LOCAL

CONFIDENCE = 0.9
"""Confidence level of the prediction interval."""
RATE_FIGURES = ("tok_per_s", "step_mean_s", "tok_per_usd")
"""Figures whose relative error is that of the mean step time."""
DRIFT = 0.03
"""A relative change of the machines' speed in the held-out steps is reported if it is at least this large."""
SHARE_FIGURES = ("trainer_idle", "workers_idle", "workers_lost", "again")
"""Figures whose error is a difference in percentage points."""
LABELS = {
    "tok_per_s": "tokens/s", "step_mean_s": "step mean, s", "step_spread_s": "step std. dev., s",
    "tok_per_usd": "tokens/$", "trainer_idle": "trainer idle", "workers_there": "workers, mean",
    "workers_idle": "workers idle", "workers_lost": "worker overhead", "killed": "workers killed",
    "moved": "responses moved", "again": "tokens repeated",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    record: Record
    fit: Fit
    fitted: Fitted
    predicted: Figures
    measured: Figures
    fitted_to: list[tuple[float, float]]
    """Seconds of every fitted step in the simulation and in the run."""

    def rows(self) -> dict[str, tuple[float, float, float | None]]:
        """Predicted value, measured value, error. The error of a share is a difference; other errors are relative."""
        out = {}
        for name in LABELS:
            p, m = float(getattr(self.predicted, name)), float(getattr(self.measured, name))
            out[name] = (p, m, p - m if name in SHARE_FIGURES else p / m - 1 if m else None)
        return out

    @property
    def step_error(self) -> float:
        """Error of single fitted steps: root mean square of the logarithm of measured over predicted time."""
        return math.sqrt(statistics.mean(math.log(m / p) ** 2 for p, m in self.fitted_to))

    @property
    def error_bound(self) -> float:
        """Largest relative error of the predicted mean step, at the level CONFIDENCE.

        It is the prediction interval of one further step, by Student's t. Averaging over more steps does not make it
        smaller: what slows machines down (other programs, a hot day) lasts for many steps, so the errors of steps are
        not independent.
        """
        n = len(self.fitted_to)
        return math.expm1(student(CONFIDENCE, n - 1) * self.step_error * math.sqrt(1 + 1 / n))


def student(level: float, freedom: int) -> float:
    """Two-sided quantile of Student's t, by its expansion around the normal quantile.

    >>> [round(student(0.9, n), 2) for n in (3, 5, 10, 1000)]
    [2.31, 2.01, 1.81, 1.65]
    """
    z = statistics.NormalDist().inv_cdf((1 + level) / 2)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def replay(folder: Path, fit: Fit = "first-half", log: Path | None = None) -> Replayed:
    """Simulate the run in this folder. The simulated event log is written to `log`."""
    recorded = record(folder)
    fitting = recorded_scenario.fitted(recorded, fit)
    with tempfile.TemporaryDirectory() as temporary:
        events = _simulate(recorded, fitting, log or Path(temporary) / "replay.jsonl")
    granule = next(e["granule"] for e in events if e["name"] == "start")
    steps = zip(event_log.steps_of(events), recorded.steps[: fitting.steps], strict=False)
    return Replayed(
        record=recorded,
        fit=fit,
        fitted=fitting,
        predicted=figures.from_events(events, skip=fitting.skip, granule=granule),
        measured=figures.from_events(recorded.events, skip=fitting.skip),
        fitted_to=[(sim["s"], real["s"]) for sim, real in steps],
    )


def _simulate(recorded: Record, fitting: Fitted, log: Path) -> list[Event]:
    lengths = recorded_scenario.RecordedLengths(recorded)
    aligned_s = [recorded.start_s, *(e["t"] for e in recorded.steps[: fitting.skip])]
    fleets: list[ReplayedFleet] = []

    def disturb(simulation: run.Simulation) -> None:
        joins_and_incidents = fleet_events(recorded.workers, aligned_s)
        fleet = ReplayedFleet(simulation, joins_and_incidents, fitting.services, fitting.pulls, recorded.start_s)
        fleets.append(fleet)
        simulation.fleet = fleet  # pyright: ignore[reportAttributeAccessIssue]
        simulation.trainer.local = fleet.local
        simulation.trainer.on_start = lambda started_s: None  # its worker joins when it did in the run
        simulation.env = recorded_scenario.RecordedEnv(recorded, fitting.reward_s)

    def on_event(event: Event) -> None:
        for fleet in fleets:
            fleet.on_event(event)
        if (event["kind"], event["name"]) == ("scalar", "eval"):
            lengths.next_eval()

    scenario = recorded_scenario.build_scenario(recorded, fitting, lengths)
    run.simulate(scenario, log, sink=on_event, disturb=disturb)
    return read(log)


def table(done: Replayed) -> list[str]:
    """The table as lines of text."""
    lines = [f"{'':18}{'predicted':>12}{'measured':>12}{'error':>14}   ({CONFIDENCE:.0%} interval)"]
    for name, (p, m, error) in done.rows().items():
        if name in SHARE_FIGURES:
            line = f"{LABELS[name]:18}{p:12.1%}{m:12.1%}{100 * (p - m):+7.1f} points"
        else:
            error_text = f"{error:+.1%}" if error is not None else "-"
            line = f"{LABELS[name]:18}{p:12,.4g}{m:12,.4g}{error_text:>14}"
            if name in RATE_FIGURES:
                line += f"   ({p / (1 + done.error_bound):,.4g} to {p * (1 + done.error_bound):,.4g})"
        lines.append(line)
    return lines


def notes(done: Replayed) -> list[str]:
    """What was fitted to which steps, and what the simulation leaves out."""
    f, count = done.fitted, len(done.record.steps)
    first = f"fitted to steps 1 to {f.steps}; figures of steps {f.skip + 1} to {count}"
    held = "held out" if f.skip >= f.steps else "which are also fitted: not a prediction"
    out = [
        f"{first}, {held}",
        f"confidence: the {len(done.fitted_to)} fitted steps are off by {done.step_error:.1%} each (root mean square); "
        f"if machines stay this steady, {CONFIDENCE:.0%} of predictions are off by at most {done.error_bound:.0%} "
        "(brackets)",
    ]
    kinds = {worker.kind for worker in done.record.workers}
    for kind, service in f.services.items():
        times = {k: v for k, v in asdict(service).items() if v and (kind in kinds or k in ("train_s", "update_s"))}
        text = ", ".join(f"{k} {v:.4g}" for k, v in times.items())
        out.append(f"{kind if kind in kinds else 'the trainer, without an engine'}: {text}")
    if f.skip >= f.steps:
        out += [f"{what} took {1 + off:.2f} times as long as in the fitted steps" for what, off in drift(done)]
    return [*out, *f.notes, *done.record.remarks]


def drift(done: Replayed) -> list[tuple[str, float]]:
    """How much slower the machines were in the held-out steps. No formula can predict this."""
    f, events, later = done.fitted, done.record.events, done.record.steps[done.fitted.skip :]
    trained = event_log.training(events, [e["step"] for e in later])
    points, now = event_log.speeds(later), event_log.services(later, trained)
    out = []
    for kind in sorted(set(now) & set(f.services)):
        batch = statistics.mean(p.batch for p in points[kind])
        out.append((f"steps of {kind}", now[kind].step_s(batch) / f.services[kind].step_s(batch) - 1))
    if trained is not None:
        out.append(("training", trained.train_s / f.services[LOCAL].train_s - 1))
    return [(what, off) for what, off in out if abs(off) >= DRIFT]


def to_json(done: Replayed, folder: Path) -> dict[str, Any]:
    """The result as a JSON object."""
    steps = zip(done.predicted.step_s, done.measured.step_s, strict=True)
    return {
        "run": str(folder),
        "fit": done.fit,
        "fitted_steps": [1, done.fitted.steps],
        "steps": [
            {"step": n, "predicted_s": p, "measured_s": m} for n, (p, m) in enumerate(steps, done.fitted.skip + 1)
        ],
        "sure": {
            "level": CONFIDENCE,
            "off": done.error_bound,
            "step_off": done.step_error,
            "steps": len(done.fitted_to),
        },
        "figures": {k: {"predicted": p, "measured": m, "error": e} for k, (p, m, e) in done.rows().items()},
        "services": {kind: asdict(service) for kind, service in done.fitted.services.items()},
        "pulls": asdict(done.fitted.pulls),
        "notes": notes(done),
    }


def main(folder: Path, *, fit: str, out: Path | None) -> None:
    if fit not in FITS:
        raise WindfallError(f"unknown fit {fit!r}", where="--fit", fix=nearest(fit, FITS))
    with output_folder(out) as written:
        done = replay(folder, fit, written / "replay.jsonl")
    print("\n".join([*table(done), "", *notes(done)]))
    if out is not None:
        (out / "replay.json").write_text(json.dumps(to_json(done, folder), indent=1) + "\n", encoding="utf-8")
        print(f"written: {out / 'replay.json'}, {out / 'replay.jsonl'}")
