"""A simulated trainer and controller are killed and restart, one at a time. Chaos tests kill both at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleets.restarts import RestartingSimulation, abandon_journal
from windfall.controller.ledger.journal import Journal
from windfall.controller.ledger.journal_format import TurnGraded
from windfall.events.log import EventLog, read
from windfall.sim.core.draws import uniform

Simulated = Callable[..., Any]
UP_S, DOWN_S = 4.0, 1.0


def steps_of(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for e in log if (e["kind"], e["name"]) == ("scalar", "step")]


def failing(*processes: str) -> Callable[[RestartingSimulation], None]:
    """Kill these processes again and again, each after an exponentially distributed uptime."""

    def disturb(simulation: RestartingSimulation) -> None:
        loop = asyncio.get_running_loop()
        simulation.trainer.down_s = simulation.controller_down_s = DOWN_S
        for process in processes:
            kill = simulation.trainer.kill if process == "trainer" else simulation.kill_controller
            at_s = 0.0
            for n in range(1, 100):
                at_s += -math.log(1.0 - uniform(f"{process}/{n}")) * UP_S
                loop.call_at(at_s, kill)
                at_s += DOWN_S

    return disturb


@pytest.mark.parametrize(
    "processes",
    [*(pytest.param((name,), marks=pytest.mark.slow) for name in ("trainer", "controller")), ("trainer", "controller")],
)
def test_killed_process_restarts_and_no_token_is_generated_twice(
    restarting: Simulated, processes: tuple[str, ...]
) -> None:
    done, log = restarting(failing(*processes), run={"steps": 5}, checkpoint={"every": 2})
    calm, alone = restarting(run={"steps": 5}, checkpoint={"every": 2})
    assert [e["step"] for e in steps_of(log)] == list(range(1, 6))
    for name in ("made", "reward", "responses"):
        assert [e[name] for e in steps_of(log)] == [e[name] for e in steps_of(alone)]
    assert done.token_schedule.real_tokens == calm.token_schedule.real_tokens
    assert (done.trainer.starts > 2) == ("trainer" in processes)
    assert (done.controller_starts > 2) == ("controller" in processes)
    assert log[-1]["m"] > alone[-1]["m"]
    assert any(e["name"] == "resumed" for e in log)


@pytest.mark.slow
def test_mixed_autoscaled_fleet_survives_restarts(restarting: Simulated) -> None:
    """The fleet has several kinds of machines, small KV caches, and workers that are scaled by advice."""
    kinds = [{"name": name, "worker": {"fixed_s": 0.02, "each_s": 0.001}, "kv_tokens": 900} for name in ("L4", "T4")]
    fleet = {"workers": 1, "workers_max": 3, "price_usd_per_h": 0.1}
    sections = {"run": {"steps": 10}, "fleet": fleet, "checkpoint": {"every": 2}}
    keys = {"kinds": kinds, "worker_kv_tokens": 400, "boot_s": 0.1}
    done, log = restarting(failing("trainer", "controller"), **sections, sim=keys)
    calm, alone = restarting(**sections)
    assert [e["made"] for e in steps_of(log)] == [e["made"] for e in steps_of(alone)]
    assert done.token_schedule.real_tokens == calm.token_schedule.real_tokens
    assert min(done.controller_starts, done.trainer.starts) > 2
    joined = {e["worker"].partition("#")[0] for e in log if e["name"] == "worker_joined"}
    assert {"w1", "w2", "w3"} <= joined
    assert {"L4", "T4"} <= {e["device"] for e in log if e["name"] == "worker_joined"}


def at(*moments: tuple[float, Callable[[RestartingSimulation], None]]) -> Callable[[RestartingSimulation], None]:
    def disturb(simulation: RestartingSimulation) -> None:
        simulation.trainer.down_s = 3.0
        loop = asyncio.get_running_loop()
        for at_s, action in moments:
            loop.call_at(at_s, action, simulation)

    return disturb


def test_trainer_continues_from_its_last_checkpoint(restarting: Simulated) -> None:
    kill = at((20.0, lambda s: s.trainer.kill()))
    done, log = restarting(kill, run={"steps": 6}, checkpoint={"every": 2})
    (resumed,) = (e for e in log if e["name"] == "resumed")
    assert resumed["m"] == pytest.approx(23.0)
    assert resumed["step"] % 2 == 0
    assert done.trainer.starts == 2
    lost = [e for e in log if e["name"] == "worker_lost" and e["worker"] == "local"]
    assert [e["m"] for e in lost] == [pytest.approx(20.0)], "its engine is lost with it"
    assert steps_of(log)[-1]["step"] == 6


def test_trainer_that_loses_its_link_keeps_its_step(restarting: Simulated) -> None:
    cut = at((20.0, lambda s: s.trainer.cut("the network failed")))
    done, log = restarting(cut, run={"steps": 6})
    (resumed,) = (e for e in log if e["name"] == "resumed")
    before = [e for e in log if e["m"] < 20.0 and e["name"] == "step"]
    assert resumed["step"] == before[-1]["step"] > 0
    assert done.trainer.starts == 1


def test_trainer_cut_off_between_two_updates_restarts(restarting: Simulated) -> None:
    def cut(simulation: RestartingSimulation) -> None:
        execute = simulation.trainer._execute

        async def cutting(order: Any) -> Any:
            if simulation.trainer._updates == 1 and simulation.trainer.starts == 1:
                simulation.trainer.cut("the network failed")
            return await execute(order)

        simulation.trainer._execute = cutting  # type: ignore[method-assign]

    done, log = restarting(cut, run={"steps": 2}, train={"minibatches": 2, "micro_tokens": 800})
    assert done.trainer.starts == 2
    assert [e["step"] for e in log if e["name"] == "resumed"] == [0]
    assert [e["step"] for e in steps_of(log)] == [1, 2]


def test_unflushed_journal_of_a_killed_controller_is_lost(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "settings")
    journal.open(0)
    journal.write_grade(TurnGraded(id="1/0", reward=1.0))
    journal.flush()
    journal.write_grade(TurnGraded(id="1/1", reward=1.0))
    abandon_journal(journal)
    journal.write_grade(TurnGraded(id="1/2", reward=1.0))
    journal.flush()
    journal.close()
    assert set(Journal(tmp_path, "settings").read(0).history) == {"1/0"}


def test_killed_controller_writes_no_log(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.instant("before")
    log.abandon()
    log.instant("after")
    assert [e["name"] for e in read(tmp_path / "events.jsonl")] == ["before"]
