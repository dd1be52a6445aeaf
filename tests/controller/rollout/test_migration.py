"""A response that loses its worker continues elsewhere as if nothing had happened, with the real engine and sampling.

At a known token, the first worker of a `scene` is lost, drained or paused, gives responses to another worker, or loads
new weights.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.two_workers import (
    IDS,
    LONGEST,
    STOPS,
    Scene,
    clone,
    drained,
    engine,
    model,
    request,
    scene,
    uninterrupted,
)
from tests.support.fleets.virtual_fleet import relieve
from windfall.controller.ledger.episode import Episode
from windfall.controller.scheduling import placement
from windfall.controller.workers.members import WorkerState
from windfall.controller.workers.versions import Offer
from windfall.types import Sampling
from windfall.worker.worker_link import PulledWeights


def assert_uninterrupted(s: Scene, *, exact: bool = True) -> None:
    for id, (tokens, logprobs) in uninterrupted(exact).items():
        e = s.episodes[id]
        assert e.tokens.tolist() == tokens, id
        if exact:
            assert e.logprobs.tolist() == logprobs, id
        else:
            assert e.logprobs.tolist() == pytest.approx(logprobs, abs=1e-4), id
        assert e.finish == ("stop" if tokens[-1] in STOPS else "length")
        assert e.version_runs == [(0, len(tokens))]
    s.dispatch.ledger.check()
    assert s.dispatch.ledger.lost_tokens() == 0


def assert_continued(s: Scene, before: dict[str, int]) -> None:
    """The second engine generated the tokens that were missing `before`, no others, and got no finished response."""
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
def test_worker_lost_after_any_token(cut: int, tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, cut) as s:
            before = have(s)
            assert max(before.values()) == cut
            await s.join()
            await s.worker.link.close("pulled out")
            await s.until(lambda: s.state() is WorkerState.GONE, "the loss is noticed")
            assert have(s) == before, "accepted tokens stay"
        assert_uninterrupted(s)
        assert_continued(s, before)
        assert s.dispatch.ledger.counts.moved == sum(n < len(uninterrupted()[id][0]) for id, n in before.items())

    asyncio.run(main())


@pytest.mark.parametrize("cut", [0, 1, 6, LONGEST - 2])
def test_worker_drained(cut: int, tmp_path: Path) -> None:
    """The worker is in the middle of a step, and sends its tokens before it leaves."""

    async def main() -> None:
        async with scene(tmp_path, cut) as s:
            s.dispatch.drain("first", "asked to")
            await s.until(s.worker.host._orders.qsize, "the worker has the order")
            s.first.go.set()
            await s.until(lambda: s.state() is WorkerState.GONE, "it has left")
            before = have(s)
            assert max(before.values()) == cut + 1
            assert s.accepted() == s.first.made, "no token that it generated is lost"
            await s.join()
        assert_uninterrupted(s)
        assert_continued(s, before)
        assert s.lost == 0

    asyncio.run(main())


@pytest.mark.parametrize("cut", [0, 1, 6, LONGEST - 2])
def test_worker_paused(cut: int, tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, cut) as s:
            s.dispatch.pause("first")
            await s.until(lambda: s.worker.host._orders.qsize() == 2, "the worker has the order")
            s.first.go.set()
            await s.until(lambda: not s.dispatch.ledger.held("first"), "it has released its responses")
            paused = s.state()
            before = have(s)
            assert s.accepted() == s.first.made
            await s.join()
        assert_uninterrupted(s)
        assert_continued(s, before)
        assert (paused, len(s.first), s.lost) == (WorkerState.PAUSED, 0, 0)

    asyncio.run(main())


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_idle_worker_takes_over_some_responses(cut: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first worker releases some responses to an idle one and continues with the others itself."""
    monkeypatch.setattr(placement, "rebalance", relieve)

    async def main() -> None:
        async with scene(tmp_path, cut) as s:
            await s.join()
            await s.until(s.worker.host._orders.qsize, "it was asked to release")
            s.first.go.set()
        assert_uninterrupted(s)
        assert s.second.requests
        assert min(r.position for r in s.second.requests) == cut + 1
        assert 0 < s.second.made < sum(len(t) for t, _ in uninterrupted().values())
        assert s.first.made + s.second.made == s.accepted(), "nothing was generated twice"

    asyncio.run(main())


