"""From the folder of a run to what its page shows. `RunReader` follows a log that is still written.

A prediction is shown beside what was measured: the folder of a simulation, or the plan in the recipe of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from windfall import run_folder as folders
from windfall.errors import WindfallError
from windfall.events.log import MAX_LINE_BYTES, is_truncated, parse
from windfall.page.feed import shown
from windfall.page.history import RunHistory
from windfall.page.samples import FILE, SampleFile
from windfall.recipe.file import load_recipe

MAX_SIMULATIONS = 8
MAX_EMBEDDED = 200
"""Upper limit for the responses in a page that is written to a file."""
MAX_EMBEDDED_CHARS = 6_000_000
"""Upper limit for their size in characters, as JSON."""


def read_all(runs: Sequence[Path]) -> list[RunReader]:
    """A reader for every run. A folder of `windfall sim --out` has one for each simulation, the first few of them."""
    out = []
    for run in runs:
        is_run = (run / "events.jsonl").is_file()
        simulations = [] if is_run else sorted(path for path in run.glob("*.jsonl") if path.name != FILE)
        out += [RunReader(path) for path in simulations[:MAX_SIMULATIONS]] or [RunReader(run)]
    return out


class RunReader:
    def __init__(self, run: Path) -> None:
        """`run`: the folder of a run, or an event log that a simulation wrote."""
        simulated = run.suffix == ".jsonl"
        self.folder, self.path = (run.parent, run) if simulated else (run, run / "events.jsonl")
        self.name = f"{run.resolve().parent.name}/{run.stem}" if simulated else run.resolve().name
        self.history, self.samples = RunHistory(), SampleFile(self.folder)
        self._position = 0
        if not self.path.is_file():
            folders.check_exists(run)
            fix = "Give the folder of a run, such as runs/demo, or a folder that `windfall sim --out` has written."
            raise WindfallError("this folder has no event log (events.jsonl)", where=str(run), fix=fix)
        self.read_new()

    def read_new(self) -> bool:
        """Read the events that were appended since the last call. True if there were any."""
        before = self.history.number
        with self.path.open("rb") as file:
            file.seek(self._position)
            while line := file.readline(MAX_LINE_BYTES):
                if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                    break  # it is still being written, or a kill cut it off
                self._position += len(line)
                event = parse(line)
                if event is not None:
                    self.history.add(event)
                elif line.strip() and not is_truncated(line):
                    self.history.unreadable += 1
        return self.history.number > before

    @property
    def status(self) -> str:
        running = self.path.name == "events.jsonl" and folders.held(self.folder)
        return status(self.history, running=running)

    def snapshot(self) -> dict[str, Any] | None:
        """The last state of the fleet. None if the file is missing or damaged."""
        if self.path.name != "events.jsonl":
            return None
        fleet = folders.read_json(self.folder / "fleet.json")
        try:
            msgspec.json.encode(shown(fleet or {}))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):  # not written by a controller
            return None
        return fleet

    def embedded_samples(self) -> list[dict[str, Any]]:
        """The newest samples with their tokens, as many as a file should contain."""
        out, chars = [], 0
        for entry in reversed(self.samples.index()[-MAX_EMBEDDED:]):
            sample = self.samples.read(entry["at"])
            chars += sum(map(len, sample["tokens"])) + 12 * len(sample["tokens"]) if sample else 0
            if chars > MAX_EMBEDDED_CHARS:
                break
            if sample:
                out.append(sample)
        return out[::-1]

    def describe(self, *, samples: bool = True) -> dict[str, Any]:
        snapshot = self.snapshot()
        return {
            "name": self.name,
            "status": self.status,
            "recipe": recipe_facts(self.folder),
            "history": self.history.full(),
            "snapshot": shown(snapshot, shift_s=self.history.shift_s) if snapshot else None,
            "samples": self.embedded_samples() if samples else [],
        }


def status(history: RunHistory, *, running: bool) -> str:
    """How a run stands. A run without an `end` that no process holds was killed, or its machine went down."""
    if history.simulated:
        return "simulated"
    if running:
        return "running"
    if history.ended is None:
        return "killed"
    return "finished" if history.ended["finished"] else "stopped"


def recipe_facts(folder: Path) -> dict[str, Any]:
    """The keys of a run's recipe that the page shows."""
    try:
        r = load_recipe(folder / "recipe.toml")
    except (WindfallError, OSError):
        return {}
    facts = {
        "model": r.model.path, "env": r.env.name, "algorithm": r.algorithm.name, "steps": r.run.steps,
        "groups": r.rollout.groups, "group_size": r.rollout.group_size, "staleness": r.rollout.staleness,
        "samples": r.log.samples,
    }  # fmt: skip
    plan = r.model_dump(include={"plan"}).get("plan")  # without the part `plan`, no recipe has this section
    return facts | {"plan": _plan_facts(plan)} if plan and plan["name"] else facts


def _plan_facts(plan: dict[str, Any]) -> dict[str, Any]:
    """What a plan predicts. None: it does not say."""
    per_million = plan["usd_per_h"] / 3600 / plan["tok_per_s"] * 1e6 if plan["tok_per_s"] else None
    return {
        "name": plan["name"], **{key: plan[key] or None for key in ("step_s", "tok_per_s", "usd_per_h")},
        "usd_per_million": per_million or None, "workers": sum(w["count"] for w in plan["workers"]),
    }  # fmt: skip
