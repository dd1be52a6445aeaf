"""The devices of a machine: their turns do not depend on what else the process of the service does."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs.turn_server import WAIT_S
from windfall import run_folder as folders
from windfall.jobs.service import Service
from windfall.jobs.settings import FleetSettings
from windfall.jobs.store import Job
from windfall.turns.client import KEY, SOCKET, SharedDevice

TURNS = 50


def test_turns_go_on_while_the_service_waits_for_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(FleetSettings(devices="cpu", cpu_slots=1, folder=tmp_path, slice_s=0.001), lambda line: None)
    service.store.jobs = {name: Job(name=name, number=1, state="done") for name in "ab"}
    writing, enough, counts = threading.Event(), threading.Event(), {"a": 0, "b": 0}

    def slow(path: Path, text: str) -> None:
        """The disk answers when both jobs have had their turns."""
        writing.set()
        assert enough.wait(WAIT_S), f"waited {WAIT_S:g} s for {TURNS} turns of both jobs: {counts}"
        path.write_text(text)

    def work(job: str, own: dict[str, Any]) -> None:
        client = SharedDevice(own[SOCKET], own[KEY], "rollout", "cpu0")
        assert writing.wait(WAIT_S)
        while not enough.is_set():
            if client.take(0.1):
                counts[job] += 1
                client.give(1)
                if min(counts.values()) >= TURNS:
                    enough.set()
        client.close()

    async def main() -> None:
        async with service.host as host:
            own = {job: host.admit(job, share=1.0, priority=0, deadline_s=0.0) for job in counts}
            threads = [threading.Thread(target=work, args=item) for item in own.items()]
            for thread in threads:
                thread.start()
            monkeypatch.setattr(folders, "replace", slow)
            await service._look()
            for thread in threads:
                await asyncio.to_thread(thread.join, WAIT_S)
            await service._look()

    asyncio.run(main())
    lines = (tmp_path / "turns.jsonl").read_text().splitlines()
    assert {job: sum(json.loads(line)["job"] == job for line in lines) for job in counts} == counts
    used = json.loads((tmp_path / "jobs.json").read_text())["devices"]["cpu0"]["used_s"]
    assert used.keys() == counts.keys()
