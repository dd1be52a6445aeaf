"""`windfall sim chaos`: trials of several seeds; what went wrong by kind, or the seed, the rule and the last events."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from pathlib import Path

from windfall.errors import WindfallError
from windfall.sim.chaos.faults import KINDS
from windfall.sim.chaos.trial import TrialResult, trial
from windfall.sim.report.compare import made


def main(*, seeds: int, seed: int, faults: int, out: Path | None = None) -> None:
    """Ends at the first rule that is broken. `out`: keep the event logs there."""
    began, done = time.perf_counter(), list[TrialResult]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = out or Path(scratch)
        made(folder)
        for n in range(seed, seed + seeds):
            done.append(trial(n, faults=faults, folder=folder))
            if done[-1].broken is not None:
                break
    print("\n".join(told(done)))
    print(f"{time.perf_counter() - began:.1f} s")
    last = done[-1]
    if last.broken is not None:
        print("\n".join(["the last events:", *last.last]))
        again = f"windfall sim chaos --seed {last.seed} --seeds 1 --faults {faults} --out chaos"
        raise WindfallError(f"seed {last.seed}: {last.broken}", where="windfall sim chaos", fix=f"Replay it: {again}")


def told(done: list[TrialResult]) -> list[str]:
    count = sum((o.faults for o in done), Counter[str]())
    rows = [f"{kind:14}{count[kind]:8,}" for kind in KINDS]
    return [
        *rows,
        f"{count.total():,} faults in {len(done)} runs of {sum(o.virtual_s for o in done):,.0f} virtual s: "
        f"{sum(o.steps for o in done):,} steps, {sum(o.controllers for o in done) - len(done):,} controllers and "
        f"{sum(o.trainers for o in done) - len(done):,} trainers lost; "
        f"{sum(o.looked for o in done):,} events, each rule checked after every one",
    ]
