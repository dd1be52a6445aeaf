"""The expected use of a KV cache follows from the lengths of its responses; workers are relieved before they evict."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from windfall.controller.ledger.episode import Episode
from windfall.controller.ledger.ledger import Ledger
from windfall.controller.scheduling.balance import Running, WorkerLoad
from windfall.controller.scheduling.kv_room import SAFE, KvLoad, KvRow, moments, more_responses, relieve, usage
from windfall.controller.scheduling.placement import Placement
from windfall.controller.workers.members import Members
from windfall.step_time import StepTime
from windfall.types import Lease, Sampling


def row(generated: int, *, mean: float = 1000.0, sigma: float = 0.6, limit: int = 8000) -> KvRow:
    return KvRow(context=100 + generated, generated=generated, limit=limit, mean=math.log(mean), sigma=sigma)


def test_usage_is_what_simulated_responses_have_on_average() -> None:
    draw, times = random.Random(0), np.array([0.0, 300.0, 1000.0, 4000.0])
    rows = [row(0), row(700), row(2500)]
    sums, trials = np.zeros(4), 4000
    for _ in range(trials):
        for r in rows:
            length = 0.0
            while length <= r.generated:  # it has not ended so far
                length = min(r.limit, math.exp(draw.gauss(r.mean, r.sigma)))
            sums += np.where(r.generated + times <= length, r.context + times, 0)
    assert usage(rows, times) == pytest.approx(sums / trials, rel=0.15, abs=60)


def test_as_many_begin_as_will_fit() -> None:
    new, running = row(0), [row(n) for n in (100, 900, 1500)]
    count = more_responses(running, new, 20_000)
    assert 5 < count < 60
    times = moments(new.limit)
    room = SAFE * 20_000
    assert usage([*running, *[new] * count], times).max() <= room < usage([*running, *[new] * (count + 1)], times).max()
    assert more_responses([row(3000)] * 8, new, 20_000) == 0


def load(worker: str, context: int, *, slots: int = 9) -> KvLoad:
    return KvLoad(worker=worker, tokens=10_000, context=context, free_slots=slots, prefill_s=1e-5, step_s=0.02)


def running(worker: str, *contexts: int) -> list[Running]:
    return [
        Running(id=f"{worker}{n}/0", context=100 + c, remaining=1000.0 + 100 * n) for n, c in enumerate(contexts)
    ]  # fmt: skip


def test_full_worker_is_relieved_of_what_costs_least_per_token() -> None:
    generated = {"full": (3000, 3000, 3000, 200), "empty": (100,)}
    held = {name: running(name, *contexts) for name, contexts in generated.items()}
    loads = [load("full", 9600), load("empty", 200)]

    def rows(worker: str) -> list[KvRow]:
        return [row(n, mean=5000.0) for n in generated[worker]]

    moves = relieve(loads, rows, held.__getitem__, round_trip_s=0.05)
    assert next((m.id, m.source, m.target) for m in moves) == ("full3/0", "full", "empty"), "the shortest context"
    assert all(m.gain_s > m.cost_s for m in moves)
    no_slots = [load("full", 9600), load("empty", 200, slots=0)]
    assert not relieve(no_slots, rows, held.__getitem__, round_trip_s=0.05)
    dear = relieve(loads, rows, held.__getitem__, round_trip_s=1e6)
    assert not dear, "a move must cost less than an eviction"


def test_nothing_moves_where_no_worker_has_room() -> None:
    held = {"a": running("a", 3000, 3000, 3000), "b": running("b", 3000, 3000, 3000)}
    loads = [load("a", 9300), load("b", 9300)]
    assert not relieve(loads, lambda w: [row(3000)] * 3, held.__getitem__, round_trip_s=0.0)


@pytest.mark.parametrize("shared", [False, True])
def test_prompt_that_siblings_share_fills_a_cache_once(shared: bool) -> None:
    """`a` is nearly full. The six responses of `b` have one prompt of 10,000 tokens, or one each."""
    ledger, members = Ledger(), Members()
    placement = Placement(ledger)
    for n in range(50):
        placement.lengths.finished(f"x{n}", n, 4000 + 100 * (n % 9))
        placement.lengths.complete(f"x{n}")

    def begin(id: str, worker: str, prompt: int, generated: int) -> None:
        e = Episode(id=id, prompt=(1,) * prompt, seed=0, max_tokens=8000, sampling=Sampling(), stop=frozenset())
        e.tokens.extend([1] * generated)
        e.logprobs.extend([0.0] * generated)
        e.record(generated, 0, "", "")
        ledger.open(e)
        ledger.queues[""].remove(id)
        ledger.assign(id, worker, 0)

    for n in range(28):
        begin(f"{100 + n}/0", "a", 10, 2000)
    for n in range(6):
        begin(f"7/{n}" if shared else f"{200 + n}/0", "b", 10_000, 100)
    for name in "ab":
        members.join(name, Lease(), 0.0).kv_tokens = 60_000
    loads = [
        WorkerLoad(worker=name, running=ledger.running(name), slots=64, profile=StepTime(fixed_s=0.01, each_s=0.0002),
                   kv_tokens=60_000, prefill_tok_per_s=50_000)
        for name in "ab"
    ]  # fmt: skip
    moves = placement.relieving_moves(loads)
    assert {(move.source, move.target) for move in moves} == ({("a", "b")} if shared else set())
    assert placement.nearly_full(members.here()) == shared
