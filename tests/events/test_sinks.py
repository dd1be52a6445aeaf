from __future__ import annotations

import threading
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from windfall.errors import WindfallError
from windfall.events import sinks
from windfall.events.log import EventLog, scan
from windfall.events.sinks import Prometheus, ThreadedSink, make_sinks


class Collected:
    def __init__(self) -> None:
        self.got: list[tuple[str, dict[str, float], int]] = []
        self.closed = False

    def write(self, name: str, numbers: dict[str, float], step: int, t: float) -> None:
        self.got.append((name, numbers, step))

    def close(self) -> None:
        self.closed = True


class Hanging(Collected):
    """A tool whose network is gone: it never answers."""

    def __init__(self) -> None:
        super().__init__()
        self.hang = threading.Event()

    def write(self, name: str, numbers: dict[str, float], step: int, t: float) -> None:
        self.hang.wait(20)


def dropped(log: EventLog) -> list[dict[str, str]]:
    return [e for e in scan(log.path) if e["name"] == "sink_dropped"]


def test_a_tool_gets_every_number_and_the_dollars(tmp_path: Path) -> None:
    tool = Collected()
    sink = ThreadedSink("tool", lambda: tool)
    log = EventLog(tmp_path / "events.jsonl", [sink])
    bill = {"holders": {"spot": {"usd": {"generating": 0.5, "lost": 0.25}}}}
    log.scalar("step", step=3, reward=0.5, text="word", ok=True, bill=bill)
    log.bind(policy="solver").scalar("step", step=2, reward=0.25)
    log.instant("worker_lost", s=3.0)
    sink.close()
    assert tool.got == [("step", {"reward": 0.5, "usd": 0.75}, 3), ("step/solver", {"reward": 0.25}, 2)]
    assert tool.closed


def test_a_tool_that_hangs_is_dropped_and_never_delays_the_run(tmp_path: Path) -> None:
    tool = Hanging()
    sink = ThreadedSink("slow tool", lambda: tool, max_queued=10)
    log = EventLog(tmp_path / "events.jsonl", [sink])
    began = time.monotonic()
    for step in range(50):
        log.scalar("step", step=step, reward=0.5)
    assert time.monotonic() - began < 10.0
    (event,) = dropped(log)
    assert event["sink"] == "slow tool"
    assert "too slow" in event["why"]
    assert sum(e["name"] == "step" for e in scan(log.path)) == 50
    tool.hang.set()


def test_a_tool_that_fails_is_dropped_and_reported(tmp_path: Path) -> None:
    def refuse() -> Collected:
        raise ConnectionError("no route to the server")

    sink = ThreadedSink("dead tool", refuse)
    log = EventLog(tmp_path / "events.jsonl", [sink])
    sink._thread.join(5)
    log.scalar("step", step=1, reward=0.5)
    log.scalar("step", step=2, reward=0.5)
    (event,) = dropped(log)
    assert "no route to the server" in event["why"]
    assert sink.close() == ""  # it is reported already


def test_a_tool_that_does_not_take_the_last_events_is_reported() -> None:
    tool = Hanging()
    sink = ThreadedSink("slow tool", lambda: tool)
    sink({"t": 1.0, "kind": "scalar", "name": "step", "step": 1, "reward": 0.5})
    assert "too slow" in sink.close(0.05)
    assert sink.close(0.05) == ""
    tool.hang.set()


def test_prometheus_can_scrape_the_newest_values() -> None:
    tool = Prometheus("127.0.0.1:0", 'a "run"')
    try:
        tool.write("step", {"reward": 0.5, "odd name": 1.0}, 3, 10.0)
        tool.write("step", {"reward": 0.75}, 4, 11.0)
        with urllib.request.urlopen(f"http://127.0.0.1:{tool.port}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
    finally:
        tool.close()
    assert r'windfall_step_reward{run="a \"run\""} 0.75' in lines
    assert r'windfall_step_odd_name{run="a \"run\""} 1.0' in lines
    assert "# TYPE windfall_step_reward gauge" in lines


def test_a_missing_package_is_an_error_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WindfallError, match="wandb is not installed"):
        make_sinks(folder=tmp_path, run="demo", wandb="project")


def test_wandb_writes_a_run_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    (sink,) = make_sinks(folder=tmp_path, run="demo", wandb="project")
    sink({"t": 1.0, "kind": "scalar", "name": "step", "step": 1, "reward": 0.5})
    assert sink.close(60) == ""
    assert list(tmp_path.rglob("*.wandb"))


def test_prometheus_own_parser_reads_what_is_served() -> None:
    tool = Prometheus("127.0.0.1:0", 'run {"a"}\\\n')
    try:
        tool.write("step", {"reward": 0.5, "rewards/math{x}": 1e-9, "9 lives": float("inf")}, 3, 10.0)
        with urllib.request.urlopen(f"http://127.0.0.1:{tool.port}/metrics", timeout=60) as answer:
            families = {f.name: f for f in text_string_to_metric_families(answer.read().decode())}
    finally:
        tool.close()
    assert {name: f.samples[0].value for name, f in families.items()} == {
        "windfall_step_reward": 0.5, "windfall_step_rewards_math_x_": 1e-9, "windfall_step_9_lives": float("inf"),
        "windfall_step_step": 3, "windfall_step_time_seconds": 10.0,
    }  # fmt: skip
    assert {f.type for f in families.values()} == {"gauge"}
