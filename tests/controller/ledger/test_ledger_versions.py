"""Which versions the ledger accepts: the one that a response was assigned with, then newer ones of the window that the
worker has swapped in. Everything else is refused and counted, and every token keeps its true version."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windfall.controller.ledger.episode import Episode
from windfall.controller.ledger.ledger import Ledger
from windfall.link.messages import Tokens
from windfall.types import Sampling


def opened(*ids: str, window: tuple[int, int] = (3, 5), version: int | None = None, max_tokens: int = 40) -> Ledger:
    ledger = Ledger()
    ledger.set_window("", *window)
    for id in ids:
        ledger.open(
            Episode(id, prompt=(5,), seed=1, max_tokens=max_tokens, sampling=Sampling(), stop=frozenset([0]),
                    version=version)
        )  # fmt: skip
    return ledger


def assign(ledger: Ledger, version: int, worker: str = "a") -> int:
    return ledger.assign(ledger.queues[""].popleft(), worker, version).handle


def frame(version: int, *rows: tuple[int, int, int]) -> Tokens:
    """Rows of (handle, position, number of tokens)."""
    n = sum(count for _, _, count in rows)
    return Tokens(
        version=version, handles=tuple(r[0] for r in rows), positions=tuple(r[1] for r in rows),
        counts=tuple(r[2] for r in rows), tokens=array("I", [7] * n).tobytes(),
        logprobs=array("f", [-1.0] * n).tobytes(), finished={},
    )  # fmt: skip


def versions(ledger: Ledger, id: str) -> list[tuple[int, int]]:
    """All version runs of an open response, the current one included."""
    entry = ledger.entries[id]
    more = len(entry.episode.tokens) - entry.recorded
    return [*entry.episode.version_runs, *([(entry.version, more)] if more else [])]


def test_tokens_of_a_newer_version_continue_the_response() -> None:
    ledger = opened("1/0", "1/1")
    a, b = assign(ledger, 3), assign(ledger, 3)
    assert ledger.accept("a", frame(3, (a, 0, 2), (b, 0, 1))).complete
    assert ledger.accept("a", frame(4, (a, 2, 1), (b, 1, 1))).complete, "the worker has swapped in version 4"
    assert ledger.accept("a", frame(5, (a, 3, 2))).complete, "only one of its responses has a token"
    ledger.check()
    assert versions(ledger, "1/0") == [(3, 2), (4, 1), (5, 2)]
    assert versions(ledger, "1/1") == [(3, 1), (4, 1)]
    assert ledger.accept("a", frame(5, (b, 2, 1))).complete
    assert (ledger.oldest_version("1/0"), ledger.sampled("1/0")) == (3, 5)
    assert (ledger.counts.stale, ledger.counts.moved, ledger.counts.accepted) == (0, 0, 8)


@pytest.mark.parametrize("version", [0, 2, 6, 99])
def test_tokens_of_a_version_outside_the_window_are_refused(version: int) -> None:
    ledger = opened("1/0")
    a = assign(ledger, 4)
    ledger.accept("a", frame(4, (a, 0, 1)))
    refused = ledger.accept("a", frame(version, (a, 1, 3)))
    assert (refused.tokens, refused.dropped, refused.complete) == (0, [a], False)
    assert ledger.counts.stale == 3
    assert list(ledger.queues[""]) == ["1/0"], "it continues elsewhere with the tokens that it has"
    assert versions(ledger, "1/0") == [(4, 1)]
    ledger.check()


def test_older_version_than_assigned_is_refused_even_inside_the_window() -> None:
    ledger = opened("1/0")
    a = assign(ledger, 4)
    assert ledger.accept("a", frame(3, (a, 0, 2))).dropped == [a]
    assert ledger.counts.stale == 2


def test_version_that_the_worker_has_not_loaded_is_refused() -> None:
    """Its number is in the window, but the worker has other weights: those of a trainer that was lost."""
    ledger = opened("1/0", "1/1")
    a, b = assign(ledger, 3), assign(ledger, 3)
    assert ledger.accept("a", frame(3, (a, 0, 1), (b, 0, 1)), loaded={"": 3}).complete
    assert ledger.accept("a", frame(5, (a, 1, 1)), loaded={"": 4}).dropped == [a]
    assert ledger.accept("a", frame(4, (b, 1, 1)), loaded={"": -1}).dropped == [b]
    assert ledger.counts.stale == 2
    ledger.check()


def test_without_a_window_only_the_assigned_version_is_accepted() -> None:
    ledger = opened("1/0", window=(0, -1))
    a = assign(ledger, 3)
    assert ledger.accept("a", frame(4, (a, 0, 1))).dropped == [a]


def test_fixed_version_accepts_only_that_version() -> None:
    ledger = opened("eval-4:9/0", version=4)
    a = assign(ledger, 4)
    assert ledger.accept("a", frame(4, (a, 0, 2))).complete
    assert ledger.set_window("", 5, 7) == {}, "it goes on with its version, which has left the window"
    assert ledger.accept("a", frame(4, (a, 2, 1))).complete
    assert ledger.accept("a", frame(5, (a, 3, 1))).dropped == [a], "not with a newer one"
    assert versions(ledger, "eval-4:9/0") == [(4, 3)]
    ledger.check()


def test_fixed_version_is_queued_first() -> None:
    ledger = opened("1/0", "1/1")
    evaluated = Episode(
        "eval-4:9/0", prompt=(5,), seed=1, max_tokens=9, sampling=Sampling(), stop=frozenset(), version=4
    )
    ledger.open(evaluated)
    assert list(ledger.queues[""]) == ["eval-4:9/0", "1/0", "1/1"]


def test_duplicate_of_an_older_version_counts_as_repeated() -> None:
    """Frames from before a swap arrive again after it."""
    ledger = opened("1/0", "1/1")
    a, b = assign(ledger, 3), assign(ledger, 3)
    old = frame(3, (a, 0, 2), (b, 0, 2))
    ledger.accept("a", old)
    ledger.accept("a", frame(4, (a, 2, 1), (b, 2, 1)))
    again = ledger.accept("a", old)
    assert (again.tokens, again.dropped, again.ended_turns) == (0, [], [])
    assert ledger.counts.repeated == 4
    assert ledger.counts.stale == 0
    assert ledger.accept("a", frame(4, (a, 3, 1), (b, 3, 1))).complete
    newer = ledger.accept("a", frame(3, (a, 1, 2)))
    assert newer.dropped == [a], "position 2 is of version 4: this is no duplicate"
    assert ledger.counts.stale == 2
    ledger.check()


def test_window_that_moves_on_takes_responses_from_old_workers() -> None:
    ledger = opened("1/0", "1/1", "1/2")
    a, b, c = assign(ledger, 3, "a"), assign(ledger, 4, "b"), assign(ledger, 3, "a")
    ledger.accept("a", frame(3, (a, 0, 1), (c, 0, 1)))
    ledger.accept("a", frame(4, (c, 1, 1)))
    assert ledger.set_window("", 4, 6) == {"a": [a]}
    assert list(ledger.queues[""]) == ["1/0"]
    assert ledger.oldest_version("1/2") == 3, "its old token stays: the check at use decides"
    ledger.check()
    late = ledger.accept("a", frame(3, (a, 1, 1)))
    assert late.tokens == 0
    assert ledger.counts.late == 1
    assert ledger.accept("b", frame(4, (b, 0, 1))).complete


@given(
    moves=st.lists(st.tuples(st.sampled_from(["token", "swap", "publish", "move", "wrong"]), st.integers(1, 3))),
    eta=st.integers(0, 3),
)
@settings(max_examples=100, deadline=None)
def test_every_token_keeps_the_version_that_generated_it(moves: list[tuple[str, int]], eta: int) -> None:
    ledger = opened("1/0", window=(-eta, 0), max_tokens=1000)
    newest = held = 0
    truth: list[int] = []
    handle = assign(ledger, held)
    stale = 0
    for what, n in moves:
        if what == "publish":
            newest += 1
            ledger.set_window("", newest - eta, newest)
        elif what == "swap":
            held = newest
        elif what == "move":
            if ledger.entries["1/0"].state == "running":
                ledger.requeue(ledger.entries["1/0"])
        elif ledger.entries["1/0"].state == "running":
            version = held if what == "token" else newest + n
            accepted = ledger.accept("a", frame(version, (handle, len(truth), n)))
            if what == "token":
                assert accepted.complete
                truth += [version] * n
            else:
                stale += n
                assert accepted.dropped == [handle]
        if ledger.entries["1/0"].state == "queued":
            held = max(held, newest - eta)
            handle = assign(ledger, held)
        ledger.check()
    found = [v for v, count in versions(ledger, "1/0") for _ in range(count)]
    assert found == truth
    assert ledger.counts.stale == stale
    assert ledger.oldest_version("1/0") == min(truth, default=None)
    runs = ledger.entries["1/0"].episode.version_runs
    assert all(a[0] != b[0] for a, b in pairwise(runs)), "neighboring runs differ"


def test_check_finds_broken_versions() -> None:
    def broken(how: Callable[[Ledger], object], version: int | None = None) -> None:
        ledger = opened("1/0", version=version)
        handle = assign(ledger, 3)
        ledger.accept("a", frame(3, (handle, 0, 2)))
        ledger.check()
        how(ledger)
        with pytest.raises(AssertionError):
            ledger.check()

    broken(lambda x: setattr(x.entries["1/0"], "version", 2))
    broken(lambda x: setattr(x.entries["1/0"], "version", 6))
    broken(lambda x: x._windows.update({"": range(4, 6)}))
    broken(lambda x: setattr(x.entries["1/0"], "recorded", 1))
    broken(lambda x: x._record_version(x.entries["1/0"]) or x.entries["1/0"].episode.version_runs.append((4, 1)))
    broken(lambda x: setattr(x.entries["1/0"], "version", 4) or x._record_version(x.entries["1/0"]), version=3)


def test_random_swaps_of_many_workers_lose_nothing() -> None:
    choose = random.Random(5)
    ledger = opened(*(f"{n}/0" for n in range(30)), window=(0, 0), max_tokens=10**6)
    newest, held = 0, dict.fromkeys("abc", 0)
    for _ in range(3000):
        worker = choose.choice("abc")
        match choose.choice(["token"] * 6 + ["swap", "lose", "publish"]):
            case "token":
                rows = [(e.handle, len(e.episode.tokens), 1) for e in ledger.held(worker)]
                if rows:
                    assert ledger.accept(worker, frame(held[worker], *rows)).complete
            case "swap":
                held[worker] = newest
            case "lose":
                ledger.release(worker)
            case "publish" if choose.random() < 0.2:
                newest += 1
                ledger.set_window("", newest - 2, newest)
        for name, version in held.items():
            held[name] = max(version, newest - 2)
        for id in list(ledger.queues[""]):
            ledger.queues[""].remove(id)
            worker = choose.choice("abc")
            ledger.assign(id, worker, held[worker])
    ledger.check()
    assert ledger.counts.accepted > 1000
    assert ledger.counts.stale == ledger.counts.gaps == ledger.counts.repeated == 0


def test_response_that_continues_on_the_same_worker_has_not_moved() -> None:
    """All workers are on an old version when the window moves on. They load the new one, and continue."""
    ledger = opened("1/0")
    a = assign(ledger, 3)
    ledger.accept("a", frame(3, (a, 0, 2)))
    assert ledger.set_window("", 4, 6) == {"a": [a]}
    assert ledger.counts.moved == 0, "nothing has moved yet"
    assign(ledger, 6)
    assert (ledger.counts.moved, ledger.counts.prefilled_again) == (0, 3)
    ledger.release("a")
    assign(ledger, 6, worker="b")
    assert (ledger.counts.moved, ledger.counts.prefilled_again) == (1, 6)
