"""Charges the accounts of a server, and says what it does: for fleet.json, which `windfall top` shows."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

from windfall.controller.assembly import ControllerLife
from windfall.errors import WindfallError
from windfall.tinker.accounts.bill import EVENT
from windfall.tinker.fleet_sampler import FleetSampler
from windfall.tinker.service import TinkerService

EVERY_S = 1.0
"""Seconds between two looks at what was used, and at the file of accounts."""
LOG_S = 30.0
"""Seconds between two events with the bill. Not billed: what happens between the last one and a kill of the server."""
RATE_S = 10.0
"""Seconds over which rates are measured."""
RATES = {"calls": "calls_per_s", "sampled_tokens": "sampled_per_s", "trained_tokens": "trained_per_s"}


class ServerReport:
    def __init__(self, service: TinkerService, sampler: FleetSampler, life: ControllerLife) -> None:
        self._service, self._sampler, self._life = service, sampler, life
        self.url = ""
        self._sums: deque[tuple[float, dict[str, float]]] = deque([(time.monotonic(), self._counted())])
        """When, and what was counted for all accounts until then; the oldest is RATE_S old."""

    async def run(self) -> None:
        """Runs forever."""
        logged_s = time.monotonic()
        while True:
            await asyncio.sleep(EVERY_S)
            self.charge()
            await self._read_accounts()
            self._sampler.open.look()
            self._sums.append((time.monotonic(), self._counted()))
            while self._sums[-1][0] - self._sums[1][0] > RATE_S:
                self._sums.popleft()
            if time.monotonic() - logged_s >= LOG_S:
                self.write()
                logged_s = time.monotonic()

    def charge(self) -> None:
        """Charge what was used since the last time."""
        totals = self._life.dispatch.accounts.totals(asyncio.get_running_loop().time())
        self._service.bill.charge(totals, self._service.shared.turns.take(), self._sampler.take_work())

    def write(self) -> None:
        """Write the bill since the last time into the log, and how the bill of the run is split."""
        self.charge()
        bill = self._life.report.bill(asyncio.get_running_loop().time())
        self._life.events.instant(EVENT, **self._service.bill.to_fields(), **bill)

    async def _read_accounts(self) -> None:
        keys = self._service.keys
        try:
            if await asyncio.to_thread(keys.read_again):
                self._life.events.instant("tinker_accounts", accounts=", ".join(keys.names))
        except WindfallError as e:
            self._life.events.instant("tinker_accounts_wrong", why=str(e))

    def _counted(self) -> dict[str, float]:
        return {name: self._service.keys.total(name) for name in RATES}

    def describe(self) -> dict[str, Any]:
        service = self._service
        (then_s, before), (now_s, now) = self._sums[0], self._sums[-1]
        s = max(EVERY_S, now_s - then_s)
        slot_of = service.models.slots.slot_of
        models = [
            {
                "model": m.id, "account": m.account, "rank": m.spec.rank, "slot": slot_of(m), "calls": m.next_seq - 1,
                "waiting": len(m.waiting),
            }
            for m in service.models.all.values()
            if not m.unloaded
        ]  # fmt: skip
        names = dict.fromkeys([*service.keys.names, *service.bill.parts])  # may use the server, or have used it
        return {
            "url": self.url, "base": service.terms.base, "sessions": len(service.sessions.open), "models": models,
            "accounts": {name: self._account(name) for name in names},
            "bill": {**service.bill.to_fields(), "usd": service.bill.total.usd},
            **{rate: (now[name] - before[name]) / s for name, rate in RATES.items()},
        }  # fmt: skip

    def _account(self, name: str) -> dict[str, Any]:
        service = self._service
        return {
            "sessions": sum(session.account == name for session in service.sessions.open.values()),
            "models": sum(m.account == name and not m.unloaded for m in service.models.all.values()),
            "open_calls": service.keys.open_calls[name],
            **service.keys.usage(name),
        }
