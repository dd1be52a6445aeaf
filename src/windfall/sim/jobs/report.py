"""`windfall sim A.toml B.toml`: these jobs on the same machines, together and one after the other."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from windfall.errors import WindfallError
from windfall.events.log import Event
from windfall.recipe.sections import Recipe
from windfall.sim.jobs.together import Shared, SimJob, jobs_of, simulate
from windfall.sim.report import variants
from windfall.sim.report.compare import output_folder

LEGEND = (
    "busy: device seconds in which a job generated or trained, and their share of those paid for; alone: seconds of "
    "the job on all machines; one by one, together: when it ends; slowdown: together / alone; $ of a job: of its busy "
    "seconds"
)
WORTH = 1.02
"""Ratio below which together is as good as one after the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The results of one seed."""

    alone: dict[str, Shared]
    """By job, alone on all machines."""
    together: Shared

    def way(self, together: bool) -> dict[str, float]:
        """What all jobs took: together, or one after the other."""
        runs = [self.together] if together else list(self.alone.values())
        seconds, paid_s, usd = (sum(getattr(run, key) for run in runs) for key in ("seconds", "paid_s", "usd"))
        tokens = sum(run.real_tokens for run in runs)
        busy_s = sum(run.busy * run.paid_s for run in runs)
        return {
            "seconds": seconds, "tok_per_s": tokens / seconds, "busy": busy_s / max(1e-9, paid_s), "busy_s": busy_s,
            "usd": usd, "tok_per_usd": tokens / usd if usd else 0.0,
        }  # fmt: skip

    def job(self, name: str) -> dict[str, float]:
        """`after_s`: when it would end if the jobs ran one after the other, in the given order."""
        names = list(self.alone)
        alone_s, beside = self.alone[name].seconds, self.together.jobs[name]
        return {
            "alone_s": alone_s, "together_s": beside.end_s, "slowdown": beside.end_s / alone_s,
            "after_s": sum(self.alone[other].seconds for other in names[: names.index(name) + 1]),
            "used_s": beside.used_s, "usd": beside.usd,
        }  # fmt: skip


def answers(
    recipes: Sequence[tuple[str, Recipe]], seeds: int, folder: Path, slice_s: float, status: Any = None,
    *, shares: Sequence[float] = (), priorities: Sequence[int] = (),
) -> list[Answer]:  # fmt: skip
    """Simulate each job alone and all together, with every seed."""
    out: list[Answer] = []
    for n in range(seeds):
        seeded = [(file, variants.seeded(recipe, seeds)[n]) for file, recipe in recipes]
        jobs = jobs_of(seeded, shares, priorities)

        def progress(event: Event, n: int = n) -> None:
            if event["name"] == "step" and status is not None:
                status.update(f"seed {n}: step {event['step']}, {event['m']:,.0f} virtual s")

        def run(chosen: Sequence[SimJob], name: str) -> Shared:
            return simulate(chosen, folder / name, machines_of=jobs, slice_s=slice_s, sink=progress)  # noqa: B023

        alone = {job.name: run([job], f"alone-{n}") for job in jobs}
        out.append(Answer(alone=alone, together=run(jobs, f"together-{n}")))
    return out


def _means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.mean(row[key] for row in rows) for key in rows[0]}


def figures(found: Sequence[Answer]) -> dict[str, Any]:
    """Means over the seeds."""
    return {
        "one after the other": _means([answer.way(False) for answer in found]),
        "together": _means([answer.way(True) for answer in found]),
        "jobs": {name: _means([answer.job(name) for answer in found]) for name in found[0].alone},
    }


def table(values: dict[str, Any]) -> list[str]:
    lines = [f"{'':22}{'seconds':>12}{'tok/s':>12}{'busy':>8}{'busy s':>12}{'$':>12}{'tok/$':>12}"]
    for name in ("one after the other", "together"):
        v = values[name]
        money = f"{v['usd']:12,.2f}{v['tok_per_usd']:12,.0f}" if v["usd"] else f"{'-':>12}{'-':>12}"
        lines.append(
            f"{name:22}{v['seconds']:12,.4g}{v['tok_per_s']:12,.0f}{v['busy']:8.0%}{v['busy_s']:12,.4g}{money}"
        )
    lines.append("")
    lines.append(
        f"{'job':22}{'alone s':>12}{'one by one s':>14}{'together s':>12}{'slowdown':>10}{'busy s':>12}{'$':>12}"
    )
    for name, v in values["jobs"].items():
        usd = f"{v['usd']:12,.2f}" if v["usd"] else f"{'-':>12}"
        ends = f"{v['alone_s']:12,.4g}{v['after_s']:14,.4g}{v['together_s']:12,.4g}"
        lines.append(f"{name:22}{ends}{v['slowdown']:10.2f}{v['used_s']:12,.4g}{usd}")
    return lines


def verdict(values: dict[str, Any]) -> str:
    """The answer in one sentence."""
    after, together = values["one after the other"], values["together"]
    ratio, worst = after["seconds"] / together["seconds"], max(job["slowdown"] for job in values["jobs"].values())
    if ratio >= WORTH:
        return f"together: {ratio:.2f} times the speed of one after the other; worst slowdown of a job {worst:.2f}"
    said = f"{ratio:.2f} times the speed" if ratio < 1 / WORTH else "no faster"
    return f"one after the other: together is {said}, and the worst slowdown of a job is {worst:.2f}"


def per_job(text: str, option: str, jobs: int, kind: Callable[[str], Any]) -> list[Any]:
    """The values of an option that has one for each job, such as "2,1". Empty: the option was not given.

    >>> per_job("2,1", "--share", 2, float)
    [2.0, 1.0]
    """
    try:
        found = [kind(each) for each in text.split(",") if text]
    except ValueError:
        raise WindfallError(f"{text!r} are no numbers", where=option, fix="Give one for each recipe: 2,1.") from None
    if text and len(found) != jobs:
        raise WindfallError(f"{len(found)} values for {jobs} recipes", where=option, fix="Give one for each recipe.")
    return found


def main(
    recipes: Sequence[tuple[str, Recipe]], *, seeds: int, names: str, out: Path | None, slice_s: float,
    share: str = "", priority: str = "", as_json: bool = False,
) -> None:  # fmt: skip
    if variants.names(names) != ["windfall"]:
        fix = "Leave --compare out, or simulate one recipe at a time."
        raise WindfallError("several recipes are compared in one way only", where="--compare", fix=fix)
    began, shares = time.perf_counter(), per_job(share, "--share", len(recipes), float)
    if any(not 0 < each < math.inf for each in shares):
        raise WindfallError("a share must be above 0", where="--share", fix="Give one for each recipe: 2,1.")
    terms = {"shares": shares, "priorities": per_job(priority, "--priority", len(recipes), int)}
    with output_folder(out) as folder, Console(stderr=True).status("") as status:
        found = answers(recipes, seeds, folder, slice_s, status, **terms)
    values = figures(found)
    if as_json:
        print(json.dumps(values | {"verdict": verdict(values)}))
        return
    print("\n".join([*table(values), "", verdict(values)]))
    virtual_s = sum(run.seconds for answer in found for run in (*answer.alone.values(), answer.together))
    wall_s, plural = time.perf_counter() - began, "s" if seeds > 1 else ""
    print(f"{virtual_s:,.0f} virtual s in {wall_s:.1f} s, {seeds} seed{plural}. All steps count; {LEGEND}")
    if out is not None:
        path = out / "figures.json"
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        print(f"written: {path}")
