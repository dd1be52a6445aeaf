"""`windfall sim chaos`: runs trials of several seeds. Prints the injected faults by kind, or the seed that broke an
invariant with its last events."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from pathlib import Path

from windfall.errors import WindfallError
from windfall.sim.chaos.faults import KINDS
from windfall.sim.chaos.trial import TrialResult, trial
from windfall.sim.report.compare import ensure_folder


def main(*, seeds: int, seed: int, faults: int, out: Path | None = None) -> None:
    """Stop at the first broken invariant. `out`: folder that keeps the event logs."""
    began, done = time.perf_counter(), list[TrialResult]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = out or Path(scratch)
        ensure_folder(folder)
        for n in range(seed, seed + seeds):
            done.append(trial(n, faults=faults, folder=folder))
            if done[-1].broken is not None:
                break
    print("\n".join(summary(done)))
    print(f"{time.perf_counter() - began:.1f} s")
    last = done[-1]
    if last.broken is not None:
        print("\n".join(["the last events:", *last.last_events]))
        again = f"windfall sim chaos --seed {last.seed} --seeds 1 --faults {faults} --out chaos"
        raise WindfallError(f"seed {last.seed}: {last.broken}", where="windfall sim chaos", fix=f"Replay it: {again}")


def summary(done: list[TrialResult]) -> list[str]:
    count = sum((o.faults for o in done), Counter[str]())
    rows = [f"{kind:14}{count[kind]:8,}" for kind in KINDS]
    return [
        *rows,
        f"{count.total():,} faults in {len(done)} runs of {sum(o.virtual_s for o in done):,.0f} virtual s: "
        f"{sum(o.steps for o in done):,} steps, {sum(o.controllers for o in done) - len(done):,} controllers and "
        f"{sum(o.trainers for o in done) - len(done):,} trainers lost; "
        f"{sum(o.checks for o in done):,} callbacks, with all invariants checked after each",
    ]
