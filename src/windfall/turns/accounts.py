"""Which job is charged for the time of each device: at any moment one, or several that run beside each other, or none
while the device is idle. Pure; times are whole nanoseconds, so the sums equal the time that has passed, exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

IDLE = ""
"""Stands for idle time in the place of a job's name."""


class DeviceAccounts:
    """
    >>> accounts = DeviceAccounts(["gpu"], now_ns=0)
    >>> accounts.hold("gpu", {"a": 1.0}, now_ns=10)
    >>> accounts.hold("gpu", {"a": 3.0, "b": 1.0}, now_ns=20)
    >>> accounts.hold("gpu", {}, now_ns=31)
    >>> accounts.charged(now_ns=40)
    {'gpu': {'': 19, 'a': 18, 'b': 3}}
    """

    def __init__(self, devices: Iterable[str], now_ns: int) -> None:
        self._charged: dict[str, dict[str, int]] = {device: {IDLE: 0} for device in devices}
        self._held: dict[str, dict[str, float]] = {device: {} for device in self._charged}
        self._since_ns = dict.fromkeys(self._charged, now_ns)

    def hold(self, device: str, jobs: Mapping[str, float], now_ns: int) -> None:
        """These jobs have the device from now on, each with a weight by which their common time is split."""
        self._settle(device, now_ns)
        self._held[device] = dict(jobs)

    def charged(self, now_ns: int) -> dict[str, dict[str, int]]:
        """Nanoseconds of every device by job; idle time by "". They add up to the time that the device was there."""
        for device in self._charged:
            self._settle(device, now_ns)
        return {device: dict(jobs) for device, jobs in self._charged.items()}

    def saved(self, now_ns: int) -> dict[str, Any]:
        """What `restored` takes, as JSON."""
        return {"charged_ns": self.charged(now_ns)}

    @classmethod
    def restored(cls, saved: Mapping[str, Any], devices: Iterable[str], now_ns: int) -> DeviceAccounts:
        """The accounts go on. The time between `saved` and now is not charged. Devices that are gone keep what was
        charged."""
        accounts = cls([*devices], now_ns)
        for device, jobs in saved["charged_ns"].items():
            accounts._charged[device] = {IDLE: 0, **{job: int(ns) for job, ns in jobs.items()}}
        return accounts

    def _settle(self, device: str, now_ns: int) -> None:
        if device not in self._since_ns:  # it was there before the restart
            return
        passed_ns = max(0, now_ns - self._since_ns[device])
        self._since_ns[device] += passed_ns
        held, charged = self._held[device] or {IDLE: 1.0}, self._charged[device]
        left_ns, total = passed_ns, sum(held.values())
        for n, (job, weight) in enumerate(held.items(), 1):
            part_ns = left_ns if n == len(held) else min(left_ns, round(passed_ns * weight / total))
            charged[job] = charged.get(job, 0) + part_ns
            left_ns -= part_ns
