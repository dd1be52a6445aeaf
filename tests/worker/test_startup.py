"""The start of a worker: what runs in parallel, and what happens if it is interrupted. Uses sockets on loopback."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.hashing_engine import Hashing
from tests.support.fleets.listening_controller import WAIT_S, episode, expected, opened
from windfall.controller.workers.members import WorkerState
from windfall.engine.engine_thread import EngineThread
from windfall.link import messages as m
from windfall.link.memory import pair
from windfall.worker import worker_link
from windfall.worker.preemption import PreemptionNotice


def test_weights_are_pulled_while_the_engine_is_built(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (s, start):
            w, e = start(boot=lambda: m.LoadTimes(import_s=1.5, build_s=0.25)), episode("1/0")
            w.may_build.clear()
            s.dispatch.open(e, s.listener)
            await s.until(lambda: w.builds and w.puller.bytes_received == 100, "the weights are here")
            beats = s.dispatch.members.all["w"].seen_s
            await s.until(lambda: s.dispatch.members.all["w"].seen_s > beats + 0.2, "heartbeats go on")
            assert s.state("w") is WorkerState.PULLING
            assert w.engine.weights is None
            w.may_build.set()
            await s.until(lambda: "1/0" in s.ended, "the response has ended")
            assert e.tokens.tolist() == expected(e)
            assert (len(w.builds), w.engine.weights) == (1, "d0")

    asyncio.run(main())


def test_start_times_are_in_the_event_log(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (s, start):
            start(boot=lambda: m.LoadTimes(import_s=1.5, build_s=0.25))
            await s.until(lambda: s.state("w") is WorkerState.READY, "it is ready")
            s.offer(1)
            s.dispatch.open(episode("1/0"), s.listener)
            await s.until(lambda: "1/0" in s.ended, "a response of the second version")
            first, second = s.named("worker_ready")
            assert (first["import_s"], first["build_s"]) == (1.5, 0.25)
            assert first["age_s"] > 0
            assert first["pull_s"] + first["swap_s"] <= first["s"]
            assert second["pull_s"] > 0
            assert not {"import_s", "build_s", "age_s", "warm_s"} & second.keys(), "a process starts once"

    asyncio.run(main())


def test_newer_version_does_not_wait_for_the_engine(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (s, start):
            w = start()
            w.may_build.clear()
            await s.until(lambda: len(w.puller.loads) == 1, "the first version is here")
            s.offer(1)
            s.dispatch.open(episode("1/0"), s.listener)
            await s.until(lambda: len(w.puller.loads) == 2, "the second is pulled, and nothing was built")
            assert w.engine.weights is None
            w.may_build.set()
            await s.until(lambda: "1/0" in s.ended, "the response has ended")
            assert w.engine.weights == "d1"
            assert [e["version"] for e in s.named("worker_ready")] == [1]

    asyncio.run(main())


def test_worker_drained_while_the_engine_is_built(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (s, start):
            w = start()
            w.may_build.clear()
            await s.until(lambda: w.builds and s.state("w") is WorkerState.PULLING, "it builds")
            began = time.monotonic()
            s.dispatch.drain("w", "the run is over")
            assert await w.ends() == 0
            assert time.monotonic() - began < 20.0, "nobody waits for an engine that has made nothing"
            await s.until(lambda: s.named("worker_left"), "it has said so")

    asyncio.run(main())


def test_worker_warned_while_the_engine_is_built_exits(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (s, start):
            w = start()
            w.may_build.clear()
            await s.until(lambda: w.builds and s.state("w"), "it builds")
            w.client.warned(PreemptionNotice(source="aws", left_s=120.0, detail="terminate"))
            began = time.monotonic()
            assert await w.ends() == 0
            assert time.monotonic() - began < 20.0

    asyncio.run(main())


def test_unexpected_build_error_is_raised(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (_, start):
            w = start()
            w.build_error = RuntimeError("out of memory")  # type: ignore[assignment]
            with pytest.raises(RuntimeError, match="out of memory"):
                await w.ends()

    asyncio.run(main())


def test_engine_that_is_never_built_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "BUILD_S", 0.1)
    may_build = threading.Event()

    def make() -> tuple[Any, int]:
        assert may_build.wait(WAIT_S)
        return Hashing(), 4

    def pull(load: m.Load, give_up: threading.Event) -> worker_link.PulledWeights:
        return worker_link.PulledWeights(digest=load.digest, tensors={})

    async def main() -> None:
        ours, theirs = pair("controller", "worker")
        host = EngineThread(None, make=make)
        host.start()
        assert (host.built, host.stats().running) == (False, 0)
        serving = asyncio.create_task(worker_link.WorkerLink(theirs, host, pull, heartbeat_s=5.0).serve())
        await ours.send(m.Load(version=1, digest="d1"))
        with pytest.raises(worker_link.Stalled, match=r"waited 0\.1 s for the engine to be built"):
            await asyncio.wait_for(serving, WAIT_S)
        may_build.set()
        await asyncio.to_thread(host.close)

    asyncio.run(main())
