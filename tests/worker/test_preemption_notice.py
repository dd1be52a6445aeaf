"""A worker whose machine will be preempted, over sockets on loopback: it hands over its responses and leaves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.fleets.listening_controller import episode, expected, opened
from windfall.controller.workers.members import WorkerState
from windfall.worker import controller_client
from windfall.worker.preemption import PreemptionNotice


def test_warned_worker_hands_over_and_leaves(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (s, start):
            w, e = start(), episode("1/0", max_tokens=150)
            s.dispatch.open(e, s.listener)
            await s.until(lambda: len(e.tokens) > 10, "it is under way")
            w.client.warned(PreemptionNotice(source="aws", left_s=None, detail="spot instance-action terminate"))
            assert await w.ends() == 0
            assert "warned by aws: spot instance-action terminate" in w.said
            await s.until(lambda: s.state("w") is WorkerState.GONE, "the controller knows")
            assert sum(w.engine.made.values()) == len(e.tokens), "all that it made was handed over"
            assert [len(s.named(n)) for n in ("worker_warned", "worker_left", "worker_lost")] == [1, 1, 0]
            start(name="v")
            await s.until(lambda: "1/0" in s.ended, "another has finished it")
            assert e.tokens.tolist() == expected(e)

    asyncio.run(main())


def test_worker_warned_early_gets_work_until_its_last_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windfall.controller.rollout.dispatch.DRAIN_LEAD_S", 0.1)

    async def main() -> None:
        async with opened(tmp_path) as (s, start):
            w, e, other = start(), episode("1/0", max_tokens=5000), episode("2/0")
            s.dispatch.open(e, s.listener)
            await s.until(lambda: len(e.tokens) > 10, "it is under way")
            w.client.warned(PreemptionNotice(source="gcp", left_s=1.0, detail="preempted"))
            await s.until(lambda: s.named("worker_warned"), "the controller knows")
            assert s.state("w") is WorkerState.READY
            s.dispatch.open(other, s.listener)
            before = len(e.tokens)
            assert await w.ends() == 0
            assert len(e.tokens) > before + 20, "it worked on while it could"
            assert len(other.tokens) > 20, "it got what came later, too"
            await s.until(lambda: s.state("w") is WorkerState.GONE, "the controller knows")
            assert sum(w.engine.made.values()) == len(e.tokens) + len(other.tokens), "all was handed over"
            assert [len(s.named(n)) for n in ("worker_left", "worker_lost")] == [1, 0]
            seconds = s.dispatch.accounts.totals(asyncio.get_running_loop().time()).holders["spot"].seconds
            assert seconds["generating"] > 0.5 > seconds.get("draining", 0.0), "it is paid for generating"

    asyncio.run(main())


def test_without_migration_a_warned_worker_gets_no_work_it_cannot_finish(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (s, start):
            s.dispatch._migration = False
            w = start()
            await s.until(lambda: s.state("w") is WorkerState.READY, "it is there")
            w.client.warned(PreemptionNotice(source="gcp", left_s=30.0, detail="preempted"))
            await s.until(lambda: s.state("w") is WorkerState.DRAINING, "the controller knows")

    asyncio.run(main())


def test_worker_warned_without_a_link_exits(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (s, start):
            url = s.url
            await s.port.close()
            w = start(url)
            await asyncio.sleep(0.05)
            w.client.warned(PreemptionNotice(source="sigterm", left_s=None, detail="SIGTERM"))
            assert await w.ends() == 0

    asyncio.run(main())


@pytest.mark.parametrize("left_s", [60.0, 5.0])
def test_warned_worker_reconnects_if_enough_time_is_left(tmp_path: Path, left_s: float) -> None:

    async def main() -> None:
        async with opened(tmp_path) as (s, start):
            w = start()
            await s.until(lambda: s.state("w") is WorkerState.READY, "it is there")
            w.client.warned(PreemptionNotice(source="azure", left_s=left_s, detail="Preempt"))
            await s.until(lambda: s.named("worker_warned"), "the controller knows")
            await s.dispatch._outbox._links["w"].close("a glitch")
            if left_s < controller_client.LEAVE_S:
                assert await w.ends() == 0
                assert len(s.hellos) == 1
                return
            await s.until(lambda: len(s.named("worker_warned")) == 2, "the next link is told, too")
            assert left_s - 20.0 < s.named("worker_warned")[-1]["left_s"] < left_s

    asyncio.run(main())


@pytest.mark.parametrize("left_s", [60.0, None])
def test_worker_warned_while_disconnected_reconnects_if_enough_time_is_left(
    tmp_path: Path, left_s: float | None
) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (s, start):
            w = start()
            await s.until(lambda: s.state("w") is WorkerState.READY, "it is there")
            await s.dispatch._outbox._links["w"].close("a glitch")
            await s.until(lambda: w.client._worker_link is None, "it has no link")
            w.client.warned(PreemptionNotice(source="azure", left_s=left_s, detail="Preempt"))
            if left_s is None:
                assert await w.ends() == 0
                assert s.named("worker_warned") == []
                return
            await s.until(lambda: s.named("worker_warned"), "the next link is told")
            assert left_s - 20.0 < s.named("worker_warned")[-1]["left_s"] < left_s

    asyncio.run(main())


def test_worker_leaves_if_the_controller_ignores_the_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_client, "LEAVE_S", 0.2)

    async def main() -> None:
        async with opened(tmp_path) as (s, start):
            monkeypatch.setattr(s.dispatch, "_warned", lambda member, notice: None)
            w = start()
            await s.until(lambda: s.state("w") is WorkerState.READY, "it is there")
            w.client.warned(PreemptionNotice(source="sigterm", left_s=None, detail="SIGTERM"))
            assert await w.ends() == 0

    asyncio.run(main())


def test_second_warning_that_leaves_less_time_counts(tmp_path: Path) -> None:
    """The cloud gives two minutes, and then SIGTERM arrives."""

    async def main() -> None:
        async with opened(tmp_path) as (s, start):
            w, e = start(), episode("1/0", max_tokens=5000)
            s.dispatch.open(e, s.listener)
            await s.until(lambda: len(e.tokens) > 10, "it is under way")
            w.client.warned(PreemptionNotice(source="aws", left_s=120.0, detail="terminate"))
            await s.until(lambda: s.named("worker_warned"), "the controller knows")
            w.client.warned(PreemptionNotice(source="aws", left_s=300.0, detail="terminate, later"))
            before = len(e.tokens)
            await s.until(lambda: len(e.tokens) > before + 20, "it works on")
            w.client.warned(PreemptionNotice(source="sigterm", left_s=None, detail="SIGTERM"))
            assert await w.ends() == 0
            assert w.said[-1] == "drained: warned"
            await s.until(lambda: s.state("w") is WorkerState.GONE, "the controller knows")
            assert sum(w.engine.made.values()) == len(e.tokens), "all that it made was handed over"
            assert len(s.named("worker_warned")) == 2

    asyncio.run(main())
