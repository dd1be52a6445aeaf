"""Every second of every worker is billed once: worked and random lives of workers, their cost and the alternative
cost."""

from __future__ import annotations

import json
import random
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windfall.controller.cost.accounts import PREFILL_OVER_DECODE, Accounts
from windfall.controller.cost.bill import Account, Bucket, Totals, priced, reserved_only


def ready(*workers: str, at_s: float = 0.0, usd_per_h: float | None = 3.6) -> Accounts:
    """Workers that are ready from the start, at a tenth of a cent per second."""
    accounts = Accounts()
    for worker in workers:
        accounts.join(at_s, worker, kind="spot", usd_per_h=usd_per_h)
        accounts.ready(at_s, worker)
    return accounts


def test_every_phase_of_a_worker_is_accounted_for() -> None:
    a = Accounts()
    a.join(10, "w", kind="spot", usd_per_h=3.6, started_s=4)
    a.pulling(12, "w")  # the first pull is part of booting
    a.ready(20, "w")
    a.busy(23, "w")
    a.frame(30, "w", 700)
    a.idle(30, "w")
    a.pulling(31, "w")
    a.ready(35, "w")
    a.busy(35, "w")
    a.moved_in(35, "w", 500, prefill_tok_per_s=250)
    a.frame(36, "w", 0)
    a.frame(40, "w", 300)
    a.draining(41, "w")
    a.frame(43, "w", 10)
    account = a.gone(44, "w", heard_s=44)
    assert account.seconds == pytest.approx(
        {"booting": 16, "waiting": 4, "pulling": 4, "generating": 11, "prefill_again": 2, "draining": 3}
    )
    assert account.total_s == pytest.approx(40)
    assert account.total_usd == pytest.approx(0.040)
    assert account.tokens == 1010


def test_work_of_a_lost_worker_after_its_last_frame_is_lost() -> None:
    a = ready("w")
    a.busy(5, "w")
    a.frame(10, "w", 100)
    account = a.gone(18, "w", heard_s=12)  # heartbeats arrived, but no tokens
    assert account.seconds == pytest.approx({"waiting": 5, "generating": 5, "lost": 8})


def test_idle_worker_loses_only_its_silent_time() -> None:
    a = ready("w")
    account = a.gone(100, "w", heard_s=92)
    assert account.seconds == pytest.approx({"waiting": 92, "lost": 8})


def test_worker_lost_while_booting_or_pulling() -> None:
    a = Accounts()
    a.join(0, "w", kind="spot", usd_per_h=1.0)
    assert a.gone(20, "w", heard_s=12).seconds == pytest.approx({"booting": 12, "lost": 8})
    a = ready("w")
    a.pulling(10, "w")
    assert a.gone(30, "w", heard_s=22).seconds == pytest.approx({"waiting": 10, "pulling": 12, "lost": 8})


def test_repeated_prefill_ends_with_the_work() -> None:
    a = ready("w")
    a.busy(0, "w")
    a.moved_in(0, "w", 1000, prefill_tok_per_s=100)  # the estimate is too high
    a.frame(4, "w", 10)
    a.idle(4, "w")
    a.busy(6, "w")
    a.frame(9, "w", 10)
    assert a.of("w", 9).seconds == pytest.approx({"prefill_again": 4, "waiting": 2, "generating": 3})


def test_unmeasured_prefill_speed_is_estimated() -> None:
    a = ready("w", "fresh")
    for worker in ("w", "fresh"):
        a.busy(0, worker)
    a.frame(10, "w", 1000)
    for worker in ("w", "fresh"):
        a.moved_in(10, worker, 2000)
    a.frame(20, "w", 0)
    assert a.of("w", 20).seconds["prefill_again"] == pytest.approx(2000 / (100 * PREFILL_OVER_DECODE))
    assert a.of("fresh", 20).seconds == {"generating": 20}, "it has generated nothing yet, so there is no estimate"


def test_paused_time_of_the_trainer_is_training() -> None:
    a = Accounts()
    a.join(0, "local", kind="reserved", usd_per_h=36.0, trainer=True)
    a.ready(10, "local")
    a.busy(10, "local")
    a.frame(30, "local", 2000)
    a.paused(30, "local")
    a.resumed(90, "local")
    a.frame(95, "local", 100)
    totals = a.totals(95)
    assert list(totals.holders) == ["trainer"]
    assert totals.holders["trainer"].seconds == pytest.approx({"booting": 10, "generating": 25, "paused": 60})
    assert totals.all.total_usd == pytest.approx(0.95)


