"""Event logs of runs that never ran, for tests and the benchmark of the page."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

RECIPE = '[run]\nname = "case"\nsteps = 100\n\n[env]\nname = "arithmetic"\n'
START_T = 1_790_000_000.0


def event(t: float, kind: str, name: str, **fields: Any) -> dict[str, Any]:
    return {"t": START_T + t, "m": t, "kind": kind, "name": name, **fields}


def bill(usd: float, tokens: int) -> dict[str, Any]:
    account = {"seconds": {"generating": 10.0, "lost": 1.0}, "usd": {"generating": usd, "lost": usd / 10}}
    gathering = {"moves": 2, "released": 1, "freed_s": 3.0, "sooner_s": 1.5, "usd": usd}
    return {"holders": {"spot": {**account, "tokens": tokens, "unpriced_s": 0.0}}, "gathering": gathering}


def step(t: float, n: int, **fields: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "reward": min(1.0, n / 100), "lengths": [[30, 50]], "entropy": 0.5, "grad_norm": 0.1, "engine_gap": 1e-6,
        "tok_per_s": 1000.0, "trained": 1000, "made": 1100, "s": 10.0, "train_s": 3.0, "train_wait_s": 2.0,
        "workers": 3, "workers_lost": 1, "moved": 4, "prefilled_again": 50, "bill": bill(0.01, 1100),
        "drafted": 1000, "drafts_accepted": 380, "tokens_per_step": 1.42, "drafts_gain": 1.21,
        "predicted": {"alike": 0.7, "error": 0.3, "error_without": 0.5},
    }  # fmt: skip
    return event(t, "scalar", "step", step=n, **(values | fields))


def small_log(steps: int = 5, why: str = "connection lost") -> list[dict[str, Any]]:
    """Three workers, of which one is lost, and a few steps of ten seconds."""
    events = [event(0, "instant", "start", step=0, steps=100, device="cpu", parameters=1)]
    events.append(event(0, "instant", "trainer_ready", step=0, pid=1))
    for n in range(3):
        events.append(event(1, "instant", "worker_joined", worker=f"w{n}", lease="spot", device="cpu", age_s=0.5))
        events.append(event(2, "instant", "worker_ready", worker=f"w{n}", version=0, s=1.0))
    rows = {f"w{n}": [[8.0, "generating"], [3.0, "waiting"]] for n in range(3)}
    events.append(event(10, "instant", "activity", rows=rows, moves=[["w0", "w1", 5, 0.0]]))
    for n in range(1, steps + 1):
        events.append(event(10 * n + 3, "span", "train", step=n, s=2.0, early_s=0.0))
        events.append(step(10 * n + 3, n))
    events.append(event(10 * steps + 4, "instant", "worker_lost", worker="w0", why=why, moved=5, kept_tokens=9, s=9.0))
    return events


def write_run(folder: Path, events: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    return folder


def write_long_run(folder: Path, *, workers: int = 200, hours: float = 24.0, step_s: float = 60.0) -> Path:
    """A log of many workers and hours: in every step each generates and waits, and some are lost and come back."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.toml").write_text(RECIPE)
    with (folder / "events.jsonl").open("w") as file:

        def put(e: dict[str, Any]) -> None:
            file.write(json.dumps(e) + "\n")

        put(event(0, "instant", "start", step=0, steps=int(hours * 3600 / step_s), device="cuda", parameters=10**9))
        put(event(0, "instant", "trainer_ready", step=0, pid=1))
        for n in range(workers):
            put(event(1, "instant", "worker_joined", worker=f"gpu-{n}", lease="spot", device="H100", age_s=30.0))
        for n in range(1, int(hours * 3600 / step_s) + 1):
            t = n * step_s
            rows = {}
            for w in range(workers):
                rows[f"gpu-{w}"] = [[step_s, "pulling"], [step_s - 4, "generating"], [rng.uniform(2, 20), "waiting"]]
            for w in rng.sample(range(workers), 2):
                rows[f"gpu-{w}"] = [
                    [50.0, "lost"],
                    [45.0, ""],
                    [30.0, "booting"],
                    [5.0, "prefill_again"],
                    [2.0, "generating"],
                ]
                put(
                    event(
                        t - 45,
                        "instant",
                        "worker_lost",
                        worker=f"gpu-{w}",
                        why="preempted",
                        moved=40,
                        kept_tokens=4000,
                        s=9.0,
                    )
                )
                put(
                    event(
                        t - 10, "instant", "worker_joined", worker=f"gpu-{w}", lease="spot", device="H100", age_s=20.0
                    )
                )
            moves = [[f"gpu-{rng.randrange(workers)}", f"gpu-{rng.randrange(workers)}", 20, 30.0] for _ in range(4)]
            put(event(t, "instant", "activity", rows=rows, moves=moves))
            put(event(t, "span", "train", step=n, s=20.0, early_s=0.0))
            put(step(t, n, workers=workers, lengths=[[500] * 8] * 8))
    return folder


def sample(step: int = 1, **fields: Any) -> dict[str, Any]:
    """A line of samples.jsonl: a response that moved from w0 to w1."""
    values: dict[str, Any] = {
        "step": step, "t": START_T + 5, "id": f"{step}/0", "task": f"sums/{step}", "reward": 1.0, "finish": "stop",
        "length": 4, "turns": 1, "moved": True, "oldest": 0, "prompt": "1+1=", "cut": 0,
        "tokens": ["a", "b", "c", "d"], "logprobs": [-0.1, -2.0, -0.1, -0.5], "versions": [[0, 3], [1, 1]],
        "workers": [["w0", 2], ["w1", 2]],
    }  # fmt: skip
    return values | fields
