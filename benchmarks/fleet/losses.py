"""The cost of a lost worker in tokens: the third table of benchmarks/fleet/costs.py.

There are three ways to continue after a loss: from the last token (windfall); from zero, for unfinished responses; and
by group, with every sibling truncated to the shortest one, finished ones included.

`drawn`: groups of 8 with log-normal lengths, interrupted when each response has `cut` tokens or is finished. Measures
the share of tokens that is kept.
`killed`: real worker processes (the real agent, session and link around a fake engine), killed at random with SIGKILL.
Every engine records the number of tokens that it has generated, so tokens in flight at the kill are counted, too.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import mmap
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from windfall.controller.ledger.episode import Episode
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.workers.versions import Offer
from windfall.engine.base import Engine
from windfall.events.log import EventLog
from windfall.link import messages as m
from windfall.link.gate import Gate, Terms
from windfall.link.socket import Port, Route
from windfall.types import Chunk, Lease, Request, Sampling
from windfall.weights.pulling.pull import PulledWeights, WeightPuller
from windfall.worker.controller_client import ControllerClient

SIGMA, SIBLINGS = 0.7, 8
TOKEN, STOP, SLOTS, STEP_S = "a token for this benchmark only", 1, 16, 0.002
MEDIAN = 400
ENGINE = m.EngineSpec(
    model_config="{}", dtype="float32", kv_tokens=0, page_size=16, max_running=0, max_rows=64, deterministic=True,
    longest=8, wanted=1,
)  # fmt: skip


def drawn(cut: int, *, median: int = 4096, groups: int = 20_000, seed: int = 0) -> tuple[float, float]:
    """Shares of the generated tokens that are kept: if unfinished responses restart from zero, and if groups are
    truncated to the shortest response."""
    rng = random.Random(seed)
    made = zero = shortest = 0.0
    for _ in range(groups):
        lengths = [rng.lognormvariate(math.log(median), SIGMA) for _ in range(SIBLINGS)]
        have = [min(length, cut) for length in lengths]
        made += sum(have)
        zero += sum(length for length in lengths if length <= cut)
        shortest += SIBLINGS * min(have)
    return zero / made, shortest / made


# the tokens of the fake engine: a function of seed and position, like sampling


@cache
def length_of(seed: int) -> int:
    return max(2, int(random.Random(seed).lognormvariate(math.log(MEDIAN), SIGMA)))


def token_of(seed: int, position: int) -> int:
    if position + 1 == length_of(seed):
        return STOP
    return 2 + xxhash.xxh32_intdigest(struct.pack("<QQ", seed, position)) % 30_000


class Pretender(Engine):
    """A fake engine with 16 slots and a step every 2 ms, which records the number of tokens that it has generated."""

    def __init__(self, tally: mmap.mmap) -> None:
        self.version = 0
        self._tally, self._made = tally, 0
        self._running: dict[str, tuple[int, int]] = {}

    def add(self, request: Request) -> None:
        self._running[request.id] = (request.seed, request.position)

    def cancel(self, id: str) -> None:
        self._running.pop(id, None)

    def swap(self, version: int, weights: Mapping[str, Any] | None = None, *, policy: str = "") -> None:
        self.version = version

    def __len__(self) -> int:
        return len(self._running)

    def step(self) -> list[Chunk]:
        time.sleep(STEP_S)
        out = []
        for id, (seed, position) in list(self._running.items()):
            token = token_of(seed, position)
            finish = "stop" if token == STOP else None
            out.append(
                Chunk(id=id, position=position, tokens=(token,), logprobs=(-0.5,), version=self.version, finish=finish)
            )
            self._running[id] = (seed, position + 1)
            if finish:
                del self._running[id]
        self._made += len(out)
        self._tally[:8] = struct.pack("<Q", self._made)
        return out


class NoWeights(WeightPuller):
    """A puller for an engine that has no weights."""

    def pull(self, load: m.Load, ask: Any = None, *, stop: Any = None) -> PulledWeights:
        return PulledWeights(digest=load.digest, tensors={})


async def worker(url: str, name: str, tally: Path) -> int:
    with tally.open("r+b") as file:
        shared = mmap.mmap(file.fileno(), 8)
    agent = ControllerClient(
        url, TOKEN, name=name, lease=Lease(), build=lambda spec: (Pretender(shared), SLOTS), puller=NoWeights(),
        say=lambda line: None,
    )  # fmt: skip
    return await agent.run()


@dataclass(kw_only=True, slots=True)
class Losses:
    kills: int = 0
    moved: int = 0
    made: int = 0
    """Tokens generated by all engines, including killed ones."""
    accepted: int = 0
    trained: int = 0
    """Tokens of all finished responses."""
    from_zero: int = 0
    """Tokens that the same kills would have cost if unfinished responses restarted from zero."""
    to_shortest: int = 0
    """Tokens that the same kills would have cost if groups were truncated to their shortest response."""
    wrong: int = 0
    """Responses that differ from an uninterrupted one."""


@dataclass(kw_only=True)
class Fleet:
    """The worker processes of this benchmark, numbered from 1."""

    url: str
    folder: Path
    here: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    started: int = 0

    async def start(self) -> None:
        self.started += 1
        name = f"p{self.started}"
        tally = self.folder / f"{name}.made"
        tally.write_bytes(bytes(8))
        command = [sys.executable, __file__, "--url", self.url, "--name", name, "--tally", str(tally)]
        self.here[name] = await asyncio.create_subprocess_exec(*command)

    def made(self) -> int:
        return sum(struct.unpack("<Q", path.read_bytes())[0] for path in self.folder.glob("*.made"))


async def killed(folder: Path, *, workers: int = 4, groups: int = 64, every_s: float = 1.0, seed: int = 0) -> Losses:
    rng, out = random.Random(seed), Losses()
    d = Dispatch(events=EventLog(folder / "events.jsonl"))
    gate = Gate("benchmark", TOKEN, log=d._events.instant, max_workers=100)
    gate.terms = {"": Terms(model="m", engine=ENGINE, heartbeat_s=0.3)}
    route = Route(
        receives=m.FromWorker, max_frame_bytes=m.MAX_FRAME_BYTES, handler=lambda li: gate.worker(li, d.attend)
    )
    port = Port("127.0.0.1", 0, {"/worker": route}, None)
    await port.open()
    d.set_offer(Offer(version=0, digest="d"))
    open_: dict[str, Episode] = {}
    finished: set[str] = set()

    class Owner:
        def turn_ended(self, id: str) -> None:
            d.ledger.close(id)
            finished.add(id)

        def rejected(self, id: str, why: str) -> None: ...

    listener = Owner()
    for g in range(groups):
        for s in range(SIBLINGS):
            e = Episode(
                id=f"{g}/{s}", prompt=(5, 6), seed=1000 * g + s, max_tokens=1 << 20, sampling=Sampling(),
                stop=frozenset((STOP,)),
            )  # fmt: skip
            open_[e.id] = e
            d.open(e, listener)
    watching, fleet = asyncio.create_task(d.watch()), Fleet(url=f"http://127.0.0.1:{port.port}", folder=folder)
    try:
        async with asyncio.timeout(180):
            for _ in range(workers):
                await fleet.start()
            while len(finished) < len(open_):
                await asyncio.sleep(rng.uniform(0.5, 1.5) * every_s)
                names = [n for n in fleet.here if d.ledger.running(n)]
                if names and d.ledger.queued:  # only while responses are queued
                    await _kill(rng.choice(names), fleet, d, open_, out)
    finally:
        watching.cancel()
        await port.close()
        for process in fleet.here.values():
            if process.returncode is None:
                process.kill()
            await process.wait()
    out.made, out.accepted = fleet.made(), d.ledger.counts.accepted
    out.trained = sum(len(e.tokens) for e in open_.values())
    out.wrong = sum(
        e.tokens.tolist() != [token_of(e.seed, i) for i in range(length_of(e.seed))] for e in open_.values()
    )
    d.ledger.check()
    return out


async def _kill(name: str, fleet: Fleet, d: Dispatch, all_: dict[str, Episode], out: Losses) -> None:
    held = [e.episode for e in d.ledger.held(name)]
    out.kills += 1
    out.moved += len(held)
    out.from_zero += sum(len(e.tokens) for e in held)
    for group in {e.id.partition("/")[0] for e in held}:
        have = [len(all_[f"{group}/{s}"].tokens) for s in range(SIBLINGS)]
        out.to_shortest += sum(have) - SIBLINGS * min(have)
    process = fleet.here.pop(name)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    await fleet.start()


def main() -> None:
    p = argparse.ArgumentParser(description="Run a worker process; started by benchmarks/fleet/costs.py.")
    p.add_argument("--url", required=True)
    p.add_argument("--name", required=True)
    p.add_argument("--tally", type=Path, required=True)
    a = p.parse_args()
    code = asyncio.run(worker(a.url, a.name, a.tally))
    os._exit(code)  # the thread of the engine may be in a step


if __name__ == "__main__":
    main()