def test_trainer_that_never_generates() -> None:
    a = Accounts()
    a.join(0, "local", kind="reserved", usd_per_h=36.0, trainer=True)
    a.paused(5, "local")
    assert a.of("local", 50).seconds == {"booting": 5, "paused": 45}


def test_worker_that_reconnects_before_it_is_given_up_is_billed_once() -> None:
    a = ready("w")
    a.join(10, "w#2", kind="spot", usd_per_h=36.0, started_s=0, name="w")
    a.ready(11, "w#2")
    assert a.gone(14, "w", heard_s=9).total_s == pytest.approx(10)
    assert a.gone(15, "w#2", heard_s=15).seconds == {"booting": 1, "waiting": 4}
    a.join(20, "w#3", kind="spot", usd_per_h=36.0, started_s=0, name="w")
    assert a.totals(20).all.total_s == pytest.approx(20), "the time away is lost, and billed"
    a.join(21, "x", kind="spot", usd_per_h=36.0, started_s=18, name="w")
    assert a.totals(21).all.total_s == pytest.approx(24), "another process of the same name is another worker"


def test_draining_worker_drains_until_it_is_gone() -> None:
    a = ready("w")
    a.draining(5, "w")
    a.ready(6, "w")
    a.paused(7, "w")
    a.resumed(8, "w")
    assert a.gone(9, "w", heard_s=9).seconds == {"waiting": 5, "draining": 4}


def test_work_may_be_assigned_before_the_weights_are_loaded() -> None:
    a = ready("w")
    a.pulling(1, "w")
    a.busy(2, "w")
    a.resumed(3, "w")  # it was not paused
    a.ready(4, "w")
    a.frame(6, "w", 1)
    assert a.of("w", 6).seconds == {"waiting": 1, "pulling": 3, "generating": 2}


def test_closed_step_is_not_changed() -> None:
    a = ready("w", "v")
    for worker in ("w", "v"):
        a.busy(0, worker)
        a.frame(5, worker, 50)
    first = a.step(10)
    a.gone(14, "w", heard_s=6)
    second = a.step(20)
    assert first.all.seconds == pytest.approx({"generating": 20})
    assert second.all.seconds == pytest.approx({"generating": 10, "lost": 4})
    assert (first.all.tokens, second.all.tokens) == (100, 0)
    assert (first + second).all.seconds == pytest.approx(a.totals(20).all.seconds)


def test_unknown_price_does_not_mean_free() -> None:
    a = ready("w", usd_per_h=None)
    assert a.totals(100).usd_per_million(1000) is None
    a.join(100, "v", kind="reserved", usd_per_h=36.0)
    totals = a.totals(200)
    assert (totals.all.unpriced_s, totals.holders["reserved"].unpriced_s) == (200, 0)
    assert totals.usd_per_million(500_000) == pytest.approx(2.0), "a lower bound"
    assert totals.usd_per_million(0) is None
    assert Totals(holders={"borrowed": priced({"generating": 5}, 0.0, 10)}).usd_per_million(10) == 0.0


def test_events_must_be_in_order_of_time() -> None:
    a = ready("w", at_s=10)
    with pytest.raises(AssertionError, match="comes before"):
        a.busy(9, "w")
    with pytest.raises(AssertionError, match="here already"):
        a.join(11, "w", kind="spot", usd_per_h=None)


def test_reserved_only_uses_the_measured_rates() -> None:
    idle_trainer = priced({"paused": 300}, 36.0, 0)
    spot = priced({"generating": 600}, 6.0, 6000)
    reserved = priced({"generating": 100, "waiting": 500}, 18.0, 4000)
    assert reserved_only(Totals(holders={"trainer": idle_trainer, "spot": spot}), train_s=100) is None
    run = Totals(holders={"trainer": idle_trainer, "spot": spot, "reserved": reserved})
    alone = reserved_only(run, train_s=100)
    assert alone is not None
    assert (alone.tok_per_s, alone.measured_on, alone.s) == (40.0, "reserved workers", 10_000 / 40 + 100)
    assert alone.usd == pytest.approx(350 * 36.0 / 3600)
    assert alone.usd_per_million(5000) == pytest.approx(3.5 / 5000 * 1e6)
    unpriced = Totals(holders={"trainer": priced({"generating": 10}, None, 100)})
    alone = reserved_only(unpriced, train_s=1)
    assert alone is not None
    assert (alone.s, alone.usd, alone.usd_per_million(1)) == (11.0, None, None)


