"""`windfall sim A.toml B.toml`: several jobs on the same machines, by turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from windfall.controller.scheduling import placement
from windfall.controller.scheduling.balance import Move
from windfall.controller.scheduling.tails import merge
from windfall.errors import WindfallError
from windfall.events import log as events
from windfall.recipe.sections import Recipe
from windfall.run import cli
from windfall.sim.calibrate.event_log import steps_of
from windfall.sim.core import loop as loops
from windfall.sim.core import run
from windfall.sim.jobs.devices import JobTurn, SimDevice
from windfall.sim.jobs.report import Answer, answers, figures, table, verdict
from windfall.sim.jobs.together import JobEnd, Shared, SimJob, jobs_of, paid_seconds, simulate
from windfall.turns.accounts import DeviceAccounts

MakeRecipe = Callable[..., Recipe]
STAYS: dict[str, Any] = {"trace": {"nodes": 0}, "fleet": {"workers": 2, "local": False}}
HARVEST = str(Path(__file__).parent.parent.parent / "recipes" / "sim-harvest.toml")
QUICK = ["--set", "run.steps=3", "--set", "rollout.groups=8", "--set", "sim.skip_steps=1"]


def pair(recipe: MakeRecipe, **sections: dict[str, Any]) -> list[SimJob]:
    """Two jobs with different responses."""
    recipes = [("a.toml", recipe(**sections)), ("b.toml", recipe(**sections, run={"steps": 4, "seed": 5}))]
    return jobs_of([(file, one.model_copy(update={"run": _named(one, file[0])})) for file, one in recipes])


def _named(recipe: Recipe, name: str) -> Any:
    return recipe.run.model_copy(update={"name": name})


def lengths(log: Path) -> list[list[list[int]]]:
    return [sorted(e["lengths"]) for e in steps_of(events.read(log))]


@pytest.mark.parametrize("sections", [{}, STAYS, {"sim": {"granule": 4}}])
def test_one_job_takes_its_turns_without_any_cost(
    recipe: MakeRecipe, tmp_path: Path, sections: dict[str, dict[str, Any]]
) -> None:
    """With and without an engine beside the trainer, with machines that are taken, and with frames at fixed times."""
    job = jobs_of([("a.toml", recipe(**sections))])[0]
    run.simulate(job.scenario, tmp_path / "plain.jsonl")
    simulate([job], tmp_path)
    assert (tmp_path / f"{job.name}.jsonl").read_bytes() == (tmp_path / "plain.jsonl").read_bytes()


@pytest.mark.parametrize("sections", [{}, STAYS], ids=["machines come and go", "machines stay"])
def test_jobs_have_the_same_responses_beside_others_as_alone(
    recipe: MakeRecipe, tmp_path: Path, sections: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although their responses make room for the other job."""
    merges: list[list[Move]] = []
    monkeypatch.setattr(placement, "merge", lambda *args, **keys: merges.append(merge(*args, **keys)) or merges[-1])
    jobs = pair(recipe, **sections)
    beside = simulate(jobs, tmp_path / "beside")
    assert any(merges)
    merges.clear()
    for job in jobs:
        alone = simulate([job], tmp_path / "alone", machines_of=jobs)
        assert alone.real_tokens == beside.jobs[job.name].real_tokens
        assert lengths(tmp_path / "alone" / f"{job.name}.jsonl") == lengths(tmp_path / "beside" / f"{job.name}.jsonl")
        assert alone.seconds < beside.jobs[job.name].end_s
    assert not any(merges), "a job alone moves nothing for others"


def test_bills_of_the_jobs_and_idle_time_add_up(recipe: MakeRecipe, tmp_path: Path) -> None:
    prices = {"price_usd_per_h": 3600.0, "trainer_price_usd_per_h": 3600.0}
    jobs = pair(recipe, trace={"nodes": 0}, fleet={**STAYS["fleet"], **prices})
    done = simulate(jobs, tmp_path)
    assert done.usd == pytest.approx(3 * done.seconds) == pytest.approx(done.paid_s)
    used_s = sum(job.used_s for job in done.jobs.values())
    assert sum(job.usd for job in done.jobs.values()) == pytest.approx(used_s)
    assert done.busy == pytest.approx(used_s / done.paid_s)
    assert 0.3 < done.busy < 1.0


