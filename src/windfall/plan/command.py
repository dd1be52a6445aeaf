"""`windfall plan`: reads its inputs, prints the plans and writes the recipe. All reading of files is here."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from windfall.errors import WindfallError, nearest
from windfall.plan import choose, report
from windfall.plan.model import cluster as clusters
from windfall.plan.model import devices
from windfall.plan.model.cluster import Cluster, ClusterMachine, EngineName, Links
from windfall.plan.model.cost_model import Efficiency
from windfall.plan.model.devices import Gpu, Terms
from windfall.plan.run import recipe, run_log
from windfall.plan.search.plan import LOSSES_PER_H, PlanRequest, SpotMarket
from windfall.providers import trace
from windfall.recipe.file import dump_recipe, load_recipe
from windfall.run_folder import named

OBJECTIVES = ("throughput", "cost", "deadline")
BUDGET_MACHINE = 8
"""GPUs of a machine if only a budget is given."""
MOST_PER_KIND = 128
"""GPUs of one kind that a budget may buy."""


def main(
    what: str,
    *,
    cluster: Path | None,
    gpus: str,
    budget: str,
    objective: str,
    deadline: float,
    staleness: int | None,
    spot: Path | None,
    measured_in: Path | None,
    top: int,
    simulate: bool,
    write: Path | None,
    overrides: Sequence[str] = (),
    as_json: bool = False,
) -> None:
    _check_objective(objective, deadline)
    if write is not None:
        _check_target(write, what)
    is_recipe = what.endswith(".toml")
    base = load_recipe(Path(what), list(overrides)) if is_recipe else recipe.of_model(what, overrides)
    work = recipe.run_workload(base)
    if staleness is not None:
        work = replace(work, staleness=staleness)
    usd = _budget(budget) if budget else math.inf
    engine = "vllm" if base.engine.name == "vllm" else "windfall"
    made = _cluster(cluster, gpus, usd, spot is not None, engine)
    if measured_in is not None and base.policies:
        fix = "Leave it out; [[device]] of a cluster file can have measured times (docs/plan.md)."
        raise WindfallError("this is for runs with one policy", where="--measured", fix=fix)
    if measured_in is not None:
        seen = run_log.speeds(run_log.events_of(named(measured_in)), str(measured_in))
        work = run_log.with_lengths(work, seen.lengths, seen.prompt_tokens)
        made = run_log.with_speeds(made, seen, work)
    request = PlanRequest(
        cluster=made,
        work=work,
        efficiency=Efficiency(),
        objective=objective,  # pyright: ignore[reportArgumentType]
        budget_usd_per_h=usd,
        deadline_h=deadline,
        spot=_spot(spot, base.sim.boot_s),
        top=top,
    )
    found = choose.best(request, base, simulate=simulate)
    if as_json:
        commands = list(recipe.commands(found.ranked[0].plan, base.model.path))
        print(json.dumps(report.fields(base.model.path, request, found) | {"commands": commands}, indent=1))
    else:
        print("\n".join(report.report(base.model.path, request, found)))
        for line in found.refused:
            print(f"refused: {line}")
    if write is not None:
        plan, figures = found.ranked[0]
        text = dump_recipe(recipe.write(plan, request, base, figures))
        _write(write, text if is_recipe else recipe.with_notes(text))
        if as_json:
            return
        print(f"\nwritten: {write}; start it with: windfall train {write}")
        for line in recipe.commands(plan, base.model.path):
            print(f"  then on {line}")


def check(run: Path, *, as_json: bool = False) -> None:
    """`windfall plan --check RUN`: what was planned beside what was measured."""
    run = named(run)
    planned, events = run_log.planned_run(run)
    parts = run_log.check(planned, events, str(run))
    if as_json:
        print(json.dumps([part._asdict() for part in parts], indent=1))
        return
    print("\n".join([run_log.HEADER, *map(str, parts)]))


def _check_objective(objective: str, deadline_h: float) -> None:
    if objective not in OBJECTIVES:
        raise WindfallError(f"unknown value {objective!r}", where="--objective", fix=nearest(objective, OBJECTIVES))
    if deadline_h > 0 and objective != "deadline":
        fix = "Add --objective deadline, or leave --deadline out."
        raise WindfallError(f"the objective {objective} has no deadline", where="--deadline", fix=fix)
    if objective == "deadline" and deadline_h <= 0:
        raise WindfallError("the objective needs a time", where="--deadline", fix="Give the hours: --deadline 12.")


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as e:
        raise WindfallError(f"cannot write: {e.strerror}", where=str(file), fix="Give another file.") from e


def _cluster(file: Path | None, gpus: str, usd_per_h: float, spot: bool, engine: EngineName) -> Cluster:
    """The machines of a file or of a text, or all that the budget could buy."""
    if file is not None and gpus:
        raise WindfallError("--cluster and --gpus both describe the GPUs", where="windfall plan", fix="Give one.")
    if file is not None:
        return clusters.parse(_toml(file), str(file), engine)
    if gpus:
        return clusters.from_text(gpus, engine)
    if math.isfinite(usd_per_h):
        return market(usd_per_h, spot)
    fix = "Give --cluster FILE, --gpus '8xH100 + 6x2xH100:spot', or --budget 90/h."
    raise WindfallError("nothing says which GPUs there are", where="windfall plan", fix=fix)


def _check_target(write: Path, recipe: str) -> None:
    """Refuse before the search what could not be written after it."""
    if write.is_dir() or not write.parent.is_dir():
        what = "this is a folder" if write.is_dir() else "no such folder"
        raise WindfallError(what, where=f"--write {write}", fix="Give a file in a folder that exists.")
    if recipe.endswith(".toml") and write.exists() and Path(recipe).exists() and write.samefile(recipe):
        raise WindfallError("this is the recipe itself", where=f"--write {write}", fix="Give another file.")


def _toml(path: Path) -> Mapping[str, Any]:
    fix = "See docs/plan.md for an example."
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as e:
        raise WindfallError("no such cluster file", where=str(path), fix=fix) from e
    except OSError as e:
        raise WindfallError(f"cannot read it: {e.strerror}", where=str(path), fix=fix) from e
    except UnicodeDecodeError as e:
        raise WindfallError(f"not a cluster file in UTF-8: {e}", where=str(path), fix=fix) from e
    except tomllib.TOMLDecodeError as e:
        raise WindfallError(f"not valid TOML: {e}", where=str(path), fix="Correct the syntax there.") from e


def _budget(text: str) -> float:
    """
    >>> _budget("90/h"), _budget("$12.5")
    (90.0, 12.5)
    """
    found = re.fullmatch(r"\$?\s*(\d+(?:\.\d+)?)\s*(?:/\s*h)?", text.strip())
    if found is None or float(found[1]) <= 0:
        fix = "Give dollars per hour above 0, such as --budget 90/h."
        raise WindfallError(f"{text!r} is not a budget", where="--budget", fix=fix)
    return float(found[1])


def market(usd_per_h: float, spot: bool) -> Cluster:
    """Everything that the budget could buy: machines of each type, reserved ones, and spot ones if wanted."""
    terms: tuple[Terms, ...] = ("reserved", "spot") if spot else ("reserved",)
    offers: list[tuple[float, Gpu, Terms]] = [
        (usd, gpu, lease)
        for gpu in map(devices.find, devices.TABLE)
        for lease in terms
        if gpu.spot_usd_per_h is not None
        and (usd := gpu.spot_usd_per_h if lease == "spot" else gpu.reserved_usd_per_h) is not None
    ]
    machines: list[ClusterMachine] = []
    for usd, gpu, lease in offers:
        count = min(MOST_PER_KIND, int(usd_per_h / usd))
        for n in range(math.ceil(count / BUDGET_MACHINE)):
            size = min(BUDGET_MACHINE, count - n * BUDGET_MACHINE)
            machines.append(ClusterMachine(name=f"m{len(machines)}", gpu=gpu, count=size, lease=lease))
    if not machines:
        what = f"${usd_per_h:.2f} per hour buys no GPU"
        what += f"; the cheapest costs ${min(usd for usd, _, _ in offers):.2f}"
        raise WindfallError(what, where="--budget", fix="Raise the budget.")
    return Cluster(machines=tuple(machines), links=Links())


def _spot(path: Path | None, boot_s: float) -> SpotMarket:
    if path is None:
        return SpotMarket(losses_per_h=LOSSES_PER_H, boot_s=boot_s, assumed=True)
    changes = trace.read(path)
    made = trace.summary(changes, max(1.0, changes[-1].at_s))
    availability = min(1.0, made.mean_up / max(1, made.max_up))
    return SpotMarket(availability=availability, losses_per_h=made.losses_per_node_hour, boot_s=boot_s)
