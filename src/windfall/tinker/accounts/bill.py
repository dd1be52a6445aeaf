"""The bill of a run, split over the accounts of its server. Pure.

    trainer     by the seconds for which it worked for each account
    workers     the time in which they had work, by tokens: a prefilled one costs PREFILLED of a sampled one
    the rest    is idle: machines without work, starts of workers, pulls of weights, lost workers, traffic

The parts of all accounts and the idle rest add up to the bill of the run (`check`).

A worker at $3.60 per hour sampled for 10 s, two thirds for alice, and then had nothing to do for 10 s:

>>> from windfall.controller.cost.bill import Totals, priced
>>> bill = AccountBill()
>>> bill.charge(Totals(holders={"spot": priced({"generating": 10}, 3.6, 300)}), {}, {"alice": 200, "bob": 100})
>>> bill.charge(Totals(holders={"spot": priced({"generating": 10, "waiting": 10}, 3.6, 300)}), {}, {})
>>> {name: round(part.usd, 6) for name, part in bill.parts.items()}, round(bill.idle.usd, 6)
({'alice': 0.006667, 'bob': 0.003333}, 0.01)
>>> bill.check()
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from windfall.controller.cost.accounts import PREFILL_OVER_DECODE
from windfall.controller.cost.bill import Account, Bucket, Totals

PREFILLED = 1 / PREFILL_OVER_DECODE
"""What a prefilled token costs, if a sampled one costs 1."""
EVENT = "tinker_bill"
"""The event with a part of the run's bill and, for the whole run, its split."""
BUSY: tuple[Bucket, ...] = ("generating", "prefill_again")


class AccountCost(msgspec.Struct, frozen=True, kw_only=True):
    """What one account has used, or what is idle."""

    usd: float = 0.0
    """Machines whose price is not known cost nothing here."""
    trainer_s: float = 0.0
    worker_s: float = 0.0

    def __add__(self, other: AccountCost) -> AccountCost:
        return AccountCost(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})

    def __sub__(self, other: AccountCost) -> AccountCost:
        return AccountCost(**{name: getattr(self, name) - getattr(other, name) for name in self.__struct_fields__})


class AccountBill:
    def __init__(self) -> None:
        self.parts: dict[str, AccountCost] = {}
        """The part of each account."""
        self.idle = AccountCost()
        self._before = Totals()
        """What the controllers before this one have billed."""
        self._totals = Totals()
        """What this controller had billed when `charge` was called last."""

    @classmethod
    def restored(cls, events: Iterable[Mapping[str, Any]]) -> AccountBill:
        """The bill of a run that continues. `events`: of the controllers before this one."""
        found = cls()
        for event in events:
            if event.get("bill"):
                found._before += msgspec.convert(event["bill"], Totals)
            if event["name"] == EVENT:
                found.parts = msgspec.convert(event["accounts"], dict[str, AccountCost])
        found.idle = found.total - sum(found.parts.values(), AccountCost())
        return found

    @property
    def total(self) -> AccountCost:
        """The bill of the run."""
        return _part(self._before) + _part(self._totals)

    def charge(self, totals: Totals, trainer_s: Mapping[str, float], work: Mapping[str, float]) -> None:
        """Split what this controller has billed since the last call. `totals`: all that it has billed. Since the last
        call, by account: `trainer_s`, the seconds in which the trainer worked for it; `work`, its tokens on workers."""
        before, self._totals = self._totals, totals
        trainer, charged = _trainer(totals) - _trainer(before), AccountCost()
        s, used_s = trainer.trainer_s, sum(trainer_s.values())
        for account, seconds in trainer_s.items():
            charged += self._add(account, trainer, seconds / max(s, used_s) if used_s else 0.0)
        busy, total = _busy(totals) - _busy(before), sum(work.values())
        busy = busy if busy.worker_s > 0 else AccountCost()  # time with work may turn out to be lost: it stays charged
        for account, tokens in work.items():
            charged += self._add(account, busy, tokens / total if total else 0.0)
        self.idle += _part(totals) - _part(before) - charged

    def _add(self, account: str, cost: AccountCost, share: float) -> AccountCost:
        """Charge an account for a share of a cost."""
        part = AccountCost(usd=cost.usd * share, trainer_s=cost.trainer_s * share, worker_s=cost.worker_s * share)
        self.parts[account] = self.parts.get(account, AccountCost()) + part
        return part

    def usd(self, account: str) -> float:
        return self.parts.get(account, AccountCost()).usd

    def check(self) -> None:
        """Raise AssertionError if the parts do not add up to the bill of the run."""
        parts, total = sum(self.parts.values(), self.idle), self.total
        for name in total.__struct_fields__:
            one, other = getattr(parts, name), getattr(total, name)
            assert math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-6), f"{name}: parts {one}, bill {other}"

    def to_fields(self) -> dict[str, Any]:
        """For the event log."""
        return {"accounts": msgspec.to_builtins(self.parts), "idle": msgspec.to_builtins(self.idle)}


def _trainer(totals: Totals) -> AccountCost:
    account = totals.holders.get("trainer", Account())
    return AccountCost(usd=account.total_usd, trainer_s=account.total_s)


def _workers(totals: Totals) -> list[Account]:
    return [account for holder, account in totals.holders.items() if holder != "trainer"]


def _busy(totals: Totals) -> AccountCost:
    """The time of workers in which they had work."""
    found = _workers(totals)
    usd = sum(account.usd.get(bucket, 0.0) for account in found for bucket in BUSY)
    return AccountCost(usd=usd, worker_s=sum(account.seconds.get(bucket, 0.0) for account in found for bucket in BUSY))


def _part(totals: Totals) -> AccountCost:
    """All of a bill."""
    found = _workers(totals)
    usd, worker_s = sum(account.total_usd for account in found), sum(account.total_s for account in found)
    return _trainer(totals) + AccountCost(usd=usd, worker_s=worker_s)