def test_totals_survive_the_event_log() -> None:
    a = ready("w", "v")
    a.busy(1, "w")
    a.frame(3, "w", 30)
    totals = a.totals(5)
    again = msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(totals))), Totals)
    assert again == totals


def test_time_away_of_a_returning_worker_is_billed_as_lost() -> None:
    a = Accounts()
    a.join(10, "w", kind="spot", usd_per_h=3600.0, started_s=4)
    a.ready(12, "w")
    a.gone(15, "w", heard_s=15)
    a.join(18, "w#2", kind="spot", usd_per_h=3600.0, started_s=4, name="w")
    a.ready(19, "w#2")
    a.join(30, "x", kind="spot", usd_per_h=3600.0, started_s=25, name="x")  # no earlier worker of this name
    assert a.totals(30).all.seconds == pytest.approx({"booting": 8 + 1 + 5, "waiting": 3 + 11, "lost": 3})
    assert a.totals(30).all.total_usd == pytest.approx(30 - 4 + 5)


def test_time_billed_by_a_killed_controller_is_not_billed_again() -> None:
    a = Accounts(billed_s=100.0)
    a.join(110, "old", kind="spot", usd_per_h=1.0, started_s=20)
    a.join(110, "new", kind="spot", usd_per_h=1.0, started_s=104)
    bill = a.step(112)
    assert bill.all.seconds == pytest.approx({"lost": 10, "booting": 2 + 8})


def test_trainer_without_anything_to_train_on_waits() -> None:
    a = Accounts()
    a.join(0, "t", kind="reserved", usd_per_h=1.0, trainer=True)
    a.paused(0, "t")
    a.trainer_waited(10, 4.0)
    assert a.step(10).holders["trainer"].seconds == pytest.approx({"paused": 6, "waiting": 4})
    a.trainer_waited(12, 5.0)  # more than the paused time, which is the limit
    assert a.step(12).holders["trainer"].seconds == pytest.approx({"paused": 0, "waiting": 2})


def test_engine_of_the_trainer_does_not_generate_while_the_trainer_trains() -> None:
    """In asynchronous training it has work all the time. Counted as generating, it would look slower than it is."""
    a = Accounts()
    a.join(0, "t", kind="reserved", usd_per_h=1.0, trainer=True)
    a.ready(0, "t")
    a.busy(0, "t")
    assert a.trainer_trained(10, 7.0) == 7.0
    assert a.step(10).holders["trainer"].seconds == pytest.approx({"generating": 3, "paused": 7})
    a.paused(10, "t")
    assert a.trainer_trained(12, 2.0) == 0.0
    assert a.step(12).holders["trainer"].seconds["paused"] == pytest.approx(2)


EVENTS = ["pulling", "ready", "busy", "idle", "frame", "moved_in", "paused", "resumed", "draining", "gone", "step"]
stories = st.lists(
    st.tuples(st.sampled_from(EVENTS), st.integers(0, 2), st.floats(0, 50), st.integers(0, 5000)), max_size=60
)


def report(a: Accounts, event: str, now_s: float, worker: str, number: int) -> Account | None:
    match event:
        case "frame":
            a.frame(now_s, worker, number)
        case "moved_in":
            a.moved_in(now_s, worker, number, prefill_tok_per_s=float(number % 7))
        case "gone":
            return a.gone(now_s, worker, heard_s=now_s - number / 100)
        case _:
            getattr(a, event)(now_s, worker)
    return None


