"""Advice from the events of a run: kinds of workers, their rates, losses and prices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from windfall.controller.cost import prices
from windfall.controller.rollout import advisor
from windfall.controller.rollout.advisor import Advisor
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.scheduling.local_time import StepMeasurement
from windfall.controller.workers.members import WorkerState
from windfall.controller.workers.worker_value import value_curve
from windfall.events.log import EventLog
from windfall.link.messages import Capacity
from windfall.types import LOCAL, Lease

SPOT = Lease(kind="spot", device="card", price_usd_per_h=5.0)
STEP = StepMeasurement(
    tokens=100_000, local_s=2.0, local_tokens=20_000, train_s=5.0, train_wait_s=0.0, remote_wait_s=0.0, remote_s=5.0,
    workers=1.0,
)  # fmt: skip


KINDS = 4


class Run:
    """Workers that join, generate tokens and are lost, without any process."""

    def __init__(self, folder: Path, max_count: int = 8) -> None:
        self.dispatch = Dispatch(events=EventLog(folder / "events.jsonl"))
        self.advisor = Advisor(self.dispatch, responses=64, trainer_usd_per_h=80.0, max_count=max_count)
        self.now_s = 0.0

    def join(self, name: str, lease: Lease, tok_per_s: float, *, lends: bool = False) -> None:
        d = self.dispatch
        member = d.members.join(name, lease, self.now_s, lends=lends)
        member.capacity = Capacity(slots=64, state="normal", use=0.1, lent=0.0) if lends else None
        d.accounts.join(self.now_s, member.id, kind=lease.kind, usd_per_h=prices.of(lease).if_known)
        d.placement.speeds.join(member.id, lease.device)
        d.members.pull(member.id, self.now_s)
        d.members.loaded(member.id, 1, "d", 64, self.now_s)
        d.accounts.ready(self.now_s + 1.0, member.id)
        for _ in range(40):
            d.placement.speeds.observe(member.id, 32, int(tok_per_s / 10), 0.1)

    def step(self, last: StepMeasurement = STEP) -> dict[str, tuple[int, int, str]]:
        self.now_s += 10.0
        return {n: (a.now, a.count, a.why) for n, a in self.advisor.step(last, self.now_s).items()}


def test_advice_is_given_once_known_and_repeated_only_when_it_changes(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.join("a", SPOT, 4000)
    run.join(LOCAL, Lease(kind="reserved", device="big"), 10_000)
    kind = prices.kind(SPOT)
    assert run.step() == {kind: (1, 1, "not enough measurements yet")}
    (now, count, why) = run.step()[kind]
    assert (now, why) == (1, f"generation is the bottleneck: {count - 1} more would pay off")
    assert 3 <= count <= 8
    assert run.step() == {}
    assert kind in run.advisor.advice


def test_number_of_remembered_kinds_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advisor, "KINDS", KINDS)
    run = Run(tmp_path)
    for n in range(3 * KINDS):
        run.join(f"w{n}", replace(SPOT, price_usd_per_h=1.0 + n / 100), 4000)
        run.step()
        run.dispatch.members.move(f"w{n}", WorkerState.GONE, "killed")
    assert len(run.advisor.advice) == len(run.advisor._kinds) == KINDS
    newest = replace(SPOT, price_usd_per_h=1.0 + (3 * KINDS - 1) / 100)
    assert prices.kind(newest) in run.advisor.advice
    for n in range(KINDS + 5):  # kinds with workers are not limited
        run.join(f"x{n}", replace(SPOT, price_usd_per_h=100.0 + n), 4000)
    run.step()
    assert len(run.advisor.advice) == KINDS + 5


def test_kind_without_workers_is_remembered(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.join("a", SPOT, 4000)
    run.step()
    run.step()
    run.dispatch.members.move("a", WorkerState.GONE, "killed")
    assert run.step()[prices.kind(SPOT)][0] == 0
    assert run.advisor.advice[prices.kind(SPOT)].count > 0


@pytest.mark.parametrize(("losses", "pays"), [(0, True), (40, False)])
def test_workers_that_are_lost_often_do_not_pay(tmp_path: Path, losses: int, pays: bool) -> None:
    run = Run(tmp_path)
    expensive = Lease(kind="spot", device="card", price_usd_per_h=28.0)
    run.join("a", expensive, 4000)
    for n in range(losses):
        run.join(f"b{n}", expensive, 4000)
        run.dispatch.members.move(f"b{n}", WorkerState.GONE, "killed")
    run.step()
    run.step()
    assert (run.advisor.advice[prices.kind(expensive)].count > 0) is pays


def test_more_workers_have_fewer_responses_each(tmp_path: Path) -> None:
    """Reading the weights is nearly all of a step, so twice as many workers together generate hardly more. Rates
    measured at the current batch size would ask for ever more workers."""
    run = Run(tmp_path, max_count=64)
    run.join("a", SPOT, 2000)
    for batch in (4, 64):
        for _ in range(40):
            run.dispatch.placement.speeds.observe("a", batch, int(0.1 * batch / (0.015 + 0.00001 * batch)), 0.1)
    run.step()
    run.step()
    assert 1 <= run.advisor.advice[prices.kind(SPOT)].count <= 4


def test_all_engines_of_the_trainer_share_the_responses(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.join("a", SPOT, 4000)
    for name in (LOCAL, f"{LOCAL}-1", f"{LOCAL}-2"):
        run.join(name, Lease(kind="reserved", device="big"), 4000)
    run.step()
    measured, (kind,) = run.advisor._run, run.advisor._kinds.values()
    assert measured.local_profile is not None
    rate = measured.local_profile.tok_per_s
    alone = measured.local_tok_per_s * rate(64 / 3) / rate(64 / 4)  # without "a" the batches of the other three grow
    speed = value_curve(measured, kind)[0].tok_per_s
    assert speed == pytest.approx(1 / (1 / alone + 1 / measured.train_tok_per_s))


def test_without_overlap_another_worker_gains_little(tmp_path: Path) -> None:
    counts = {}
    for overlap in (True, False):
        run = Run(tmp_path)
        run.advisor = Advisor(run.dispatch, responses=64, trainer_usd_per_h=80.0, max_count=8, overlap=overlap)
        run.join("a", Lease(kind="spot", device="card", price_usd_per_h=15.0), 4000)
        run.join(LOCAL, Lease(kind="reserved", device="big"), 10_000)
        run.step()
        run.step()
        counts[overlap] = run.advisor.advice["spot card at $15.00/h"].count
    assert counts[False] < counts[True]


def test_missing_price_is_reported(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.join("a", Lease(kind="spot", device="abacus"), 4000)
    run.step()
    assert "no price is known for spot abacus" in run.step()["spot abacus"][2]


def test_each_kind_gets_its_own_advice(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.join("a", SPOT, 4000)
    run.join("b", Lease(kind="spot", device="card", price_usd_per_h=70.0), 4000)
    run.step()
    run.step()
    counts = {n: a.count for n, a in run.advisor.advice.items()}
    assert counts[prices.kind(SPOT)] > 1
    assert counts["spot card at $70.00/h"] == 0


def test_asynchronous_workers_are_not_slower_because_they_pull(tmp_path: Path) -> None:
    rates = {}
    for asynchronous in (False, True):
        run = Run(tmp_path)
        run.advisor = Advisor(
            run.dispatch, responses=64, trainer_usd_per_h=80.0, max_count=8, asynchronous=asynchronous
        )
        run.join("a", SPOT, 4000)
        run.dispatch.members.pull_s = 2.5
        run.step()
        rates[asynchronous] = run.advisor._kinds[prices.kind(SPOT)].tok_per_s
    assert rates[False] == pytest.approx(rates[True] / 2)


def test_lenders_come_first_and_replace_spot_workers(tmp_path: Path) -> None:
    """Four spot workers alone are advised to stay or grow; with lenders in use, fewer of them pay off."""
    counts = {}
    for lenders in (0, 3):
        folder = tmp_path / str(lenders)
        folder.mkdir()
        run = Run(folder)
        run.join(LOCAL, Lease(kind="reserved", device="big"), 10_000)
        for n in range(4):
            run.join(f"s{n}", SPOT, 4000)
        lent = Lease(kind="borrowed", device="card")
        for n in range(lenders):
            run.join(f"l{n}", lent, 4000, lends=True)
        for _ in range(3):
            d = run.dispatch
            here = list(d.members.here())
            d.borrowing.update(here, here, 400, lambda id: 8, d.placement.speeds.profile, run.now_s)
            run.step()
        counts[lenders] = run.advisor.advice[prices.kind(SPOT)].count
        if lenders:
            advice = run.advisor.advice[prices.kind(lent, lends=True)]
            assert (advice.now, advice.count) == (3, 3)
    assert counts[3] < counts[0]


def test_lenders_that_are_not_used_do_not_count(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.dispatch.borrowing.most = 1
    lent = Lease(kind="borrowed", device="card")
    for name in "ab":
        run.join(name, lent, 4000, lends=True)
    for _ in range(3):
        d = run.dispatch
        here = list(d.members.here())
        d.borrowing.update(here, here, 400, lambda id: 0, d.placement.speeds.profile, run.now_s)
        run.step()
    advice = run.advisor.advice[prices.kind(lent, lends=True)]
    assert (advice.now, advice.count) == (1, 1)


def test_idle_nodes_of_a_cluster_are_no_lenders(tmp_path: Path) -> None:
    """Workers with a borrowed lease that serve nobody: the run starts them, and may start more."""
    run = Run(tmp_path)
    idle = Lease(kind="borrowed", device="card")
    run.join(LOCAL, Lease(kind="reserved", device="big"), 10_000)
    run.join("a", idle, 4000)
    d = run.dispatch
    for _ in range(3):
        here = list(d.members.here())
        d.borrowing.update(here, here, 0, lambda id: 0, d.placement.speeds.profile, run.now_s)
        run.step()
    advice = run.advisor.advice[prices.kind(idle)]
    assert advice.now == 1
    assert advice.count > 1
    assert d.members.all["a"].open_slots == 64, "it does not depend on the need of the step"


def test_lender_without_slots_at_the_end_of_a_step_does_not_have_any_number_of_them(tmp_path: Path) -> None:
    run = Run(tmp_path)
    lent = Lease(kind="borrowed", device="card")
    run.join("a", lent, 4000, lends=True)
    d = run.dispatch
    here = list(d.members.here())
    d.borrowing.update(here, here, 400, lambda id: 0, d.placement.speeds.profile, run.now_s)
    d.members.all["a"].capacity = Capacity(slots=0, state="frozen", use=0.9, lent=0.0)
    run.step()
    assert run.advisor._kinds[prices.kind(lent, lends=True)].slots == 1
