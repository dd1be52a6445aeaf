"""The bill of a run, split over accounts: the parts and the idle rest add up to it, also over restarts."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from windfall.controller.cost.accounts import Accounts
from windfall.controller.cost.bill import Totals, add, priced
from windfall.tinker.accounts.bill import EVENT, PREFILLED, AccountBill


def test_the_trainer_is_paid_by_seconds() -> None:
    bill = AccountBill()
    bill.charge(Totals(holders={"trainer": priced({"paused": 10}, 36.0, 0)}), {"alice": 6, "bob": 2}, {})
    assert {name: round(part.usd, 9) for name, part in bill.parts.items()} == {"alice": 0.06, "bob": 0.02}
    assert bill.idle.trainer_s == pytest.approx(2)
    # Calls that overlap take no more time than there was.
    bill.charge(Totals(holders={"trainer": priced({"paused": 20}, 36.0, 0)}), {"alice": 15, "bob": 15}, {})
    assert bill.parts["bob"].trainer_s == pytest.approx(7)
    bill.check()


def test_workers_are_paid_by_tokens_while_they_have_work() -> None:
    bill, worker = AccountBill(), priced({"booting": 5, "generating": 6, "prefill_again": 4}, 36.0, 0)
    bill.charge(Totals(holders={"spot": worker}), {}, {"alice": 50, "bob": 500 * PREFILLED})
    assert [part.worker_s for part in bill.parts.values()] == [pytest.approx(5)] * 2
    assert bill.idle.worker_s == pytest.approx(5)
    bill.check()


def test_work_without_a_price_has_seconds_but_no_dollars() -> None:
    bill = AccountBill()
    bill.charge(Totals(holders={"spot": priced({"generating": 6}, None, 0)}), {}, {"alice": 1})
    assert (bill.usd("alice"), bill.parts["alice"].worker_s) == (0.0, 6.0)
    bill.check()


def test_parts_add_up_whatever_happens_to_workers_and_the_server() -> None:
    rng = random.Random(3)
    events: list[dict[str, Any]] = []
    for life in range(4):
        bill, accounts, now = AccountBill.restored(events), Accounts(), 1000.0 * life
        accounts.join(now, "trainer", kind="reserved", usd_per_h=20.0, trainer=True)
        accounts.paused(now, "trainer")
        here: list[str] = []
        for n in range(60):
            now += rng.uniform(0.1, 3)
            match rng.randrange(4):
                case 0:
                    here.append(f"w{life}-{n}")
                    accounts.join(now, here[-1], kind="spot", usd_per_h=rng.choice([3.0, None]))
                    accounts.ready(now, here[-1])
                    accounts.busy(now, here[-1])
                case 1 if here:
                    accounts.gone(now, here.pop(rng.randrange(len(here))), heard_s=now)  # its last work is lost
                case 2 if here:
                    accounts.frame(now, rng.choice(here), tokens=5)
                case _:
                    accounts.traffic_usd += 0.001
            used = {name: rng.uniform(0, 2) for name in ("alice", "bob") if rng.random() < 0.7}
            bill.charge(accounts.totals(now), used, {name: rng.randrange(9) for name in used})
            bill.check()
            if n % 20 == 19:
                events.append({"name": EVENT, "bill": msgspec.to_builtins(accounts.step(now)), **bill.to_fields()})
        events.append({"name": "end", "bill": msgspec.to_builtins(accounts.step(now + 5))})  # nobody had work
    found = AccountBill.restored(events)
    found.check()
    run = add(*(msgspec.convert(event["bill"], Totals).all for event in events))
    assert run.total_usd == pytest.approx(found.idle.usd + sum(part.usd for part in found.parts.values()))
    assert all(part.usd > 0 for part in (found.idle, *found.parts.values()))
