"""The number of groups that are generated at once: its bounds, and what it is for."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from windfall.config import load
from windfall.events.log import read
from windfall.scheduling.admission import Admission
from windfall.scheduling.open_limit import OpenLimit
from windfall.sim.core.run import simulate
from windfall.sim.core.scenario import build
from windfall.types import Group, Task

RECIPE = Path(__file__).parents[2] / "recipes" / "sim-harvest.toml"
steps = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500), st.booleans()), max_size=60)


@given(batch=st.integers(1, 64), staleness=st.integers(1, 8), past=steps)
def test_limit_stays_between_one_and_the_gate(batch: int, staleness: int, past: list[tuple[int, int, bool]]) -> None:
    most = (staleness + 1) * batch
    limit = OpenLimit(batch=batch, most=most)
    for too_old, trained, waited in past:
        before = limit.groups
        limit.step(too_old=too_old, trained=trained, waited=waited)
        assert 1 <= limit.groups <= most
        assert limit.groups <= before or (waited and too_old <= 0.01 * (too_old + trained))


@given(batch=st.integers(1, 64), staleness=st.integers(1, 8), past=steps)
def test_limit_recovers_from_any_past(batch: int, staleness: int, past: list[tuple[int, int, bool]]) -> None:
    limit = OpenLimit(batch=batch, most=(staleness + 1) * batch)
    for too_old, trained, waited in past:
        limit.step(too_old=too_old, trained=trained, waited=waited)
    for _ in range(16 * (staleness + 1)):
        limit.step(too_old=0, trained=1, waited=True)
    assert limit.groups == (staleness + 1) * batch


def test_admission_opens_no_more_than_the_limit_and_refills_it() -> None:
    admission = Admission(batch=4, steps=10, staleness=2)
    assert admission.admit() == [0, 1, 2, 3], "the gate alone would open twelve"
    assert admission.admit() == []
    admission.finish(Group(index=2, task=Task(id="t", prompt=""), responses=()))
    assert admission.admit() == [4]


def test_few_responses_are_too_old_where_engines_have_many_slots(tmp_path: Path) -> None:
    """With the gate alone, 47 % of the tokens were dropped, and what was trained on was 16 % shorter."""
    sets = ["rollout.staleness=1", "sim.granule=4", "run.steps=14"]
    simulate(build(load(RECIPE, sets)), tmp_path / "log.jsonl")
    done = [e for e in read(tmp_path / "log.jsonl") if (e["kind"], e["name"]) == ("scalar", "step")][4:]
    dropped, trained = (sum(e[key] for e in done) for key in ("too_old_tokens", "trained"))
    assert dropped < 0.12 * (dropped + trained)
    assert max(e["staleness_max"] for e in done) == 1
