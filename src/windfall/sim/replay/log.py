"""Reads the folder of a run into a record: everything that is needed to simulate the run again. Pure except for reading
files.

A run that died can be replayed like one that finished, because only its completed steps count. Times are wall-clock
times, which all processes of a run share. A worker that became silent counts as frozen since its last message. A lost
worker counts as killed at the moment when the controller noticed the loss.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from windfall.controller.cost import prices
from windfall.errors import WindfallError
from windfall.events.log import Event, read
from windfall.recipe.file import load_recipe
from windfall.recipe.sections import Recipe
from windfall.sim.calibrate.event_log import steps_of
from windfall.types import LOCAL, Lease

MIN_STEPS = 2
"""Minimum number of completed steps for a comparison."""
RUN_IS_OVER = "the run is over"
"""Part of the reason in `worker_left` events at the end of a run."""
INCIDENTS = {
    "worker_suspect": "frozen", "worker_well": "thawed", "worker_warned": "warned", "worker_left": "drained",
    "worker_lost": "killed",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """Something that happened to a worker."""

    at_s: float
    what: str
    """One of the values of INCIDENTS."""
    left_s: float | None = None
    """Seconds of notice, if the worker was warned."""
    source: str = ""


@dataclass(kw_only=True, slots=True)
class RecordedWorker:
    """One worker from the moment it joined."""

    name: str
    lease: Lease
    joined_s: float
    age_s: float
    """Age of its process at that moment, in seconds."""
    ready_s: float = math.inf
    """Seconds from joining until it first held weights. inf: it never did."""
    slots: int = 1
    incidents: list[Incident] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The kind of worker, as in the log's `speeds`."""
        return LOCAL if self.name == LOCAL else prices.kind(self.lease)


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    recipe: Recipe
    events: Sequence[Event]
    start_s: float
    """When the first step began (wall clock, seconds)."""
    steps: Sequence[Event]
    workers: tuple[RecordedWorker, ...]
    lengths: dict[int, Sequence[int]]
    """Response lengths of each task."""
    replaced: frozenset[int]
    """Tasks whose group was replaced by dynamic sampling."""
    evals: tuple[Sequence[int], ...]
    """Response lengths of each evaluation."""
    micro_tokens: int
    remarks: tuple[str, ...]
    """Events of the run that are not simulated."""


def record(folder: Path) -> Record:
    """Read the record of the run in this folder."""
    log, recipe_file = folder / "events.jsonl", folder / "recipe.toml"
    fix = "Give the folder of a run, with events.jsonl and recipe.toml."
    for file in (log, recipe_file):
        if not file.is_file():
            raise WindfallError(f"no {file.name} in this folder", where=str(folder), fix=fix)
    recipe = load_recipe(recipe_file)
    try:
        return _record(recipe, read(log), str(folder))
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        what = f"the log lacks data that a simulation needs: {type(e).__name__}: {e}"
        raise WindfallError(what, where=str(log), fix="It may be from an older windfall. Run it again.") from e


def _record(recipe: Recipe, events: Sequence[Event], where: str) -> Record:
    steps = steps_of(events)
    if len(steps) < MIN_STEPS:
        fix = f"A replay needs at least {MIN_STEPS} steps, and a prediction needs more. Let the run continue."
        raise WindfallError(f"the run completed {len(steps)} steps", where=where, fix=fix)
    if "lengths" not in steps[0] or [e["step"] for e in steps] != list(range(1, len(steps) + 1)):
        what = "the log has no response lengths" if "lengths" not in steps[0] else "the log lacks steps"
        raise WindfallError(what, where=where, fix="It may be from an older windfall. Run it again.")
    began = next((e for e in events if e["name"] == "start"), {})
    if began.get("granule", 1) != 1:
        raise WindfallError("this run was simulated in granules", where=where, fix="Simulate it with sim.granule = 1.")
    lengths, first = {}, 0
    for e in steps:
        lengths |= dict(zip(e.get("tasks") or range(first, first + e["drawn"]), e["lengths"], strict=True))
        first += e["drawn"]
    start_s = next((e["t"] for e in events if e["name"] == "trainer_ready"), began.get("t", steps[0]["t"]))
    return Record(
        recipe=recipe,
        events=events,
        start_s=start_s,
        steps=steps,
        workers=recorded_workers(events, recipe.fleet.suspect_s),
        lengths=lengths,
        replaced=frozenset(task for e in steps for task in e["replaced"]),
        evals=tuple(e["lengths"] for e in events if (e["kind"], e["name"]) == ("scalar", "eval")),
        micro_tokens=recipe.train.micro_tokens or began.get("micro_tokens", 0),
        remarks=tuple(_remarks(events)),
    )


def _remarks(events: Sequence[Event]) -> list[str]:
    counts = Counter(e["name"] for e in events)
    texts = {"trainer_lost": "the trainer was lost", "resumed": "the run was resumed"}
    return [
        f"{text} {counts[name]} times; a replay does not simulate this" for name, text in texts.items() if counts[name]
    ]


def recorded_workers(events: Sequence[Event], suspect_s: float) -> tuple[RecordedWorker, ...]:
    """All workers in the order of joining, with their incidents. A worker that is present at the end of the log stays.
    If a worker joins again under the same id, its link was lost because the controller was killed."""
    joined: list[RecordedWorker] = []
    present: dict[str, RecordedWorker] = {}
    for e in events:
        id, name, at_s = e.get("worker", ""), e["name"], e["t"]
        if name == "worker_joined":
            if id in present:
                present[id].incidents.append(Incident(at_s=at_s, what="killed"))
            lease = Lease(kind=e["lease"], device=e["device"], price_usd_per_h=e["usd_per_h"] or 0.0)
            present[id] = RecordedWorker(name=id.partition("#")[0], lease=lease, joined_s=at_s, age_s=e["age_s"])
            joined.append(present[id])
        elif id in present:
            worker = present[id]
            if name == "worker_ready" and worker.ready_s == math.inf:
                worker.ready_s, worker.slots = at_s - worker.joined_s, e["slots"]
            elif name in INCIDENTS and not (name == "worker_left" and RUN_IS_OVER in e["why"]):
                if name == "worker_suspect":  # it became silent earlier than the controller noticed
                    at_s = max(worker.joined_s, at_s - suspect_s)
                notice = {"left_s": e["left_s"], "source": e["source"]} if name == "worker_warned" else {}
                worker.incidents.append(Incident(at_s=at_s, what=INCIDENTS[name], **notice))
            if name in ("worker_lost", "worker_left"):
                del present[id]
    return tuple(joined)