def test_a_job_generates_while_the_other_one_trains(recipe: MakeRecipe, tmp_path: Path) -> None:
    """Training takes about as long as generation and cannot begin before it ends, so a job alone leaves half of the
    machines idle. With long turns a job generates its batch at once, so the jobs do not wait for training together."""
    service = {"fixed_s": 0.006, "each_s": 0.00012, "train_s": 0.0006}
    sections = {**STAYS, "techniques": {"pipelining": False}, "sim": {"trainer": service, "sigma": 0.0}}
    jobs = pair(recipe, **sections)
    answer = Answer(
        alone={job.name: simulate([job], tmp_path / "alone", machines_of=jobs) for job in jobs},
        together=simulate(jobs, tmp_path / "together", slice_s=5.0),
    )
    after, together = answer.way(together=False), answer.way(together=True)
    assert after["seconds"] / together["seconds"] > 1.4
    assert together["tok_per_s"] / after["tok_per_s"] == pytest.approx(after["seconds"] / together["seconds"])
    assert together["busy"] > after["busy"]
    assert together["busy_s"] == pytest.approx(after["busy_s"], rel=0.05), "the work is the same"
    said = verdict(figures([answer]))
    assert said.startswith("together: 1.")
    assert max(answer.job(name)["slowdown"] for name in answer.alone) < 1.45


def test_verdict_says_when_together_gains_nothing() -> None:
    def shared(seconds: float, *names: str) -> Shared:
        ends = {name: JobEnd(seconds, 1000, seconds / 2, 0.0) for name in names}
        return Shared(jobs=ends, seconds=seconds, paid_s=seconds, usd=0.0)

    slow = Answer(alone={"a": shared(10.0, "a"), "b": shared(10.0, "b")}, together=shared(25.0, "a", "b"))
    assert verdict(figures([slow])).startswith("one after the other: together is 0.80 times the speed")
    equal = Answer(alone=slow.alone, together=shared(20.0, "a", "b"))
    assert verdict(figures([equal])).startswith("one after the other: together is no faster")
    assert "-" in table(figures([equal]))[1], "no price is known"


# one device


class Taker:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def turn_granted(self) -> None:
        self.heard.append("granted")

    def turn_wanted(self) -> None:
        self.heard.append("wanted")


def on_device(body: Callable[[SimDevice, DeviceAccounts], Any], jobs: Sequence[str] = ("a", "b")) -> None:
    async def main(loop: loops.VirtualLoop) -> None:
        accounts = DeviceAccounts(["gpu"], 0)
        await body(SimDevice("gpu", jobs, accounts, 0.25), accounts)

    loops.run(main)


def test_turn_of_generation_lasts_a_slice_if_another_job_waits() -> None:
    async def body(device: SimDevice, accounts: DeviceAccounts) -> None:
        takers = Taker(), Taker()
        a, b = (JobTurn(device, job, "rollout", taker) for job, taker in zip("ab", takers, strict=True))
        assert a.take()
        await asyncio.sleep(10.0)
        assert takers[0].heard == [], "nobody else waits"
        assert not b.take()
        await asyncio.sleep(0.0)
        assert takers[0].heard == ["wanted"], "it has had its slice"
        a.give()
        assert not a.take(), "it waits again"
        await asyncio.sleep(0.1)
        assert takers[1].heard == ["granted"]
        await asyncio.sleep(1.0)
        b.give()
        b.give()
        assert accounts.charged(round(11.1e9)) == {"gpu": {"": 0, "a": 10_000_000_000, "b": 1_100_000_000}}

    on_device(body)


def test_training_is_not_interrupted_and_a_taker_that_leaves_is_forgotten() -> None:
    async def body(device: SimDevice, _: DeviceAccounts) -> None:
        takers = Taker(), Taker(), Taker()
        train = JobTurn(device, "a", "train", takers[0])
        own, other = (JobTurn(device, job, "rollout", taker) for job, taker in zip("ab", takers[1:], strict=True))
        assert train.take()
        assert not own.take()
        assert not other.take()
        await asyncio.sleep(100.0)
        assert takers[0].heard == []
        other.give()  # its worker was killed while it waited
        train.give()
        await asyncio.sleep(0.0)
        assert (takers[1].heard, takers[2].heard) == (["granted"], [])

    on_device(body)


def test_time_in_which_others_want_the_device_is_counted() -> None:
    async def body(device: SimDevice, _: DeviceAccounts) -> None:
        a, b = (JobTurn(device, job, "rollout", Taker()) for job in "ab")
        assert a.take()
        await asyncio.sleep(1.0)
        assert not b.take()
        await asyncio.sleep(2.0)
        a.give()
        await asyncio.sleep(4.0)
        b.give()
        await asyncio.sleep(8.0)
        assert (a.contended_s, b.contended_s) == (6.0, 3.0)

    on_device(body)


def test_turn_given_before_its_taker_heard_of_it_goes_to_the_next() -> None:
    async def body(device: SimDevice, _: DeviceAccounts) -> None:
        takers = Taker(), Taker(), Taker()
        a, b, c = (JobTurn(device, job, "train", taker) for job, taker in zip("abc", takers, strict=True))
        assert a.take()
        assert not b.take()
        assert not c.take()
        a.give()
        b.give()
        await asyncio.sleep(0.0)
        assert [taker.heard for taker in takers] == [[], [], ["granted"]]

    on_device(body, "abc")


# what is paid, what is refused, the command


