"""Device seconds and dollars of every job.

A machine reports for each of its devices how long it has worked for which job since the machine joined; "" is idle
time. Reports are cumulative, so one that is lost loses nothing. Times are whole nanoseconds: those of all jobs and of
idle time add up to the time of the device, exactly, so the bills of the jobs and of idle time are the bill of the
machines.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from windfall.errors import WindfallError

Times = dict[str, dict[str, int]]
"""Nanoseconds by device and job; "" is idle time."""
HOUR_NS = 3600 * 10**9
MOST_ENDED = 100
REMOVED = "(removed)"
"""Stands for all jobs that were removed in the place of a job's name. It cannot be the name of a job."""


@dataclass(kw_only=True)
class MachineTimes:
    prices: dict[str, float] = field(default_factory=dict)
    """$ per hour by device."""
    life: str = ""
    """Which process of the machine reports."""
    ended: list[str] = field(default_factory=list)
    """Processes that reported before it: the last MOST_ENDED. Their times are in `before`, so they cannot go on."""
    now: Times = field(default_factory=dict)
    """The last report of this process."""
    before: Times = field(default_factory=dict)
    """What earlier processes reported."""
    before_usd: dict[str, float] = field(default_factory=dict)
    """Dollars of these times by job, at the prices that they had then."""

    def times(self) -> Times:
        return _sum(self.before, self.now)

    def usd(self) -> dict[str, float]:
        found = defaultdict[str, float](float, self.before_usd)
        for device, jobs in self.now.items():
            for job, ns in jobs.items():
                found[job] += ns * self.prices.get(device, 0.0) / HOUR_NS
        return {job: max(0.0, usd) for job, usd in found.items()}


class Bill:
    def __init__(self) -> None:
        self.machines: dict[str, MachineTimes] = {}
        """By name; that of the service is ""."""

    def report(self, machine: str, life: str, times: Mapping[str, Mapping[str, int]], price: float) -> None:
        """Record how a process of a machine has used its devices so far.

        >>> bill = Bill()
        >>> bill.report("", "first", {"gpu0": {"a": HOUR_NS // 2, "": HOUR_NS // 2}}, 2.0)
        >>> bill.report("", "second", {"gpu0": {"a": HOUR_NS // 4, "b": HOUR_NS // 4}}, 2.0)
        >>> bill.usd(), bill.total_usd()
        ({'a': 1.5, '': 1.0, 'b': 0.5}, 3.0)
        """
        entry = self.machines.setdefault(machine, MachineTimes())
        if entry.life != life:
            entry.before_usd = entry.usd()
            entry.before, entry.now = entry.times(), {}
            entry.ended, entry.life = [*entry.ended, entry.life][-MOST_ENDED:], life
        entry.now = {device: dict(jobs) for device, jobs in times.items()}
        entry.prices.update(dict.fromkeys(times, price))

    def has_ended(self, machine: str, life: str) -> bool:
        """Whether another process of the machine has reported after this one."""
        return machine in self.machines and life in self.machines[machine].ended

    def devices(self) -> Times:
        """Times by device and job. Devices of other machines have the name of their machine before theirs."""
        return {
            f"{name}/{device}" if name else device: jobs
            for name, machine in self.machines.items()
            for device, jobs in machine.times().items()
        }

    def usd(self) -> dict[str, float]:
        """Dollars by job; "" is idle time."""
        found: defaultdict[str, float] = defaultdict(float)
        for machine in self.machines.values():
            for job, usd in machine.usd().items():
                found[job] += usd
        return dict(found)

    def free(self, job: str) -> None:
        """The job was removed, and another one may have its name: move what is on the name so far to REMOVED.

        >>> bill = Bill()
        >>> bill.report("", "first", {"gpu0": {"a": HOUR_NS}}, 2.0)
        >>> bill.free("a")
        >>> bill.report("", "first", {"gpu0": {"a": HOUR_NS + HOUR_NS // 2}}, 2.0)
        >>> bill.usd()["a"], bill.usd()[REMOVED], bill.total_usd()
        (1.0, 2.0, 3.0)
        """
        for machine in self.machines.values():
            usd = machine.usd().get(job, 0.0)
            for device, jobs in machine.times().items():
                row, ns = machine.before.setdefault(device, {}), jobs.get(job, 0)
                row[REMOVED], row[job] = row.get(REMOVED, 0) + ns, row.get(job, 0) - ns
            machine.before_usd[REMOVED] = machine.before_usd.get(REMOVED, 0.0) + usd
            machine.before_usd[job] = machine.before_usd.get(job, 0.0) - usd  # less than 0: it is still in `now`

    def total_usd(self) -> float:
        """The bill of the machines: all time of all devices."""
        return sum(
            sum(machine.before_usd.values())
            + sum(
                sum(jobs.values()) * machine.prices.get(device, 0.0) / HOUR_NS for device, jobs in machine.now.items()
            )
            for machine in self.machines.values()
        )

    def to_dict(self) -> dict[str, Any]:
        return {name: asdict(machine) for name, machine in self.machines.items()}

    @staticmethod
    def load(path: Path) -> Bill:
        """The bill in a file, or a new one if there is none."""
        bill = Bill()
        try:
            data = json.loads(path.read_bytes())
            bill.machines = {name: MachineTimes(**fields) for name, fields in data.items()}
            bill.usd()
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, AttributeError) as e:
            fix = "Restore it, or remove it: then the bills of all jobs begin again with 0, and so do their limits."
            raise WindfallError(f"the bill cannot be read: {e}", where=str(path), fix=fix) from e
        return bill


def _sum(first: Times, second: Times) -> Times:
    found: Times = {}
    for part in (first, second):
        for device, jobs in part.items():
            row = found.setdefault(device, {})
            for job, ns in jobs.items():
                row[job] = row.get(job, 0) + ns
    return found
