"""A worker with the real join handshake of a controller, over sockets on loopback: it joins, reconnects and ends."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.fleets.listening_controller import SPEC, Site, episode, expected, opened
from windfall.controller.workers.members import WorkerState
from windfall.errors import WindfallError
from windfall.link import handshake
from windfall.processes.process import EXIT_NO_CONTROLLER
from windfall.types import Capabilities
from windfall.worker.controller_client import ControllerClient


def test_worker_joins_pulls_and_generates(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (s, start):
            w, e = start(), episode("1/0")
            s.dispatch.open(e, s.listener)
            await s.until(lambda: "1/0" in s.ended, "the response has ended")
            assert e.tokens.tolist() == expected(e)
            assert (w.builds, w.engine.weights) == ([SPEC], "d0")
            (load,) = w.puller.loads
            assert [source.location for source in load.files[0].route.sources] == ["http://127.0.0.1:99"]
            assert (s.hellos[0].model, s.hellos[0].held) == ("", {})
            s.dispatch.drain("w", "the run is over")
            assert await w.ends() == 0
            assert w.said[-1] == "drained: the run is over"

    asyncio.run(main())


def test_lost_link_costs_only_a_reconnect(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (s, start):
            w, e = start(), episode("1/0", max_tokens=200)
            s.dispatch.open(e, s.listener)
            await s.until(lambda: len(e.tokens) > 20, "it is under way")
            before, made, host = len(e.tokens), sum(w.engine.made.values()), w.client._host
            began = time.monotonic()
            await s.dispatch._outbox._links["w"].close("a glitch")
            await s.until(lambda: s.state("w#2") is WorkerState.READY, "it is back")
            assert time.monotonic() - began < 15.0
            await s.until(lambda: "1/0" in s.ended, "the response has ended")
            assert e.tokens.tolist() == expected(e)
            assert s.state("w") is WorkerState.GONE
            assert len(w.builds) == 1, "the engine is not built again"
            assert w.client._host is host
            assert w.puller.bytes_received == 100, "the weights are not pulled again"
            assert (s.hellos[1].model, s.hellos[1].held) == ("model-1", {"": (0, "d0")})
            again = sum(w.engine.made.values()) - len(e.tokens)
            assert again <= made - before + 20, "only what was on its way is made again"
            assert len(s.named("worker_lost")) == 1

    asyncio.run(main())


def test_worker_builds_another_engine_if_the_run_asks_for_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (s, start):
            first = msgspec.structs.replace(SPEC, kv_dtype="fp8")
            s.gate.terms = {"": msgspec.structs.replace(s.gate.terms[""], engine=first)}
            w, e = start(), episode("1/0", max_tokens=200)
            w.engine.capabilities = Capabilities(name="test", kv_dtype="fp8")
            s.dispatch.open(e, s.listener)
            await s.until(lambda: len(e.tokens) > 20, "it is under way")
            before, host = len(e.tokens), w.client._host
            second = msgspec.structs.replace(SPEC, kv_dtype="bf16")
            s.gate.terms = {"": msgspec.structs.replace(s.gate.terms[""], engine=second)}
            s.dispatch.rebuild_fp8_engines("fp8 is too coarse")
            await s.until(lambda: s.state("w#2") is WorkerState.READY, "it is back")
            assert w.builds == [first, second]
            assert w.client._host is not host
            await s.until(lambda: "1/0" in s.ended, "the response has ended")
            assert e.tokens.tolist() == expected(e)
            assert [event["kept_tokens"] >= before for event in s.named("worker_left")] == [True]
            assert not s.named("worker_lost")
            assert w.puller.bytes_received == 100, "the weights are not pulled again"
            s.dispatch.drain("w#2", "the run is over")
            assert await w.ends() == 0

    asyncio.run(main())


def test_lender_keeps_its_engine_when_the_run_leaves_fp8(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (s, start):
            terms = [
                msgspec.structs.replace(s.gate.terms[""], engine=msgspec.structs.replace(SPEC, kv_dtype=name))
                for name in ("fp8", "bf16")
            ]
            s.gate.terms = {"": terms[0]}
            w = start(lends=True)
            await s.until(lambda: w.builds and s.state("w"), "it is there")
            s.gate.terms = {"": terms[1]}
            s.dispatch.rebuild_fp8_engines("fp8 is too coarse")
            assert s.state("w") is not WorkerState.DRAINING
            await s.dispatch._outbox._links["w"].close("a glitch")
            await s.until(lambda: s.state("w#2"), "it is back")
            await s.until(lambda: w.said.count("joined as w") == 2, "it has read its Welcome")
            assert len(w.builds) == 1

    asyncio.run(main())


def test_link_lost_while_the_engine_is_built(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (s, start):
            w = start()
            w.may_build.clear()
            await s.until(lambda: w.builds and s.state("w"), "it builds")
            await s.dispatch._outbox._links["w"].close("a glitch")
            await s.until(lambda: s.state("w#2"), "it is back")
            w.may_build.set()
            await s.until(lambda: s.state("w#2") is WorkerState.READY, "it is ready")
            assert len(w.builds) == 1, "there may not be room for a second one"

    asyncio.run(main())


def test_worker_reconnects_to_a_restarted_controller(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path / "a") as (first, start):
            w = start()
            await first.until(lambda: first.state("w") is WorkerState.READY, "it is there")
            await first.port.close("killed")
            await asyncio.sleep(0.3)
            second = Site(tmp_path / "b")
            second.port.port = first.port.port
            await second.port.open()
            try:
                await second.until(lambda: second.state("w") is WorkerState.READY, "it has come to the new one")
                assert (len(w.builds), w.puller.bytes_received) == (1, 100)
                assert any("reconnecting for" in line for line in w.said)
            finally:
                await w.close()
                await second.port.close()
                second.events.close()

    asyncio.run(main())


def test_held_weights_are_those_of_the_engine_not_of_the_last_link(tmp_path: Path) -> None:
    """After a lost link with d0 the worker loads d1; then the trainer is set back, and d0 is requested again."""

    async def main() -> None:
        async with opened(tmp_path) as (s, start):
            w = start()
            await s.until(lambda: s.state("w") is WorkerState.READY, "it has d0")
            await s.dispatch._outbox._links["w"].close("a glitch")
            await s.until(lambda: s.state("w#2") is WorkerState.READY, "it is back")
            assert w.engine.weights == "d0"
            for n in (1, 0):
                s.offer(n)
                s.dispatch.open(episode(f"{n}/0", max_tokens=2), s.listener)
                await s.until(lambda n=n: f"{n}/0" in s.ended, f"a response of d{n}")
                assert w.engine.weights == f"d{n}", "the engine has the weights that it says it has"

    asyncio.run(main())


def test_worker_gives_up_without_a_controller(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (s, start):
            url = s.url
            await s.port.close()
            began = time.monotonic()
            w = start(url, patience_s=0.4)
            assert await w.ends() == EXIT_NO_CONTROLLER
            assert 0.4 <= time.monotonic() - began < 30.0
            assert w.said[-1].startswith(f"waited 0.4 s for a controller at {url}; leaving. Check that the ")
            assert not w.builds

    asyncio.run(main())


def test_patience_begins_with_the_last_link(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (s, start):
            w = start(patience_s=0.5)
            await s.until(lambda: s.state("w") is WorkerState.READY, "it is there")
            await asyncio.sleep(0.7)
            assert not w.running.done(), "while it has a link it has patience"
            await s.port.close()
            assert await w.ends() == EXIT_NO_CONTROLLER

    asyncio.run(main())


def test_permanently_refused_worker_exits(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (s, start):
            stranger, other = start(token="another token"), start(name="other", model="model-2", lends=True)
            assert (await stranger.ends(), await other.ends()) == (3, 3)
            assert "wrong token" in stranger.said[-1]
            assert "the run trains model model-1" in other.said[-1]
            assert not s.hellos
            assert len(s.named("refused")) == 2

    asyncio.run(main())


def test_controller_learns_why_a_worker_refuses_the_model(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (s, start):
            w = start()
            w.build_error = WindfallError("wrong by 3 nats", where="model.path")
            assert await w.ends() == 3, "it is not started again"
            await s.until(lambda: s.named("worker_lost"), "the controller knows")
            (lost,) = s.named("worker_lost")
            assert "refused: model.path: wrong by 3 nats" in lost["why"]

    asyncio.run(main())


def test_temporarily_refused_worker_retries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (s, start):
            terms, s.gate.terms = s.gate.terms, {}
            dials, attend = [0], s.gate.worker

            async def counted(*args: Any) -> None:
                dials[0] += 1
                await attend(*args)

            monkeypatch.setattr(s.gate, "worker", counted)
            w = start()
            await s.until(lambda: dials[0] >= 3, "it was refused twice")
            assert len(w.said) == 1, "and says so once"
            assert "the run is still starting" in w.said[0]
            s.gate.terms = terms
            await s.until(lambda: s.state("w") is WorkerState.READY, "it is there")

    asyncio.run(main())


def test_worker_that_is_too_slow_for_the_handshake_retries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shake_hands = ControllerClient._handshake

    async def main() -> None:
        async with opened(tmp_path) as (s, start):

            async def too_late_once(client: ControllerClient, link: Any) -> Any:
                if not s.named("refused"):
                    await s.until(lambda: s.named("refused"), "the controller waits no longer")
                    monkeypatch.setattr(handshake, "TIMEOUT_S", 60.0)
                return await shake_hands(client, link)

            monkeypatch.setattr(handshake, "TIMEOUT_S", 0.2)
            monkeypatch.setattr(ControllerClient, "_handshake", too_late_once)
            w = start()
            await s.until(lambda: s.state("w") is WorkerState.READY, "it is there")
            assert [r["why"] for r in s.named("refused")] == ["no hello within 0.2 s"]
            assert "refused for now: no hello within 0.2 s" in w.said

    asyncio.run(main())


def test_worker_ends_if_its_engine_cannot_be_built(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (_, start):
            w = start()
            w.build_error = WindfallError("no such model here", fix="Install it.")
            assert await w.ends() == 3
            assert "no such model here" in w.said[-1]

    asyncio.run(main())


def test_engine_that_fails_ends_the_worker(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (s, start):
            w, e = start(), episode("1/0")
            s.dispatch.open(e, s.listener)
            await s.until(lambda: len(e.tokens) > 5, "it is under way")
            w.engine.raises = True
            assert await w.ends() == 1
            assert "RuntimeError: device lost" in w.said[-1]
            await s.until(lambda: s.state("w") is WorkerState.GONE, "the controller knows")
            start(name="v")
            await s.until(lambda: "1/0" in s.ended, "another has finished it")
            assert e.tokens.tolist() == expected(e)

    asyncio.run(main())


def test_unknown_cloud_is_refused_immediately(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (_, start):
            with pytest.raises(WindfallError, match="unknown cloud 'awz'"):
                await start(clouds=["awz"]).ends()

    asyncio.run(main())
