"""The machines that have joined the service: when each was last heard of, and what its devices do."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from windfall.errors import WindfallError
from windfall.jobs.bill import Bill
from windfall.jobs.machine.report import HeldDevice, MachineReport

GONE_S = 30.0
"""Seconds without a report after which a machine is gone."""
REPLACED_S = 10.0
"""Seconds without a report after which another process may report under the name of a machine: it may have crashed and
have joined again."""


class NameInUse(WindfallError):
    """Another process reports under the name of a machine."""


@dataclass(kw_only=True)
class LastReport:
    """What a machine said last."""

    life: str
    """Which of its processes reports."""
    seen_s: float = 0.0
    """When it was last heard of (monotonic time, seconds)."""
    ahead_s: float = 0.0
    """How much the service's clock is ahead of the machine's. The smallest difference seen: a report takes time."""
    devices: dict[str, HeldDevice] = field(default_factory=dict)


class Machines:
    def __init__(self, bill: Bill) -> None:
        self._bill = bill
        self._machines: dict[str, LastReport] = {}

    @property
    def names(self) -> list[str]:
        return list(self._machines)

    def hear(self, name: str, report: MachineReport) -> list[dict[str, Any]]:
        """Record what a machine reports. Returns the turns for the log, by the service's clock."""
        now_s, ahead_s = time.monotonic(), time.time() - report.now_s
        known = self._machines.get(name)
        if known is None or known.life != report.life:
            recent = known is not None and now_s - known.seen_s < REPLACED_S
            if recent or self._bill.has_ended(name, report.life):
                what = f"another machine has joined as {name!r}"
                raise NameInUse(what, where="--name", fix="Give every machine a --name of its own.")
            known = self._machines[name] = LastReport(life=report.life, ahead_s=ahead_s)
        known.seen_s, known.ahead_s, known.devices = now_s, min(known.ahead_s, ahead_s), report.devices
        self._bill.report(name, report.life, report.times, report.price_usd_per_h)
        return [
            msgspec.to_builtins(turn)
            | {
                "device": f"{name}/{turn.device}",
                "start_s": turn.start_s + known.ahead_s,
                "end_s": turn.end_s + known.ahead_s,
            }
            for turn in report.turns
        ]

    def forget_gone(self) -> None:
        now_s = time.monotonic()
        self._machines = {name: m for name, m in self._machines.items() if now_s - m.seen_s < GONE_S}

    def devices(self) -> dict[str, dict[str, Any]]:
        """Who has each device now, and who waits for it; like those in the snapshot of a turn server."""
        return {
            f"{name}/{device}": msgspec.to_builtins(held)
            for name, machine in self._machines.items()
            for device, held in machine.devices.items()
        }
