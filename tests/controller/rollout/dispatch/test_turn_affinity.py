"""Turns on real engines: a response returns to the worker that has its tokens, and gets the same tokens wherever it
goes."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.small_models import VOCABULARY
from tests.support.engines.small_models import engine as new_engine
from tests.support.engines.two_workers import Held, clone, model
from tests.support.fleets.response_owner import FunctionOwner
from windfall.controller.ledger.episode import Episode
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.workers.members import WorkerState
from windfall.controller.workers.versions import Offer
from windfall.events.log import EventLog
from windfall.recipe.sections import Techniques
from windfall.run.commands.in_process import in_process_worker
from windfall.types import Sampling

TURNS, RESPONSES, EACH = 4, 6, 8
WAIT_S = 30.0


class Sessions:
    """Responses with several turns: after every turn, the next one opens with an observation."""

    def __init__(self, dispatch: Dispatch) -> None:
        self.dispatch, self.left = dispatch, {f"{n}/0": TURNS - 1 for n in range(RESPONSES)}
        self.done: dict[str, tuple[list[int], list[float]]] = {}
        self.workers: dict[str, list[str]] = {id: [] for id in self.left}
        self.between: Any = None
        listener = FunctionOwner(turn_ended=self.turn_ended, rejected=lambda id, why: pytest.fail(why))
        self.episodes: dict[str, Episode] = {}
        for n, id in enumerate(self.left):
            prompt = tuple(10 + (7 * i + 11 * n) % 140 for i in range(70))
            e = Episode(id=id, prompt=prompt, seed=n, max_tokens=EACH, sampling=Sampling(), stop=frozenset())
            self.episodes[id] = e
            dispatch.open(e, listener)

    def turn_ended(self, id: str) -> None:
        self.workers[id].append(self.dispatch.ledger.entries[id].last_worker)
        asyncio.get_running_loop().call_later(0.01, self._answer, id)

    def _answer(self, id: str) -> None:
        e = self.episodes[id]
        if not self.left[id]:
            self.done[id] = (e.tokens.tolist(), e.logprobs.tolist())
            self.dispatch.close(id)
            return
        self.left[id] -= 1
        e.max_tokens += 20 + EACH
        assert e.observe(range(5, 25))
        self.dispatch.next_turn(id)
        if self.between is not None:
            self.between()


async def run(folder: Path, *, affinity: bool, between: Any = None, **how: Any) -> tuple[Sessions, list[Any], Dispatch]:
    engines: list[Any] = [Held(new_engine(clone(), deterministic=True, max_running=8, **how)) for _ in "ab"]
    events = EventLog(folder / f"{affinity}-{how}.jsonl")
    dispatch = Dispatch(events=events, vocabulary=VOCABULARY, techniques=Techniques(affinity=affinity))
    dispatch.set_offer(Offer(version=0, digest="d0"))
    async with AsyncExitStack() as stack:
        for name, engine in zip("ab", engines, strict=True):
            await stack.enter_async_context(in_process_worker(dispatch, engine, 8, name=name, heartbeat_s=0.02))
        dispatch.placement.speeds.profile = lambda worker: None  # times on a busy machine must not decide
        async with asyncio.timeout(WAIT_S):
            while [w.state for w in dispatch.members.here()] != [WorkerState.READY] * 2:
                await asyncio.sleep(0.002)
        sessions = Sessions(dispatch)
        sessions.between = between and (lambda: between(sessions))
        async with asyncio.timeout(WAIT_S):
            while len(sessions.done) < RESPONSES:
                dispatch.ledger.check()
                await asyncio.sleep(0.002)
    events.close()
    return sessions, engines, dispatch


def test_turns_return_to_their_worker_and_tokens_stay_the_same(tmp_path: Path) -> None:
    model()
    here, engines, dispatch = asyncio.run(run(tmp_path, affinity=True))
    assert all(len(set(workers)) == 1 for workers in here.workers.values())
    assert {w for workers in here.workers.values() for w in workers} == {"a", "b"}
    counts = dispatch.turns.take_counts()
    assert (counts.routed, counts.to_holder) == (18, 18)
    assert (counts.sessions, counts.turns) == (6, 24)
    assert dispatch.members.prefill.reused > 0
    there, without, _ = asyncio.run(run(tmp_path, affinity=False))
    assert there.done == here.done  # bit for bit
    assert sum(e.counters.prefilled for e in engines) <= sum(e.counters.prefilled for e in without)
    assert not dispatch.turns._sessions


def test_new_weights_end_what_is_kept(tmp_path: Path) -> None:
    left_over: list[set[str]] = []

    def between(sessions: Sessions) -> None:
        turns = sessions.dispatch.turns
        if left_over:
            return
        real = turns.cleared

        def cleared(worker: str) -> None:
            real(worker)
            left_over.append({id for id, s in turns._sessions.items() if s.holder == worker})

        turns.cleared = cleared
        left_over.append(set())
        sessions.dispatch.set_offer(Offer(version=1, digest="d1"))

    sessions, engines, dispatch = asyncio.run(run(tmp_path, affinity=True, between=between))
    assert [e.version for e in engines] == [1, 1]
    assert len(left_over) >= 3  # both workers have loaded the new version
    assert not any(left_over)
    assert any(v == 1 for e in sessions.episodes.values() for v, _ in e.version_runs)
    assert not dispatch.turns._held
