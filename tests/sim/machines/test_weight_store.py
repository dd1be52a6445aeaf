"""Simulated runs whose workers read weights along routes: from the trainer, from each other, across regions, and from
sources that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.fleets.directory_rules import check
from windfall.sim.core.run import Simulation

Simulated = Callable[..., Any]
Disturb = Callable[[Simulation], None]
COPY = 1e8
SIM = {
    "regions": [{"name": name, "bytes_per_s": 2e8, "latency_s": 0.05} for name in ("a", "b")], "boot_s": 0.1,
    "weights_bytes": COPY, "trainer": {"fixed_s": 0.006, "each_s": 0.00012, "train_s": 0.000185, "update_s": 5.0},
}  # fmt: skip


def run(simulated: Simulated, disturb: Disturb | None = None, *, peers: str = "auto", **sim: Any) -> tuple[Any, Any]:
    """Six workers in two regions, and four versions of 100 MB, five seconds apart. The events, and those of versions
    that all workers have got."""
    done, log = simulated(
        disturb, trace={"nodes": 0}, fleet={"workers": 6, "heartbeat_s": 0.3}, sim={**SIM, **sim},
        weights={"region": "a", "peers": peers},
    )  # fmt: skip
    check(done.dispatch.weights.directories[""])
    return log, [e for e in log if e["name"] == "weights" and e["all_s"] is not None]


def later(at_s: float, action: Disturb) -> Disturb:
    return lambda s: asyncio.get_running_loop().call_later(at_s, action, s) and None


def test_one_copy_crosses_into_a_region(simulated: Simulated) -> None:
    _, versions = run(simulated)
    assert len(versions) >= 2
    for v in versions:
        assert (v["readers"], v["trainer_bytes"], v["peer_bytes"]) == (6, 2 * COPY, 4 * COPY)
        assert v["across_bytes"] == COPY
        assert v["all_s"] == pytest.approx(COPY / 2e8, abs=0.2), "as long as the copy over the wide link"


def test_without_peers_all_read_from_the_trainer(simulated: Simulated) -> None:
    _, versions = run(simulated, peers="off")
    assert [(v["trainer_bytes"], v["across_bytes"]) for v in versions] == [(6 * COPY, 3 * COPY)] * len(versions)
    assert versions[0]["all_s"] == pytest.approx(3 * COPY / 2e8, abs=0.2)


def test_deltas_are_read_by_those_that_have_the_copy_before(simulated: Simulated) -> None:
    _, versions = run(simulated, delta_bytes=1e7)
    assert [v["delta_bytes"] for v in versions] == [1e7] * len(versions)
    assert all(v["trainer_bytes"] + v["peer_bytes"] == 6e7 for v in versions)


@pytest.mark.parametrize("fault", ["wrong", "stalled", "unreachable", "killed", "flap"])
def test_others_go_on_when_an_importer_fails(simulated: Simulated, fault: Any) -> None:
    """Of the workers in region b, the one that crosses the wide link fails in the middle of a copy."""
    failed: list[str] = []

    def strike(s: Simulation) -> None:
        directory = s.dispatch.weights.directories[""]
        reading = directory._files[directory.newest].readings
        failed.extend(id for id, one in reading.items() if one.importing)
        if not failed:
            asyncio.get_running_loop().call_later(0.05, strike, s)
        elif fault == "killed":
            s.fleet._kill(failed[0])
        elif fault == "flap":
            s.fleet.workers[failed[0]].flap(1.0)
        else:
            store = s.fleet.workers[failed[0]].store
            assert store is not None
            store.fail(fault)

    log, versions = run(simulated, later(7.0, strike), weights_bytes=4e8)
    assert failed
    newest = max(v["version"] for v in versions)
    ready = {e["worker"].partition("#")[0] for e in log if e["name"] == "worker_ready" and e["version"] == newest}
    assert ready >= {f"w{n}" for n in range(1, 7)} - ({failed[0]} if fault == "killed" else set())
