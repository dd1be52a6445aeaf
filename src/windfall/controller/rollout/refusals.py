"""Workers that refuse the run's model, and when that ends the run. Pure.

A worker that builds its engine may refuse the model: its self-test measured a difference, or its memory is too small.
A single refusal concerns only one machine: the other workers do the work. The run ends when all of these hold:

- no worker has ever been ready. Once one has been, the model works somewhere, and the run waits for such a worker;
- work is queued, and REFUSED_S seconds have passed since the first refusal. A worker that left for another reason might
  have been able to do the work, so the run waits equally long for its replacement;
- no worker is still starting.

If workers that refuse are restarted again and again, one is always starting. Therefore after REFUSALS refusals the run
waits neither for replacements nor for workers that joined more recently than the slowest refusal took.
"""

from __future__ import annotations

from collections.abc import Iterable

from windfall.controller.scheduling.members import Member
from windfall.errors import WindfallError

REFUSED_S = 120.0
REFUSALS = 8
MAX_CHARS = 2000
"""Characters of a refusal that are kept: it says what was measured and what to do."""


class Refusals:
    def __init__(self) -> None:
        self.count = 0
        self._since_s = self._other_s = 0.0
        """When the first worker refused, and when the last worker left for another reason."""
        self._slowest_s = 0.0
        """Longest time from joining to refusing."""
        self._worker = self._why = ""
        """The worker that refused last, and its reason."""
        self._ready = False

    def ready(self) -> None:
        """A worker can run the model."""
        self._ready = True

    def refused(self, member: Member, why: str, now_s: float) -> None:
        """A worker refused the model."""
        if not self.count:
            self._since_s = now_s
        self.count += 1
        self._slowest_s = max(self._slowest_s, now_s - member.joined_s)
        self._worker, self._why = member.id, why[:MAX_CHARS]

    def gone(self, member: Member, now_s: float) -> None:
        """A worker left, for whatever reason."""
        if member.id != self._worker:
            self._other_s = now_s

    def check(self, here: Iterable[Member], now_s: float) -> WindfallError | None:
        """The error that ends a run whose work is queued, if no worker can be expected to do that work."""
        if self._ready or not self.count:
            return None
        many = self.count >= REFUSALS
        since_s = self._since_s if many else max(self._since_s, self._other_s)
        if now_s - since_s < REFUSED_S:
            return None
        if any(not many or now_s - worker.joined_s > self._slowest_s for worker in here):
            return None
        return WindfallError(
            f"no worker can run the model: {self.count} refused it, and none has ever been ready (waited "
            f"{REFUSED_S:g} s). Worker {self._worker} says: {self._why}",
            where="fleet",
            fix="Correct that, or add a worker that can run the model. Then continue with `windfall resume`.",
        )
