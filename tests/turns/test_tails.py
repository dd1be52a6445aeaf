"""Two workers of one job, on devices that another job wants: the responses of one continue on the other, with every
token as if they had never moved. Real engines, turns and migration; only step times and lengths are given."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.support.engines.small_models import VOCABULARY
from tests.support.engines.two_workers import IDS, WAIT_S, Held, engine, episodes, uninterrupted
from tests.support.fleets.response_owner import FunctionOwner
from tests.support.runs.turn_server import Served, served
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.workers.members import WorkerState
from windfall.controller.workers.versions import Offer
from windfall.controller.workers.worker_speed import WorkerSpeeds
from windfall.events.log import EventLog
from windfall.run.commands.in_process import in_process_worker
from windfall.step_time import StepTime
from windfall.turns import client

DEVICES = ("cpu0", "cpu1")
CUT = 2
"""Steps of each engine before the other job comes."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(WorkerSpeeds, "profile", lambda self, worker: StepTime(fixed_s=10.0, each_s=0.001))
    with served(tmp_path / "turns", DEVICES, slice_s=0.02) as own:
        monkeypatch.setenv(client.SOCKET, str(own.path))
        monkeypatch.setenv(client.KEY, "key-a")
        yield own


@pytest.mark.parametrize("contended", [True, False])
def test_responses_that_make_room_for_another_job_keep_every_token(
    contended: bool, server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = episodes()
    ended: set[str] = set()

    async def until(holds: object, what: str) -> None:
        assert callable(holds)
        async with asyncio.timeout(WAIT_S):
            while not holds():
                await asyncio.sleep(0.001)

    async def main() -> Dispatch:
        events = EventLog(tmp_path / "events.jsonl")
        dispatch = Dispatch(events=events, vocabulary=VOCABULARY)
        dispatch.set_offer(Offer(version=0, digest="d0"))
        for n in range(50):  # lengths of other groups
            dispatch.placement.lengths.finished(f"{100 + n}", n, 100)
        engines = [Held(engine(), CUT) for _ in DEVICES]
        others = [server.client("b", device=device) for device in DEVICES]
        owner = FunctionOwner(turn_ended=ended.add, rejected=lambda id, why: pytest.fail(f"{id}: {why}"))
        try:
            async with AsyncExitStack() as stack:
                for device, held in zip(DEVICES, engines, strict=True):
                    monkeypatch.setenv(client.DEVICES, device)
                    worker = in_process_worker(dispatch, held, 16, name=device, heartbeat_s=0.05)
                    await stack.enter_async_context(worker)
                members = dispatch.members.all.values
                await until(lambda: [w.state for w in members()] == [WorkerState.READY] * 2, "both are ready")
                for episode in done.values():
                    dispatch.open(episode, owner)
                await until(lambda: all(held.stopped.is_set() for held in engines), "both have begun")
                assert all(held.requests for held in engines)
                if contended:
                    assert not any(other.take(0.0) for other in others), "the engines have the turns"
                    await until(lambda: dispatch.placement.move_targets, "responses are to move")
                for held in engines:
                    held.go.set()
                for other in others if contended else ():
                    other.give()  # it waited; now it has what it wanted
                await until(lambda: len(ended) == len(IDS), "all responses have ended")
        finally:
            for held in engines:
                held.go.set()
            for other in others:
                other.close()
            events.close()
        return dispatch

    dispatch = asyncio.run(main())
    for id, (tokens, logprobs) in uninterrupted().items():
        assert done[id].tokens.tolist() == tokens, id
        assert done[id].logprobs.tolist() == logprobs, id
    gathering = dispatch.accounts.gathering
    assert bool(gathering.released) == contended  # how often depends on when the heartbeats arrive
    assert bool(gathering.moves) == contended
    dispatch.ledger.check()
    assert dispatch.ledger.lost_tokens() == 0
