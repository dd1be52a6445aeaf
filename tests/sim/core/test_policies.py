"""Simulated runs with several policies: trainers, workers and roles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from windfall.errors import WindfallError
from windfall.sim.calibrate.event_log import steps_of
from windfall.sim.core import run, scenario
from windfall.sim.machines.linked_trainer import LinkedTrainer
from windfall.training import Sample

Simulated = Callable[..., Any]
SCRIPT = [["solver", 1.0], ["verifier", 1.0], ["solver:again", 0.4], ["verifier", 0.5]]
LORA = {"lora": {"rank": 8}}


def sections(own: dict[str, Any] | None = None, *, staleness: int = 0, **sim: Any) -> dict[str, Any]:
    """A solver and a verifier. `own`: keys of both, which decide whether they share a base."""
    return {
        "run": {"steps": 3},
        "policies": {"solver": own or {}, "verifier": {**(own or {}), "rollout": {"max_tokens": 300}}},
        "rollout": {"groups": 8, "group_size": 4, "max_tokens": 350, "staleness": staleness},
        "fleet": {"workers": 4, "heartbeat_s": 0.3, "suspect_s": 1.0, "gone_s": 2.5},
        "trace": {"nodes": 0},
        "sim": {
            "script": SCRIPT, "env_s": 0.1, "median_tokens": 40.0, "adapter_bytes": 1e6,
            "policies": {"verifier": {"median_tokens": 20.0, "prompt_tokens": 60}}, **sim,
        },
    }  # fmt: skip


class RecordingTrainer(LinkedTrainer):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.trained: list[Sample] = []
        self.busy: list[tuple[float, float]] = []

    async def _execute(self, order: Any) -> object:
        self.trained += getattr(order, "samples", ())
        return await super()._execute(order)

    async def _work(self, seconds: float) -> None:
        await super()._work(seconds)
        now_s = asyncio.get_running_loop().time()
        self.busy.append((now_s - seconds, now_s))


class RecordingSimulation(run.Simulation):
    trainer_class = RecordingTrainer


def overlap(a: Any, b: Any) -> bool:
    return any(x < d - 1e-9 and c < y - 1e-9 for x, y in a.busy for c, d in b.busy)


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("own", [LORA, {}], ids=["adapters", "full"])
def test_each_policy_is_trained_on_its_own_tokens(simulated: Simulated, own: dict[str, Any], staleness: int) -> None:
    done, log = simulated(make=RecordingSimulation, **sections(own, staleness=staleness))
    assert {name: len(steps_of(log, name)) for name in done.trainers} == {"solver": 3, "verifier": 3}
    assert not [e for e in log if e["name"] == "worker_lost" and "malformed" in e["why"]]
    prompts = {name: {s.targets[0] for s in trainer.trained} for name, trainer in done.trainers.items()}
    assert prompts["solver"] == {16}
    assert min(prompts["verifier"]) == 60
    if not staleness:
        responses = {name: sum(e["responses"] for e in steps_of(log, name)) for name in prompts}
        assert responses["verifier"] == 3 * 32
        assert 3 * 32 < responses["solver"] < 2 * 3 * 32, "in some responses the solver speaks again"
    assert sum(e["made"] for e in steps_of(log)) <= done.token_schedule.real_tokens
    shared = done.trainers["solver"].base is done.trainers["verifier"].base
    assert shared == bool(own)
    assert not (shared and overlap(*done.trainers.values())), "one machine trains its policies in turn"


@pytest.mark.parametrize("in_turns", [False, True])
def test_trainers_of_two_bases_work_at_once_unless_they_share_a_machine(simulated: Simulated, in_turns: bool) -> None:
    done, _ = simulated(make=RecordingSimulation, **sections(staleness=2, in_turns=in_turns))
    assert overlap(*done.trainers.values()) != in_turns


def test_workers_hold_all_adapters_of_a_base_and_one_full_model(simulated: Simulated) -> None:
    held = {}
    for name, own in {"adapters": LORA, "full": {}}.items():
        done, log = simulated(**sections(own))
        held[name] = [set(worker._held) for worker in done.fleet.workers.values()]
        assert {e["policy"] for e in log if e["name"] == "worker_ready"} == {"solver", "verifier"}
    assert held["adapters"] == [{"solver", "verifier"}] * 4
    assert sorted(map(len, held["full"])) == [1] * 4
    assert len({*map(frozenset, held["full"])}) == 2, "both have workers"


def test_base_of_adapters_is_read_once(simulated: Simulated) -> None:
    done, log = simulated(**sections(LORA, weights_bytes=1e8))
    read = sum(e["bytes"] for e in log if e["name"] == "worker_ready")
    assert read == pytest.approx(4 * (1e8 + 2 * 3 * 1e6)), "by four workers, with three versions of two adapters"
    assert len(done.trainers["solver"].base.stores) == 1


def test_frozen_policy_and_copy_answer(simulated: Simulated) -> None:
    keys = sections(LORA, script=[["solver", 1.0], ["reference", 1.0], ["old", 1.0], ["verifier", 1.0]])
    keys["run"] = {"steps": 5}
    keys["policies"] |= {"reference": {"frozen": True}, "old": {"copy_of": "solver", "every": 2}}
    done, log = simulated(**keys)
    assert {e["policy"] for e in steps_of(log)} == {"solver", "verifier"}
    versions = {(e["policy"], e["version"]) for e in log if e["name"] == "worker_ready"}
    assert {version for policy, version in versions if policy == "reference"} == {0}
    assert {version for policy, version in versions if policy == "old"} == {0, 2, 4}
    assert done.trainers["reference"].weights.digest == "base of solver"


def test_limits_of_a_policy_are_in_simulated_tokens(simulated: Simulated, recipe: Callable[..., Any]) -> None:
    keys = sections(LORA, granule=5, sigma=1.2)
    assert scenario.build(recipe(**keys)).recipe.of("verifier").rollout.max_tokens == 60
    _, log = simulated(**keys)
    assert not [e for e in log if e["name"] == "worker_lost" and "malformed" in e["why"]]
    assert any(e["cut"] > 0 for e in steps_of(log)), "some reach the limit"


@pytest.mark.parametrize(
    ("sim", "match"),
    [
        ({"policies": {"judge": {}}}, "unknown policy 'judge'"),
        ({"script": [["solver", 1.0], ["judge:a", 1.0]]}, "unknown policy 'judge'"),
        ({"script": [["solver", 1.0]]}, "'verifier' is trained, but says nothing"),
        ({"turns": 2.0}, "sim.turns is for one role"),
        ({"policies": {"verifier": {"worker": {"fixed_s": 1.0}}}}, "differ in their workers"),
        ({"policies": {"verifier": {"trainer": {"train_s": -1.0}}}}, "sim.policies.verifier.trainer"),
    ],
)
def test_contradictions_are_refused(recipe: Callable[..., Any], sim: dict[str, Any], match: str) -> None:
    with pytest.raises(WindfallError, match=match):
        scenario.build(recipe(**sections(LORA, **sim)))