@pytest.mark.parametrize("cut", [0, 5, 11])
def test_fast_mode_continues_with_the_same_tokens(cut: int, tmp_path: Path) -> None:
    """Log-probs differ in the last bits, depending on what else is in the batch. A token would differ only if the
    random number drawn for it lies within such a difference, which is one in a million."""

    async def main() -> None:
        async with scene(tmp_path, cut, deterministic=False) as s:
            await s.join()
            await s.worker.link.close("pulled out")
        assert_uninterrupted(s, exact=False)

    asyncio.run(main())


def test_seeds_give_different_responses() -> None:
    """Therefore the tests above would notice a wrong seed."""
    tokens = [tuple(t) for t, _ in uninterrupted().values()]
    assert len(set(tokens)) == len(tokens)


@pytest.mark.parametrize("cut", [1, 7])
def test_response_continues_with_new_weights(cut: int, tmp_path: Path) -> None:
    """The worker is lost while a newer version is offered: the new weights generate the rest after the old tokens."""

    def pull(load: Any, stop: object) -> PulledWeights:
        del stop
        return PulledWeights(digest=load.digest, tensors=model(load.version).state_dict())

    async def main() -> None:
        engines = [engine(weights=clone()) for _ in range(2)]
        async with scene(tmp_path, cut, pull=pull, engines=engines) as s:
            before = have(s)
            s.dispatch.set_offer(Offer(version=1, digest="d1"))
            await s.join()
            await s.worker.link.close("pulled out")
        assert_two_versions(s, before)
        assert_continued_with_new_weights(s, before)

    asyncio.run(main())


@pytest.mark.parametrize("cut", [1, 7])
def test_weights_swapped_between_two_steps(cut: int, tmp_path: Path) -> None:
    """A worker loads new weights while it runs: its responses continue with them, and every token has its version."""

    def pull(load: Any, stop: object) -> PulledWeights:
        del stop
        return PulledWeights(digest=load.digest, tensors=model(load.version).state_dict())

    async def main() -> None:
        engines = [engine(weights=clone()) for _ in range(2)]
        async with scene(tmp_path, cut, pull=pull, engines=engines, staleness=1) as s:
            s.dispatch.set_offer(Offer(version=1, digest="d1"))
            extra = Episode(
                id="9/0", prompt=(20, 21), seed=9, max_tokens=4, sampling=Sampling(), stop=frozenset()
            )  # fmt: skip
            s.dispatch.open(extra, s.listener)  # waiting work is the reason to load the new version
            await s.until(lambda: s.worker._load_phase == "swap", "the swap is ordered")
            s.first.go.set()
            await s.until(lambda: "9/0" in s.ended, "the new response has ended")
            s.ended.discard("9/0")
        before = {id: sum(n for v, n in e.version_runs if v == 0) for id, e in s.episodes.items()}
        assert max(before.values()) == cut + 1, "the step under way used the old weights"
        assert_two_versions(s, before)
        assert extra.version_runs == [(1, 4)]
        assert s.dispatch.ledger.lost_tokens() == 0

    asyncio.run(main())


def assert_two_versions(s: Scene, before: dict[str, int]) -> None:
    changed = 0
    for id, (old, old_logprobs) in uninterrupted().items():
        e, n = s.episodes[id], before[id]
        assert e.tokens[:n].tolist() == old[:n]
        assert e.logprobs[:n].tolist() == old_logprobs[:n]
        if n == len(old):
            assert e.version_runs == [(0, n)]
            continue
        tokens, logprobs = drained(engine(weights=model(1)), request(id, tuple(old[:n])))[id]
        assert e.tokens[n:].tolist() == tokens
        assert e.logprobs[n:].tolist() == logprobs
        assert e.version_runs == [(v, count) for v, count in ((0, n), (1, len(tokens))) if count]
        changed += old[n:] != tokens
    assert changed, "the new weights should generate other tokens"


def assert_continued_with_new_weights(s: Scene, before: dict[str, int]) -> None:
    assert {r.position for r in s.second.requests} == {n for id, n in before.items() if n < len(uninterrupted()[id][0])}
    assert s.second.made == sum(len(e.tokens) - before[id] for id, e in s.episodes.items())
