"""From what happens in a run to advice: kinds of workers, their rates, losses and prices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from windfall.cost import prices
from windfall.events.log import EventLog
from windfall.rollout import advisor
from windfall.rollout.advisor import Advisor
from windfall.rollout.dispatch import Dispatch
from windfall.scheduling.members import WorkerState
from windfall.scheduling.seed_time import Measured
from windfall.types import LOCAL, Lease

SPOT = Lease(kind="spot", device="card", price_usd_per_h=5.0)
STEP = Measured(
    tokens=100_000, seed_s=2.0, local_tokens=20_000, train_s=5.0, train_wait_s=0.0, remote_wait_s=0.0, remote_s=5.0,
    workers=1.0,
)  # fmt: skip


KINDS = 4


class Run:
    """Workers that join, make tokens, and are lost, without any process."""

    def __init__(self, folder: Path, most: int = 8) -> None:
        self.dispatch = Dispatch(events=EventLog(folder / "events.jsonl"))
        self.advisor = Advisor(self.dispatch, responses=64, trainer_usd_per_h=80.0, most=most)
        self.now_s = 0.0

    def join(self, name: str, lease: Lease, tok_per_s: float) -> None:
        d = self.dispatch
        member = d.members.join(name, lease, self.now_s)
        d.accounts.join(self.now_s, member.id, kind=lease.kind, usd_per_h=prices.of(lease).or_none)
        d.giving.speeds.join(member.id, lease.device)
        d.members.pull(member.id, self.now_s)
        d.members.loaded(member.id, 1, "d", 64, self.now_s)
        d.accounts.ready(self.now_s + 1.0, member.id)
        for _ in range(40):
            d.giving.speeds.observe(member.id, 32, int(tok_per_s / 10), 0.1)

    def step(self, last: Measured = STEP) -> dict[str, tuple[int, int, str]]:
        self.now_s += 10.0
        return {n: (a.now, a.count, a.why) for n, a in self.advisor.step(last, self.now_s).items()}


def test_what_a_kind_is_worth_is_said_when_it_is_known_and_again_only_when_it_changes(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.join("a", SPOT, 4000)
    run.join(LOCAL, Lease(kind="reserved", device="big"), 10_000)
    kind = prices.kind(SPOT)
    assert run.step() == {kind: (1, 1, "not enough measured yet")}
    (now, count, why) = run.step()[kind]
    assert (now, why) == (1, f"generation is the bottleneck: {count - 1} more pay")
    assert 3 <= count <= 8
    assert run.step() == {}
    assert kind in run.advisor.advice


def test_prices_that_change_all_day_are_not_remembered_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advisor, "KINDS", KINDS)
    run = Run(tmp_path)
    for n in range(3 * KINDS):
        run.join(f"w{n}", replace(SPOT, price_usd_per_h=1.0 + n / 100), 4000)
        run.step()
        run.dispatch.members.move(f"w{n}", WorkerState.GONE, "killed")
    assert len(run.advisor.advice) == len(run.advisor._seen) == KINDS
    newest = replace(SPOT, price_usd_per_h=1.0 + (3 * KINDS - 1) / 100)
    assert prices.kind(newest) in run.advisor.advice
    for n in range(KINDS + 5):  # all that are here count, however many
        run.join(f"x{n}", replace(SPOT, price_usd_per_h=100.0 + n), 4000)
    run.step()
    assert len(run.advisor.advice) == KINDS + 5


def test_a_kind_that_is_gone_is_remembered(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.join("a", SPOT, 4000)
    run.step()
    run.step()
    run.dispatch.members.move("a", WorkerState.GONE, "killed")
    assert run.step()[prices.kind(SPOT)][0] == 0
    assert run.advisor.advice[prices.kind(SPOT)].count > 0


@pytest.mark.parametrize(("losses", "pays"), [(0, True), (40, False)])
def test_who_is_taken_away_all_the_time_does_not_pay(tmp_path: Path, losses: int, pays: bool) -> None:
    run = Run(tmp_path)
    dear = Lease(kind="spot", device="card", price_usd_per_h=28.0)
    run.join("a", dear, 4000)
    for n in range(losses):
        run.join(f"b{n}", dear, 4000)
        run.dispatch.members.move(f"b{n}", WorkerState.GONE, "killed")
    run.step()
    run.step()
    assert (run.advisor.advice[prices.kind(dear)].count > 0) is pays


def test_more_workers_have_fewer_responses_each(tmp_path: Path) -> None:
    """Reading the weights is nearly all of a step: what twice as many make together is hardly more. Rates measured at
    today's batch would ask for ever more workers."""
    run = Run(tmp_path, most=64)
    run.join("a", SPOT, 2000)
    for batch in (4, 64):
        for _ in range(40):
            run.dispatch.giving.speeds.observe("a", batch, int(0.1 * batch / (0.015 + 0.00001 * batch)), 0.1)
    run.step()
    run.step()
    assert 1 <= run.advisor.advice[prices.kind(SPOT)].count <= 4


def test_without_overlap_another_worker_gains_little(tmp_path: Path) -> None:
    counts = {}
    for overlap in (True, False):
        run = Run(tmp_path)
        run.advisor = Advisor(run.dispatch, responses=64, trainer_usd_per_h=80.0, most=8, overlap=overlap)
        run.join("a", Lease(kind="spot", device="card", price_usd_per_h=15.0), 4000)
        run.join(LOCAL, Lease(kind="reserved", device="big"), 10_000)
        run.step()
        run.step()
        counts[overlap] = run.advisor.advice["spot card at $15.00/h"].count
    assert counts[False] < counts[True]


def test_without_a_price_it_says_so(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.join("a", Lease(kind="spot", device="abacus"), 4000)
    run.step()
    assert "no price is known for spot abacus" in run.step()["spot abacus"][2]


def test_two_kinds_are_two_answers(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.join("a", SPOT, 4000)
    run.join("b", Lease(kind="spot", device="card", price_usd_per_h=70.0), 4000)
    run.step()
    run.step()
    counts = {n: a.count for n, a in run.advisor.advice.items()}
    assert counts[prices.kind(SPOT)] > 1
    assert counts["spot card at $70.00/h"] == 0
