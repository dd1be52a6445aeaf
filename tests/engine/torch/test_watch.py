"""Which responses are watched: searches take little time, whatever each one costs, and every response has its turn."""

from __future__ import annotations

import pytest

from windfall.engine.torch.watch import SAVED_STEPS, SHARE, WINDOW, Watch


def watched(watch: Watch, running: list[str], steps: int, *, step_s: float, search_s: float) -> list[set[str]]:
    """The responses that are watched in each of these steps."""
    out: list[set[str]] = []
    for _ in range(steps):
        out.append(set(watch.ids))
        spent_s = search_s * len(watch.ids)
        watch.observe(step_s=step_s + spent_s, spent_s=spent_s)
        if watch.may_add:
            watch.add(running[watch.added % len(running)])
    return out


@pytest.mark.parametrize("search_s", [1e-6, 2e-5, 1e-4, 1e-3, 1e-2])
def test_searches_take_at_most_their_share(search_s: float) -> None:
    running, steps, step_s = [str(n) for n in range(64)], 20_000, 0.003
    found = watched(Watch(), running, steps, step_s=step_s, search_s=search_s)
    spent_s = search_s * sum(map(len, found))
    assert spent_s < SHARE * step_s * (steps + SAVED_STEPS) + WINDOW * search_s
    if search_s <= 1e-4:
        assert spent_s > 0.5 * SHARE * step_s * steps or min(map(len, found[1000:])) == len(running)
        assert set.union(*found) == set(running), "every response has its turn"


def test_cost_that_rises_is_noticed() -> None:
    watch, running = Watch(), [str(n) for n in range(64)]
    watched(watch, running, 2000, step_s=0.01, search_s=1e-5)
    assert len(watch.ids) > 3
    found = watched(watch, running, 5000, step_s=0.01, search_s=1e-3)
    assert 1e-3 * sum(map(len, found[WINDOW:])) < SHARE * 0.01 * 5000


def test_responses_that_ended_are_not_watched() -> None:
    watch = Watch()
    watched(watch, ["a", "b"], 200, step_s=0.1, search_s=1e-5)
    assert watch.ids.keys() == {"a", "b"}
    watch.end("a")
    watch.end("unknown")
    assert watch.ids.keys() == {"b"}
