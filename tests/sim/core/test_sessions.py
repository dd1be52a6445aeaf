"""Simulated sessions with several turns: nothing is lost, and affinity saves prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Simulated = Callable[..., Any]
SESSIONS = {
    "turns": 4.0, "env_s": 0.5, "env_sigma": 0.5, "observation_tokens": 60.0, "observation_sigma": 0.4,
    "median_tokens": 20.0, "sigma": 0.4, "prompt_tokens": 100,
}  # fmt: skip
KEYS = {
    "run": {"steps": 2},
    "rollout": {"groups": 8, "group_size": 4, "max_tokens": 900},
    "fleet": {"local": False, "workers": 4, "heartbeat_s": 0.3},
    "trace": {"nodes": 0},
}


def steps_of(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for e in log if (e["kind"], e["name"]) == ("scalar", "step")]


def sections(**more: dict[str, Any]) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {name: dict(keys) for name, keys in KEYS.items()}
    out["sim"] = dict(SESSIONS)
    for name, keys in more.items():
        out[name] = out.get(name, {}) | keys
    return out


@pytest.mark.parametrize("granule", [1, 6])
def test_every_turn_is_generated_once(simulated: Simulated, granule: int) -> None:
    done, log = simulated(**sections(sim={"granule": granule}))
    steps = steps_of(log)
    assert len(steps) == 2
    assert all(e["responses"] == 32 and e["lost_tokens"] == 0 and e["repeated"] == 0 for e in steps)
    made = sum(e["made"] for e in steps) * granule
    assert made == pytest.approx(done.token_schedule.real_tokens, rel=0.0 if granule == 1 else 0.3)
    assert sum(e["sessions"]["turns"] for e in steps) > 2.5 * sum(e["sessions"]["ended"] for e in steps)


def test_affinity_and_a_large_cache_save_prefill(simulated: Simulated) -> None:
    saved = {}
    cases: dict[str, dict[str, Any]] = {
        "affinity": {},
        "no affinity": {"techniques": {"affinity": False, "balancing": False}},
        "small cache": {"sim": {"worker_kv_tokens": 2000}},
    }
    for name, more in cases.items():
        more["sim"] = {"granule": 4, **more.get("sim", {})}
        _, log = simulated(**sections(**more))
        steps = steps_of(log)
        reused, prefilled = (sum(e[key] for e in steps) for key in ("prefill_saved", "prefilled"))
        saved[name] = reused / (reused + prefilled)
    assert saved["affinity"] > 0.6
    assert saved["affinity"] > saved["no affinity"] + 0.1
    assert saved["affinity"] > saved["small cache"]


def test_sessions_survive_lost_workers(simulated: Simulated) -> None:
    _, log = simulated(**sections(trace={"nodes": 4, "mean_up_s": 4.0, "mean_down_s": 1.0}, fleet={"workers": 1}))
    steps = steps_of(log)
    assert sum(e["workers_lost"] for e in steps) > 3
    assert all(e["lost_tokens"] == 0 and e["responses"] == 32 for e in steps)
