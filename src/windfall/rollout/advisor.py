"""What `worth` needs to know, collected from a run: after every step, how many workers of each kind would pay.

Workers of the same terms, device and price are one kind. A kind that is gone is remembered: its price and what its
workers made are known, so that it can be said whether to have it back. Spot prices change all day, and each is a kind:
only the newest that are gone are remembered.
"""

from __future__ import annotations

from dataclasses import dataclass

from windfall.cost import prices
from windfall.rollout.dispatch import Dispatch
from windfall.scheduling.members import WorkerState
from windfall.scheduling.seed_time import Measured
from windfall.scheduling.worker_speed import Profile
from windfall.scheduling.worker_value import Advice, RunMeasurements, WorkerKind, advise
from windfall.types import LOCAL, Lease

KINDS = 16
"""Kinds that are remembered, unless more are here."""
NEWEST = 0.5
"""How much of a figure is the newest step's."""


@dataclass(slots=True, kw_only=True)
class _Seen:
    """Of one kind, so far."""

    lease: Lease
    tok_per_s: float = 0.0
    """While it has work, and pulls."""
    boot_s: float = 0.0
    """With its first pull."""
    profile: Profile | None = None
    slots: int = 0


class Advisor:
    def __init__(
        self, dispatch: Dispatch, *, responses: int, trainer_usd_per_h: float, most: int, overlap: bool = True
    ) -> None:
        """`responses`: of a step. `trainer_usd_per_h`: 0: by its device, if it has an engine that says which.
        `most`: workers of one kind that could be had. `overlap`: groups are trained on while others are made."""
        self.advice: dict[str, Advice] = {}
        """The newest, by kind."""
        self._dispatch, self._responses, self._most, self._overlap = dispatch, responses, most, overlap
        self._trainer_usd_per_h = trainer_usd_per_h or None
        self._steps = 0
        self._tokens = self._train = self._local = 0.0
        self._seen: dict[str, _Seen] = {}
        self._local_profile: Profile | None = None

    def step(self, last: Measured, now_s: float) -> dict[str, Advice]:
        """A step has ended. Returns the advice that is new."""
        self._learn(last, now_s)
        run = RunMeasurements(
            steps=self._steps, tokens_per_step=self._tokens, train_tok_per_s=self._train,
            local_tok_per_s=self._local, trainer_usd_per_h=self._trainer_usd_per_h, responses=self._responses,
            local_profile=self._local_profile, overlap=self._overlap,
        )  # fmt: skip
        kinds = {name: self._kind(name, seen, now_s) for name, seen in self._seen.items()}
        said = {n: advise(run, k, [o for m, o in kinds.items() if m != n]) for n, k in kinds.items()}
        new = {n: a for n, a in said.items() if not self._same(n, a)}
        self.advice = said
        return new

    def _same(self, name: str, advice: Advice) -> bool:
        before = self.advice.get(name)
        return before is not None and (before.count, before.now, before.why) == (advice.count, advice.now, advice.why)

    def _learn(self, last: Measured, now_s: float) -> None:
        self._steps += 1
        self._tokens = _mix(self._tokens, last.tokens)
        if last.train_s > 0:
            self._train = _mix(self._train, last.tokens / last.train_s)
        if last.seed_s > 0 and last.local_tokens:
            self._local = _mix(self._local, last.local_tokens / last.seed_s)
        local = [m for m in self._dispatch.members.here() if m.name == LOCAL]
        here = [m for m in self._dispatch.members.here() if m.name != LOCAL and m.booted]
        for member in local:
            self._trainer_usd_per_h = self._trainer_usd_per_h or prices.of(member.lease).or_none
            self._local_profile = self._dispatch.giving.speeds.profile(member.id)
        step_s = max(last.remote_s, last.seed_s, 1e-9)
        pulled = max(0.0, 1 - self._dispatch.members.pull_s / step_s)
        for member in here:
            kind = prices.kind(member.lease)
            seen = self._seen[kind] = self._seen.pop(kind, None) or _Seen(lease=member.lease)  # the newest come last
            seen.slots, seen.profile = member.slots, self._dispatch.giving.speeds.profile(member.id)
            if rate := self._dispatch.giving.rate(member, self._responses, len(here) + len(local)):
                seen.tok_per_s = _mix(seen.tok_per_s, rate * pulled)
            if (boot_s := self._dispatch.accounts.of(member.id, now_s).seconds.get("booting")) is not None:
                seen.boot_s = _mix(seen.boot_s, boot_s)
        most = max(KINDS, len({prices.kind(member.lease) for member in here}))
        for kind in list(self._seen)[: max(0, len(self._seen) - most)]:
            del self._seen[kind]

    def _kind(self, name: str, seen: _Seen, now_s: float) -> WorkerKind:
        """Losses are those of the workers that are remembered, per hour that these were there."""
        alike = [m for m in self._dispatch.members.all.values() if m.name != LOCAL and prices.kind(m.lease) == name]
        here = [m for m in alike if m.state is not WorkerState.GONE]
        present_s = sum((m.seen_s if m.state is WorkerState.GONE else now_s) - m.joined_s for m in alike)
        lost = sum(m.taken for m in alike)
        return WorkerKind(
            name=name, now=len(here), tok_per_s=seen.tok_per_s, usd_per_h=prices.of(seen.lease).or_none,
            boot_s=seen.boot_s, most=self._most, profile=seen.profile, slots=seen.slots,
            losses_per_h=lost * 3600 / present_s if present_s > 0 else 0.0,
        )  # fmt: skip


def _mix(old: float, new: float) -> float:
    return new if old == 0 else (1 - NEWEST) * old + NEWEST * new
