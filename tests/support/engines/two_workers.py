"""Two workers in this process, each with its own engine and thread over the same small model, and responses for them.

The first worker is held between two steps, so that the tokens it has sent are known exactly. The second joins when a
test calls `join`.
"""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines.small_models import VOCABULARY, build
from tests.support.engines.small_models import engine as new_engine
from tests.support.fleets.response_owner import FunctionOwner
from windfall.controller.ledger.episode import Episode
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.workers.members import WorkerState
from windfall.controller.workers.versions import Offer, PolicyVersions
from windfall.events.log import EventLog
from windfall.models import attention
from windfall.run.commands.in_process import in_process_worker, weights_already_loaded
from windfall.types import Chunk, Request, Sampling
from windfall.worker.worker_link import WorkerLink

STOPS = frozenset(range(3, 9))
"""Six of the 160 tokens stop a response: some siblings stop early, others at the limit."""
LONGEST = 14
IDS = ("4/0", "4/1", "4/2", "5/0", "5/1")
WAIT_S = 30.0


class Held:
    """An engine that stops before step `limit` + 1, and records its requests and the number of tokens it generated."""

    def __init__(self, engine: Any, limit: int = 10**9) -> None:
        self._engine, self._limit = engine, limit
        self.requests: list[Request] = []
        self.made = 0
        self.stopped, self.go = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __len__(self) -> int:
        return len(self._engine)

    def add(self, request: Request) -> None:
        self.requests.append(request)
        self._engine.add(request)

    def step(self) -> list[Chunk]:
        if self._limit == 0:
            self.stopped.set()
            assert self.go.wait(WAIT_S), "the engine was never released"
        self._limit -= 1
        chunks = self._engine.step()
        self.made += len(chunks)
        return chunks


@cache
def model(seed: int = 0) -> Any:
    """Version `seed` of the weights."""
    torch.set_num_threads(1)
    made = build("qwen3")
    with torch.no_grad():
        torch.manual_seed(seed)
        for p in made.parameters():
            p.add_(torch.randn_like(p) * 0.02 * seed)
    made.set_attn_implementation(attention.NAME)
    return made


def clone() -> Any:
    """A separate model with the weights of version 0, which a swap may overwrite."""
    made = type(model())(model().config).eval()
    made.load_state_dict(model().state_dict())
    made.set_attn_implementation(attention.NAME)
    return made


def engine(deterministic: bool = True, weights: Any = None) -> Any:
    return new_engine(weights or model(), deterministic=deterministic)


def request(id: str, so_far: tuple[int, ...] = ()) -> Request:
    task, sibling = map(int, id.split("/"))
    prompt = tuple(10 + (7 * i * task) % 150 for i in range(5 + 6 * (task % 2)))
    return Request(
        id=id, prompt=(*prompt, *so_far), seed=1000 * task + sibling, max_tokens=LONGEST - len(so_far),
        position=len(so_far), sampling=Sampling(temperature=1.0), stop=STOPS,
    )  # fmt: skip


def episodes() -> dict[str, Episode]:
    out = {}
    for id in IDS:
        r = request(id)
        out[id] = Episode(
            id=id, prompt=r.prompt, seed=r.seed, max_tokens=LONGEST, sampling=r.sampling, stop=frozenset(STOPS)
        )
    return out


def drained(e: Any, *asked: Request) -> dict[str, tuple[list[int], list[float]]]:
    """Tokens and log-probs of these requests, in the precision of a link."""
    out: dict[str, tuple[list[int], list[float]]] = {}
    for r in asked:
        e.add(r)
    while len(e):
        for c in e.step():
            tokens, logprobs = out.setdefault(c.id, ([], []))
            tokens += c.tokens
            logprobs += array("f", c.logprobs)
    return out


@cache
def uninterrupted(deterministic: bool = True) -> dict[str, tuple[list[int], list[float]]]:
    out = drained(engine(deterministic), *map(request, IDS))
    lengths = {len(tokens) for tokens, _ in out.values()}
    assert LONGEST in lengths, "some should run to the limit"
    assert min(lengths) < LONGEST, "some should end early"
    return out


def steps() -> int:
    return max(len(tokens) for tokens, _ in uninterrupted().values())


@dataclass(kw_only=True)
class Scene:
    dispatch: Dispatch
    first: Held
    second: Held
    worker: WorkerLink
    """The first worker."""
    join: Callable[[], Any]
    """Lets the second worker join."""
    listener: Any = None
    lost: int = 0
    """Number of workers that were lost when all responses had ended."""
    ended: set[str] = field(default_factory=set)
    episodes: dict[str, Episode] = field(default_factory=episodes)

    async def until(self, holds: Callable[[], object], what: str) -> None:
        try:
            async with asyncio.timeout(WAIT_S):
                while not holds():
                    self.dispatch.ledger.check()
                    self.dispatch.members.check()
                    await asyncio.sleep(0.001)
        except TimeoutError:
            raise AssertionError(f"waited {WAIT_S} s until {what}") from None

    def accepted(self) -> int:
        return self.dispatch.ledger.counts.accepted

    def state(self) -> WorkerState | None:
        """State of the first worker."""
        member = self.dispatch.members.all.get("first")
        return member.state if member else None


@asynccontextmanager
async def scene(
    folder: Path,
    cut: int,
    *,
    deterministic: bool = True,
    pull: Any = weights_already_loaded,
    slots: int = 16,
    engines: Any = None,
    staleness: int = 0,
) -> AsyncIterator[Scene]:
    """The first worker holds all responses and has run `cut` steps, whose tokens have all been accepted."""
    events = EventLog(folder / "events.jsonl")
    dispatch = Dispatch(events=events, vocabulary=VOCABULARY, versions=[PolicyVersions(staleness=staleness)])
    dispatch.set_offer(Offer(version=0, digest="d0"))
    one, two = engines or (engine(deterministic), engine(deterministic))
    first: Any = Held(one, cut)
    second: Any = Held(two)
    watching = asyncio.create_task(dispatch.watch())
    stack: list[Any] = []

    async def join() -> None:
        stack.append(in_process_worker(dispatch, second, slots, name="second", pull=pull))
        await stack[-1].__aenter__()

    try:
        async with in_process_worker(dispatch, first, slots, name="first", pull=pull) as worker:
            s = Scene(dispatch=dispatch, first=first, second=second, worker=worker, join=join)
            s.listener = FunctionOwner(turn_ended=s.ended.add, rejected=lambda id, why: pytest.fail(f"{id}: {why}"))
            await s.until(lambda: s.state() is WorkerState.READY, "the first worker is ready")
            for e in s.episodes.values():
                dispatch.open(e, s.listener)
            await s.until(first.stopped.is_set, "the first worker has stopped")
            await s.until(lambda: s.accepted() == first.made, "all its tokens were accepted")
            yield s
            await s.until(lambda: len(s.ended) == len(IDS), "all responses have ended")
            s.lost = dispatch.members.lost
            first.go.set()
    finally:
        first.go.set()
        for other in stack:
            await other.__aexit__(None, None, None)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        events.close()
