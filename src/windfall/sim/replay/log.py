"""What the folder of a run knows of that run: enough to simulate it again. Pure but for reading its files.

A run that died is as good as one that was finished: what counts are the steps that it completed. Times are those of the
wall clock, which the processes of a run share. A worker that was silent stood still from its last word on; one that was
lost is gone when the controller knew of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from windfall import config
from windfall.config import Recipe
from windfall.cost import prices
from windfall.errors import WindfallError
from windfall.events.log import Event, ForeignLines, read
from windfall.types import LOCAL, Lease

FEWEST = 2
"""Completed steps without which there is nothing to compare."""
OVER = "the run is over"


@dataclass(frozen=True, kw_only=True, slots=True)
class Deed:
    """Something that happened to a worker."""

    at_s: float
    what: str
    """frozen, thawed, warned, drained or killed."""
    left_s: float | None = None
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedWorker:
    """A worker from its joining on."""

    name: str
    lease: Lease
    joined_s: float
    age_s: float
    """Of its process then."""
    ready_s: float
    """From joining until it held the weights for the first time; inf: it never did."""
    slots: int
    deeds: tuple[Deed, ...] = ()

    @property
    def kind(self) -> str:
        """As in the log's `speeds`."""
        return LOCAL if self.name == LOCAL else prices.kind(self.lease)


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    recipe: Recipe
    events: Sequence[Event]
    start_s: float
    """When the loop of the run began."""
    steps: Sequence[Event]
    lives: tuple[RecordedWorker, ...]
    lengths: dict[int, Sequence[int]]
    """By task."""
    replaced: frozenset[int]
    evals: tuple[Sequence[int], ...]
    micro_tokens: int
    remarks: tuple[str, ...]
    """What happened that no simulation knows of."""


def record(folder: Path) -> Record:
    """Of the run in this folder."""
    log, said = folder / "events.jsonl", folder / "recipe.toml"
    fix = "Give the folder of a run: it has events.jsonl and recipe.toml."
    for file in (log, said):
        if not file.is_file():
            raise WindfallError(f"no {file.name} in it", where=str(folder), fix=fix)
    recipe, foreign = config.load(said), ForeignLines()
    try:
        found = _record(recipe, read(log, foreign=foreign), str(folder))
        skipped = (f"{foreign.lines} lines of its log are not windfall's and were skipped",) if foreign.lines else ()
        return replace(found, remarks=(*found.remarks, *skipped))
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        what = f"its log lacks what a simulation needs: {type(e).__name__}: {e}"
        raise WindfallError(what, where=str(log), fix="Was it written by an older windfall? Run it again.") from e


def _record(recipe: Recipe, events: Sequence[Event], where: str) -> Record:
    steps = [e for e in events if (e["kind"], e["name"]) == ("scalar", "step")]
    if len(steps) < FEWEST:
        fix = f"A replay needs at least {FEWEST}, a prediction more: let it run for longer."
        raise WindfallError(f"it completed {len(steps)} steps", where=where, fix=fix)
    if "lengths" not in steps[0] or [e["step"] for e in steps] != list(range(1, len(steps) + 1)):
        what = "its log has no lengths of responses" if "lengths" not in steps[0] else "its log lacks steps"
        raise WindfallError(what, where=where, fix="Was it written by an older windfall? Run it again.")
    began = next((e for e in events if e["name"] == "start"), {})
    if began.get("granule", 1) != 1:
        raise WindfallError("a simulated run in granules", where=where, fix="Simulate it with sim.granule = 1.")
    lengths, first = {}, 0
    for e in steps:
        lengths |= {first + n: row for n, row in enumerate(e["lengths"])}
        first += e["drawn"]
    start_s = next((e["t"] for e in events if e["name"] == "trainer_ready"), began.get("t", steps[0]["t"]))
    return Record(
        recipe=recipe, events=events, start_s=start_s, steps=steps, lives=lives(events, recipe.fleet.suspect_s),
        lengths=lengths, replaced=frozenset(task for e in steps for task in e["replaced"]),
        evals=tuple(e["lengths"] for e in events if (e["kind"], e["name"]) == ("scalar", "eval")),
        micro_tokens=recipe.train.micro_tokens or began.get("micro_tokens", 0), remarks=tuple(_remarks(events)),
    )  # fmt: skip


def _remarks(events: Sequence[Event]) -> list[str]:
    out = []
    for name, said in (("trainer_lost", "the trainer was lost"), ("resumed", "the run was resumed")):
        times = sum(e["name"] == name for e in events)
        if times:
            out.append(f"{said} {times} times: in a replay it never is")
    return out


@dataclass(slots=True)
class _Seen:
    id: str
    joined: Event
    ready: Event | None = None
    deeds: list[Deed] = field(default_factory=list)

    def life(self) -> RecordedWorker:
        e, ready = self.joined, self.ready
        lease = Lease(kind=e["lease"], device=e["device"], price_usd_per_h=e["usd_per_h"] or 0.0)
        return RecordedWorker(
            name=self.id.partition("#")[0], lease=lease, joined_s=e["t"], age_s=e["age_s"],
            ready_s=ready["t"] - e["t"] if ready else math.inf, slots=ready["slots"] if ready else 1,
            deeds=tuple(self.deeds),
        )  # fmt: skip


def lives(events: Sequence[Event], suspect_s: float) -> tuple[RecordedWorker, ...]:
    """Every worker that joined, in this order, and what became of it. One that is still there at the end stays; one
    that joins again under the same id does so because the controller was killed, and with it its link."""
    found: list[_Seen] = []
    here: dict[str, _Seen] = {}
    for e in events:
        if e["name"] == "worker_joined":
            if e["worker"] in here:
                here[e["worker"]].deeds.append(Deed(at_s=e["t"], what="killed"))
            here[e["worker"]] = _Seen(e["worker"], e)
            found.append(here[e["worker"]])
        elif e.get("worker") in here:
            _note(here[e["worker"]], e, suspect_s)
            if e["name"] in ("worker_lost", "worker_left"):
                del here[e["worker"]]
    return tuple(seen.life() for seen in found)


def _note(seen: _Seen, e: Event, suspect_s: float) -> None:
    match e["name"]:
        case "worker_ready":
            seen.ready = seen.ready or e
        case "worker_suspect":
            seen.deeds.append(Deed(at_s=max(seen.joined["t"], e["t"] - suspect_s), what="frozen"))
        case "worker_well":
            seen.deeds.append(Deed(at_s=e["t"], what="thawed"))
        case "worker_warned":
            seen.deeds.append(Deed(at_s=e["t"], what="warned", left_s=e["left_s"], source=e["source"]))
        case "worker_lost":
            seen.deeds.append(Deed(at_s=e["t"], what="killed"))
        case "worker_left" if OVER not in e["why"]:
            seen.deeds.append(Deed(at_s=e["t"], what="drained"))
        case _:
            pass