@given(stories)
@settings(max_examples=300, deadline=None)
def test_every_second_is_in_one_bucket_of_one_step(story: list[tuple[str, int, float, int]]) -> None:
    a, now_s = Accounts(), 100.0
    lives: dict[str, tuple[float, float]] = {}  # worker: start, price
    generation, ended_s, usd, tokens = [0, 0, 0], 0.0, 0.0, 0
    steps: list[Totals] = []
    for event, which, wait_s, number in story:
        now_s += wait_s
        worker = f"w{which}#{generation[which]}"
        if event == "step":
            steps.append(a.step(now_s))
            continue
        if worker not in lives:
            lives[worker] = (now_s - number / 1000, 1.0 + which)
            a.join(now_s, worker, kind="spot", usd_per_h=1.0 + which, started_s=lives[worker][0])
        tokens += number if event == "frame" else 0
        account = report(a, event, now_s, worker, number)
        if account is not None:
            start_s, price = lives.pop(worker)
            generation[which] += 1
            assert account.total_s == pytest.approx(now_s - start_s)
            ended_s += now_s - start_s
            usd += (now_s - start_s) * price / 3600
        for w, (start_s, _) in lives.items():
            assert a.of(w, now_s).total_s == pytest.approx(now_s - start_s)
    now_s += 1
    usd += sum((now_s - start_s) * price / 3600 for start_s, price in lives.values())
    total = a.totals(now_s).all
    assert total.total_s == pytest.approx(ended_s + sum(now_s - start_s for start_s, _ in lives.values()))
    assert total.total_usd == pytest.approx(usd)
    assert total.tokens == tokens
    steps.append(a.step(now_s))
    summed = sum(steps, Totals()).all
    for bucket in get_args(Bucket):
        assert summed.seconds.get(bucket, 0.0) == pytest.approx(total.seconds.get(bucket, 0.0), abs=1e-6)
        assert all(s.all.seconds.get(bucket, 0.0) >= 0 for s in steps)


def test_repeated_prefill_does_not_depend_on_the_number_of_frames() -> None:
    def life(frames: int) -> Account:
        a = ready("w")
        a.busy(0, "w")
        a.moved_in(0, "w", 300, prefill_tok_per_s=100)
        for n in range(1, frames + 1):
            a.frame(10 * n / frames, "w", 1)
        return a.of("w", 10)

    assert life(1).seconds == pytest.approx({"prefill_again": 3, "generating": 7})
    assert life(1000).seconds == pytest.approx(life(1).seconds)


def test_same_events_give_the_same_bill() -> None:
    def run() -> Totals:
        rng, a = random.Random(5), ready("w0", "w1", "w2")
        for n in range(500):
            report(a, rng.choice(EVENTS[:8]), n * 0.3, f"w{rng.randrange(3)}", rng.randrange(100))
        return a.totals(200)

    assert run() == run()


def test_dollars_of_policies_add_up_to_the_bill() -> None:
    """Two trainers, one of them shared and replaced, and workers with tokens of all policies, of one, and of none."""
    bases = {"solver": ("solver",), "verifier": ("verifier", "critic")}
    accounts = Accounts()
    for base in bases:
        accounts.join(0.0, f"trainer {base}", kind="reserved", usd_per_h=36.0, trainer=True, base=base)
        accounts.paused(0.0, f"trainer {base}")
    for worker, made in (("a", {"solver": 10, "verifier": 20, "critic": 30}), ("b", {"solver": 5}), ("c", {})):
        accounts.join(0.0, worker, kind="reserved" if worker == "c" else "spot", usd_per_h=3.6)
        accounts.ready(10.0, worker)
        accounts.busy(10.0, worker)
        if made:
            accounts.frame(50.0, worker, sum(made.values()), made)
    accounts.gone(60.0, "trainer verifier", heard_s=60.0)
    accounts.join(70.0, "trainer again", kind="reserved", usd_per_h=36.0, trainer=True, base="verifier")
    accounts.paused(70.0, "trainer again")
    first = accounts.step(100.0)
    accounts.trainer_waited(110.0, 4.0, "solver")
    assert accounts.totals(110.0).trainers["solver"].seconds == pytest.approx({"paused": 106.0, "waiting": 4.0})
    assert "waiting" not in accounts.totals(110.0).trainers["verifier"].seconds
    total = first + accounts.step(110.0)
    assert set(total.trainers) == set(bases)
    shares = total.usd_of(bases, {"verifier": 30.0, "critic": 10.0})
    assert sum(shares.values()) == pytest.approx(total.all.total_usd)
    spot, reserved = total.holders["spot"].total_usd, total.holders["reserved"].total_usd
    assert shares["solver"] == pytest.approx(1.1 + spot * 15 / 65 + reserved / 3)
    assert shares["critic"] == pytest.approx(total.trainers["verifier"].total_usd / 4 + spot * 30 / 65 + reserved / 3)