def test_machines_are_paid_for_while_they_are_there(recipe: MakeRecipe) -> None:
    [job] = jobs_of([("a.toml", recipe(fleet={"workers": 1, "price_usd_per_h": 2.0}))])
    there_s: dict[str, float] = {"n1": 0.0, "n2": 0.0, "n3": 0.0}
    up_s: dict[str, float] = {}
    for change in job.scenario.changes:
        if change.at_s < 100.0 and change.up:
            up_s[change.node] = change.at_s
        elif change.at_s < 100.0:
            there_s[change.node] += change.at_s - up_s.pop(change.node)
    there_s = {node: s + 100.0 - up_s.get(node, 100.0) for node, s in there_s.items()}
    paid = paid_seconds([job.scenario], 100.0)
    assert paid["trainer"] == (100.0, 80.0)
    assert paid["w1"] == (100.0, 2.0)
    assert {node: paid[node].seconds for node in there_s} == pytest.approx(there_s)
    assert {paid[node].usd_per_h for node in there_s} == {5.0}


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"sim": {"seconds": 60.0}}, "b.toml: sim.seconds ends a run"),
        ({"fleet": {"workers": 1, "workers_max": 2}}, "b.toml: .* without autoscaling"),
        ({"trace": {"nodes": 4}}, "b.toml: trace.nodes differs from that in a.toml"),
        ({"fleet": {"trainer_price_usd_per_h": 8.0}}, "trainer_price_usd_per_h differs"),
        ({"policies": {"x": {}, "y": {}}}, r"b.toml: recipes with \[policies\]"),
    ],
)
def test_recipes_that_cannot_share_are_refused(recipe: MakeRecipe, sections: dict[str, Any], why: str) -> None:
    with pytest.raises(WindfallError, match=why):
        jobs_of([("a.toml", recipe()), ("b.toml", recipe(**sections))])


@pytest.mark.slow
def test_command_prints_both_ways(tmp_path: Path) -> None:
    words = ["sim", HARVEST, HARVEST, *QUICK, "--slice-s", "2", "--out", str(tmp_path)]
    done = CliRunner().invoke(cli.app, words, catch_exceptions=False)
    for name in ("one after the other", "together", "sim-harvest ", "sim-harvest-2 "):
        assert any(line.startswith(name) for line in done.output.splitlines()), name
    values = json.loads((tmp_path / "figures.json").read_text())
    assert set(values["jobs"]) == {"sim-harvest", "sim-harvest-2"}
    assert values["jobs"]["sim-harvest-2"]["after_s"] == pytest.approx(values["one after the other"]["seconds"])
    assert len(list(tmp_path.glob("*/*.jsonl"))) == 4
    with pytest.raises(WindfallError, match="--compare"):
        CliRunner().invoke(cli.app, [*words, "--compare", "all"], catch_exceptions=False)


def test_failure_of_one_job_ends_the_simulation(
    recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "STUCK_S", 360.0)
    late = recipe(sim={"boot_s": 1e9}, run={"steps": 4, "name": "late"}, **STAYS)
    jobs = jobs_of([("a.toml", recipe(trace={"nodes": 0})), ("late.toml", late)])
    with pytest.raises(WindfallError, match=r"no token in 0\.1 virtual hours"):
        simulate(jobs, tmp_path)


def test_every_seed_has_its_own_responses(recipe: MakeRecipe, tmp_path: Path) -> None:
    recipes = [("a.toml", recipe(**STAYS, run={"steps": 1}))] * 2
    found = answers(recipes, 2, tmp_path, 0.25)
    assert len({answer.together.real_tokens for answer in found}) == 2


@pytest.mark.slow
def test_shares_and_priorities_decide_who_ends_first(recipe: MakeRecipe, tmp_path: Path) -> None:
    """Two jobs with the same work."""
    same = [(file, recipe(**STAYS)) for file in ("a.toml", "b.toml")]

    def ends(**terms: Sequence[Any]) -> list[float]:
        (answer,) = answers(same, 1, tmp_path, 0.1, **terms)
        return [job.end_s for job in answer.together.jobs.values()]

    assert ends(shares=[4.0, 1.0])[0] < ends(shares=[1.0, 4.0])[0]
    assert ends(priorities=[1, 0])[0] < ends(priorities=[0, 1])[0]


def test_terms_of_jobs_are_checked(tmp_path: Path) -> None:
    for words, what in (
        (["--share", "1"], "1 values for 2 recipes"),
        (["--share", "1,x"], "are no numbers"),
        (["--share", "1,0"], "must be above 0"),
        (["--priority", "1,1.5"], "are no numbers"),
    ):
        with pytest.raises(WindfallError, match=what):
            CliRunner().invoke(cli.app, ["sim", HARVEST, HARVEST, *words], catch_exceptions=False)
    with pytest.raises(WindfallError, match="are for several recipes"):
        CliRunner().invoke(cli.app, ["sim", HARVEST, "--share", "1"], catch_exceptions=False)
