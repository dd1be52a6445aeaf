"""What each policy of a run has cost, from its events one at a time. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from windfall.controller.cost.bill import Totals

Event = dict[str, Any]

ONE_POLICY: Mapping[str, Sequence[str]] = {"": ("",)}


class PolicyCosts:
    def __init__(self, bases: Mapping[str, Sequence[str]] = ONE_POLICY) -> None:
        """`bases`: the policies of each, until the event `start` says it."""
        self.bill = Totals()
        self.train_s: dict[str, float] = defaultdict(float)
        """Seconds of training by policy, without waits."""
        self._bases = bases
        self._shown: dict[str, float] = {}

    def add(self, event: Event) -> None:
        """Raises msgspec.ValidationError if another version of windfall wrote the event."""
        if event["name"] == "start" and "bases" in event:
            self._bases = msgspec.convert(event["bases"], dict[str, tuple[str, ...]])
        if event.get("bill"):
            self.bill += bill_of(event)
        if (event["kind"], event["name"]) == ("span", "train") and "error" not in event:
            self.train_s[event.get("policy", "")] += (event.get("s") or 0.0) + (event.get("early_s") or 0.0)

    def usd_of(self) -> dict[str, float]:
        """Dollars by policy. They add up to the bill."""
        return self.bill.usd_of(self._bases, self.train_s)

    def since_shown(self, policy: str) -> float | None:
        """Dollars of the policy since the last call. None: no prices are known."""
        if not self.bill.all.usd:
            return None
        before = self._shown.get(policy, 0.0)
        self._shown[policy] = now = self.usd_of().get(policy, 0.0)
        return now - before


def bill_of(event: Event) -> Totals:
    return msgspec.convert(event.get("bill") or {}, Totals)
