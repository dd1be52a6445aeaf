"""A server of the Tinker API as a job: beside a job of reinforcement learning, on devices that they share."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.support.runs.job_service import JobService
from windfall.algorithms.given import Loss
from windfall.client import Client
from windfall.training import Adam, given

pytest.importorskip("google.protobuf", reason="protobuf is not installed: pip install -e '.[tinker]'")
SERVER = ("--model", "tiny", "--models", "1", "--samplers", "1", "--rank", "4", "--context", "64")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_shares_the_fleet_with_a_run(tmp_path: Path) -> None:
    with JobService(tmp_path) as service:
        client = service.up()
        service.command("tinker", "--on", str(service.folder), "--job", "server", *SERVER)
        service.train("run", "run.steps=3")
        service.until(lambda: client.get("/jobs/server")["serves"], "serves", 300)
        found = client.get("/jobs/server")
        key = (Path(found["folder"]) / "tinker.key").read_text().strip()
        losses = asyncio.run(use(found["serves"], key))
        assert losses[-1] < losses[0]
        assert found["serves"] in service.command("jobs", "server", "--on", str(service.folder))
        service.until(lambda: client.get("/jobs/run")["state"] == "done", "done", 300)
        service.command("stop", "server", "--on", str(service.folder))
        service.until(lambda: client.get("/jobs/server")["state"] == "stopped", "stopped", 120)
        assert service.interrupt() == 0
        turns = [json.loads(line) for line in (service.folder / "turns.jsonl").read_text().splitlines()]
        assert {(turn["job"], turn["kind"]) for turn in turns} >= {
            (job, kind) for job in ("server", "run") for kind in ("train", "rollout")
        }


async def use(url: str, key: str) -> list[float]:
    """The losses of a short loop."""
    async with asyncio.timeout(300), Client(url, key) as client:
        policy = await client.create(rank=4)
        assert len(await policy.sample([1, 2, 3], 2, id="sample", max_tokens=8)) == 2
        samples, losses = [given([1, 7, 11, 5], [1, 2, 3], [1.0] * 3)], list[float]()
        for n in range(3):
            losses.append((await policy.forward_backward(samples, Loss(name="cross_entropy"), id=f"{n}/g")).loss)
            await policy.optim_step(adam=Adam(lr=1e-2), id=f"{n}/s")
        return losses
