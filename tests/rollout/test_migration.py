"""A response that loses its worker goes on elsewhere as if nothing had happened: the real engine, sampled.

Two workers in this process, each with its own engine and thread over the same small model. The first is held between
two steps, so that what it has handed over is known to the token; then it is lost, drained, paused or relieved.
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
from small_models import VOCABULARY, build
from small_models import engine as new_engine

from windfall.engine import attention
from windfall.events import EventLog
from windfall.rollout.dispatch import Dispatch, Offer
from windfall.rollout.episode import Episode
from windfall.rollout.members import State
from windfall.types import Chunk, Request, Sampling
from windfall.worker.inside import has_it, inside
from windfall.worker.session import Session, Weights

STOPS = frozenset(range(3, 9))
"""Of 160 tokens: some siblings stop early, others at the limit."""
LONGEST = 14
IDS = ("4/0", "4/1", "4/2", "5/0", "5/1")
WAIT_S = 30.0


class Held:
    """An engine that stands still before step `limit` + 1, and keeps what it was asked and what it made."""

    def __init__(self, engine: Any, limit: int = 10**9) -> None:
        self._engine, self._limit = engine, limit
        self.requests: list[Request] = []
        self.made = 0
        self.standing, self.go = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __len__(self) -> int:
        return len(self._engine)

    def add(self, request: Request) -> None:
        self.requests.append(request)
        self._engine.add(request)

    def step(self) -> list[Chunk]:
        if self._limit == 0:
            self.standing.set()
            assert self.go.wait(WAIT_S), "nobody let the engine go on"
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
    """Tokens and log-probs, as a link carries them."""
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
    worker: Session
    """The first one."""
    join: Callable[[], Any]
    """The second one comes."""
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

    def state(self) -> State | None:
        """Of the first worker."""
        member = self.dispatch.members.all.get("first")
        return member.state if member else None


@asynccontextmanager
async def scene(
    folder: Path, cut: int, *, deterministic: bool = True, pull: Any = has_it, slots: int = 16, engines: Any = None
) -> AsyncIterator[Scene]:
    """All responses are with the first worker, which has made `cut` steps, all of them heard of."""
    events = EventLog(folder / "events.jsonl")
    dispatch = Dispatch(events=events, vocabulary=VOCABULARY)
    dispatch.set_offer(Offer(version=0, digest="d0", url=""))
    one, two = engines or (engine(deterministic), engine(deterministic))
    first, second = Held(one, cut), Held(two)
    watching = asyncio.create_task(dispatch.watch())
    stack: list[Any] = []

    async def join() -> None:
        stack.append(inside(dispatch, second, slots, name="second", pull=pull))
        await stack[-1].__aenter__()

    try:
        async with inside(dispatch, first, slots, name="first", pull=pull) as worker:
            s = Scene(dispatch=dispatch, first=first, second=second, worker=worker, join=join)
            dispatch.listen(s.ended.add, lambda id, why: pytest.fail(f"{id}: {why}"))
            await s.until(lambda: s.state() is State.READY, "the first worker is ready")
            for e in s.episodes.values():
                dispatch.open(e)
            await s.until(first.standing.is_set, "the first worker stands")
            await s.until(lambda: s.accepted() == first.made, "all it made was heard of")
            yield s
            await s.until(lambda: len(s.ended) == len(IDS), "all responses have ended")
            first.go.set()
    finally:
        first.go.set()
        for other in stack:
            await other.__aexit__(None, None, None)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        events.close()


def assert_uninterrupted(s: Scene, *, exact: bool = True) -> None:
    for id, (tokens, logprobs) in uninterrupted(exact).items():
        e = s.episodes[id]
        assert e.tokens.tolist() == tokens, id
        if exact:
            assert e.logprobs.tolist() == logprobs, id
        else:
            assert e.logprobs.tolist() == pytest.approx(logprobs, abs=1e-4), id
        assert e.finish == ("stop" if tokens[-1] in STOPS else "length")
        assert e.runs == [(0, len(tokens))]
    s.dispatch.ledger.check()
    assert s.dispatch.ledger.lost() == 0


def assert_went_on(s: Scene, before: dict[str, int]) -> None:
    """The second engine made what was missing `before`, no token of what was there, and saw nothing of the finished."""
    wanted = {id: len(tokens) - before[id] for id, (tokens, _) in uninterrupted().items()}
    assert s.second.made == sum(wanted.values())
    asked = {r.seed: r for r in s.second.requests}
    assert len(asked) == len(s.second.requests)
    for id in IDS:
        r = asked.get(request(id).seed)
        assert (r is not None) == (wanted[id] > 0), f"{id}: finished siblings are left alone"
        if r is not None:
            assert r.position == before[id]
            assert r.prompt == (*request(id).prompt, *uninterrupted()[id][0][: before[id]])


def have(s: Scene) -> dict[str, int]:
    return {id: len(e.tokens) for id, e in s.episodes.items()}


@pytest.mark.parametrize("cut", range(LONGEST))
def test_lost_after_any_token(cut: int, tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, cut) as s:
            before = have(s)
            assert max(before.values()) == cut
            await s.join()
            await s.worker.link.close("pulled out")
            await s.until(lambda: s.state() is State.GONE, "the loss is seen")
            assert have(s) == before, "what is there stays"
        assert_uninterrupted(s)
        assert_went_on(s, before)
        assert s.dispatch.ledger.counts.moved == sum(n < len(uninterrupted()[id][0]) for id, n in before.items())

    asyncio.run(main())


@pytest.mark.parametrize("cut", [0, 1, 6, LONGEST - 2])
def test_drained(cut: int, tmp_path: Path) -> None:
    """It is in the middle of a step: what that makes is handed over before it leaves."""

    async def main() -> None:
        async with scene(tmp_path, cut) as s:
            s.dispatch.drain("first", "asked to")
            await s.until(s.worker.host._orders.qsize, "the worker has heard")
            s.first.go.set()
            await s.until(lambda: s.state() is State.GONE, "it has left")
            before = have(s)
            assert max(before.values()) == cut + 1
            assert s.accepted() == s.first.made, "nothing of what it made is lost"
            await s.join()
        assert_uninterrupted(s)
        assert_went_on(s, before)
        assert s.dispatch.members.lost == 0

    asyncio.run(main())


@pytest.mark.parametrize("cut", [0, 1, 6, LONGEST - 2])
def test_paused(cut: int, tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, cut) as s:
            s.dispatch.pause("first")
            await s.until(lambda: s.worker.host._orders.qsize() == 2, "the worker has heard")
            s.first.go.set()
            await s.until(lambda: not s.dispatch.ledger.held("first"), "it has given back")
            paused = s.state()
            before = have(s)
            assert s.accepted() == s.first.made
            await s.join()
        assert_uninterrupted(s)
        assert_went_on(s, before)
        assert (paused, len(s.first), s.dispatch.members.lost) == (State.PAUSED, 0, 0)

    asyncio.run(main())


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_relieved(cut: int, tmp_path: Path) -> None:
    """Somebody stands idle, so it gives some back, and goes on with the others itself."""

    async def main() -> None:
        async with scene(tmp_path, cut) as s:
            await s.join()
            await s.until(s.worker.host._orders.qsize, "it was asked to give back")
            s.first.go.set()
        assert_uninterrupted(s)
        assert s.second.requests
        assert {r.position for r in s.second.requests} == {cut + 1}
        assert 0 < s.second.made < sum(len(t) for t, _ in uninterrupted().values())
        assert s.first.made + s.second.made == s.accepted(), "nothing was made twice"

    asyncio.run(main())


@pytest.mark.parametrize("cut", [0, 5, 11])
def test_fast_mode_goes_on_too(cut: int, tmp_path: Path) -> None:
    """Log-probs differ in the last bits, with what shares a step; a token would only where the number drawn for it
    lies in such a difference, which is one in a million."""

    async def main() -> None:
        async with scene(tmp_path, cut, deterministic=False) as s:
            await s.join()
            await s.worker.link.close("pulled out")
        assert_uninterrupted(s, exact=False)

    asyncio.run(main())


def test_sampling_is_sampling() -> None:
    """Another seed, another response; so the tests above would see it."""
    tokens = [tuple(t) for t, _ in uninterrupted().values()]
    assert len(set(tokens)) == len(tokens)


@pytest.mark.parametrize("cut", [1, 7])
def test_goes_on_under_new_weights(cut: int, tmp_path: Path) -> None:
    """Lost while a newer version is on offer: the rest is what the new weights say after the old tokens."""

    def pull(load: Any, stop: object) -> Weights:
        del stop
        return Weights(digest=load.digest, tensors=model(load.version).state_dict())

    async def main() -> None:
        engines = [engine(weights=clone()) for _ in range(2)]
        async with scene(tmp_path, cut, pull=pull, engines=engines) as s:
            before = have(s)
            s.dispatch.set_offer(Offer(version=1, digest="d1", url=""))
            await s.join()
            await s.worker.link.close("pulled out")
        assert_two_versions(s, before)
        assert_went_on_under_new(s, before)

    asyncio.run(main())


@pytest.mark.parametrize("cut", [1, 7])
def test_swapped_between_two_steps(cut: int, tmp_path: Path) -> None:
    """A worker takes new weights while it runs: what it made of them for the old assignment is made again."""

    def pull(load: Any, stop: object) -> Weights:
        del stop
        return Weights(digest=load.digest, tensors=model(load.version).state_dict())

    async def main() -> None:
        engines = [engine(weights=clone()) for _ in range(2)]
        async with scene(tmp_path, cut, pull=pull, engines=engines) as s:
            s.dispatch.set_offer(Offer(version=1, digest="d1", url=""))
            extra = Episode(
                id="9/0", prompt=(20, 21), seed=9, max_tokens=4, sampling=Sampling(), stop=frozenset()
            )  # fmt: skip
            s.dispatch.open(extra)  # work that waits is the reason to take the new version
            await s.until(s.worker.host._orders.qsize, "the swap is ordered")
            s.first.go.set()
            await s.until(lambda: "9/0" in s.ended, "the new one has ended")
            s.ended.discard("9/0")
        before = {id: sum(n for v, n in e.runs if v == 0) for id, e in s.episodes.items()}
        assert max(before.values()) == cut + 1, "the step under way was of the old weights"
        assert_two_versions(s, before)
        assert extra.runs == [(1, 4)]
        assert s.dispatch.ledger.lost() == 0

    asyncio.run(main())


def clone() -> Any:
    """A model of its own, with the weights of version 0: what a swap may write to."""
    made = type(model())(model().config).eval()
    made.load_state_dict(model().state_dict())
    made.set_attn_implementation(attention.NAME)
    return made


def assert_two_versions(s: Scene, before: dict[str, int]) -> None:
    changed = 0
    for id, (old, old_logprobs) in uninterrupted().items():
        e, n = s.episodes[id], before[id]
        assert e.tokens[:n].tolist() == old[:n]
        assert e.logprobs[:n].tolist() == old_logprobs[:n]
        if n == len(old):
            assert e.runs == [(0, n)]
            continue
        tokens, logprobs = drained(engine(weights=model(1)), request(id, tuple(old[:n])))[id]
        assert e.tokens[n:].tolist() == tokens
        assert e.logprobs[n:].tolist() == logprobs
        assert e.runs == [(v, count) for v, count in ((0, n), (1, len(tokens))) if count]
        changed += old[n:] != tokens
    assert changed, "the new weights should say something else"


def assert_went_on_under_new(s: Scene, before: dict[str, int]) -> None:
    assert {r.position for r in s.second.requests} == {n for id, n in before.items() if n < len(uninterrupted()[id][0])}
    assert s.second.made == sum(len(e.tokens) - before[id] for id, e in s.episodes.items())
