"""A simulated trainer and controller are killed and restart, one at a time. Chaos tests kill both at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from windfall.controller.ledger.journal import Journal
from windfall.errors import WindfallError
from windfall.events.log import EventLog, read
from windfall.recipe.sections import Recipe
from windfall.sim.core.run import Simulation, simulate
from windfall.sim.core.scenario import build
from windfall.sim.report.figures import figures

Simulated = Callable[..., Any]
FAILING = {"trainer_mean_up_s": 4.0, "trainer_down_s": 1.0, "controller_mean_up_s": 4.0, "controller_down_s": 1.0}


def steps_of(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for e in log if (e["kind"], e["name"]) == ("scalar", "step")]


@pytest.mark.parametrize("process", ["trainer", "controller", ""])
def test_killed_process_restarts_and_no_token_is_generated_twice(simulated: Simulated, process: str) -> None:
    """The recipe kills it. With '', both are killed."""
    keys = {name: s for name, s in FAILING.items() if name.startswith(process)}
    done, log = simulated(run={"steps": 5}, checkpoint={"every": 2}, sim=keys)
    calm, alone = simulated(run={"steps": 5}, checkpoint={"every": 2})
    assert [e["step"] for e in steps_of(log)] == list(range(1, 6))
    for name in ("made", "reward", "responses"):
        assert [e[name] for e in steps_of(log)] == [e[name] for e in steps_of(alone)]
    assert done.token_schedule.real_tokens == calm.token_schedule.real_tokens
    assert (done.trainer.starts > 2) == (process != "controller")
    assert (done.controller_starts > 2) == (process != "trainer")
    assert log[-1]["m"] > alone[-1]["m"]
    assert any(e["name"] == "resumed" for e in log)


def test_mixed_autoscaled_fleet_survives_restarts(simulated: Simulated) -> None:
    """The fleet has several kinds of machines, small KV caches, and workers that are scaled by advice."""
    kinds = [{"name": name, "worker": {"fixed_s": 0.02, "each_s": 0.001}, "kv_tokens": 900} for name in ("L4", "T4")]
    fleet = {"workers": 1, "workers_max": 3, "price_usd_per_h": 0.1}
    sections = {"run": {"steps": 10}, "fleet": fleet, "checkpoint": {"every": 2}}
    done, log = simulated(**sections, sim={**FAILING, "kinds": kinds, "worker_kv_tokens": 400, "boot_s": 0.1})
    calm, alone = simulated(**sections)
    assert [e["made"] for e in steps_of(log)] == [e["made"] for e in steps_of(alone)]
    assert done.token_schedule.real_tokens == calm.token_schedule.real_tokens
    assert min(done.controller_starts, done.trainer.starts) > 2
    joined = {e["worker"].partition("#")[0] for e in log if e["name"] == "worker_joined"}
    assert {"w1", "w2", "w3"} <= joined
    assert {"L4", "T4"} <= {e["device"] for e in log if e["name"] == "worker_joined"}


def at(*moments: tuple[float, Callable[[Simulation], None]]) -> Callable[[Simulation], None]:
    def disturb(simulation: Simulation) -> None:
        loop = asyncio.get_running_loop()
        for at_s, action in moments:
            loop.call_at(at_s, action, simulation)

    return disturb


def test_trainer_continues_from_its_last_checkpoint(simulated: Simulated) -> None:
    kill = at((20.0, lambda s: s.trainer.kill()))
    done, log = simulated(kill, run={"steps": 6}, checkpoint={"every": 2}, sim={"trainer_down_s": 3.0})
    (resumed,) = (e for e in log if e["name"] == "resumed")
    assert resumed["m"] == pytest.approx(23.0)
    assert resumed["step"] % 2 == 0
    assert done.trainer.starts == 2
    lost = [e for e in log if e["name"] == "worker_lost" and e["worker"] == "local"]
    assert [e["m"] for e in lost] == [pytest.approx(20.0)], "its engine is lost with it"
    assert steps_of(log)[-1]["step"] == 6


def test_trainer_that_loses_its_link_keeps_its_step(simulated: Simulated) -> None:
    cut = at((20.0, lambda s: s.trainer.cut("the network failed")))
    done, log = simulated(cut, run={"steps": 6})
    (resumed,) = (e for e in log if e["name"] == "resumed")
    before = [e for e in log if e["m"] < 20.0 and e["name"] == "step"]
    assert resumed["step"] == before[-1]["step"] > 0
    assert done.trainer.starts == 1


def test_trainer_cut_off_between_two_updates_restarts(simulated: Simulated) -> None:
    def cut(simulation: Simulation) -> None:
        execute = simulation.trainer._execute

        async def cutting(order: Any) -> Any:
            if simulation.trainer._updates == 1 and simulation.trainer.starts == 1:
                simulation.trainer.cut("the network failed")
            return await execute(order)

        simulation.trainer._execute = cutting  # type: ignore[method-assign]

    done, log = simulated(cut, run={"steps": 2}, train={"minibatches": 2, "micro_tokens": 800})
    assert done.trainer.starts == 2
    assert [e["step"] for e in log if e["name"] == "resumed"] == [0]
    assert [e["step"] for e in steps_of(log)] == [1, 2]


def test_unflushed_journal_of_a_killed_controller_is_lost(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "settings")
    journal.open(0)
    journal.write_grade("1/0", 1.0, None, "")
    journal.flush()
    journal.write_grade("1/1", 1.0, None, "")
    journal.abandon()
    journal.write_grade("1/2", 1.0, None, "")
    journal.flush()
    journal.close()
    assert set(Journal(tmp_path, "settings").read(0).history) == {"1/0"}


def test_killed_controller_writes_no_log(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.instant("before")
    log.abandon()
    log.instant("after")
    assert [e["name"] for e in read(tmp_path / "events.jsonl")] == ["before"]


def test_trainer_down_time_above_its_timeout_is_rejected(recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(WindfallError, match="trainer_down_s"):
        recipe(sim={"trainer_down_s": 700.0})


def test_figures_include_the_cost_of_lost_steps(tmp_path: Path, recipe: Callable[..., Recipe]) -> None:
    """A trainer without a checkpoint repeats all steps: tokens per second and per dollar cover the whole run."""
    figures_by_uptime = {}
    for up_s in (0.0, 12.0):
        w = build(recipe(run={"steps": 6}, sim={"trainer_mean_up_s": up_s}))
        log = tmp_path / f"{up_s}.jsonl"
        done = simulate(w, log)
        figures_by_uptime[up_s] = figures(log, w, done.stays)
    lost, whole = figures_by_uptime[12.0], figures_by_uptime[0.0]
    assert lost.virtual_s == pytest.approx(lost.whole_s, rel=0.1)
    assert lost.virtual_s > 1.3 * whole.virtual_s
    assert lost.tok_per_s < whole.tok_per_s / 1.2
    assert lost.usd > 1.2 * whole.usd
