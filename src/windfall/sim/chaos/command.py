"""`windfall sim chaos`: runs trials with several seeds. Prints the injected faults by kind and the verdict. If an
invariant is broken, prints the seed and the last events before that."""

from __future__ import annotations

import io
import time
from collections import Counter
from contextlib import redirect_stderr
from pathlib import Path

from windfall.errors import WindfallError
from windfall.sim.chaos.faults import KINDS
from windfall.sim.chaos.trial import TrialResult, trial
from windfall.sim.report.compare import output_folder


def main(*, seeds: int, seed: int, faults: int, out: Path | None = None) -> None:
    """Stop at the first broken invariant. `out`: folder for the event logs."""
    began, done = time.perf_counter(), list[TrialResult]()
    with output_folder(out) as folder, redirect_stderr(io.StringIO()):  # injected faults print their tracebacks
        for n in range(seed, seed + seeds):
            done.append(trial(n, faults=faults, folder=folder))
            if done[-1].broken is not None:
                break
    print("\n".join(summary(done)))
    last = done[-1]
    if last.broken is not None:
        print("\n".join(["the last events:", *last.last_events]))
        again = f"windfall sim chaos --seed {last.seed} --seeds 1 --faults {faults} --out chaos"
        raise WindfallError(f"seed {last.seed}: {last.broken}", where="windfall sim chaos", fix=f"Replay it: {again}")
    print(f"passed: no invariant was broken in {_count(len(done), 'run')} ({time.perf_counter() - began:.1f} s)")


def summary(done: list[TrialResult]) -> list[str]:
    count = sum((o.faults for o in done), Counter[str]())
    controllers, trainers = (sum(o.controllers for o in done) - len(done), sum(o.trainers for o in done) - len(done))
    return [
        *(f"{kind:14}{count[kind]:8,}" for kind in KINDS),
        f"{_count(count.total(), 'fault')} in {_count(len(done), 'run')} of {sum(o.virtual_s for o in done):,.0f} "
        f"virtual s: {_count(sum(o.steps for o in done), 'step')}, {_count(controllers, 'controller')} and "
        f"{_count(trainers, 'trainer')} lost; {_count(sum(o.checks for o in done), 'callback')}, with all invariants "
        "checked after each",
    ]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
