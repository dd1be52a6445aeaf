"""`windfall sim --replay RUN`: a run that was, simulated from its own log, and both side by side.

By default the machines' formulas are fitted to the first half of the steps, and the figures are of the second half, of
which the simulation knows nothing but the lengths of responses and when workers came and went. With `all` it is fitted
to the steps that it is compared with: that is no prediction, and shows what the formulas cannot hold.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from windfall.errors import WindfallError, nearest
from windfall.events.log import Event, read
from windfall.sim.calibrate import event_log
from windfall.sim.core import run
from windfall.sim.replay.fleet import JITTER, ReplayedFleet, diary
from windfall.sim.replay.log import Record, record
from windfall.sim.replay.recorded_scenario import FITS, Fit, Fitted, Recorded, RecordedEnv, fitted, world
from windfall.sim.report import figures
from windfall.sim.report.compare import made
from windfall.sim.report.figures import Figures
from windfall.types import LOCAL

SURE = 0.9
RATES = ("tok_per_s", "step_mean_s", "tok_per_usd")
"""Figures that are off as much as a mean step is."""
DRIFT = 0.03
"""What machines do differently in the steps held out is worth a word from here on."""
SHARES = ("trainer_idle", "workers_idle", "workers_lost", "again")
"""Of these an error is a difference, in percentage points."""
SAY = {
    "tok_per_s": "tokens/s", "step_mean_s": "step, mean s", "step_spread_s": "step, spread s",
    "tok_per_usd": "tokens/$", "trainer_idle": "trainer idle", "workers_there": "workers there",
    "workers_idle": "workers idle", "workers_lost": "workers lost", "killed": "killed", "moved": "moved",
    "again": "made again",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    record: Record
    fit: Fit
    fitted: Fitted
    predicted: Figures
    measured: Figures
    fitted_to: tuple[tuple[float, float], ...]
    """Of every step fitted to: how long it took in the simulation, and how long it had taken."""
    others: tuple[Figures, ...] = ()
    """Predicted, too, with workers that are a little faster or slower than fitted: how much hangs on little."""

    def rows(self) -> dict[str, tuple[float, float, float | None]]:
        """Predicted, measured, and the error: of shares the difference, else a share of what was measured."""
        out = {}
        for name in SAY:
            p, m = float(getattr(self.predicted, name)), float(getattr(self.measured, name))
            out[name] = (p, m, p - m if name in SHARES else p / m - 1 if m else None)
        return out

    @property
    def step_off(self) -> float:
        """How far off single steps were of those fitted to: root mean square of the logarithm of the ratio."""
        return math.sqrt(statistics.mean(math.log(m / p) ** 2 for p, m in self.fitted_to))

    @property
    def sure(self) -> float:
        """The prediction of a mean step should be off by no more than this share, SURE of the time.

        It is the prediction interval of one further step, by Student's t. More steps make a mean no surer here: what
        slows machines down (other programs, a hot day) lasts for many steps, so that their errors are not independent.
        """
        n = len(self.fitted_to)
        return math.expm1(student(SURE, n - 1) * self.step_off * math.sqrt(1 + 1 / n))


def student(level: float, freedom: int) -> float:
    """Two-sided quantile of Student's t, by its expansion around the normal one.

    >>> [round(student(0.9, n), 2) for n in (3, 5, 10, 1000)]
    [2.31, 2.01, 1.81, 1.65]
    """
    z = statistics.NormalDist().inv_cdf((1 + level) / 2)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def replay(folder: Path, fit: Fit = "first-half", log: Path | None = None, seeds: int = 1) -> Replayed:
    """Simulates the run of this folder. The simulated event log is left at `log`. With several `seeds`, all but the
    first have workers that are a little faster or slower."""
    was = record(folder)
    found = fitted(was, fit)
    predicted, fitted_to = [], list[tuple[float, float]]()
    with tempfile.TemporaryDirectory() as place:
        for seed in range(seeds):
            file = log if log is not None and seed == 0 else Path(place) / "replay.jsonl"
            events = _simulate(was, found, file, seed)
            granule = next(e["granule"] for e in events if e["name"] == "start")
            steps = zip(event_log.steps_of(events), was.steps[: found.steps], strict=False)
            fitted_to = fitted_to or [(sim["s"], real["s"]) for sim, real in steps]
            predicted.append(figures.of(events, skip=found.skip, granule=granule))
    return Replayed(
        record=was, fit=fit, fitted=found, predicted=predicted[0], others=tuple(predicted[1:]),
        fitted_to=tuple(fitted_to),
        measured=figures.of(was.events, skip=found.skip),
    )  # fmt: skip


def _simulate(was: Record, found: Fitted, log: Path, seed: int = 0) -> list[Event]:
    lengths = Recorded(was)
    set_s = [was.start_s, *(e["t"] for e in was.steps[: found.skip])]
    fleets: list[ReplayedFleet] = []

    def disturb(simulation: run.Simulation) -> None:
        fleet = ReplayedFleet(simulation, diary(was.lives, set_s), found.services, found.pulls, was.start_s, seed)
        fleets.append(fleet)
        simulation.machines = fleet  # pyright: ignore[reportAttributeAccessIssue]
        simulation.learner.local = fleet.local
        simulation.learner.started = lambda started_s: None  # its worker joins when it did, as the others
        simulation.env = RecordedEnv(was, found.reward_s)

    def heard(event: Event) -> None:
        for fleet in fleets:
            fleet.heard(event)
        if (event["kind"], event["name"]) == ("scalar", "eval"):
            lengths.evaluated()

    run.simulate(world(was, found, lengths), log, sink=heard, disturb=disturb)
    return read(log)


def table(done: Replayed) -> list[str]:
    """Lines of text."""
    many = (done.predicted, *done.others) if done.others else ()
    lines = [f"{'':16}{'predicted':>12}{'measured':>12}{'error':>14}" + (f"   of {len(many)} seeds" if many else "")]
    for name, (p, m, error) in done.rows().items():
        values = [float(getattr(f, name)) for f in many]
        if name in SHARES:
            line = f"{SAY[name]:16}{p:12.1%}{m:12.1%}{100 * (p - m):+7.1f} points"
            line += f"   {min(values):.1%} to {max(values):.1%}" if values else ""
        else:
            said = f"{error:+.1%}" if error is not None else "-"
            line = f"{SAY[name]:16}{p:12,.4g}{m:12,.4g}{said:>14}"
            line += f"   {min(values):,.4g} to {max(values):,.4g}" if values else ""
            line += f"   ({p / (1 + done.sure):,.4g} to {p * (1 + done.sure):,.4g})" if name in RATES else ""
        lines.append(line)
    return lines


def notes(done: Replayed) -> list[str]:
    """What was fitted, to what, and what the simulation does not know."""
    f, count = done.fitted, len(done.record.steps)
    first = f"fitted to steps 1 to {f.steps}; figures of steps {f.skip + 1} to {count}"
    held = "held out" if f.skip >= f.steps else "fitted to as well: not a prediction"
    out = [
        f"{first}, {held}",
        f"how sure: the {len(done.fitted_to)} steps fitted to are off by {done.step_off:.1%} each (root mean square); "
        f"if machines stay as steady as that, {SURE:.0%} of predictions are off by {done.sure:.0%} at most (brackets)",
    ]
    kinds = {life.kind for life in done.record.lives}
    for kind, service in f.services.items():
        times = {k: v for k, v in asdict(service).items() if v and (kind in kinds or k in ("train_s", "update_s"))}
        said = ", ".join(f"{k} {v:.4g}" for k, v in times.items())
        out.append(f"{kind if kind in kinds else 'the trainer, without an engine'}: {said}")
    if done.others:
        out.append(
            f"of {len(done.others) + 1} seeds: workers up to {JITTER:.0%} faster or slower than fitted, at random"
        )
    if f.skip >= f.steps:
        out += [f"{what} took {1 + off:.2f} times as long as in the steps fitted to" for what, off in drift(done)]
    return [*out, *f.notes, *done.record.remarks]


def drift(done: Replayed) -> list[tuple[str, float]]:
    """How much slower the machines themselves were in the steps that were held out: no formula can know that."""
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


def said(done: Replayed, folder: Path) -> dict[str, Any]:
    """For JSON."""
    steps = zip(done.predicted.step_s, done.measured.step_s, strict=True)
    return {
        "run": str(folder), "fit": done.fit, "fitted_steps": [1, done.fitted.steps],
        "steps": [
            {"step": n, "predicted_s": p, "measured_s": m} for n, (p, m) in enumerate(steps, done.fitted.skip + 1)
        ],
        "sure": {"level": SURE, "off": done.sure, "step_off": done.step_off, "steps": len(done.fitted_to)},
        "figures": {k: {"predicted": p, "measured": m, "error": e} for k, (p, m, e) in done.rows().items()},
        "other_seeds": [{k: float(getattr(f, k)) for k in SAY} for f in done.others],
        "services": {kind: asdict(service) for kind, service in done.fitted.services.items()},
        "pulls": asdict(done.fitted.pulls),
        "notes": notes(done),
    }  # fmt: skip


def main(folder: Path, *, fit: str, out: Path | None, seeds: int = 1) -> None:
    if fit not in FITS:
        raise WindfallError(f"no fit {fit!r}", where="--fit", fix=nearest(fit, FITS))
    if out is not None:
        made(out)
    done = replay(folder, fit, out / "replay.jsonl" if out is not None else None, seeds)
    print("\n".join([*table(done), "", *notes(done)]))
    if out is not None:
        (out / "replay.json").write_text(json.dumps(said(done, folder), indent=1) + "\n", encoding="utf-8")
        print(f"written: {out / 'replay.json'}, {out / 'replay.jsonl'}")


def beside(rows: Sequence[tuple[str, Replayed]]) -> list[str]:
    """Several runs, a line each."""
    names = ("tok_per_s", "step_mean_s", "tok_per_usd")
    head = "".join(f"{SAY[n]:>32}" for n in names) + "".join(f"{SAY[n]:>20}" for n in ("trainer_idle", "workers_idle"))
    lines = [f"{'':20}{head}", f"{'':20}" + f"{'predicted, measured':>32}" * 3 + f"{'pred., measured':>20}" * 2]
    for name, done in rows:
        found = done.rows()
        cells = [f"{p:,.4g} {m:,.4g} ({e:+.1%})" for p, m, e in (found[n] for n in names) if e is not None]
        cells = [f"{c:>32}" for c in cells]
        cells += [f"{f'{found[n][0]:.0%} {found[n][1]:.0%}':>20}" for n in ("trainer_idle", "workers_idle")]
        lines.append(f"{name:20}" + "".join(cells))
    return lines
