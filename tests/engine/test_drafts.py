"""Drafted tokens in plain numpy: the place that is followed (compared with brute force), which tokens count, how runs
are counted, and which texts are kept."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windfall.engine.drafts import FAMILY, KNOWN, LEAST, MOST, RUNS, Drafts, Match, count_run, longest_match, verify

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=30), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(texts=TEXTS, own=st.lists(st.integers(0, 2), min_size=1, max_size=25), cut=st.integers(0, 30))
def test_longest_match_equals_brute_force(texts: list[list[int]], own: list[int], cut: int) -> None:
    texts = [*texts, own[:cut] + own]  # often a long agreement
    size = max(map(len, texts))
    array = np.array([t + [1] * (size - len(t)) for t in texts], np.int32)  # what is after the end is not read
    best: tuple[int, int, int, int] | None = None
    for row, text in enumerate(texts):
        for at in range(LEAST, len(text)):
            agreed = 0
            while agreed < min(at, len(own), MOST) and text[at - 1 - agreed] == own[-1 - agreed]:
                agreed += 1
            place = agreed, min(len(text) - at, KNOWN), row, at
            if agreed >= LEAST and (best is None or place > best):
                best = place
    found = longest_match(array, np.array([len(t) for t in texts]), np.array(own, np.int32))
    assert found == (None if best is None else Match(best[0], *best[2:]))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_verified_tokens_are_those_drawn_one_by_one(data: st.DataObject) -> None:
    """Whatever is expected, the tokens are those of the sampler. Here it draws token n of `truth` at position n, if all
    tokens before it are right, and anything otherwise."""
    truth = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=20))
    stop = data.draw(st.sets(st.integers(0, 3), max_size=1))
    said: list[int] = []
    while len(said) < len(truth) and not (said and said[-1] in stop):
        expected = data.draw(st.lists(st.integers(-1, 3), max_size=6))
        rows = data.draw(st.integers(1, len(expected) + 1))
        left = len(truth) - len(said)
        drawn = [
            truth[len(said) + n] if n < left and expected[:n] == truth[len(said) :][:n] else 9 for n in range(rows)
        ]
        count, right = verify(drawn, expected, left, stop)
        assert 1 <= count <= min(rows, left)
        assert drawn[:right] == expected[:right]
        said += drawn[:count]
    end = next((n + 1 for n, t in enumerate(truth) if t in stop), len(truth))
    assert said == truth[:end]


def test_runs_are_the_same_for_every_number_of_rows() -> None:
    """2 right guesses and a wrong one, 0, 5, and one that is longer than all that are counted apart."""
    lengths = [2, 0, 5, RUNS + 3]
    for width in (1, 2, 3, 8):
        runs = np.zeros(RUNS, np.int64)
        for length in lengths:
            run, left = 0, length
            while left >= width:
                run, left = count_run(runs, run, width, True), left - width
            assert count_run(runs, run, left + 1, False) == 0
        assert runs[[0, 2, 5, RUNS - 1]].tolist() == [1] * 4
        assert runs.sum() == 5  # what follows a run of the greatest length is another one


def test_sibling_is_followed_while_it_is_right() -> None:
    d, said = Drafts(), [1, 2, 3]
    d.begin("g", "a", [1, 2, 3, 4, 5, 6, 7, 8], 5)
    d.begin("g", "b", said, 0)
    assert d.expected("b", 2) == [4, 5]
    said += [4, 5]
    d.advance("b", 2, goes_on=True)
    assert d.expected("b", 4) == [6, 7, 8]
    said += [6, 9]
    d.advance("b", 2, goes_on=False)
    assert d.runs.nonzero()[0].tolist() == [3]
    assert d.expected("b", 4) == []
    said += [3]
    d.advance("b", 1, goes_on=False)
    assert (d.runs[0], d.runs[3]) == (1, 1)
    said += [4, 5, 6]
    d.leave("b")  # after a prefill
    assert d.expected("b", 1) == [9], "`a` agrees equally, but more is known after the place in its own text"
    assert d.expected("unknown", 3) is None
    d.check()


def test_sibling_at_the_same_pace_is_followed_as_it_grows() -> None:
    """What it says is copied when it is needed."""
    d, a, b = Drafts(), [1, 2, 3], [1, 2, 3]
    d.begin("g", "a", a, 0)
    d.begin("g", "b", b, 0)
    a += [4]
    assert d.expected("b", 1) == [4]
    b += [4]
    d.advance("b", 1, goes_on=True)
    for token in range(5, 100):
        a += [token]
        assert d.expected("b", 1, search=False) == [token]
        b += [token]
        d.advance("b", 1, goes_on=True)
        d.check()
    assert d.runs[: RUNS - 1].sum() == 0


def test_responses_that_are_not_followed_are_not_counted() -> None:
    d, said = Drafts(), [1, 2, 3]
    d.begin("g", "a", [1, 2, 3, 4, 5], 2)
    d.begin("g", "b", said, 0)
    assert d.expected("b", 2, search=False) is None
    assert not d.following
    assert d.expected("b", 2) == [4, 5]
    assert d.following == {"b"}
    d.advance("b", 1, goes_on=True)
    assert d.expected("b", 1, search=False) == [5], "it has a place, so nothing is searched for"
    d.advance("b", 1, goes_on=False)
    assert d.expected("b", 1, search=False) is None
    assert d.runs.sum() == 1
    d.check()


def test_run_that_the_end_of_a_response_cuts_counts() -> None:
    """Short responses that were foreseen from the first to the last token are the best case for drafts."""
    d = Drafts()
    d.begin("g", "a", [1, 2, 3, 4, 5, 6, 7], 4)
    for id in "bcd":
        said = [1, 2, 3]
        d.begin("g", id, said, 0)
        for count in (2, 2):
            assert d.expected(id, 2) == [said[-1] + 1, said[-1] + 2]
            said += [said[-1] + 1, said[-1] + 2]
            d.advance(id, count, goes_on=len(said) < 7)
        d.end(id)
        d.check()
    assert d.runs[3] == d.runs.sum() == 3, "four tokens that two steps of two rows give"


def test_text_of_a_response_elsewhere_grows() -> None:
    d = Drafts()
    d.remember("g", "a", 0, [5, 6, 7])
    d.remember("g", "a", 3, [8, 9])
    d.remember("g", "a", 7, [1])  # a gap
    d.remember("g", "late", 4, [5, 6, 7])  # its beginning is unknown
    d.begin("g", "b", [2, 5, 6, 7], 3)
    assert d.expected("b", 9) == [8, 9]
    d.begin("", "alone", [2, 5, 6, 7], 3)
    assert d.expected("alone", 9) == []
    d.end("b")
    d.remember("g", "b", 3, [4, 4, 4])  # it goes on elsewhere: its prompt is one token
    d.begin("g", "c", [6, 7, 4], 3)
    assert d.expected("c", 9) == [4, 4]
    d.remember("g", "c", 3, [1])  # ignored: it is generated here
    assert d.expected("c", 9) == [4, 4]
    d.check()


def test_memory_is_bounded_and_groups_are_forgotten_as_a_whole() -> None:
    d = Drafts(max_tokens=1000)
    for group in ("old", "used"):
        for n in range(4):
            d.remember(group, f"{group}{n}", 0, range(10, 40))
    d.begin("used", "x", [10, 11, 12], 3)
    assert d.expected("x", 2) == [13, 14]
    d.begin("new", "y", range(300), 300)
    d.check()
    assert d.expected("y", 2) == []
    d.check()
    d.begin("old", "z", [10, 11, 12], 3)
    assert d.expected("z", 2) == []
    assert d.expected("x", 2) == [13, 14]
    d.begin("long", "w", range(2000), 2000)
    assert d.expected("w", 2) is None, "it has more tokens than all texts may have"
    d.check()
    for id in "wxyz":
        assert d.expected(id, 2) is None
        d.advance(id, 1, goes_on=False)
        d.leave(id)
        d.end(id)
    d.check()


def test_family_keeps_its_newest_texts_and_those_of_running_responses() -> None:
    d = Drafts()
    d.begin("g", "first", [1, 2, 3, 4], 4)
    for n in range(FAMILY + 3):
        d.remember("g", str(n), 0, [10 + n, 11 + n, 12 + n, 99])
    d.begin("g", "x", [10, 11, 12], 3)
    assert d.expected("x", 1) == []
    d.begin("g", "y", [9 + FAMILY, 10 + FAMILY, 11 + FAMILY], 3)
    assert d.expected("y", 1) == [99]
    d.begin("g", "z", [1, 2, 3], 3)
    assert d.expected("z", 1) == [4]
    d.check()


@pytest.mark.parametrize("seed", range(8))
def test_random_groups_keep_the_rules(seed: int) -> None:
    rng, d = random.Random(seed), Drafts(max_tokens=2500)
    running: dict[str, list[int]] = {}
    for _ in range(400):
        id = str(rng.randrange(30))
        group, tokens = f"g{int(id) % 4}", [rng.randrange(4) for _ in range(rng.randrange(1, 20))]
        action = rng.randrange(5)
        if action == 0:
            running[id] = tokens
            d.begin(group, id, tokens, rng.randrange(len(tokens)))
        elif action == 1:
            running.pop(id, None)
            d.end(id)
        elif action == 2:
            d.remember(group, id, rng.randrange(30), tokens)
        elif id in running:
            expected = d.expected(id, rng.randrange(1, 9), search=rng.random() < 0.7)
            running[id] += tokens
            if expected is None:
                d.leave(id)
            else:
                d.advance(id, len(tokens), goes_on=rng.random() < 0.5)
        d.check()
