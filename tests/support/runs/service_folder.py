"""The folder of a service that never ran, for tests of its views and its page."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


def job(state: str = "running", **more: Any) -> dict[str, Any]:
    plain = {
        "state": state, "share": 1.0, "priority": 0, "step": 3, "steps": 10, "usd": 0.5, "max_usd": 0.0,
        "deadline": 0.0, "tokens_per_s": 1234.5, "eta_s": 125.0, "reason": "", "waiting_for": "", "submitted_s": 1.0,
        "started_s": 2.0,
        "ended_s": 0.0, "folder": "/fleet/jobs/x",
    }  # fmt: skip
    return plain | more


def device(job: str = "", kind: str = "", idle_s: float = 0.0, **used_s: float) -> dict[str, Any]:
    return {"job": job, "kind": kind, "idle_s": idle_s, "used_s": used_s}


def snapshot(jobs: dict[str, Any], devices: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    bill = {"usd": 3.0, "idle_usd": 1.0, "machines": []}
    return {"time_s": time.time(), "devices": devices or {}, "jobs": jobs, "bill": bill} | more


def turn(device: str, job: str, kind: str, start_s: float, s: float) -> dict[str, Any]:
    end_s = start_s + s
    return {"device": device, "job": job, "kind": kind, "start_s": start_s, "end_s": end_s, "work": 1.0, "beside": ""}


def write(folder: Path, state: dict[str, Any], turns: list[dict[str, Any]] | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / ".jobs.json"
    temporary.write_text(json.dumps(state))
    temporary.replace(folder / "jobs.json")
    with (folder / "turns.jsonl").open("a") as file:
        file.write("".join(json.dumps(t) + "\n" for t in turns or ()))
