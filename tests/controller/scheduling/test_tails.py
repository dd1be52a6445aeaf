"""The last responses of a step move onto fewer workers only where that costs less, by figures computed independently
here; random and worked cases."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.controller.scheduling.test_room import episode
from windfall.controller.ledger.ledger import Ledger
from windfall.controller.scheduling.balance import ROUND_TRIP_S, Move, Running, WorkerLoad, place, rebalance
from windfall.controller.scheduling.kv_room import SAFE
from windfall.controller.scheduling.placement import Placement
from windfall.controller.scheduling.tails import keep_merged, merge, state_cost_s
from windfall.step_time import StepTime

ENGINE = StepTime(fixed_s=0.010, each_s=0.0001)
FLAT = StepTime(fixed_s=0.001, each_s=0.01)
"""An engine whose steps take as long as their number of responses."""


@dataclasses.dataclass
class Fleet:
    loads: list[WorkerLoad]
    rows: dict[str, list[Running]]

    def merge(self) -> list[Move]:
        return merge(self.loads, self.rows.__getitem__)

    def after(self, moves: list[Move]) -> Fleet:
        rows = {worker: list(running) for worker, running in self.rows.items()}
        for move in moves:
            [row] = [r for r in rows[move.source] if r.id == move.id]
            rows[move.source].remove(row)
            rows[move.target].append(replace(row, moves=row.moves + 1, waiting=False))
        return Fleet([replace(load, running=len(rows[load.worker])) for load in self.loads], rows)

    def cost_s(self, moves: list[Move]) -> float:
        """What the state after these moves costs: computed response by response."""
        moved, after = {move.id for move in moves}, self.after(moves)
        done_s, taken_s = [0.0], 0.0
        for load in after.loads:
            rows, profile = after.rows[load.worker], load.profile
            assert profile is not None
            joined = [r for r in rows if r.id in moved]
            was_waiting = {r.id for running in self.rows.values() for r in running if r.waiting}
            device_s = sum(load.prefill_s * r.context for r in joined if r.id not in was_waiting)
            before = 0.0
            for n, r in enumerate(sorted(rows, key=lambda r: r.remaining)):  # in the order in which they end
                device_s += (r.remaining - before) * profile.step_s(len(rows) - n)
                before = r.remaining
            done_s.append(device_s * (1 + load.contended) + ROUND_TRIP_S * bool(joined))
            taken_s += device_s * load.contended
        return len(self.loads) * max(done_s) + taken_s


def fleet(*responses: int, contended: float = 1.0, profile: StepTime = ENGINE, moves: int = 0) -> Fleet:
    """Workers w0, w1, ... with so many responses, each with 500 tokens so far and 1,000 to come."""
    rows = {
        f"w{n}": [Running(id=f"{n}/{k}", context=500, remaining=1000.0, moves=moves) for k in range(count)]
        for n, count in enumerate(responses)
    }
    loads = [
        WorkerLoad(worker=w, running=len(r), slots=64, profile=profile, contended=contended) for w, r in rows.items()
    ]
    return Fleet(loads, rows)


def targets(moves: list[Move]) -> dict[str, str]:
    return {move.id: move.target for move in moves}


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    loads, rows = [], {}
    for n in range(draw(st.integers(1, 6))):
        slots = draw(st.integers(1, 12))
        running = [
            Running(
                id=f"{n}/{k}", context=draw(st.sampled_from([10, 500, 8000])), moves=draw(st.integers(0, 3)),
                waiting=draw(st.sampled_from([False, False, True])),
                remaining=draw(st.sampled_from([0.0, 1.0, 100.0, 1000.0, 5000.0])),
            )
            for k in range(draw(st.integers(0, slots)))
        ]  # fmt: skip
        rows[f"w{n}"] = running
        loads.append(
            WorkerLoad(
                worker=f"w{n}", running=len(running), slots=slots,
                profile=draw(st.sampled_from([ENGINE, ENGINE.slower(3), FLAT])),
                contended=draw(st.sampled_from([0.0, 0.1, 0.7, 1.0])),
                kv_tokens=draw(st.sampled_from([0, 5000, 60_000])),
                prefill_tok_per_s=draw(st.sampled_from([0.0, 1e3, 1e5])),
            )
        )  # fmt: skip
    return Fleet(loads, rows)


@given(fleets())
@settings(max_examples=300, deadline=None)
def test_no_move_loses_and_every_response_is_somewhere_once(workers: Fleet) -> None:
    moves = workers.merge()
    after = workers.after(moves)  # fails if a response moves twice, or from where it is not
    assert sorted(r.id for rows in after.rows.values() for r in rows) == sorted(
        r.id for rows in workers.rows.values() for r in rows
    )
    by_worker = {load.worker: load for load in workers.loads}
    for source in {move.source for move in moves}:
        assert not after.rows[source], "a device is free only if nothing is left there"
        assert by_worker[source].contended > 0
    for target in {move.target for move in moves}:
        load, rows = by_worker[target], after.rows[target]
        assert len(rows) <= load.slots
        tokens = sum(r.context + r.remaining for r in rows)
        assert not load.kv_tokens or tokens <= SAFE * load.kv_tokens
    assert state_cost_s(workers.loads, workers.rows.__getitem__, moves) == pytest.approx(workers.cost_s(moves))
    if moves:
        paid_s = sum(move.cost_s for move in moves)
        assert workers.cost_s(moves) <= workers.cost_s([]) - paid_s + 1e-6


@given(fleets())
@settings(max_examples=100, deadline=None)
def test_merging_comes_to_an_end(workers: Fleet) -> None:
    for _ in range(len(workers.loads)):
        moves = workers.merge()
        if not moves:
            return
        workers = workers.after(moves)
    assert not workers.merge()


def test_all_tails_end_up_on_one_worker() -> None:
    """That with most responses, so that least is prefilled."""
    moves = fleet(1, 3, 2, 1).merge()
    assert targets(moves) == {"0/0": "w1", "2/0": "w1", "2/1": "w1", "3/0": "w1"}


@pytest.mark.parametrize(
    "workers",
    [
        pytest.param(fleet(1, 1, contended=0.0), id="no other job wants the devices"),
        pytest.param(fleet(8, 8, profile=FLAT), id="more responses take longer in proportion"),
        pytest.param(fleet(1, 1, moves=7), id="they have moved to and fro"),
        pytest.param(fleet(1, 0, 0), id="one worker has everything, and other jobs want all devices"),
    ],
)
def test_nothing_moves(workers: Fleet) -> None:
    assert workers.merge() == []


def test_nothing_moves_to_where_it_does_not_fit() -> None:
    workers = fleet(1, 1)
    full = [replace(load, slots=1) for load in workers.loads]
    assert merge(full, workers.rows.__getitem__) == []
    small = [replace(load, kv_tokens=3000) for load in workers.loads]
    assert merge(small, workers.rows.__getitem__) == []
    assert merge(workers.loads, workers.rows.__getitem__, fits=lambda id, worker: worker != "w1" and id != "1/0") == []


def test_nothing_is_known_of_a_length_or_of_a_speed() -> None:
    workers = fleet(1, 1)
    rows = {worker: [replace(r, remaining=0.0) for r in held] for worker, held in workers.rows.items()}
    assert merge(workers.loads, rows.__getitem__) == []
    unmeasured = [workers.loads[0], replace(workers.loads[1], profile=None)]
    assert merge(unmeasured, workers.rows.__getitem__) == []


def test_tail_moves_to_a_device_that_no_other_job_wants() -> None:
    workers = fleet(2, 0)
    workers.loads[1] = replace(workers.loads[1], contended=0.0)
    assert targets(workers.merge()) == {"0/0": "w1", "0/1": "w1"}


def test_responses_do_not_move_back_while_others_want_the_device() -> None:
    """Balancing alone would give the idle worker one of two responses at once."""

    def balanced(workers: Fleet) -> list[Move]:
        return rebalance(workers.loads, workers.rows.__getitem__, typical=1000.0)

    workers = fleet(4, 4, profile=StepTime(fixed_s=0.01, each_s=0.0005))
    workers.loads = [replace(load, prefill_tok_per_s=1e6) for load in workers.loads]
    merged = workers.after(workers.merge())
    back = balanced(merged)
    assert [len(rows) for rows in merged.rows.values()] == [8, 0]
    assert {move.target for move in back} == {"w1"}
    assert keep_merged(merged.loads, merged.rows.__getitem__, back) == []
    free = [replace(load, contended=0.0) for load in merged.loads]
    assert keep_merged(free, merged.rows.__getitem__, back) == back
    # Where each response takes as long as a step, two devices are twice as fast.
    shared = fleet(0, 16, profile=FLAT)
    assert keep_merged(shared.loads, shared.rows.__getitem__, balanced(shared)) == balanced(shared) != []


def test_a_moved_response_goes_to_its_target_however_idle_others_are() -> None:
    loads = [WorkerLoad(worker=w, running=n, slots=8, profile=FLAT) for w, n in (("a", 3), ("b", 0), ("c", 0))]
    ids = ["1/0", "1/1", "2/0"]
    assert place(ids, loads, move_targets=dict.fromkeys(ids, "a")) == [(id, "a") for id in ids]


def test_placement_merges_at_the_end_of_a_step_and_assigns_to_the_target() -> None:
    ledger = Ledger()
    placement = Placement(ledger)
    for n in range(50):
        placement.lengths.finished(str(n), n, 100)
        placement.lengths.complete(str(n))
    for n, worker in enumerate(("a", "b")):
        ledger.open(episode(f"{100 + n}/0", 10, max_tokens=1000))
        placement.assign([WorkerLoad(worker=worker, running=0, slots=9)], {worker: 1}, coming=0)
        ledger.entries[f"{100 + n}/0"].episode.tokens.append(7)  # it runs
    placement._finished, placement._finished_tokens = 50, 5000

    def loads(contended: float) -> list[WorkerLoad]:
        return [
            WorkerLoad(worker=w, running=ledger.running(w), slots=9, profile=ENGINE, contended=contended) for w in "ab"
        ]

    assert placement.reclaim(loads(0.0)) == []
    [(source, entry)] = placement.reclaim(loads(1.0))
    gathering = placement.take_gathering()
    assert (gathering.moves, gathering.released) == (1, 1)
    ledger.requeue(entry)
    assert not ledger.running(source)
    [(target, _)] = placement.assign(loads(1.0), {"a": 1, "b": 1}, coming=0).items()
    assert target != source
    assert placement.reclaim(loads(1.0)) == [], "it stays there"
