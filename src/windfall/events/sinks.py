"""Sinks of the event log: TensorBoard, Weights & Biases and Prometheus get every number of every scalar event.

    run ──event──▶ ThreadedSink: a bounded queue ──▶ its thread ──▶ the tool

Rules: a sink never delays the run. The run only puts events into the queue. A sink that is so slow that MAX_QUEUED
events wait, or whose tool has raised an error, raises at the next event; the event log then drops it and writes
`sink_dropped`. At the end of the run, a sink gets CLOSE_S seconds to send what it has; if that is not enough, the log
says so, too.
"""

from __future__ import annotations

import contextlib
import importlib.util
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from windfall.errors import WindfallError, install_command

Event = dict[str, Any]

MAX_QUEUED = 2000
"""Upper limit for the events that wait for a sink."""
CLOSE_S = 10.0
"""Seconds that a sink may take to send what is left at the end of a run."""
MAX_SERIES = 500
"""Upper limit for the series that Prometheus can scrape."""


class Tool(Protocol):
    """Where numbers go. Only the thread of a sink calls it, so it may block."""

    def write(self, name: str, numbers: dict[str, float], step: int, t: float) -> None: ...
    def close(self) -> None: ...


class SinkFailed(Exception):
    """The tool behind a sink has failed or is too slow."""


class ThreadedSink:
    def __init__(self, name: str, make: Callable[[], Tool], *, max_queued: int = MAX_QUEUED) -> None:
        """`make` connects to the tool. It is called in the thread of the sink, because it may block."""
        self.__qualname__ = name
        self._make, self._error, self._reported, self._closed = make, "", False, False
        self._queue: queue.Queue[Event | None] = queue.Queue(max_queued)
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        if self._error:
            self._reported = True
            raise SinkFailed(self._error)
        if event["kind"] != "scalar":
            return
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self._reported = True
            raise SinkFailed(f"too slow: {self._queue.qsize()} events wait for it") from None

    def close(self, timeout_s: float = CLOSE_S) -> str:
        """Send what is left, for at most `timeout_s` seconds. Returns why that was not possible, or "". Further calls
        do nothing, as does a call after the log has dropped the sink."""
        if self._closed or self._reported:
            return ""
        self._closed, waiting = True, self._queue.qsize()
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)
        too_slow = f"too slow: {waiting} events were left at the end of the run" if self._thread.is_alive() else ""
        return self._error or too_slow

    def _run(self) -> None:
        try:
            tool = self._make()
            try:
                while (event := self._queue.get()) is not None:
                    numbers = dict(_numbers(event))
                    if numbers:
                        name = "/".join(filter(None, (event["name"], event.get("policy"))))  # such as step/solver
                        tool.write(name, numbers, int(event.get("step", 0)), float(event["t"]))
            finally:
                tool.close()
        except BaseException as e:  # fault boundary: the next event reports it to the log, which drops this sink
            self._error = f"{type(e).__name__}: {e}"[:300]


def _numbers(event: Event) -> Iterator[tuple[str, float]]:
    """The numbers of an event, those in its dictionaries, and the dollars of its bill.

    >>> dict(_numbers({"t": 1.0, "m": 2.0, "kind": "scalar", "name": "step", "step": 3, "reward": 0.5, "ok": True,
    ...                "rewards": {"math": 0.25}}))
    {'reward': 0.5, 'rewards/math': 0.25}
    """
    for key, value in event.items():
        parts = [(f"{key}/{k}", v) for k, v in value.items()] if isinstance(value, dict) else [(key, value)]
        for name, number in parts:
            if name not in ("t", "m", "step") and isinstance(number, int | float) and not isinstance(number, bool):
                yield name, float(number)
    holders = (event.get("bill") or {}).get("holders") or {}
    usd = [amount for account in holders.values() for amount in (account.get("usd") or {}).values()]
    if usd:
        yield "usd", sum(usd)


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, name: str, numbers: dict[str, float], step: int, t: float) -> None:
        for key, value in numbers.items():
            self._writer.add_scalar(f"{name}/{key}", value, step, walltime=t)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    def __init__(self, project: str, run: str, folder: Path) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        id = re.sub(r"[^A-Za-z0-9_-]", "-", str(folder.resolve()))[-60:]  # a resumed run continues its curves
        # Only numbers leave the machine: no output, no code, and nothing about the repository.
        settings = wandb.Settings(console="off", disable_code=True, disable_git=True, silent=True)
        self._run = wandb.init(project=project, name=run, id=id, resume="allow", dir=str(folder), settings=settings)
        self._run.define_metric("*", step_metric="step")

    def write(self, name: str, numbers: dict[str, float], step: int, t: float) -> None:
        self._run.log({f"{name}/{key}": value for key, value in numbers.items()} | {"step": step, "t": t})

    def close(self) -> None:
        self._run.finish()


class Prometheus:
    """Serves the newest value of every number under /metrics."""

    def __init__(self, address: str, run: str) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._run, self._registry = run, CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        host, _, port = address.rpartition(":")
        self._server, _ = start_http_server(int(port), host.strip("[]"), self._registry)
        self.port = self._server.server_port

    def write(self, name: str, numbers: dict[str, float], step: int, t: float) -> None:
        from prometheus_client import Gauge

        for key, value in {**numbers, "step": step, "time_seconds": t}.items():
            series = "windfall_" + re.sub(r"[^A-Za-z0-9_]", "_", f"{name}_{key}")
            if series not in self._gauges and len(self._gauges) < MAX_SERIES:
                gauge = Gauge(series, f"{key} of the newest event {name}", ["run"], registry=self._registry)
                self._gauges[series] = gauge.labels(self._run)
            if series in self._gauges:
                self._gauges[series].set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def require_tools(wanted: Mapping[str, Any]) -> None:
    """Raise WindfallError if a package is not installed that these keys of the [log] section need."""
    for module in ("tensorboard", "wandb"):
        if not wanted.get(module):
            continue
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:  # a mere folder of this name, such as wandb creates, is no package
            fix = f"Install it: {install_command(module)}; or remove the key from the recipe."
            raise WindfallError(f"{module} is not installed", where=f"log.{module}", fix=fix)


def make_sinks(
    *, folder: Path, run: str, tensorboard: bool = False, wandb: str = "", prometheus: str = ""
) -> list[ThreadedSink]:
    require_tools({"tensorboard": tensorboard, "wandb": wandb})
    sinks: list[ThreadedSink] = []
    if tensorboard:
        sinks.append(ThreadedSink("tensorboard", lambda: TensorBoard(folder / "tensorboard")))
    if wandb:
        sinks.append(ThreadedSink("wandb", lambda: WandB(wandb, run, folder)))
    if prometheus:
        sinks.append(ThreadedSink("prometheus", lambda: Prometheus(prometheus, run)))
    return sinks
