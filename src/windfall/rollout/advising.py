"""What `worth` needs to know, collected from a run: after every step, how many workers of each kind would pay.

Workers of the same terms, device and price are one kind. A kind that is gone is remembered: its price and what its
workers made are known, so that it can be said whether to have it back.
"""

from __future__ import annotations

from dataclasses import dataclass

from windfall import prices
from windfall.rollout.dispatch import Dispatch
from windfall.rollout.members import Member
from windfall.rollout.offload import Measured
from windfall.rollout.worth import Advice, Kind, Run, advise
from windfall.types import LOCAL, Lease

NEWEST = 0.5
"""How much of a figure is the newest step's."""


@dataclass(slots=True, kw_only=True)
class _Seen:
    """Of one kind, so far."""

    lease: Lease
    tok_per_s: float = 0.0
    present_s: float = 0.0
    boot_s: float = 0.0
    lost: int = 0


class Advisor:
    def __init__(self, dispatch: Dispatch, *, responses: int, trainer_usd_per_h: float, most: int) -> None:
        """`responses`: of a step. `trainer_usd_per_h`: 0: by its device, if it has an engine that says which.
        `most`: workers of one kind that could be had."""
        self.advice: dict[str, Advice] = {}
        """The newest, by kind."""
        self._dispatch, self._responses, self._most = dispatch, responses, most
        self._trainer_usd_per_h = trainer_usd_per_h or None
        self._steps = 0
        self._tokens = self._train = self._local = 0.0
        self._seen: dict[str, _Seen] = {}
        self._looked_s: float | None = None

    def step(self, last: Measured, now_s: float) -> dict[str, Advice]:
        """A step has ended. Returns the advice that is new."""
        self._learn(last, now_s)
        run = Run(
            steps=self._steps, tokens_per_step=self._tokens, train_tok_per_s=self._train,
            local_tok_per_s=self._local, trainer_usd_per_h=self._trainer_usd_per_h,
        )  # fmt: skip
        kinds = {name: self._kind(name, seen) for name, seen in self._seen.items()}
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
        passed_s = now_s - (self._looked_s if self._looked_s is not None else now_s)
        self._looked_s = now_s
        here = [m for m in self._dispatch.members.here() if m.name != LOCAL]
        for member in self._dispatch.members.here():
            if member.name == LOCAL and self._trainer_usd_per_h is None:
                self._trainer_usd_per_h = prices.of(member.lease).or_none
        for member in here:
            seen = self._seen.setdefault(prices.kind(member.lease), _Seen(lease=member.lease))
            seen.present_s += min(passed_s, now_s - member.joined_s)
            if rate := self._rate(member, len(here) + 1):
                seen.tok_per_s = _mix(seen.tok_per_s, rate)
            if (boot_s := self._dispatch.accounts.of(member.id, now_s).seconds.get("booting")) is not None:
                seen.boot_s = _mix(seen.boot_s, boot_s)
        for name, seen in self._seen.items():
            seen.lost = self._dispatch.members.lost_of.get(name, 0)

    def _rate(self, member: Member, sharing: int) -> float:
        """With its part of a step's responses; 0: nobody knows."""
        batch = min(member.slots, -(-self._responses // sharing))
        return self._dispatch.giving.speeds.tok_per_s(member.id, batch) if batch else 0.0

    def _kind(self, name: str, seen: _Seen) -> Kind:
        here = sum(prices.kind(m.lease) == name for m in self._dispatch.members.here() if m.name != LOCAL)
        return Kind(
            name=name, now=here, tok_per_s=seen.tok_per_s, usd_per_h=prices.of(seen.lease).or_none,
            boot_s=seen.boot_s, pull_s=self._dispatch.members.pull_s, most=self._most,
            losses_per_h=seen.lost * 3600 / seen.present_s if seen.present_s > 0 else 0.0,
        )  # fmt: skip


def _mix(old: float, new: float) -> float:
    return new if old == 0 else (1 - NEWEST) * old + NEWEST * new
