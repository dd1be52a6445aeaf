"""Serving alone and with a rollout beside it, in one process: TTFT, TPOT, violations, and rollout tokens/s.

    python benchmarks/coserve.py --seconds 20 --rate 4                 random arrivals, the tiny model twice
    python benchmarks/coserve.py --trace azure.csv --speed 8           arrivals and lengths of a trace (Azure's columns)

The requests go to the host directly, without HTTP. The rollout always has `--responses` responses in flight. Naive
sharing by two processes, and a GPU, are not covered yet. The machine must be idle otherwise.
"""

from __future__ import annotations

import argparse
import csv
import random
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from windfall import devices
from windfall.link.messages import Released, Tokens, Work
from windfall.models import load
from windfall.serve import build
from windfall.serve.host import Host
from windfall.serve.rollout_tenant import RolloutTenant
from windfall.serve.slo import Objectives
from windfall.types import Chunk, Request, Sampling

CONTEXT = 512


@dataclass
class Served:
    """The times of one request."""

    arrival_s: float
    token_s: list[float] = field(default_factory=list)
    done: bool = False

    def listen(self, what: object) -> None:
        assert isinstance(what, Chunk), what
        self.token_s.append(time.monotonic())
        self.done = what.finish is not None

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        tokens = len(self.token_s)
        return (self.token_s[-1] - self.token_s[0]) / (tokens - 1) if tokens > 1 else None


def arrivals(options: argparse.Namespace) -> Iterator[tuple[float, int, int]]:
    """(seconds from the start, prompt tokens, tokens to generate), in order of time."""
    if options.trace is None:
        rng, at = random.Random(0), 0.0
        while (at := at + rng.expovariate(options.rate)) < options.seconds:
            yield at, rng.randrange(8, 128), rng.randrange(8, 96)
        return
    with options.trace.open() as file:
        first: datetime | None = None
        for row in csv.DictReader(file):
            when = datetime.fromisoformat(row["TIMESTAMP"][:26])
            first = first or when
            at = (when - first).total_seconds() / options.speed
            if at > options.seconds:
                return
            prompt = min(int(row["ContextTokens"]), CONTEXT // 2)
            yield at, max(1, prompt), max(1, min(int(row["GeneratedTokens"]), CONTEXT // 2 - 1))


class Rollout:
    """Keeps a number of responses in flight."""

    def __init__(self, host: Host, spec: Any, weights: dict[str, Any], device: str, responses: int) -> None:
        self._next, self._responses = 0, responses
        self.tenant = RolloutTenant(host, make=lambda: build.build_rollout(host, spec, device))
        self.tenant.start()
        self.tenant.attach(self._emit)
        self.tenant.swap(0, weights, lambda error: None)
        self._add(responses)

    def _emit(self, message: object) -> None:
        if isinstance(message, Tokens):
            self._add(len(message.finished))
        elif isinstance(message, Released):
            time.sleep(0.1)
            self._add(len(message.handles))

    def _add(self, count: int) -> None:
        work: list[Work] = []
        for _ in range(count):
            rng = random.Random(self._next)
            prompt = array("I", (rng.randrange(3, 90) for _ in range(40))).tobytes()
            work.append(
                Work(handle=self._next, prompt=prompt, position=0, seed=self._next, max_tokens=rng.randrange(20, 200),
                     sampling=Sampling(), stop=())
            )  # fmt: skip
            self._next += 1
        if work:
            self.tenant.add(work)


def measure(options: argparse.Namespace, *, lend: bool) -> dict[str, float]:
    device, dtype = devices.resolve(options.device, "auto", options.threads)
    model = load.load(options.serve, dtype=dtype, device=device)
    objectives = Objectives(ttft_s=options.ttft_ms / 1000, tpot_s=options.tpot_ms / 1000)
    spec = build.serving_spec(model, dtype, context=CONTEXT, max_running=64, kv_tokens=options.kv_tokens)
    host = build.build_host(spec, model, device, objectives)
    host.start()
    if lend:
        other = load.load(options.rollout, dtype=dtype, device=device)
        asked = build.serving_spec(other, dtype, context=256, max_running=options.responses, kv_tokens=0)
        rollout = Rollout(host, asked, dict(other.state_dict()), device, options.responses)
        while not (rollout.tenant.built and host.metrics.rollout_tokens > 10 * options.responses):
            assert rollout.tenant.failed is None, rollout.tenant.failed
            time.sleep(0.05)
    rng, served = random.Random(1), list[Served]()
    began_s, lent = time.monotonic(), host.metrics.rollout_tokens
    for n, (at, prompt, tokens) in enumerate(arrivals(options)):
        time.sleep(max(0.0, began_s + at - time.monotonic()))
        request = Served(time.monotonic())
        served.append(request)
        ids = tuple(rng.randrange(3, 90) for _ in range(prompt))
        host.submit(Request(id=str(n), prompt=ids, seed=n, max_tokens=tokens), request.listen)
    while not all(r.done for r in served):
        time.sleep(0.01)
    took_s, lent = time.monotonic() - began_s, host.metrics.rollout_tokens - lent
    host.close()
    ttft, tpot = sorted(r.ttft_s for r in served), sorted(t for r in served if (t := r.tpot_s) is not None)
    late = sum(t > objectives.ttft_s for t in ttft) + sum(t > objectives.tpot_s for t in tpot)
    return {
        "requests": len(served), "TTFT p50 ms": 1000 * at_share(ttft, 0.5), "TTFT p99 ms": 1000 * at_share(ttft, 0.99),
        "TPOT p50 ms": 1000 * at_share(tpot, 0.5), "TPOT p99 ms": 1000 * at_share(tpot, 0.99), "violations": late,
        "rollout tok/s": lent / took_s, "step error": host.rollout_time.error,
    }  # fmt: skip


def at_share(values: list[float], share: float) -> float:
    """The value below which this share of the sorted values is."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", default="tiny", help="model that is served")
    parser.add_argument("--rollout", default="tiny", help="model of the rollout")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the load")
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second, without a trace")
    parser.add_argument("--trace", type=Path, help="CSV file with TIMESTAMP, ContextTokens and GeneratedTokens")
    parser.add_argument("--speed", type=float, default=1.0, help="how many times as fast the trace is played")
    parser.add_argument("--responses", type=int, default=8, help="rollout responses in flight")
    parser.add_argument("--kv-tokens", type=int, default=32768, help="tokens of the served model that fit")
    parser.add_argument("--ttft-ms", type=float, default=500.0)
    parser.add_argument("--tpot-ms", type=float, default=150.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    for name, lend in (("serving alone", False), ("with a rollout", True)):
        figures = measure(options, lend=lend)
        print(f"{name:15s}", "  ".join(f"{key} {value:.1f}" for key, value in figures.items()), flush=True)


if __name__ == "__main__":
    main()
