"""An episode accepts every position once and in order, however its tokens are split into chunks and turns."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windfall.controller.ledger.episode import Episode
from windfall.types import Finish, Sampling

STOP = 0


def episode(max_tokens: int = 10) -> Episode:
    return Episode(
        id="3/1", prompt=(7, 8), seed=5, max_tokens=max_tokens, sampling=Sampling(top_k=4), stop=frozenset({STOP})
    )


def take(e: Episode, position: int, *tokens: int, finish: Finish | None = None, version: int = 2) -> None:
    e.take(position, tokens, [-0.5 * t for t in tokens], version, finish)


@pytest.mark.parametrize("position", [0, 1, 3])
def test_repeat_and_gap_raise(position: int) -> None:
    e = episode()
    take(e, 0, 4, 5)
    with pytest.raises(ValueError, match=f"3/1: expected position 2, got {position}"):
        take(e, position, 6)
    assert e.tokens.tolist() == [4, 5]


def test_tokens_after_the_end_raise() -> None:
    e = episode()
    take(e, 0, 4, STOP, finish="stop")
    with pytest.raises(ValueError, match="3/1: tokens came after its end"):
        take(e, 2, 6)
    assert e.close(1.0).tokens == (4, STOP)


def test_tokens_without_logprobs_raise() -> None:
    e = episode()
    with pytest.raises(ValueError, match="2 tokens came with 1 log-probs"):
        e.take(0, (4, 5), (-1.0,), 0, None)
    assert len(e.tokens) == len(e.logprobs) == 0


def test_unfinished_response_cannot_be_closed() -> None:
    e = episode()
    take(e, 0, 4)
    with pytest.raises(AssertionError, match="3/1 is still being generated"):
        e.close(1.0)


def test_observation_opens_the_next_turn() -> None:
    e = episode()
    take(e, 0, 4, STOP, finish="stop", version=2)
    assert e.turn_tokens == [4, STOP]
    assert e.observe([20, 21])
    assert e.turn_tokens == []
    with pytest.raises(ValueError, match="expected position 4, got 2"):  # an engine that has not seen the observation
        take(e, 2, 5)
    take(e, 4, 5, STOP, finish="stop", version=3)
    assert e.turn_tokens == [5, STOP]
    r = e.close(None)
    assert r.tokens == (4, STOP, 20, 21, 5, STOP)
    assert r.sampled == (True, True, False, False, True, True)
    assert r.logprobs == (-2.0, 0.0, 0.0, 0.0, -2.5, 0.0)
    assert r.versions == (2, 2, -1, -1, 3, 3)
    assert (r.sampled_count, r.reward, r.finish, r.prompt) == (4, None, "stop", (7, 8))


@pytest.mark.parametrize(("length", "fits"), [(6, True), (7, True), (8, False), (20, False)])
def test_observation_needs_room_for_an_answer(length: int, fits: bool) -> None:
    e = episode(max_tokens=10)
    take(e, 0, 4, STOP, finish="stop")
    assert e.observe([20] * length) is fits
    if fits:
        assert e.max_tokens - len(e.tokens) == 8 - length >= 1
    else:
        assert e.close(0.0).finish == "length"
        assert e.tokens.tolist() == [4, STOP]


@settings(deadline=None)
@given(
    turns=st.lists(st.tuples(st.lists(st.integers(1, 9), min_size=1), st.lists(st.integers(10, 19))), min_size=1),
    data=st.data(),
)
def test_splitting_into_chunks_makes_no_difference(
    turns: list[tuple[list[int], list[int]]], data: st.DataObject
) -> None:
    e, want, mask = episode(max_tokens=10_000), [], []
    for sampled, observation in turns:
        sampled = [*sampled, STOP]
        cuts = sorted(data.draw(st.sets(st.integers(1, len(sampled) - 1))))
        for start, end in zip([0, *cuts], [*cuts, len(sampled)], strict=True):
            take(e, len(want) + start, *sampled[start:end], finish="stop" if end == len(sampled) else None)
            assert len(e.tokens) == len(e.logprobs) == sum(count for _, count in e.version_runs)
        e.observe(observation)
        want += [*sampled, *observation]
        mask += [True] * len(sampled) + [False] * len(observation)
    e.finish = "stop"
    r = e.close(None)
    assert r.tokens == tuple(want)
    assert r.sampled == tuple(mask)
    assert [v == -1 for v in r.versions] == [not m for m in mask]
